"""Plans as YAML or JSON text: read with the line of everything kept for later errors, and written.

In: text, or a `RemodelPlan`. Out: the other one; `parse_plan(plan_text(plan)) == plan`. Plain scalars mean what JSON says they
mean (`NO` and `1:30` are text), so that a symbol may be called anything. The schema is in docs/how-to/remodel.md.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path as FilePath
from typing import Any, Literal, TypeAlias, TypeVar

import yaml

from generic_export.errors import OptionError
from generic_export.remodel.plan import (
    AxisName,
    Bind,
    BindConstant,
    BindSize,
    BindValue,
    Constant,
    InputPlan,
    Origin,
    OutputPlan,
    Path,
    Place,
    RemodelPlan,
    SubgraphPlan,
    SymbolConstraint,
)
from generic_export.remodel.subgraph import Signature, Subgraph

PlanFormat: TypeAlias = Literal["yaml", "json"]

_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_MOST_DIGITS = 40  # Python itself refuses to read some thousand
_DEEPEST_ROWS = 8  # tract knows no larger rank

_T = TypeVar("_T")


def load_plan(path: str | os.PathLike[str]) -> RemodelPlan:
    """Read a plan from a YAML or JSON file.

    Raises:
        OptionError: the file cannot be read, or says something that no plan may say; the message names the line.
    """
    file = FilePath(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OptionError(f"{file}: the plan cannot be read: {reason}.") from error
    return parse_plan(text, str(file))


def parse_plan(text: str, name: str = "plan") -> RemodelPlan:
    """Read a plan from YAML or JSON text.

    Args:
        text: the plan.
        name: what errors call it.

    Raises:
        OptionError: see `load_plan`.
    """
    is_json = text.lstrip().startswith("{")
    try:
        # JSON may be indented with tabs, which YAML refuses; inside JSON's strings they cannot occur.
        root = yaml.compose(text.replace("\t", " ") if is_json else text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise OptionError(f"{name}{line}: neither YAML nor JSON: {error.problem or error.context}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise OptionError(f"{name}: neither YAML nor JSON: {' '.join(str(error).split())}.") from error
    lines: dict[Path, int] = {}
    origin = Origin(name, lines)
    if root is None:
        return RemodelPlan({}, origin)
    return RemodelPlan(_Reader(root, Place(origin), lines).named(_subgraph), origin)


def save_plan(plan: RemodelPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file: as JSON when its name ends so, otherwise as YAML."""
    file = FilePath(path)
    file.write_text(plan_text(plan, "json" if file.suffix == ".json" else "yaml"), encoding="utf-8")


def plan_text(plan: RemodelPlan, form: PlanFormat = "yaml") -> str:
    """Return a plan as the text that `parse_plan` reads."""
    data = plan_dict(plan)
    if form == "json":
        return json.dumps(data, indent=2) + "\n"
    layout: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": 110}
    return str(yaml.dump(data, Dumper=_PlainDumper, **layout))


def plan_dict(plan: RemodelPlan) -> dict[str, Any]:
    """Return a plan as plain data, without what is left at its default."""
    data: dict[str, Any] = _plain(plan.subgraphs)
    for subgraph in data.values():
        if "outputs_keep" in subgraph:  # after all that it chooses from
            subgraph["outputs_keep"] = subgraph.pop("outputs_keep")
    return data


# --- reading ----------------------------------------------------------------------------------------


class _Reader:
    """One node of the text, and where it stands in the plan."""

    def __init__(self, node: yaml.Node, place: Place, lines: dict[Path, int]) -> None:
        self.node = node
        self.place = place
        self.lines = lines
        lines.setdefault(place.path, node.start_mark.line + 1)

    def items(self) -> Iterator[tuple[_Reader, _Reader]]:
        """Yield keys and values of a mapping; nothing at all stands for an empty one."""
        if _is_empty(self.node):
            return
        if not isinstance(self.node, yaml.MappingNode):
            raise self.place.error(f"a mapping is expected here, not {self.kind}.")
        seen: set[str] = set()
        for key, value in self.node.value:
            text = key.value if isinstance(key, yaml.ScalarNode) else ""
            if not text:
                raise self.place.error("a key is no text.")
            place = self.place.at(text)
            self.lines[place.path] = key.start_mark.line + 1
            if text in seen:
                raise place.error("this key stands there twice.")
            seen.add(text)
            yield _Reader(key, place, self.lines), _Reader(value, place, self.lines)

    def named(self, read: Callable[[_Reader], _T]) -> dict[str, _T]:
        """Read a mapping by name."""
        return {key.text(): read(value) for key, value in self.items()}

    def fields(self, readers: Mapping[str, Callable[[_Reader], Any]]) -> dict[str, Any]:
        """Read a mapping with these keys and no others."""
        found = {}
        for key, value in self.items():
            if key.text() not in readers:
                raise key.place.unknown("the key", key.text(), readers)
            found[key.text()] = readers[key.text()](value)
        return found

    def elements(self, read: Callable[[_Reader], _T]) -> tuple[_T, ...]:
        """Read a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.place.error(f"a list is expected here, not {self.kind}.")
        nodes = enumerate(self.node.value)
        return tuple(read(_Reader(node, self.place.at(index), self.lines)) for index, node in nodes)

    def text(self) -> str:
        """Read a name."""
        if not isinstance(self.node, yaml.ScalarNode) or _is_empty(self.node) or not self.node.value:
            raise self.place.error(f"a name is expected here, not {self.kind}.")
        return _joined_surrogates(self.node.value)

    def whole(self) -> int:
        """Read a whole number."""
        value = self.scalar()
        if type(value) is not int:
            raise self.place.error(f"a whole number is expected here, not {self.kind}.")
        return value

    def axis(self) -> AxisName:
        """Read an axis, or a size: a whole number or a symbol."""
        text = self.text()
        return _whole(text) if self.node.style is None else text

    def constant(self) -> Constant:
        """Read a number, or nested rows of them."""
        if isinstance(self.node, yaml.SequenceNode):
            if len(self.place.path) > _DEEPEST_ROWS + 5:
                raise self.place.error(f"rows are nested more than {_DEEPEST_ROWS} deep.")
            return self.elements(_Reader.constant)
        value = self.scalar()
        if isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value)):
            raise self.place.error(f"a number, true or false is expected here, not {self.kind}.")
        return value

    def scalar(self) -> int | float | bool | str:
        """Read a scalar as JSON would take it."""
        text = self.text()
        if self.node.style is not None:
            return text
        if text in ("true", "false"):
            return text == "true"
        if _INTEGER.fullmatch(text):
            return int(text) if len(text) <= _MOST_DIGITS else text
        return float(text) if _FLOAT.fullmatch(text) else text

    @property
    def kind(self) -> str:
        """What stands here instead, for messages."""
        if isinstance(self.node, yaml.ScalarNode):
            return repr(self.node.value) if not _is_empty(self.node) else "nothing"
        return "a mapping" if isinstance(self.node, yaml.MappingNode) else "a list"


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "null", "~")


def _whole(text: str) -> AxisName:
    return int(text) if _INTEGER.fullmatch(text) and len(text) <= _MOST_DIGITS else text


def _joined_surrogates(text: str) -> str:
    r"""Return a text in which the two halves of a JSON escape such as `\ud83d\ude00` are one character again."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _subgraph(reader: _Reader) -> SubgraphPlan:
    return SubgraphPlan(
        **reader.fields(
            {
                "inputs": lambda field: field.named(_input),
                "outputs": lambda field: field.named(_output),
                "outputs_keep": lambda field: field.elements(_Reader.text),
                "aliases": lambda field: field.named(lambda sources: sources.elements(_Reader.text)),
                "pins": lambda field: field.named(_Reader.whole),
                "constraints": lambda field: field.named(_constraint),
                "assertions": lambda field: field.elements(_Reader.text),
            }
        )
    )


def _input(reader: _Reader) -> InputPlan:
    if isinstance(reader.node, yaml.SequenceNode):  # `audio: [B, 80, T]`
        return InputPlan(shape=reader.elements(_Reader.axis))
    return InputPlan(
        **reader.fields(
            {
                "shape": lambda field: field.elements(_Reader.axis),
                "axes": _axes,
                "collapse": lambda field: field.elements(_Reader.text),
                "bind": _bind,
                "rename": _Reader.text,
            }
        )
    )


def _axes(reader: _Reader) -> dict[int, str]:
    axes = {}
    for key, value in reader.items():
        number = _whole(key.text())
        if not isinstance(number, int):
            raise key.place.error(f"an axis number is expected here, not {key.text()!r}.")
        axes[number] = value.text()
    return axes


def _output(reader: _Reader) -> OutputPlan:
    return OutputPlan(**reader.fields({"collapse": lambda field: field.elements(_Reader.axis), "rename": _Reader.text}))


def _constraint(reader: _Reader) -> SymbolConstraint:
    numbers = dict.fromkeys(("min", "max", "multiple_of"), _Reader.whole)
    return SymbolConstraint(**reader.fields({**numbers, "equals": _Reader.text}))


def _bind(reader: _Reader) -> Bind:
    """Read `audio.T`, `{size_of: audio, axis: T}`, `{same_as: length}` or `{constant: 3}`."""
    if isinstance(reader.node, yaml.ScalarNode):
        source, _, axis = reader.text().rpartition(".")
        if not (source and axis):
            raise reader.place.error(
                f"{reader.text()!r} names no axis.", "Write input.SYMBOL, {same_as: input} or {constant: number}."
            )
        return BindSize(source, _whole(axis))
    found = reader.fields(
        {
            "size_of": _Reader.text,
            "axis": _Reader.axis,
            "same_as": _Reader.text,
            "constant": _Reader.constant,
        }
    )
    makers: Mapping[frozenset[str], Callable[[], Bind]] = {
        frozenset({"size_of", "axis"}): lambda: BindSize(found["size_of"], found["axis"]),
        frozenset({"same_as"}): lambda: BindValue(found["same_as"]),
        frozenset({"constant"}): lambda: BindConstant(found["constant"]),
    }
    maker = makers.get(frozenset(found))
    if maker is None:
        raise reader.place.error(
            f"the keys {', '.join(found) or '(none)'} make no bind.",
            "Give size_of and axis, or same_as, or constant.",
        )
    return maker()


# --- writing ----------------------------------------------------------------------------------------


class _PlainDumper(yaml.SafeDumper):
    """Writes equal lists twice rather than as anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _plain(value: Any) -> Any:
    """Return a part of a plan as plain data, without the fields that are left at their defaults."""
    if isinstance(value, BindSize):
        return {"size_of": value.source, "axis": value.axis}
    if isinstance(value, BindValue):
        return {"same_as": value.source}
    if isinstance(value, BindConstant):
        return {"constant": _plain(value.value)}
    if is_dataclass(value):
        said = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: _plain(one) for field, one in said if (one is not None if field.default is None else one)}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


# A plan to begin with: what a model's boundary is, written as a plan that changes nothing.
# In: `Subgraph`s. Out: a `RemodelPlan` with the shape of every input and the name of every output.
def template_plan(subgraphs: Sequence[Subgraph]) -> RemodelPlan:
    """Return the plan that says what is there already.

    Raises:
        OptionError: a sub-graph's names or dynamic axes do not fit its module.
    """
    return RemodelPlan({subgraph.name: _template(subgraph) for subgraph in subgraphs})


def _template(subgraph: Subgraph) -> SubgraphPlan:
    signature = Signature.of(subgraph)
    return SubgraphPlan(
        inputs={tensor.name: InputPlan(shape=tensor.dims) for tensor in signature.inputs},
        outputs_keep=tuple(tensor.name for tensor in signature.outputs),
        assertions=tuple(subgraph.assertions),
    )
