"""The environment variables of huggingface-hub, which it reads on import: read again for one command or for a block."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

_SLEEPING = ("huggingface_hub.file_download", "huggingface_hub.utils._http")


def read_hub_variables() -> None:
    """Reload the environment variables of huggingface-hub, as on import, and shorten the wait between retries."""
    importlib.reload(sys.modules["huggingface_hub.constants"])
    impatient = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(seconds / 100)})
    for name in _SLEEPING:
        _globals(name)["time"] = impatient


@contextmanager
def hub_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Run a block as if this process had started with these variables of huggingface-hub."""
    for name in ("huggingface_hub.constants", *_SLEEPING):
        importlib.import_module(name)
    from huggingface_hub import close_session

    try:
        with patch.dict(os.environ, variables):
            close_session()  # a new process has no connections
            read_hub_variables()
            yield
    finally:
        close_session()
        importlib.reload(sys.modules["huggingface_hub.constants"])
        for name in _SLEEPING:
            _globals(name)["time"] = time


def _globals(module: str) -> dict[str, Any]:
    return vars(sys.modules[module])


__all__ = ["hub_variables", "read_hub_variables"]
