"""Metadata of an export from anywhere, held against what an export writes before anything of it is used.

transformers makes objects of the classes that a treespec names. A treespec is refused unless all of them are data containers.
In: `ExportMetadata`. Out: nothing, or an `ArchiveError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from transformers.exporters import ExportMetadata

from generic_export.errors import ArchiveError

_LONGEST_SPEC = 4 << 20  # characters
_MOST_KWARGS = 4096
_DEEPEST = 64
_PLAIN = frozenset({"builtins.list", "builtins.tuple", "builtins.dict", "builtins.set", "collections.OrderedDict"})
_HINT = "Load exports from sources that you trust, or export the model again."


def check_metadata(metadata: ExportMetadata) -> None:
    """Check what a runner uses of metadata.

    Raises:
        ArchiveError: it is not of the form that an export writes, or names a class that no model returns.
    """
    if not isinstance(metadata.kwargs, dict) or len(metadata.kwargs) > _MOST_KWARGS:
        raise ArchiveError("the manifest's kwargs is not a table of arguments.", _HINT)
    if not isinstance(metadata.in_constants, dict):
        raise ArchiveError("the manifest's in_constants is not a table.", _HINT)
    constants = metadata.out_constants
    if not isinstance(constants, list) or not all(_is_constant(each) for each in constants):
        raise ArchiveError("the manifest's out_constants is not a list.", _HINT)
    for spec in (metadata.in_spec, metadata.out_spec):
        _check_spec(spec)


def _is_constant(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], int)


def _check_spec(spec: Any) -> None:
    if not isinstance(spec, str) or len(spec) > _LONGEST_SPEC:
        raise ArchiveError(f"the manifest has no treespec of at most {_LONGEST_SPEC} characters.", _HINT)
    try:
        for path in _named_classes(json.loads(spec), 0):
            _check_class(path)
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"the manifest's treespec cannot be read: {error}.", _HINT) from error


def _named_classes(value: Any, depth: int) -> Iterator[str]:
    """Yield every class that reading a treespec would import: types of nodes, and those in the contexts of caches."""
    if depth > _DEEPEST:
        raise ArchiveError("the manifest's treespec is nested too deeply.", _HINT)
    if isinstance(value, list):
        for each in value:
            yield from _named_classes(each, depth + 1)
    elif isinstance(value, dict):
        if "__enum__" in value:
            raise ArchiveError("the manifest's treespec contains an enumeration.", _HINT)
        if isinstance(value.get("p"), str) and "_t" in value:
            yield value["p"]
        if isinstance(value.get("type"), str):
            yield value["type"]
        for each in value.values():
            yield from _named_classes(each, depth + 1)
    elif isinstance(value, str) and value[:1] in "[{" and len(value) > 2:  # a context is JSON in JSON
        try:
            inner = json.loads(value)
        except ValueError:
            return
        yield from _named_classes(inner, depth + 1)


def _check_class(path: str) -> None:
    """Refuse a class that is neither a plain container nor one of transformers' caches and results.

    Raises:
        ArchiveError: names the class.
    """
    from transformers.cache_utils import Cache, CacheLayerMixin
    from transformers.utils import ModelOutput

    module, _, name = path.replace(":", ".").rpartition(".")
    if f"{module}.{name}" in _PLAIN or "" in (module, name):
        return
    refusal = ArchiveError(f"the manifest's treespec names {path!r}, which is not a model output class.", _HINT)
    if module.split(".")[0] != "transformers":
        raise refusal
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise refusal from None
    known = isinstance(found, type) and (
        issubclass(found, Cache | CacheLayerMixin | ModelOutput)
        or name.endswith(("Cache", "Layer", "Output", "Config"))
    )
    if not known:
        raise refusal


__all__ = ["check_metadata"]
