"""A backbone with its head, weightless: `(input_ids, attention_mask) -> last_hidden_state | logits`.

In: a transformers config and a task. Out: a `HeadSkeleton` that `torch.export` can capture, and the document made of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from generic_export.capture import capture
from generic_export.documents import producer_properties, translate_graph
from generic_export.errors import CaptureError, described
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.tracer import DynamicAxes
from generic_export.translate.translate import TranslationOptions
from kvcache import explicit_attention, explicit_experts, fuse_rotary_embedding
from kvcache.attention import AttentionChoice
from kvcache.recurrent import explicit_recurrences
from t2n_llm.graph.document import GraphOptions
from t2n_llm.source.empty_model import BACKBONE, CLASSIFIER, ModelKind, instantiate, take_buffers, tied_names, widen
from t2n_llm.tasks.names import FEATURE_EXTRACTION, SEQUENCE_CLASSIFICATION

INPUT_NAMES = ("input_ids", "attention_mask")
BATCH, STEPS = "B", "S"
_WRAPPER_ATTRIBUTE = "network"


@dataclass(frozen=True)
class HeadTask:
    """What a task makes of a config.

    Attributes:
        name: of the task.
        kind: transformers' class for it.
        output: what is read of its result, and how the graph calls that.
        per_token: whether the output has one row for each token; else one for each text.
    """

    name: str
    kind: ModelKind
    output: str
    per_token: bool


HEAD_TASKS: Mapping[str, HeadTask] = {
    FEATURE_EXTRACTION: HeadTask(FEATURE_EXTRACTION, BACKBONE, "last_hidden_state", per_token=True),
    SEQUENCE_CLASSIFICATION: HeadTask(SEQUENCE_CLASSIFICATION, CLASSIFIER, "logits", per_token=False),
}


class HeadModule(nn.Module):
    """Gives a transformers model a flat signature: `(input_ids, attention_mask) -> output`."""

    def __init__(self, network: nn.Module, output: str) -> None:
        """Wrap a model; `output` names what is read of its result."""
        super().__init__()
        self.network = network
        self.output = output

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Run the model.

        Args:
            input_ids: int64 [B, S].
            attention_mask: int64 [B, S]; 1 for a token, 0 for padding.

        Returns:
            The last hidden states [B, S, D], or logits [B, classes].
        """
        with explicit_recurrences(self.network, _no_past):
            result = self.network(input_ids=input_ids, attention_mask=attention_mask)
        output: torch.Tensor = getattr(result, self.output)
        return output


def _no_past(rank: int) -> torch.Tensor | None:
    """A text is read at once: recurrences start from nothing."""
    del rank
    return None


@dataclass(frozen=True)
class HeadSkeleton:
    """A model with a head on the meta device, and what is needed to capture and feed it.

    Attributes:
        module: the wrapped model.
        task: what it computes.
        buffers: the values of buffers that the model computes itself, by qualified name.
        tied: for each parameter that is another one's alias, the name of that other one.
        dtype: element type of weights and activations.
        batched: whether it reads several texts at once; a classifier that knows no padding token does not.
    """

    module: HeadModule
    task: HeadTask
    buffers: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    dtype: torch.dtype
    batched: bool

    @property
    def network(self) -> nn.Module:
        """The transformers model: its parameters bear the names of the graph's variables."""
        return self.module.network

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.network.config

    @property
    def dynamic_axes(self) -> DynamicAxes:
        """`B` texts of `S` tokens."""
        axes = {0: BATCH, 1: STEPS} if self.batched else {1: STEPS}
        return dict.fromkeys(INPUT_NAMES, axes)


def build_head_graph(
    config: Any,
    task: HeadTask,
    options: GraphOptions,
    *,
    name: str,
    revision: str | None = None,
) -> tuple[HeadSkeleton, NnefGraph]:
    """Capture and translate the model of a config with the head of a task.

    Args:
        config: transformers config.
        task: which head.
        options: element type and numerics; what concerns caches and kept logits has no meaning here.
        name, revision: source model, recorded in the document.

    Returns:
        The skeleton (shapes, values that the model computes itself) and the document.

    Raises:
        UnknownArchitectureError: transformers has no such head for the config.
        CaptureError, TranslationError: the model cannot be expressed; the message says where.
    """
    with explicit_attention() as attention, explicit_experts() as experts:
        skeleton = _build_skeleton(config, task, options, attention, experts)
        target = options.target(skeleton.dynamic_axes, skeleton.network, revision, task=skeleton.task.name)
        captured = capture(
            skeleton.module,
            _example_inputs(3 if skeleton.batched else 1),
            target,
            INPUT_NAMES,
            (task.output,),
            fusions=(fuse_rotary_embedding,),
            strip_prefix=f"{_WRAPPER_ATTRIBUTE}.",
        )
    skeleton = replace(skeleton, buffers={**skeleton.buffers, **captured.constants})
    properties = tuple(producer_properties(source_model=name).items())
    graph = translate_graph(
        captured, target, TranslationOptions(graph_name=str(config.model_type), properties=properties)
    )
    return skeleton, graph


def _build_skeleton(
    config: Any, task: HeadTask, options: GraphOptions, attention: AttentionChoice, experts: str
) -> HeadSkeleton:
    def build(implementation: str) -> HeadSkeleton:
        network = instantiate(
            task.kind, _one_pass(config), options.dtype, implementation, experts, options.trust_remote_code
        )
        for pattern in options.keep_f32:
            widen(network, pattern, options.dtype)
        tied, buffers = tied_names(network), take_buffers(network)
        module = HeadModule(network, task.output).eval()
        return HeadSkeleton(module, task, buffers, tied, options.dtype, _reads_batches(module))

    return attention.first_that_runs(build)


def _one_pass(config: Any) -> Any:
    """Return a config whose model keeps no states, and names its results."""
    changed = copy.deepcopy(config)
    for part in (changed, changed.get_text_config(decoder=True)):
        part.use_cache, part.return_dict = False, True
    return changed


def _example_inputs(batch: int, steps: int = 5) -> tuple[torch.Tensor, ...]:
    """Return meta tensors of the right shapes; the sizes are only hints and never reach the graph."""
    return tuple(torch.ones((batch, steps), dtype=torch.int64, device="meta") for _ in INPUT_NAMES)


def _reads_batches(module: HeadModule) -> bool:
    """Say whether a model takes several texts; classifiers without a padding token take one (transformers refuses more)."""
    refusals: list[Exception] = []
    for batch in (3, 1):
        try:
            with torch.no_grad():
                module(*_example_inputs(batch))
            return batch > 1
        except Exception as error:  # whatever the model's own code raises
            refusals.append(error)
    raise CaptureError(
        f"{type(module.network).__name__} cannot run on shapes alone: {described(refusals[0])}",
        "Models of this family have no translation yet; run with --debug to see where it stops.",
    ) from refusals[0]
