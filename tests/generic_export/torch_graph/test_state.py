"""A module that ran is the module it was; what its forward writes reaches neither the archive nor the caller."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.compat import scan_operator
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.torch_graph.state import state_kept


class Counting(nn.Module):
    """Writes into itself in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(1))
        self.register_buffer("by_view", torch.zeros(2, 3))
        self.register_buffer("resized", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(3))
        self.calls, self.log, self.seen = 0, [1], {"x": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.in_place += 1
        self.assigned = self.assigned + 2
        self.by_view[0, 1:].fill_(7)
        self.weight.data.mul_(3)
        return x + self.in_place + self.assigned + self.by_view[0] + self.weight


class Messy(Counting):
    """Also leaves what torch.export does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(2)
        self.seen["y"] = 2
        self.last = x
        self.resized.resize_(100).fill_(1)
        self.weight.data = torch.zeros(5)
        self.child = nn.Linear(1, 1)
        return x


def state_of(module: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    return {name: (id(tensor), tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}


def assert_untouched(module: nn.Module, before: dict[str, tuple[int, torch.Tensor]]) -> None:
    after = state_of(module)
    assert after.keys() == before.keys()
    for name, (identity, value) in before.items():
        assert after[name][0] == identity, name
        assert torch.equal(after[name][1], value), name


@pytest.mark.parametrize("kind", [Counting, Messy])
def test_everything_is_as_it_was(kind: type[Counting]) -> None:
    module = kind()
    before, attributes = state_of(module), set(vars(module))
    with torch.no_grad(), state_kept(module):
        module(torch.zeros(3))
        assert module.calls == (1 if kind is Messy else 0)
    assert_untouched(module, before)
    assert (module.calls, module.log, module.seen) == (0, [1], {"x": 1})
    assert set(vars(module)) == attributes
    assert not list(module.children())


def test_a_script_is_as_it_was() -> None:
    class Script(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(2))
            self.register_buffer("m", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            self.m = self.m + x
            return x

    script = torch.jit.script(Script())
    with torch.no_grad(), state_kept(script):
        script(torch.ones(2))
    assert not script.n.any() and not script.m.any()


def test_running_means_are_those_of_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)).train()
    before = dict(model.named_buffers())
    values = {name: tensor.clone() for name, tensor in before.items()}
    with state_kept(model):
        model(torch.rand(3, 4))
        assert model[1].num_batches_tracked.item() == model[2].num_batches_tracked.item() == 1
        assert not torch.equal(model[1].running_mean, values["1.running_mean"])
    after = dict(model.named_buffers())
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in values)


def test_buffers_made_in_inference_mode_are_put_back_too() -> None:
    with torch.inference_mode():
        model = nn.BatchNorm1d(4)
        with state_kept(model):
            model(torch.rand(3, 4))
        assert not model.running_mean.any()


def test_loops_and_branches_run() -> None:
    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            _, sums = scan_operator()(lambda total, row: [total + row, total * 2], [x[0]], [x], [])
            return sums + torch.cond(x.sum() > 0, lambda x: x, lambda x: -x, [x])

    module, x = Looping(), torch.rand(4, 3)
    with torch.no_grad(), state_kept(module):
        assert module(x).shape == (4, 3)
    assert not module.calls.any()
    with torch.no_grad():
        assert module(x).shape == (4, 3)  # the process compiles branches as it did before


def test_a_module_that_fails_is_as_it_was() -> None:
    module = Counting()
    before = state_of(module)
    with pytest.raises(RuntimeError), torch.no_grad(), state_kept(module):
        module(torch.zeros(2))
    assert_untouched(module, before)


def test_only_what_is_written_is_copied() -> None:
    big = nn.Linear(64, 64)
    with torch.no_grad(), state_kept(big):
        pointer = big.weight.data_ptr()
        big(torch.zeros(1, 64))
    assert big.weight.data_ptr() == pointer


def test_the_archive_holds_the_state_that_the_first_call_saw(tmp_path: Path) -> None:
    module = Counting().eval()
    before = state_of(module)
    with pytest.warns(UserWarning, match=r"writes to in_place at .*test_state.py:\d+, which the archive does not keep"):
        export_model_to_nnef(
            module, (torch.rand(2, 3),), tmp_path / "counting", TractNNEF(dynamic_axes={"x": {0: "B"}})
        )
    assert_untouched(module, before)


class Cached(nn.Module):
    """Reads its buffers after it has written to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(16, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        self.cache[: x.shape[0]] = x
        rows = self.cache[: x.shape[0]] * 2 + self.count
        self.cache[0] += 1
        self.count.mul_(3)
        return rows * self.count + self.cache[0], self.cache


@pytest.mark.filterwarnings("ignore:.*writes to")
def test_a_buffer_that_is_read_after_it_is_written(tmp_path: Path) -> None:
    x, target = torch.randn(4, 3), TractNNEF(dynamic_axes={"x": {0: "N"}})
    archive = export_model_to_nnef(Cached(), x, tmp_path / "cached", target, compression_level=None)
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        for rows in (x, torch.randn(1, 3), torch.randn(9, 3)):
            for answer, expected in zip(engine.run([rows.numpy()]), Cached()(rows), strict=True):
                np.testing.assert_allclose(answer, expected.numpy(), rtol=1e-6)


def test_an_output_that_is_the_state_itself(tmp_path: Path) -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x
            return self.total

    with pytest.warns(UserWarning, match="writes to total"):
        export_model_to_nnef(Total(), (torch.rand(3),), tmp_path / "total", TractNNEF())


def test_a_trace_leaves_the_module_alone(tmp_path: Path) -> None:
    class Undecided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls if {"sum": x.sum()}["sum"] > 0 else x

    module = Undecided()
    with pytest.warns(UserWarning, match="captured with"):
        export_model_to_nnef(module, (torch.rand(3),), tmp_path / "undecided", TractNNEF())
    assert not module.calls.any()


class Hooked(nn.Module):
    """Returns a dict, to which its hooks add."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {"shift": kwargs["shift"] + 1}), with_kwargs=True
        )
        self.register_forward_hook(lambda module, args, result: {**result, "twice": result["once"] * 2})

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"once": self.linear(x) + shift}


def test_hooks_on_the_module_itself_are_exported(tmp_path: Path) -> None:
    module = Hooked()
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    archive = export_model_to_nnef(
        module,
        (torch.rand(2, 3),),
        tmp_path / "hooked",
        TractNNEF(dynamic_axes={"x": {0: "B"}}),
        kwargs={"shift": torch.rand(3)},
        compression_level=None,
    )
    text = (archive / "graph.nnef").read_text()
    assert "once = add(" in text and "twice = mul(once, 2.0)" in text and "# linear: Linear" in text
    assert (len(module._forward_hooks), len(module._forward_pre_hooks)) == hooks
