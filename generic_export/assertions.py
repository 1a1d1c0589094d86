"""Relations between sizes that a user adds to an archive: read, and held against what was captured before anything is written.

In: `custom_extensions`, and a captured module with its example. Out: relations as tract reads them.
The language is that of `tract_assert`, as the engine reads it; a label (`decode: S == 1`) makes a relation a scenario, of which
one must hold at each run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from generic_export.capture import Prepared
from generic_export.errors import OptionError
from generic_export.torch_graph.ir import SizeCondition
from generic_export.torch_graph.nested import FlatCall
from generic_export.torch_graph.sizes.relations import Relation

_LINE = re.compile(r"(?:extension\s+)?(?:(?P<word>tract_\w+)\s+)?(?P<rest>.*?)\s*;?\s*", re.DOTALL)
_LABELLED = re.compile(r"(?P<label>[A-Za-z_]\w*)\s*:\s*(?P<relation>.+)", re.DOTALL)
_SIZES, _AGAIN = "sizes", "_again"
_FORMS = "Write `extension tract_assert S >= 1`, or only `S >= 1`; symbols are declared with dynamic_axes."


@dataclass(frozen=True)
class Assertion:
    """One relation, and the scenario that it describes ("" for one that always holds)."""

    relation: Relation
    label: str = ""

    @property
    def text(self) -> str:
        """As tract reads it."""
        return f"{self.label}: {self.relation.text}" if self.label else self.relation.text


def parse_extensions(given: Sequence[str] | str | None) -> tuple[Assertion, ...]:
    """Read `custom_extensions`: whole `extension tract_assert ...` lines, or relations alone; one text stands for a list of one.

    Raises:
        OptionError: one is no relation between sizes that tract can read.
    """
    texts = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    return tuple(_parsed(text) for text in texts)


def _parsed(text: object) -> Assertion:
    found = _LINE.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None or found["word"] not in (None, "tract_assert"):
        raise OptionError(f"custom_extensions: {text!r} is not a relation between sizes.", _FORMS)
    labelled = _LABELLED.fullmatch(found["rest"])
    relation = Relation.parse(labelled["relation"] if labelled else found["rest"])
    if relation.divided_and_whole:
        symbol = relation.divided_and_whole[0]
        raise OptionError(
            f"custom_extensions: {text!r} uses {symbol} both divided and whole.",
            f"tract does not finish loading this together with a range of {symbol}: omit it.",
        )
    return Assertion(relation, labelled["label"] if labelled else "")


def held(assertions: Sequence[Assertion], prepared: Prepared) -> tuple[str, ...]:
    """Return relations as tract reads them, when they hold at the example that a module was captured with.

    Raises:
        OptionError: a symbol is none of the module's, the example contradicts a relation, or it is in none of the scenarios.
    """
    sizes = _example_sizes(prepared)
    for assertion in assertions:
        _require_known(assertion, sizes)
        if not assertion.label and not assertion.relation.holds(sizes):
            raise OptionError(
                f"custom_extensions: {assertion.text!r} does not hold for the example, where {_told(sizes)}.",
                "Correct it, or use an example for which it holds.",
            )
    scenarios = [assertion for assertion in assertions if assertion.label]
    if scenarios and not any(scenario.relation.holds(sizes) for scenario in scenarios):
        raise OptionError(
            f"custom_extensions: the example, where {_told(sizes)}, is in none of the scenarios "
            f"{', '.join(scenario.text for scenario in scenarios)}.",
            "tract runs an archive with scenarios only within one of them: add a scenario, or change the example.",
        )
    return tuple(assertion.text for assertion in assertions)


def enforced(assertions: Sequence[Assertion], conditions: Sequence[SizeCondition]) -> tuple[str, ...]:
    """Return relations that tract refuses a run over: those of the conditions under which a graph does what its module does.

    tract takes a relation on trust. Of scenarios one must hold at each run, but it settles on one as soon as no other is left,
    which may be before it knows all sizes: each is there twice. A condition that the module itself requires is left out, since each
    scenario makes the archive slower to load.
    """
    held = (each.relation for each in conditions if not each.required)
    needed = tuple(dict.fromkeys(relation for relation in held if relation is not None))
    if not needed:
        return ()
    labels = tuple(dict.fromkeys(assertion.label for assertion in assertions if assertion.label))
    own = [assertion for assertion in assertions if assertion.label]
    lines = []
    for label in labels or (_SIZES,):
        again = label + _AGAIN
        lines += [Assertion(each.relation, again).text for each in own if each.label == label]
        lines += [f"{name}: {relation}" for name in (label, again) for relation in needed]
    return tuple(lines)


def enforced_relations(assertions: Sequence[str]) -> tuple[str, ...]:
    """Return those of a document's assertions that tract checks before a run."""
    parts = [assertion.partition(": ") for assertion in assertions]
    return tuple(relation for label, _, relation in parts if relation and not label.endswith(_AGAIN))


_LONGEST_TEXT = 80  # of a condition as PyTorch writes it, beside what tract reads


def warn_of_conditions(kind: str, conditions: Sequence[SizeCondition]) -> None:
    """Warn of sizes at which a module does something else than its archive, and which tract refuses (`enforced`)."""
    for condition in conditions:
        where = f" at {condition.source}" if condition.source else ""
        asked = (
            f" ({condition.text})"
            if condition.text != condition.relation and len(condition.text) <= _LONGEST_TEXT
            else ""
        )
        warnings.warn(
            f"{kind}{where}: the archive is correct where {condition.relation}{asked}, as in the example. At "
            "other sizes the module takes another branch, and tract refuses to run.",
            stacklevel=4,
        )


def _example_sizes(prepared: Prepared) -> Mapping[str, int]:
    """Return the size of each symbol at the example."""
    tensors = FlatCall.of(prepared.model, prepared.args, prepared.kwargs).tensors
    return {
        dim.name: int(size)
        for variable, tensor in zip(prepared.graph.inputs, tensors, strict=True)
        for dim, size in zip(variable.shape, tensor.shape, strict=True)
        if isinstance(dim, sympy.Symbol)
    }


def _require_known(assertion: Assertion, sizes: Mapping[str, int]) -> None:
    unknown = next((symbol for symbol in assertion.relation.symbols if symbol not in sizes), None)
    if unknown is not None:
        known = (
            f"The symbols are {', '.join(sizes)}." if sizes else "No axis is dynamic: declare some with dynamic_axes."
        )
        raise OptionError(
            f"custom_extensions: {assertion.text!r} uses {unknown}, which is not the symbol of an input axis.", known
        )


def _told(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items()) or "no size is dynamic"


__all__ = ["Assertion", "enforced", "enforced_relations", "held", "parse_extensions", "warn_of_conditions"]
