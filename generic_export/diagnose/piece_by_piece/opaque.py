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
from generic_export.diagnose.record.layout import argument_names, call_layout, put_in_state, result_layout, take_apart
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
        forms: each size in the symbols of `Origins`.
        dtype: element type.
    """

    like: int | None
    forms: tuple[Form, ...]
    dtype: torch.dtype


class Shapes:
    """Shapes of outputs as functions of shapes of inputs, learnt from several calls.

    Args:
        inputs: shapes of the inputs, call by call.

    Attributes:
        origins: for each symbol, an input and an axis that have its size.
    """

    def __init__(self, inputs: Sequence[Sequence[tuple[int, ...]]]) -> None:
        self.inputs = inputs
        self.symbols = Symbols(names=[])
        self.origins: dict[str, tuple[int, int]] = {}
        for number, shape in enumerate(inputs[0]):
            for axis in range(len(shape)):
                sizes = [(call, shapes[number][axis]) for call, shapes in enumerate(inputs)]
                if self.symbols.form(sizes) is None:
                    self.origins[self.symbols.add(dict(sizes))] = number, axis

    def of(self, outputs: Sequence[tuple[int, ...]], name: str) -> tuple[Form, ...]:
        """Return the sizes of an output.

        Raises:
            CaptureError: a size follows from no input; a shape function has to be given.
        """
        forms = []
        for axis in range(len(outputs[0])):
            form = self.symbols.form([(call, shape[axis]) for call, shape in enumerate(outputs)])
            if form is None:
                sizes = ", ".join(str(shape[axis]) for shape in outputs)
                raise CaptureError(
                    f"{name}: axis {axis} of an output is {sizes}, which follows from no input.",
                    "Give shape_functions={class or operator name: function of the inputs}.",
                )
            forms.append(form)
        return tuple(forms)

    def sizes(self, forms: Sequence[Form], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return sizes for other inputs, symbolic ones included."""
        known: dict[str, Any] = {name: tensors[number].shape[axis] for name, (number, axis) in self.origins.items()}
        return [form.value(known) for form in forms]


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

    def shapes(self) -> tuple[Shapes, list[OutputShape]]:
        """Learn the shapes of the outputs.

        Raises:
            CaptureError: one follows from no input.
        """
        inputs = [[held.shape for held in recorded.held.values()] for recorded in self.calls]
        learnt = Shapes(inputs)
        outputs = [list(recorded.result_shapes()) for recorded in self.calls]
        dtypes = list(self.calls[0].outputs().values())
        found = []
        for number, (leaf, _) in enumerate(outputs[0]):
            shapes = [tuple(call[number][1]) for call in outputs]
            dtype = dtypes[number].dtype
            like = self._like(shapes, dtype)
            forms = learnt.of(shapes, f"{self.name} {leaf}")
            found.append(OutputShape(like, forms, dtype))
        return learnt, found

    def _like(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int | None:
        for number, name in enumerate(self.calls[0].held):
            held = [recorded.held[name] for recorded in self.calls]
            tensor = held[0].tensor
            if tensor is not None and tensor.dtype is dtype and [h.shape for h in held] == list(shapes):
                return number
        return None

    # --- what runs ------------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        layout = call_layout(self._original, args, kwargs)
        key = ",".join(layout.tensors)
        recorded = next((r for r in self.calls if ",".join(r.held) == key), self.calls[0])
        self._layouts[key] = recorded, layout
        found = getattr(getattr(torch.ops, NAMESPACE), self.name)(list(layout.tensors.values()), key)
        results = dict(zip((name for name, _ in recorded.result_shapes()), found, strict=True))
        named = [*zip(argument_names(self._original, args, kwargs), args, strict=True), *kwargs.items()]
        for name in recorded.after:
            value = results.get(f"out_{name}", results.get(name))
            nodes, now = take_apart(named, keep_states=False)
            if value is not None and not put_in_state(nodes, name, value):
                now.tensors[name].copy_(value)
        return recorded.result.rebuilt(results.__getitem__)

    def _kernel(self, inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        recorded, layout = self._layouts[key]
        copies = {name: tensor.clone() for name, tensor in zip(layout.tensors, inputs, strict=True)}
        args, kwargs = layout.rebuilt(copies.__getitem__)
        found = result_layout(self._original(*args, **kwargs)).tensors
        named = [*zip(argument_names(self._original, args, kwargs), args, strict=True), *kwargs.items()]
        after = take_apart(named, keep_states=False)[1].named_tensors()
        results = [found[name] for name in recorded.results] + [after[name] for name in recorded.extra]
        return [tensor.clone() for tensor in results]  # an operator must not hand its inputs back

    def _fake(self, inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        del key
        if self._given is not None:
            made = self._given(*inputs)
            return list(made) if isinstance(made, (tuple, list)) else [made]
        learnt, outputs = self.shapes()
        return [
            inputs[0].new_empty(learnt.sizes(output.forms, inputs), dtype=output.dtype)
            if output.like is None
            else torch.empty_like(inputs[output.like])
            for output in outputs
        ]


__all__ = ["NAMESPACE", "OpaqueModule", "OutputShape", "ShapeFunction", "Shapes"]
