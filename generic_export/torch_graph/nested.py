"""Nested arguments and results as flat lists of tensors with dotted names, and back.

A forward may take and return dicts, dataclasses, (named) tuples, lists and other classes that PyTorch's pytree knows; a graph has
a flat list of inputs and outputs. `batch["ids"][0]` is called `batch.ids.0`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from generic_export.compat import forward_hooks_of, pytree
from generic_export.errors import CaptureError, OptionError
from generic_export.torch_graph.sizes.in_tensors import tensor_of

_Rebuild = Callable[[Iterator[torch.Tensor]], Any]
_Leaves = list[tuple[str, Any]]


@dataclass(frozen=True)
class FlatCall:
    """The arguments of one call of a forward.

    Attributes:
        names: a dotted name per tensor: parameters of the forward first, in the order of the call.
        tensors: the tensors.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    _rebuild: _Rebuild

    @staticmethod
    def of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
        """Take the arguments of a call apart.

        Raises:
            OptionError: the forward does not take such arguments, or one holds tensors in an object that cannot be taken apart.
        """
        found: _Leaves = []
        positional = [_take_apart(value, name, found) for name, value in _named_arguments(module, args, kwargs)]
        keywords = {name: _take_apart(value, name, found) for name, value in kwargs.items()}
        for name, leaf in found:
            if _hides_tensors(leaf):
                kind = type(leaf).__name__
                raise OptionError(
                    f"argument {name!r} is a {kind}: its tensors would become constants of the archive.",
                    _REGISTER.format(kind),
                )
        tensors = [(name, leaf) for name, leaf in found if isinstance(leaf, torch.Tensor)]

        def rebuild(leaves: Iterator[torch.Tensor]) -> Any:
            return [part(leaves) for part in positional], {name: part(leaves) for name, part in keywords.items()}

        return FlatCall(tuple(name for name, _ in tensors), tuple(tensor for _, tensor in tensors), rebuild)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments with these tensors in the places of the original ones."""
        args, kwargs = self._rebuild(iter(tensors))
        return args, kwargs


def named_outputs(result: Any) -> tuple[tuple[str, ...], tuple[torch.Tensor, ...]]:
    """Return the tensors of a result and their names: `output`, `output_0`, or what dicts and dataclasses call them.

    Numbers are tensors of rank 0; None is left out.

    Raises:
        CaptureError: something in the result is neither a tensor, a number nor None.
    """
    found: _Leaves = []
    if isinstance(result, torch.Tensor):
        found.append(("output", result))
    elif _is_sequence(result):
        for index, item in enumerate(result):
            _take_apart(item, f"output_{index}", found)
    else:
        _take_apart(result, "", found)
    found = [(name, _as_tensor(leaf)) for name, leaf in found]
    for name, leaf in found:
        if not isinstance(leaf, torch.Tensor) and leaf is not None:
            kind = type(leaf).__name__
            raise CaptureError(
                f"output {name or 'of the module'!r} is a {kind}, not a tensor.",
                _REGISTER.format(kind)
                if _hides_tensors(leaf)
                else "Return tensors only, for example from a wrapper module.",
            )
    tensors = [(name, leaf) for name, leaf in found if leaf is not None]
    if len(tensors) == 1 and tensors[0][0] == "output_0":
        tensors = [("output", tensors[0][1])]
    return tuple(name for name, _ in tensors), tuple(tensor for _, tensor in tensors)


_REGISTER = (
    "Pass and return tensors, and construct the object in the forward of a wrapper module; or register {} with "
    "torch.utils._pytree.register_pytree_node."
)


def _hides_tensors(leaf: Any) -> bool:
    """Say whether an object that is no container for us holds tensors: a cache whose class is not registered."""
    if isinstance(leaf, torch.Tensor | nn.Module | type):
        return False
    return any(map(_holds_tensors, vars(leaf).values())) if hasattr(leaf, "__dict__") else False


def _holds_tensors(value: Any) -> bool:
    """Say whether there are tensors in a value of an object, one list of objects (layers of a cache) deep."""
    items = value if isinstance(value, list | tuple) else [value]
    return any(
        isinstance(each, torch.Tensor)
        or (hasattr(each, "__dict__") and any(isinstance(inner, torch.Tensor) for inner in vars(each).values()))
        for each in items
        if not isinstance(each, nn.Module | type)
    )


def _as_tensor(leaf: Any) -> Any:
    """Return a number, which may be a size, as a tensor of rank 0 (i64, f32 or bool)."""
    if isinstance(leaf, torch.SymInt):
        return torch.full((), leaf, dtype=torch.int64)
    return torch.tensor(leaf) if isinstance(leaf, bool | int | float) else tensor_of(leaf)


@contextmanager
def flat_forward(module: nn.Module, call: FlatCall) -> Iterator[list[str]]:
    """Let a module take and return flat tensors for the length of a block; yields the list its outputs' names go to.

    Hooks on the module itself see its own arguments and its own result, as ever.
    """
    forward, hooks = module.forward, forward_hooks_of(module)
    output_names: list[str] = []

    def whole(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.multiple(module, forward=forward, **hooks):
            return module(*args, **kwargs)

    def flat(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = call.arguments(leaves)
        names, tensors = named_outputs((whole if hooks else forward)(*args, **kwargs))
        if not output_names:  # those of the example; at other sizes there may be more or fewer
            output_names.extend(names)
        return tensors

    with mock.patch.multiple(module, forward=flat, **{name: type(table)() for name, table in hooks.items()}):
        yield output_names


def taken_apart(value: Any) -> tuple[list[Any], _Rebuild]:
    """Return the leaves of a value, and what puts it together again from an iterator of tensors."""
    found: _Leaves = []
    rebuild = _take_apart(value, "", found)
    return [leaf for _, leaf in found], rebuild


def named_leaves(value: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a value, tensors or not, with their dotted names."""
    found: _Leaves = []
    _take_apart(value, "", found)
    return found


def children_of(value: Any) -> Sequence[tuple[object, Any]] | None:
    """Return the named children of a container; None for a leaf."""
    parts = _parts(value)
    return None if parts is None else parts[0]


def signature_of(module: nn.Module) -> inspect.Signature:
    """Return the signature of a module's forward, without `self`; a script's is in its schema."""
    return signature_of_function(module.forward)


def signature_of_function(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or bound method, without `self`; a script's is in its schema.

    Raises:
        TypeError, ValueError: nothing is known of a function made in C.
    """
    if not isinstance(function, torch.ScriptMethod):
        return inspect.signature(function)
    signature = _schema_signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def forward_signature(module: torch.jit.ScriptModule) -> inspect.Signature:
    """Return the signature of a script module's forward, `self` included."""
    return _schema_signature(module.forward)


def _schema_signature(forward: Any) -> inspect.Signature:
    parameters: dict[str, inspect.Parameter] = {}
    for position, argument in enumerate(forward.schema.arguments):
        has_default = argument.has_default_value()
        # A trace names its arguments after variables of Python's, and may do so twice.
        name = f"{argument.name}_{position}" if argument.name in parameters else argument.name
        parameters[name] = inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if has_default else inspect.Parameter.empty,
        )
    return inspect.Signature(list(parameters.values()))


def _named_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    signature = signature_of(module)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise OptionError(
            f"{type(module).__name__}.forward{signature} does not accept these arguments: {error}."
        ) from None
    parameters = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), "args")
    for index, value in enumerate(args):
        yield parameters[index].name if index < len(parameters) else f"{rest}_{index - len(parameters)}", value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _take_apart(value: Any, path: str, found: _Leaves) -> _Rebuild:
    """Append the leaves of a value with their names, and return what puts it together from other tensors."""
    if isinstance(value, torch.Tensor):
        found.append((path, value))
        return next
    parts = _parts(value)
    if parts is None:
        found.append((path, value))
        return lambda _: value
    children, together = parts
    rebuilds = [_take_apart(child, f"{path}.{name}" if path else str(name), found) for name, child in children]
    return lambda tensors: together([rebuild(tensors) for rebuild in rebuilds])


_Parts = tuple[Sequence[tuple[object, Any]], Callable[[list[Any]], Any]]


def _parts(value: Any) -> _Parts | None:
    """Return the named children of a container and how it is made of them; None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items()), lambda items: _mapping_like(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return fields, lambda items: _dataclass_like(value, [name for name, _ in fields], items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True)), lambda items: type(value)(*items)
    if isinstance(value, (list, tuple)):
        return list(enumerate(value)), lambda items: type(value)(items)
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(enumerate(children)), lambda items: node.unflatten_fn(items, context)


def _mapping_like(original: Mapping[Any, Any], items: list[Any]) -> Any:
    if type(original) is dict:
        return dict(zip(original, items, strict=True))
    made: Any = copy.copy(original)
    for key, item in zip(original, items, strict=True):
        made[key] = item
    return made


def _dataclass_like(original: Any, names: Sequence[str], items: list[Any]) -> Any:
    made = copy.copy(original)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(made, name, item)  # frozen dataclasses too
    return made


# Tensors of other sizes than a given one, with values that stay valid: token ids, lengths, masks.
# In: a tensor and sizes. Out: another tensor. Who tries a module at sizes that it was not captured with makes its
# arguments here.
def resize_example(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that repeats its values along each axis up to a size; what is empty stays empty.

    Args:
        tensor: of any element type.
        shape: a size per axis of the tensor.
    """
    times = [-(-wanted // max(size, 1)) for wanted, size in zip(shape, tensor.shape, strict=True)]
    window = tuple(slice(wanted) for wanted in shape)
    return tensor.repeat(times)[window].clone(memory_format=torch.contiguous_format)


__all__ = [
    "FlatCall",
    "children_of",
    "flat_forward",
    "forward_signature",
    "named_leaves",
    "named_outputs",
    "resize_example",
    "signature_of",
    "taken_apart",
]
