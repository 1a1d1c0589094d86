"""The line of a model's code that something comes from: of an operator, an error, a guard, or what is running now.

In: a node, an error, a stack as text, or nothing. Out: `file.py:line`, "" where there is no line outside PyTorch and this package.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager
from traceback import FrameSummary, StackSummary, walk_stack
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.fx import Node

from generic_export.compat import stacks_taken_from

_FRAME_PATTERN = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\w+))?')
_MODE = "__torch_function__"
"""The method of a `TorchFunctionMode`: its frame lies between the model's line and the operator, and is not the model's code."""
SOURCE_KEY = "t2n_source"
"""Under this key of `torch.fx.traceback.annotate` is the line of a script that is being interpreted."""

_TORCH = os.path.dirname(torch.__file__)
_STANDARD = sysconfig.get_path("stdlib")
_TYPED_IN = ("<stdin>", "<string>")
PACKAGE = os.path.dirname(os.path.dirname(__file__))
"""The generic_export package. Its models (detectors) count as user code, except where code asks about sizes."""
_CALLER_OF_MODELS = os.path.join(PACKAGE, "torch_graph", "nested.py")
CAPTURING = tuple(
    os.path.join(PACKAGE, name)
    for name in ("torch_graph", "torchscript", "capture.py", "compat.py", "export.py", "export_attempts.py")
)
"""What captures models, and is no model."""


class NotesSources:
    """A module that notes the line of each of its operators itself, under `SOURCE_KEY`; others' are in the stack of Python."""


def is_model_code(path: str, left_out: tuple[str, ...] = CAPTURING) -> bool:
    """Return whether a file is a model's: not PyTorch's, the standard library's, or of some folders."""
    if path in _TYPED_IN:
        return True
    if path.startswith((_TORCH, *left_out, "<")):
        return False
    return not path.startswith(_STANDARD) or "site-packages" in path or "dist-packages" in path


def _innermost(frames: Iterable[tuple[str, int | str | None, str]], left_out: tuple[str, ...]) -> str:
    """Return the first of some frames, innermost first, that is a model's."""
    lines = (
        f"{os.path.basename(path)}:{line}"
        for path, line, function in frames
        if function != _MODE and is_model_code(path, left_out)
    )
    return next(lines, "")


def source_in_trace(stack_trace: str, left_out: tuple[str, ...] = CAPTURING) -> str:
    """Return the innermost line of a model in a recorded stack trace."""
    return _innermost(reversed(_FRAME_PATTERN.findall(stack_trace)), left_out)


def running_source(left_out: tuple[str, ...] = CAPTURING) -> str:
    """Return the line of a model that is running now: of the script that is interpreted, else of the innermost frame."""
    noted = (fx_traceback.current_meta.get("custom") or {}).get(SOURCE_KEY, "")
    frames = walk_stack(inspect.currentframe())
    stack = ((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames)
    return str(noted) or _innermost(stack, left_out)


def raised_source(error: BaseException, left_out: tuple[str, ...] = CAPTURING) -> str:
    """Return the innermost line of a model that an error was raised in."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _innermost(((frame.filename, frame.lineno, frame.name) for frame in frames), left_out)


def source_of_guard(location: Any) -> str:
    """Return the line that a guard comes from; "" for PyTorch's reasoning about layouts."""
    place = getattr(location, "filename", "") or "", getattr(location, "lineno", 0) or 0
    return _innermost([(*place, "")], (PACKAGE,)) if place[0] else ""


def node_source(node: Node) -> str:
    """Return the line that an FX node was captured from: where a script was written, else the innermost frame."""
    noted = (node.meta.get("custom") or {}).get(SOURCE_KEY)
    return noted or source_in_trace(node.meta.get("stack_trace") or "")


def short_stacks() -> AbstractContextManager[Any]:
    """Record only the frame that `source_in_trace` reads, without its source text: recording the whole stack is slow."""
    return stacks_taken_from(_user_frame)


def _user_frame() -> StackSummary:
    for frame, line in walk_stack(inspect.currentframe()):
        path = frame.f_code.co_filename
        if path == _CALLER_OF_MODELS:  # what follows called the export
            break
        if frame.f_code.co_name != _MODE and is_model_code(path):
            # torch.fx drops a stack without a frame of this name.
            call = FrameSummary(path, line, "forward", lookup_line=False, line="")
            return StackSummary.from_list([call])
    return StackSummary()


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
