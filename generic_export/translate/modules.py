"""Translations of whole modules: `@translates_module(MyLayer)` above a function that writes every instance of a class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from generic_export.errors import RegistrationError, UnsupportedOperatorError
from generic_export.torch_graph.capture.leaf_modules import module_of, state_names
from generic_export.torch_graph.dims import Dim
from generic_export.translate.builder import NnefBuilder
from generic_export.translate.registry import translates
from generic_export.translate.value import Value

ModuleTranslation: TypeAlias = Callable[
    [NnefBuilder, Any, Sequence[Value], Mapping[str, Value]], Value | Sequence[Value]
]
"""(builder, module, its input tensors, its parameters and buffers by name) -> one value per result."""

F = TypeVar("F", bound=ModuleTranslation)

_MODULE_TRANSLATIONS: dict[type[nn.Module], ModuleTranslation] = {}


def translates_module(module_class: type[nn.Module]) -> Callable[[F], F]:
    """Decorator that registers a function as the translation of a module class and its subclasses.

    Args:
        module_class: the class.

    Raises:
        RegistrationError: it is not a module class, or already has a translation.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise RegistrationError(f"{module_class!r} is not a class of modules.")

    def register(function: F) -> F:
        if module_class in _MODULE_TRANSLATIONS:
            raise RegistrationError(f"{module_class.__name__} has a translation already.")
        _MODULE_TRANSLATIONS[module_class] = function
        return function

    return register


def translated_modules() -> Collection[type[nn.Module]]:
    """Return the classes that have a translation, which the capture keeps whole."""
    return _MODULE_TRANSLATIONS.keys()


@translates(torch.ops.t2n.unit.default)
def unit(
    b: NnefBuilder,
    inputs: Sequence[Value],
    state: Sequence[Value],
    key: str,
    sizes: Sequence[Dim],
    ranks: Sequence[int],
    dtypes: str,
) -> Sequence[Value]:
    """t2n::unit(Tensor[] inputs, Tensor[] state, str key, SymInt[] sizes, SymInt[] ranks, str dtypes) -> Tensor[]"""
    del sizes, ranks, dtypes  # the captured shapes, which the caller compares with the results
    module = module_of(key)
    function = next((_MODULE_TRANSLATIONS[kind] for kind in type(module).__mro__ if kind in _MODULE_TRANSLATIONS), None)
    if function is None:
        raise UnsupportedOperatorError(f"{type(module).__name__} was kept whole but has no translation.")
    result = function(b, module, tuple(inputs), dict(zip(state_names(module), state, strict=True)))
    return [result] if isinstance(result, Value) else list(result)


__all__ = ["translated_modules", "translates_module"]
