"""Programs whose in-place operators are edited away, against the module itself; and those that are left to PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from generic_export.compat import schema_of
from generic_export.torch_graph.decompose.in_place import without_writes
from generic_export.torch_graph.decompose.patches import capture_patches
from tests.engine_check import check


class _Parts(nn.Module):
    """A new tensor filled part by part, as latent attention makes its keys."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x.new_empty(x.shape[0], 6)
        made[:, :4].copy_(x[:, :4])
        made[..., 4:].copy_(x[:, 4:5].expand(-1, 2))
        made[0] = 7.0
        return made * 2


class _Router(nn.Module):
    """Weights of the chosen ones, divided by their sum in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.sigmoid()
        mask = torch.zeros_like(scores)
        mask.scatter_(1, scores.topk(2)[1], 1)
        values = scores.masked_fill(mask == 0, 0.0).topk(3)[0]
        values /= values.sum(-1, keepdim=True)
        return values


class _Result(nn.Module):
    """What is written is returned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y += 1
        return y


class _Mixed(nn.Module):
    """A row that takes parts of other rows, and is read as the view that it is, as rotary embeddings of images do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.stack((x, x * 2, x * 3)).exp()
        first = rows[0]
        for row in (1, 2):
            first[..., row::3] = rows[row, ..., row::3]
        return first.sin() + rows.sum(0)


class _Predicted(nn.Module):
    """A permuted product that is added to, and a part of it once more, by `+=` on what an index gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = (x @ x.new_ones(6, 6)).permute(1, 0)
        made += 1
        made = made.contiguous().type_as(x)
        other = made[0].clone()
        made[1:] += other
        return made.permute(1, 0)


class _Convolved(nn.Module):
    """What layers of vision models give, changed in place, as most of these do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, (1, 3), padding=(0, 1)), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.out = nn.Conv2d(4, 4, 1)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.hardtanh_(F.max_pool2d(self.stem(x[:, None, None]), (1, 2)), 0.0, 0.5)
        z = self.out(y)
        z += y
        wide = F.interpolate(z, scale_factor=2.0).mul_(2)
        return F.adaptive_avg_pool2d(wide, (1, 1)).neg_().flatten(1)


class _PartOfALaterWrite(nn.Module):
    """A part that was written to is read after a write to the whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        part = y[:, :2]
        part += 1
        y.mul_(3)
        return part.sin()


class _SeenThroughAView(nn.Module):
    """A view made before the write shows it after: nothing that the graph's own edges tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        first = y[:, :2]
        y.mul_(3)
        return first + 1


class _Input(nn.Module):
    """The caller's own tensor is written to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


class _NarrowSum(nn.Module):
    """`+=` keeps float64 out of a sum that `+` would widen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y += x.double() * 1e-3
        return y


def _program(model: nn.Module, x: torch.Tensor) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model, (x,), dynamic_shapes=({0: Dim("N")},), strict=False)


def _writes(program: torch.export.ExportedProgram) -> list[str]:
    operators = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [str(operator) for operator in operators if schema_of(operator).is_mutable]


@pytest.mark.parametrize(
    "model",
    [_Parts(), _Router(), _Result(), _Mixed(), _Predicted(), _Convolved()],
    ids=lambda model: type(model).__name__,
)
def test_writes_to_tensors_of_the_programs_own_are_edited_away(model: nn.Module) -> None:
    program = _program(model, torch.randn(5, 6))
    assert _writes(program)
    without_writes(program)
    assert not _writes(program)
    for rows in (3, 8):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(program.module()(x.clone()), model(x.clone()))


@pytest.mark.parametrize("model", [_SeenThroughAView(), _Input(), _NarrowSum()], ids=lambda model: type(model).__name__)
def test_what_the_graph_does_not_tell_is_left_to_pytorch(model: nn.Module) -> None:
    program = _program(model, torch.randn(5, 6))
    before = _writes(program)
    without_writes(program)
    assert before and _writes(program) == before
    x = torch.randn(4, 6)
    torch.testing.assert_close(program.module()(x.clone()), model(x.clone()))


class _WideConstant(nn.Module):
    """A number in float64, made by the model itself, that a choice in float32 takes; and a write beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y += 1
        y[:, 0] = torch.tensor(0.25, dtype=torch.float64)
        low = torch.tensor(-0.1, dtype=torch.float64)
        return torch.where(x > 0, y, low) + torch.where(x < 0, low * 3, y).masked_fill(x > 1, low)


@pytest.mark.parametrize(("model", "left"), [(_WideConstant(), 0), (_PartOfALaterWrite(), 1)])
def test_what_is_left_and_what_is_edited_say_the_same(model: nn.Module, left: int) -> None:
    program = _program(model, torch.randn(5, 6))
    without_writes(program)
    assert len(_writes(program)) == left
    x = torch.randn(3, 6)
    torch.testing.assert_close(program.module()(x.clone()), model(x.clone()))


def test_numbers_in_float64_reach_a_choice_in_float32() -> None:
    graph = check(_WideConstant(), (torch.randn(5, 6),), (torch.randn(3, 6),), dynamic_axes={"input_0": {0: "N"}})
    for line in graph.splitlines():
        assert "= select(" not in line or "# f32" in line


class _Blocks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            with torch.no_grad():
                x = x.sin()
            with torch.enable_grad():
                x = x.cos()
        return x


def test_no_grad_leaves_no_trace_in_a_capture_and_works_after_it() -> None:
    with capture_patches():
        program = _program(_Plain(), torch.randn(5, 6))
    assert not [node for node in program.graph.nodes if node.op == "get_attr"]
    with torch.enable_grad():
        with torch.no_grad():
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()
    with capture_patches():
        x = torch.randn(5, 6)
        assert torch.equal(_program(_Blocks(), x).module()(x), _Blocks()(x))


class _Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        return y.cos()
