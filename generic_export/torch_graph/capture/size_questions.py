"""Questions about sizes that come up while a model is captured: which code asks, and what is answered in PyTorch's place.

In: a block that captures. Out: what was decided, so that the archive can be held to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from generic_export.compat import COMPARING_STRIDES, captured_for_any_size, cut_sizes_seen, slice_ends_decided
from generic_export.torch_graph.decompose import pieces
from generic_export.torch_graph.sizes.branch import Branch, source_in_model

_NOT_ASKING = ("torch/__init__.py", "torch/fx/experimental/")
_OF_LAYOUTS = frozenset({"as_strided", "contiguous", "flatten", "is_contiguous", "reshape", "unflatten", "view"})
"""Operators that compare strides with `==` in C++, and sizes in other ways (`InferSize.h`)."""
_TORCH = str(Path(torch.__file__).parent)
_OPERATORS = f"{_TORCH}/_ops.py"


class TableEndsError(Exception):
    """A cut of a table is as long as it would be inside of the table; never seen outside a capture."""


@contextmanager
def sizes_decided(*, within_tables: bool, told: bool) -> Iterator[list[Branch]]:
    """Note what is decided of sizes beside PyTorch's own guards while the block captures.

    Args:
        within_tables: take cuts of axes of a fixed size (`table[: past + new]`) for cuts inside of them.
        told: raise `TableEndsError` where the model needs that.
    """
    decided: list[Branch] = []
    cut_tables: list[Any] = []

    def within(size: Any, index: Any) -> bool:
        if isinstance(size, torch.SymInt):
            return False
        if not within_tables:
            cut_tables.append(size)
            return False
        return bool(index <= size)

    def note_cut() -> None:
        if cut_tables and told:
            raise TableEndsError

    ends = slice_ends_decided(
        lambda condition: decided.append(Branch(condition, _line_of_model(), is_certain=True)), within
    )
    oblivious = captured_for_any_size(_asked_by_kernels, _asked_for_a_layout, [pieces.__file__])
    with oblivious, ends, cut_sizes_seen(note_cut):
        yield decided


def _line_of_model() -> str:
    """Return the innermost file and line of a model's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if source := source_in_model(frame.f_code.co_filename, frame.f_lineno):
            return source
        frame = frame.f_back
    return ""


def _asked_by_kernels() -> bool:
    """Say whether the question comes from PyTorch's own shape code in Python, not from a model or a layer of torch.nn."""
    frame: FrameType | None = sys._getframe(2)  # of who answers
    while frame is not None and any(part in frame.f_code.co_filename for part in _NOT_ASKING):
        frame = frame.f_back
    path = frame.f_code.co_filename if frame is not None else ""
    return path.startswith(_TORCH) and not path.startswith(f"{_TORCH}/nn/")


def _asked_for_a_layout(in_kernel: bool) -> bool:
    """Say whether strides are compared, which no value depends on."""
    frame: FrameType | None = sys._getframe(2)  # of who answers
    while frame is not None:
        if frame.f_code.co_name in COMPARING_STRIDES and frame.f_code.co_filename.startswith(_TORCH):
            return True
        if frame.f_code.co_name == "__call__" and frame.f_code.co_filename == _OPERATORS:
            return in_kernel and getattr(frame.f_locals["self"], "__name__", "").partition(".")[0] in _OF_LAYOUTS
        if frame.f_code.co_name == "__torch_function__" and "func" in frame.f_locals:
            return in_kernel and getattr(frame.f_locals["func"], "__name__", "") in _OF_LAYOUTS
        frame = frame.f_back
    return False


__all__ = ["TableEndsError", "sizes_decided"]
