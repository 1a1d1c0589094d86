"""A module in a tree: how it is called, where it stands and what its method takes, before anything has run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from generic_export.capture import class_name
from generic_export.torch_graph.nested import signature_of_function


class ModuleNode:
    """A module by its names.

    Attributes:
        parent: None for the root.
        name, model, level, method_name: see `ModelDiagnoseOutput`.
        forward: the traced method, as it is when nothing is replaced.
        signature: of that method.
        forward_parameter_names: names of its parameters, without `*args` and `**kwargs`.
        forward_ordered_parameter_names: names of all of them, in order.
        forward_args, forward_kwargs: names of those two, or None.
    """

    def __init__(self, name: str, model: nn.Module, level: int, method_name: str) -> None:
        self.parent: ModuleNode | None = None
        self.name = name
        self.model = model
        self.level = level
        self.method_name = method_name
        self.forward: Callable[..., Any] = getattr(model, method_name)
        self.signature = signature_of_function(self.forward)
        self.forward_ordered_parameter_names = list(self.signature.parameters)
        self.forward_args = self._parameter_of_kind(inspect.Parameter.VAR_POSITIONAL)
        self.forward_kwargs = self._parameter_of_kind(inspect.Parameter.VAR_KEYWORD)
        rest = {self.forward_args, self.forward_kwargs}
        self.forward_parameter_names = {name for name in self.forward_ordered_parameter_names if name not in rest}

    def _parameter_of_kind(self, kind: object) -> str | None:
        return next((name for name, parameter in self.signature.parameters.items() if parameter.kind is kind), None)

    @property
    def true_model_name(self) -> str:
        """Class of the module."""
        return class_name(self.model)

    @property
    def full_name(self) -> str:
        """`name:Class`, with the method when it is not forward."""
        method = "" if self.method_name == "forward" else f".{self.method_name}"
        return f"{self.name}:{self.true_model_name}{method}"

    @property
    def module_name_type(self) -> str:
        """`type(name)=Class`."""
        return f"type({self.name})={self.true_model_name}"

    @property
    def dot_name(self) -> str:
        """The name, indented by the level."""
        return f"{'..' * self.level}{self.name}"

    @property
    def custom_op_name(self) -> str:
        """Name of the opaque operator: `C_<RootClass>_<child>_<grandchild>`."""
        if self.parent is None:
            return f"C_{self.true_model_name}"
        return f"{self.parent.custom_op_name}_{re.sub(r'[^A-Za-z0-9]+', '_', self.name).strip('_')}"

    @property
    def path(self) -> str:
        """As in `named_modules()`."""
        return "" if self.parent is None else f"{self.parent.path}.{self.name}".removeprefix(".")


__all__ = ["ModuleNode"]
