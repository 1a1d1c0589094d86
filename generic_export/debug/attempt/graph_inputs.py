"""Recorded tensors as inputs of a graph whose axes are bare symbols: sizes such as `S+P` are put together from parts.

In: leaves with their `Form`s. Out: `Feed`: names, dynamic axes and example sizes for a capture, and the arrays of a call.
A capture wants every dynamic axis free. A mask of `S+P` columns beside inputs of `S` and `P` is therefore two inputs, of `S` and
of `P` columns, that the captured forward concatenates; nothing is lost, and sizes stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from generic_export.debug.record.axes import Form
from generic_export.errors import CaptureError
from generic_export.torch_graph.nested import resize_example
from generic_export.torch_graph.request import DynamicAxes

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)

Size = int | str | Form  # a number, a symbol, or a form to be put together


@dataclass(frozen=True)
class GraphInput:
    """One input of the graph.

    Attributes:
        name: of the input.
        sizes: numbers and symbols.
        dtype: element type.
    """

    name: str
    sizes: tuple[int | str, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Join:
    """A tensor put together along an axis, of which the last `surplus` entries are dropped."""

    axis: int
    children: tuple[GraphInput | _Join, ...]
    lengths: tuple[int | str, ...]
    surplus: int


@dataclass(frozen=True)
class Feed:
    """The inputs of a graph.

    Attributes:
        trees: for each leaf, how it is put together.
        forms: sizes of each leaf.
    """

    trees: Mapping[str, GraphInput | _Join]
    forms: Mapping[str, tuple[Form, ...]]

    @staticmethod
    def of(forms: Mapping[str, tuple[Form, ...]], dtypes: Mapping[str, torch.dtype]) -> Feed:
        """Plan the inputs for leaves with these sizes and element types."""
        free = {form.bare for axes in forms.values() for form in axes if form.bare is not None and "*" not in form.bare}
        trees = {leaf: _tree(leaf, [_size(form, free) for form in axes], dtypes[leaf]) for leaf, axes in forms.items()}
        return Feed(trees, forms)

    @property
    def parts(self) -> tuple[GraphInput, ...]:
        """All inputs, in order."""
        return tuple(part for tree in self.trees.values() for part in _parts(tree))

    def dynamic_axes(self) -> DynamicAxes:
        """Return the axes that stay symbolic."""
        axes = {
            part.name: {axis: size for axis, size in enumerate(part.sizes) if isinstance(size, str)}
            for part in self.parts
        }
        return {name: found for name, found in axes.items() if found}

    def examples(self, leaves: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return tensors to capture with: those of a call, repeated up to distinct primes where their sizes will not do.

        A size of 0 or 1, or one that is also something else's, would let PyTorch take it for a number. An empty or missing
        tensor is zeros.
        """
        sizes = _example_sizes(self.parts, self.sizes(leaves))
        device = next((tensor.device for tensor in leaves.values()), torch.device("cpu"))
        given = self.inputs(leaves)
        found = []
        for part in self.parts:
            shape = [size if isinstance(size, int) else sizes[size] for size in part.sizes]
            if part.name in given and given[part.name].numel():
                found.append(resize_example(given[part.name], shape))
            else:
                found.append(torch.zeros(shape, dtype=part.dtype, device=device))
        return tuple(found)

    def leaves(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the leaves that inputs stand for; used while a graph is captured."""
        given = iter(tensors)
        return {leaf: _joined(tree, given) for leaf, tree in self.trees.items()}

    def inputs(self, leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the inputs for the leaves of a call, by name; those of missing leaves are missing.

        Raises:
            CaptureError: the sizes of a leaf are not the planned ones.
        """
        sizes = self.sizes(leaves)
        found: dict[str, torch.Tensor] = {}
        for leaf, tree in self.trees.items():
            if leaf in leaves:
                found |= zip((part.name for part in _parts(tree)), _cut(tree, leaves[leaf], sizes), strict=True)
        return found

    def sizes(self, leaves: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return what each symbol stands for in a call.

        Raises:
            CaptureError: sizes contradict each other, or a number of the plan.
        """
        sizes: dict[str, int] = {}
        for leaf, axes in self.forms.items():
            if leaf not in leaves:
                continue
            if leaves[leaf].ndim != len(axes):
                raise CaptureError(f"{leaf} is of another rank.")
            for form, size in zip(axes, leaves[leaf].shape, strict=True):
                symbol = _size(form, set()) if form.bare is None else form.bare
                if isinstance(symbol, str) and sizes.setdefault(symbol, int(size)) != size:
                    raise CaptureError(f"{leaf}: {symbol} is {sizes[symbol]} and {size} at once.")
                if form.is_constant and form.offset != size:
                    raise CaptureError(f"{leaf}: an axis of {form.offset} is {size} here.")
        return {_plain_name(symbol): size for symbol, size in sizes.items()}


def _size(form: Form, free: Collection[str]) -> Size:
    """Return a number, a symbol, or a form whose symbols are inputs' own sizes; other forms become a symbol of their own."""
    if form.is_constant:
        return form.offset
    if form.bare is not None:
        return _plain_name(form.bare)
    if all(symbol in free for symbol, _ in form.terms):
        return form
    return _plain_name(str(form))


def _plain_name(text: str) -> str:
    words = {"*": "_by_", "+": "_plus_", "-": "_minus_"}
    return re.sub(r"[*+-]", lambda match: words[match[0]], re.sub(r"^(\d)", r"D\1", text))


def _tree(name: str, sizes: list[Size], dtype: torch.dtype) -> GraphInput | _Join:
    axis = next((index for index, size in enumerate(sizes) if isinstance(size, Form)), None)
    if axis is None:
        return GraphInput(name, tuple(size for size in sizes if not isinstance(size, Form)), dtype)
    form = sizes[axis]
    lengths: list[int | str] = []
    if isinstance(form, Form):
        lengths = [symbol for symbol, factor in form.terms for _ in range(factor)]
        if form.offset > 0:
            lengths.append(form.offset)
    children = tuple(
        _tree(f"{name}.{index}", [*sizes[:axis], length, *sizes[axis + 1 :]], dtype)
        for index, length in enumerate(lengths)
    )
    return _Join(axis, children, tuple(lengths), max(0, -form.offset) if isinstance(form, Form) else 0)


def _parts(tree: GraphInput | _Join) -> Iterator[GraphInput]:
    if isinstance(tree, GraphInput):
        yield tree
    else:
        for child in tree.children:
            yield from _parts(child)


def _joined(tree: GraphInput | _Join, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    if isinstance(tree, GraphInput):
        return next(tensors)
    joined = torch.cat([_joined(child, tensors) for child in tree.children], dim=tree.axis)
    return joined.narrow(tree.axis, 0, joined.shape[tree.axis] - tree.surplus) if tree.surplus else joined


def _cut(tree: GraphInput | _Join, tensor: torch.Tensor, sizes: Mapping[str, int]) -> Iterator[torch.Tensor]:
    if isinstance(tree, GraphInput):
        yield tensor
        return
    if tree.surplus:
        padding = tensor.new_zeros(
            [tree.surplus if axis == tree.axis else size for axis, size in enumerate(tensor.shape)]
        )
        tensor = torch.cat([tensor, padding], dim=tree.axis)
    lengths = [length if isinstance(length, int) else sizes[_plain_name(length)] for length in tree.lengths]
    for child, piece in zip(tree.children, tensor.split(lengths, dim=tree.axis), strict=True):
        yield from _cut(child, piece, sizes)


def _example_sizes(parts: Sequence[GraphInput], known: Mapping[str, int]) -> dict[str, int]:
    taken = {size for part in parts for size in part.sizes if isinstance(size, int)}
    chosen: dict[str, int] = {}
    for symbol in dict.fromkeys(size for part in parts for size in part.sizes if isinstance(size, str)):
        size = known.get(symbol, 0)
        if size < 2 or size in taken:
            size = next(prime for prime in _PRIMES if prime not in taken)
        taken.add(size)
        chosen[symbol] = size
    return chosen


__all__ = ["Feed", "GraphInput"]
