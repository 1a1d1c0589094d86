"""After an export that failed: the exact command that finds the guilty module.

In: the error of an export, and how it was called. Out: the same error, its hint ending in a `t2n-llm diagnose` line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

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
from t2n_llm.source.reference import SourceRef

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
def suggested_diagnosis(ref: SourceRef, dtype: str, *, possible: bool = True) -> Iterator[None]:
    """Let an error in the block end its hint with the command that finds its cause, where a diagnosis is possible."""
    try:
        yield
    except T2NError as error:
        command = diagnose_command(error, ref, dtype) if possible else None
        if command is not None:
            error.hint = f"{error.hint or ''} To find the module that fails: {command}".strip()
        raise


__all__ = ["diagnose_command", "suggested_diagnosis"]
