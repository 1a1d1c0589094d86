"""Models of several graphs whose streams leave f16: each graph is measured on what the one before gives, and made to fit."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

from generic_export.errors import NumericRangeError
from t2n_llm import export_llm
from t2n_llm.export.output import ExportResult
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT, TEXT_TO_TEXT
from tests.families import COMMON

_POWER = 18
_T5: Mapping[str, Any] = {
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "vocab_size": 200,
    "decoder_start_token_id": 0,
    "feed_forward_proj": "gated-gelu",
}
_SMOLVLM: Mapping[str, Any] = {
    "model_type": "smolvlm",
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
    "text_config": {"model_type": "llama", **COMMON, "num_hidden_layers": 2},
    "image_token_id": 150,
    "scale_factor": 2,
    "tie_word_embeddings": False,
}
_T5_ENTRIES = ("*.o.weight", "*.wo.weight")
_SMOLVLM_ENTRIES = ("*text_model*.o_proj.weight", "*text_model*.down_proj.weight")


def _saved(config: Mapping[str, Any], model_class: Any, entries: tuple[str, ...], folder: Path) -> Path:
    """Save a random model; what enters the stream behind the embedding is multiplied by 2^18."""
    torch.manual_seed(0)
    model = model_class.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in entries):
                parameter.mul_(2.0**_POWER)
    model.save_pretrained(folder)
    return folder


def _exported(source: Path, target: Path, task: str, **options: Any) -> ExportResult:
    return export_llm(str(source), target, task=task, require_tokenizer=False, activations="f16", **options)


def _error(result: ExportResult) -> float:
    assert result.validation is not None and result.validation.passed
    return max(check.max_abs_error for check in result.validation.checks)


def _largest_rescaled(result: ExportResult) -> dict[str, float]:
    """Return the largest value that a rescaled group of each archive was measured to have; 0 where none was rescaled."""
    ranges: Mapping[str, Any] = result.manifest["activation_ranges"]
    return {
        role: max((group["max_abs"] for group in found["rescaled"] if group["factor"] < 1), default=0.0)
        for role, found in ranges.items()
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """An export of the T5 whose streams fit."""
    folder = tmp_path_factory.mktemp("plain")
    return _exported(_saved(_T5, AutoModelForSeq2SeqLM, (), folder / "plain"), folder / "same", TEXT_TO_TEXT)


@pytest.mark.parametrize("options", [{"stateful": True, "compress": "q4_0"}, {"batch": True}], ids=str)
def test_encoder_and_decoder_are_made_to_fit(options: dict[str, Any], plain: ExportResult, tmp_path: Path) -> None:
    source = _saved(_T5, AutoModelForSeq2SeqLM, _T5_ENTRIES, tmp_path / "large")
    result = _exported(source, tmp_path / "exported", TEXT_TO_TEXT, **options)
    assert all(largest > 65504 for largest in _largest_rescaled(result).values())
    assert list(_largest_rescaled(result)) == ["encoder", "decoder"] and not any(_largest_rescaled(plain).values())
    assert _error(result) <= 3 * _error(plain)


def test_a_decoder_is_made_to_fit_behind_its_embeddings(tmp_path: Path) -> None:
    """Text and images enter it as they are: the stream is kept smaller behind its input."""
    source = _saved(_SMOLVLM, AutoModelForMultimodalLM, _SMOLVLM_ENTRIES, tmp_path / "large")
    result = _exported(source, tmp_path / "exported", IMAGE_TEXT_TO_TEXT)
    largest = _largest_rescaled(result)
    assert list(largest) == ["embed", "vision", "decoder"]
    assert largest["decoder"] > 65504 and not largest["embed"] and not largest["vision"]
    assert _error(result) <= 0.02


def test_what_one_archive_hands_another_must_fit(tmp_path: Path) -> None:
    source = _saved(_T5, AutoModelForSeq2SeqLM, ("*.EncDecAttention.k.weight",), tmp_path / "large")
    with pytest.raises(
        NumericRangeError, match=r"EncDecAttention\S* reach \S+, f16 ends at 65504.* an output of the graph"
    ):
        _exported(source, tmp_path / "exported", TEXT_TO_TEXT)
    assert not (tmp_path / "exported").exists()
