"""Runs of the zoo, kept: one file of JSON lines each in a folder, named after the time when it was written."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from generic_export.errors import OptionError
from t2n_llm.zoo.verdict import NOT_RUNNABLE, RIGHT, CellVerdict

_SUFFIX = ".jsonl"
_NAME_FORMAT = "%Y-%m-%dT%H-%M-%S"

KINDS = ("broken", "fixed", "moved", "new", "gone")


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: of its file, without suffix; names sort by time.
        verdicts: what became of each cell.
    """

    name: str
    verdicts: tuple[CellVerdict, ...]

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages, as the first verdict that has them says."""
        return next((dict(verdict.versions) for verdict in self.verdicts if verdict.versions), {})

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it has cells of, in their order."""
        return tuple(dict.fromkeys(verdict.task for verdict in self.verdicts))

    def of_task(self, task: str) -> Run:
        """Return the part that is about one task."""
        return Run(self.name, tuple(verdict for verdict in self.verdicts if verdict.task == task))

    def tally(self, dtype: str) -> Tally:
        """Count the cells of an element type."""
        outcomes = Counter(verdict.outcome for verdict in self.verdicts if verdict.dtype == dtype)
        return Tally(outcomes[RIGHT], outcomes.total() - outcomes[NOT_RUNNABLE], outcomes.total())


@dataclass(frozen=True)
class Tally:
    """How many cells are right, of those that run in transformers, of all."""

    right: int
    runnable: int
    total: int


def read_results(paths: Sequence[Path]) -> list[CellVerdict]:
    """Read files of verdicts (the shards of one run); of a cell that is there twice, the later line counts.

    Raises:
        OptionError: one cannot be read, or holds something else.
    """
    found: dict[str, CellVerdict] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            found |= {
                verdict.key: verdict for verdict in (CellVerdict.from_json(line) for line in lines if line.strip())
            }
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise OptionError(
                f"{path}: no results of a zoo run: {error}", "Give files that --results wrote."
            ) from error
    return list(found.values())


def write_results(path: Path, verdicts: Iterable[CellVerdict]) -> None:
    """Write a file of verdicts, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(verdict.to_json() + "\n" for verdict in verdicts), encoding="utf-8")


def read_history(folder: Path) -> list[Run]:
    """Return the runs kept in a folder, oldest first; none when there is no such folder.

    Raises:
        OptionError: a file holds something else.
    """
    files = sorted(folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []
    return [Run(file.stem, tuple(read_results([file]))) for file in files]


def keep_run(folder: Path, verdicts: Sequence[CellVerdict], when: float | None = None) -> Run:
    """Add a run to a folder.

    Args:
        folder: made when it is missing.
        verdicts: of the run.
        when: seconds since the epoch; None is now.
    """
    name = time.strftime(_NAME_FORMAT, time.gmtime(when))
    write_results(folder / f"{name}{_SUFFIX}", verdicts)
    return Run(name, tuple(verdicts))


# Two runs of the zoo beside each other: what got better, what got worse, what changed otherwise.
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
