"""What a model's folder says of generation, by transformers' names; and what of it is not followed.

In: `generation_config.json`, `config.json`. Out: a dict without what is not said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generic_export.errors import ArchiveError

SETTINGS_FILE = "generation_config.json"
_CONFIG_FILE = "config.json"
_PROCESSOR_FILE = "processor_config.json"
_DECODERS = ("decoder", "generator", "text_config")  # where a config of several models has its decoder's

# What `generate()` does and this package does not, by the value that means nothing.
_NOT_FOLLOWED: Mapping[str, Any] = {
    "guidance_scale": 1,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "remove_invalid_values": False,
    "forced_eos_token_id": None,
    "max_time": None,
    "penalty_alpha": 0,
    "dola_layers": None,
    "diversity_penalty": 0,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
    "watermarking_config": None,
    "token_healing": False,
}
_NOT_FOLLOWED_SAMPLING: Mapping[str, Any] = {"top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
_BEAMS: Mapping[str, Any] = {"num_beams": 1}


def generation_settings(folder: Path) -> dict[str, Any]:
    """Return what a model's folder says of generation.

    As in transformers, `config.json` is asked where there is no `generation_config.json`; of special tokens, also for those that
    this file does not name.

    Raises:
        ArchiveError: a file is no JSON object.
    """
    config = _read(folder / _CONFIG_FILE)
    within: Mapping[str, Any] = next((config[name] for name in _DECODERS if isinstance(config.get(name), dict)), {})
    config = _said(within) | _said(config)
    if not (folder / SETTINGS_FILE).is_file():
        return config
    tokens = {name: value for name, value in config.items() if name.endswith("_token_id")}
    return tokens | _said(_read(folder / SETTINGS_FILE))


def processor_settings(folder: Path) -> dict[str, Any]:
    """Return what a model's folder says of its processor.

    Raises:
        ArchiveError: `processor_config.json` is no JSON object.
    """
    return _said(_read(folder / _PROCESSOR_FILE))


def not_followed(settings: Mapping[str, Any], *, sampled: bool, beams: bool) -> dict[str, Any]:
    """Return the settings that ask for something that is not done here, by name.

    Args:
        settings: as of `generation_settings`.
        sampled: whether tokens are sampled.
        beams: whether several texts can be followed at a time.
    """
    without = {**_NOT_FOLLOWED, **(_NOT_FOLLOWED_SAMPLING if sampled else {}), **({} if beams else _BEAMS)}
    return {name: settings[name] for name, nothing in without.items() if settings.get(name, nothing) != nothing}


def end_tokens(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a text."""
    ends = settings.get("eos_token_id")
    return tuple(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArchiveError(f"{path}: {error}.", "Export the model again.") from error
    if not isinstance(record, dict):
        raise ArchiveError(f"{path}: not a JSON object.", "Export the model again.")
    return record


def _said(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}


__all__ = ["SETTINGS_FILE", "end_tokens", "generation_settings", "not_followed", "processor_settings"]
