"""Explain a refused capture: a table from the exception, or from the line that fixed a size, to a cause and advice.

In: an exception of torch.export, or the text of a line. Out: the cause in words, and one sentence of advice.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from generic_export.errors import CaptureAttempt, SpecializedAxisError


@dataclass(frozen=True)
class Cause:
    """What a capture met.

    Attributes:
        told: the cause; `{0}` is what the pattern names.
        advice: what to write instead.
        pattern: searched in the text of the exception, or of the line.
    """

    told: str
    advice: str
    pattern: re.Pattern[str]


def _row(pattern: str, told: str, advice: str) -> Cause:
    return Cause(told, advice, re.compile(pattern))


_RAISED = (
    _row(
        r"\.numpy\(\) is not supported|Can't call numpy\(\)|__array__",
        "NumPy computes with a tensor, which cannot be captured",
        "Use torch in that line; values that depend on no input can be computed in __init__ and stored as a buffer.",
    ),
    _row(
        r"no fake impl registered for \W*(?:CustomOpDef\()?([\w:.]+)",
        "the operator {0} has no fake implementation, so the shape of its result is not known",
        "Register one with torch.library.register_fake, and a translation (docs/how-to/custom-operators.md).",
    ),
    _row(
        r"aten\.(_to_sparse|sparse_\w+|to_sparse)|[Ss]parse(?:Tensor| tensor|C[SO][RO])",
        "a sparse tensor, which NNEF cannot express",
        "Compute with dense tensors: `to_dense()` before the exported module, or multiply by a mask.",
    ),
    _row(
        r"_nested_tensor|[Nn]ested[Tt]ensor",
        "a nested tensor, which NNEF cannot express",
        "Pad to one length (torch.nn.utils.rnn.pad_sequence) and mask the padding.",
    ),
    _row(
        r"Unhandled FakeTensor Device Propagation|on the same device|device meta|not on the expected device",
        "tensors on different devices are combined",
        "Create new tensors on the device of an input (device=x.device), and move the model as a whole.",
    ),
    _row(
        r"[Uu]nsupported input type|is not a pytree|not registered with pytree",
        "an argument has a class that torch.export cannot flatten",
        "Pass tensors, lists, dicts or dataclasses, and construct the object inside the forward of a wrapper module.",
    ),
    _row(
        r"lifted tensor constants?|[Mm]utating a non-functional tensor",
        "a tensor that is not a buffer is written to",
        "Register it with register_buffer, or compute a new tensor.",
    ),
)
"""Of what torch.export raised."""

_FIXED = (
    _row(
        r"\bfor\b.*\bin\b|\bwhile\b|\brange\(",
        "a loop runs once per position",
        "Write the loop with operators over the whole axis, or export its body as one step with the state as input and output.",
    ),
    _row(
        r"\b(?:np|numpy)\.",
        "NumPy computes with a size",
        "Compute with Python's integers (`//`, `*`, `-(-a // b)`), which may stay symbolic.",
    ),
    _row(
        r"\b(?:round|int|float)\(|\bmath\.",
        "a size becomes a plain number",
        "Compute with integers: `a // b` for floor, `-(-a // b)` for ceil, `3 * a // 10` for a share.",
    ),
    _row(
        r"^\s*(?:el)?if\b|\bassert\b|\bif\b.*\belse\b",
        "a branch depends on a size",
        "Write one expression that is correct for every size, or export once per branch with DynamicSize bounds.",
    ),
)
"""Of a line that fixed a size."""

WITHOUT_VALUES = {
    "index": "Write torch.where(mask, new, old) for x[mask] = new; return the mask together with x instead of x[mask].",
    "nonzero": "Keep the mask, and write torch.where(mask, new, old).",
    "masked_select": "Return values and mask, or write torch.where(mask, values, 0).",
    "_unique2": "Call torch.unique outside the exported module.",
    "unique_dim": "Call torch.unique outside the exported module.",
    "unique_consecutive": "Call torch.unique_consecutive outside the exported module.",
    "repeat_interleave": "Repeat by a number, or gather with indices from an input.",
    "_pack_padded_sequence": "Run the layer on the padded batch (batch_first) and mask its results.",
}
"""What to write instead of operators whose results have sizes that depend on values."""

ANY_LINE = "Change that line so that it does not depend on values or on one size; the cause has PyTorch's full message."
"""The advice where no row knows the cause."""

_DETECTION = "torchvision.models.detection."
_DETECTOR_ADVICE = (
    "Export `exportable_detector(model, (height, width))` of generic_export.detection, which returns a fixed "
    "number of boxes (docs/how-to/detectors.md)."
)


def raised_cause(error: BaseException, module: nn.Module) -> tuple[str, str] | None:
    """Return the cause of an exception of torch.export, and the advice; None if no row of the table matches."""
    if type(module).__module__.startswith(_DETECTION):
        return (
            "a torchvision detector takes lists of images and returns a variable number of boxes",
            _DETECTOR_ADVICE,
        )
    return _found(_RAISED, f"{type(error).__name__}: {error}")


def fixed_cause(text: str) -> tuple[str, str] | None:
    """Return why a line fixed a size, and the advice; None if no row of the table matches."""
    return _found(_FIXED, text)


def frozen_axis(
    module: nn.Module, source: str, told: str, otherwise: str, symbols: Iterable[str]
) -> SpecializedAxisError:
    """Return the refusal of a module that freezes a dynamic axis.

    Args:
        module: refused.
        source: `file.py:12` of the line that fixed the size, or "".
        told: what was frozen, after the words `a dynamic axis is frozen`.
        otherwise: what to do where that line stays.
        symbols: those of the axis.
    """
    text = source_text(module, source)
    cause, advice = fixed_cause(text) or ("", "Change that line so that it is correct for every size.")
    line = f"; {cause}: `{text}`" if cause else f": `{text}`" if text else ""
    where = f" at {source}" if source else ""
    refusal = SpecializedAxisError(
        f"{type(module).__name__}{where}: a dynamic axis is restricted {told}{line}.",
        f"{advice} Otherwise {otherwise}",
        symbols=dict.fromkeys(symbols),
    )
    refusal.attempts = (CaptureAttempt("torch.export", cause or f"a dynamic axis is restricted {told}", source, text),)
    return refusal


def _found(rows: tuple[Cause, ...], text: str) -> tuple[str, str] | None:
    for row in rows:
        match = row.pattern.search(text)
        if match is not None:
            return row.told.format(match.group(1) if match.groups() else ""), row.advice
    return None


def source_text(module: nn.Module, source: str, error: BaseException | None = None) -> str:
    """Return the text of a line of a model's code.

    Args:
        module: whose classes, and whose parts', are looked through.
        source: `file.py:12`, without a folder.
        error: whose traceback is looked through as well.
    """
    name, _, number = source.rpartition(":")
    if not number.isdigit():
        return ""
    frames = traceback.walk_tb(error.__traceback__) if error is not None else ()
    paths = [frame.f_code.co_filename for frame, _ in frames]
    for kind in {type(each) for each in module.modules()}:
        paths += [path for base in kind.__mro__ if (path := _file_of(base))]
    path = next((path for path in paths if os.path.basename(path) == name), "")
    return linecache.getline(path, int(number)).strip() if path else ""


def _file_of(kind: type) -> str:
    try:
        return inspect.getsourcefile(kind) or ""
    except TypeError:  # a class that is built in
        return ""


__all__ = ["ANY_LINE", "WITHOUT_VALUES", "Cause", "fixed_cause", "frozen_axis", "raised_cause", "source_text"]
