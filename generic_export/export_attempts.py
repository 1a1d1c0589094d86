"""What an export tries again: sizes as the module would have them declared, and axes of `Dim.AUTO` made static.

In: a function that exports for a target, or what was captured. Out: an archive, or the first refusal.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from generic_export.assertions import Assertion, enforced, held
from generic_export.capture import Prepared, class_name
from generic_export.checked_archive import ArchiveWriting, write_checked
from generic_export.documents import producer_properties, translate_graph
from generic_export.errors import (
    CaptureError,
    DimensionError,
    EngineError,
    EngineLoadError,
    GraphError,
    MismatchError,
    T2NError,
    TranslationError,
)
from generic_export.inference_target.base import InferenceTarget
from generic_export.nnef.graph import NnefGraph
from generic_export.opened_archive import name_properties
from generic_export.torch_graph.naming import VariableNamingScheme
from generic_export.torch_graph.nested import FlatCall
from generic_export.torch_graph.request import auto_symbols
from generic_export.torch_graph.sizes.fixed_axes import auto_axes, equal_symbols, with_sizes
from generic_export.torch_graph.sizes.multiples import declared_too
from generic_export.translate.translate import TranslationOptions

logger = logging.getLogger("generic_export")


def as_declared(attempt: Callable[[InferenceTarget], None], target: InferenceTarget, kind: str) -> None:
    """Export for a target; where that is refused, for sizes as the module would have them declared.

    Raises:
        T2NError: the first refusal.
    """
    try:
        attempt(target)
        return
    except (CaptureError, DimensionError, GraphError, EngineLoadError) as error:
        refusal = error
    # Where a trace was tried after torch.export, its own refusal is the cause of this one.
    found = refusal.declarations or getattr(refusal.__cause__, "declarations", ())
    sizes = [size for size in found if size.name not in auto_symbols(target.dynamic_axes)]
    if not sizes or not target.refuses_sizes:
        raise refusal
    try:
        attempt(target.with_dynamic_axes(declared_too(target.dynamic_axes, sizes)))
    except T2NError:
        raise refusal from refusal.__cause__
    warnings.warn(
        f"{kind}: sizes are restricted to {', '.join(map(str, sizes))}, and tract refuses others. Without that: "
        f"{refusal.message}",
        stacklevel=3,
    )


def write_where_possible(
    prepared: Prepared,
    target: InferenceTarget,
    how: ArchiveWriting,
    assertions: Sequence[Assertion],
    naming_scheme: VariableNamingScheme | str,
) -> None:
    """Translate and write what was captured; axes of `Dim.AUTO` with which that fails become static, and a warning names them.

    Raises:
        T2NError: as `export_model_to_nnef`.
    """
    call = FlatCall.of(prepared.model, prepared.args, prepared.kwargs)
    reasons: list[str] = []
    while True:
        try:
            document = _document(prepared, target, assertions, naming_scheme)
            write_checked(prepared, document, target, how)
            break
        except (DimensionError, TranslationError, EngineError, MismatchError) as error:
            sizes = prepared.graph.sizes(call.tensors)
            auto = auto_symbols(target.dynamic_axes).intersection(sizes)
            chosen = auto.intersection(error.symbols) or auto
            if not chosen:
                raise
            merged = equal_symbols({name: sizes[name] for name in auto}, chosen)
            reasons += [] if merged else [error.message]
            graph = with_sizes(prepared.graph, merged or {name: sizes[name] for name in chosen})
            prepared = replace(prepared, graph=graph)
    found = auto_axes(target.dynamic_axes, prepared.graph)
    if found:
        warnings.warn(f"{class_name(prepared.model)}: {found}{' '.join(('', *reasons))}", stacklevel=5)


def _document(
    prepared: Prepared,
    target: InferenceTarget,
    assertions: Sequence[Assertion],
    naming_scheme: VariableNamingScheme | str,
) -> NnefGraph:
    """Translate what was captured.

    Raises:
        T2NError: as `translate_graph`; its `declarations` are the sizes that the capture assumed.
    """
    graph, kind = prepared.graph, class_name(prepared.model)
    logger.info("captured %s: %d operators", kind, len(graph.ops))
    relations = held(assertions, prepared)
    if target.refuses_sizes:
        relations += enforced(assertions, graph.conditions)
    names = name_properties([variable.name for variable in graph.inputs], graph.output_names)
    properties = tuple({**producer_properties(source_model=kind), **names}.items())
    options = TranslationOptions(naming_scheme=naming_scheme, assertions=relations, properties=properties)
    try:
        document = translate_graph(graph, target, options, prepared.model)
    except T2NError as error:
        error.declarations = graph.declarations
        raise
    logger.info("translated: %d operations, %d tensors", len(document.operations), len(document.variables))
    return document


__all__ = ["as_declared", "write_where_possible"]
