"""A model with its head, weightless: one pass from its inputs to the tensors that its task reads of the result.

In: a transformers config and a task. Out: a captured `ModelGraph` whose module is a `HeadModule`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.export import Dim

from generic_export.errors import CaptureError, GraphError, SpecializedAxisError, WeightError, described
from generic_export.torch_graph.capture.known_buffers import MOST_VALUES, decided_by
from generic_export.torch_graph.request import DynamicAxes
from generic_export.weights.values import read_tensor
from kvcache import explicit_attention, explicit_experts
from kvcache.forms.minimax import over_any_length
from kvcache.forms.xmod import one_language
from kvcache.recurrent import explicit_recurrences
from t2n_llm.graph.capture import capture_model, weightless_network
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import MODEL_ROLE, ModelGraph
from t2n_llm.source.empty_model import take_buffers, tied_names
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.heads.inputs import BATCH, LENGTH, STEPS, Reading, Values, reading_of
from t2n_llm.tasks.heads.pooling import Pooling
from t2n_llm.tasks.heads.shapes_alone import (
    ConstantsInGraph,
    PlacesOfMasks,
    further_keywords,
    lengths_from_masks,
    marked_by_place,
    series_side_by_side,
    sizes_stay_symbols,
)
from t2n_llm.tasks.heads.table import Head
from t2n_llm.tasks.names import SENTENCE_EMBEDDING
from t2n_llm.weights.names import match_parameters

_SHORTEST = {STEPS: 3, LENGTH: 32}  # a guard of PyTorch's about fewer is no obstacle

Axes = tuple["str | int | None", ...]
"""Sizes and symbols; None where a size follows from others."""


class HeadModule(nn.Module):
    """Gives a transformers model a flat signature: `(*inputs) -> (*outputs)`."""

    def __init__(
        self,
        network: nn.Module,
        head: Head,
        reading: Reading,
        outputs: Mapping[str, Axes],
        pooling: Pooling | None = None,
        control_buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            network: of transformers.
            head: what it computes.
            reading: its inputs, in the order of the graph.
            outputs: what is read of its result, with the axes of each.
            pooling: makes one row of those of the tokens; None leaves them.
            control_buffers: values of buffers that its code decides by.
        """
        super().__init__()
        self.network = network
        self.head = head
        self.reading = reading
        self.outputs = dict(outputs)
        self.pooling = pooling
        self.control_buffers = dict(control_buffers or {})

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model on one tensor an input, and return one an output."""
        given = dict(zip(self.reading.names, tensors, strict=True))
        answers = _answered(self.network, given, self.pooling, self.control_buffers)
        return tuple(answers[name] for name in self.outputs)


def _answered(
    network: nn.Module,
    given: Mapping[str, torch.Tensor],
    pooling: Pooling | None,
    control_buffers: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    with (
        decided_by(network, control_buffers) if control_buffers else nullcontext(),
        explicit_recurrences(network, _no_past, columns_before=False),
        over_any_length(network),
        one_language(network),
        lengths_from_masks(network),
        sizes_stay_symbols(network),
        one_chunk(network),
        ConstantsInGraph(),
        PlacesOfMasks(),
        marked_by_place(network),
        series_side_by_side(network, given) as taken,
    ):
        return answers_of(network(**taken, **further_keywords(network, given)), given, pooling)


def answers_of(result: Any, given: Mapping[str, torch.Tensor], pooling: Pooling | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's result by name.

    Args:
        result: of transformers, a record of named fields.
        given: what the model was given.
        pooling: adds the row of a text to them.
    """
    found = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    if pooling is not None:
        found[SENTENCE_EMBEDDING] = pooling(found["last_hidden_state"], given["attention_mask"])
    return found


def _no_past(rank: int) -> torch.Tensor | None:
    """A text is read at once: recurrences start from nothing."""
    del rank
    return None


def build_head_graph(
    config: Any,
    head: Head,
    options: GraphOptions,
    *,
    image_size: tuple[int, int],
    pooling: Pooling | None = None,
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    source: ModelSource | None = None,
) -> ModelGraph:
    """Build and capture the model of a config with a head.

    Args:
        config: transformers config.
        head: which one.
        options: element type and numerics; what concerns caches and kept logits has no meaning here.
        image_size: height and width in pixels, where images are read.
        pooling: for one row a text.
        name, revision: source model, recorded in the document.
        trust_remote_code: allow code that comes with the model.
        source: has the saved values of buffers that the model's code decides by; None takes a new model's.

    Returns:
        The captured graph; its module is a `HeadModule`.

    Raises:
        UnknownArchitectureError: transformers has no such head for the config.
        CaptureError: the model cannot be captured; the message says where.
    """
    with explicit_attention() as attention, explicit_experts() as experts:

        def build(implementation: str, *, batches: bool = True) -> ModelGraph:
            network = weightless_network(
                head.kind, one_pass(config), options, implementation, experts, trust_remote_code
            )
            tied, buffers = tied_names(network), take_buffers(network)
            wanted = replace(reading_of(head, network, image_size), reads_batches=batches)
            control_buffers = partial(decisive_values, network, buffers, source)
            reading, outputs, values = _tried(head, network, wanted, options, pooling, control_buffers)
            return ModelGraph(
                role=MODEL_ROLE,
                network=network,
                module=HeadModule(network, head, reading, outputs, pooling, values).eval(),
                buffers=buffers,
                tied=tied,
                inputs=_meta_inputs(reading, reading.traced, options.torch_dtype),
                output_names=tuple(outputs),
                dynamic_axes=_dynamic_axes(reading),
                source_name=name,
                revision=revision,
                graph_name=str(config.model_type),
                properties={"task": head.name},
            )

        def capture(graph: ModelGraph) -> ModelGraph:
            return _of_any_length(graph, options, _most_tokens(config), longest_chunk(config))

        graph = attention.first_that_runs(build)
        try:
            return capture(graph)
        except SpecializedAxisError:
            if not head_module(graph).reading.reads_batches:
                raise
            # Its code counts what it is given (PP-DocLayout sorts the boxes of each image): one at a time.
            return capture(attention.first_that_runs(partial(build, batches=False)))


def head_module(graph: ModelGraph) -> HeadModule:
    """Return the module of a graph that `build_head_graph` made.

    Raises:
        GraphError: another task made it.
    """
    if not isinstance(graph.module, HeadModule):
        raise GraphError(f"graph {graph.role!r} has a {type(graph.module).__name__}, and a HeadModule was expected.")
    return graph.module


def _dynamic_axes(reading: Reading) -> DynamicAxes:
    """Return the symbols of each input."""
    axes = {each.name: reading.axes(each) for each in reading.inputs}
    return {
        name: {place: axis for place, axis in enumerate(row) if isinstance(axis, str)} for name, row in axes.items()
    }


def _of_any_length(graph: ModelGraph, options: GraphOptions, most: int | None, longest: int | None) -> ModelGraph:
    """Capture for texts and sound of any length; of no fewer than a few tokens and no more than the model has positions, or
    hears at once, where it takes another path for those.
    """
    axes = graph.dynamic_axes
    if longest is not None:
        bounded = _bounded(axes, {LENGTH: Dim(LENGTH, min=1, max=longest)})
        return capture_model(replace(graph, dynamic_axes=bounded), options)
    try:
        return capture_model(graph, options)
    except SpecializedAxisError:
        shortest = {name: Dim(name, min=_SHORTEST[name], max=most if name == STEPS else None) for name in _SHORTEST}
        if not any(axis in shortest for row in axes.values() for axis in row.values()):
            raise
        return capture_model(replace(graph, dynamic_axes=_bounded(axes, shortest)), options)


def _bounded(axes: DynamicAxes, dims: Mapping[str, Dim]) -> DynamicAxes:
    return {name: {place: dims.get(str(axis), axis) for place, axis in row.items()} for name, row in axes.items()}


def _most_tokens(config: Any) -> int | None:
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > _SHORTEST[STEPS] else None


def one_pass(config: Any) -> Any:
    """Return a config whose model keeps no states, and names its results."""
    changed = copy.deepcopy(config)
    for part in (changed, changed.get_text_config(decoder=True)):
        part.use_cache, part.return_dict = False, True
    return changed


def _meta_inputs(reading: Reading, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        each.name: torch.ones(each.shape(sizes), dtype=torch.int64 if each.is_integer else dtype, device="meta")
        for each in reading.inputs
    }


def typical_inputs(graph: ModelGraph, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return one text without padding, or one of what else is read, by name."""
    reading = head_module(graph).reading
    sizes = {**reading.others[0], BATCH: 1, STEPS: len(tokens)}
    found = reading.random(sizes)
    for each in reading.inputs:
        if each.values is Values.IDS:
            found[each.name] = np.broadcast_to(np.array(tokens, np.int64), each.shape(sizes)).copy()
    return {name: torch.from_numpy(array) for name, array in found.items()}


def _tried(
    head: Head,
    network: nn.Module,
    reading: Reading,
    options: GraphOptions,
    pooling: Pooling | None,
    control_buffers: Callable[[], Mapping[str, torch.Tensor]],
) -> tuple[Reading, dict[str, Axes], Mapping[str, torch.Tensor]]:
    """Run a network on shapes alone: several at once, or one where it refuses more (a classifier without a padding token).

    Returns:
        How it is read, its outputs, and the values of buffers that its code decides by, none where it runs without.

    Raises:
        CaptureError: it does not run, or its result has none of the task's outputs.
    """
    refusals: list[Exception] = []
    for way, values in _ways(reading, control_buffers):
        shapes = partial(_shapes, reading=way, dtype=options.torch_dtype, pooling=pooling, control_buffers=values)
        try:
            # A copy: models keep what they computed for the next call (LeViT its biases), here on shapes alone.
            traced = shapes(copy.deepcopy(network), sizes=way.traced)
        except Exception as error:  # whatever the model's own code raises
            refusals.append(error)
            continue
        known = head.read_of(traced)
        if not known:
            raise CaptureError(
                f"{type(network).__name__} returns {', '.join(traced) or 'no tensor'}, but --task {head.name} "
                f"needs {' or '.join((*head.outputs, *head.otherwise))}.",
                "Choose another --task.",
            )
        tried = copy.deepcopy(network)
        others = [_or_none(partial(shapes, tried, sizes=each)) for each in way.others]
        return way, {name: _axes(way, name, traced, others) for name in known}, values
    raise CaptureError(
        f"{type(network).__name__} cannot run with shapes only: {described(refusals[0])}",
        "This family is not supported yet; --debug shows where it fails.",
    ) from refusals[0]


def _ways(
    reading: Reading, control_buffers: Callable[[], Mapping[str, torch.Tensor]]
) -> Iterator[tuple[Reading, Mapping[str, torch.Tensor]]]:
    """Yield how a network may be run: several at once or one, without the values of its small buffers or with them."""
    values: Mapping[str, torch.Tensor] | None = None
    for way in (reading, replace(reading, reads_batches=False)):
        yield way, {}
        values = control_buffers() if values is None else values
        if values:
            yield way, values


def _shapes(
    network: nn.Module,
    reading: Reading,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    pooling: Pooling | None,
    control_buffers: Mapping[str, torch.Tensor],
) -> dict[str, tuple[int, ...]]:
    given = _meta_inputs(reading, sizes, dtype)
    # As in a capture: transformers then looks at no mask whether it hides anything, which shapes alone do not say.
    compiling = mock.patch("torch.compiler.is_compiling", return_value=True)
    with torch.no_grad(), compiling:
        answers = _answered(network, given, pooling, control_buffers)
    return {name: tuple(tensor.shape) for name, tensor in answers.items()}


def _or_none(shapes: Callable[[], dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]] | None:
    try:
        return shapes()
    except Exception:  # what other sizes show is for the reader of a manifest
        return None


def _axes(
    reading: Reading,
    name: str,
    traced: Mapping[str, tuple[int, ...]],
    others: Sequence[Mapping[str, tuple[int, ...]] | None],
) -> Axes:
    """Return the axes of an output: a symbol that has its size at every size, a number that does not change, or None."""
    rows = [(reading.traced, traced[name])]
    rows += [
        (sizes, found[name]) for sizes, found in zip(reading.others, others, strict=True) if found and name in found
    ]
    symbols = {axis for each in reading.inputs for axis in reading.axes(each) if isinstance(axis, str)}
    return tuple(
        next(
            (symbol for symbol in sorted(symbols) if all(sizes[symbol] == shape[place] for sizes, shape in rows)),
            size if all(shape[place : place + 1] == (size,) for _, shape in rows) else None,
        )
        for place, size in enumerate(traced[name])
    )


# --- buffers that a model's code reads ---------------------------------------------------------------


def decisive_values(
    network: nn.Module, buffers: Mapping[str, torch.Tensor], source: ModelSource | None
) -> dict[str, torch.Tensor]:
    """Return the values of a network's small buffers.

    Args:
        network: on the meta device.
        buffers: the values that it computes itself.
        source: has the saved ones; None, or a source without weights, leaves the network's own.
    """
    found = {name: value for name, value in buffers.items() if value.numel() <= MOST_VALUES}
    saved = found.keys() & network.state_dict().keys()
    return found | (_stored(network, source, saved) if saved and source is not None else {})


def _stored(network: nn.Module, source: ModelSource, names: set[str]) -> dict[str, torch.Tensor]:
    try:
        checkpoint = source.checkpoint()
    except WeightError:  # a config alone
        return {}
    tensors = match_parameters(network, checkpoint.tensors).tensors
    own = network.state_dict()
    return {name: read_tensor(tensors[name], own[name].dtype) for name in sorted(names & tensors.keys())}


# --- encoders that cut sound into chunks -------------------------------------------------------------


_CACHE, _STACKING = "Nemotron3DiarizationSpeakerCache", "Nemotron3DiarizationFeatureStacking"


def longest_chunk(config: Any) -> int | None:
    """Return how many frames of sound such a model takes in one chunk; None for models that do not walk."""
    sound = getattr(config, "audio_config", None)
    chunk, factor = getattr(config, "chunk_length", None), getattr(sound, "subsampling_factor", None)
    if not isinstance(chunk, int) or not isinstance(factor, int) or not hasattr(config, "chunk_right_context"):
        return None
    return chunk * factor


@contextmanager
def one_chunk(network: nn.Module) -> Iterator[None]:
    """Let the code of such a network see one chunk where its length is a symbol, whose cache nobody reads again.

    The symbol is bounded by `longest_chunk`.
    """
    files = {sys.modules[type(part).__module__] for part in network.modules()}
    file = next((each for each in files if hasattr(each, _CACHE)), None)
    if file is None:
        yield
        return
    cache, stacking = getattr(file, _CACHE), getattr(file, _STACKING)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(file, "range", _steps, create=True))
        stack.enter_context(mock.patch.object(file, "min", _end, create=True))
        stack.enter_context(mock.patch.object(cache, "update", _updated_unless_last(cache.update)))
        stack.enter_context(mock.patch.object(stacking, "forward", _stacked))
        yield


def _steps(*bounds: Any) -> Sequence[int]:
    return bounds[:1] if any(isinstance(bound, torch.SymInt) for bound in bounds) else range(*bounds)


def _end(chunk: Any, recording: Any) -> Any:
    """Return where a chunk ends: with the recording, where that is one."""
    return recording if isinstance(recording, torch.SymInt) else min(chunk, recording)


def _updated_unless_last(update: Callable[..., None]) -> Callable[..., None]:
    def updated(cache: Any, chunk_embeds: torch.Tensor, *args: Any, **keywords: Any) -> None:
        # How many frames a chunk of any length leaves is a symbol: there is no second chunk to read them.
        if not isinstance(chunk_embeds.shape[1], torch.SymInt):
            update(cache, chunk_embeds, *args, **keywords)

    return updated


def _stacked(stacking: Any, input_features: torch.Tensor) -> torch.Tensor:
    """Stack frames as the class does, their number written so that it is seen to be whole: 8*((T + 7)//8)."""
    batch, frames, width = input_features.shape
    factor = stacking.subsampling_factor
    groups = (frames + factor - 1) // factor
    padded = nn.functional.pad(input_features, (0, 0, 0, groups * factor - frames))
    return stacking.projection(padded.reshape(batch, groups, factor * width))


__all__ = [
    "Axes",
    "HeadModule",
    "answers_of",
    "build_head_graph",
    "decisive_values",
    "head_module",
    "longest_chunk",
    "one_chunk",
    "one_pass",
    "typical_inputs",
]
