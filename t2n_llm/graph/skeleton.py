"""The skeleton: a causal LM without weights, wrapped so that its states are plain inputs and outputs.

In: a transformers config. Out: a `Skeleton` that `torch.export` can capture on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from generic_export.errors import CaptureError, T2NError, described
from generic_export.torch_graph.request import DynamicAxes
from kvcache.attention.latent import absorb_latents
from kvcache.attention.operator import ATTENTION_NAME, AttentionChoice
from kvcache.forms import StateForm, accepts, state_form
from kvcache.forms.cache import WINDOW_IN_CACHE_ALONE, CacheForm
from kvcache.states.tensors import Probe, Slot, StateTensor, describe_states
from kvcache.states.windows import cut_to_windows, sliding_windows
from t2n_llm.compat import has_nowhere_to_count
from t2n_llm.graph.capture import weightless_network
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import Ranges
from t2n_llm.source.empty_model import CAUSAL_LM, take_buffers, tied_names

WRAPPER_ATTRIBUTE = "causal_lm"


class CausalLMWithCache(nn.Module):
    """Gives a transformers causal LM a flat signature: `(input_ids, *past) -> (logits, *present)`."""

    def __init__(self, causal_lm: nn.Module, num_logits_to_keep: int, form: StateForm, slots: tuple[Slot, ...]) -> None:
        """Wrap a model.

        Args:
            causal_lm: the model.
            num_logits_to_keep: positions whose logits are computed, from the end; 0 for all.
            form: how the family takes its states.
            slots: where the model keeps them, in the order of the inputs.
        """
        super().__init__()
        self.causal_lm = causal_lm
        self.num_logits_to_keep = num_logits_to_keep
        self.form = form
        self.slots = slots

    def forward(self, input_ids: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model.

        Args:
            input_ids: int64 [B, S].
            past: the states before these tokens; keys and values are [B, Hkv, P, D].

        Returns:
            Logits [B, kept, vocab], then the states after them; keys and values are [B, Hkv, P + S, D].
        """
        kept = self._positions_to_keep(input_ids)
        chooses = accepts(self.causal_lm, "logits_to_keep")
        states = dict(zip(self.slots, past, strict=True))
        options = {"logits_to_keep": kept} if chooses else {}
        logits, after = self.form.run(self.causal_lm, states, input_ids=input_ids, **options)
        if not chooses:
            logits = _last(logits, kept)
        return (logits, *(after[slot] for slot in self.slots))

    def _positions_to_keep(self, input_ids: torch.Tensor) -> int | torch.Tensor:
        if self.num_logits_to_keep <= 1:
            return self.num_logits_to_keep
        steps = input_ids.shape[1]
        # min(): a call with fewer tokens than asked for, such as a decode step, keeps all of them.
        first = steps - torch.sym_min(steps, self.num_logits_to_keep)
        return torch.arange(first, steps, device=input_ids.device)


@dataclass(frozen=True)
class Skeleton:
    """A causal LM on the meta device, and what is needed to capture and feed it.

    Attributes:
        module: the wrapped model; its parameters have shapes and dtypes, no values.
        buffers: the values of buffers that the model computes itself (rotary frequencies), by qualified name.
        states: what it keeps between calls, in the order of inputs and outputs.
        tied: for each parameter that is another one's alias, the name of that other one.
        config: the transformers config.
        dtype: element type of weights, activations and keys and values.
        batched: whether the batch is the symbol `B` instead of 1.
        engine_states: what the engine keeps by itself, so that it is neither input nor output.
        ranges: what was measured of its f16 tensors; None where nobody looked.
    """

    module: CausalLMWithCache
    buffers: Mapping[str, torch.Tensor]
    states: tuple[StateTensor, ...]
    tied: Mapping[str, str]
    config: Any
    dtype: torch.dtype
    batched: bool = False
    engine_states: tuple[StateTensor, ...] = ()
    ranges: Ranges | None = None

    @property
    def network(self) -> nn.Module:
        """The transformers model: its parameters bear the names of the graph's variables."""
        return self.module.causal_lm

    @property
    def input_names(self) -> tuple[str, ...]:
        """`input_ids`, then the states."""
        return ("input_ids", *(state.input_name for state in self.states))

    @property
    def output_names(self) -> tuple[str, ...]:
        """`outputs` (logits), then the states."""
        return ("outputs", *(state.output_name for state in self.states))

    @property
    def dynamic_axes(self) -> DynamicAxes:
        """`S` new tokens, `P` past tokens, and `B` sequences when batched."""
        batch = {0: "B"} if self.batched else {}
        states = {state.input_name: state.dynamic_axes(batched=self.batched) for state in self.states}
        return {"input_ids": batch | {1: "S"}} | {name: axes for name, axes in states.items() if axes}

    def inputs_of(self, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return what a first call with these tokens gives: int64 [1, S], and the states before any token."""
        states = (torch.from_numpy(state.at_start(1)) for state in self.states)
        return (torch.tensor([tokens], dtype=torch.int64), *states)

    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        """Return meta tensors of the right shapes; the sizes are only hints and never reach the graph."""
        batch, past = 3 if self.batched else 1, _several_blocks(self.config) + 7
        ids = torch.zeros((batch, 5), dtype=torch.int64, device="meta")
        states = (
            torch.zeros(state.sizes(batch, past), dtype=state.torch_dtype, device="meta") for state in self.states
        )
        return (ids, *states)


def build_skeleton(
    config: Any, options: GraphOptions, *, attention: AttentionChoice, experts: str, trust_remote_code: bool = False
) -> Skeleton:
    """Instantiate the model class of a config without allocating a weight.

    Args:
        config: a transformers config; it is not modified.
        options: element type, kept logits, batch, window caches and tensors that stay in f32.
        attention: chooses the attention implementation (see `kvcache.explicit_attention`).
        experts: name of the experts implementation (see `kvcache.explicit_experts`).
        trust_remote_code: allow code that comes with the checkpoint.

    Raises:
        UnknownArchitectureError: transformers has no causal LM class for the config.
        CaptureError: the model keeps its state in a form that has no translation.
    """

    def build(implementation: str) -> Skeleton:
        causal_lm = weightless_network(CAUSAL_LM, config, options, implementation, experts, trust_remote_code)
        if options.absorbs_latents and implementation == ATTENTION_NAME:
            absorb_latents(causal_lm)
        tied = tied_names(causal_lm)
        buffers = take_buffers(causal_lm)
        form = state_form(causal_lm)
        states = probe_states(causal_lm, form)
        if options.window_cache:
            form, states = _windowed(causal_lm, form, states)
        slots = tuple(state.slot for state in states)
        module = CausalLMWithCache(causal_lm, options.num_logits_to_keep, form, slots).eval()
        return Skeleton(module, buffers, states, tied, causal_lm.config, options.torch_dtype, options.batch)

    return attention.first_that_runs(build)


def _several_blocks(config: Any) -> int:
    """Return how many tokens are two of the largest blocks that a model sums up (DeepSeek-V4): PyTorch takes one for a number."""
    rates = getattr(config, "compress_rates", None) or {}
    return 2 * max(rates.values(), default=0)


def _windowed(
    model: Any, form: StateForm, states: tuple[StateTensor, ...]
) -> tuple[StateForm, tuple[StateTensor, ...]]:
    cut = type(form) is CacheForm and model.config.model_type not in WINDOW_IN_CACHE_ALONE
    windows = sliding_windows(model.config) if cut else {}
    return CacheForm(windows), cut_to_windows(states, windows, type(model).__name__)


def _last(logits: torch.Tensor, kept: int | torch.Tensor) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return logits[:, kept]
    return logits if kept == 0 else logits[:, -kept:]


def probe_states(model: nn.Module, form: StateForm) -> tuple[StateTensor, ...]:
    """Learn the states of a model by running it twice, on shapes alone when it has no weights."""
    first, second = (_probe(model, form, batch, steps) for batch, steps in ((1, 2), (2, 3)))
    if not first.states:
        raise CaptureError(
            f"{type(model).__name__} does not use transformers' cache.",
            "Its states are not supported yet.",
        )
    return describe_states(first, second, type(model).__name__)


def _probe(model: nn.Module, form: StateForm, batch: int, steps: int) -> Probe:
    ids = torch.zeros((batch, steps), dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            return Probe(batch, steps, form.run(model, None, input_ids=ids)[1])
    except T2NError:
        raise
    except Exception as error:  # whatever the model's own code raises
        if has_nowhere_to_count(error):
            raise CaptureError(
                f"{type(model).__name__}: all layers of its config use linear attention, and transformers reads "
                "positions from the cache of an attention layer.",
                "Use a config with an attention layer in layer_types, as the family's checkpoints have.",
            ) from error
        raise CaptureError(
            f"{type(model).__name__} cannot run as a cached decoder{_on_shapes(model)}: {described(error)}",
            "This family is not supported yet; --debug shows where it fails.",
        ) from error


def _on_shapes(model: nn.Module) -> str:
    return " with shapes only" if any(parameter.is_meta for parameter in model.parameters()) else ""
