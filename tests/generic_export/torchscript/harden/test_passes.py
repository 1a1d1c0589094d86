"""Each pass alone: what it removes, what it leaves, and that the script still computes the same."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from generic_export.torchscript import harden
from generic_export.torchscript.harden.edits import nodes_of

Pass = Callable[..., int]

ALL_PASSES = [
    harden.replace_size_calls_with_constants,
    harden.fold_constant_scalar_arithmetic,
    harden.fold_constant_ifs,
    harden.fold_tuple_index_through_tuple_construct,
    harden.fold_tuple_unpack_through_tuple_construct,
    harden.strip_prim_data,
    harden.strip_assertion_ifs,
    harden.fold_data_dependent_ifs,
    harden.inline_unresolvable_submodules,
]


def scripted(module: nn.Module) -> torch.jit.ScriptModule:
    """Return a script with graphs of its own: scripts of one class share theirs."""
    script: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(torch.jit.script(module).save_to_buffer()))
    return script


def count(model: torch.jit.ScriptModule, *names: str) -> int:
    return len(nodes_of(model.graph, *names))


def edited(module: nn.Module, run: Pass, *args: torch.Tensor) -> tuple[torch.jit.ScriptModule, int]:
    """Script a module, run one pass, and check that it computes on the example what it did."""
    script = scripted(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        changes = run(script, args)
    script.graph.lint()
    torch.testing.assert_close(script(*args), module(*args))
    return script, changes


class Plain(nn.Module):
    """Nothing that a pass is for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1


@pytest.mark.parametrize("run", ALL_PASSES, ids=lambda run: run.__name__)
def test_nothing_changes_where_the_pattern_is_absent(run: Pass) -> None:
    script = scripted(Plain())
    before = str(script.graph)
    assert run(script, (torch.randn(2, 3),)) == 0
    assert str(script.graph) == before


class Sizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3 and x.size(0) > 0 and len(x) < 9 and x.numel() > 1:
            x = x.flatten(0, 1)
        for _ in range(x.size(1)):
            x = x + 1
        return x.view(x.size(0), 2, -1)


def test_sizes_that_decide_are_constants_and_those_of_shapes_stay() -> None:
    script, changes = edited(Sizes(), harden.replace_size_calls_with_constants, torch.randn(2, 3, 4))
    assert changes == 5
    assert count(script, "aten::dim", "aten::len", "aten::numel") == 0
    (left,) = nodes_of(script.graph, "aten::size")
    assert {use.user.kind() for use in left.output().uses()} == {"prim::ListConstruct"}


def test_ranks_only_leaves_sizes() -> None:
    script = scripted(Sizes())
    assert harden.replace_size_calls_with_constants(script, torch.randn(2, 3, 4), ranks_only=True) == 1
    assert count(script, "aten::dim") == 0 and count(script, "aten::size", "aten::len", "aten::numel") == 5


class SizeOfEach(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for n in range(3):
            if y[n:].size(0) > 1:
                y = y * 2
        return y


def test_a_size_that_differs_between_rounds_of_a_loop_stays() -> None:
    script, changes = edited(SizeOfEach(), harden.replace_size_calls_with_constants, torch.randn(3, 4))
    assert changes == 0 and count(script, "aten::size") == 1


class CarriedSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        for _ in range(2):
            n = n + 1
        return torch.zeros(n) + x.sum()


def test_a_size_that_a_loop_carries_into_a_shape_stays() -> None:
    _, changes = edited(CarriedSize(), harden.replace_size_calls_with_constants, torch.randn(3, 4))
    assert changes == 0


class Arithmetic(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = (7 // x.dim() + 3) % 4
        if k in [1, 2, 3] and k != 1 and x.dim() * 2 >= 4:
            x = x + 1
        return x


def test_arithmetic_on_constants_is_its_result() -> None:
    def ranks_first(script: torch.jit.ScriptModule, args: tuple[torch.Tensor, ...]) -> int:
        harden.replace_size_calls_with_constants(script, args)
        return harden.fold_constant_scalar_arithmetic(script)

    script, changes = edited(Arithmetic(), ranks_first, torch.randn(3, 2))
    assert changes == 7  # floordiv, add, remainder, contains, ne, mul, ge
    assert count(script, "aten::floordiv", "aten::remainder", "aten::__contains__", "aten::ne", "aten::ge") == 0


class DivisionByZero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 7:
            x = x * (1 // 0)
        return x


def test_arithmetic_that_would_raise_stays_where_it_may_never_be_reached() -> None:
    script, changes = edited(DivisionByZero(), harden.fold_constant_scalar_arithmetic, torch.randn(3))
    assert changes == 0 and count(script, "aten::floordiv") == 1


class WrittenList(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [1, 2]
        sizes.append(3)
        return x * len(sizes)


def test_a_list_that_is_written_to_is_no_constant() -> None:
    _, changes = edited(WrittenList(), harden.fold_constant_scalar_arithmetic, torch.randn(3))
    assert changes == 0


def inlined_first(run: Pass) -> Pass:
    def both(script: torch.jit.ScriptModule, args: object) -> int:
        harden.inline_unresolvable_submodules(script)
        return run(script, args)

    return both


class Switched(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on = on
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on:
            if not self.on:
                x = x - 1
            y = self.inner(x)
        else:
            y = x
        return y


@pytest.mark.parametrize("on", [True, False])
def test_an_if_on_a_constant_is_the_branch_that_it_takes(on: bool) -> None:
    def folded_first(script: torch.jit.ScriptModule, args: object) -> int:
        harden.fold_constant_scalar_arithmetic(script)
        return harden.fold_constant_ifs(script)

    script, changes = edited(Switched(on), inlined_first(folded_first), torch.randn(2, 3))
    assert changes == (2 if on else 1) and count(script, "prim::If") == 0
    assert count(script, "aten::linear") == int(on)


def test_calls_are_inlined_and_plain_attributes_read() -> None:
    script, changes = edited(Switched(True), harden.inline_unresolvable_submodules, torch.randn(2, 3))
    assert changes == 3  # the call of `inner`, and `on` twice
    assert count(script, "prim::CallMethod", "prim::CallFunction") == 0
    assert {node.s("name") for node in nodes_of(script.graph, "prim::GetAttr")} == {"inner", "weight", "bias"}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def test_an_attribute_that_is_written_is_not_read_ahead() -> None:
    script, changes = edited(Counting(), harden.inline_unresolvable_submodules, torch.randn(3))
    assert changes == 0 and count(script, "prim::GetAttr") == 2


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x * 2


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = self.pair(x)
        first, second = pair
        return pair[1] - first + second


def test_elements_of_a_tuple_are_what_it_was_made_of() -> None:
    run = inlined_first(harden.fold_tuple_index_through_tuple_construct)
    script, changes = edited(Tuples(), run, torch.randn(3))
    assert changes == 1 and count(script, "prim::TupleIndex") == 0 and count(script, "prim::TupleUnpack") == 1


def test_an_unpacked_tuple_is_its_elements() -> None:
    run = inlined_first(harden.fold_tuple_unpack_through_tuple_construct)
    script, changes = edited(Tuples(), run, torch.randn(3))
    assert changes == 1 and count(script, "prim::TupleUnpack") == 0 and count(script, "prim::TupleIndex") == 1


class Data(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.data * 2 + torch.relu(x).data


def test_data_of_a_tensor_is_the_tensor() -> None:
    script, changes = edited(Data(), harden.strip_prim_data, torch.randn(3))
    assert changes == 2 and count(script, "prim::data") == 0


class Asserts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.sum() < 1e6, "too large"
        if bool(x.max() > 1e6):
            raise ValueError("too large")
        if bool(x.sum() > 0):
            x = x * 2
        return x


def test_checks_are_gone_and_other_ifs_stay() -> None:
    script, changes = edited(Asserts(), harden.strip_assertion_ifs, torch.randn(3))
    assert changes == 2 and count(script, "prim::RaiseException") == 0 and count(script, "prim::If") == 1


class OnData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            y = x * 2
            if bool(x.sum() > 100):
                y = y + 1
        else:
            y = x - 1
        return y


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_if_on_data_is_the_branch_that_the_example_takes(sign: float) -> None:
    script, _ = edited(OnData(), harden.fold_data_dependent_ifs, torch.ones(3) * sign)
    assert count(script, "prim::If") == 0
    other = -torch.ones(3) * sign
    torch.testing.assert_close(script(other), other * 2 if sign > 0 else other - 1)


def test_the_user_is_told_which_line_the_example_decided() -> None:
    script = scripted(OnData())
    with pytest.warns(
        UserWarning, match=r"OnData: an `if` on data is fixed .* at test_passes\.py:\d+ \(true\), .*\(false\)"
    ):
        harden.fold_data_dependent_ifs(script, torch.ones(3))


class Both(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0) and bool(x.max() > 0):
            x = x * 2
        return x


def test_a_condition_that_another_if_makes_is_evaluated_too() -> None:
    script, changes = edited(Both(), harden.fold_data_dependent_ifs, torch.ones(3))
    assert changes == 2 and count(script, "prim::If") == 0


class BothWays(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in range(x.size(0)):
            if bool(x[n] > 0):
                x = x * 2
        return x


def test_an_if_that_the_example_takes_both_ways_stays() -> None:
    script, changes = edited(BothWays(), harden.fold_data_dependent_ifs, torch.tensor([1.0, -1.0]))
    assert changes == 0 and count(script, "prim::If") == 1


class OnSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(0) > 2:
            x = x * 2
        return x


def test_conditions_on_sizes_can_be_kept() -> None:
    script = scripted(OnSize())
    assert harden.fold_data_dependent_ifs(script, torch.ones(3), keep_sizes=True) == 0
    with pytest.warns(UserWarning, match="fixed to the outcome"):
        assert harden.fold_data_dependent_ifs(script, torch.ones(3)) == 1
