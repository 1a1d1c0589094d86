"""The interpreter computes what TorchScript computes: numbers, strings, lists and dicts, of the same types."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from generic_export.errors import CaptureError
from generic_export.torchscript.harden import fold_constant_scalar_arithmetic
from generic_export.torchscript.module import interpreted


class Integers(nn.Module):
    def forward(self, a: int, b: int) -> tuple[list[int], list[float], list[bool]]:
        whole = [a + b, a - b, a * b, a // b, a % b, -a, abs(a), min(a, b), max(a, b), int(a / b)]
        whole += [math.floor(a / b), math.ceil(a / b), a & b, a | b, a ^ b, [1, 2, 3][a % 3]]
        for index in range(a, 9, 2):
            whole.append(index)
        for index in range(9, a, -3):
            whole.append(index)
        real = [a / b, float(a), math.sqrt(abs(a)), round(a / b), float(abs(a) ** 2), math.pow(abs(a), 2)]
        truth = [a == b, a != b, a < b, a <= b, a > b, a >= b, not a < b, bool(a), a in [1, 2, 3]]
        return whole, real, truth


class Reals(nn.Module):
    def forward(self, a: float, b: float) -> tuple[list[int], list[float], list[bool]]:
        real = [a + b, a - b, a * b, a / b, a // b, a % b, -a, abs(a), min(a, b), max(a, b), math.exp(-abs(a))]
        return [int(a), math.floor(a), math.ceil(a)], real, [a == b, a < b, a >= b]


INTEGERS, REALS = torch.jit.script(Integers()), torch.jit.script(Reals())


@settings(max_examples=60, deadline=None)
@given(st.integers(-20, 20), st.integers(-20, 20).filter(bool))
def test_arithmetic_on_integers(a: int, b: int) -> None:
    assert typed(interpreted(INTEGERS).run_script((a, b))) == typed(INTEGERS(a, b))


@settings(max_examples=60, deadline=None)
@given(st.floats(-20, 20), st.floats(0.1, 20))
def test_arithmetic_on_reals(a: float, b: float) -> None:
    assert typed(interpreted(REALS).run_script((a, b))) == typed(REALS(a, b))


def typed(value: Any) -> Any:
    """Return a value with its types, which Python's equality ignores."""
    if isinstance(value, (list, tuple)):
        return [typed(item) for item in value]
    return type(value).__name__, value


def test_what_is_folded_has_the_type_that_torchscript_gives_it() -> None:
    class Power(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            k = len([1, 2])
            return x * k**2, k**2 / 3

    script = torch.jit.script(Power())
    before = script(torch.ones(2))
    fresh = torch.jit.script(Power())
    assert fold_constant_scalar_arithmetic(fresh) >= 2
    fresh.graph.lint()
    after = fresh(torch.ones(2))
    assert after[0].dtype is before[0].dtype and after[1] == before[1]


class Containers(nn.Module):
    def forward(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, list[int], str, int]:
        table: dict[str, torch.Tensor] = {"a": x, name: x * 2}
        table["c"] = x - 1
        total = torch.zeros_like(x)
        for key, value in table.items():
            if key != "a":
                total = total + value
        sizes = [x.size(0), 5, 2]
        sizes.append(7)
        sizes.insert(1, 3)
        sizes.extend([1, 1])
        last = sizes.pop()
        sizes.reverse()
        text = "{}-{}".format(name.upper(), len(sizes)) if name.startswith("b") else name  # noqa: UP032
        return total, sizes[1:-1], text, last


@pytest.mark.parametrize("name", ["b", "other"])
def test_lists_dicts_and_strings(name: str) -> None:
    script = torch.jit.script(Containers())
    x = torch.randn(3)
    total, *rest = interpreted(script).run_script((x, name))
    expected, *others = script(x, name)
    torch.testing.assert_close(total, expected)
    assert typed(rest) == typed(others)


class Tensors(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        made = torch.tensor([[1.0, 2.0], [3.0, float(x.size(0))]])
        like = torch.zeros(x.size(0), 2, dtype=torch.float64, device=x.device).to(x)
        masked = torch.where(x > 0, x, torch.full_like(x, -1))
        x[0] = 5.0
        return made.to(torch.int64), like, masked.masked_fill(masked < 0, 0.5), x[:, 1:].clamp(min=int(made.sum()))


def test_tensors_made_cast_and_written_to() -> None:
    script = torch.jit.script(Tensors())
    x = torch.randn(3, 4)
    for answer, expected in zip(interpreted(script).run_script((x.clone(),)), script(x.clone()), strict=True):
        assert answer.dtype is expected.dtype
        torch.testing.assert_close(answer, expected)


def test_state_lasts_as_long_as_a_run() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    plain = interpreted(torch.jit.script(Counting()))
    assert [plain(torch.ones(1)).item() for _ in range(2)] == [2, 2]
    assert plain.calls == 1


def test_tied_parameters_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x))

    model = Tied()
    plain = interpreted(torch.jit.script(model))
    assert plain.table.weight is plain.head.weight  # type: ignore[union-attr]
    assert plain.table.weight.data_ptr() == model.table.weight.data_ptr()  # type: ignore[union-attr,operator]


def test_an_operator_without_meaning_outside_of_torchscript_is_named_with_its_line() -> None:
    class Unusual(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.jit.wait(torch.jit.fork(torch.relu, x))

    with pytest.raises(CaptureError, match=r"TorchScript operator prim::fork at test_interpreter\.py:\d+"):
        interpreted(torch.jit.script(Unusual())).run_script((torch.ones(1),))
