"""An export of the bundled model, for the Python of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trained_model import REAL_MODEL


@pytest.fixture(scope="session")
def bundled_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in f16; pages read it."""
    from t2n_llm import export_llm

    return export_llm(REAL_MODEL, tmp_path_factory.mktemp("exports") / "tiny", check=False).archive.parent
