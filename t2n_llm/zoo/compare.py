"""Two runs of the zoo beside each other: what got better, what got worse, what changed otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from t2n_llm.zoo.verdict import RIGHT, CellVerdict


@dataclass(frozen=True)
class Change:
    """One cell that ended differently in a later run.

    Attributes:
        key: `architecture:dtype`, or `task:architecture:dtype`.
        kind: `fixed`, `broken`, `moved` (another failure), `new` or `gone`.
        before, after: outcome and stage, or "" where there is none.
        message: what the later run said.
    """

    key: str
    kind: str
    before: str
    after: str
    message: str


KINDS = ("broken", "fixed", "moved", "new", "gone")


def compare_runs(before: Iterable[CellVerdict], after: Iterable[CellVerdict]) -> list[Change]:
    """Return the cells that differ between two runs, those that broke first."""
    old, new = ({verdict.key: verdict for verdict in run} for run in (before, after))
    found = list(_changes(old, new))
    return sorted(found, key=lambda change: (KINDS.index(change.kind), change.key))


def _changes(old: dict[str, CellVerdict], new: dict[str, CellVerdict]) -> Iterator[Change]:
    for key in {**old, **new}:
        left, right = old.get(key), new.get(key)
        kind = _kind(left, right)
        if kind is not None:
            yield Change(key, kind, _ended(left), _ended(right), right.message if right is not None else "")


def _kind(left: CellVerdict | None, right: CellVerdict | None) -> str | None:
    if left is None or right is None:
        return "new" if left is None else "gone"
    if left.outcome == right.outcome and (left.outcome == RIGHT or left.stage == right.stage):
        return None
    if right.outcome == RIGHT:
        return "fixed"
    return "broken" if left.outcome == RIGHT else "moved"


def _ended(verdict: CellVerdict | None) -> str:
    if verdict is None:
        return ""
    return verdict.outcome if verdict.outcome == RIGHT else f"{verdict.outcome} [{verdict.stage}]"
