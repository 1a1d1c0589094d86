"""What goes between the processes of the zoo: a cell to run, and what became of it, which is one line of JSON in its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf, isfinite
from typing import Any

from t2n_llm.tasks.names import TEXT_GENERATION

RIGHT = "right"
"""Exported, and right in all checks."""
WRONG = "wrong"
"""Exported, and another answer than PyTorch's in at least one check."""
FAILED = "failed"
"""An error ended it, at a stage that is named."""
NOT_RUNNABLE = "not runnable"
"""transformers itself cannot build it, or decode with it on a CPU."""
TIMEOUT = "timeout"
MEMORY = "memory"
CRASHED = "crashed"
"""The process died, or ended without a verdict."""
OVER = "over the bar"
"""Captured and translated in its real size, and it took more than it may."""

OUTCOMES = (RIGHT, WRONG, FAILED, OVER, TIMEOUT, MEMORY, CRASHED, NOT_RUNNABLE)

DTYPES = ("f32", "f16", "q4_0")

FULL_SIZE = "full-size"
"""The column of default configs: captured and translated in their real size, without weights."""

SUITE_COLUMNS = ("dynamic", "static", "half")
"""The columns of suites of modules: every axis that a case names is dynamic, or none; or all of them, with matrices in f16."""

COLUMNS = (*DTYPES, FULL_SIZE, *SUITE_COLUMNS)


@dataclass(frozen=True)
class Cell:
    """One thing to try.

    Attributes:
        architecture: a model type of transformers, a case of a suite, or what `model` is called.
        dtype: `f32`, `f16` or `q4_0`; or `full-size`, which checks nothing in the engine; of a suite, one of its columns.
        task: what is made of it; or the suite.
        model: hub id or folder of a real checkpoint; None makes a tiny random one.
        revision: of a hub repository.
        decode_steps: tokens decoded by the check.
        seed: of the random weights.
        timeout_seconds, max_rss_bytes: limits of its process, and those it starts, together.
    """

    architecture: str
    dtype: str = "f32"
    task: str = TEXT_GENERATION
    model: str | None = None
    revision: str | None = None
    decode_steps: int = 16
    seed: int = 0
    timeout_seconds: float = 300.0
    max_rss_bytes: int = 4 << 30

    @property
    def key(self) -> str:
        """What a line of results is found by."""
        return f"{row_of(self.task, self.architecture)}:{self.dtype}"

    def ended(self, outcome: str, stage: str, **further: Any) -> CellVerdict:
        """Return what became of it; `further` are fields of the verdict."""
        return CellVerdict(self.architecture, self.dtype, outcome, stage, task=self.task, **further)


def row_of(task: str, architecture: str) -> str:
    """Return what an architecture is called among those of all tasks: by its own name where it generates text."""
    return architecture if task == TEXT_GENERATION else f"{task}:{architecture}"


@dataclass(frozen=True)
class Check:
    """One of the checks, in figures.

    Attributes:
        max_abs_error: of a logit, or of what else the task gives.
        scale: largest reference value, at least 1.
        same_tokens, tokens: steps where both prefer the same token, of how many.
        passed: within the element type's tolerance.
    """

    max_abs_error: float
    scale: float
    same_tokens: int
    tokens: int
    passed: bool


@dataclass(frozen=True)
class CellVerdict:
    """What became of a cell.

    Attributes:
        architecture, dtype, task: the cell.
        outcome: one of `OUTCOMES`.
        stage: where it ended: config, transformers, save, capture, write, reference, prefill, ..., done.
        class_name: the transformers class.
        seed: of the random weights that it was judged by.
        error, message: class and text of the exception.
        checks: by name, those that ran.
        reference: what PyTorch computed the checks' figures in, `f32`, or `f64` where f32 was not sure.
        seconds, peak_rss_bytes: of the process and those it started.
        states: the transformers cache class that its own decoding used, or "" when it kept none.
        layers: of a cell in full size; 0 elsewhere.
        processor_seconds: of capture and translation in full size, of the export of a suite's case; 0 elsewhere.
        versions: of the packages that matter.
        log: the last lines that it printed, when it died.
    """

    architecture: str
    dtype: str
    outcome: str
    stage: str
    class_name: str = ""
    seed: int = 0
    error: str = ""
    message: str = ""
    checks: Mapping[str, Check] = field(default_factory=dict)
    reference: str = "f32"
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    states: str = ""
    layers: int = 0
    processor_seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    task: str = TEXT_GENERATION

    @property
    def row(self) -> str:
        """The architecture among those of all tasks."""
        return row_of(self.task, self.architecture)

    @property
    def key(self) -> str:
        """What it is found by."""
        return f"{self.row}:{self.dtype}"

    @property
    def max_abs_error(self) -> float | None:
        """The worst logit of all checks, or None when none ran."""
        return max((check.max_abs_error for check in self.checks.values()), default=None)

    def asdict(self) -> dict[str, Any]:
        """Return it as plain data for JSON, which has no infinity: an error that is not finite is None."""
        plain = asdict(self)
        for check in plain["checks"].values():
            check["max_abs_error"] = check["max_abs_error"] if isfinite(check["max_abs_error"]) else None
        return plain

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(self.asdict(), allow_nan=False)

    @staticmethod
    def from_json(line: str) -> CellVerdict:
        """Read what `to_json` wrote; fields of a later version are ignored.

        Raises:
            ValueError, TypeError, AttributeError: it is something else.
        """
        plain = json.loads(line)
        known = {item.name for item in fields(CellVerdict)}
        checks = {name: _check(figures) for name, figures in plain.pop("checks", {}).items()}
        return CellVerdict(checks=checks, **{name: value for name, value in plain.items() if name in known})


def _check(figures: Mapping[str, Any]) -> Check:
    error = figures["max_abs_error"]
    return Check(**{**figures, "max_abs_error": inf if error is None else error})
