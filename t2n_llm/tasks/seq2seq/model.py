"""The two graphs of an encoder-decoder: what a source says to every layer of the decoder, once; and one step of the decoder.

In: a transformers config. Out: a captured `ModelGraph` for each; they share the names of the network's parameters.

The encoder's graph ends in the keys and values of the decoder's cross-attention: they depend on the source alone, so that no step
of the decoder computes them again. Its graph takes them, its own cache, and token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from generic_export.errors import CaptureError, T2NError, described
from generic_export.torch_graph.request import DynamicAxes
from kvcache import explicit_attention, explicit_experts
from kvcache.states.tensors import Probe, Slot, States, StateTensor, describe_states
from t2n_llm.graph.capture import capture_model, weightless_network
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.empty_model import ModelKind, computed_parameters, take_buffers, tied_names
from t2n_llm.tasks.seq2seq.adapters import as_read, read_source, run_decoder
from t2n_llm.tasks.seq2seq.sources import BATCH, ENCODER_MASK, LENGTH, SourceForm, source_form

ENCODER, DECODER = "encoder", "decoder"
"""The archives, in the order in which they run."""

DECODER_MASK = "encoder_attention_mask"
CROSS_KEY, CROSS_VALUE = "cross_key", "cross_value"
_CROSS = {"cache_key": CROSS_KEY, "cache_value": CROSS_VALUE}
_STEPS, _PAST = 5, 7  # hints, which never reach the graph


@dataclass(frozen=True)
class CrossState:
    """A key or value tensor that the encoder's graph gives and the decoder's takes, under the same name.

    Attributes:
        name: `cross_key_3`.
        slot: where transformers' cache has it.
        shape: [B, H, T, D]; `T` is a number where all sources are of one size.
    """

    name: str
    slot: Slot
    shape: tuple[int | str, ...]

    def meta(self, batch: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an example without values."""
        known = {BATCH: batch, LENGTH: length}
        sizes = [known[dim] if isinstance(dim, str) else dim for dim in self.shape]
        return torch.zeros(sizes, dtype=dtype, device="meta")

    def dynamic_axes(self, *, batched: bool) -> dict[int, str]:
        """Return the symbolic axes."""
        return {axis: dim for axis, dim in enumerate(self.shape) if isinstance(dim, str) and (batched or dim != BATCH)}


class SourceEncoder(nn.Module):
    """`(source, [attention_mask]) -> (cross_key_0, cross_value_0, ...)`."""

    def __init__(
        self, network: Any, names: tuple[str, ...], cross: tuple[CrossState, ...], *, wants_mask: bool = False
    ) -> None:
        """Wrap a network.

        Args:
            network: transformers' model.
            names: the arguments of its forward that the inputs are.
            cross: what is given of the source.
            wants_mask: see `SourceForm`.
        """
        super().__init__()
        self.network = network
        self.names = names
        self.cross = cross
        self.wants_mask = wants_mask

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the keys and values [B, H, T, D] of each layer.

        The decoder reads one token for it, of whose work nothing else is kept.
        """
        given = dict(zip(self.names, inputs, strict=True))
        if self.wants_mask and ENCODER_MASK not in given:
            given[ENCODER_MASK] = torch.ones(inputs[0].shape[:2], dtype=torch.int64, device=inputs[0].device)
        first = torch.zeros((inputs[0].shape[0], 1), dtype=torch.int64, device=inputs[0].device)
        _, states = run_from_source(self.network, first, given)
        return tuple(states[each.slot] for each in self.cross)


class CachedDecoder(nn.Module):
    """`(input_ids, *cross, [encoder_attention_mask], *past) -> (logits, *present)`."""

    def __init__(
        self,
        network: Any,
        cross: tuple[CrossState, ...],
        slots: tuple[Slot, ...],
        width: int,
        answer: type,
        *,
        masked: bool,
        kept: int,
    ) -> None:
        """Wrap a network.

        Args:
            network: transformers' model.
            cross: what it is given of the source.
            slots: where it keeps its states, in the order of the inputs.
            width: of the encoder's hidden states, which are not read.
            answer: transformers' class in which the encoder gives them.
            masked: whether sources have padding.
            kept: positions whose logits are given, from the end; 0 for all.
        """
        super().__init__()
        self.network = network
        self.cross = cross
        self.slots = slots
        self.width = width
        self.answer = answer
        self.masked = masked
        self.kept = kept

    def forward(self, input_ids: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the decoder.

        Args:
            input_ids: int64 [B, S].
            rest: keys and values [B, H, T, D] of each layer's cross-attention, the mask int64 [B, T] where there is one, then
                the states before these tokens; keys and values are [B, Hkv, P, D].

        Returns:
            Logits [B, kept, vocab], then the states after the tokens.
        """
        count = len(self.cross)
        given, rest = rest[:count], rest[count:]
        mask, past = (rest[:1], rest[1:]) if self.masked else ((), rest)
        said = given[0]
        # Its values are never read: every layer has its keys and values already.
        hidden = said.new_zeros((said.shape[0], said.shape[2], self.width))
        states = dict(zip((each.slot for each in self.cross), given, strict=True))
        states |= dict(zip(self.slots, past, strict=True))
        options = {ENCODER_MASK: mask[0]} if mask else {}
        with _last_positions(self.network, self.kept):
            read = as_read(self.answer, hidden)
            logits, after = run_from_states(self.network, input_ids, read, states, **options)
        logits = logits[:, -self.kept :] if self.kept else logits
        return (logits, *(after[slot] for slot in self.slots))


def run_from_source(
    network: Any, decoder_input_ids: torch.Tensor, given: Mapping[str, torch.Tensor]
) -> tuple[Any, States]:
    """Run a whole model on a source.

    Args:
        network: the model.
        decoder_input_ids: int64 [B, S].
        given: the source and its mask, as arguments of the forward.

    Returns:
        What the encoder answered, its hidden states [B, T, D] first, and the states [B, H, T, D] of both caches.
    """
    caches = pair_of_caches(network, {})
    read = read_source(network, given)
    mask = {ENCODER_MASK: given[ENCODER_MASK]} if ENCODER_MASK in given else {}
    run_decoder(network, read, decoder_input_ids, cache=caches, use_cache=True, **mask)
    return read, states_of_pair(caches)


def run_from_states(
    network: Any, input_ids: torch.Tensor, read: Any, states: States, **options: torch.Tensor
) -> tuple[torch.Tensor, States]:
    """Run a decoder whose cross-attention has its keys and values; return the logits, and the states of its own cache.

    Args:
        network: the whole model.
        input_ids: int64 [B, S].
        read: what the encoder answered; the shape of its hidden states [B, T, D] alone is looked at.
        states: of both caches.
        options: further arguments of the forward.
    """
    caches = pair_of_caches(network, states)
    result = run_decoder(network, read, input_ids, cache=caches, use_cache=True, **options)
    return result.logits, states_of_pair(caches)


def pair_of_caches(network: Any, states: States) -> Any:
    """Return transformers' pair of caches, the second one full where states of it are given."""
    from transformers import DynamicCache, EncoderDecoderCache

    from kvcache.states.explicit_cache import ExplicitCache, put_states

    own = {slot: tensor for slot, tensor in states.items() if slot.kind not in (CROSS_KEY, CROSS_VALUE)}
    kinds = {ours: theirs for theirs, ours in _CROSS.items()}
    said = {Slot(kinds[slot.kind], slot.layer): states[slot] for slot in states if slot.kind in kinds}
    config = network.config.get_text_config(decoder=True)
    cross = DynamicCache()
    put_states(cross, said)
    caches = EncoderDecoderCache(ExplicitCache(config, own), cross)
    caches.is_updated = {slot.layer: True for slot in said}
    return caches


def states_of_pair(caches: Any) -> States:
    """Return what transformers' pair of caches holds: keys and values of the decoder, and those of its source."""
    from kvcache.states.explicit_cache import states_of

    said = states_of(caches.cross_attention_cache)
    return states_of(caches.self_attention_cache) | {
        Slot(_CROSS[slot.kind], slot.layer): tensor for slot, tensor in said.items()
    }


@contextmanager
def _last_positions(network: Any, kept: int) -> Iterator[None]:
    """Give the layer that makes logits the last positions only, for the length of the block; 0 for all."""
    head = network.get_output_embeddings() if kept else None
    if not isinstance(head, nn.Linear):  # an embedding may read tokens too
        yield
        return
    handle = head.register_forward_pre_hook(lambda _module, given: (given[0][:, -kept:], *given[1:]))
    try:
        yield
    finally:
        handle.remove()


def first_token(config: Any) -> int:
    """Return the token that a decoder starts with."""
    for part in (config, getattr(config, "decoder", None), config.get_text_config(decoder=True)):
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = getattr(part, name, None)
            if token is not None:
                return int(token[0] if isinstance(token, (list, tuple)) else token)
    return 0


class _Everywhere:
    """What holds for every value of a tensor that has none."""

    def all(self) -> bool:
        return True


@contextmanager
def _nothing_overflows() -> Iterator[None]:
    """Let encoders that look for overflows of f16, and clamp then (BART, Marian), find none: a graph cannot look.

    Where there is one, the archive gives an infinity, and the check says so.
    """
    with mock.patch.object(torch, "isfinite", lambda _values: _Everywhere()):
        yield


# --- parts ------------------------------------------------------------------------------------------


def build_seq2seq(
    config: Any,
    kind: ModelKind,
    options: GraphOptions,
    *,
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[ModelGraph, ModelGraph]:
    """Build and capture the encoder and the decoder of a config, in the order in which they run.

    Args:
        config: transformers config.
        kind: which of transformers' classes for it.
        options: element type, numerics, kept logits, batch.
        name, revision: source model, recorded in the documents.
        trust_remote_code: allow code that comes with the model.

    Raises:
        UnknownArchitectureError: transformers has no such model for the config, or its source is not known.
        CaptureError: the model cannot be captured; the message says where.
    """
    with explicit_attention() as attention, explicit_experts() as experts, _nothing_overflows():

        def build(implementation: str) -> tuple[ModelGraph, ModelGraph]:
            network = weightless_network(kind, config, options, implementation, experts, trust_remote_code)
            return _parts(network, options, name, revision)

        encoder, decoder = attention.first_that_runs(build)
        return capture_model(encoder, options), capture_model(decoder, options)


def typical_inputs(
    graph: ModelGraph, tokens: Sequence[int], given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what a part is measured on: a source, or what the encoder gave of it and a text; masks too, which not all read.

    Args:
        graph: which of the two.
        tokens: of the text.
        given: outputs of the encoder.
    """
    tokens = (first_token(graph.config), *tokens[1:])
    if graph.role == ENCODER:
        network: Any = graph.network
        form = source_form(network.config, main_input=network.main_input_name)
        source = {name: torch.from_numpy(array) for name, array in form.typical(tokens).items()}
        length = next(iter(source.values())).shape[1]
        return source | {ENCODER_MASK: torch.ones((1, length), dtype=torch.int64)}
    states = {each.input_name: torch.from_numpy(each.at_start(1)) for each in graph.states}
    said = next(iter(given.values()), None)
    mask = {} if said is None else {DECODER_MASK: torch.ones((1, said.shape[2]), dtype=torch.int64)}
    return {"input_ids": torch.tensor([tokens], dtype=torch.int64), **given, **mask, **states}


def _parts(network: Any, options: GraphOptions, name: str, revision: str | None) -> tuple[ModelGraph, ModelGraph]:
    """Return the encoder and the decoder of a weightless network, ready for capture.

    Raises:
        CaptureError: the model cannot run on shapes, or keeps no keys and values of its source.
    """
    form = source_form(network.config, main_input=network.main_input_name)
    tied, buffers = tied_names(network), computed_parameters(network) | take_buffers(network)
    probed = _probed(network, form, options.torch_dtype)
    cross = {each.name: each.meta(_batch(options), form.hint, options.torch_dtype) for each in probed.cross}
    mask, mask_axes = _mask(ENCODER_MASK, form, options)
    inputs = {each.name: each.meta(_batch(options), form.hint, options.torch_dtype) for each in form.inputs} | mask
    encoder = ModelGraph(
        role=ENCODER,
        network=network,
        module=SourceEncoder(network, tuple(inputs), probed.cross, wants_mask=form.wants_mask).eval(),
        buffers=buffers,
        tied=tied,
        inputs=inputs,
        output_names=tuple(cross),
        dynamic_axes={**{each.name: form.axes(each.shape, batched=options.batch) for each in form.inputs}, **mask_axes},
        source_name=name,
        revision=revision,
        graph_name=ENCODER,
        properties={"role": ENCODER},
        handed={name: tuple(tensor.shape) for name, tensor in cross.items()},
    )
    return encoder, _decoder(encoder, form, probed, cross, options)


def _decoder(
    encoder: ModelGraph, form: SourceForm, probed: _Probed, cross: Mapping[str, torch.Tensor], options: GraphOptions
) -> ModelGraph:
    """Return the decoder beside an encoder; `cross` are its inputs that the encoder gives."""
    batch, batched, states = _batch(options), options.batch, probed.states
    mask, mask_axes = _mask(DECODER_MASK, form, options)
    past = {
        each.input_name: torch.zeros(each.sizes(batch, _PAST), dtype=each.torch_dtype, device="meta") for each in states
    }
    ids = torch.zeros((batch, _STEPS), dtype=torch.int64, device="meta")
    axes = {
        "input_ids": ({0: BATCH} if batched else {}) | {1: "S"},
        **{each.name: each.dynamic_axes(batched=batched) for each in probed.cross},
        **mask_axes,
        **{each.input_name: each.dynamic_axes(batched=batched) for each in states},
    }
    module = CachedDecoder(
        encoder.network,
        probed.cross,
        tuple(each.slot for each in states),
        probed.width,
        probed.answer,
        masked=bool(mask),
        kept=options.num_logits_to_keep,
    )
    return replace(
        encoder,
        role=DECODER,
        module=module.eval(),
        inputs={"input_ids": ids, **cross, **mask, **past},
        output_names=("outputs", *(each.output_name for each in states)),
        dynamic_axes=axes,
        graph_name=DECODER,
        properties={"role": DECODER},
        states=states,
    )


def _batch(options: GraphOptions) -> int:
    """Return how many sources to trace with: a hint, where it is a symbol."""
    return 3 if options.batch else 1


def _mask(name: str, form: SourceForm, options: GraphOptions) -> tuple[dict[str, torch.Tensor], DynamicAxes]:
    """Return the input that tells sources from padding, and its axes; nothing where all sources of a batch have one length."""
    if not (options.batch and form.masked):
        return {}, {}
    example = torch.zeros((_batch(options), form.hint), dtype=torch.int64, device="meta")
    return {name: example}, {name: {0: BATCH, 1: LENGTH}}


@dataclass(frozen=True)
class _Probed:
    """What a model showed when it ran on shapes.

    Attributes:
        cross: keys and values of its source.
        states: what its decoder keeps.
        width: of the encoder's hidden states.
        answer: transformers' class in which the encoder gives them.
    """

    cross: tuple[CrossState, ...]
    states: tuple[StateTensor, ...]
    width: int
    answer: type


def _probed(network: Any, form: SourceForm, dtype: torch.dtype) -> _Probed:
    try:
        with torch.no_grad():
            (first, read), (second, _) = (
                _probe(network, form, dtype, batch, steps) for batch, steps in ((1, 2), (2, 3))
            )
    except T2NError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise CaptureError(
            f"{type(network).__name__} cannot run as an encoder and a decoder with shapes only: {described(error)}",
            "This family is not supported yet; --debug shows where it fails.",
        ) from error
    said = {slot: tensor for slot, tensor in first.states.items() if slot.kind in (CROSS_KEY, CROSS_VALUE)}
    if not said:
        raise CaptureError(
            f"{type(network).__name__} does not store cross-attention keys and values in transformers' cache.",
            "Its cross-attention is not supported yet.",
        )
    cross = tuple(_cross_state(slot, tensor, form) for slot, tensor in said.items())
    states = describe_states(_own(first), _own(second), type(network).__name__)
    return _Probed(cross, states, int(read[0].shape[-1]), type(read))


def _own(probe: Probe) -> Probe:
    """Return it without what is said of the source."""
    states = {slot: tensor for slot, tensor in probe.states.items() if slot.kind not in (CROSS_KEY, CROSS_VALUE)}
    return replace(probe, states=states)


def _cross_state(slot: Slot, tensor: torch.Tensor, form: SourceForm) -> CrossState:
    _, heads, length, width = tensor.shape
    return CrossState(f"{slot.kind}_{slot.layer}", slot, (BATCH, heads, LENGTH if form.dynamic else length, width))


def _probe(network: Any, form: SourceForm, dtype: torch.dtype, batch: int, steps: int) -> tuple[Probe, Any]:
    given = {each.name: each.meta(batch, form.hint, dtype) for each in form.inputs}
    ids = torch.zeros((batch, steps), dtype=torch.int64, device="meta")
    read, states = run_from_source(network, ids, given)
    return Probe(batch, steps, states), read
