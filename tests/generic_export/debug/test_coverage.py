"""Operators of a module that are supported, decomposed or missing, with counts and the line of their first use."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from generic_export.debug.coverage import ModuleCoverage, OperatorCoverage, Support, captured_coverage, merged
from generic_export.errors import CaptureError
from generic_export.torch_graph.capture.tracer import TorchModuleTracer

FILE = __file__.rsplit("/", 1)[-1]


class _Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.hermite_polynomial_h(x, x)


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Inner(), _Inner()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.linear(x)) + torch.diff(x, append=x[:, :1])
        return self.second(self.first(y))


MISSING = "aten.special_hermite_polynomial_h.default"


def _coverage(module: nn.Module, *args: torch.Tensor) -> dict[str, OperatorCoverage]:
    found = captured_coverage(TorchModuleTracer(module.eval(), args=args))
    assert found.problems == ()
    return {row.operator: row for row in found.operators}


def test_each_operator_has_its_verdict_count_and_line() -> None:
    rows = _coverage(_Outer(), torch.rand(2, 4))
    linear, diff, hermite = (
        rows["aten.linear.default"],
        rows["aten.diff.default"],
        rows[MISSING],
    )
    assert (linear.support, linear.count, linear.module_path) == (Support.SUPPORTED, 2, "linear")
    assert (diff.support, diff.count, diff.module_path) == (Support.DECOMPOSED, 1, "")
    assert "aten.sub.Tensor" in diff.becomes
    assert (hermite.support, hermite.count, hermite.refused, hermite.module_path) == (Support.MISSING, 2, 2, "first")
    line = inspect.getsourcelines(_Inner.forward)[1] + 1
    assert hermite.source == f"{FILE}:{line}" and hermite.module_type == "_Inner"
    assert "no NNEF form is registered" in hermite.reason


def test_a_call_that_its_translation_refuses_counts_as_missing() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.scaled_dot_product_attention(x, x, x)
            return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5)

    attention = _coverage(Module(), torch.rand(1, 2, 3, 4))["aten.scaled_dot_product_attention.default"]
    assert (attention.support, attention.count, attention.refused) == (Support.MISSING, 2, 1)
    line = inspect.getsourcelines(Module.forward)[1] + 2
    assert attention.source == f"{FILE}:{line}" and "dropout" in attention.reason


def test_the_weight_of_a_module_multiplies_its_calls() -> None:
    found = captured_coverage(
        TorchModuleTracer(_Outer().eval(), args=(torch.rand(2, 4),)), weigh=lambda path: 5 if path else 1
    )
    rows = {row.operator: row for row in found.operators}
    assert rows[MISSING].count == 10 == rows[MISSING].refused
    assert rows["aten.linear.default"].count == 10 and rows["aten.diff.default"].count == 1


def test_what_cannot_be_captured_is_an_error_with_its_line() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match=FILE):
        captured_coverage(TorchModuleTracer(Branch(), args=(torch.rand(3),)))


def test_coverages_are_added_up_and_the_worse_verdict_wins() -> None:
    fine = OperatorCoverage("aten.foo", Support.SUPPORTED, 3, module_path="a")
    bad = OperatorCoverage("aten.foo", Support.MISSING, 2, refused=1, module_path="b", reason="no")
    other = OperatorCoverage("aten.bar", Support.DECOMPOSED, 1, becomes=("aten.baz",))
    total = merged([ModuleCoverage((fine, other)), ModuleCoverage((bad,), ("p",)), ModuleCoverage((), ("p",))])
    assert total.problems == ("p",)
    assert total.operators[0] == OperatorCoverage(
        "aten.foo", Support.MISSING, 5, refused=1, module_path="b", reason="no"
    )
    assert total.operators[1] == other
