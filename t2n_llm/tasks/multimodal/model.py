"""The three graphs of a multimodal model: `embed`, `vision` or `audio`, and `decoder`, made of one weightless network.

In: a transformers config. Out: a captured `ModelGraph` for each; they share the names of the network's parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from generic_export.errors import CaptureError
from kvcache import explicit_attention, explicit_experts
from kvcache.forms import StateForm, state_form
from kvcache.states.tensors import Slot
from t2n_llm.compat import keep_own_attention
from t2n_llm.graph.capture import capture_model, weightless_network
from t2n_llm.graph.causal_lm import probe_states
from t2n_llm.graph.options import DEFAULT_IMAGE_SIZE, GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.empty_model import MULTIMODAL_MODEL, take_buffers, tied_names
from t2n_llm.tasks.multimodal.codes import codes_left_out
from t2n_llm.tasks.multimodal.cross_attention import cross_names, reading_images
from t2n_llm.tasks.multimodal.encoder import EncoderModule
from t2n_llm.tasks.multimodal.family import (
    FRAME_MASK,
    MODALITY_TYPES,
    PER_LAYER,
    POSITIONS,
    SEEN_ROWS,
    TOKEN_TYPES,
    Family,
)

EMBED, DECODER = "embed", "decoder"
"""Two of the archives; the third is the encoder's, see `Medium.role`."""


def deepstack_name(layer: int) -> str:
    """Return what the rows of images that are added after a decoder layer are called, in `vision` and in `decoder`."""
    return f"deepstack_embeds_{layer}"


_EMBEDDERS = ("embed_vision", "embed_audio")
"""Modules of Gemma 3n with tables for the last tokens of its vocabulary, such as the one after an image."""


class EmbedModule(nn.Module):
    """`input_ids -> (inputs_embeds, [per_layer_inputs])`."""

    def __init__(self, network: Any, image_token_id: int, *, per_layer: bool) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network
        self.image_token_id = image_token_id
        self.per_layer = per_layer

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return [1, S, D] for int64 [1, S], and what `Family.per_layer` says.

        The image token, which may be beyond the table, gives the row of the padding token.
        """
        filler = self.network.config.get_text_config().pad_token_id or 0
        known = torch.where(input_ids == self.image_token_id, filler, input_ids)
        rows: torch.Tensor = self.network.get_input_embeddings()(known)
        for own in filter(None, (getattr(self.network.base_model, name, None) for name in _EMBEDDERS)):
            first = getattr(own, "vocab_offset", None)
            if first is not None:
                is_own = (known >= first) & (known < first + own.vocab_size)
                rows = torch.where(is_own[..., None], own(input_ids=torch.where(is_own, known, first)), rows)
        if not self.per_layer:
            return (rows,)
        return rows, self.network.get_decoder().get_per_layer_inputs(known)


class DecoderModule(nn.Module):
    """`(inputs_embeds, *deepstack_embeds, [what else the family takes], *past) -> (logits, *present)`."""

    def __init__(
        self,
        network: Any,
        deepstack: tuple[int, ...],
        further: str | None,
        form: StateForm,
        slots: tuple[Slot, ...],
        *,
        takes_ids: bool = False,
        bidirectional_prompts: bool = False,
        cross_layers: tuple[int, ...] = (),
    ) -> None:
        """Wrap a network.

        Args:
            network: transformers' model.
            deepstack: see `Family.deepstack_layers`.
            further: see `Family.decoder_input`.
            form: how it takes its states.
            slots: where it keeps its states, in the order of the inputs.
            takes_ids, bidirectional_prompts, cross_layers: see `Family`.
        """
        super().__init__()
        self.network = network
        self.deepstack = deepstack
        self.further = further
        self.form = form
        self.slots = slots
        self.takes_ids = takes_ids
        self.bidirectional_prompts = bidirectional_prompts
        self.cross_layers = cross_layers

    def forward(self, inputs_embeds: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the decoder.

        Args:
            inputs_embeds: [1, S, D], image rows put in.
            rest: rows [1, S, D] for each of `Family.deepstack_layers`, zeros where no image is; what else the family takes beside
                embeddings; ids [1, S], if `Family.takes_ids`; keys and values [rows, width] of each of `Family.cross_layers`;
                then the states. An image that is read in both directions must be in one call, as a whole.

        Returns:
            The last position's logits [1, 1, vocab], then the states.
        """
        rows, rest = rest[: len(self.deepstack)], rest[len(self.deepstack) :]
        given, rest = (rest[:1], rest[1:]) if self.further else ((), rest)
        ids, rest = (rest[0], rest[1:]) if self.takes_ids else (None, rest)
        seen, past = rest[: 2 * len(self.cross_layers)], rest[2 * len(self.cross_layers) :]
        options: dict[str, Any] = {"logits_to_keep": 1}
        if self.further in (POSITIONS, PER_LAYER):
            options[self.further] = given[0]
        elif self.further == TOKEN_TYPES:
            # transformers reads the types by position, from the start of the text; what is past is seen anyway.
            before = torch.zeros((1, past[0].shape[2]), dtype=torch.int64, device=given[0].device)
            taken = inspect.signature(self.network.forward).parameters
            name = TOKEN_TYPES if TOKEN_TYPES in taken else MODALITY_TYPES
            options[name] = torch.cat((before, given[0]), dim=1)
        elif self.further == SEEN_ROWS:
            options[SEEN_ROWS] = given[0][:, :, None]
        first = _taken_for_first_call() if self.bidirectional_prompts else nullcontext()
        added = _added_to_layers(self.network, dict(zip(self.deepstack, rows, strict=True)))
        seeing = reading_images(self.network, self.cross_layers, seen)
        with added, seeing, first, _with_ids(self.network, ids), codes_left_out(self.network):
            states = dict(zip(self.slots, past, strict=True))
            logits, after = self.form.run(self.network, states, inputs_embeds=inputs_embeds, **options)
        return (logits, *(after[slot] for slot in self.slots))


@contextmanager
def _added_to_layers(network: Any, rows: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Add rows [1, S, D] to what a decoder's layers give, for the length of the block; -1 is for what the first layer takes.

    transformers adds them where a mask says so, and the number of those places is not known to a graph.
    """
    layers = list(network.get_decoder().layers) if rows else []
    hooks = [
        layers[0].register_forward_pre_hook(lambda _module, given, added=added: (given[0] + added, *given[1:]))
        if layer < 0
        else layers[layer].register_forward_hook(lambda _module, _given, hidden, added=added: hidden + added)
        for layer, added in rows.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _with_ids(network: Any, ids: torch.Tensor | None) -> Iterator[None]:
    """Let a decoder have the ids [1, S] of its tokens where it looks for the embeddings it is given in its table."""
    if ids is None:
        yield
        return
    with mock.patch.object(network.get_decoder(), "reverse_embedding", lambda _: ids):
        yield


@contextmanager
def _taken_for_first_call() -> Iterator[None]:
    """Let PaliGemma read token types in every call, for the length of the block: it does in the first call of a text alone."""
    from transformers import Cache

    with mock.patch.object(Cache, "is_initialized", False):
        yield


def build_multimodal(
    config: Any,
    family: Family,
    options: GraphOptions,
    *,
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[ModelGraph, ...]:
    """Build and capture the three graphs of a config, in the order in which a prompt passes them.

    Args:
        config: transformers config.
        family: of the config.
        options: element type and numerics; the batch is 1 and one position's logits are kept.
        name, revision: source model, recorded in the documents.
        trust_remote_code: allow code that comes with the model.

    Raises:
        UnknownArchitectureError: transformers has no such model for the config.
        CaptureError: the model cannot be captured; the message says where.
    """
    with explicit_attention() as attention, explicit_experts() as experts:

        def build(implementation: str) -> tuple[ModelGraph, ...]:
            network = weightless_network(MULTIMODAL_MODEL, config, options, implementation, experts, trust_remote_code)
            keep_own_attention(network)
            return _parts(network, family, options.torch_dtype, name, revision)

        return tuple(_captured(part, family, options) for part in attention.first_that_runs(build))


def _captured(part: ModelGraph, family: Family, options: GraphOptions) -> ModelGraph:
    try:
        return capture_model(part, options)
    except CaptureError as error:
        if part.role == family.medium.role and family.free_axes and not family.medium.hears:
            error.hint = (
                f"{error.hint or ''} Or fix the size of images, such as --image-size {DEFAULT_IMAGE_SIZE}.".strip()
            )
        raise


def typical_inputs(
    part: ModelGraph, tokens: Sequence[int], given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what a part is measured on: a text, random pixels or sound, and the rows of those before the text.

    Args:
        part: which of the three.
        tokens: of the text.
        given: outputs of the parts before it.

    Returns:
        Inputs by name, some of which not every part reads; nothing where one before it could not be run.
    """
    if part.role == EMBED:
        return {"input_ids": torch.tensor([tokens], dtype=torch.int64)}
    if part.role != DECODER:
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.ones(meta.shape, dtype=meta.dtype)
            if name == FRAME_MASK
            else torch.randn(meta.shape, generator=generator)
            for name, meta in part.inputs.items()
        }
    if SEEN_ROWS in part.inputs and "inputs_embeds" in given:
        tables = {name: rows for name, rows in given.items() if name in part.inputs}
        count = min((len(rows) for name, rows in tables.items() if name != "inputs_embeds"), default=0)
        return {
            **tables,
            SEEN_ROWS: torch.ones((1, len(tokens), count)),
            **{state.input_name: torch.from_numpy(state.at_start(1)) for state in part.states},
        }
    # The decoder takes the rows of images among those of the text, and the others by name.
    images = [rows for name, rows in given.items() if name not in part.inputs]
    if not images or "inputs_embeds" not in given:
        return {}
    seen, text = images[0].flatten(0, -2)[None], given["inputs_embeds"]
    rows = {
        name: torch.cat((added.flatten(0, -2)[None], torch.zeros_like(text)), dim=1)
        for name, added in given.items()
        if name in part.inputs and name != "inputs_embeds"
    }
    counts = seen.shape[1], text.shape[1]
    return {
        "inputs_embeds": torch.cat((seen, text), dim=1),
        **rows,
        TOKEN_TYPES: torch.tensor([[1] * counts[0] + [0] * counts[1]]),
        "input_ids": torch.tensor([[*[tokens[0]] * counts[0], *tokens]]),
        POSITIONS: torch.arange(sum(counts)).expand(3, 1, -1),
        **{state.input_name: torch.from_numpy(state.at_start(1)) for state in part.states},
    }


_STEPS, _PAST, _ROWS = 5, 7, 11  # hints, which never reach the graph
_STEP_AXES = {PER_LAYER: 1, SEEN_ROWS: 1}
_NO_TOKEN = -1
_REAL_ROWS = "image_rows"  # 1 for each row of an image that is seen at all


def _parts(network: Any, family: Family, dtype: torch.dtype, name: str, revision: str | None) -> tuple[ModelGraph, ...]:
    tied, media_encoder = tied_names(network), family.encoder(network)
    buffers = take_buffers(network)
    form = state_form(network)
    states = probe_states(network, form)
    config = network.config
    width = config.get_text_config(decoder=True).hidden_size

    def meta(*shape: int, of: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device="meta")

    deepstack = family.deepstack_layers
    rows = {deepstack_name(layer): meta(1, _STEPS, width, of=dtype) for layer in range(len(deepstack))}
    axes = family.position_axes if family.decoder_input == POSITIONS else 0
    shapes = {TOKEN_TYPES: (1, _STEPS), POSITIONS: (axes, 1, _STEPS), SEEN_ROWS: (1, _STEPS, _ROWS)}
    dtypes = {SEEN_ROWS: dtype}
    further = {
        name: meta(*shape, of=dtypes.get(name, torch.int64))
        for name, shape in shapes.items()
        if name == family.decoder_input
    }
    crossed = {name: meta(_ROWS, family.cross_width, of=dtype) for name in cross_names(family.cross_layers)}
    handed = dict.fromkeys(crossed, (1, family.cross_width))
    layered = [PER_LAYER] if family.decoder_input == PER_LAYER else []
    if layered:
        text = config.get_text_config(decoder=True)
        sizes = (1, _STEPS, text.num_hidden_layers, text.hidden_size_per_layer_input)
        further = {PER_LAYER: meta(*sizes, of=dtype)}
    tokens = {"input_ids": meta(1, _STEPS)} if family.takes_ids else {}
    before = {state.input_name: meta(*state.sizes(1, _PAST), of=state.torch_dtype) for state in states}
    embeds = {"inputs_embeds": meta(1, _STEPS, width, of=dtype)}
    slots = tuple(state.slot for state in states)
    stack = (3,) if family.stacks_images else ()
    embed = ModelGraph(
        role=EMBED,
        network=network,
        module=EmbedModule(network, _NO_TOKEN if crossed else family.image_token_id, per_layer=bool(layered)),
        buffers=buffers,
        tied=tied,
        inputs={"input_ids": meta(1, _STEPS)},
        output_names=("inputs_embeds", *layered),
        dynamic_axes={"input_ids": {1: "S"}},
        source_name=name,
        revision=revision,
        graph_name=EMBED,
    )
    medium = family.medium
    sensed = {medium.input_name: meta(*stack, *family.pixel_shape, of=dtype)}
    if family.masked:
        sensed[FRAME_MASK] = meta(*stack, family.pixel_shape[-1])
    encoder = replace(
        embed,
        role=medium.role,
        module=EncoderModule(network, media_encoder),
        buffers={**buffers, **media_encoder.buffers},
        inputs=sensed,
        output_names=(*crossed, _REAL_ROWS) if crossed else (medium.output_name, *rows),
        handed=handed,
        dynamic_axes={
            medium.input_name: {len(stack) + axis: size for axis, size in family.free_axes.items()},
            **({name: {0: "N"} for name in sensed} if stack else {}),
        },
    )
    grown = {state.input_name: state.dynamic_axes(batched=False) for state in states if state.grows}
    decoder = replace(
        embed,
        role=DECODER,
        module=DecoderModule(
            network,
            deepstack,
            family.decoder_input,
            form,
            slots,
            takes_ids=family.takes_ids,
            bidirectional_prompts=family.bidirectional_prompts,
            cross_layers=family.cross_layers,
        ),
        inputs={**embeds, **rows, **further, **tokens, **crossed, **before},
        handed=handed,
        output_names=("outputs", *(state.output_name for state in states)),
        dynamic_axes={
            **{name: {1: "S"} for name in (*embeds, *rows, *tokens)},
            **{name: {_STEP_AXES.get(name, given.ndim - 1): "S"} for name, given in further.items()},
            **({SEEN_ROWS: {1: "S", 2: "I"}} if crossed else {}),
            **{name: {0: "I"} for name in crossed},
            **grown,
        },
        states=states,
    )
    return tuple(
        replace(part, module=part.module.eval(), graph_name=part.role, properties={"role": part.role})
        for part in (embed, encoder, decoder)
    )
