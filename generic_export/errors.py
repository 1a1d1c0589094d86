"""The one exception tree: every error names the thing, what was expected and what to do next.

Raised by every room; read by the CLI, which prints `message` on one line and `hint` on the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_LONG_WORD = re.compile(r"\S{400,}")


class T2NError(Exception):
    """Base class of all errors that this project raises on purpose.

    Args:
        message: one line that names the operator, tensor or file and what is wrong with it.
        hint: one line with the next step, or None if the message contains it.
        symbols: names of the dynamic sizes that the error is about.

    Attributes:
        symbols: as the argument.
        declarations: `DynamicSize`s with which the export may succeed, because the module divides these sizes.
    """

    declarations: tuple[Any, ...] = ()

    def __init__(self, message: str, hint: str | None = None, *, symbols: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.symbols = tuple(symbols)
        self.message = one_line(message)
        self.hint = None if hint is None else one_line(hint)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} {self.hint}"


def one_line(text: str) -> str:
    """Return a text as one line, in which a word that is longer than any name should be is cut in its middle."""
    lines = " ".join(line.strip() for line in text.splitlines() if line.strip())
    return _LONG_WORD.sub(lambda word: f"{word[0][:60]}...{word[0][-40:]}", lines)


def first_line(error: BaseException) -> str:
    """Return the first line of what another library said, the name of its class when it said nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def described(error: BaseException) -> str:
    """Return class and first line of another library's error, for a message of ours."""
    said = first_line(error)
    name = type(error).__name__
    return name if said == name else f"{name}: {said}"


class OptionError(T2NError):
    """An option or argument has an invalid value, or contradicts another one."""


class MissingExtraError(T2NError):
    """An optional package that the requested feature needs is not installed."""


class InterruptError(T2NError):
    """The user interrupted the command (Ctrl-C or SIGTERM)."""


# --- 1. capture -------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaptureAttempt:
    """Why one way of capturing a module failed.

    Attributes:
        method: `torch.export`, `torch.jit.script`, `torch.jit.trace`, or `PyTorch` for running the module itself.
        met: the operator, expression or reason that stopped it.
        source: `file.py:12` of the model's code; "" if unknown.
        text: that line of code; "" if unknown.
    """

    method: str
    met: str
    source: str = ""
    text: str = ""

    def __str__(self) -> str:
        line = f"{self.source}: {self.text}" if self.text else self.source
        return f"{self.method}: {self.met}{f' ({line})' if line else ''}"


class CaptureError(T2NError):
    """PyTorch could not capture the module as a graph.

    Attributes:
        attempts: each way of capturing that failed, in order. The message describes the first.
    """

    attempts: tuple[CaptureAttempt, ...] = ()

    def __str__(self) -> str:
        tried = "".join(f"\n  {attempt}" for attempt in self.attempts)
        return f"{super().__str__()}{f'{chr(10)}Tried:{tried}' if len(self.attempts) > 1 else ''}"


class NotCapturableError(CaptureError):
    """torch.export cannot capture the module's code; another way of capturing may work."""


class JitTraceError(CaptureError):
    """torch.jit.trace failed."""


T2NErrorTorchJitTraceFailed = JitTraceError  # the name that documents have for it


class SpecializedAxisError(CaptureError):
    """The model's code restricts a dynamic axis to one size."""


class DimensionError(T2NError):
    """A symbolic size cannot be expressed in tract's dimension language."""


# --- 2. translate -----------------------------------------------------------------------------


class TranslationError(T2NError):
    """A captured operator cannot be written as NNEF."""


class UnsupportedOperatorError(TranslationError):
    """No translation exists for an operator, or for the arguments of this call."""


class DialectError(UnsupportedOperatorError):
    """An operation needs a newer tract release than the one that the archive is written for."""


class RegistrationError(T2NError):
    """A translation does not match the schema of the operator it is registered for."""


class GraphError(TranslationError):
    """The NNEF document is inconsistent: an undefined value, a duplicate name, or a wrong shape or dtype."""


class NumericRangeError(TranslationError):
    """A tensor has values that its dtype cannot represent."""


# --- 3. write ---------------------------------------------------------------------------------


class ArchiveError(T2NError):
    """The archive could not be written or read."""


class OutputExistsError(ArchiveError):
    """The output path already exists, and replacing it was not requested."""


class DiskFullError(ArchiveError):
    """The output disk has, or had, too little free space."""


class TensorFormatError(ArchiveError):
    """A tensor cannot be stored as `.dat` (dtype, rank or size), or a `.dat` file is malformed."""


# --- weights ----------------------------------------------------------------------------------


class WeightError(T2NError):
    """A weight could not be found, read or converted."""


class NonFiniteWeightError(WeightError):
    """A weight of the checkpoint contains NaN or infinity."""


class MissingTensorError(WeightError):
    """The checkpoint lacks a tensor that the model needs."""


class CorruptCheckpointError(WeightError):
    """A checkpoint file is missing, truncated or inconsistent with its index."""


class AdapterError(WeightError):
    """An adapter has a type that cannot be merged, or does not fit the model."""


# --- 4. run and compare -----------------------------------------------------------------------


class EngineError(T2NError):
    """The inference engine refused an archive, failed or died."""


class EngineMissingError(EngineError):
    """The requested engine is not installed on this machine."""


class DeviceMissingError(EngineMissingError):
    """The engine was built without support for the requested device, or the machine has no such device."""


class WrongOnDeviceError(EngineError):
    """The engine would compute wrong results for this archive on the requested device. Export with that `device`."""


class EngineLoadError(EngineError):
    """The engine refused the archive."""


class EngineRunError(EngineError):
    """The engine loaded the archive and failed while running it."""


class EngineCrashError(EngineError):
    """The engine process died (abort, segmentation fault, out of memory)."""


class EngineTimeoutError(EngineError):
    """The engine did not respond in time and was stopped."""


class MismatchError(T2NError):
    """The engine's outputs differ from PyTorch's by more than the tolerance."""


# --- language models --------------------------------------------------------------------------


class SourceError(T2NError):
    """The model source (hub id or folder) was not found or cannot be read."""


class SourceChangedError(SourceError):
    """A file of the source was changed, replaced or deleted while it was read."""


class UnknownArchitectureError(SourceError):
    """The installed transformers has no class for this config and task."""


class MissingTokenizerError(SourceError):
    """The source has no tokenizer files."""


class NotEnoughMemoryError(T2NError):
    """A step needs more memory than is free."""


class ReferenceDiedError(T2NError):
    """The process that runs the PyTorch reference ended without a result."""


class ValidationError(T2NError):
    """The exported archive does not agree with PyTorch."""
