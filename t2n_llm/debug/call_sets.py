"""The calls that a causal LM is diagnosed with: a prefill, a decode step and a chunk, of sizes that cannot be mistaken.

In: a model. Out: `ModelCalls`: keywords of three calls, and which axes are the new tokens `S` and the past ones `P`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from generic_export.errors import CaptureError, described
from kvcache.compat import CACHE_NAMES, cache_keyword, cache_of
from kvcache.forms import StateForm, state_form
from kvcache.operators import ExportedCode
from kvcache.states.tensors import States, StateTensor
from t2n_llm.graph.causal_lm import probe_states

logger = logging.getLogger(__name__)

# Distinct primes: no size is another one, or the sum of two others, by accident. (new tokens, past tokens)
PREFILL, DECODE, CHUNK = (7, 0), (1, 11), (5, 13)
SIZES = (PREFILL, DECODE, CHUNK)
_STATELESS = (7, 11, 5)  # a model that keeps no state at all
_STATE = "state"  # of RWKV, which has no cache


@dataclass(frozen=True)
class ModelCalls:
    """Calls of a causal LM.

    Attributes:
        keywords: of each call; caches in them are filled by the model itself, and used by one call each.
        axes: symbols of axes of its inputs, `{"input_ids": {1: "S"}}`.
        names: `prefill`, `decode`, `chunk`.
        code: to be entered around the calls, as it is around an export's.
    """

    keywords: tuple[Mapping[str, Any], ...]
    axes: Mapping[str, Mapping[int, str]]
    names: tuple[str, ...]
    code: ExportedCode


def calls_of(model: nn.Module, *, batch: int = 1, seed: int = 0, masked: bool = False) -> ModelCalls:
    """Make the calls of a model: with its states in the form that an export gives them, else with the model's own.

    Args:
        model: a transformers causal LM, on the CPU or the meta device.
        batch: sequences at a time.
        seed: of the tokens.
        masked: the model's attention relies on masks alone, see `kvcache.attention.operator.AttentionChoice`.

    Raises:
        CaptureError: the model does not run.
    """
    tokens = _Tokens(model, batch, seed)
    with torch.no_grad():
        code = ExportedCode(state_form(model), masked=masked)
        return _as_exported(model, tokens, code) or _with_own_caches(model, tokens, code)


class _Tokens:
    """A seeded source of token numbers that every vocabulary has."""

    def __init__(self, model: nn.Module, batch: int, seed: int) -> None:
        config: Any = model.config
        self._vocabulary = int(getattr(config.get_text_config(decoder=True), "vocab_size", 0) or 8)
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._generator = torch.Generator().manual_seed(seed)
        self.batch = batch

    def take(self, count: int) -> torch.Tensor:
        """Return int64 [batch, count]."""
        ids = torch.randint(0, self._vocabulary, (self.batch, count), generator=self._generator)
        return ids.to(self._device)


def _as_exported(model: nn.Module, tokens: _Tokens, code: ExportedCode) -> ModelCalls | None:
    """Return calls that start from explicit states, as an export runs the model; None where it does not run so."""
    form = code.form
    try:
        states = probe_states(model, form)
        filled = {past: _states_after(model, form, states, tokens, past) for _, past in SIZES}
    except Exception as error:  # whatever the model's own code raises: it is tried with its own state then
        logger.info("%s does not run with explicit states: %s", type(model).__name__, described(error))
        return None
    keywords = tuple(
        form.keywords(model, filled[past], code.last_read, input_ids=tokens.take(steps)) for steps, past in SIZES
    )
    axes: dict[str, dict[int, str]] = {"input_ids": {1: "S"}}
    growing = next((state for state in states if state.kind == "cache_key"), None)
    cache = next((name for name in (*CACHE_NAMES, _STATE) if name in keywords[0]), None)
    if growing is not None and growing.axis is not None and cache is not None:
        axes[f"{cache}.key_{growing.layer}"] = {growing.axis: "P"}
    return ModelCalls(keywords, axes, ("prefill", "decode", "chunk"), code)


def _states_after(
    model: nn.Module, form: StateForm, states: Sequence[StateTensor], tokens: _Tokens, past: int
) -> States:
    """Return the states after some tokens; those of none have their shapes, too, as a graph takes them."""
    device = next(model.parameters()).device
    start = {
        state.slot: torch.zeros(state.sizes(tokens.batch, 0), dtype=state.torch_dtype, device=device)
        for state in states
    }
    return form.run(model, start, input_ids=tokens.take(past))[1] if past else start


def _with_own_caches(model: nn.Module, tokens: _Tokens, code: ExportedCode) -> ModelCalls:
    """Return calls with whatever state the model makes itself; its prefill is given none."""
    keywords: list[dict[str, Any]] = [{"input_ids": tokens.take(PREFILL[0]), "use_cache": True}]
    for steps, past in (DECODE, CHUNK):
        found = _own_cache(model, tokens, past)
        if found is None:
            return _without_caches(tokens, code)
        name, cache = found
        given = {"input_ids": tokens.take(steps), name: cache, "use_cache": True}
        if not _runs(model, given):
            continue
        keywords.append(given | {name: _own_cache(model, tokens, past)[1]})  # type: ignore[index]
    if len(keywords) == 1:
        return _without_caches(tokens, code)
    names = ("prefill", "decode", "chunk")[: len(keywords)]
    return ModelCalls(tuple(keywords), {"input_ids": {1: "S"}}, names, code)


def _own_cache(model: nn.Module, tokens: _Tokens, length: int) -> tuple[str, Any] | None:
    try:
        result = model(input_ids=tokens.take(length), use_cache=True)
    except Exception as error:  # whatever the model's own code raises
        raise CaptureError(
            f"{type(model).__name__} does not run in PyTorch: {described(error)}",
            "Fix the model first; --debug shows the traceback.",
        ) from error
    if (cache := cache_of(result)) is not None:
        return cache_keyword(model.forward), cache
    state = getattr(result, _STATE, None)
    return None if state is None else (_STATE, state)


def _runs(model: nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Say whether a model accepts a call: recurrent ones go on one token at a time, some of them."""
    try:
        model(**keywords)
    except Exception:
        return False
    return True


def _without_caches(tokens: _Tokens, code: ExportedCode) -> ModelCalls:
    keywords = tuple({"input_ids": tokens.take(steps), "use_cache": False} for steps in _STATELESS)
    return ModelCalls(keywords, {"input_ids": {1: "S"}}, ("short", "long", "shorter"), code)


__all__ = ["CHUNK", "DECODE", "PREFILL", "ModelCalls", "calls_of"]
