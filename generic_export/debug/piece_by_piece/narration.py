"""What the tool says while it works: as much as `verbose` asks for, and more of a module that the environment names.

In: `verbose`, and three variables of the environment, read once a call. Out: lines on the console.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from generic_export.debug.piece_by_piece.status import Named, StatusExport

_OFF = ("", "0", "false", "no")


class Told(Named, Protocol):
    """A module that something is said of."""

    @property
    def dot_name(self) -> str: ...


@dataclass(frozen=True)
class Narration:
    """How much is said.

    Attributes:
        verbose: 0 nothing, 1 a line per step, 2 what a step is about.
        watched: `DIAGNAME`, a module by any of its names: everything is said of it, and what it raises is not caught.
        statuses: `DIAGPRINTSTATUS`: every status in full.
        exported: `DIAGPRINTEXPORT`: whatever is exported.
    """

    verbose: int = 0
    watched: str = ""
    statuses: bool = False
    exported: bool = False

    @staticmethod
    def of(verbose: int, environment: Mapping[str, str] = os.environ) -> Narration:
        """Return the narration that a caller and the environment ask for."""
        statuses, exported = (
            environment.get(name, "").lower() not in _OFF for name in ("DIAGPRINTSTATUS", "DIAGPRINTEXPORT")
        )
        return Narration(int(verbose), environment.get("DIAGNAME", ""), statuses, exported)

    def watches(self, node: Named) -> bool:
        """Say whether a module is the one that the environment names."""
        names = (node.path, node.name, node.custom_op_name, type(node.model).__name__)
        return bool(self.watched) and self.watched in names

    def say(self, level: int, text: str, node: Named | None = None) -> None:
        """Say something at a level of `verbose`, or when it is about the module that is watched."""
        if self.verbose >= level or (node is not None and self.watches(node)):
            print(text)

    def tell(self, node: Told, status: StatusExport) -> None:
        """Say what came of the export of a module."""
        where = "" if status.is_ok() else f" -- {status.step}: {status.short_reason}"
        self.say(1, f"[try_export] {node.dot_name}: {status.status}{where}", node)
        if self.statuses or self.verbose > 1 or self.watches(node):
            print(status.pretty_text())
        if self.exported and status.exported is not None:
            print(status.exported)


__all__ = ["Narration"]
