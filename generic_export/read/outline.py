"""What a `graph.nnef` says about itself: header, properties, inputs, stored tensors, operator counts.

In: the text, ours or tract's own. Out: a `GraphOutline`; a line that is not understood is listed in it, never fatal.
Grammar: NNEF 1.0 flat and compositional syntax as far as tract 0.23.9 reads and writes it (nnef/src/ast).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from generic_export.nnef.graph import Argument, ArrayLiteral, DimLiteral, Reference, TupleLiteral
from generic_export.read.expansion import flat_text

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)
      | (?P<name>i"(?:\\.|[^"\\])*"|[^\W\d]\w*)
      | (?P<mark>->|<=|>=|==|!=|&&|\|\||.)""",
    re.VERBOSE | re.DOTALL,
)
_BLOCK_TITLE = re.compile(r"  # (\(root\)|[^\s:]+): (\w+)\s*")  # as nnef/text.py writes it
_ASSIGNED = re.compile(r"  (\w+|\([\w, ]+\)) = ")
_OPENING = {"(": ")", "[": "]", "{": "}"}
_PROPERTIES = "tract_core_properties"
_EXTERNALS = ("external", "tract_core_external")
_EXCERPT = 80
_DEEPEST = 64  # nesting of literals; a real graph has three


@dataclass(frozen=True)
class External:
    """One input: identifier, element type (`f16`; empty when the file does not say) and dimensions as written."""

    name: str
    datum_type: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Variable:
    """One stored tensor that the graph reads: identifier, label (its file without `.dat`), declared shape."""

    name: str
    label: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Invocation:
    """One assignment of the body: `outputs = operator(...)`; `arguments` are the named ones, positional ones by index."""

    operator: str
    outputs: tuple[str, ...]
    arguments: tuple[tuple[str, Argument], ...]

    def argument(self, name: str) -> Argument | None:
        """Return a named argument, or None."""
        return dict(self.arguments).get(name)


@dataclass(frozen=True)
class UnknownText:
    """A part that was not understood.

    Attributes:
        line: where it starts, counted from 1.
        text: its beginning.
    """

    line: int
    text: str


@dataclass(frozen=True)
class GraphOutline:
    """The outline of a graph.

    Attributes:
        name: identifier of the graph.
        version: the format's, "1.0".
        registries, symbols, assertions: of the `extension tract_...` lines; `extensions` holds the other lines.
        properties: what `tract_core_properties` holds, in order.
        fragments: names of the fragments, in order.
        inputs, outputs: identifiers of the signature.
        externals: inputs as declared in the body; tract takes inputs in this order.
        variables: stored tensors in order of use.
        invocations: the assignments that call an operator.
        operators: how often each operator is called in the graph's body, calls inside arguments included.
        unknown: what was not understood; empty for a graph that was read whole.
    """

    name: str = ""
    version: str = ""
    registries: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    assertions: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    properties: tuple[tuple[str, str | float], ...] = ()
    fragments: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    externals: tuple[External, ...] = ()
    variables: tuple[Variable, ...] = ()
    invocations: tuple[Invocation, ...] = ()
    operators: tuple[tuple[str, int], ...] = ()
    unknown: tuple[UnknownText, ...] = ()


def read_outline(text: str) -> GraphOutline:
    """Read the outline of a `graph.nnef`. Text that is no NNEF at all gives an outline full of `unknown`.

    Fragments that stand for modules are listed, and read as what they stand for.
    """
    flat = flat_text(text)
    outline = _read(flat)
    if flat is text:
        return outline
    composed = _read(text)
    return replace(outline, fragments=composed.fragments, properties=composed.properties)


def _read(text: str) -> GraphOutline:
    reader = _Reader(text)
    reader.read()
    return reader.outline()


def module_paths(text: str) -> dict[str, tuple[str, str]]:
    """Return, by identifier, the module that computes it: path and class, from the comments that our writer leaves.

    Args:
        text: a `graph.nnef`. One that we did not write has no such comments, and gives an empty answer.
    """
    paths: dict[str, tuple[str, str]] = {}
    module: tuple[str, str] | None = None
    for line in flat_text(text).splitlines():
        if (title := _BLOCK_TITLE.fullmatch(line)) is not None:
            module = (title[1], title[2])
        elif module is not None and (assigned := _ASSIGNED.match(line)) is not None:
            paths.update(dict.fromkeys(re.findall(r"\w+", assigned[1]), module))
    return paths


# --- tokens -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def _tokens(text: str) -> list[_Token]:
    found = (match for match in _TOKEN.finditer(text) if match.lastgroup != "space")
    return [_Token(match.lastgroup or "mark", match[0], match.start(), match.end()) for match in found]


class _NotUnderstoodError(Exception):
    """A statement is not in the grammar; it becomes an `UnknownText`."""


def _statements(tokens: Sequence[_Token]) -> Iterator[list[_Token]]:
    """Cut at the semicolons that stand outside every bracket, and after a `}` that closes a body."""
    depth = 0
    current: list[_Token] = []
    for token in tokens:
        if token.text == ";" and depth == 0:
            if current:
                yield current
            current = []
            continue
        current.append(token)
        if token.text in _OPENING:
            depth += 1
        elif token.text in _OPENING.values():
            depth = max(0, depth - 1)
            if token.text == "}" and depth == 0:
                yield current
                current = []
    if current:
        yield current


# --- the file -----------------------------------------------------------------------------------


class _Reader:
    """Reads statement by statement; what one of them does to the outline is in its own method."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words: dict[str, list[str]] = {}
        self._name = self._version = ""
        self._properties: list[tuple[str, str | float]] = []
        self._fragments: list[str] = []
        self._inputs: tuple[str, ...] = ()
        self._outputs: tuple[str, ...] = ()
        self._invocations: list[Invocation] = []
        self._operators: Counter[str] = Counter()
        self._unknown: list[UnknownText] = []
        self._line_ends = [match.start() for match in re.finditer("\n", text)]

    def read(self) -> None:
        kinds = {
            "version": self._read_version,
            "extension": self._read_extension,
            "fragment": self._read_fragment,
            "graph": self._read_graph,
        }
        for statement in _statements(_tokens(self._text)):
            reading = kinds.get(statement[0].text)
            try:
                if reading is None:
                    raise _NotUnderstoodError
                reading(statement)
            except _NotUnderstoodError:
                self._note_unknown(statement)

    def outline(self) -> GraphOutline:
        words = {kind: tuple(found) for kind, found in self._words.items()}
        return GraphOutline(
            name=self._name,
            version=self._version,
            registries=words.get("tract_registry", ()),
            symbols=words.get("tract_symbol", ()),
            assertions=words.get("tract_assert", ()),
            extensions=words.get("", ()),
            properties=tuple(self._properties),
            fragments=tuple(self._fragments),
            inputs=self._inputs,
            outputs=self._outputs,
            externals=tuple(_external(call) for call in self._invocations if call.operator in _EXTERNALS),
            variables=tuple(_variable(call) for call in self._invocations if call.operator == "variable"),
            invocations=tuple(self._invocations),
            operators=tuple(self._operators.most_common()),
            unknown=tuple(self._unknown),
        )

    def _note_unknown(self, tokens: Sequence[_Token]) -> None:
        start = tokens[0].start
        excerpt = " ".join(self._text[start : min(tokens[-1].end, start + 2 * _EXCERPT)].split())[:_EXCERPT]
        self._unknown.append(UnknownText(bisect_left(self._line_ends, start) + 1, excerpt))

    def _source(self, tokens: Sequence[_Token]) -> str:
        return self._text[tokens[0].start : tokens[-1].end] if tokens else ""

    def _read_version(self, tokens: list[_Token]) -> None:
        self._version = self._source(tokens[1:])

    def _read_extension(self, tokens: list[_Token]) -> None:
        words = self._source(tokens[1:]).split(None, 1)
        if not words:
            raise _NotUnderstoodError
        known = words[0] in ("tract_registry", "tract_symbol", "tract_assert") and len(words) == 2
        kind, value = words if known else ("", " ".join(words))
        self._words.setdefault(kind, []).append(" ".join(value.split()))

    def _read_fragment(self, tokens: list[_Token]) -> None:
        if len(tokens) < 2 or tokens[1].kind != "name":
            raise _NotUnderstoodError
        self._fragments.append(tokens[1].text)
        if tokens[1].text == _PROPERTIES:
            self._read_properties(_body(tokens)[1])

    def _read_properties(self, body: Sequence[_Token]) -> None:
        for statement in _statements(body):
            values = _Arguments(self._text, statement[2:]).whole()
            if not isinstance(values, ArrayLiteral):
                raise _NotUnderstoodError
            for pair in values.elements:
                if not (isinstance(pair, TupleLiteral) and len(pair.elements) == 2):
                    raise _NotUnderstoodError
                key, value = pair.elements
                self._properties.append((str(key), value if isinstance(value, str | int | float) else _written(value)))

    def _read_graph(self, tokens: list[_Token]) -> None:
        head, body = _body(tokens)
        arrow = next((index for index, token in enumerate(head) if token.text == "->"), None)
        if arrow is None or len(head) < 2:
            raise _NotUnderstoodError
        self._name = _identifier(head[1].text)
        self._inputs = _names(head[2:arrow])
        self._outputs = _names(head[arrow + 1 :])
        for statement in _statements(body):
            try:
                self._read_assignment(statement)
            except _NotUnderstoodError:
                self._note_unknown(statement)

    def _read_assignment(self, tokens: list[_Token]) -> None:
        equals = next((index for index, token in enumerate(tokens) if token.text == "="), None)
        if not equals or equals + 1 == len(tokens):
            raise _NotUnderstoodError
        outputs, value = _names(tokens[:equals]), tokens[equals + 1 :]
        operators = Counter(_called(value))
        if _calls(value):
            arguments = tuple(_Arguments(self._text, _after_generic(value)[1:-1]).named())
            self._invocations.append(Invocation(_identifier(value[0].text), outputs, arguments))
        else:
            _Arguments(self._text, value).whole()
        self._operators += operators


def _body(tokens: Sequence[_Token]) -> tuple[Sequence[_Token], Sequence[_Token]]:
    """Split a definition into what stands before its braces and what stands between them."""
    brace = next((index for index, token in enumerate(tokens) if token.text == "{"), None)
    if brace is None or tokens[-1].text != "}":
        raise _NotUnderstoodError
    return tokens[:brace], tokens[brace + 1 : -1]


def _names(tokens: Sequence[_Token]) -> tuple[str, ...]:
    """Return the identifiers of `(a, b)`, `[a, b]`, `a, b` or `a`."""
    names = tuple(_identifier(token.text) for token in tokens if token.kind == "name")
    rest = {token.text for token in tokens if token.kind != "name"}
    if not rest <= {"(", ")", "[", "]", ","}:
        raise _NotUnderstoodError
    return names


def _identifier(text: str) -> str:
    return text[2:-1] if text.startswith('i"') else text


def _called(tokens: Sequence[_Token]) -> Iterator[str]:
    """Yield the operator of every call, nested ones included."""
    for index, token in enumerate(tokens[:-1]):
        after = _after_generic(tokens[index : index + 5])
        if token.kind == "name" and after and after[0].text == "(":
            yield _identifier(token.text)


def _calls(tokens: Sequence[_Token]) -> bool:
    """Say whether the tokens are one call from the first to the last."""
    if tokens[0].kind != "name" or tokens[-1].text != ")":
        return False
    rest = _after_generic(tokens)
    return bool(rest) and rest[0].text == "(" and _closing(rest, 0) == len(rest) - 1


def _after_generic(tokens: Sequence[_Token]) -> Sequence[_Token]:
    """Return what follows the operator's name and its `<scalar>`."""
    return tokens[4:] if len(tokens) > 4 and tokens[1].text == "<" and tokens[3].text == ">" else tokens[1:]


def _closing(tokens: Sequence[_Token], start: int) -> int:
    """Return the index of the bracket that closes the one at `start`, or -1."""
    expected: list[str] = []
    for index in range(start, len(tokens)):
        text = tokens[index].text
        if text in _OPENING:
            expected.append(_OPENING[text])
        elif text in _OPENING.values():
            if not expected or expected.pop() != text:
                return -1
            if not expected:
                return index
    return -1


def _balanced(tokens: Sequence[_Token]) -> bool:
    """Say whether every bracket is closed by its own kind."""
    expected: list[str] = []
    for token in tokens:
        if token.text in _OPENING:
            expected.append(_OPENING[token.text])
        elif token.text in _OPENING.values() and (not expected or expected.pop() != token.text):
            return False
    return not expected


# --- arguments ------------------------------------------------------------------------------------


class _Arguments:
    """Reads literals, arrays, tuples and names; any other expression is kept as the text it is."""

    def __init__(self, text: str, tokens: Sequence[_Token], depth: int = 0) -> None:
        if depth > _DEEPEST:
            raise _NotUnderstoodError
        self._text = text
        self._tokens = tokens
        self._depth = depth

    def whole(self) -> Argument:
        """Read all tokens as one value."""
        return self._value(self._tokens)

    def named(self) -> Iterator[tuple[str, Argument]]:
        """Yield the arguments of a call: `name=value`, positional ones under their index."""
        for index, tokens in enumerate(self._split(self._tokens)):
            named = len(tokens) > 2 and tokens[0].kind == "name" and tokens[1].text == "="
            yield (tokens[0].text, self._value(tokens[2:])) if named else (str(index), self._value(tokens))

    def _value(self, tokens: Sequence[_Token]) -> Argument:
        if not tokens:
            raise _NotUnderstoodError
        if len(tokens) == 1:
            return self._single(tokens[0])
        if tokens[0].text in ("[", "(") and _closing(tokens, 0) == len(tokens) - 1:
            elements = tuple(
                _Arguments(self._text, part, self._depth + 1).whole() for part in self._split(tokens[1:-1])
            )
            if tokens[0].text == "[":
                return ArrayLiteral(elements)
            return TupleLiteral(elements) if len(elements) != 1 else elements[0]
        if len(tokens) == 2 and tokens[0].text == "-" and tokens[1].kind == "number":
            number = self._single(tokens[1])
            return -number if isinstance(number, int | float) else number
        if not _balanced(tokens):
            raise _NotUnderstoodError
        return DimLiteral(" ".join(self._text[tokens[0].start : tokens[-1].end].split()))

    def _single(self, token: _Token) -> Argument:
        if token.kind == "string":
            return re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL)
        if token.kind == "number":
            return float(token.text) if set(token.text) & set(".eE") else _integer(token.text)
        if token.kind == "name":
            return {"true": True, "false": False}.get(token.text, Reference(_identifier(token.text)))
        raise _NotUnderstoodError

    def _split(self, tokens: Sequence[_Token]) -> Iterator[Sequence[_Token]]:
        """Cut at the commas outside every bracket; a comma after the last element is allowed."""
        start = depth = 0
        for index, token in enumerate(tokens):
            if token.text in _OPENING:
                depth += 1
            elif token.text in _OPENING.values():
                depth -= 1
            elif token.text == "," and depth == 0:
                yield tokens[start:index]
                start = index + 1
        if start < len(tokens):
            yield tokens[start:]


def _integer(text: str) -> int | str:
    """Return a number of at most 4300 digits, the most that Python converts; a longer one stays text."""
    return int(text) if len(text) <= 4300 else text


def _written(value: Argument) -> str:
    """Return an argument as people write it in a shape: `S+P`, `64`."""
    if isinstance(value, Reference):
        return value.name
    if isinstance(value, DimLiteral):
        return value.text.strip("()") if value.text.count("(") == 1 and value.text.startswith("(") else value.text
    if isinstance(value, ArrayLiteral | TupleLiteral):
        return f"[{', '.join(_written(element) for element in value.elements)}]"
    return str(value)


def shape_of(value: Argument | None) -> tuple[str, ...]:
    """Return the dimensions of a shape argument as text; () when it is none."""
    if not isinstance(value, ArrayLiteral | TupleLiteral):
        return ()
    return tuple(_written(element) for element in value.elements)


def _external(call: Invocation) -> External:
    datum_type = call.argument("datum_type")
    name = call.outputs[0] if call.outputs else ""
    return External(name, datum_type.lower() if isinstance(datum_type, str) else "", shape_of(call.argument("shape")))


def _variable(call: Invocation) -> Variable:
    label = call.argument("label")
    return Variable(
        call.outputs[0] if call.outputs else "",
        label if isinstance(label, str) else "",
        shape_of(call.argument("shape")),
    )
