"""What a capture that cannot be is refused with: the cause, the line of the model's code, and what to write instead.

In: what PyTorch raised, or a condition on sizes. Out: an error of this package.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence

from torch import nn

from generic_export.compat import is_over_values
from generic_export.errors import CaptureAttempt, CaptureError, NotCapturableError, SpecializedAxisError
from generic_export.torch_graph.capture.causes import ANY_LINE, WITHOUT_VALUES, frozen_axis, raised_cause, source_text
from generic_export.torch_graph.ir import SizeCondition
from generic_export.torch_graph.naming import user_source


def refused(module: nn.Module, condition: SizeCondition, line: str) -> SpecializedAxisError:
    """Refuse a module for a condition that tract has no words for."""
    return frozen_axis(
        module,
        condition.source or line,
        f"by the model: the captured graph is correct only where {condition.text}",
        "make the axis static, or declare its allowed sizes (DynamicSize).",
        _NAME.findall(condition.text),
    )


_NAME = re.compile(r"[A-Za-z_]\w*(?![\w(])")
"""A symbol in a condition, and no function."""


def capture_error(module: nn.Module, error: Exception, freezes: Sequence[str]) -> CaptureError:
    """Return one error for whatever torch.export raised, with its first line and the line of the user's code."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    noted = getattr(error, "t2n_source", "")
    source = noted or user_source(text) or ("" if is_over_values(error) else next(iter(freezes), ""))
    told, advice = _cause(module, error, reason)
    place = source or _raised_at(error)
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


def _raised_at(error: Exception) -> str:
    """Return `file:line` of the model's code that an error came from ("" if it came from none)."""
    return user_source("".join(traceback.format_tb(error.__traceback__)))


__all__ = ["capture_error", "refused"]
