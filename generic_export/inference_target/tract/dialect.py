"""What each tract release can read: a document for the newest one becomes a document for an older one, or is refused.

In: the finished `NnefGraph` and a release. Out: the same graph, with fragments that say younger operators with older ones.
Windows were measured on the wheels of `RELEASES`: a graph that calls an unknown operator is refused by name at load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from generic_export.errors import DialectError, OptionError
from generic_export.inference_target.tract.older_forms import OLDER_FORMS
from generic_export.nnef.graph import NnefFragment, NnefGraph, NnefOperation

Version = tuple[int, ...]

# The releases whose wheels the smoke set runs on, oldest first.
RELEASES = ("0.21.14", "0.22.4", "0.23.0", "0.23.5", "0.23.9")

# operator -> the release that has it first. In `OLDER_FORMS` stands what is written for an older one, where it can be.
SINCE: Mapping[str, str] = {
    # standard NNEF, implemented late
    "any_reduce": "0.23.0",
    "all_reduce": "0.23.0",
    "copy": "0.23.0",
    "debox": "0.23.0",
    "multilinear_upsample": "0.23.3",
    # tract_core; up to 0.22 the first three bear a tract_transformers_ name
    "tract_core_rms_norm": "0.23.0",
    "tract_core_silu": "0.23.0",
    "tract_core_gelu_approx": "0.23.0",
    "tract_core_is_nan": "0.23.0",
    "tract_core_is_inf": "0.23.0",
    "tract_core_log_softmax": "0.21.15",
    "tract_core_lstm_epilogue": "0.23.2",
    "tract_core_resize": "0.23.3",
    "tract_core_grid_sample": "0.23.3",
    "tract_core_pow_const": "0.23.6",
    "tract_core_scaled_rms_norm": "0.23.7",
    "tract_core_cumsum": "0.23.9",
    "tract_core_clamped_swiglu": "0.23.9",
    "tract_core_gru_seq": "0.23.9",
    # tract_transformers; attention spelled out is no older form: 0.21.14 never ends loading it at a dynamic length
    "tract_transformers_sdpa": "0.22.0",
    "tract_transformers_dyn_kv_cache": "0.23.0",
    "tract_transformers_window_kv_sdpa": "0.23.1",
    "tract_transformers_quantized_kv_sdpa": "0.23.3",
    "tract_transformers_causal_conv1d_update": "0.23.5",
    "tract_transformers_gdn_recurrent": "0.23.5",
    "tract_transformers_quantized_dyn_kv_cache": "0.23.5",
    "tract_moe_ffn": "0.23.9",
}


@dataclass(frozen=True)
class AttributeWindow:
    """An argument that releases before `since` ignore without a word, unless it has the value they take for granted."""

    operator: str
    attribute: str
    harmless: str
    since: str


# 0.21.14 and 0.22.4 overwrite where a reduction was asked for.
_ATTRIBUTES = (
    AttributeWindow("tract_core_scatter_elements", "reduction", "none", "0.23.0"),
    AttributeWindow("tract_core_scatter_nd", "reduction", "none", "0.23.0"),
)


def parse_version(text: str) -> Version:
    """Return a release number as numbers.

    Raises:
        OptionError: it is not one.
    """
    try:
        return tuple(int(part) for part in text.split("."))
    except ValueError:
        raise OptionError(f"tract version {text!r} is not of the form 0.23.9.") from None


def in_dialect(graph: NnefGraph, version: str) -> NnefGraph:
    """Return the document as `version` reads it.

    Args:
        graph: a document that the newest release reads.
        version: the release it is for.

    Raises:
        DialectError: an operation is younger and has no older form; it is named with its module and the release it needs.
    """
    release = parse_version(version)
    for operation in graph.operations:
        _refuse_ignored_attributes(operation, version, release)
    own = {fragment.name for fragment in graph.fragments}
    added: dict[str, NnefFragment] = {}
    waiting = list(_calls(graph))
    while waiting:
        operator, where = waiting.pop(0)
        older = OLDER_FORMS.get(operator)
        young = release < parse_version(SINCE.get(operator, "0")) or operator.startswith("older_")
        if not young or operator in own or operator in added:
            continue
        if older is None:
            raise DialectError(
                f"{operator} at {where or '(root)'}: tract {version} does not have it, {SINCE[operator]} does.",
                f"Export for tract {SINCE[operator]} or later, or write that part of the model with other operators.",
            )
        added[operator] = older
        waiting.extend((call, where) for call in sorted(older.calls))
    calls = {call for fragment in added.values() for call in fragment.calls}
    registries = graph.registries
    if any(call.startswith("tract_transformers_") for call in calls) and "tract_transformers" not in registries:
        registries = (*registries, "tract_transformers")
    return replace(graph, fragments=(*added.values(), *graph.fragments), registries=registries)


def _calls(graph: NnefGraph) -> Iterator[tuple[str, str]]:
    """Yield every operator that the document calls, with the module (or the fragment) that calls it."""
    for operation in graph.operations:
        yield operation.operator, operation.block.path
    for fragment in graph.fragments:
        for call in sorted(fragment.calls):
            yield call, f"fragment {fragment.name}"


def _refuse_ignored_attributes(operation: NnefOperation, version: str, release: Version) -> None:
    attributes = dict(operation.attributes)
    for window in _ATTRIBUTES:
        value = attributes.get(window.attribute, window.harmless)
        if operation.operator == window.operator and value != window.harmless and release < parse_version(window.since):
            raise DialectError(
                f"{window.operator} at {operation.block.path or '(root)'}: tract {version} ignores "
                f"{window.attribute}={value!r}, which {window.since} reads.",
                f"Export for tract {window.since} or later.",
            )


__all__ = ["RELEASES", "SINCE", "in_dialect", "parse_version"]
