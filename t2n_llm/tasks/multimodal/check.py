"""Images or sound, and text, through the three archives, token by token, against transformers' own model.

In: a checkpoint, and the archives in an engine. Out: a `ValidationReport` as of language models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcache.compat import cache_keyword
from kvcache.states.explicit_cache import states_of
from kvcache.states.tensors import Slot, StateTensor
from t2n_llm.check.agreement import CheckResult, Tolerance, ValidationReport, compare_step
from t2n_llm.check.cache_range import largest_values
from t2n_llm.check.options import EngineOptions
from t2n_llm.tasks.multimodal.family import FRAME_MASK, TOKEN_TYPES, Family
from t2n_llm.tasks.multimodal.features import start_token_id
from t2n_llm.tasks.multimodal.running import Pipeline, frame_mask, open_pipeline

_STEPS = 8  # tokens decoded after each prompt
_PARTS = 8  # of a recording


@dataclass(frozen=True)
class Prompt:
    """One prompt with images.

    Attributes:
        name: what is special about it.
        ids: its tokens; each image has its rows' worth of image tokens.
        images: f32, each as the archive takes it.
        cut: position where it is cut into two calls; 0 for one call.
        frames: how many frames of each segment are before the end of its recording; nothing for images.
    """

    name: str
    ids: tuple[int, ...]
    images: tuple[np.ndarray, ...]
    cut: int = 0
    frames: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What PyTorch says to a prompt.

    Attributes:
        rows: the logits [vocab] after it and after each greedy token.
        ids: those tokens.
        largest_states: the largest magnitude of what it keeps then.
    """

    rows: tuple[np.ndarray, ...]
    ids: tuple[int, ...]
    largest_states: Mapping[Slot, float] = field(default_factory=dict)


def plan_prompts(family: Family, seed: int = 0) -> tuple[Prompt, ...]:
    """Choose random prompts: one image; two images, of two sizes if they may have any, in two calls; and text alone.

    The cut is inside the second image. It is before it for decoders that read an image as a whole, and there is none for those that
    read a prompt as a whole.

    Args:
        family: of the model.
        seed: for ids and pixels.
    """
    generator = np.random.default_rng(seed)
    image = family.image_token_id
    known = family.config.get_text_config(decoder=True).vocab_size
    vocabulary = min(known, image if image > 64 else 1 << 62)

    def text(count: int) -> list[int]:
        ids = generator.integers(3, vocabulary, size=count)
        return [int(token) if token != image else 3 for token in ids]

    shape = family.pixel_shape
    changes = (1, -1) if family.mixes_sizes else (1, 1)
    shapes = {1: (_resized(shape, family, 2),), 2: tuple(_resized(shape, family, each) for each in changes), 0: ()}

    def images(count: int) -> tuple[np.ndarray, ...]:
        return tuple(_image(each, family, generator) for each in shapes[count])

    noun = family.medium.noun
    room = shape[-1]
    lengths = {1: (2 * room // 3 - 1,), 2: (room, room // 2), 0: ()}

    def rows(index: int, count: int) -> list[int]:
        frames = lengths[count][index]
        return [image] * (family.rows_of_image(shapes[count][index]) if family.free_axes else family.rows_of(frames))

    start = start_token_id(family.medium, family.config)
    opening = [] if start is None or start >= known else [start]
    first, second = [*text(4), *opening], [*text(3), *opening]
    whole = family.decoder_input == TOKEN_TYPES
    inside = 0 if whole else len(rows(1, 2)) // 2
    cut = 0 if family.bidirectional_prompts else len((*first, *rows(0, 2), *second)) + inside
    planned = (
        Prompt(f"one {noun}", (*text(5), *opening, *rows(0, 1), *text(6)), images(1)),
        Prompt(
            f"two {noun}s{', in chunks' if cut else ''}",
            (*first, *rows(0, 2), *second, *rows(1, 2), *text(2)),
            images(2),
            cut,
        ),
        Prompt("text alone", tuple(text(7)), images(0)),
    )
    return (
        tuple(replace(prompt, frames=lengths[len(prompt.images)]) for prompt in planned) if family.masked else planned
    )


def _image(shape: tuple[int, ...], family: Family, generator: np.random.Generator) -> np.ndarray:
    made = family.random_image(generator)
    return generator.standard_normal(shape).astype(np.float32) if made is None else made


def _resized(shape: Sequence[int], family: Family, change: int) -> tuple[int, ...]:
    """Return the shape of an image that is higher by some steps and narrower by as many, where it may have any size.

    A step is the smallest one that the size allows, and an eighth of the length of a recording.
    """
    parts = _PARTS if family.medium.hears else max(shape)
    steps = zip(family.free_axes.items(), (change, -change), strict=False)
    changed = {
        axis: size.near(shape[axis] + step * size.multiple_of * max(1, shape[axis] // (parts * size.multiple_of)))
        for (axis, size), step in steps
    }
    return tuple(changed.get(axis, size) for axis, size in enumerate(shape))


def run_multimodal_reference(model: Any, family: Family, prompts: Sequence[Prompt]) -> list[Answer]:
    """Return the answers of a model to prompts.

    Args:
        model: of transformers, eager, in f32.
        family: its inputs.
        prompts: what is asked.
    """
    with torch.no_grad():
        return [_generate(model, family, prompt) for prompt in prompts]


def model_inputs(family: Family, prompt: Prompt) -> dict[str, Any]:
    """Return what transformers' own model takes for a prompt, as its processor gives it.

    Args:
        family: of the model.
        prompt: as `plan_prompts` plans it.
    """
    ids, images = torch.tensor([prompt.ids]), [torch.from_numpy(image) for image in prompt.images]
    # Processors give the mask too: without one, some models count positions as if there were no image.
    given: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        **family.reference_inputs(ids == family.image_token_id, images),
    }
    if prompt.frames:
        given[FRAME_MASK] = torch.from_numpy(frame_mask(prompt.frames, prompt.images[0].shape[-1]))
    return given


def _generate(model: Any, family: Family, prompt: Prompt) -> Answer:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    options = {cache_keyword(model.forward): cache, "use_cache": True, "logits_to_keep": 1}
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None  # of the prompt before
    placeholders, given = _placeholders(family), model_inputs(family, prompt)
    rows: list[np.ndarray] = []
    tokens: list[int] = []
    for _ in range(_STEPS + 1):
        logits = model(**given, **options).logits[0, -1]
        rows.append(logits.float().numpy())
        tokens.append(_next_token(logits, placeholders))
        given = {"input_ids": torch.tensor([tokens[-1:]]), **family.later_inputs(given)}
    kept = {slot: tensor.float().numpy() for slot, tensor in states_of(cache).items()}
    return Answer(tuple(rows), tuple(tokens[:-1]), largest_values(kept))


def _placeholders(family: Family) -> frozenset[int]:
    """Return the tokens that stand for images, video and sound: the archives have no embedding of them."""
    named = (getattr(family.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    return frozenset((family.image_token_id, *(token for token in named if isinstance(token, int))))


def _next_token(logits: torch.Tensor, placeholders: frozenset[int]) -> int:
    """Return the likeliest token that is no placeholder."""
    ranked = logits.topk(len(placeholders) + 1).indices.tolist()
    return int(next(token for token in ranked if token not in placeholders))


def answers_of(pipeline: Pipeline, prompt: Prompt, tokens: Sequence[int]) -> list[np.ndarray]:
    """Return the logits [vocab] after a prompt, and after each of the tokens that follow it."""
    ids = np.array([[*prompt.ids, *tokens]], np.int64)
    reading = pipeline.begin(prompt.ids, prompt.images, prompt.frames)
    ends = [*([prompt.cut] if prompt.cut else []), *range(len(prompt.ids), ids.shape[1] + 1)]
    answers = [reading.run([ids[:, start:end]])[0][0, -1] for start, end in pairwise([0, *ends])]
    return answers[bool(prompt.cut) :]


def check_multimodal(
    archives: Mapping[str, Path],
    family: Family,
    states: Sequence[StateTensor],
    dtype: str,
    prompts: Sequence[Prompt],
    expected: Sequence[Answer],
    *,
    engine: EngineOptions | None = None,
    tolerance: Tolerance | None = None,
    on_check: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Run each prompt through the archives, then decode PyTorch's own tokens with the cache fed back.

    Args:
        archives: by role.
        family: of the model.
        states: of the decoder.
        dtype: `f32` or `f16`, of the archives.
        prompts, expected: what is asked, and PyTorch's answers.
        engine: see `open_archive_session`.
        tolerance: None takes the element type's.
        on_check: told the name of each prompt before it runs.

    Raises:
        EngineError: the engine refused an archive, or died.
    """
    tolerance = tolerance or Tolerance.for_dtype(dtype)
    with open_pipeline(archives, family, states, engine) as pipeline:
        checks = []
        for prompt, wanted in zip(prompts, expected, strict=True):
            if on_check is not None:
                on_check(prompt.name)
            got = answers_of(pipeline, prompt, wanted.ids)
            rows = zip(got, wanted.rows, strict=True)
            steps = [compare_step(step, row, reference) for step, (row, reference) in enumerate(rows)]
            checks.append(CheckResult.judged(prompt.name, steps, tolerance))
        return ValidationReport(pipeline.engine_name, pipeline.engine_version, dtype, tolerance, tuple(checks))
