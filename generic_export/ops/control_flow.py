"""Captured control flow. A branch is two computed values and a select (the tracer writes it so); a loop over an axis is here.

What depends on data in other ways (`while_loop`) has no form in tract: its loop runs over an axis, as often as that is long.
"""

from __future__ import annotations

from collections.abc import Sequence

from generic_export.ops.scan import Loop, Values
from generic_export.ops.scan import scan as emit_scan
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.loops import SCAN
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates
from generic_export.translate.translate import translate_body


@translates(SCAN)
def scan(
    b: NnefBuilder, init: Sequence[Value], xs: Sequence[Value], constants: Sequence[Value], body: TorchModuleIRGraph
) -> Sequence[Value]:
    """t2n::scan(Tensor[] init, Tensor[] xs, Tensor[] constants, str body) -> Tensor[]: along axis 0 of every xs"""

    def step(inner: NnefBuilder, slices: Values, states: Values, whole: Values) -> tuple[Values, Values]:
        inputs = [*states, *(inner.squeeze(value, [0]) for value in slices), *whole]
        results = translate_body(body, inner, inputs)
        collected = [inner.unsqueeze(inner.materialised(value), [0]) for value in results[len(init) :]]
        return results[: len(init)], collected

    results, states = emit_scan(b, "scan_step", Loop(xs, init, constants), step)
    return [*states, *results]
