"""What long work has come to, kept on disk, so that work that was killed goes on: one safetensors file, replaced as a whole.

In: tensors, and anything that JSON can say of them. Out: the same, to work of the same identity; what another one left is removed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from generic_export.files import partial_beside, sync

_INTERVAL = 30.0  # seconds: so much work may be lost, and no more is written where steps are quick
_FORMAT = "t2n-kept-1"
_State = TypeVar("_State")


@dataclass
class KeptState:
    """The file of one piece of work.

    Attributes:
        path: of the file.
        identity: text that two pieces of work share when nothing that decides what they make is different.
    """

    path: Path
    identity: str
    _written: float = field(init=False, default_factory=time.monotonic)

    @property
    def is_due(self) -> bool:
        """Whether so much was done since that it is worth keeping."""
        return time.monotonic() - self._written >= _INTERVAL

    def recalled(self, parse: Callable[[dict[str, Any], dict[str, torch.Tensor]], _State | None]) -> _State | None:
        """Return what was kept; forget what is another's, cut short, or not what `parse` takes.

        Args:
            parse: makes a state of what was described and the tensors. Where it returns None, or raises ValueError, KeyError,
                TypeError or OSError, that cannot be gone on with.
        """
        try:
            found = self._read()
            state = parse(*found) if found is not None else None
        except (ValueError, KeyError, TypeError, OSError):
            state = None
        if state is None:
            self.forget()
        return state

    def _read(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") == _FORMAT and metadata.get("identity") == self.identity:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    return json.loads(metadata["described"]), tensors
        except SafetensorError:
            pass  # cut short, or of another version
        return None

    def write(self, described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep this instead of what was kept.

        Args:
            described: JSON, exact for numbers.
            tensors: contiguous, none of them a part of another.

        Raises:
            OSError: the file cannot be written; what was kept stays.
        """
        from safetensors.torch import save_file

        metadata = {"format": _FORMAT, "identity": self.identity, "described": json.dumps(described)}
        partial = partial_beside(self.path)
        try:
            save_file(dict(tensors), partial, metadata)
            sync(partial)
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)
        self._written = time.monotonic()

    def forget(self) -> None:
        """Remove the file, if there is one."""
        self.path.unlink(missing_ok=True)


__all__ = ["KeptState"]
