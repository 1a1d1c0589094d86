"""A document whose repeated modules are fragments: the layer of a stack written once, and a call for each.

In: a finished document and the classes of the model's modules. Out: the same computation, composed: stored tensors, states and
what else comes from outside are arguments. `read/expansion.py` is the way back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from generic_export.nnef.cutting import EXTERNAL
from generic_export.nnef.graph import Argument, Block, NnefFragment, NnefGraph, NnefOperation, Reference, references
from generic_export.nnef.repeated_blocks import STORED, Kind, Repetition, is_hole, list_of, number_of, repeated_blocks
from generic_export.nnef.rewriting import renamed_throughout
from generic_export.nnef.text import Parameter, module_fragment_text

MODULE_FRAGMENTS = "module_fragments"
"""The property that names the fragments which stand for modules, with commas between them."""

# What breaks tract's parser (docs/contributing/engine-facts.md#identifiers-and-literals), and words of NNEF.
_RESERVED = re.compile(r"true|false|inf|\d|(graph|fragment|variable|external|if|else|for|in|yield|tensor|shape_of)$")
_NUMBER = re.compile(r"_\d+(?=_|$)")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_STREAM = "hidden"
# What only changes the form of a value, which is then called as it was before; and what values are for, by what makes them.
_FORMS = ("unsqueeze", "reshape", "transpose", "tract_core_broadcast", "tract_core_cast")
_ROLES = {"select": "mask", "cos": "cos", "sin": "sin"}


@dataclass(frozen=True)
class Composition:
    """A document in two forms that say the same, name for name.

    Attributes:
        flat: without fragments for modules: what a reader makes of the other.
        composed: what is written.
    """

    flat: NnefGraph
    composed: NnefGraph


def compose(graph: NnefGraph, classes: Mapping[str, str]) -> Composition:
    """Write modules that do the same as calls of one fragment.

    Args:
        graph: the document; every other pass over it is done.
        classes: of the model's modules, by path; fragments are named after them.

    Returns:
        Both forms; the document itself twice when nothing is repeated.
    """
    plans, names = _plans(graph, classes)
    if not plans:
        return Composition(graph, graph)
    operations = list(graph.operations)
    for block, title in ((block, plan.title(block)) for plan in plans for block in plan.kind):
        operations = _gathered(operations, block, title)
    flat = replace(
        graph,
        operations=tuple(renamed_throughout(each, names) for each in operations),
        origins=tuple((names.get(result, result), tensor) for result, tensor in graph.origins),
    )
    known = {fragment.name for fragment in graph.fragments}
    fragments = tuple(plan.fragment(known) for plan in plans)
    stated = (MODULE_FRAGMENTS, ", ".join(fragment.name for fragment in fragments))
    composed = replace(
        flat,
        operations=tuple(_called(flat.operations, plans, names)),
        fragments=(*graph.fragments, *fragments),
        properties=(*graph.properties, stated),
    )
    return Composition(flat, composed)


def module_prefix(path: str) -> str:
    """Return what the identifiers of a module's values begin with, before an underscore."""
    return _legal(re.sub(r"\W", "_", path))


# --- what is written ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given:
    """A parameter of a fragment, and what each call gives for it: a value, or a literal.

    Attributes:
        group: parameters of a lower one come first: 0 what flows from module to module, 1 what all of them read, 2 states,
            3 names and numbers, 4 stored tensors.
    """

    parameter: Parameter
    values: tuple[Argument, ...]
    group: int


@dataclass(frozen=True)
class _Plan:
    """A fragment that is to be written.

    Attributes:
        kind: the modules.
        name, module_type: of the fragment, and the class that it stands for.
        outer, literals: parameters, in the order of `Repetition.outer` and `Repetition.literals`; None for a literal that is
            the same in all modules.
        inner: what its values are called in the fragment, in the order of `Repetition.inner`.
        results: positions in `inner`, in the order in which they are returned.
    """

    kind: Kind
    name: str
    module_type: str
    outer: tuple[_Given, ...]
    literals: tuple[_Given | None, ...]
    inner: tuple[str, ...]
    results: tuple[int, ...]

    @property
    def given(self) -> list[_Given]:
        """The parameters in the order in which they are written."""
        return sorted((*self.outer, *filter(None, self.literals)), key=lambda each: each.group)

    def title(self, block: Repetition) -> Block:
        """Return what stands above a call."""
        return Block(block.path, self.module_type)

    def flat_names(self, block: Repetition, outputs: Collection[str], taken: Collection[str]) -> dict[str, str]:
        """Return what the values of a module are called in the flat form."""
        prefix = module_prefix(block.path)
        names = {old: f"{prefix}_{name}" for old, name in zip(block.inner, self.inner, strict=True)}
        if self.results and prefix not in taken:
            names[block.inner[self.results[0]]] = prefix
        return names | {name: name for name in block.inner if name in outputs}

    def fragment(self, known: Collection[str]) -> NnefFragment:
        """Return the fragment; `known` are the document's own, which it may call."""
        block = self.kind[0]
        names = dict(zip(block.inner, self.inner, strict=True))
        names |= {old: each.parameter.name for old, each in zip(block.outer, self.outer, strict=True)}
        literals = iter(self.literals)
        operations = [self._inside(renamed_throughout(each, names), literals) for each in block.operations]
        notes = {name: each.note for each in operations for name in each.outputs[:1]}
        results = [self.inner[index] for index in self.results]
        text = module_fragment_text(
            self.name,
            f"{self.module_type}: {_places(self.kind)}",
            [each.parameter for each in self.given],
            [Parameter(result, _tensor_type(notes.get(result, ""))) for result in results],
            operations,
        )
        bodies = {str(value) for each in operations for key, value in each.attributes if key == "body"}
        return NnefFragment(self.name, text, frozenset({each.operator for each in operations} | bodies & set(known)))

    def _inside(self, operation: NnefOperation, literals: Iterator[_Given | None]) -> NnefOperation:
        """Return an operation of the first module as the fragment has it: its module, and literals that differ."""

        def swap(value: Argument, attribute: str = "") -> Argument:
            given = next(literals) if is_hole(value, attribute) else None
            return value if given is None else Reference(given.parameter.name)

        inputs = tuple(swap(value) for value in operation.inputs)
        attributes = tuple((name, swap(value, name)) for name, value in operation.attributes)
        path = operation.block.path[len(self.kind[0].path) + 1 :]
        block = replace(operation.block, path=path)
        return replace(operation, inputs=inputs, attributes=attributes, block=block)

    def call(self, place: int, names: Mapping[str, str]) -> NnefOperation:
        """Return the call that stands for one of the modules; `names` are those of the flat form."""
        block = self.kind[place]
        outputs = tuple(block.inner[index] for index in self.results)
        inputs = tuple(each.values[place] for each in self.given)
        return renamed_throughout(NnefOperation(self.name, inputs, (), outputs, self.title(block)), names)


def _gathered(operations: Sequence[NnefOperation], block: Repetition, title: Block) -> list[NnefOperation]:
    """Return the operations with those of a module side by side, behind the tensors that only it reads."""
    members = {each.outputs[0] for each in block.operations}
    read_elsewhere = {name for each in operations if each.outputs[0] not in members for name in references(each)}
    own = {name for name in block.outer if name not in read_elsewhere}
    places = [place for place, each in enumerate(operations) if each.outputs[0] in members]
    stored: list[NnefOperation] = []
    front: list[NnefOperation] = []
    behind: list[NnefOperation] = []
    made = set(block.inner)
    for place, each in enumerate(operations[: places[-1] + 1]):
        if each.outputs[0] in members:
            continue
        if each.operator == STORED and each.outputs[0] in own:
            stored.append(replace(each, block=title))
        elif place > places[0] and not made.isdisjoint(references(each)):
            behind.append(each)
            made.update(each.outputs)
        else:
            front.append(each)
    return [*front, *stored, *block.operations, *behind, *operations[places[-1] + 1 :]]


def _called(
    operations: Sequence[NnefOperation], plans: Sequence[_Plan], names: Mapping[str, str]
) -> Iterator[NnefOperation]:
    """Yield the operations of the flat form, a call in the place of each module."""
    calls = {
        names[block.operations[0].outputs[0]]: plan.call(place, names)
        for plan in plans
        for place, block in enumerate(plan.kind)
    }
    inside = {names[name] for plan in plans for block in plan.kind for name in block.inner}
    for operation in operations:
        if operation.outputs[0] in calls:
            yield calls[operation.outputs[0]]
        elif operation.outputs[0] not in inside:
            yield operation


# --- what it is called ----------------------------------------------------------------------------


def _plans(graph: NnefGraph, classes: Mapping[str, str]) -> tuple[list[_Plan], dict[str, str]]:
    """Return the fragments, and what values are called in the flat form; where a name is taken, a kind stays as it is."""
    makers = {name: operation for operation in graph.operations for name in operation.outputs}
    taken = {*makers, *graph.symbols}
    fragments = {fragment.name for fragment in graph.fragments} | {each.operator for each in graph.operations}
    plans: list[_Plan] = []
    names: dict[str, str] = {}
    for kind in repeated_blocks(graph):
        plan = _plan(kind, _Names(kind, makers, graph.symbols), graph.outputs, classes, fragments)
        new = {old: name for block in kind for old, name in plan.flat_names(block, graph.outputs, taken).items()}
        others = taken.difference(new)
        if len(set(new.values())) == len(new) and others.isdisjoint(new.values()):
            plans.append(plan)
            names |= new
            taken = others.union(new.values())
            fragments.add(plan.name)
    return plans, names


def _plan(
    kind: Kind, names: _Names, outputs: Collection[str], classes: Mapping[str, str], fragments: Collection[str]
) -> _Plan:
    first = kind[0]
    types = [each.block.module_type for each in first.operations if each.block.path == first.path]
    module_type = classes.get(first.path) or next(iter(types), "Block")
    outer = tuple(names.tensor(values) for values in zip(*(block.outer for block in kind), strict=True))
    literals = tuple(names.literal(values) for values in zip(*(block.literals for block in kind), strict=True))
    inner = tuple(names.inner(name) for name in first.inner)
    results = sorted(first.results, key=lambda index: first.inner[index] in outputs)
    return _Plan(kind, _free(_snake(module_type), fragments), module_type, outer, literals, inner, tuple(results))


class _Names:
    """Chooses what parameters and values are called in a fragment; each name is given once."""

    def __init__(self, kind: Kind, makers: Mapping[str, NnefOperation], symbols: Sequence[str]) -> None:
        self._makers = makers
        self._taken = set(symbols)
        self._list = list_of(kind[0].path)
        self._own = f"{module_prefix(kind[0].path)}_"

    def inner(self, name: str) -> str:
        """Return what a value of the first module is called."""
        return self._take(self._local(name))

    def tensor(self, values: tuple[str, ...]) -> _Given:
        """Return the parameter that stands for these values, one for each module."""
        makers = [self._makers[value] for value in values]
        notes = {maker.note for maker in makers if len(maker.outputs) == 1}
        note = notes.pop() if len(notes) == 1 else ""
        same, shared = len(set(values)) == 1, {self._shared(value) for value in values}
        if makers[0].operator == STORED:
            group, name = 4, self._local(values[0])
        elif makers[0].operator == EXTERNAL:
            group, name = (1 if same else 2), _NUMBER.sub("", values[0])
        elif len(shared) == 1 and (same or shared <= set(_ROLES.values())):
            group, name = 1, shared.pop()
        else:
            flows = any(maker.block.path.startswith(f"{self._list}.") for maker in makers)
            common = {_NUMBER.sub("", value) for value in values}
            group, name = 0, _STREAM if flows or len(common) > 1 else common.pop()
        parameter = Parameter(self._take(name), _tensor_type(note), note)
        return _Given(parameter, tuple(map(Reference, values)), group)

    def literal(self, values: tuple[str | float, ...]) -> _Given | None:
        """Return the parameter that stands for these literals, one for each module; None when they are all the same."""
        if len(set(values)) == 1:
            return None
        text = isinstance(values[0], str)
        name = _NUMBER.sub("", re.sub(r"\W", "_", str(values[0]))) if text else "number"
        return _Given(Parameter(self._take(name), "string" if text else "scalar"), values, 3)

    def _local(self, name: str) -> str:
        return name.removeprefix(self._own) if name.startswith(self._own) else _NUMBER.sub("", name)

    def _shared(self, name: str) -> str:
        """Return what a value that all modules read is called: what it is for, or its name without where it is made."""
        maker = self._makers[name]
        while maker.operator in _FORMS and isinstance(maker.inputs[0], Reference):
            maker = self._makers[maker.inputs[0].name]
        if maker.operator in _ROLES or maker.note.startswith("bool"):
            return _ROLES.get(maker.operator, "mask")
        layer = re.match(rf"{module_prefix(self._list)}_\d+_(?=.)", name)
        above = f"{module_prefix(list_of(self._list))}_"
        return name[layer.end() :] if layer else name.removeprefix(above)

    def _take(self, wanted: str) -> str:
        name = _free(_legal(wanted), self._taken)
        self._taken.add(name)
        return name


def _free(wanted: str, taken: Collection[str]) -> str:
    further = (f"{wanted}_{number}" for number in count(1))
    return next(name for name in chain((wanted,), further) if name not in taken)


def _legal(name: str) -> str:
    return f"v_{name}" if _RESERVED.match(name) else name


def _snake(module_type: str) -> str:
    """Return the name of a fragment: of the class, and never that of an operator, which it would replace."""
    name = _WORDS.sub("_", module_type).lower()
    return name if "layer" in name or "block" in name else f"{name}_block"


def _tensor_type(note: str) -> str:
    dtype = note.partition(" ")[0]
    return f"tensor<{'logical' if dtype == 'bool' else 'integer' if dtype[:1] in ('i', 'u') else 'scalar'}>"


def _places(kind: Kind) -> str:
    """Return where the modules are: `model.layers.0-5, 7`."""
    runs: list[list[int]] = []
    for number in map(number_of, (block.path for block in kind)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    numbers = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{list_of(kind[0].path)}.{', '.join(numbers)}".removeprefix(".")
