"""Fragments that say an operator of a younger tract release with operators of older ones; `dialect.py` says when.

A fragment bears the name of the operator it stands for, so that calls of it, loop bodies included, stay as they are.
"""

from __future__ import annotations

import re

from generic_export.nnef.graph import NnefFragment

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


def _parsed() -> dict[str, NnefFragment]:
    fragments = {}
    for match in _FRAGMENT.finditer(_TEXTS):
        body = match[0].partition("{")[2]
        calls = frozenset(name or fragment for name, fragment in _CALL.findall(body))
        fragments[match[1]] = NnefFragment(match[1], match[0], calls)
    return fragments


OLDER_FORMS = _parsed()

__all__ = ["OLDER_FORMS"]
