"""Rotary embeddings are recognised as models write them, and nothing else is."""

from __future__ import annotations

import torch

from generic_export.torch_graph import TorchModuleTracer
from generic_export.torch_graph.fusion import apply_fusions
from kvcache import fuse_rotary_embedding
from tests.engine_check import Function, check


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def written_out(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return (x * cos) + (rotate_half(x) * sin)


def args(steps: int = 5) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, 2, steps, 8), torch.randn(1, 1, steps, 8), torch.randn(1, 1, steps, 8)


def targets_after_fusion(function) -> set[str]:
    graph = TorchModuleTracer(Function(function), args=args()).trace()
    return {str(op.target) for op in apply_fusions(graph, [fuse_rotary_embedding]).ops}


def test_the_usual_form_becomes_one_operator() -> None:
    assert targets_after_fusion(written_out) == {"t2n.rotary_embedding.default"}


def test_factors_may_stand_in_either_order() -> None:
    assert targets_after_fusion(lambda x, c, s: c * x + s * rotate_half(x)) == {"t2n.rotary_embedding.default"}


def test_a_different_rotation_is_left_alone() -> None:
    def backwards(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :4], x[..., 4:]
        return x * cos + torch.cat((second, -first), dim=-1) * sin

    def uneven(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * sin

    def of_another_tensor(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos + rotate_half(x + 1) * sin

    for function in (backwards, uneven, of_another_tensor):
        assert "t2n.rotary_embedding.default" not in targets_after_fusion(function)


def test_the_operator_is_the_written_out_form() -> None:
    values = args()
    torch.testing.assert_close(torch.ops.t2n.rotary_embedding(*values), written_out(*values))


def test_in_the_engine_at_two_lengths_and_mixed_element_types() -> None:
    class Rotary(torch.nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return torch.ops.t2n.rotary_embedding(x, cos, sin)

    axes = {f"input_{index}": {2: "S"} for index in range(3)}
    text = check(Rotary(), args(5), args(9), dynamic_axes=axes)
    assert "tract_transformers_apply_rope" in text
    x, cos, sin = args(5)
    check(Rotary(), (x.half(), cos, sin), dynamic_axes=axes, atol=1e-3)
