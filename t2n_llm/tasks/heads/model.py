"""A backbone with its head, weightless: `(input_ids, attention_mask) -> last_hidden_state | logits`.

In: a transformers config and a task. Out: a `HeadSkeleton` that `torch.export` can capture, and the document made of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from generic_export.errors import CaptureError, described
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.request import DynamicAxes
from kvcache import explicit_attention, explicit_experts
from kvcache.recurrent import explicit_recurrences
from t2n_llm.graph.capture import document_of, weightless_network
from t2n_llm.graph.mixed import as_stored
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import RangeRequest, Ranges
from t2n_llm.source.empty_model import BACKBONE, CLASSIFIER, ModelKind, take_buffers, tied_names
from t2n_llm.tasks.names import FEATURE_EXTRACTION, SEQUENCE_CLASSIFICATION

INPUT_NAMES = ("input_ids", "attention_mask")
BATCH, STEPS = "B", "S"
_WRAPPER_ATTRIBUTE = "network"


@dataclass(frozen=True)
class Head:
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


HEADS: Mapping[str, Head] = {
    FEATURE_EXTRACTION: Head(FEATURE_EXTRACTION, BACKBONE, "last_hidden_state", per_token=True),
    SEQUENCE_CLASSIFICATION: Head(SEQUENCE_CLASSIFICATION, CLASSIFIER, "logits", per_token=False),
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
        head: what it computes.
        buffers: the values of buffers that the model computes itself, by qualified name.
        tied: for each parameter that is another one's alias, the name of that other one.
        dtype: element type of weights and activations.
        batched: whether it reads several texts at once; a classifier that knows no padding token does not.
    """

    module: HeadModule
    head: Head
    buffers: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    dtype: torch.dtype
    batched: bool
    ranges: Ranges | None = None

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
    head: Head,
    options: GraphOptions,
    *,
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    ranges: RangeRequest | None = None,
) -> tuple[HeadSkeleton, NnefGraph]:
    """Capture and translate the model of a config with a head.

    Args:
        config: transformers config.
        head: which one.
        options: element type and numerics; what concerns caches and kept logits has no meaning here.
        name, revision: source model, recorded in the document.
        trust_remote_code: allow code that comes with the model.
        ranges: has f16 activations measured on the weights, and made to fit; None leaves them as they are.

    Returns:
        The skeleton (shapes, values that the model computes itself) and the document.

    Raises:
        UnknownArchitectureError: transformers has no such head for the config.
        CaptureError, TranslationError: the model cannot be expressed; the message says where.
        NumericRangeError: f16 does not hold its activations.
    """
    with explicit_attention() as attention, explicit_experts() as experts:

        def build(implementation: str) -> HeadSkeleton:
            own = _one_pass(config)
            network = weightless_network(head.kind, own, options, implementation, experts, trust_remote_code)
            tied, buffers = tied_names(network), take_buffers(network)
            module = HeadModule(network, head.output).eval()
            return HeadSkeleton(module, head, buffers, tied, options.torch_dtype, _reads_batches(module))

        skeleton = attention.first_that_runs(build)
        inputs = _example_inputs(3 if skeleton.batched else 1)
        document = document_of(
            skeleton.module,
            dict(zip(INPUT_NAMES, inputs, strict=True)),
            (head.output,),
            options.target(skeleton.dynamic_axes, skeleton.network, revision, cached=False, task=head.name),
            prefix=f"{_WRAPPER_ATTRIBUTE}.",
            graph_name=str(config.model_type),
            source_name=name,
            fit=partial(ranges.fit, skeleton, _inputs_of(ranges.tokens)) if ranges is not None else None,
        )
    graph, _ = as_stored(document.graph, skeleton.network, (), options)
    return replace(skeleton, buffers={**skeleton.buffers, **document.constants}, ranges=document.ranges), graph


def _one_pass(config: Any) -> Any:
    """Return a config whose model keeps no states, and names its results."""
    changed = copy.deepcopy(config)
    for part in (changed, changed.get_text_config(decoder=True)):
        part.use_cache, part.return_dict = False, True
    return changed


def _example_inputs(batch: int, steps: int = 5) -> tuple[torch.Tensor, ...]:
    """Return meta tensors of the right shapes; the sizes are only hints and never reach the graph."""
    return tuple(torch.ones((batch, steps), dtype=torch.int64, device="meta") for _ in INPUT_NAMES)


def _inputs_of(tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return one text without padding."""
    ids = torch.tensor([tokens], dtype=torch.int64)
    return ids, torch.ones_like(ids)


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
