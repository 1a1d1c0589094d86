"""The `extension` lines of a document as text: what it declares, and what is added to it in that form.

In: lines such as `tract_symbol S` or `extension tract_assert S >= 1;`. Out: a document that declares them too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from generic_export.errors import OptionError
from generic_export.nnef.graph import NnefFragment, NnefGraph

# extension -> the field of a document that holds what follows it
_FIELDS = {"tract_registry": "registries", "tract_symbol": "symbols", "tract_assert": "assertions"}

_CALL = re.compile(r'(\w+)\s*\(|body\s*=\s*"(\w+)"')


def extension_lines(graph: NnefGraph) -> list[str]:
    """Return what a document declares, one `tract_symbol S` a line."""
    return [f"{extension} {text}" for extension, field in _FIELDS.items() for text in getattr(graph, field)]


def with_extensions(graph: NnefGraph, lines: Sequence[str]) -> NnefGraph:
    """Return a document that declares these lines too.

    Raises:
        OptionError: a line is not an extension that tract reads.
    """
    for line in lines:
        name, _, text = str(line).strip().removeprefix("extension ").strip().rstrip(";").partition(" ")
        field = _FIELDS.get(name)
        if field is None or not text.strip():
            known = ", ".join(f"{extension} ..." for extension in _FIELDS)
            raise OptionError(f"{line!r} is not an extension of a document.", f"Write one of {known}.")
        graph = replace(graph, **{field: tuple(dict.fromkeys((*getattr(graph, field), text.strip())))})  # type: ignore[arg-type]
    return graph


def fragment_of(name: str, text: str) -> NnefFragment:
    """Return a fragment from its text, `fragment name(...) -> (...) { ... }`.

    Raises:
        OptionError: the text is not the fragment of that name.
    """
    head, _, body = str(text).partition("{")
    if not re.search(rf"^\s*fragment\s+{re.escape(str(name))}\s*[(<]", head, re.MULTILINE) or not body.strip():
        raise OptionError(
            f"fragment {name!r} is not defined by its text.", f"Write: fragment {name}(...) -> (...) {{ ... }}"
        )
    calls = frozenset(operator or inner for operator, inner in _CALL.findall(body))
    return NnefFragment(str(name), str(text).strip() + "\n", calls)


__all__ = ["extension_lines", "fragment_of", "with_extensions"]
