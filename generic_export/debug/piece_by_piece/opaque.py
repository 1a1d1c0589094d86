"""A module as one operator `diag_lib::<name>` that runs it: `torch.export` then sees its name and shapes, nothing inside.

In: a module and its recorded calls. Out: `OpaqueModule`, put in place and taken away again, registration included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from generic_export.compat import forget_operators
from generic_export.debug.piece_by_piece.shapes import OutputMaker, ShapeFunction, Shapes
from generic_export.debug.record.leaves import (
    Layout,
    call_layout,
    named_arguments,
    result_layout,
    tensors_in,
    write_into,
)
from generic_export.debug.record.recording import RecordedCall
from generic_export.errors import CaptureError

NAMESPACE = "diag_lib"


@dataclass(frozen=True)
class _Call:
    """A call of the operator that is going on."""

    recorded: RecordedCall
    layout: Layout
    keywords: frozenset[str]

    def split(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return the tensors as the module was given them: positionals, and keywords by name."""
        named = list(zip(self.layout.tensors, inputs, strict=True))
        keywords = {name: tensor for name, tensor in named if name.split(".")[0] in self.keywords}
        return [tensor for name, tensor in named if name not in keywords], keywords


class OpaqueModule:
    """One module replaced by one operator.

    Args:
        name: of the operator.
        calls: its recorded calls.
        given: the user's function for outputs whose shapes cannot be learnt.
        method: what is replaced of it.
    """

    def __init__(
        self, name: str, calls: Sequence[RecordedCall], given: ShapeFunction | None = None, method: str = "forward"
    ) -> None:
        self.name = name
        self.calls = calls
        self.module = calls[0].module
        self.method = method
        self._given = given
        self._library: Any = None
        self._going_on: dict[str, _Call] = {}
        self._original = getattr(self.module, method)
        self._was_instance_attribute = method in vars(self.module)

    @property
    def schema(self) -> str:
        """Signature of the operator."""
        return f"{NAMESPACE}::{self.name}(Tensor[] inputs, str key) -> Tensor[]"

    def put(self) -> None:
        """Put the operator in the module's place.

        Raises:
            CaptureError: the shape of an output follows from no input, or the module is a script.
        """
        if isinstance(self.module, torch.jit.ScriptModule):
            raise CaptureError(f"{self.name}: a ScriptModule cannot be replaced.", "Take the module it was made from.")
        for maker in self.makers if self._given is None else ():
            _ = maker.shape  # before anything is changed: it may be unknown
        while hasattr(getattr(torch.ops, NAMESPACE), self.name):  # another tree has a module of this name in its place
            self.name += "_"
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        self._library.define(self.schema.removeprefix(f"{NAMESPACE}::"))
        self._library.impl(self.name, self._kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._fake, lib=self._library)
        setattr(self.module, self.method, self._forward)

    def remove(self) -> None:
        """Put the module back, and forget the operator."""
        if self._library is None:
            return
        if self._was_instance_attribute:
            setattr(self.module, self.method, self._original)
        else:
            delattr(self.module, self.method)
        forget_operators(self._library)
        self._library = None

    @cached_property
    def makers(self) -> list[OutputMaker]:
        """What makes tensors like the outputs, one each."""
        first = self.calls[0]
        inputs = [[held.shape for held in recorded.held.values()] for recorded in self.calls]
        dtypes = [None if held.tensor is None else held.tensor.dtype for held in first.held.values()]
        learnt = Shapes(inputs, dtypes, self.name)
        results = [list(recorded.result_shapes()) for recorded in self.calls]
        if len(set(map(len, results))) != 1:
            raise CaptureError(f"{self.name} gives more tensors in some calls.")
        columns = zip(*results, strict=True)
        return [
            learnt_maker(learnt, index, [shape for _, shape in column], tensor.dtype, f"{self.name} {column[0][0]}", self._given)
            for index, (column, tensor) in enumerate(zip(columns, first.outputs().values(), strict=True))
        ]  # fmt: skip

    # --- what runs ------------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        layout = call_layout(self._original, args, kwargs)
        key = ",".join(layout.tensors)
        recorded = next((r for r in self.calls if ",".join(r.held) == key), self.calls[0])
        self._going_on[key] = _Call(recorded, layout, frozenset(kwargs))
        found = getattr(getattr(torch.ops, NAMESPACE), self.name)(list(layout.tensors.values()), key)
        results = dict(zip((name for name, _ in recorded.result_shapes()), found, strict=True))
        for name in recorded.after:
            value = results.get(f"out_{name}", results.get(name))
            if value is not None:
                write_into(named_arguments(self._original, args, kwargs), name, value)
        return recorded.result.rebuilt(results.__getitem__)

    def _kernel(self, inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        recorded, layout = self._going_on[key].recorded, self._going_on[key].layout
        copies = {name: tensor.clone() for name, tensor in zip(layout.tensors, inputs, strict=True)}
        args, kwargs = layout.rebuilt(copies.__getitem__)
        found = result_layout(self._original(*args, **kwargs)).tensors
        after = tensors_in(named_arguments(self._original, args, kwargs))
        results = [found[name] for name in recorded.results] + [after[name] for name in recorded.extra]
        return [tensor.clone() for tensor in results]  # an operator must not hand its inputs back

    def _fake(self, inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        args, kwargs = self._going_on[key].split(inputs)
        return [maker(*args, **kwargs) for maker in self.makers]


def learnt_maker(
    learnt: Shapes,
    index: int,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    name: str,
    given: ShapeFunction | None,
) -> OutputMaker:
    """Return what makes tensors like one output; that its shape could not be learnt is told when it is needed."""
    try:
        return OutputMaker(index, dtype, learnt.of(shapes, dtype, name), given)
    except CaptureError as error:
        return OutputMaker(index, dtype, error, given)


__all__ = ["NAMESPACE", "OpaqueModule", "learnt_maker"]
