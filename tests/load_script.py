"""Scripts as modules: they are no package, and are tested like one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

_SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def load_script(name: str) -> ModuleType:
    """Return `scripts/<name>.py` as a module."""
    if str(_SCRIPTS) not in sys.path:
        sys.path.append(str(_SCRIPTS))  # as Python does when it runs one: they import each other by name
    return importlib.import_module(name)
