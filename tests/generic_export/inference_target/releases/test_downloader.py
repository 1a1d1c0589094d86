"""`TractBinaryDownloader`: a version that is there is found, one that is not is a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from generic_export import TractBinaryDownloader
from generic_export.errors import EngineMissingError
from generic_export.inference_target.tract.releases.install import TRACT_CLI_VERSION, find_tract_cli, probe_version


def test_an_installed_command_is_found() -> None:
    if find_tract_cli(TRACT_CLI_VERSION) is None:
        pytest.skip("the tract command is not installed (scripts/install_tract_cli)")
    assert probe_version(TractBinaryDownloader(auto_download=False).binary()) == TRACT_CLI_VERSION


def test_what_may_not_be_installed_is_refused_with_advice(tmp_path: Path) -> None:
    downloader = TractBinaryDownloader("0.1.2", auto_download=False, cache_dir=tmp_path)
    with pytest.raises(EngineMissingError, match=r"tract command 0\.1\.2 is not installed") as refusal:
        downloader.binary()
    assert "tract.releases command --version 0.1.2" in (refusal.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineMissingError, match="not a version number"):
        TractBinaryDownloader("latest", auto_download=False, cache_dir=tmp_path).binary()
