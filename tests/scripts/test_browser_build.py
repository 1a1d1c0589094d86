"""`examples/browser/build` names what is missing, and how to install it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.systems import needs_posix

BUILD = Path(__file__).parents[2] / "examples" / "browser" / "build"


@needs_posix
@pytest.mark.parametrize(
    ("compiler", "advice"), [(False, "https://rustup.rs"), (True, "rustup target add wasm32-unknown-unknown")]
)
def test_a_machine_without_a_compiler_or_its_target(compiler: bool, advice: str, tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "sort", "tail"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    if compiler:  # one whose only target is the machine's own
        for tool in ("cargo", "rustc"):
            (tmp_path / tool).write_text("#!/bin/sh\necho /nowhere\n")
            (tmp_path / tool).chmod(0o755)
    done = subprocess.run(
        [str(tmp_path / "bash"), str(BUILD)], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    if done.returncode == 0 or "Compiling" in done.stderr:
        pytest.skip("this machine has Debian's compiler for the target")
    assert done.returncode == 1
    assert advice in done.stderr
