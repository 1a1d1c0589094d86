"""What the error of an export adds to its hint: folders that killed exports left, and the command that finds the cause.

In: an error that ends a block. Out: the same error with a longer hint.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from generic_export.errors import (
    CaptureError,
    DimensionError,
    EngineCrashError,
    EngineLoadError,
    EngineRunError,
    EngineTimeoutError,
    T2NError,
    TranslationError,
    ValidationError,
)
from generic_export.interrupts import Interrupted
from generic_export.write.journal import claim_abandoned
from t2n_llm.export.folder import OWNER_SUFFIX, calibration_target
from t2n_llm.source.reference import SourceRef

# --- what killed exports left ------------------------------------------------------------------------


NOTHING_LEFT = "Nothing was left behind"


def find_stale_exports(target: Path) -> tuple[Path, ...]:
    """Return the unfinished folders beside `target` that no running process owns."""
    found = []
    for place in (target.absolute(), calibration_target(target.absolute())):
        for staging, owner in claim_abandoned(place, OWNER_SUFFIX):
            owner.release()
            found += [path for path in (staging, owner.path) if path.exists()]
    return tuple(found)


@contextmanager
def report_stale_exports(target: Path) -> Iterator[None]:
    """Let an error or an interrupt that ends the block name what earlier runs left; an interrupt has it as `left`."""
    try:
        yield
    except (T2NError, Interrupted) as error:
        found = find_stale_exports(target)
        if found and getattr(error, "kept", None) is None:
            told = (
                f"This run left nothing behind; an earlier one left {found[0]}. --resume continues it (a tgz "
                f"starts again); `rm -r {shlex.join(map(str, found))}` removes it."
            )
            if isinstance(error, Interrupted):
                error.left = told
            elif error.hint is not None and NOTHING_LEFT in error.hint:
                error.hint = f"{error.hint.replace(NOTHING_LEFT, 'This run left nothing behind')} {told}"
        raise


# --- the command that finds the cause of an error ----------------------------------------------------


# What shapes and classes alone decide: the tiny twin fails in the same way, in seconds and without weights.
_ABOUT_THE_GRAPH = (
    *(CaptureError, TranslationError, DimensionError),
    *(EngineLoadError, EngineRunError, EngineCrashError, EngineTimeoutError),
)


def diagnose_command(error: T2NError, ref: SourceRef, dtype: str = "f16") -> str | None:
    """Return the command line that finds the cause of an export's error; None where no module is to blame.

    Args:
        error: what the export raised.
        ref, dtype: how it was called.
    """
    words = ["t2n-llm", "diagnose", ref.name]
    if isinstance(error, _ABOUT_THE_GRAPH):
        words.append("--tiny")
    elif isinstance(error, ValidationError):
        words += ["--weights", "--strategy", "numerics"]
    else:
        return None
    words += ["--dtype", dtype] if dtype != "f32" else []
    words += ["--revision", ref.revision] if ref.revision is not None else []
    words += ["--trust-remote-code"] if ref.trust_remote_code else []
    return shlex.join(words)


@contextmanager
def suggest_diagnosis(ref: SourceRef, dtype: str, *, possible: bool = True) -> Iterator[None]:
    """Let an error in the block end its hint with the command that finds its cause, where a diagnosis is possible."""
    try:
        yield
    except T2NError as error:
        command = diagnose_command(error, ref, dtype) if possible else None
        if command is not None:
            error.hint = f"{error.hint or ''} To find the module that fails: {command}".strip()
        raise


__all__ = ["diagnose_command", "find_stale_exports", "report_stale_exports", "suggest_diagnosis"]
