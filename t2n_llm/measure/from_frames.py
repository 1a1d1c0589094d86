"""Text of sound by connectionist temporal classification: the best token of each frame, repeats and blanks left out, in tract.

In: an export folder of the task `ctc` and a recording. Out: its text. Source of the rule: Graves et al. 2006, section 3.1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.errors import OptionError
from t2n_llm.check.answers import open_answerer
from t2n_llm.export.folder import MANIFEST_NAME, archive_in, read_manifest
from t2n_llm.measure.sources.sound import read_waveform
from t2n_llm.source.hub import load_tokenizer
from t2n_llm.tasks.frontends.frontend import FRONTEND
from t2n_llm.tasks.names import CTC, recorded_task

_EXTRACTOR = "preprocessor_config.json"


def hears_letters(folder: Path) -> bool:
    """Say whether an export folder is of the task `ctc`."""
    return (folder / MANIFEST_NAME).is_file() and recorded_task(read_manifest(folder)) == CTC


def text_of_frames(folder: Path, recording: Path) -> str:
    """Return the text of a recording.

    Args:
        folder: made by `t2n-llm export --task ctc`.
        recording: a WAV file.

    Raises:
        OptionError: the recording cannot be read, or nothing says what sound the model hears.
        MissingTokenizerError: the folder carries no tokenizer.
        EngineError: the engine failed.
    """
    manifest, tokenizer = read_manifest(folder), load_tokenizer(folder)
    path = folder / _EXTRACTOR
    if not path.is_file():
        raise OptionError(
            f"{folder} does not say what sound its model hears.", f"Export a checkpoint with its {_EXTRACTOR}."
        )
    settings = json.loads(path.read_text(encoding="utf-8"))
    waveform = read_waveform(recording, int(settings["sampling_rate"]))
    heard = _heard(folder, manifest, waveform, int(settings["sampling_rate"]))
    with open_answerer(archive_in(folder, manifest)) as model:
        (logits,) = model.answer([heard])
    return spoken(logits[0].argmax(-1).tolist(), tokenizer)


def _heard(folder: Path, manifest: Any, waveform: np.ndarray, rate: int) -> np.ndarray:
    """Return what the model reads of a waveform: by its front end, else by transformers' own extractor."""
    if FRONTEND in manifest:
        with open_answerer(folder / manifest["parts"][FRONTEND]["archive"]) as front:
            return front.answer([waveform[None]])[0]
    from transformers import AutoFeatureExtractor

    made = AutoFeatureExtractor.from_pretrained(folder)(waveform, sampling_rate=rate, return_tensors="np")
    return np.asarray(next(iter(made.values())), np.float32)


def spoken(tokens: Sequence[int], tokenizer: Any) -> str:
    """Return the text of the best token of each frame.

    Args:
        tokens: one a frame.
        tokenizer: of the model; its padding token is the blank.
    """
    said = [token for token, _ in groupby(tokens) if token != tokenizer.pad_token_id]
    # Letters that a blank stood between stay two: a tokenizer that joins repeats must not do so again.
    apart = {"group_tokens": False} if hasattr(tokenizer, "word_delimiter_token") else {}
    return str(tokenizer.decode(said, skip_special_tokens=True, **apart))


__all__ = ["hears_letters", "spoken", "text_of_frames"]
