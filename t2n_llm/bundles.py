"""Test bundles: PyTorch's inputs and answers as npz files in the layout that tract's command line reads.

float16 does not exist there (facts/tract.md §4.4): arrays are f32, and the command casts (`--allow-float-casts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from generic_export.inference_target.tract.cli import write_bundle
from kvcache.cache import CacheTensor
from t2n_llm.model import Skeleton
from t2n_llm.reference import ReferenceRun

GENERATION_TURNS = 16  # enough to see a cache go wrong, small enough to ship


@dataclass(frozen=True)
class Bundle:
    """One npz: the inputs of each turn, and what PyTorch answers to the last.

    Attributes:
        name: file name without suffix.
        turns: inputs by name; the first turn holds the caches.
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


def make_bundles(reference: ReferenceRun, caches: Sequence[CacheTensor], num_logits_to_keep: int) -> list[Bundle]:
    """Return the bundles of one export: prefill, chunked prefill, a decode step with a past, generation.

    Args:
        reference: what PyTorch said.
        caches: the graph's states.
        num_logits_to_keep: positions whose logits the graph gives (0 for all).
    """
    plan = reference.plan
    empty = {cache.input_name: np.zeros(cache.shape(1, 0), np.float32) for cache in caches}
    chunks = list(pairwise((0, *plan.chunk_ends)))
    length = len(plan.text_ids)

    def kept(rows: np.ndarray, steps: int) -> np.ndarray:
        count = steps if num_logits_to_keep == 0 else min(num_logits_to_keep, steps)
        return np.ascontiguousarray(rows[len(rows) - count :][None])

    def ids(values: Sequence[int]) -> np.ndarray:
        return np.array([list(values)], np.int64)

    full_caches = {cache.output_name: array for cache, array in zip(caches, reference.text_caches, strict=True)}
    past = {
        cache.input_name: np.ascontiguousarray(array[:, :, : length - 1])
        for cache, array in zip(caches, reference.text_caches, strict=True)
    }
    prompt = plan.text_ids[: plan.prompt_length]
    fed = reference.greedy_ids[: min(GENERATION_TURNS, len(reference.greedy_ids)) - 1]
    last_start, last_end = chunks[-1]
    return [
        Bundle(
            "prefill",
            ({"input_ids": ids(plan.text_ids), **empty},),
            {"outputs": kept(reference.text_logits, length), **full_caches},
        ),
        Bundle(
            "chunked_prefill",
            tuple(
                {"input_ids": ids(plan.text_ids[start:end]), **(empty if start == 0 else {})} for start, end in chunks
            ),
            {"outputs": kept(reference.text_logits, last_end - last_start)},
        ),
        Bundle(
            "decode_step",
            ({"input_ids": ids(plan.text_ids[-1:]), **past},),
            {"outputs": kept(reference.text_logits, 1), **full_caches},
        ),
        Bundle(
            "generation",
            ({"input_ids": ids(prompt), **empty}, *({"input_ids": ids([token])} for token in fed)),
            {"outputs": kept(reference.greedy_logits[: len(fed) + 1], 1)},
        ),
    ]


def bundles_size(skeleton: Skeleton, length: int, num_logits_to_keep: int) -> int:
    """Return about how many bytes `make_bundles` writes for a text of `length` tokens."""
    caches = sum(prod(cache.shape(1, length)) for cache in skeleton.caches)
    kept = length if num_logits_to_keep == 0 else min(num_logits_to_keep, length)
    logits = kept * skeleton.config.get_text_config(decoder=True).vocab_size
    # Caches: as output and as `_concat` in two bundles, as input in one. Logits: in all four.
    return 4 * (5 * caches + 4 * logits)
