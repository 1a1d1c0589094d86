"""What is asked of a capture: the module, its example arguments, the names of things, the axes that stay symbolic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.export import Dim

from generic_export.compat import OpOverload
from generic_export.errors import OptionError

DynamicAxes = Mapping[str, Mapping[int, str | Dim]]
"""`{input name: {axis: symbol}}`: a name, or a torch.export `Dim`, whose bounds then hold. One symbol is one size."""


@dataclass(frozen=True)
class CaptureRequest:
    """One capture.

    Attributes:
        module: the module to capture, in eval mode; parameters may be on the meta device. It is not modified.
        args: example positional arguments (tensors, or nests of tensors); only shapes and dtypes matter.
        kwargs: example keyword arguments.
        input_names: a name per input tensor, in flattened order; None takes those of `forward`, dotted (`batch.ids.0`).
        output_names: a name per output tensor, in flattened order; None numbers them, or takes a dict's own.
        dynamic_axes: the axes that stay symbolic.
        strip_prefix: leading path removed from module paths and parameter names (a wrapper's attribute).
        keep: says whether an operator can stay as it is; others go through PyTorch's own decompositions.
        conditional: accept a program that is right at some sizes alone: the graph says at which (`conditions`).
        whole: classes of modules of which each instance is captured as one operator, see `units.py`.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: DynamicAxes = field(default_factory=dict)
    strip_prefix: str = ""
    keep: Callable[[OpOverload], bool] | None = None
    whole: Collection[type[nn.Module]] = ()
    conditional: bool = False


def symbol_name(symbol: object) -> str:
    """Return the name of a dynamic size given by its name or by a torch.export `Dim`.

    Raises:
        OptionError: a hint without a name (`Dim.AUTO`), or an expression of another `Dim`.
    """
    if isinstance(symbol, str):
        return symbol
    name = getattr(symbol, "__name__", None)
    if type(symbol) is not Dim or not isinstance(name, str):
        raise OptionError(f"dynamic size {symbol!r} has no name.", "Give a string, or torch.export.Dim(name).")
    return name


__all__ = ["CaptureRequest", "DynamicAxes", "symbol_name"]
