"""scripts/mixed_curve.py: which exports are asked for, what is kept between runs, and that a picture comes of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.load_script import load_script

curve = load_script("mixed_curve")
POINTS = [
    curve.Point("search", "q4_0+embeddings", "", 1000, 0.3, 0.7, 40.0),
    curve.Point("search", "q4_0", "", 1500, 0.2, 0.8, 39.0),
    curve.Point("search", "q4_0-mixed", "+10%", 1100, 0.15, 0.8, 38.0),
]


def test_one_point_is_a_tenth_larger_than_the_plain_recipe() -> None:
    asked = list(curve.wanted(["search"], ["10"], POINTS))
    assert ("search", "q4_0-mixed", "1650") in asked and ("search", "q4_0-mixed", "+10%") in asked
    assert [key for key in asked if key[1] != "q4_0-mixed"] == [POINTS[0].key, POINTS[1].key]


def test_points_are_kept_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra plot).")
    kept = tmp_path / "points.jsonl"
    kept.write_text("".join(json.dumps(asdict(point)) + "\n" for point in POINTS))
    assert curve.read_points(kept) == POINTS and curve.read_points(tmp_path / "none") == []
    curve.draw(POINTS, "a model", tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()
