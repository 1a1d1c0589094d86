"""Pixels become rows of patches in the engine, in the order of transformers' own processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.check import check_frontend
from t2n_llm.tasks.frontends.frontend import frontend_of
from tests.frontend_archives import source_with, written

transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")
_ANY_SIZE = {"shortest_edge": 16, "longest_edge": 1 << 20}


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [
        ("Qwen2VL", {}, 56),
        ("Qwen2VL", {"patch_size": 4, "merge_size": 2, "size": _ANY_SIZE, "image_mean": [0.1, 0.5, 0.8]}, 24),
        ("Qwen2VL", {"patch_size": 4, "merge_size": 3, "temporal_patch_size": 1, "size": _ANY_SIZE}, 24),
        ("Glm4v", {"patch_size": 14}, 112),
    ],
)
def test_rows_agree_with_the_processor(name: str, settings: dict[str, Any], size: int, tmp_path: Path) -> None:
    processor = getattr(transformers, f"{name}ImageProcessorPil")(**settings)
    archive = written(tmp_path, processor, "vit", "pixel_values", image_size=size)
    checks = check_frontend(archive.path, archive.front, "f32")
    assert len(checks) == 2 and all(check.passed and check.max_abs_error < 2e-5 for check in checks)
    (rows,) = archive.front.cases(np.random.default_rng(0))[0].expected
    assert len(rows) == (size // processor.patch_size) ** 2
    assert archive.front.described()["resize"]["height"] == size


@pytest.mark.parametrize("size", [60, 28])  # no whole number of joined patches; smaller than the processor allows
def test_a_size_that_the_processor_changes_has_no_graph(size: int, tmp_path: Path) -> None:
    source = source_with(tmp_path, transformers.Qwen2VLImageProcessorPil(), "vit")
    assert frontend_of(source, GraphOptions(image_size=size), "pixel_values") is None
