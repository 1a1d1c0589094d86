"""Modules kept whole: during the capture, every instance of chosen classes is one call of `t2n::unit`.

The module's own forward still runs, for the shapes of its results; what it computed is dropped from the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from generic_export.errors import CaptureError
from generic_export.torch_graph.nested import taken_apart

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

# The modules behind the keys of captured units; an entry lives as long as its module.
_MODULES: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()


@torch.library.custom_op("t2n::unit", mutates_args=())
def unit(
    inputs: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    key: str,
    sizes: Sequence[int],
    ranks: Sequence[int],
    dtypes: str,
) -> list[torch.Tensor]:
    """A module as one operator.

    Args:
        inputs: the tensors that its forward takes, in order.
        state: its parameters, then its buffers.
        key: which module it is, see `module_of`.
        sizes: of all results, one after the other.
        ranks: of each result.
        dtypes: of each result, separated by spaces.
    """
    raise NotImplementedError(f"t2n::unit {key} exists in captured graphs only")


@unit.register_fake
def _(
    inputs: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    key: str,
    sizes: Sequence[int],
    ranks: Sequence[int],
    dtypes: str,
) -> list[torch.Tensor]:
    source = (*inputs, *state)[0]
    results, start = [], 0
    for rank, dtype in zip(ranks, dtypes.split(), strict=True):
        results.append(source.new_empty(sizes[start : start + rank], dtype=_DTYPES[dtype]))
        start += rank
    return results


def module_of(key: str) -> nn.Module:
    """Return the module that a captured unit stands for.

    Raises:
        CaptureError: it was deleted since.
    """
    module = _MODULES.get(key)
    if module is None:
        raise CaptureError(f"the module {key!r} of a captured graph does not exist any more.")
    return module


def state_names(module: nn.Module) -> list[str]:
    """Return the names of a unit's `state`, in order."""
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


@contextmanager
def kept_whole(root: nn.Module, classes: Collection[type[nn.Module]]) -> Iterator[None]:
    """Capture every instance of `classes` below `root` as one `t2n::unit` for the length of the block."""
    with ExitStack() as stack:
        for module in root.modules():
            if module is not root and isinstance(module, tuple(classes)):
                stack.enter_context(mock.patch.object(module, "forward", _unit_forward(module)))
        yield


def _unit_forward(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward
    name = type(module).__name__
    key = f"{name}:{id(module)}"
    _MODULES[key] = module

    def call(*args: Any, **kwargs: Any) -> Any:
        found, _ = taken_apart((args, kwargs))
        for leaf in found:
            if not isinstance(leaf, torch.Tensor) and leaf is not None:
                raise CaptureError(f"{name} is captured as one unit, which takes tensors only, not {leaf!r}.")
        leaves, rebuild = taken_apart(forward(*args, **kwargs))
        results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        state = [tensor for _, tensor in (*module.named_parameters(), *module.named_buffers())]
        return rebuild(
            iter(
                torch.ops.t2n.unit(
                    [leaf for leaf in found if isinstance(leaf, torch.Tensor)],
                    state,
                    key,
                    [size for tensor in results for size in tensor.shape],
                    [tensor.ndim for tensor in results],
                    " ".join(str(tensor.dtype) for tensor in results),
                )
            )
        )

    return call


__all__ = ["kept_whole", "module_of", "state_names", "unit"]
