"""What is patched for the length of a capture is gone after it, also from what PyTorch remembers."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._meta_registrations import pooling_output_shape_pad_lr
from torch.fx.experimental.sym_node import SymNode

from generic_export import TractNNEF
from generic_export.capture import capture
from generic_export.compat import size_arithmetic_remembered
from generic_export.torch_graph.capture.tracer import TorchModuleTracer
from generic_export.torch_graph.decompose.patches import _windows, capture_patches
from generic_export.torch_graph.source_lines import short_stacks, source_in_trace
from tests.engine_check import check

_FIRST_USE_INSIDE = """
import torch
from generic_export.torch_graph.decompose.patches import capture_patches
with capture_patches(), torch.device("meta"):
    torch.empty(1)
with torch.device("meta"):
    print(torch.tensor([1.0]).device, torch.linspace(0, 1, 3).device)
"""


def test_device_contexts_know_the_functions_that_were_put_back() -> None:
    """PyTorch lists what a device context acts on at its first use: a fresh process, in which that is inside a capture."""
    answer = subprocess.run([sys.executable, "-c", _FIRST_USE_INSIDE], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["meta", "meta"]


def test_functions_are_put_back() -> None:
    before = torch.tensor, torch.linspace, torch.Tensor.__getitem__
    with capture_patches():
        assert torch.tensor is not before[0]
    assert (torch.tensor, torch.linspace, torch.Tensor.__getitem__) == before
    assert torch.tensor([torch.tensor(1)]).tolist() == [1]


@pytest.mark.parametrize("numbers", [True, [1, 2], [[4, 3], [2, 1]]])
def test_numbers_of_any_depth_keep_their_values(numbers: Any) -> None:
    class Written(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor(numbers, dtype=torch.float32, device=x.device)

    graph = capture(Written(), (torch.ones(2, 2, device="meta"),), TractNNEF())
    assert not graph.constants


class _Windows(torch.nn.Module):
    """Sizes of several forms: halves, sums, a remainder, a comparison that is decided."""

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([past, x], dim=1)
        halves = whole[:, : whole.shape[1] // 2], whole[:, whole.shape[1] // 2 :]
        kept = x if whole.shape[1] >= x.shape[1] else past
        scores = kept @ whole.transpose(1, 2)
        return scores.flatten(1).sum(1) + halves[0].sum((1, 2)) * halves[1].shape[1]


def _program() -> torch.export.ExportedProgram:
    batch, length, past = (torch.export.Dim(name) for name in ("B", "S", "P"))
    args = torch.ones(2, 6, 4), torch.ones(2, 10, 4)
    return torch.export.export(_Windows(), args, dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: past}))


def _described(program: torch.export.ExportedProgram) -> list[tuple[str, str, str]]:
    return [
        (
            node.format_node() or "",
            str(getattr(node.meta.get("val"), "shape", "")),
            source_in_trace(node.meta.get("stack_trace", "")),
        )
        for node in program.graph.nodes
    ]


def test_what_is_computed_once_is_what_is_computed_each_time() -> None:
    """The same operators, sizes and lines of the model, with fewer computations."""
    plain = _program()
    add, asked = SymNode._add, 0  # type: ignore[attr-defined]

    def counted(node: SymNode, other: SymNode) -> SymNode:
        nonlocal asked
        asked += 1
        return add(node, other)

    SymNode._add = counted  # type: ignore[attr-defined]
    try:
        _program()
        each_time, asked = asked, 0
        with size_arithmetic_remembered(), short_stacks():
            once = _program()
    finally:
        SymNode._add = add  # type: ignore[attr-defined]
    assert _described(once) == _described(plain)
    assert any(source.startswith("test_patches.py:") for _, _, source in _described(once))
    assert 0 < asked < each_time


def test_arithmetic_of_sizes_is_put_back() -> None:
    before = {name: getattr(SymNode, name) for name in ("_add", "_mul", "_eq")}
    with size_arithmetic_remembered():
        assert all(getattr(SymNode, name) is not compute for name, compute in before.items())
    assert {name: getattr(SymNode, name) for name in before} == before


class _Halves(nn.Module):
    """Two pictures through one network at once, as networks of optical flow do."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        first, second = torch.chunk(torch.cat([one, other]), chunks=2, dim=0)
        return first - second * one


@pytest.mark.parametrize("batch", [2, 3])
def test_batches_that_were_put_together_come_apart(batch: int) -> None:
    axes = {"input_0": {0: "B"}, "input_1": {0: "B"}}
    shapes = [(torch.rand(size, 3), torch.rand(size, 3)) for size in (batch, 1, 5)]
    check(_Halves(), shapes[0], *shapes[1:], dynamic_axes=axes)


class _OtherWayRound(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        first, second = value.chunk(2, 1)
        return torch.cat([second, first], 1)


@pytest.mark.parametrize("length", [7, 8])
def test_chunks_of_a_length_may_differ(length: int) -> None:
    tracer = TorchModuleTracer(
        _OtherWayRound(),
        args=(torch.rand(2, length),),
        input_names=["value"],
        dynamic_axes={"value": {1: "S"}},
        conditional=True,
    )
    (condition,) = tracer.trace().conditions
    assert condition.relation == "S >= 2"  # of one place there is one chunk


def test_windows_of_pools_are_counted_as_pytorch_counts_them() -> None:
    """For plain numbers, the count is that of PyTorch."""
    cases = itertools.product(range(1, 30), range(1, 6), range(1, 7), range(1, 3), (False, True))
    for size, kernel, stride, dilation, ceil_mode in cases:
        for padding in range((dilation * (kernel - 1) + 1) // 2 + 1):
            arguments = (kernel, padding, padding, stride, dilation)
            theirs = pooling_output_shape_pad_lr(size, *arguments, ceil_mode)
            assert theirs <= 0 or _windows(size, *arguments, ceil_mode) == theirs
