"""How many tokens of a prompt a runtime should feed at once, so that what grows with them stays in a bound.

In: a config, a document, the options. Out: the table `prefill` of `export.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from generic_export.errors import ArchiveError
from generic_export.nnef.graph import NnefGraph
from kvcache.attention.latent import ABSORBED_KEYS
from t2n_llm.graph.options import GraphOptions

LARGEST_CHUNK = 512
"""Tokens; more at once is not faster (docs/contributing/engine-facts.md#chunks-of-a-prompt)."""

# Of attention as products: scores of more queries leave the CPU's caches (docs/contributing/engine-facts.md#chunks-of-a-prompt).
_SCORED_CHUNK = 128
# Of absorbed latent attention: its products grow faster than its savings (docs/contributing/engine-facts.md#latent-attention).
_LATENT_CHUNK = 64

MEMORY = 256 << 20
"""Bytes that the scores of attention and the logits of one call may take."""

_SMALLEST_CHUNK = 16
_COPIES = 3  # of the scores of a layer that the engine holds at once: as multiplied, masked, and normalised
_SOFTMAX = {"softmax", "tract_transformers_scaled_masked_softmax"}

Chunks = Sequence[tuple[int, int]]
"""(past, chunk) in order: from so many past positions on, feed so many tokens at once."""


def prefill_chunks(config: Any, graph: NnefGraph, options: GraphOptions) -> Chunks:
    """Return how many tokens to feed at once, by the number of past positions.

    Args:
        config: of the language model.
        graph: as written; where attention is tract's operator, it keeps no scores.
        options: a chosen chunk holds for any past.
    """
    if options.prefill_chunk is not None:
        return [(0, options.prefill_chunk)]
    text_config = config.get_text_config(decoder=True)
    scored = any(operation.operator in _SOFTMAX for operation in graph.operations)
    heads = getattr(text_config, "num_attention_heads", 0) if scored else 0
    logits = 4 * text_config.vocab_size if options.num_logits_to_keep == 0 else 0
    return bounded_chunks(
        4 * _COPIES * heads,
        logits,
        getattr(text_config, "max_position_embeddings", None),
        largest=_fastest_chunk(graph, scored),
    )


def _fastest_chunk(graph: NnefGraph, scored: bool) -> int:
    """Return how many tokens at once pass fastest, whatever their memory."""
    if any(variable.label.endswith(f".{ABSORBED_KEYS}") for variable in graph.variables):
        return _LATENT_CHUNK
    return _SCORED_CHUNK if scored else LARGEST_CHUNK


def bounded_chunks(
    score_bytes: int,
    token_bytes: int,
    max_positions: int | None,
    memory: int = MEMORY,
    largest: int = LARGEST_CHUNK,
) -> Chunks:
    """Return the chunks that stay within a bound.

    Args:
        score_bytes: of one query looking at one position, over all heads.
        token_bytes: of a token of the call, whatever the past.
        max_positions: of the model; None for any number.
        memory: the bound, in bytes; the smallest chunk may break it.
        largest: chunk, in tokens.
    """
    chunks: list[tuple[int, int]] = []
    start, chunk = 0, largest
    while chunk >= _SMALLEST_CHUNK:
        end = _last_past(chunk, score_bytes, token_bytes, memory)
        last = chunk == _SMALLEST_CHUNK or end is None
        if last or (end is not None and end >= start):
            chunks.append((start, chunk))
        if last or (end is not None and max_positions is not None and end >= max_positions):
            break
        start, chunk = max(start, 0 if end is None else end + 1), chunk // 2
    return chunks


def _last_past(chunk: int, score_bytes: int, token_bytes: int, memory: int) -> int | None:
    """Return the longest past that a chunk fits behind, below 0 where none; None where any does."""
    left = memory - chunk * token_bytes
    if left < 0:
        return -1
    return left // (chunk * score_bytes) - chunk if score_bytes else None


def recorded_chunks(chunks: Chunks) -> list[dict[str, int]]:
    """Return the table as `export.json` holds it."""
    return [{"past": past, "chunk": chunk} for past, chunk in chunks]


def chunks_of(manifest: Mapping[str, Any]) -> Chunks:
    """Return the table of a manifest; one that says nothing of it comes from an earlier release.

    Raises:
        ArchiveError: the table is none.
    """
    recorded = manifest.get("graph", {}).get("prefill")
    if recorded is None:
        return [(0, LARGEST_CHUNK)]
    chunks = [(entry.get("past"), entry.get("chunk")) for entry in recorded]
    whole = all(
        type(number) is int and number >= least for row in chunks for number, least in zip(row, (0, 1), strict=True)
    )
    if not whole or not chunks or chunks[0][0] != 0 or chunks != sorted(chunks):
        raise ArchiveError(
            "graph.prefill of export.json is no table of past positions, from 0 on, and chunks of 1 or more.",
            "Export again, or give --prefill-chunk.",
        )
    return chunks


def chunk_after(past: int, chunks: Chunks) -> int:
    """Return how many tokens to feed at once after so many."""
    return next(size for start, size in reversed(chunks) if start <= past)


def split_prompt(ids: Sequence[int], chunks: Chunks) -> Iterable[Sequence[int]]:
    """Yield a prompt piece by piece, each as long as the table says for what is before it."""
    start = 0
    while start < len(ids):
        chunk = chunk_after(start, chunks)
        yield ids[start : start + chunk]
        start += chunk
