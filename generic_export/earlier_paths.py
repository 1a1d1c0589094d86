"""Module paths that documents have named and that have moved since: importing one gives the module at its new place.

In: a table, old path -> new path. Out: nothing; nothing is imported before it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Moved:
    """Finds the modules of one package that have moved: a finder and loader, without the slow import of `importlib.abc`."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self.moved = moved
        self._own: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(fullname, self) if fullname in self.moved else None  # type: ignore[arg-type]  # by its methods

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.moved[spec.name])
        self._own[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own.pop(module.__name__)  # importing it under the old path put another one there


def keep_importable(moved: Mapping[str, str]) -> None:
    """Keep the paths on the left importable as the modules on the right; for a package's own `__init__`."""
    # First: a folder that only holds old byte code would be found as a package without an __init__.
    sys.meta_path.insert(0, _Moved(moved))
