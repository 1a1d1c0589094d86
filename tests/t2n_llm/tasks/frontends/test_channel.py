"""Waveforms as one channel of a whole number of hops, as the extractors of EnCodec and DAC give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import DacFeatureExtractor, EncodecFeatureExtractor

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.check import check_frontend
from t2n_llm.tasks.frontends.frontend import frontend_of
from tests.frontend_archives import source_with, written

_VALUES = "input_values"


@pytest.mark.parametrize(
    "extractor", [EncodecFeatureExtractor(), DacFeatureExtractor(hop_length=100)], ids=["encodec", "dac"]
)
def test_recordings_of_several_lengths(extractor: Any, tmp_path: Path) -> None:
    archive = written(tmp_path, extractor, "encodec", _VALUES)
    checks = check_frontend(archive.path, archive.front, "f32")
    assert len(checks) == 3 and all(check.passed and check.max_abs_error == 0 for check in checks)


@pytest.mark.parametrize("settings", [{"feature_size": 2}, {"chunk_length_s": 1.0, "overlap": 0.1}])
def test_two_channels_and_pieces_have_no_graph(settings: dict[str, Any], tmp_path: Path) -> None:
    source = source_with(tmp_path, EncodecFeatureExtractor(**settings), "encodec")
    assert frontend_of(source, GraphOptions(), _VALUES) is None
