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
    """Base of every error raised on purpose by this project.

    Args:
        message: one line that names the thing (operator, tensor, file) and what is wrong with it.
        hint: one line that says what to do next, or None when the message says it already.
        symbols: see below.

    Attributes:
        symbols: the dynamic sizes that it is about, by name.
        declarations: multiples by which the module divides sizes, `DynamicSize`s: declared so, it may do.
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
    """An option or argument has a value that is not accepted, or contradicts another one."""


class MissingExtraError(T2NError):
    """An optional package that was asked for is not installed."""


class InterruptError(T2NError):
    """The user stopped the work (Ctrl-C, or a polite signal)."""


# --- 1. capture -------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaptureAttempt:
    """What one way of capturing a module met.

    Attributes:
        method: `torch.export`, `torch.jit.script`, `torch.jit.trace`, or `PyTorch` for the module itself.
        met: the operator, the expression or the reason.
        source: `file.py:12` of the model's code ("" where it is not known).
        text: that line.
    """

    method: str
    met: str
    source: str = ""
    text: str = ""

    def __str__(self) -> str:
        line = f"{self.source}: {self.text}" if self.text else self.source
        return f"{self.method}: {self.met}{f' ({line})' if line else ''}"


class CaptureError(T2NError):
    """PyTorch could not turn the module into a graph.

    Attributes:
        attempts: what each way of capturing it met, in order; the message is about the first.
    """

    attempts: tuple[CaptureAttempt, ...] = ()

    def __str__(self) -> str:
        tried = "".join(f"\n  {attempt}" for attempt in self.attempts)
        return f"{super().__str__()}{f'{chr(10)}Tried:{tried}' if len(self.attempts) > 1 else ''}"


class NotCapturableError(CaptureError):
    """torch.export does not take the module's own code; another way of capturing may."""


class JitTraceError(CaptureError):
    """torch.jit.trace failed."""


T2NErrorTorchJitTraceFailed = JitTraceError  # the name that documents have for it


class SpecializedAxisError(CaptureError):
    """An axis declared dynamic was frozen to one size by the model's own code."""


class DimensionError(T2NError):
    """A symbolic size has no form in tract's dimension language."""


# --- 2. translate -----------------------------------------------------------------------------


class TranslationError(T2NError):
    """A captured operator could not be written as NNEF."""


class UnsupportedOperatorError(TranslationError):
    """No translation is registered for an operator, or for the arguments it was called with."""


class DialectError(UnsupportedOperatorError):
    """An operation is younger than the tract release that the archive is for."""


class RegistrationError(T2NError):
    """A translation does not match the schema of the operator it is registered for."""


class GraphError(TranslationError):
    """The NNEF document is inconsistent: undefined value, duplicate name, wrong shape or dtype."""


class NumericRangeError(TranslationError):
    """A tensor has values that its element type does not hold."""


# --- 3. write ---------------------------------------------------------------------------------


class ArchiveError(T2NError):
    """The archive could not be written or read."""


class OutputExistsError(ArchiveError):
    """The target path exists already and replacing it was not asked for."""


class DiskFullError(ArchiveError):
    """The target disk has, or ran, out of space."""


class TensorFormatError(ArchiveError):
    """A tensor has no `.dat` form (element type, rank or size), or a `.dat` file is malformed."""


# --- weights ----------------------------------------------------------------------------------


class WeightError(T2NError):
    """A weight could not be found, read or converted."""


class NonFiniteWeightError(WeightError):
    """A weight of the checkpoint is NaN or infinite."""


class MissingTensorError(WeightError):
    """The model needs a tensor that the checkpoint does not hold."""


class CorruptCheckpointError(WeightError):
    """A checkpoint file is missing, truncated, or disagrees with its index."""


class AdapterError(WeightError):
    """A fine-tuning adapter is of a type that cannot be merged, or does not belong to the model."""


# --- 4. run and compare -----------------------------------------------------------------------


class EngineError(T2NError):
    """The inference engine refused, failed or died."""


class EngineMissingError(EngineError):
    """The engine asked for is not installed on this machine."""


class DeviceMissingError(EngineMissingError):
    """The engine is there, but cannot compute on the device asked for: not built for it, or no such device."""


class WrongOnDeviceError(EngineError):
    """The engine would compute an archive wrongly on the device asked for; it was not prepared."""


class EngineLoadError(EngineError):
    """The engine refused the archive."""


class EngineRunError(EngineError):
    """The engine loaded the archive and returned an error while running it."""


class EngineCrashError(EngineError):
    """The engine process died (abort, segmentation fault, out of memory)."""


class EngineTimeoutError(EngineError):
    """The engine did not answer in time and was stopped."""


class MismatchError(T2NError):
    """The engine's outputs differ from PyTorch's by more than the tolerance."""


# --- language models --------------------------------------------------------------------------


class SourceError(T2NError):
    """The model source (hub id or folder) could not be resolved or read."""


class SourceChangedError(SourceError):
    """A file of the source was written to, replaced or deleted while it was read."""


class UnknownArchitectureError(SourceError):
    """The installed transformers has no causal language model class for this config."""


class MissingTokenizerError(SourceError):
    """The source carries no tokenizer files."""


class NotEnoughMemoryError(T2NError):
    """A step would need more memory than the machine has free."""


class ReferenceDiedError(T2NError):
    """The process that runs PyTorch for reference ended without an answer."""


class ValidationError(T2NError):
    """The exported archive does not say what PyTorch says."""
