"""What decides the graph of a model: element type, interface, numerics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from generic_export.errors import OptionError
from t2n_llm.option import Panel, option, refuse_invalid

if TYPE_CHECKING:
    import torch
    from torch import nn

    from generic_export.inference_target import TractNNEF
    from generic_export.torch_graph.request import DynamicAxes

DTYPES = ("f16", "f32")

KV_CACHES: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Bits of a quantised cache, by the name of the option."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the element type that `f16` or `f32` names."""
    import torch

    return {"f16": torch.float16, "f32": torch.float32}[name]


@dataclass(frozen=True)
class GraphOptions:
    """What decides the graph; each option is described where it is declared.

    Raises:
        OptionError: an option has no meaning, or contradicts another.
    """

    dtype: str = option("f16", "f16 or f32: weights, activations and caches.")
    num_logits_to_keep: int = option(
        1,
        "Positions whose logits are given, from the end. 0: all, as speculative decoding wants.",
        Panel.GRAPH,
        minimum=0,
        advice="Use 1 (last token), 0 (all), or more.",
    )
    batch: bool = option(False, "Make the batch a symbol B instead of 1.", Panel.GRAPH)
    f32_linear_accumulation: bool = option(False, "f16 matrix products accumulate in f32.", Panel.GRAPH)
    f32_attention: bool = option(False, "Compute attention in f32.", Panel.GRAPH)
    f32_norm: bool = option(False, "Compute norms in f32, scale and shift included.", Panel.GRAPH)
    stateful: bool = option(
        False, "The engine keeps the cache from the start: input_ids is the only input.", Panel.GRAPH
    )
    kv_cache: str | None = option(
        None,
        "int8 or int4: as --stateful, keys and values quantised.",
        Panel.GRAPH,
        metavar="TYPE",
        choices=tuple(KV_CACHES),
        noun="cache type",
    )
    window_cache: bool = option(False, "Sliding layers keep their window only, not all positions.", Panel.GRAPH)
    keep_f32: tuple[str, ...] = option(
        (), "Keep these parameters in f32 (shell pattern, repeatable).", Panel.GRAPH, metavar="PATTERN"
    )
    image_size: int | None = option(
        None, "Height and width of images in pixels, for vision models that take any size.", Panel.GRAPH
    )

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(
                f"element type {self.dtype!r} is not supported: tract runs {' and '.join(DTYPES)} models.",
                f"Use --dtype {' or --dtype '.join(DTYPES)}.",
            )
        refuse_invalid(self)
        if self.window_cache and self.engine_keeps_cache:
            raise OptionError(
                "the engine cannot cut a cache that it keeps itself: its only state that lasts from turn to turn grows.",
                "Leave --window-cache out, or --stateful and --kv-cache.",
            )
        if self.batch and self.engine_keeps_cache:
            raise OptionError(
                "an engine that keeps the cache itself needs to know the batch, which is a symbol with --batch.",
                "Leave --batch out, or --stateful and --kv-cache.",
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of weights, activations and caches."""
        return torch_dtype(self.dtype)

    @property
    def kv_bits(self) -> int | None:
        """8 or 4 where the engine keeps keys and values quantised."""
        return KV_CACHES[self.kv_cache] if self.kv_cache else None

    @property
    def engine_keeps_cache(self) -> bool:
        """Whether keys and values are the engine's own state from the start."""
        return self.stateful or self.kv_cache is not None

    def target(self, dynamic_axes: DynamicAxes, network: nn.Module, revision: str | None, **further: str) -> TractNNEF:
        """Return the target that these options describe.

        Args:
            dynamic_axes: of the graph's inputs.
            network: the transformers model, whose class the archive names.
            revision: commit of the source; None where there is none.
            further: properties of the archive.
        """
        import transformers

        from generic_export.inference_target import TractNNEF

        properties: dict[str, str | float] = {
            "transformers_version": transformers.__version__,
            "architecture": type(network).__name__,
            **further,
        }
        return TractNNEF(
            dynamic_axes=dynamic_axes,
            check_io=False,
            specific_properties=properties | ({"source_revision": revision} if revision else {}),
            force_attention_inner_in_f32=self.f32_attention,
            force_linear_accumulation_in_f32=self.f32_linear_accumulation,
            force_norm_in_f32=self.f32_norm,
        )
