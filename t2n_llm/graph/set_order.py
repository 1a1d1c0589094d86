"""Models that iterate over a set of names capture the same graph in every process.

In: a network, such as Gemma 3, which computes a rotary table for each of `set(config.layer_types)`. Out: a `with` block in which
such sets are iterated in sorted order. The order of a plain set of strings depends on PYTHONHASHSEED.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch import nn


class _SetType(type):
    """Makes `isinstance(value, set)` true for every set where `SortedSet` stands for the built-in."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, set)


class SortedSet(set, metaclass=_SetType):
    """A set that yields names in sorted order, and elements that have no order as they come."""

    def __iter__(self) -> Iterator:
        elements = super().__iter__()
        try:
            return iter(sorted(elements))
        except TypeError:
            return super().__iter__()


@contextmanager
def sorted_sets(network: nn.Module) -> Iterator[None]:
    """Let the code of a network iterate over sets in sorted order.

    Replaces `set` in the Python modules that define the network's classes (PyTorch's own excepted), and sets that are attributes of
    its modules.

    Args:
        network: not changed when the block ends.
    """
    parts = list(network.modules())
    with ExitStack() as stack:
        for name in {type(part).__module__ for part in parts if not type(part).__module__.startswith("torch.")}:
            stack.enter_context(mock.patch.object(sys.modules[name], "set", SortedSet, create=True))
        for part in parts:
            for name, value in list(vars(part).items()):
                if type(value) is set and not name.startswith("_"):
                    stack.enter_context(mock.patch.dict(vars(part), {name: SortedSet(value)}))
        yield


__all__ = ["SortedSet", "sorted_sets"]
