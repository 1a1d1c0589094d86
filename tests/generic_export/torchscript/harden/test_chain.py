"""`harden_jit_for_export`: in place, in stages, with its diagnostics; a script that cannot be frozen is inlined."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export.errors import CaptureError, OptionError
from generic_export.torchscript.harden import harden_jit_for_export
from generic_export.torchscript.harden.chain import hardened_copy, stage_two
from generic_export.torchscript.harden.edits import node_count, nodes_of

STAGE_TWO = [
    "replace_size_calls_with_constants",
    "fold_constant_scalar_arithmetic",
    "fold_constant_ifs",
    "fold_tuple_index_through_tuple_construct",
    "fold_tuple_unpack_through_tuple_construct",
    "strip_prim_data",
    "strip_assertion_ifs",
    "fold_data_dependent_ifs",
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dim() == 3:
            x = x.flatten(0, 1)
        return self.linear(x), x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        assert x.size(-1) == 4, "four features"
        y, rest = self.block(x)
        if bool(y.sum() > 1e9):
            y = y * 0
        return (y.data + rest) * scale


def test_the_stages_run_in_order() -> None:
    assert list(stage_two()) == STAGE_TWO


def test_a_script_is_frozen_and_hardened_in_place() -> None:
    model = Model().eval()
    script = torch.jit.script(model)
    before, found = node_count(script.inlined_graph), {}
    x = torch.randn(3, 4)
    script(x)  # compiled before: what was cached then must not answer later
    with pytest.warns(UserWarning, match="fixed to the outcome"):
        result = harden_jit_for_export(script, x, diagnostics=found)
    assert result is script
    assert found["froze"] is True and list(found) == ["froze", *STAGE_TWO]
    assert found["replace_size_calls_with_constants"] == 2 and found["fold_data_dependent_ifs"] == 1
    assert node_count(script.graph) < before and not nodes_of(script.graph, "prim::If", "prim::CallMethod")
    torch.testing.assert_close(script(x), model(x))
    assert not list(script.parameters())


def test_the_same_class_scripted_again_is_not_hardened() -> None:
    first, second = torch.jit.script(Model().eval()), torch.jit.script(Model().eval())
    graph = str(second.graph)
    harden_jit_for_export(first, (torch.randn(3, 4), 3.0))
    assert str(second.graph) == graph == str(torch.jit.script(Model().eval()).graph)


def test_a_script_in_training_is_inlined_after_a_warning() -> None:
    model = Model().train()
    script, found = torch.jit.script(model), {}
    x = torch.randn(3, 4)
    with pytest.warns(
        UserWarning, match=r"Model cannot be frozen \(.*eval mode.*\); its submodules are inlined instead"
    ):
        harden_jit_for_export(script, (x,), diagnostics=found)
    assert found["froze"] is False and found["inline_unresolvable_submodules"] >= 1
    assert not nodes_of(script.graph, "prim::CallMethod", "prim::If")
    torch.testing.assert_close(script(x), model(x))
    assert [name for name, _ in script.named_parameters()] == ["block.linear.weight", "block.linear.bias"]


def test_freezing_can_be_left_out_without_a_warning() -> None:
    script, found = torch.jit.script(Model()), {}
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*frozen.*")
        harden_jit_for_export(script, x, freeze=False, diagnostics=found)
    assert found["froze"] is False
    assert len(list(script.parameters())) == 2


def test_a_plain_script_has_nothing_to_inline() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)

    found: dict[str, int | bool] = {}
    harden_jit_for_export(torch.jit.script(Plain()), torch.randn(3), freeze=False, diagnostics=found)
    assert found == {"froze": False} | dict.fromkeys(STAGE_TWO, 0)


def test_traced_and_loaded_modules_are_hardened_in_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))).eval()
    x = torch.randn(3, 4)
    traced = torch.jit.trace(model, x)
    torch.jit.save(traced, tmp_path / "traced.pt")
    for script in (traced, torch.jit.load(tmp_path / "traced.pt")):
        assert harden_jit_for_export(script, x) is script
        assert not nodes_of(script.graph, "prim::CallMethod", "prim::GetAttr")
        torch.testing.assert_close(script(x), model(x))


def test_a_frozen_script_is_hardened_too() -> None:
    model = Model().eval()
    found: dict[str, int | bool] = {}
    frozen = torch.jit.freeze(torch.jit.script(model))
    x = torch.randn(3, 4)
    harden_jit_for_export(frozen, x, diagnostics=found)
    assert found["froze"] is True
    torch.testing.assert_close(frozen(x), model(x))


def test_a_copy_leaves_the_script_and_decides_nothing_by_sizes() -> None:
    class OnSize(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.size(0) > 2 else x

    script = torch.jit.script(OnSize().eval())
    graph = str(script.graph)
    copy = hardened_copy(script, torch.ones(3), keep_sizes=True)
    assert str(script.graph) == graph
    torch.testing.assert_close(copy(torch.ones(1)), torch.ones(1))


def test_what_is_no_script_is_refused() -> None:
    with pytest.raises(OptionError, match="model is a Linear, not a ScriptModule"):
        harden_jit_for_export(nn.Linear(2, 2), torch.randn(2))  # type: ignore[arg-type]


def test_arguments_that_the_forward_does_not_take_are_refused_and_nothing_changes() -> None:
    script = torch.jit.script(Model().eval())
    graph = str(script.graph)
    with pytest.raises(OptionError, match=r"Model\.forward\(x, scale=2\.0\) does not accept the example arguments"):
        harden_jit_for_export(script, ())
    assert str(script.graph) == graph


def test_a_model_that_fails_on_the_example_says_where() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.view(2, 2)
            return y * 2 if bool(x.sum() > 0) else y

    script = torch.jit.script(Fails().eval())
    graph = str(script.graph)
    with pytest.raises(
        CaptureError, match=r"Fails at test_chain\.py:\d+: cannot be run on the example inputs: .*invalid"
    ):
        harden_jit_for_export(script, torch.ones(3))
    assert str(script.graph) == graph
