"""Tensors in nested arguments and results of a forward: their names in an archive, and which of their axes stay symbolic.

In: keyword arguments, results, `dynamic_shapes` as `torch.export` takes them. Out: names and dynamic axes of `generic_export`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from generic_export.errors import OptionError
from generic_export.torch_graph.naming import identifier
from generic_export.torch_graph.nested import children_of, named_leaves
from generic_export.torch_graph.request import AutoSize, AxisSymbol
from t2n_llm.exporters.config import TractConfig

_DYNAMIC = (Dim.AUTO, Dim.DYNAMIC)


def tensors_of(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of keyword arguments by their names in an archive (`past_key_values.0`)."""
    return {name: leaf for name, leaf in named_leaves(inputs) if isinstance(leaf, torch.Tensor)}


def output_names(result: Any, leaves: Sequence[Any]) -> list[str]:
    """Return a name for each leaf of a forward's result; numbers where our names are of other leaves than PyTorch's pytree has."""
    found = named_leaves(result)
    if [id(leaf) for _, leaf in found] == [id(leaf) for leaf in leaves]:
        return [name or "output" for name, _ in found]
    return [f"output_{index}" for index in range(len(leaves))]


def input_axes(inputs: Mapping[str, Any], config: TractConfig) -> dict[str, dict[int, AxisSymbol]]:
    """Return the dynamic axes of each tensor.

    Raises:
        OptionError: `dynamic_shapes` does not fit the arguments.
    """
    if config.dynamic_shapes is None:
        if not config.dynamic:
            return {}
        return {name: axes for argument, value in inputs.items() for name, axes in _all_axes(argument, value).items()}
    found: dict[str, dict[int, AxisSymbol]] = {}
    unknown = [name for name in config.dynamic_shapes if name not in inputs]
    if unknown:
        raise OptionError(
            f"dynamic_shapes names {unknown[0]!r}, which is not an argument of the example.",
            f"Arguments: {', '.join(inputs)}.",
        )
    for name, shapes in config.dynamic_shapes.items():
        _collect(name, inputs[name], shapes, found)
    return found


def _all_axes(argument: str, value: Any) -> dict[str, dict[int, AxisSymbol]]:
    """Return every axis of an argument's tensors as `Dim.AUTO`; those of one container share the sizes that are equal.

    The keys and values of all layers of a cache are as long as each other, which no operator says.
    """
    symbols: dict[tuple[int, int, int], AxisSymbol] = {}
    found: dict[str, dict[int, AxisSymbol]] = {}
    for name, tensor in tensors_of({argument: value}).items():
        places = [(tensor.dim(), axis, size) for axis, size in enumerate(tensor.shape)]
        for place in places:
            known = sum(axis == place[1] for _, axis, _ in symbols)
            own = f"{argument}_{place[1]}" + (f"_{known}" if known else "")
            symbols.setdefault(place, AutoSize(identifier(own).upper()))
        found[name] = {axis: symbols[place] for axis, place in enumerate(places)}
    return found


def _collect(name: str, value: Any, shapes: Any, found: dict[str, dict[int, AxisSymbol]]) -> None:
    if shapes is None:
        return
    if isinstance(value, torch.Tensor):
        axes = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes)
        found[name] = {axis: _symbol(size) for axis, size in axes if _is_dynamic(size)}
        return
    children = children_of(value)
    given = list(shapes.values()) if isinstance(shapes, Mapping) else list(shapes)
    if children is None or len(children) != len(given):
        raise OptionError(
            f"dynamic_shapes of {name!r} does not have the structure of the argument ({type(value).__name__}).",
            "Pass a dict of axes for a tensor, and a list or dict of those for a container.",
        )
    for (key, child), shape in zip(children, given, strict=True):
        _collect(f"{name}.{key}", child, shape, found)


def _is_dynamic(size: Any) -> bool:
    return size is not None and not isinstance(size, int) and size != Dim.STATIC


def _symbol(size: Any) -> AxisSymbol:
    return Dim.AUTO if size in _DYNAMIC else size


__all__ = ["input_axes", "output_names", "tensors_of"]
