"""Fragments that stand for modules, read back: the flat form of a composed `graph.nnef`, and what the engine calls its nodes.

In: text that `nnef/text.py` wrote of what `nnef/composition.py` composed. Out: text without such fragments, each call
replaced by the operations it stands for. Any other text is given back as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from generic_export.nnef.composition import MODULE_FRAGMENTS, module_prefix
from generic_export.nnef.text import noted

_PROPERTY = re.compile(rf'^    \("{MODULE_FRAGMENTS}", "([\w, ]+)"\),?\n', re.MULTILINE)
_FRAGMENT = re.compile(
    r"^# [^\n]*\nfragment (\w+)\(\n(.*?)^\) -> \(([^)]*)\)\n\{\n(.*?)^\}\n\n", re.MULTILINE | re.DOTALL
)
_TITLE = re.compile(r"  # (\(root\)|[^\s:]+)(: \w+)?")
_STATEMENT = re.compile(r"(  .*?;)(?:\s+# (.*))?")
_CALL = re.compile(r"  (\w+|\([\w, ]+\)) = (\w+)\(")
# Strings and numbers are matched first, so that no identifier is found in them.
_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\d[\w.]*|[A-Za-z_]\w*(?![\w(<=])')
_ARGUMENT = re.compile(r'"(?:\\.|[^"\\])*"|[^\s,]+')
_END = "  );"


@dataclass(frozen=True)
class _Fragment:
    """A fragment: the names of its parameters and results, the lines of its body."""

    parameters: tuple[str, ...]
    results: tuple[str, ...]
    body: tuple[str, ...]

    @property
    def inner(self) -> Iterator[str]:
        """The names that its body assigns."""
        for line in self.body:
            if (assigned := re.match(r"  (\w+|\([\w, ]+\)) = ", line)) is not None:
                yield from re.findall(r"\w+", assigned[1])


@dataclass(frozen=True)
class _Call:
    """A call of such a fragment: where, of what, what it gives and what it makes."""

    path: str
    fragment: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]

    def names(self, fragment: _Fragment) -> dict[str, str]:
        """Return what the names of the fragment stand for."""
        prefix = module_prefix(self.path) if self.path else self.outputs[0]
        names = {name: f"{prefix}_{name}" for name in fragment.inner}
        names |= dict(zip(fragment.results, self.outputs, strict=True))
        return names | dict(zip(fragment.parameters, self.arguments, strict=True))


def flat_text(text: str) -> str:
    """Return the text of a graph without fragments that stand for modules; text that has none is given back."""
    fragments = _fragments(text)
    if not fragments:
        return text
    head, body = _parted(_FRAGMENT.sub(lambda found: "" if found[1] in fragments else found[0], text))
    return "".join((*_without_property(head), *(f"{line}\n" for line in _flat_lines(body, fragments))))


def engine_names(text: str) -> dict[str, str]:
    """Return, by what tract calls the nodes inside of a graph's fragments, the identifiers of `flat_text`.

    tract (nnef/src/deser.rs) names a node after the first result of the call, the fragment, and the name in its body.
    """
    fragments = _fragments(text)
    found: dict[str, str] = {}
    for call in _items(_parted(text)[1], fragments) if fragments else ():
        if isinstance(call, _Call):
            names = call.names(fragments[call.fragment])
            begin = f"{call.outputs[0]}_{call.fragment}"
            found |= {f"{begin}_{name}": names[name] for name in fragments[call.fragment].inner}
    return found


def _fragments(text: str) -> dict[str, _Fragment]:
    """Return the fragments of a text that stand for modules."""
    stated = _PROPERTY.search(text)
    if stated is None:
        return {}
    names = stated[1].split(", ")
    return {
        found[1]: _Fragment(
            tuple(re.findall(r"^  (\w+): ", found[2], re.MULTILINE)),
            tuple(re.findall(r"(\w+): ", found[3])),
            tuple(line for line in found[4].splitlines() if line),
        )
        for found in _FRAGMENT.finditer(text)
        if found[1] in names
    }


def _parted(text: str) -> tuple[str, str]:
    """Return what stands before the graph, and the graph."""
    start = re.search(r"^graph ", text, re.MULTILINE)
    return (text, "") if start is None else (text[: start.start()], text[start.start() :])


def _without_property(head: str) -> str:
    shorter = re.sub(r",\n(  \];)", r"\n\1", _PROPERTY.sub("", head))
    return re.sub(r"fragment tract_core_properties[^{]*\{\n  properties = \[\n  \];\n\}\n\n", "", shorter)


def _items(graph: str, fragments: Mapping[str, _Fragment]) -> Iterator[str | _Call]:
    """Yield the lines of a graph, and the calls of its fragments in the place of theirs."""
    path = ""
    lines = iter(graph.splitlines())
    for line in lines:
        if (title := _TITLE.fullmatch(line)) is not None:
            path = title[1]
        call = _CALL.match(line)
        if call is None or call[2] not in fragments:
            yield line
            continue
        text = line[call.end() :].removesuffix(");")
        if not line.endswith(");"):
            text = " ".join(iter(lines.__next__, _END))
        yield _Call(path, call[2], tuple(_ARGUMENT.findall(text)), tuple(re.findall(r"\w+", call[1])))


def _flat_lines(graph: str, fragments: Mapping[str, _Fragment]) -> Iterator[str]:
    """Yield the lines of a graph's flat form; a block begins where the module is another one."""
    current = ""
    for line in _expanded(graph, fragments):
        if _TITLE.fullmatch(line) is None:
            if line:
                yield line
        elif line != current:
            if current:
                yield ""
            yield line
            current = line


def _expanded(graph: str, fragments: Mapping[str, _Fragment]) -> Iterator[str]:
    for item in _items(graph, fragments):
        if isinstance(item, _Call):
            names = item.names(fragments[item.fragment])
            for line in fragments[item.fragment].body:
                yield _placed(line, item.path, names)
        else:
            yield item


def _placed(line: str, path: str, names: Mapping[str, str]) -> str:
    """Return a line of a fragment as it is in one of the modules."""
    if (title := _TITLE.fullmatch(line)) is not None:
        return f"  # {path if title[1] == '(root)' else f'{path}.{title[1]}'}{title[2] or ''}"
    statement = _STATEMENT.fullmatch(line)
    if statement is None:
        return line
    return noted(_WORD.sub(lambda word: names.get(word[0], word[0]), statement[1]), statement[2] or "")
