"""Exports that several tests of generation share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shared_folders import SharedFolders
from tests.t2n_llm.runtime.multimodal_models import export_llava


@pytest.fixture(scope="session")
def llava(shared_folders: SharedFolders) -> Path:
    """An export of a tiny LLaVA."""
    return shared_folders("sensing-llava", export_llava) / "export"
