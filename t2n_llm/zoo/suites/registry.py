"""The suites by name; `encoders` is the tasks of one pass of the zoo, which have every architecture of transformers already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from generic_export.errors import OptionError
from t2n_llm.zoo.suites import diffusers, nemo, timm, torchaudio, torchvision, transformers
from t2n_llm.zoo.suites.case import ModuleCase
from t2n_llm.zoo.tasks import ZOO_TASKS, Way, architectures
from t2n_llm.zoo.verdict import row_of

_CASES: Mapping[str, Mapping[str, ModuleCase]] = {
    "timm": timm.CASES,
    "torchvision": torchvision.CASES,
    "torchaudio": torchaudio.CASES,
    "nemo": nemo.CASES,
    "diffusers": diffusers.CASES,
    "transformers": transformers.CASES,
}
LIBRARIES = tuple(_CASES)
ENCODERS = "encoders"


def cases_of(suite: str) -> Mapping[str, ModuleCase]:
    """Return the cases of a library by name; the library itself is not needed.

    Args:
        suite: of `LIBRARIES`.
    """
    return _CASES[suite]


def chosen_suites(names: Sequence[str]) -> tuple[str, ...]:
    """Return the suites that a user names, each once.

    Raises:
        OptionError: there is no such suite.
    """
    known = (*LIBRARIES, ENCODERS)
    for name in names:
        if name not in known:
            raise OptionError(f"there is no suite {name!r}.", f"Use {', '.join(known)}.")
    return tuple(dict.fromkeys(names))


def encoder_tasks() -> tuple[str, ...]:
    """Return the tasks whose models make one pass, of text, pictures, sound or series."""
    return tuple(name for name, task in ZOO_TASKS.items() if task.way is Way.FORWARD)


def rows_of_all() -> set[str]:
    """Return what every architecture of every task, and every case, is called, as `t2n_llm.zoo.verdict.row_of` does."""
    tasks = {row_of(task, kind) for task in ZOO_TASKS for kind in architectures(task)}
    return tasks | {row_of(suite, name) for suite in LIBRARIES for name in cases_of(suite)}


__all__ = ["ENCODERS", "LIBRARIES", "cases_of", "chosen_suites", "encoder_tasks", "rows_of_all"]
