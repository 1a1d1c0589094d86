"""Folders that tests read and none changes: made once in a run of the suite, whichever pytest worker needs them first."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def content(folder: Path) -> dict[str, str]:
    """Return a digest of everything below a folder, hidden files and empty folders included."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


@dataclass(frozen=True)
class SharedFolders:
    """Makes each folder once for all pytest workers.

    Attributes:
        root: of the run of the suite, the same for every worker.
        digests: of the folders that this worker used, by folder.
    """

    root: Path
    digests: dict[Path, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of_run(cls, factory: pytest.TempPathFactory) -> SharedFolders:
        """Return those of this run: a worker's own temporary folder lies in that of the run."""
        own = factory.getbasetemp()
        root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
        root.mkdir(exist_ok=True)
        return cls(root)

    def __call__(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a folder, made by the first caller.

        Args:
            name: of the folder, unique in the suite.
            make: makes the folder it is given, which does not exist yet.
        """
        target = self.root / name
        with FileLock(f"{target}.lock"):
            if not target.exists():
                partial = self.root / "partial" / name
                partial.parent.mkdir(exist_ok=True)
                make(partial)
                partial.rename(target)
            if target not in self.digests:
                self.digests[target] = content(target)
        return target

    def require_unchanged(self) -> None:
        """Fail where a test changed a folder that others read."""
        changed = [folder.name for folder, digest in self.digests.items() if content(folder) != digest]
        if changed:
            raise AssertionError(
                f"tests changed shared folders: {', '.join(changed)}. Copy a folder before changing it."
            )


@dataclass(frozen=True)
class SharedExport:
    """Exports each model once for each set of options.

    Attributes:
        folders: where the exports are.
    """

    folders: SharedFolders

    def __call__(self, source: Path, **options: Any) -> Path:
        """Return the folder of an export.

        Args:
            source: the model; its folder and the options identify the export.
            options: of `export_llm`.
        """
        from t2n_llm.export.pipeline import export_llm

        choices = f"{source.resolve()}-{sorted(options.items())}"
        name = f"{source.name}-{hashlib.sha256(choices.encode()).hexdigest()[:12]}/{source.name}"
        (self.folders.root / name).parent.mkdir(exist_ok=True)
        (self.folders.root / "partial" / name).parent.mkdir(parents=True, exist_ok=True)
        return self.folders(name, lambda folder: export_llm(str(source), folder, **options))


__all__ = ["SharedExport", "SharedFolders", "content"]
