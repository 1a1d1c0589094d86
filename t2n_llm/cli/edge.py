"""The edge of the command line: signals become an exception, and exceptions what a user is told.

In: whatever a command raised. Out: a `T2NError` with one line of message and one of what to do.
"""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import typer

from generic_export.errors import InterruptError, NotEnoughMemoryError, OptionError, T2NError
from generic_export.files import is_disk_full
from generic_export.interrupts import Interrupted
from t2n_llm.export.folder import disk_full
from t2n_llm.option import guess, removal

COMMAND = "t2n-llm"
_ABOUT_A_NAME = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


class UnforeseenError(T2NError):
    """An exception that nobody foresaw: a bug of ours, told like the others."""


# click's own error for a wrong command line. typer carries a copy of click and exports only this child of it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def advice_on(error: BaseException) -> T2NError:
    """Return what to tell the user about an exception."""
    if isinstance(error, T2NError):
        return error
    if isinstance(error, Interrupted):
        kept = getattr(error, "kept", None)
        hint = f"Partial output is kept in {kept}: run the same command again to continue." if kept else None
        return InterruptError("interrupted.", hint or error.left or "Nothing was left behind.")
    if isinstance(error, _UsageError):
        unknown = getattr(error, "option_name", "")
        if (removed := removal(unknown.removeprefix("--").replace("-", "_"), unknown)) is not None:
            return removed
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", COMMAND)
        if context is not None and hasattr(error, "possibilities") and unknown:
            flags = [flag for each in context.command.params for flag in (*each.opts, *each.secondary_opts)]
            return OptionError(f"unknown option {unknown}.", f"{guess(unknown, flags)}Run {command} --help.")
        return OptionError(error.format_message(), f"Run {command} --help.")  # type: ignore[attr-defined]
    if isinstance(error, MemoryError):
        return NotEnoughMemoryError("out of memory.", "Try --low-memory, or a machine with more memory.")
    if isinstance(error, OSError) and is_disk_full(error):
        return disk_full(Path(error.filename or tempfile.gettempdir()))
    if isinstance(error, OSError) and error.errno in _ABOUT_A_NAME and error.filename:
        return OptionError(f"{error.filename}: {error.strerror}.", "Use a file or folder name that this system allows.")
    return UnforeseenError(
        f"unexpected {type(error).__name__}: {error}",
        f"This is a bug in t2n-llm: run {COMMAND} --debug ... and report its output.",
    )
