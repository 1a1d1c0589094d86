"""Text of sound by connectionist temporal classification: the best token of each frame, repeats and blanks left out, in tract.

In: an export folder of the task `ctc` and a recording. Out: its text. Source of the rule: Graves et al. 2006, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from generic_export.devices import check_device
from generic_export.errors import ArchiveError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.check.answers import WheelAnswerer
from t2n_llm.export.folder import archive_in, read_manifest
from t2n_llm.export.manifest_form import require_said
from t2n_llm.source.hub import load_tokenizer
from t2n_llm.tasks.media.sensed import SensedInput
from t2n_llm.tasks.media.sound import read_waveform


def text_of_frames(folder: Path, recording: Path, *, device: str = "cpu") -> str:
    """Return the text of a recording.

    Args:
        folder: made by `t2n-llm export --task ctc`.
        recording: a WAV file.
        device: what tract computes on: "cpu", "cuda" or "metal".

    Raises:
        OptionError: the recording cannot be read, an unknown device, or nothing says what sound the model hears.
        MissingTokenizerError: the folder carries no tokenizer.
        EngineError: the engine failed.
    """
    check_device(device)
    manifest, tokenizer = read_manifest(folder), load_tokenizer(folder)
    require_said(folder, manifest, ["graph.inputs"])
    if not manifest["graph"]["inputs"]:
        raise ArchiveError(f"{folder}: its export.json lists no input.", "Export the model again.")
    senses, engine = SensedInput.of(folder, manifest, manifest["graph"]["inputs"][0]), TractWheel(device=device)
    waveform = read_waveform(recording, senses.sampling_rate)
    with senses.opened() as sensing, engine.load(archive_in(folder, manifest)) as model:
        (logits,) = WheelAnswerer(engine, model).answer([sensing.heard(waveform)])
    return spoken(logits[0].argmax(-1).tolist(), tokenizer)


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


__all__ = ["spoken", "text_of_frames"]
