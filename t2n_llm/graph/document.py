"""From a config to the finished NNEF document, with no weight in the process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from generic_export.capture import capture
from generic_export.documents import producer_properties, translate_graph
from generic_export.inference_target import TractNNEF
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.tracer import DynamicAxes
from generic_export.translate.translate import TranslationOptions
from kvcache import explicit_attention, explicit_experts, fuse_rotary_embedding
from kvcache.engine_state import engine_held
from kvcache.state_views import keep_states_whole
from t2n_llm.graph.skeleton import WRAPPER_ATTRIBUTE, Skeleton, build_skeleton


@dataclass(frozen=True)
class GraphOptions:
    """What decides the graph of a language model.

    Attributes:
        dtype: element type of weights, activations and caches.
        num_logits_to_keep: positions whose logits are computed, counted from the end; 0 for all.
        batched: the batch is the symbol `B` instead of 1.
        f32_linear_accumulation, f32_attention, f32_norm: see `TractNNEF`.
        keep_f32: shell patterns of parameters that stay in f32.
        trust_remote_code: allow code that comes with the model.
        stateful: the engine keeps keys and values from the start; `input_ids` is the only input.
        kv_bits: 8 or 4 has the engine keep them quantised; implies `stateful`.
        window_cache: sliding layers keep their window only.
    """

    dtype: torch.dtype = torch.float16
    num_logits_to_keep: int = 1
    batched: bool = False
    f32_linear_accumulation: bool = False
    f32_attention: bool = False
    f32_norm: bool = False
    keep_f32: tuple[str, ...] = ()
    trust_remote_code: bool = False
    stateful: bool = False
    kv_bits: int | None = None
    window_cache: bool = False

    def target(self, dynamic_axes: DynamicAxes, network: nn.Module, revision: str | None, **further: str) -> TractNNEF:
        """Return the target that these options describe.

        Args:
            dynamic_axes: of the graph's inputs.
            network: the transformers model, whose class the archive names.
            revision: commit of the source; None where there is none.
            further: properties of the archive.
        """
        import transformers

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


def build_graph(
    config: Any, options: GraphOptions, *, name: str, revision: str | None = None
) -> tuple[Skeleton, NnefGraph]:
    """Capture and translate the model of a config.

    Args:
        config: transformers config.
        options: element type, numerics and interface.
        name: source model, recorded in the document.
        revision: its commit, recorded too.

    Returns:
        The skeleton (shapes, states, values that the model computes itself) and the document.

    Raises:
        UnknownArchitectureError, CaptureError, TranslationError: the model cannot be expressed; the message says where.
    """
    with explicit_attention() as attention, explicit_experts() as experts:
        skeleton = build_skeleton(
            config,
            options.dtype,
            attention=attention,
            experts=experts,
            num_logits_to_keep=options.num_logits_to_keep,
            batched=options.batched,
            keep_f32=options.keep_f32,
            window_cache=options.window_cache,
            trust_remote_code=options.trust_remote_code,
        )
        target = options.target(skeleton.dynamic_axes, skeleton.network, revision)
        captured = capture(
            skeleton.module,
            skeleton.example_inputs(),
            target,
            skeleton.input_names,
            skeleton.output_names,
            fusions=(fuse_rotary_embedding,),
            strip_prefix=f"{WRAPPER_ATTRIBUTE}.",
        )
    skeleton = replace(skeleton, buffers={**skeleton.buffers, **captured.constants})
    graph = translate_graph(
        captured,
        target,
        TranslationOptions(
            graph_name=str(skeleton.config.model_type),
            properties=tuple(producer_properties(source_model=name).items()),
        ),
    )
    graph = keep_states_whole(graph)
    if not (options.stateful or options.kv_bits):
        return skeleton, graph
    held = engine_held(graph, skeleton.states, options.kv_bits)
    return replace(skeleton, states=(), engine_states=skeleton.states), held
