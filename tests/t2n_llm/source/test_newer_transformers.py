"""A checkpoint of a family that the installed transformers does not know says which release wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from generic_export.errors import UnknownArchitectureError
from t2n_llm.source.hub import open_source


@pytest.mark.parametrize(
    ("further", "said"),
    [
        ({"transformers_version": "7.1.0"}, f"written with 7.1.0, but {transformers.__version__} is installed."),
        ({"transformers_version": ["x"] * 5000}, f"{transformers.__version__} is installed."),
        ({}, "that supports it."),
    ],
)
def test_which_release_a_family_needs(further: dict[str, object], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "not_yet", **further}))
    with pytest.raises(UnknownArchitectureError, match="does not know this model type") as caught:
        open_source(str(tmp_path), require_tokenizer=False)
    assert str(caught.value.hint).endswith(said) and len(str(caught.value.hint)) < 200
