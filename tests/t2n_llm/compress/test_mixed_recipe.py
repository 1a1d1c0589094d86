"""`q4_0-mixed`: the size asked for is kept, and what it buys shows in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from t2n_llm.compress import sensitivity
from t2n_llm.export.pipeline import export_llm
from t2n_llm.inspect.quantize_report import QuantizeReport, TensorQuality, quantize_report
from tests.trained_model import REAL_MODEL

SIZE = 2_000_000  # between 1.4 MB with everything in 4 bits and 5 MB with nothing


@pytest.fixture(scope="module")
def reports(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, QuantizeReport]:
    """Two trained layers, all in 4 bits and mixed: without data, and with a calibration."""
    text = tmp_path_factory.mktemp("mixed") / "calibration.txt"
    text.write_text((REAL_MODEL / "calib.txt").read_text()[:6_000])
    choices: dict[str, dict[str, Any]] = {
        "all": {"compress": "q4_0+embeddings"},
        "mixed": {"compress": "q4_0-mixed", "target_size": SIZE},
        "all-imatrix": {"compress": "q4_0+embeddings:imatrix", "calibration": str(text)},
        "mixed-imatrix": {"compress": "q4_0-mixed:imatrix", "target_size": SIZE, "calibration": str(text)},
    }
    made = {}
    for name, options in choices.items():
        folder = tmp_path_factory.mktemp("mixed") / name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sensitivity, "TEXTS", 8)
            patch.setattr(sensitivity, "LENGTH", 64)
            export_llm(str(short_model), folder, check=False, num_logits_to_keep=0, **options)
        made[name] = quantize_report(folder, str(short_model), tokens=200, window=101)
    return made


@pytest.mark.parametrize("suffix", ["", "-imatrix"])
def test_the_size_is_met_and_nearly_filled_and_the_divergence_falls(
    reports: dict[str, QuantizeReport], suffix: str
) -> None:
    plain, mixed = reports["all" + suffix], reports["mixed" + suffix]
    assert plain.bytes < 0.95 * SIZE <= mixed.bytes <= SIZE
    assert mixed.quality.mean_kl_divergence < plain.quality.mean_kl_divergence
    twice = [tensor for tensor in mixed.tensors if tensor.scheme == "q4_0x2"]
    once = [tensor for tensor in mixed.tensors if tensor.scheme == "q4_0"]
    assert all(tensor.bits == 9.0 for tensor in twice) and all(tensor.bits == 4.5 for tensor in once)
    worst, best = max(map(_error, twice)), min(map(_error, once))
    assert 0 < worst < 1e-4 < best


def _error(tensor: TensorQuality) -> float:
    assert tensor.relative_error is not None
    return tensor.relative_error


def test_everything_as_the_sum_of_two_is_as_good_as_plain(short_model: Path, tmp_path: Path) -> None:
    result = export_llm(str(short_model), tmp_path / "twice", compress="q4_0x2")
    assert result.validation is not None and result.validation.passed
    record = result.manifest["compression"]
    assert record["bits_per_weight"] == pytest.approx(9.0, abs=0.05)
    stored = {tensor["label"]: tensor for tensor in record["tensors"]}
    halves = [tensor for tensor in stored.values() if tensor["residual_of"]]
    assert result.manifest["model"]["parameters"] == 2_524_432  # no weight is counted twice
    assert {stored[half["residual_of"]]["bytes"] for half in halves} == {half["bytes"] for half in halves}
    report = quantize_report(tmp_path / "twice", str(short_model), tokens=60, window=31)
    assert {tensor.scheme for tensor in report.tensors} == {"q4_0x2"}
    assert report.quality.mean_kl_divergence < 1e-4 and report.quality.same_top1_share == 1.0
