"""Element-wise operators in the engine, broadcast as PyTorch broadcasts, at two sizes of a dynamic axis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from generic_export import TractNNEF
from generic_export.errors import CaptureError, TranslationError
from tests.engine_check import Function, check

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 0.5),
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "erf": torch.erf,
    "reciprocal": lambda x: torch.reciprocal(x + 10),
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": torch.relu,
    "silu": F.silu,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": lambda x: torch.round(x * 2) / 2,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x * 50),
    "softplus_beta": lambda x: F.softplus(x, beta=2.0, threshold=5.0),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "pow_2": lambda x: x.pow(2),
    "pow_3": lambda x: x.pow(3),
    "pow_half": lambda x: x.abs().pow(0.5),
    "rsub": lambda x: 1.5 - x,
    "add_alpha": lambda x: torch.add(x, x, alpha=3),
    "div_scalar": lambda x: x / 4,
    "to_int_and_back": lambda x: (x * 10).to(torch.int64).to(torch.float32),
    "masked_fill": lambda x: x.masked_fill(x > 0, -7.0),
    "where_scalars": lambda x: torch.where(x > 0, x, torch.tensor(2.0)),
    "logic": lambda x: ((x > 0) & (x < 1)) | ~(x > -1),
    "compare_chain": lambda x: (x >= 0.5).to(torch.float32) + (x != 0).to(torch.float32),
}


@pytest.mark.parametrize("name", UNARY)
def test_one_operand(name: str) -> None:
    torch.manual_seed(0)
    check(
        UNARY[name],
        (torch.randn(3, 5),),
        (torch.randn(7, 5),),
        dynamic_axes={"input_0": {0: "N"}},
        atol=2e-6,
    )


BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x, y),
    "eq": lambda x, y: x.round() == y.round(),
    "lt": torch.lt,
}


@pytest.mark.parametrize(
    "shapes", [((3, 4), (4,)), ((4,), (3, 4)), ((3, 1), (1, 4)), ((2, 3, 4), (3, 1)), ((3, 3), (3,))]
)
@pytest.mark.parametrize("name", BINARY)
def test_two_operands_align_on_the_right(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    check(BINARY[name], tuple(torch.randn(shape) for shape in shapes))


def test_element_types_are_promoted_as_pytorch_does() -> None:
    integers, halves = torch.arange(6).reshape(2, 3), torch.randn(2, 3).to(torch.float16)
    check(lambda x, y: x + y, (integers, torch.randn(2, 3)))
    check(lambda x, y: x * y, (halves, torch.randn(2, 3)))
    check(lambda x: x / 2, (integers,))
    check(lambda x: x * 3 + 1, (integers,))
    check(lambda x: x * 0.5, (halves,), atol=1e-3)


def test_bool_tensors_compare() -> None:
    check(lambda x, y: (x > 0) == (y > 0), (torch.randn(3, 4), torch.randn(3, 4)))


def test_the_sum_of_sizes_enters_the_computation() -> None:
    check(
        lambda x: x + x.shape[0] * 2,
        (torch.arange(4),),
        (torch.arange(9),),
        dynamic_axes={"input_0": {0: "N"}},
    )


def test_active_dropout_is_refused() -> None:
    with pytest.raises((TranslationError, CaptureError), match="dropout"):
        check(lambda x: F.dropout(x, 0.5, training=True), (torch.randn(3),))


class Hermite(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.hermite_polynomial_h(x, x)


def test_an_operator_without_translation_is_named_with_its_line() -> None:
    line = Hermite.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        TranslationError, match=rf"aten\.special_hermite_polynomial_h\.default .*test_elementwise\.py:{line}"
    ):
        check(Hermite(), (torch.rand(3),))


def test_an_untranslated_operator_is_decomposed_by_pytorch() -> None:
    # hardswish has no translation of its own here; clamp, mul and div have.
    check(F.hardswish, (torch.randn(4, 5),))


def test_numerics_switches_need_no_f32_graph() -> None:
    model = torch.nn.Linear(4, 4)
    text = check(model, (torch.randn(2, 4),), target=TractNNEF(check_io=False, force_linear_accumulation_in_f32=True))
    assert "tract_core_cast" not in text


def test_graph_text_shows_shapes_and_types() -> None:
    text = check(Function(lambda x: x + 1.0), (torch.randn(3, 4),))
    assert "# f32 [3,4]" in text
