"""Explain a refused capture: a table from the exception, or from the line that fixed a size, to a cause and advice.

In: an exception of torch.export, or the text of a line. Out: the cause in words, and one sentence of advice.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from generic_export.compat import is_over_values
from generic_export.errors import CaptureAttempt, CaptureError, NotCapturableError, SpecializedAxisError
from generic_export.torch_graph.ir import SizeCondition
from generic_export.torch_graph.source_lines import raised_source, source_in_trace, source_text

_NAME = re.compile(r"[A-Za-z_]\w*(?![\w(])")
"""A symbol in a condition, and no function."""


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


_SIZES_OF_NUMPY = (
    "NumPy computes with a size",
    "Compute with Python's integers (`//`, `*`, `-(-a // b)`), which may stay symbolic, and with torch.arange for np.arange.",
)

_RAISED = (
    _row(r"loop of ufunc does not support argument \d+ of type Sym", *_SIZES_OF_NUMPY),
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
        r"Expected (?:body_fn_output|carried_inputs|init|carry) .*to have same metadata",
        "a loop carries a tensor whose shape or dtype changes from step to step",
        "Carry a tensor of the largest size, and write one position in each step; or write a loop of Python with a fixed "
        "number of steps.",
    ),
    _row(
        r"^ZeroDivisionError: integer modulo by zero",
        "nothing is left of an axis in the example, and PyTorch divides by its size",
        "Use a larger example.",
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
    _row(r"\b(?:np|numpy)\.", *_SIZES_OF_NUMPY),
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


# What a capture that cannot be is refused with: the cause, the line of the model's code, and what to write instead.
# In: what PyTorch raised, or a condition on sizes. Out: an error of this package.
def refused(module: nn.Module, condition: SizeCondition, line: str) -> SpecializedAxisError:
    """Refuse a module for a condition that tract has no words for."""
    return frozen_axis(
        module,
        condition.source or line,
        f"by the model: the captured graph is correct only where {condition.text}",
        "make the axis static, or declare its allowed sizes (DynamicSize).",
        _NAME.findall(condition.text),
    )


def capture_error(module: nn.Module, error: Exception, specializations: Sequence[str]) -> CaptureError:
    """Return one error for whatever torch.export raised, with its first line and the line of the user's code."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    noted = getattr(error, "t2n_source", "")
    source = noted or source_in_trace(text) or ("" if is_over_values(error) else next(iter(specializations), ""))
    told, advice = _cause(module, error, reason)
    place = source or raised_source(error)
    met = CaptureAttempt("torch.export", told, place, source_text(module, place, error))
    refusal = NotCapturableError(f"{type(module).__name__}{f' at {place}' if place else ''}: {told}.", advice)
    refusal.attempts = (met,)
    return refusal


def _cause(module: nn.Module, error: Exception, reason: str) -> tuple[str, str]:
    """Return the cause in words, and the advice."""
    if _reads_packed(error):
        return (
            "the sizes of a packed sequence depend on values, which NNEF cannot express",
            WITHOUT_VALUES["_pack_padded_sequence"],
        )
    known = raised_cause(error, module)
    if known is not None:
        return known
    if is_over_values(error):
        return (
            ("a number that is read from a tensor determines a size or a branch, which torch.export cannot capture"),
            (
                "Use the size of an input axis, or compute with masks and torch.where; the cause has PyTorch's "
                "full message."
            ),
        )
    return (
        f"torch.export cannot capture the module: {type(error).__name__}: {reason.rstrip('.')}",
        ANY_LINE,
    )


def _reads_packed(error: Exception) -> bool:
    """Say whether the code of packed sequences failed, or that of a recurrent layer over one."""
    paths = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    packing, layer = (os.path.join("torch", "nn", *below) for below in (("utils", "rnn.py"), ("modules", "rnn.py")))
    return any(path.endswith(packing) or (path.endswith(layer) and isinstance(error, TypeError)) for path in paths)


__all__ = [
    "ANY_LINE",
    "WITHOUT_VALUES",
    "Cause",
    "capture_error",
    "fixed_cause",
    "frozen_axis",
    "raised_cause",
    "refused",
]
