"""`scripts/check_device.py`: archives prepared, run on the CPU as a device, judged, and not run again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.load_script import load_script

script, device_inputs = load_script("check_device"), load_script("device_inputs")


def test_errors_are_relative_to_the_largest_finite_value() -> None:
    expected = np.array([1.0, -100.0, np.inf, np.nan], np.float32)
    assert script.relative_error(expected.copy(), expected) == 0.0
    assert script.relative_error(expected + np.float32(1.0), expected) == pytest.approx(0.01)
    for other in (np.array([1.0, -100.0, 0.0, np.nan], np.float32), expected[:3], expected.astype(np.float64)):
        assert script.relative_error(other, expected) == float("inf")
    whole = np.array([1, 2])
    assert script.relative_error(whole + 1, whole) == float("inf")


def test_inputs_of_a_size_are_values_of_the_sample() -> None:
    sample, fixed = np.arange(6.0).reshape(2, 3), np.array(7.0)
    drawn, same = device_inputs.inputs_at([sample, fixed], (1, None), 5)
    assert drawn.shape == (2, 5) and set(drawn.ravel()) <= set(sample.ravel()) and same is fixed
    np.testing.assert_array_equal(drawn, device_inputs.inputs_at([sample, fixed], (1, None), 5)[0])


def test_operators_are_prepared_run_and_kept(tmp_path: Path) -> None:
    archives = load_script("device_archives")
    (place,) = [place for place, info in enumerate(archives.operators()) if info.name == "cumsum"]
    entries = archives._operator((tmp_path, place))
    assert [entry.name for entry in entries] == ["cumsum_f32", "cumsum_f16"]
    assert entries[1].sizes == device_inputs.SIZES  # in f32, the largest one is left out for its size
    stray = archives.Entry("no_such_archive", "operator", "f32", (0,), (1,))
    (tmp_path / "index.json").write_text(json.dumps([asdict(entry) for entry in (*entries, stray)]))
    results = script.run(tmp_path, "cpu", 1.0, 2, again=False)
    assert [result["outcome"] for result in results] == ["right", "right", "refused"]
    assert results[0]["errors"]["128"] == 0.0
    log = (tmp_path / "results-cpu.jsonl").read_text()
    assert script.run(tmp_path, "cpu", 0.0, 1, again=False) == results  # nothing is run again
    assert (tmp_path / "results-cpu.jsonl").read_text() == log
    assert "| operators, f16 | 1 |" in script.summary(results) and "no_such_archive | refused" in script.summary(
        results
    )


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    entry = {"name": "relu_f32", "kind": "operator", "dtype": "f32", "axes": [0], "sizes": [1], "turns": []}
    (tmp_path / "index.json").write_text(json.dumps([entry]))
    (result,) = script.run(tmp_path, "cuda", 0.0, 1, again=True)
    assert (result["name"], result["outcome"]) == ("relu_f32", "not run")
