"""Tokens become text as soon as it is final: characters of several tokens come whole, texts that end an answer not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def text_pieces(decode: Callable[[Sequence[int]], str], tokens: Iterator[int]) -> Iterator[str]:
    """Yield text as soon as it is final: a character may need several tokens.

    Args:
        decode: makes tokens text.
        tokens: as they are decided.
    """
    pending: list[int] = []
    context: list[int] = []
    for token in tokens:
        pending.append(token)
        before = decode(context)
        text = decode(context + pending)
        if text.endswith(_REPLACEMENT) or len(text) <= len(before):
            continue
        yield text[len(before) :]
        # The last tokens stay as context: a decoder may treat the first token of a text in a special way.
        context, pending = pending[-4:], []
    if pending:
        yield decode(context + pending)[len(decode(context)) :]


def until_stop(pieces: Iterator[str], stops: Sequence[str], found: Callable[[str], None]) -> Iterator[str]:
    """Yield pieces up to the first stop text; what may be the beginning of one is kept until that is known.

    Args:
        pieces: of the text.
        stops: texts that end it.
        found: called with the stop text, where there is one; no further piece is asked for.
    """
    kept = ""
    for piece in pieces:
        kept += piece
        places = [(kept.find(stop), -len(stop), stop) for stop in stops if stop in kept]
        if places:
            place, _, stop = min(places)
            found(stop)
            if kept[:place]:
                yield kept[:place]
            return
        final = len(kept) - max((_begun(kept, stop) for stop in stops), default=0)
        if final:
            yield kept[:final]
        kept = kept[final:]
    if kept:
        yield kept


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text begin a stop text."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


__all__ = ["text_pieces", "until_stop"]
