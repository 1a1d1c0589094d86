"""`q4_0-mixed`: the size asked for is kept, and what it buys shows in the engine."""

from __future__ import annotations

from typing import Any

import pytest

from t2n_llm.export.pipeline import export_llm
from t2n_llm.measure.quantize_report import QuantizeReport, quantize_report
from tests.t2n_llm.conftest import REAL_MODEL

SIZE = 4_200_000  # between 3.1 MB with everything in 4 bits and 11 MB with nothing


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, QuantizeReport]:
    """The trained model, all in 4 bits and mixed: without data, and with a calibration."""
    folder = tmp_path_factory.mktemp("mixed")
    text = folder / "calibration.txt"
    text.write_text((REAL_MODEL / "calib.txt").read_text()[:12_000])
    choices: dict[str, dict[str, Any]] = {
        "all": {"compress": "q4_0+embeddings"},
        "mixed": {"compress": "q4_0-mixed", "target_size": SIZE},
        "all-imatrix": {"compress": "q4_0+embeddings:imatrix", "calibration": str(text)},
        "mixed-imatrix": {"compress": "q4_0-mixed:imatrix", "target_size": SIZE, "calibration": str(text)},
    }
    made = {}
    for name, options in choices.items():
        export_llm(str(REAL_MODEL), folder / name, check=False, num_logits_to_keep=0, **options)
        made[name] = quantize_report(folder / name, str(REAL_MODEL), tokens=600, window=201)
    return made


@pytest.mark.parametrize("suffix", ["", "-imatrix"])
def test_the_size_is_met_and_nearly_filled_and_the_divergence_falls(
    reports: dict[str, QuantizeReport], suffix: str
) -> None:
    plain, mixed = reports["all" + suffix], reports["mixed" + suffix]
    assert plain.bytes < 0.95 * SIZE <= mixed.bytes <= SIZE
    assert mixed.quality.mean_kl < plain.quality.mean_kl
    kept = [tensor for tensor in mixed.tensors if not tensor.quantized]
    assert kept and any(tensor.quantized for tensor in mixed.tensors)
