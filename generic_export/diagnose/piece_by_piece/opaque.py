"""A module as one operator `diag_lib::<name>` that runs it: `torch.export` then sees its name and shapes, nothing inside.

In: a module and its recorded calls. Out: `OpaqueModule`, put in place and taken away again, registration included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from generic_export.compat import forget_operators
from generic_export.diagnose.record.axes import Form, Symbols
from generic_export.diagnose.record.leaves import call_layout, named_arguments, result_layout, tensors_in, write_into
from generic_export.diagnose.record.recording import RecordedCall
from generic_export.errors import CaptureError

NAMESPACE = "diag_lib"

ShapeFunction = Callable[..., Any]
"""Input tensors in; a tensor (or a tuple of them) of the right shapes and element types out."""


@dataclass(frozen=True)
class OutputShape:
    """What the shape of one output follows from.

    Attributes:
        like: number of the input that has the same shape and element type in every call; None when none has.
        forms: each size in symbols.
        origins: for each of the symbols, an input and an axis that have its size.
        dtype: element type.
    """

    like: int | None
    forms: tuple[Form, ...]
    origins: Mapping[str, tuple[int, int]]
    dtype: torch.dtype

    def made(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return a tensor of that shape for other inputs, symbolic sizes included."""
        if self.like is not None:
            return torch.empty_like(inputs[self.like])
        known: dict[str, Any] = {name: inputs[number].shape[axis] for name, (number, axis) in self.origins.items()}
        return inputs[0].new_empty([form.value(known) for form in self.forms], dtype=self.dtype)


class Shapes:
    """Shapes of outputs as functions of shapes of inputs, learnt from several calls.

    Args:
        inputs: the inputs' shapes, call by call.
        dtypes: their element types.
    """

    def __init__(self, inputs: Sequence[Sequence[tuple[int, ...]]], dtypes: Sequence[torch.dtype | None]) -> None:
        self._inputs, self._dtypes = inputs, dtypes
        self._symbols = Symbols(names=[])
        self._origins: dict[str, tuple[int, int]] = {}
        for number, shape in enumerate(inputs[0]):
            for axis in range(len(shape)):
                sizes = [(call, shapes[number][axis]) for call, shapes in enumerate(inputs)]
                if self._symbols.form(sizes) is None:
                    self._origins[self._symbols.add(dict(sizes))] = number, axis

    def of(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, name: str) -> OutputShape:
        """Return what an output's shape follows from.

        Raises:
            CaptureError: a size follows from no input; a shape function has to be given.
        """
        forms = []
        for axis in range(len(shapes[0])):
            form = self._symbols.form([(call, shape[axis]) for call, shape in enumerate(shapes)])
            if form is None:
                sizes = ", ".join(str(shape[axis]) for shape in shapes)
                raise CaptureError(
                    f"{name}: axis {axis} of an output is {sizes}, which follows from no input.",
                    "Give shape_functions={class or operator name: function of the inputs}.",
                )
            forms.append(form)
        symbols = {symbol for form in forms for term, _ in form.terms for symbol in term.split("*")}
        columns = zip(self._dtypes, zip(*self._inputs, strict=True), strict=True)
        same = (n for n, (kind, seen) in enumerate(columns) if kind is dtype and list(seen) == list(shapes))
        return OutputShape(next(same, None), tuple(forms), {name: self._origins[name] for name in symbols}, dtype)


class OpaqueModule:
    """One module replaced by one operator.

    Args:
        name: of the operator.
        calls: its recorded calls.
        shape_functions: `{class or operator name: function}` for outputs whose shapes cannot be learnt.
    """

    def __init__(
        self, name: str, calls: Sequence[RecordedCall], shape_functions: Mapping[str, ShapeFunction] | None = None
    ) -> None:
        self.name = name
        self.calls = calls
        self.module = calls[0].module
        self._given = (shape_functions or {}).get(calls[0].call.class_name) or (shape_functions or {}).get(name)
        self._library: Any = None
        self._layouts: dict[str, tuple[RecordedCall, Any]] = {}
        self._original = self.module.forward
        self._was_instance_attribute = "forward" in vars(self.module)

    def put(self) -> None:
        """Put the operator in the module's place.

        Raises:
            CaptureError: the shape of an output follows from no input.
        """
        if self._given is None:
            self.shapes()  # before anything is changed: they may be unknown
        while hasattr(getattr(torch.ops, NAMESPACE), self.name):  # another tree has a module of this name in its place
            self.name += "_"
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        self._library.define(f"{self.name}(Tensor[] inputs, str key) -> Tensor[]")
        self._library.impl(self.name, self._kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._fake, lib=self._library)
        self.module.forward = self._forward

    def remove(self) -> None:
        """Put the module back, and forget the operator."""
        if self._library is None:
            return
        if self._was_instance_attribute:
            self.module.forward = self._original
        else:
            del self.module.forward
        forget_operators(self._library)
        self._library = None

    def shapes(self) -> list[OutputShape]:
        """Learn the shapes of the outputs.

        Raises:
            CaptureError: one follows from no input.
        """
        first = self.calls[0]
        inputs = [[held.shape for held in recorded.held.values()] for recorded in self.calls]
        learnt = Shapes(inputs, [None if held.tensor is None else held.tensor.dtype for held in first.held.values()])
        columns = zip(*(recorded.result_shapes() for recorded in self.calls), strict=True)
        return [
            learnt.of([shape for _, shape in column], tensor.dtype, f"{self.name} {column[0][0]}")
            for column, tensor in zip(columns, first.outputs().values(), strict=True)
        ]

    # --- what runs ------------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        layout = call_layout(self._original, args, kwargs)
        key = ",".join(layout.tensors)
        recorded = next((r for r in self.calls if ",".join(r.held) == key), self.calls[0])
        self._layouts[key] = recorded, layout
        found = getattr(getattr(torch.ops, NAMESPACE), self.name)(list(layout.tensors.values()), key)
        results = dict(zip((name for name, _ in recorded.result_shapes()), found, strict=True))
        for name in recorded.after:
            value = results.get(f"out_{name}", results.get(name))
            if value is not None:
                write_into(named_arguments(self._original, args, kwargs), name, value)
        return recorded.result.rebuilt(results.__getitem__)

    def _kernel(self, inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        recorded, layout = self._layouts[key]
        copies = {name: tensor.clone() for name, tensor in zip(layout.tensors, inputs, strict=True)}
        args, kwargs = layout.rebuilt(copies.__getitem__)
        found = result_layout(self._original(*args, **kwargs)).tensors
        after = tensors_in(named_arguments(self._original, args, kwargs))
        results = [found[name] for name in recorded.results] + [after[name] for name in recorded.extra]
        return [tensor.clone() for tensor in results]  # an operator must not hand its inputs back

    def _fake(self, inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        del key
        if self._given is not None:
            made = self._given(*inputs)
            return list(made) if isinstance(made, (tuple, list)) else [made]
        return [output.made(*inputs) for output in self.shapes()]


__all__ = ["NAMESPACE", "OpaqueModule", "OutputShape", "ShapeFunction", "Shapes"]
