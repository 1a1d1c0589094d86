"""llama.cpp, ready-built in npm's node-llama-cpp, driven by `llama_cpp_driver.mjs` in node.

In: a GGUF file, or a checkpoint that is written as one. Out: a contender.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from generic_export.errors import MissingExtraError, OptionError
from t2n_llm.bench.compared_engines.child import RunningChild
from t2n_llm.bench.compared_engines.gguf_file import check_gguf, write_gguf
from t2n_llm.bench.compared_engines.protocol import BATCHES, SharedModel

MODULES_VARIABLE = "T2N_NODE_MODULES"  # folder that holds node-llama-cpp
_DRIVER = Path(__file__).with_name("llama_cpp_driver.mjs")
_PACKAGE = "node-llama-cpp"
_ENTRY = Path(_PACKAGE, "dist", "index.js")
_INSTALL = (
    f"Install it: npm install -g {_PACKAGE}, or name a folder node_modules that has it: {MODULES_VARIABLE}=FOLDER."
)


class LlamaCpp:
    """llama.cpp on the CPU, with f16 keys and values, as node-llama-cpp builds it.

    Args:
        subject: the model.
        file: a GGUF file of it; "" writes one from the checkpoint, each tensor in the element type that the archive has.
    """

    name = "llama.cpp"
    prefill = BATCHES

    def __init__(self, subject: SharedModel, file: str = "") -> None:
        self._subject = subject
        self._file = Path(file).expanduser() if file else None

    def check(self) -> None:
        """See `Contender.check`."""
        node_program()
        node_package()
        if self._file is None:
            check_gguf(self._subject.source.config)
        elif not self._file.is_file():
            raise OptionError(f"{self._file}: no such file.", "Name a GGUF file, or none: --against llama.cpp.")

    def prepare(self, scratch: Path) -> None:
        """See `Contender.prepare`."""
        if self._file is None:
            self._file = scratch / "model.gguf"
            write_gguf(self._subject.source, self._subject.schemes, self._file)

    def start(self, threads: int, positions: int) -> RunningChild:
        """See `Contender.start`."""
        load = {"package": str(node_package()), "file": str(self._file), "threads": threads, "positions": positions}
        command = [node_program(), str(_DRIVER)]
        return RunningChild(self.name, command, load, timeout_seconds=self._subject.timeout_seconds)


def node_program() -> str:
    """Return the path of node.

    Raises:
        MissingExtraError: it is not installed.
    """
    found = shutil.which("node")
    if found is None:
        raise MissingExtraError("llama.cpp is run through node, which is not installed.", "Install node 20 or newer.")
    return found


def node_package() -> Path:
    """Return the module of node-llama-cpp: from T2N_NODE_MODULES, NODE_PATH, or where npm installs for all.

    Raises:
        MissingExtraError: it is in none of them.
    """
    for folder in _module_folders():
        if (folder / _ENTRY).is_file():
            return (folder / _ENTRY).absolute()
    raise MissingExtraError(f"llama.cpp comes with npm's {_PACKAGE}, which is not installed.", _INSTALL)


def _module_folders() -> list[Path]:
    named = os.environ.get(MODULES_VARIABLE)
    if named:
        return [Path(named).expanduser()]
    folders = [Path(folder) for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
    npm = shutil.which("npm")
    if npm is None:
        return folders
    asked = subprocess.run([npm, "root", "-g"], capture_output=True, text=True, check=False, timeout=60)
    return [*folders, Path(asked.stdout.strip())] if asked.returncode == 0 else folders


__all__ = ["MODULES_VARIABLE", "LlamaCpp", "node_package", "node_program"]
