"""The table of translations: `@translates(aten.add.Tensor)` above one small function per operator.

A translation's parameters are those of the aten schema, by name, after the builder; the dispatcher binds a captured call
through the schema. Registration fails at import when a name is not the schema's, or an operator is registered twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from generic_export.compat import OpOverload, schema_of
from generic_export.errors import RegistrationError, UnsupportedOperatorError
from generic_export.torch_graph.ir import TorchOp
from generic_export.translate.builder import NnefBuilder
from generic_export.translate.value import Value

TranslationFunction = Callable[..., Value | Sequence[Value]]
F = TypeVar("F", bound=TranslationFunction)

# Arguments that say where memory lies or which kernel runs: a graph has no use for them.
_PLACEMENT_ARGUMENTS = frozenset(
    """
    device layout pin_memory non_blocking memory_format copy requires_grad generator cudnn_enable
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class _Registered:
    """A function and the schema arguments that it takes."""

    function: TranslationFunction
    accepted: frozenset[str]


_TRANSLATIONS: dict[OpOverload, _Registered] = {}


def translates(*overloads: OpOverload) -> Callable[[F], F]:
    """Decorator that registers a function as the translation of one or more operator overloads.

    Args:
        overloads: such as `torch.ops.aten.gelu.default`. The function's parameters must have the names of the schema.

    Raises:
        RegistrationError: a parameter is not in the schema of an overload, or an overload already has a translation.
    """

    def register(function: F) -> F:
        accepted = frozenset(list(inspect.signature(function).parameters)[1:])
        for overload in overloads:
            if overload in _TRANSLATIONS:
                raise RegistrationError(
                    f"{overload} has a translation already: {_TRANSLATIONS[overload].function.__name__}."
                )
            known = {argument.name for argument in schema_of(overload).arguments}
            unknown = accepted - known
            if unknown:
                raise RegistrationError(
                    f"{function.__name__}: parameters {sorted(unknown)} are not in the schema {schema_of(overload)}."
                )
            _TRANSLATIONS[overload] = _Registered(function, accepted)
        return function

    return register


def is_translated(overload: OpOverload) -> bool:
    """Say whether an overload has a translation of its own."""
    return overload in _TRANSLATIONS


def translated_overloads() -> Iterator[OpOverload]:
    """Yield every overload that has a translation, in order of registration."""
    yield from _TRANSLATIONS


def translate_call(builder: NnefBuilder, op: TorchOp, arguments: Mapping[str, Any]) -> tuple[Value, ...]:
    """Run the translation of one captured call.

    Args:
        builder: where NNEF operations are emitted.
        op: the call.
        arguments: its arguments by schema name, tensors already replaced by NNEF values (see `TorchOp.arguments`).

    Returns:
        One value per output of the operator.

    Raises:
        UnsupportedOperatorError: no translation, or an argument that the translation does not take.
    """
    translation = _TRANSLATIONS.get(op.target)
    if translation is None:
        raise unsupported(op, "no NNEF form is registered")
    for argument in schema_of(op.target).arguments:
        name = argument.name
        if name not in arguments or name in translation.accepted or name in _PLACEMENT_ARGUMENTS:
            continue
        if arguments[name] != (argument.default_value if argument.has_default_value() else None):
            raise unsupported(op, f"the translation does not take {name}={arguments[name]!r}")
    accepted = {name: value for name, value in arguments.items() if name in translation.accepted}
    result = translation.function(builder, **accepted)
    return (result,) if isinstance(result, Value) else tuple(result)


def unsupported(op: TorchOp, reason: str) -> UnsupportedOperatorError:
    """Return the error for a call that cannot be translated: operator, module, source line, what to do."""
    where = f" at {op.module_path}" if op.module_path else ""
    source = f" ({op.source})" if op.source else ""
    return UnsupportedOperatorError(
        f"{op.target}{where}{source}: {reason}.",
        "Write that line with other operators, or register a translation (generic_export.translate.registry.translates).",
    )


__all__ = [
    "is_translated",
    "translate_call",
    "translated_overloads",
    "translates",
    "unsupported",
]
