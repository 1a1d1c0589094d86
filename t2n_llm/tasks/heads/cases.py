"""What a single-pass archive is asked in its check: other batches and lengths than it was captured with, and padding.

In: a `Head`, its `Reading`, a config, maybe a tokenizer. Out: `HeadCase`s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from t2n_llm.check.reference import plan_check
from t2n_llm.tasks.heads.inputs import BATCH, STEPS, TEXTS, Input, Reading, Values
from t2n_llm.tasks.heads.table import Head, Reads


@dataclass(frozen=True)
class HeadCase:
    """One question.

    Attributes:
        name: what is special about it.
        inputs: arrays by the names of the graph, in its order.
        mask: int64 [..., S], 1 for a token, where texts are read with one; what is said of padding is not compared.
        shape: texts and tokens, where texts are read.
    """

    name: str
    inputs: Mapping[str, np.ndarray]
    mask: np.ndarray | None = None
    shape: tuple[int, int] | None = None

    @property
    def values(self) -> int:
        """How many values the inputs have."""
        return sum(array.size for array in self.inputs.values())


def plan_cases(head: Head, reading: Reading, config: Any, tokenizer: Any | None) -> tuple[HeadCase, ...]:
    """Choose the questions.

    Args:
        head: decides whether padding may be on the left: classifiers may read the first position, whatever is there.
        reading: what the graph is given, and whether it reads several at once.
        config: transformers config (vocabulary, position limit, window, padding token).
        tokenizer: turns a text into ids; None draws random ones.
    """
    if head.reads is Reads.TEXT:
        return _of_texts(head, reading, config, tokenizer)
    if any(each.values is Values.IDS for each in reading.inputs):
        return tuple(_of_mixed(reading, config, sizes, seed) for seed, sizes in enumerate(reading.others))
    return tuple(
        HeadCase(f"{_counted(sizes[BATCH])}, size {seed + 1}", reading.random(sizes, seed))
        for seed, sizes in enumerate(reading.others)
    )


def _counted(batch: int) -> str:
    return "one input" if batch == 1 else f"a batch of {batch}"


# --- texts --------------------------------------------------------------------------------------


def _of_texts(head: Head, reading: Reading, config: Any, tokenizer: Any | None) -> tuple[HeadCase, ...]:
    """Return a long text and a short one alone, and batches that need padding."""
    padding = padding_id(config)
    ids = _ids(reading, config, tokenizer, padding)
    long, half, short = len(ids), max(1, len(ids) // 2), max(1, len(ids) // 5)

    def case(name: str, lengths: Sequence[int], *, left: bool = False) -> HeadCase:
        rows, mask = _padded(ids, lengths, padding, reading.ids.ended, left=left)
        return HeadCase(name, _given(reading, rows, mask), mask, (mask.shape[0], mask.shape[1]))

    cases = [case("a long text", [long]), case("a short text", [short])]
    masked = any(each.values is Values.MASK for each in reading.inputs)
    if reading.reads_batches:
        cases.append(case("a batch without padding", [half, half]))
    if reading.reads_batches and masked:
        cases.append(case("a batch padded on the right", [long, 1, half]))
    if reading.reads_batches and masked and (head.per_token or head.pooled):
        cases.append(case("a batch padded on the left", [short, half], left=True))
    return tuple(cases)


_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm"})
"""Families that count positions from the one after the padding token's number."""


def _ids(reading: Reading, config: Any, tokenizer: Any | None, padding: int) -> list[int]:
    """Return the tokens of a text, none of which is padding: to models that look for it themselves it would hide there."""
    text = config.get_text_config(decoder=True)
    below = reading.ids.below
    if hasattr(text, "vocab_size"):
        ids = list(plan_check(config, tokenizer).text_ids)
    else:  # models of characters have no table of tokens
        ids = np.random.default_rng(0).integers(0, below, size=29).tolist()
    other = (padding + 1) % below
    ids = [other if token == padding else token for token in ids]
    if text.model_type in _OFFSET_POSITIONS:
        ids = ids[: max(2, text.max_position_embeddings - padding - 1)]
    return ids


def _padded(
    ids: Sequence[int],
    lengths: Sequence[int],
    padding: int,
    ended: Callable[[np.ndarray], np.ndarray],
    *,
    left: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch whose row i is a text of `lengths[i]` ids, each from another place, and its mask."""
    width = max(lengths)
    rows = np.full((len(lengths), width), padding, np.int64)
    mask = np.zeros_like(rows)
    for row, length in enumerate(lengths):
        places = slice(width - length, width) if left else slice(0, length)
        rows[row, places] = ended(np.roll(ids, -row)[:length])
        mask[row, places] = 1
    return rows, mask


def _given(reading: Reading, rows: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    second = np.cumsum(mask, axis=-1) * 2 > mask.sum(axis=-1, keepdims=True)
    made = {
        Values.IDS: rows,
        Values.MASK: mask,
        Values.MARKS: (~second & (mask == 1)).astype(np.int64),
        Values.TYPES: (second & (mask == 1)).astype(np.int64),
    }
    return {each.name: made[each.values] for each in reading.inputs}


def padding_id(config: Any) -> int:
    """Return what stands where there is no text."""
    text = config.get_text_config(decoder=True)
    padding = getattr(config, "pad_token_id", None)
    padding = getattr(text, "pad_token_id", None) if padding is None else padding
    return int(padding) if padding is not None else 0


# --- texts beside something else, or in rows of rows ----------------------------------------------


def _of_mixed(reading: Reading, config: Any, sizes: Mapping[str, int], seed: int) -> HeadCase:
    """Return random values, the last text padded on the right in all but the first case."""
    found = reading.random(sizes, seed)
    ids = reading.ids
    shape = found[ids.name].shape
    lengths = np.full(prod(shape[:-1]), shape[-1])
    lengths[-1] -= 2 if seed and any(each.values is Values.MASK for each in reading.inputs) else 0
    mask = (np.arange(shape[-1]) < lengths[:, None]).astype(np.int64).reshape(shape)
    rows = np.where(mask == 1, _without(found[ids.name], padding_id(config), ids), padding_id(config))
    texts = Reading(tuple(each for each in reading.inputs if each.axes == ids.axes))
    found |= _given(texts, rows, mask)
    name = f"{_counted(sizes[BATCH])}, {sizes[TEXTS]} texts of {sizes[STEPS]}"
    return HeadCase(name, found, mask, (prod(shape[:-1]), shape[-1]))


def _without(ids: np.ndarray, padding: int, each: Input) -> np.ndarray:
    return np.where(ids == padding, (padding + 1) % each.below, ids)


__all__ = ["HeadCase", "padding_id", "plan_cases"]
