"""The three archives in an engine, connected as `export.json` says.

In: a prompt with images or sound. Out: its logits, then those of each token that follows; the cache stays with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from kvcache.states.tensors import StateTensor
from t2n_llm.check.archive_sessions import ArchiveSession, NextTurn, OpenTurns, open_archive_session, open_turns
from t2n_llm.check.options import EngineOptions
from t2n_llm.tasks.multimodal.cross_attention import cross_names, no_image, rows_seen
from t2n_llm.tasks.multimodal.family import POSITIONS, SEEN_ROWS, TOKEN_TYPES, Family
from t2n_llm.tasks.multimodal.model import DECODER, EMBED


class Pipeline:
    """The archives, loaded."""

    def __init__(
        self,
        parts: Mapping[str, ArchiveSession],
        turns: OpenTurns,
        family: Family,
        states: Sequence[StateTensor],
    ) -> None:
        """Connect the archives; `turns` and `states` are the decoder's."""
        self._parts, self._turns = parts, turns
        self._family = family
        self._states = states
        self.engine_name, self.engine_version = parts[EMBED].engine_name, parts[EMBED].engine_version

    def begin(self, ids: Sequence[int], images: Sequence[np.ndarray], frames: Sequence[int] = ()) -> MultimodalText:
        """Run the encoder on all images, and return a text that starts with the prompt. The decoder has not run yet.

        Args:
            ids: of the prompt; each image has its rows' worth of image tokens.
            images, frames: see `encode`.
        """
        states = [state.at_start(1) for state in self._states]
        text = MultimodalText(self._parts[EMBED], lambda held: self._turns(held, states), self._family)
        text.expect(ids, self.encode(images, frames), [image.shape for image in images])
        return text

    def encode(self, images: Sequence[np.ndarray], frames: Sequence[int] = ()) -> list[np.ndarray]:
        """Run the encoder on all images and return their rows [rows, D]: for the embeddings and for each deepstack layer.

        Args:
            images: f32, one after the other; without images there are no rows.
            frames: how many frames of each segment are before the end of its recording; nothing for images.
        """
        encoder = self._parts[self._family.medium.role]
        if frames:
            segments = np.stack(tuple(images))
            (answer,) = encoder.answer([segments, frame_mask(frames, segments.shape[-1])])
            used = [self._family.rows_of(count) for count in frames]
            return [np.concatenate([rows[:count] for rows, count in zip(answer, used, strict=True)])]
        questions = [np.stack(tuple(images))] if images and self._family.stacks_images else images
        seen = [encoder.answer([question]) for question in questions]
        return [
            np.concatenate([rows.reshape(-1, rows.shape[-1]) for rows in tables]) for tables in zip(*seen, strict=True)
        ]


class MultimodalText:
    """A text that is read from its start: the rows of images come where the prompt has their tokens."""

    def __init__(
        self, embed: ArchiveSession, begin: Callable[[Mapping[str, np.ndarray]], NextTurn], family: Family
    ) -> None:
        """Begin a text.

        Args:
            embed: the archive.
            begin: begins the calls of the decoder, with what it is given in all of them.
            family: of the model.
        """
        self._embed, self._begin = embed, begin
        self._decode: NextTurn | None = None
        self._images: Sequence[np.ndarray] = ()  # rows for cross-attention
        self._family = family
        self._deepstack = len(family.deepstack_layers)
        self._past = 0

    def expect(self, ids: Sequence[int], rows: Sequence[np.ndarray], shapes: Sequence[Sequence[int]]) -> None:
        """Say how the text goes on, before `run` reads it.

        Args:
            ids: from the start of the text; in what follows them, the image token is a token like others.
            rows: see `Pipeline.encode`; of the images after the tokens that have been read. With cross-attention, all images are
                known when the first token is read.
            shapes: of the inputs that hold the images, one for each image since the start of the text.
        """
        known = np.array(ids, np.int64)
        self._is_image = known == self._family.image_token_id
        self._positions = self._family.positions(known, shapes)
        self._rows, self._seen = rows, 0
        if self._family.cross_layers and (rows or not self._images):
            self._images, self._rows = rows or no_image(self._family), ()

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Read the next tokens, int64 [1, S], one or more; return logits [1, 1, vocab]."""
        (ids,) = inputs
        start, end = self._past, self._past + ids.shape[1]
        is_image = np.zeros(end - start, np.bool_)
        of_prompt = self._is_image[start:end]
        is_image[: len(of_prompt)] = of_prompt
        first, *layered = self._embed.answer([ids])
        embeds = [first.copy(), *(np.zeros_like(first) for _ in range(self._deepstack))]
        seen = self._seen + int(is_image.sum())
        for table, rows in zip(embeds, self._rows, strict=False):
            table[0, is_image] = rows[self._seen : seen]
        types = np.arange(start, end) >= len(self._is_image) if self._family.bidirectional_prompts else is_image
        further = {TOKEN_TYPES: types[None].astype(np.int64), POSITIONS: self._places(start, end)}
        if self._family.cross_layers:
            further[SEEN_ROWS] = self._rows_seen(start, end)
        given = [array for name, array in further.items() if name == self._family.decoder_input]
        given += [ids] if self._family.takes_ids else []
        self._past, self._seen = end, seen
        if self._decode is None:
            self._decode = self._begin(self._held())
        return self._decode([*embeds, *given, *layered])

    def close(self) -> None:
        """Do nothing: the state ends with the engine."""

    def _held(self) -> dict[str, np.ndarray]:
        """Return keys and values of images by name, for cross-attention."""
        return dict(zip(cross_names(self._family.cross_layers), self._images, strict=False))

    def _rows_seen(self, start: int, end: int) -> np.ndarray:
        """Return `SEEN_ROWS` of tokens; after the prompt they see what its last one sees."""
        tokens = np.minimum(np.arange(start, end), len(self._is_image) - 1)
        return rows_seen(self._is_image, self._images[-1], tokens)[None]

    def _places(self, start: int, end: int) -> np.ndarray:
        """Return the positions of tokens; after the prompt they count on in all coordinates."""
        processed = self._positions[..., start:end]
        prompt, axes = self._positions.shape[-1], self._positions.shape[0]
        next_one = int(self._positions.max()) + 1 - prompt
        after = np.arange(max(start, prompt), max(end, prompt), dtype=np.int64) + next_one
        return np.concatenate([processed, np.broadcast_to(after, (axes, 1, len(after)))], axis=2)


@contextmanager
def open_pipeline(
    archives: Mapping[str, Path],
    family: Family,
    states: Sequence[StateTensor],
    engine: EngineOptions | None = None,
) -> Iterator[Pipeline]:
    """Yield the archives of a multimodal model, loaded, and stop their engines after the block.

    Args:
        archives: by role; others than the three are left alone.
        family: of the model.
        states: of the decoder.
        engine: see `open_archive_session`.

    Raises:
        EngineError: the engine refused an archive.
    """
    with ExitStack() as stack:
        roles = (EMBED, family.medium.role)
        parts = {role: stack.enter_context(open_archive_session(archives[role], engine)) for role in roles}
        turns = stack.enter_context(open_turns(archives[DECODER], engine))
        yield Pipeline(parts, turns, family, states)


def frame_mask(frames: Sequence[int], length: int) -> np.ndarray:
    """Return `FRAME_MASK` int64 [N, length] of segments that end after so many frames."""
    return (np.arange(length) < np.array(frames)[:, None]).astype(np.int64)


__all__ = ["MultimodalText", "Pipeline", "frame_mask", "open_pipeline"]
