"""What decides the graph of a model: element type, interface, numerics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from generic_export.devices import CPU, devices_of
from generic_export.errors import OptionError
from t2n_llm.option import Panel, option, refuse_invalid

if TYPE_CHECKING:
    import torch

    from generic_export.inference_target import TractNNEF
    from t2n_llm.model_graph import ModelGraph

DTYPES = ("f16", "f32")

ACTIVATIONS = ("auto", "f16", "f32")

CACHE_DTYPES = ("auto", "f16", "f32")

ISLANDS = ("auto", "always")

ATTENTIONS = ("auto", "products", "sdpa")

LATENTS = ("auto", "absorbed", "expanded")

DEFAULT_IMAGE_SIZE = 448
"""Height and width of images, for vision models that take any size."""

KV_CACHES: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Bits of a quantised cache, by the name of the option."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the element type that `f16` or `f32` names."""
    import torch

    return {"f16": torch.float16, "f32": torch.float32}[name]


@dataclass(frozen=True)
class GraphOptions:
    """Options that determine the graph. Each field carries its description.

    Raises:
        OptionError: an option is invalid or contradicts another.
    """

    dtype: str = option("f16", "dtype of weights and KV cache: f16 or f32.")
    activations: str = option(
        "auto",
        "dtype of activations: f16, f32 or auto (f32).",
        Panel.GRAPH,
        choices=ACTIVATIONS,
        noun="dtype of activations",
    )
    f32_residual: str = option(
        "auto",
        "f32 residual streams. auto: only where rescaling fails; always: never rescale.",
        Panel.GRAPH,
        choices=ISLANDS,
        noun="f32 residual streams",
    )
    cache_dtype: str = option(
        "auto",
        "KV-cache dtype. auto: --dtype, or f32 near the f16 limit.",
        Panel.GRAPH,
        choices=CACHE_DTYPES,
        noun="dtype of the KV cache",
    )
    device: tuple[str, ...] = option(("cpu",), "Target device: cpu, cuda or metal; repeatable.", metavar="DEVICE")
    attention: str = option(
        "auto",
        "products: grouped matmuls, fastest on CPUs. sdpa: tract's operator. auto.",
        Panel.GRAPH,
        choices=ATTENTIONS,
        noun="attention",
    )
    mla: str = option(
        "auto",
        "Latent attention (DeepSeek): absorbed, expanded or auto (absorbed).",
        Panel.GRAPH,
        choices=LATENTS,
        noun="latent attention",
    )
    num_logits_to_keep: int = option(
        1,
        "Return logits for the last N positions; 0: all.",
        Panel.GRAPH,
        minimum=0,
        advice="Use 1 (last token), 0 (all), or more.",
    )
    batch: bool = option(False, "Make the batch size a symbol B instead of 1.", Panel.GRAPH)
    f32_linear_accumulation: bool = option(False, "Accumulate f16 matmuls in f32.", Panel.GRAPH)
    f32_attention: bool = option(False, "Compute attention in f32.", Panel.GRAPH)
    f32_norm: bool = option(False, "Compute norms in f32, including scale and shift.", Panel.GRAPH)
    stateful: bool = option(False, "The engine keeps the KV cache; input_ids is the only input.", Panel.GRAPH)
    kv_cache: str | None = option(
        None,
        "int8 or int4: --stateful with a quantized KV cache.",
        Panel.GRAPH,
        metavar="TYPE",
        choices=tuple(KV_CACHES),
        noun="cache type",
    )
    window_cache: bool = option(False, "Sliding-window layers cache their window only.", Panel.GRAPH)
    keep_f32: tuple[str, ...] = option(
        (), "Keep matching parameters in f32; repeatable.", Panel.GRAPH, metavar="PATTERN"
    )
    fragments: bool = option(
        False,
        "Write repeated layers as calls of one NNEF fragment.",
        Panel.GRAPH,
    )
    prefill_chunk: int | None = option(
        None,
        "Recommended prompt tokens per call, recorded in export.json.",
        Panel.GRAPH,
        minimum=1,
        metavar="N",
    )
    image_size: int | None = option(None, "Height and width of images, for models that take any size.", Panel.GRAPH)
    frontend: bool = option(
        True,
        "Export the preprocessing of audio or images too.",
        Panel.GRAPH,
        flags=("--frontend/--no-frontend",),
    )
    towers: bool = option(
        False,
        "Export text encoder, image encoder and scorer separately.",
        Panel.GRAPH,
    )

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(
                f"dtype {self.dtype!r} is not supported: tract runs {' and '.join(DTYPES)} models.",
                f"Use --dtype {' or --dtype '.join(DTYPES)}.",
            )
        refuse_invalid(self)
        object.__setattr__(self, "device", devices_of(self.device))
        if self.dtype == "f32" and self.activations == "f16":
            raise OptionError(
                "--activations f16 does not apply to f32 weights.", "Omit --activations, or use --dtype f16."
            )
        if self.f32_residual == "always" and self.computes_in == "f32":
            raise OptionError(
                "--f32-residual does not apply to f32 activations.",
                "Omit --f32-residual, or use --activations f16.",
            )
        if self.cache_dtype not in ("auto", self.dtype) and (not self.mixed or self.kv_cache is not None):
            raise OptionError(
                f"--cache-dtype {self.cache_dtype} requires f16 weights, f32 activations and a cache that is "
                "not quantized.",
                "Omit --cache-dtype, or omit --activations f16 and --kv-cache.",
            )
        if self.window_cache and self.engine_keeps_cache:
            raise OptionError(
                "--window-cache does not apply to a cache that the engine keeps: such caches only grow.",
                "Omit --window-cache, or omit --stateful and --kv-cache.",
            )
        if self.batch and self.engine_keeps_cache:
            raise OptionError(
                "--batch makes the batch size a symbol, but an engine that keeps the cache needs a fixed batch size.",
                "Omit --batch, or omit --stateful and --kv-cache.",
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that the graph computes in."""
        return torch_dtype(self.computes_in)

    @property
    def computes_in(self) -> str:
        """`f16` or `f32`: the dtype of activations."""
        return "f32" if self.mixed else self.dtype

    @property
    def mixed(self) -> bool:
        """Whether activations are f32 while weights and caches are f16."""
        return self.dtype == "f16" and self.activations != "f16"

    @property
    def half_cache(self) -> bool:
        """Whether the KV cache is f16 while activations are f32."""
        return self.mixed and self.cache_dtype != "f32"

    @property
    def keeps_half_cache(self) -> bool:
        """Whether the KV cache is f16 and not quantized."""
        return self.kv_cache is None and (self.half_cache or self.computes_in == "f16")

    @property
    def may_widen_cache(self) -> bool:
        """Whether the KV cache is f16 by default, so that the check may change it to f32."""
        return self.half_cache and self.kv_cache is None and self.cache_dtype == "auto"

    @property
    def cache_decides_attention(self) -> bool:
        """Whether attention has another form for caches in f32: the operator padded for a GPU reads f16."""
        return self.may_widen_cache and self.attention != "products" and any(device != CPU for device in self.device)

    @property
    def absorbs_latents(self) -> bool:
        """Whether latent attention reads the cached latents without expanding them."""
        return self.mla != "expanded"

    @property
    def kv_bits(self) -> int | None:
        """8 or 4 if the engine quantizes the KV cache, else None."""
        return KV_CACHES[self.kv_cache] if self.kv_cache else None

    @property
    def engine_keeps_cache(self) -> bool:
        """Whether the KV cache is an engine state from the start."""
        return self.stateful or self.kv_cache is not None

    @property
    def rounds_by_products(self) -> bool:
        """Whether matmuls, and not casts, round new keys and values to f16."""
        from generic_export.inference_target.tract.engines.device_forms import forms_for
        from generic_export.inference_target.tract.target import LATEST_VERSION
        from generic_export.inference_target.version import SemanticVersion

        return forms_for(self.device, SemanticVersion.parse(LATEST_VERSION)).rounded_cache

    def target(self, graph: ModelGraph) -> TractNNEF:
        """Return the target of a graph: numerics, symbols, and the properties that the archive records.

        Args:
            graph: model graph, captured.
        """
        import transformers

        from generic_export.inference_target import TractNNEF

        cached = bool(graph.states)
        properties: dict[str, str | float] = {
            "transformers_version": transformers.__version__,
            "architecture": type(graph.network).__name__,
            **graph.properties,
        }
        return TractNNEF(
            dynamic_axes=graph.dynamic_axes,
            check_io=False,
            specific_properties=properties | ({"source_revision": graph.revision} if graph.revision else {}),
            attention_as_products=self._attends_by_products(cached=cached),
            device=self.device,
            attention_in_f16=cached and self.keeps_half_cache and self.attention != "products",
            force_attention_inner_in_f32=self.f32_attention,
            force_linear_accumulation_in_f32=self.f32_linear_accumulation,
            force_norm_in_f32=self.f32_norm,
        )

    def _attends_by_products(self, *, cached: bool) -> bool:
        """Say whether attention is products: where it reads a cache that is not quantised, unless told otherwise."""
        return self.attention == "products" or (self.attention == "auto" and cached and self.kv_cache is None)
