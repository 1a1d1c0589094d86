"""A captured graph as a finished document: translated for a target, signed, and with a source for every tensor it names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from torch import nn

from generic_export.errors import GraphError, OptionError
from generic_export.garbage_collection import collection_paused
from generic_export.nnef.block_storage import storage_uses, store_in_blocks
from generic_export.nnef.graph import NnefFragment, NnefGraph
from generic_export.nnef.order import group_by_module
from generic_export.nnef.registries import with_fragments
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.translate.translate import TranslationOptions, translate
from generic_export.weights.part import part_source
from generic_export.weights.source import BlockTensorSource, TensorSource

if TYPE_CHECKING:  # the package of targets is above this room: its __init__ imports the tract target, which captures
    from generic_export.inference_target.base import InferenceTarget


PRODUCER = "t2n-llm"

# extension -> the field of a document that holds what follows it
_FIELDS = {"tract_registry": "registries", "tract_symbol": "symbols", "tract_assert": "assertions"}
_CALL = re.compile(r'(\w+)\s*\(|body\s*=\s*"(\w+)"')


@collection_paused()
def translate_graph(
    graph: TorchModuleIRGraph, target: InferenceTarget, options: TranslationOptions, model: nn.Module | None = None
) -> NnefGraph:
    """Translate a captured graph for a target: its numerics and properties are added to the options, its hooks called.

    Args:
        graph: what was captured.
        target: who it is for.
        options: of the translation.
        model: the module, which the target may have fragments for; None asks for none.
    """
    complete = TranslationOptions(
        graph_name=options.graph_name,
        numerics=target.numerics,
        spelling=target.spelling,
        naming_scheme=options.naming_scheme,
        assertions=options.assertions,
        properties=(*options.properties, *target.properties.items()),
    )
    document = _post_traced(target, group_by_module(translate(graph, complete)))
    texts = target.specific_fragments(model) if model is not None else {}
    document = with_fragments(document, [fragment_of(name, text) for name, text in (texts or {}).items()])
    return target.post_translate(document)


def _post_traced(target: InferenceTarget, document: NnefGraph) -> NnefGraph:
    """Call the hook that may return another document, and may add lines to those that it declares."""
    declared = extension_lines(document)
    lines = list(declared)
    returned = target.post_trace(document, lines)
    return with_extensions(returned or document, [line for line in lines if line not in declared])


def producer_properties(source_model: str) -> dict[str, str | float]:
    """Return the properties that say who made a document, with which versions, from what."""
    return {
        "producer": PRODUCER,
        "producer_version": producer_version(),
        "torch_version": torch_version(),
        "source_model": source_model,
    }


def producer_version() -> str:
    """Return the version of this project, or "0" when it runs from a bare source tree."""
    try:
        return version("t2n-llm")
    except PackageNotFoundError:
        return "0"


def torch_version() -> str:
    """Return the version of PyTorch, without its local build tag."""
    return str(torch.__version__).split("+")[0]


def module_classes(model: nn.Module) -> dict[str, str]:
    """Return the classes of a model's modules, by path."""
    return {path: type(module).__name__ for path, module in model.named_modules()}


def with_tensors(
    document: NnefGraph, sources: Mapping[str, TensorSource]
) -> tuple[NnefGraph, Mapping[str, TensorSource]]:
    """Return a document and a source for every tensor that it names: parts of parameters, and blocks as they lie.

    Raises:
        GraphError: an operation cannot read blocks as they lie.
    """
    return _in_blocks(document, _with_parts(document, sources))


def _with_parts(document: NnefGraph, sources: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """Return the sources, those of stored tensors that are parts of a parameter included."""
    parts = {variable.label: variable.part for variable in document.variables if variable.part is not None}
    return {**sources, **{label: part_source(label, part, sources[part.parameter]) for label, part in parts.items()}}


def _in_blocks(
    document: NnefGraph, sources: Mapping[str, TensorSource]
) -> tuple[NnefGraph, Mapping[str, TensorSource]]:
    """Return the document that reads from blocks the tensors whose sources are blocks.

    Raises:
        GraphError: an operation cannot read such a tensor.
    """
    formats = {
        variable.label: source.block_format
        for variable in document.variables
        if isinstance(source := sources[variable.label], BlockTensorSource)
    }
    turned = {label for label, use in storage_uses(document).items() if label in formats and use.axes is not None}
    for label in turned:
        raise GraphError(
            f"tensor {label!r}: its blocks do not lie along the axis that the model sums over.",
            "Store the transposed weight, as nn.Linear has it, or leave this tensor unquantized.",
        )
    return (store_in_blocks(document, formats) if formats else document), sources


# The `extension` lines of a document as text: what it declares, and what is added to it in that form.
# In: lines such as `tract_symbol S` or `extension tract_assert S >= 1;`. Out: a document that declares them too.
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


__all__ = [
    "PRODUCER",
    "module_classes",
    "producer_properties",
    "producer_version",
    "torch_version",
    "translate_graph",
    "with_tensors",
]
