"""Test bundles: PyTorch's inputs and answers as npz files in the layout that tract's command line reads.

float16 does not exist there (docs/contributing/engine-facts.md#bundles-in-npz): arrays are f32, and the command casts
(`--allow-float-casts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.inference_target.tract.engines.cli import write_bundle
from kvcache.states.tensors import PAST_LENGTH, StateTensor
from t2n_llm.check.reference import ReferenceRun

GENERATION_TURNS = 16  # enough to see a cache go wrong, small enough to ship


@dataclass(frozen=True)
class Bundle:
    """One npz: the inputs of each turn, and what PyTorch answers to the last.

    Attributes:
        name: file name without suffix.
        turns: inputs by name; the first turn holds the states.
        expected: outputs by name after the last turn.
    """

    name: str
    turns: tuple[Mapping[str, np.ndarray], ...]
    expected: Mapping[str, np.ndarray]

    def write(self, folder: Path, caches: Mapping[str, str]) -> Path:
        """Write `<name>.npz`; `caches` maps a cache input to its output, see `write_bundle`."""
        path = folder / f"{self.name}.npz"
        write_bundle(path, self.turns, self.expected, caches=caches)
        return path


def make_bundles(reference: ReferenceRun, states: Sequence[StateTensor], num_logits_to_keep: int) -> list[Bundle]:
    """Return the bundles of one export: prefill, chunked prefill, a decode step with a past, generation.

    The command feeds keys and values from turn to turn, and nothing else: models with states of fixed size get the bundles of
    one turn.

    Args:
        reference: what PyTorch said.
        states: the graph's states.
        num_logits_to_keep: positions whose logits the graph gives (0 for all).
    """
    plan = reference.plan
    empty = {state.input_name: state.at_start(1) for state in states}
    chunks = list(pairwise((0, *plan.chunk_ends)))
    length = len(plan.text_ids)

    def kept(rows: np.ndarray, steps: int) -> np.ndarray:
        count = steps if num_logits_to_keep == 0 else min(num_logits_to_keep, steps)
        return np.ascontiguousarray(rows[len(rows) - count :][None])

    def ids(values: Sequence[int]) -> np.ndarray:
        return np.array([list(values)], np.int64)

    full = {state.output_name: _state_after(reference, state, length) for state in states}
    bundles = [
        Bundle(
            "prefill",
            ({"input_ids": ids(plan.text_ids), **empty},),
            {"outputs": kept(reference.text_logits, length), **full},
        )
    ]
    past = _past_states(reference, states, length - 1)
    if past is not None and not _held_by_engine(reference, states):
        step = {"input_ids": ids(plan.text_ids[-1:]), **past}
        bundles.append(Bundle("decode_step", (step,), {"outputs": kept(reference.text_logits, 1), **full}))
    if not all(state.grows for state in states):
        return bundles

    prompt = plan.text_ids[: plan.prompt_length]
    fed = reference.greedy_ids[: min(GENERATION_TURNS, len(reference.greedy_ids)) - 1]
    last_start, last_end = chunks[-1]
    pieces = [{"input_ids": ids(plan.text_ids[start:end]), **(empty if start == 0 else {})} for start, end in chunks]
    turns = [{"input_ids": ids(prompt), **empty}, *({"input_ids": ids([token])} for token in fed)]
    return [
        *bundles,
        Bundle("chunked_prefill", tuple(pieces), {"outputs": kept(reference.chunk_logits, last_end - last_start)}),
        Bundle("generation", tuple(turns), {"outputs": kept(reference.greedy_logits[: len(fed) + 1], 1)}),
    ]


def _held_by_engine(reference: ReferenceRun, states: Sequence[StateTensor]) -> bool:
    """Whether the model keeps something that is no input of the graph: then a past cannot be given."""
    return bool(set(reference.text_states) - {state.slot for state in states})


def _past_states(reference: ReferenceRun, states: Sequence[StateTensor], length: int) -> dict[str, np.ndarray] | None:
    """Return the states before the last token by input name; None where the reference does not know them."""
    past = {}
    for state in states:
        if state.axis is not None or state.slot == PAST_LENGTH:
            past[state.input_name] = _state_after(reference, state, length)
        elif state.slot in reference.past_states:
            past[state.input_name] = reference.past_states[state.slot]
        else:
            return None
    return past


def _state_after(reference: ReferenceRun, state: StateTensor, length: int) -> np.ndarray:
    """Return a state that grows, or that windows cut, after the first `length` tokens; one of fixed size after all of them."""
    if state.slot == PAST_LENGTH:
        return np.array([length], np.int64)
    whole = reference.text_states[state.slot]
    if state.axis is None:
        return whole
    return np.ascontiguousarray(np.take(whole, range(length - state.kept(length), length), state.axis))


def bundles_size(states: Sequence[StateTensor], config: Any, length: int, num_logits_to_keep: int) -> int:
    """Return about how many bytes `make_bundles` writes for a text of `length` tokens."""
    stored = sum(prod(state.sizes(1, length)) for state in states)
    kept = length if num_logits_to_keep == 0 else min(num_logits_to_keep, length)
    logits = kept * config.get_text_config(decoder=True).vocab_size
    # States: as output and as `_concat` in two bundles, as input in one. Logits: in all four.
    return 4 * (5 * stored + 4 * logits)
