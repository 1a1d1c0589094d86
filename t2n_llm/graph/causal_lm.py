"""A causal LM without weights, wrapped so that its states are plain inputs and outputs, and captured.

In: a transformers config. Out: a `ModelGraph`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from generic_export.errors import CaptureError, T2NError, described
from generic_export.torch_graph.request import DynamicAxes
from kvcache import explicit_attention, explicit_experts
from kvcache.attention.latent import absorb_latents
from kvcache.attention.operator import ATTENTION_NAME
from kvcache.forms import StateForm, accepts, state_form
from kvcache.forms.cache import WINDOW_IN_CACHE_ALONE, CacheForm
from kvcache.states.tensors import Probe, Slot, StateTensor, describe_states
from kvcache.states.windows import cut_to_windows, sliding_windows
from t2n_llm.compat import has_nowhere_to_count
from t2n_llm.graph.capture import capture_model, weightless_network
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import MODEL_ROLE, ModelGraph
from t2n_llm.source.empty_model import CAUSAL_LM, take_buffers, tied_names


class CausalLMWithCache(nn.Module):
    """Gives a transformers causal LM a flat signature: `(input_ids, *past) -> (logits, *present)`."""

    def __init__(self, network: nn.Module, num_logits_to_keep: int, form: StateForm, slots: tuple[Slot, ...]) -> None:
        """Wrap a model.

        Args:
            network: the model.
            num_logits_to_keep: positions whose logits are computed, from the end; 0 for all.
            form: how the family takes its states.
            slots: where the model keeps them, in the order of the inputs.
        """
        super().__init__()
        self.network = network
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
        chooses = accepts(self.network, "logits_to_keep")
        states = dict(zip(self.slots, past, strict=True))
        options = {"logits_to_keep": kept} if chooses else {}
        logits, after = self.form.run(self.network, states, input_ids=input_ids, **options)
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


def build_graph(
    config: Any,
    options: GraphOptions,
    *,
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelGraph:
    """Build the causal LM of a config without weights, and capture it.

    Args:
        config: a transformers config; it is not modified.
        options: element type, kept logits, batch, window caches and parameters that stay in f32.
        name, revision: source model, recorded in the document.
        trust_remote_code: allow code that comes with the checkpoint.

    Raises:
        UnknownArchitectureError: transformers has no causal LM class for the config.
        CaptureError: the model cannot be captured, or keeps its state in a form that has no translation.
    """
    with causal_lm(config, options, name=name, revision=revision, trust_remote_code=trust_remote_code) as graph:
        return capture_model(graph, options)


@contextmanager
def causal_lm(
    config: Any, options: GraphOptions, *, name: str, revision: str | None = None, trust_remote_code: bool = False
) -> Iterator[ModelGraph]:
    """Yield the causal LM of a config before its capture, for which it must be used inside the block.

    Args, Raises: see `build_graph`.
    """
    with explicit_attention() as attention, explicit_experts() as experts:

        def build(implementation: str) -> ModelGraph:
            network = weightless_network(CAUSAL_LM, config, options, implementation, experts, trust_remote_code)
            if options.absorbs_latents and implementation == ATTENTION_NAME:
                absorb_latents(network)
            tied, buffers, form = tied_names(network), take_buffers(network), state_form(network)
            states = probe_states(network, form)
            if options.window_cache:
                form, states = _windowed(network, form, states)
            module = CausalLMWithCache(
                network, options.num_logits_to_keep, form, tuple(state.slot for state in states)
            ).eval()
            return ModelGraph(
                role=MODEL_ROLE,
                network=network,
                module=module,
                buffers=buffers,
                tied=tied,
                inputs=_example_inputs(network.config, states, batched=options.batch),
                output_names=("outputs", *(state.output_name for state in states)),
                dynamic_axes=_dynamic_axes(states, batched=options.batch),
                source_name=name,
                revision=revision,
                graph_name=str(network.config.model_type),
                states=states,
            )

        yield attention.first_that_runs(build)


def _example_inputs(config: Any, states: Sequence[StateTensor], *, batched: bool) -> dict[str, torch.Tensor]:
    """Return meta tensors of the right shapes; the sizes are hints and never reach the graph."""
    batch, past = 3 if batched else 1, _several_blocks(config) + 7
    ids = torch.zeros((batch, 5), dtype=torch.int64, device="meta")
    return {"input_ids": ids} | {
        state.input_name: torch.zeros(state.sizes(batch, past), dtype=state.torch_dtype, device="meta")
        for state in states
    }


def _dynamic_axes(states: Sequence[StateTensor], *, batched: bool) -> DynamicAxes:
    """Return `S` new tokens, `P` past tokens, and `B` sequences when batched."""
    axes = {state.input_name: state.dynamic_axes(batched=batched) for state in states}
    return {"input_ids": ({0: "B"} if batched else {}) | {1: "S"}} | {name: axis for name, axis in axes.items() if axis}


def typical_inputs(graph: ModelGraph, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the inputs of a first call with these tokens: int64 [1, S], and the states before any token."""
    states = {state.input_name: torch.from_numpy(state.at_start(1)) for state in graph.states}
    return {"input_ids": torch.tensor([tokens], dtype=torch.int64), **states}


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
