"""What each tract release can read: a document for the newest one becomes a document for an older one, or is refused.

In: the finished `NnefGraph` and a release. Out: a refusal, or the fragments that say younger operators with older ones.
Windows were measured on the wheels of `RELEASES`: a graph that calls an unknown operator is refused by name at load.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from generic_export.errors import DialectError
from generic_export.inference_target.version import SemanticVersion
from generic_export.nnef.graph import NnefFragment, NnefGraph, NnefOperation
from generic_export.nnef.registries import with_fragments

# The releases whose wheels the smoke set runs on, oldest first.
RELEASES = ("0.21.13", "0.21.14", "0.22.4", "0.23.0", "0.23.5", "0.23.9")

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
    # tract_transformers
    "tract_transformers_sdpa": "0.22.0",
    "tract_transformers_dyn_kv_cache": "0.23.0",
    "tract_transformers_window_kv_sdpa": "0.23.1",
    "tract_transformers_quantized_kv_sdpa": "0.23.3",
    "tract_transformers_causal_conv1d_update": "0.23.5",
    "tract_transformers_gdn_recurrent": "0.23.5",
    "tract_transformers_quantized_dyn_kv_cache": "0.23.5",
    "tract_moe_ffn": "0.23.9",
}


# Releases that never end loading `[T,D] x [T,D] -> [T,T]` (by running; 0.21.13 and 0.21.15 load it).
ENDLESS_SQUARE_PRODUCTS = frozenset({SemanticVersion.parse("0.21.14")})

# Options that write something else instead.
_OTHER_SPELLINGS = {"tract_transformers_sdpa": "spell attention out with reify_sdpa_operator=False."}

_TEXTS = """
# Up to 0.22 these three live in the other registry.
fragment tract_core_rms_norm(input: tensor<scalar>, axis: integer, eps: scalar) -> (y: tensor<scalar>)
{
  y = tract_transformers_rms_norm(input, axis=axis, eps=eps);
}

fragment tract_core_silu(input: tensor<scalar>) -> (y: tensor<scalar>)
{
  y = tract_transformers_silu(input);
}

fragment tract_core_gelu_approx(input: tensor<scalar>, fast_impl: logical) -> (y: tensor<scalar>)
{
  y = tract_transformers_gelu_approx(input, fast_impl=fast_impl);
}

# NaN alone differs from itself.
fragment tract_core_is_nan(input: tensor<scalar>) -> (y: tensor<logical>)
{
  y = ne(input, input);
}

# There and back: a value under another name.
fragment copy(x: tensor<scalar>) -> (y: tensor<scalar>)
{
  y = squeeze(unsqueeze(x, axes=[0]), axes=[0]);
}

fragment any_reduce(input: tensor<logical>, axes: integer[]) -> (y: tensor<logical>)
{
  y = tract_core_cast(max_reduce(tract_core_cast(input, to="f32"), axes=axes), to="bool");
}

fragment all_reduce(input: tensor<logical>, axes: integer[]) -> (y: tensor<logical>)
{
  y = tract_core_cast(min_reduce(tract_core_cast(input, to="f32"), axes=axes), to="bool");
}

fragment tract_core_cumsum(input: tensor<scalar>, axis: integer, exclusive: logical, reverse: logical) -> (y: tensor<scalar>)
{
  nothing = max(min(slice(input, axes=[axis], begin=[0], end=[1]), 0.0), 0.0);
  y = tract_core_scan(
    body="older_cumsum_step", scan=[("x", input, axis, 1)], full=[], state=[("total", nothing, "after")],
    output=[("y", "full", axis, 1)], reset_every_turn=1
  );
}

fragment older_cumsum_step(x: tensor<scalar>, total: tensor<scalar>) -> (after: tensor<scalar>, y: tensor<scalar>)
{
  after = add(total, x);
  y = copy(after);
}
"""
_FRAGMENT = re.compile(r"^(?:#[^\n]*\n)*fragment (\w+).*?^}\n", re.MULTILINE | re.DOTALL)
_CALL = re.compile(r'(\w+)\(|body="(\w+)"')


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


def has_operator(release: SemanticVersion, operator: str) -> bool:
    """Say whether a release has an operator; one without a window is taken to be as old as the dialect."""
    return release >= SemanticVersion.parse(SINCE.get(operator, RELEASES[0])) and not operator.startswith("older_")


def refuse_younger(graph: NnefGraph, release: SemanticVersion) -> None:
    """Refuse a document that a release would not read, or not read as it is meant.

    Args:
        graph: a document that the newest release reads.
        release: the release it is for.

    Raises:
        DialectError: an operation is younger and has no older form; it is named with its module and the release it needs.
    """
    for operation in graph.operations:
        _refuse_ignored_attributes(operation, release)
    own = {fragment.name for fragment in graph.fragments}
    for operator, where in _calls(graph):
        if operator not in own and operator not in OLDER_FORMS and not has_operator(release, operator):
            raise DialectError(
                f"{operator} at {where or '(root)'}: tract {release} does not have it; {SINCE[operator]} does.",
                f"Export for tract {SINCE[operator]} or later, or "
                + _OTHER_SPELLINGS.get(operator, "write that part of the model with other operators."),
            )


def older_fragments(graph: NnefGraph, release: SemanticVersion) -> tuple[NnefFragment, ...]:
    """Return the fragments that say, for a release, what the document calls and the release does not have."""
    own = {fragment.name for fragment in graph.fragments}
    added: dict[str, NnefFragment] = {}
    waiting = [operator for operator, _ in _calls(graph)]
    while waiting:
        operator = waiting.pop(0)
        older = OLDER_FORMS.get(operator)
        if older is None or operator in own or operator in added or has_operator(release, operator):
            continue
        added[operator] = older
        waiting.extend(sorted(older.calls))
    return tuple(added.values())


def with_older_fragments(graph: NnefGraph, release: SemanticVersion) -> NnefGraph:
    """Return a document with the fragments that a release needs.

    Args:
        graph: the document.
        release: that reads it.
    """
    return with_fragments(graph, older_fragments(graph, release))


def refuse_other_registries(graph: NnefGraph, registries: Collection[str]) -> None:
    """Refuse a document that needs a registry that its runtime is not built with.

    Raises:
        DialectError: naming the registry.
    """
    for registry in graph.registries:
        if registry != "tract_core" and registry not in registries:
            users = sorted(
                {f"{call} at {where or '(root)'}" for call, where in _calls(graph) if call.startswith(registry)}
            )
            raise DialectError(
                f"{users[0] if users else 'the document'} needs the registry {registry}, which feature_flags "
                "does not include.",
                "Add the registry to feature_flags if the runtime includes it.",
            )


def _calls(graph: NnefGraph) -> Iterator[tuple[str, str]]:
    """Yield every operator that the document calls, with the module (or the fragment) that calls it."""
    for operation in graph.operations:
        yield operation.operator, operation.block.path
    for fragment in graph.fragments:
        for call in sorted(fragment.calls):
            yield call, f"fragment {fragment.name}"


def _refuse_ignored_attributes(operation: NnefOperation, release: SemanticVersion) -> None:
    attributes = dict(operation.attributes)
    for window in _ATTRIBUTES:
        value = attributes.get(window.attribute, window.harmless)
        young = release < SemanticVersion.parse(window.since)
        if operation.operator == window.operator and value != window.harmless and young:
            raise DialectError(
                f"{window.operator} at {operation.block.path or '(root)'}: tract {release} ignores "
                f"{window.attribute}={value!r}, which tract {window.since} supports.",
                f"Export for tract {window.since} or later.",
            )


# Fragments that say an operator of a younger tract release with operators of older ones; `dialect.py` says when.
# A fragment bears the name of the operator it stands for, so that calls of it, loop bodies included, stay as they are.
def _parsed() -> dict[str, NnefFragment]:
    fragments = {}
    for match in _FRAGMENT.finditer(_TEXTS):
        body = match[0].partition("{")[2]
        calls = frozenset(name or fragment for name, fragment in _CALL.findall(body))
        fragments[match[1]] = NnefFragment(match[1], match[0], calls)
    return fragments


OLDER_FORMS = _parsed()


__all__ = [
    "ENDLESS_SQUARE_PRODUCTS",
    "OLDER_FORMS",
    "RELEASES",
    "SINCE",
    "has_operator",
    "older_fragments",
    "refuse_other_registries",
    "refuse_younger",
    "with_older_fragments",
]
