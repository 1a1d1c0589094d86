"""Products, norms, reductions and softmax in the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generic_export import TractNNEF
from tests.engine_check import check

AXES = {"input_0": {1: "T"}}


@pytest.mark.parametrize("bias", [True, False])
def test_linear_at_any_rank(bias: bool) -> None:
    layer = nn.Linear(8, 5, bias=bias)
    check(layer, (torch.randn(2, 6, 8),), (torch.randn(2, 3, 8),), dynamic_axes=AXES)
    check(layer, (torch.randn(6, 8),))
    check(layer, (torch.randn(8),))


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 4), (2, 4, 5)),
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((2, 1, 3, 4), (6, 4, 5)),
    ],
)
def test_matmul_ranks(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check(torch.matmul, tuple(torch.randn(shape) for shape in shapes))


class TransposedWeight(nn.Module):
    """A linear layer as Falcon writes it."""

    def __init__(self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight: x @ weight.T,
        lambda x, weight: torch.addmm(torch.ones(5), x, weight.t()),
        lambda x, weight: torch.einsum("bk,kn->bn", x, weight.permute(1, 0)),
        lambda x, weight: F.linear(x, weight.T.contiguous().transpose(0, 1)),
    ],
)
def test_a_product_with_a_transposed_weight_reads_the_weight_as_it_is_stored(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    assert "transpose" not in check(TransposedWeight(product), (torch.randn(3, 4),))


def test_addmm_scales() -> None:
    check(
        lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2.0),
        (torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)),
    )


@pytest.mark.parametrize("shape", [(4,), (3, 7)])
def test_layer_norm_over_the_last_axis(shape: tuple[int, ...]) -> None:
    norm = nn.LayerNorm(8)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    check(norm, (torch.randn(*shape, 8) * 3 + 2,))
    check(nn.LayerNorm(8, elementwise_affine=False), (torch.randn(*shape, 8),))


def test_rms_norm_module_and_its_written_out_form_are_one_operator() -> None:
    norm = nn.RMSNorm(8, eps=1e-5)
    nn.init.normal_(norm.weight)

    def written_out(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    for model in (norm, written_out):
        text = check(model, (torch.randn(2, 6, 8),), (torch.randn(2, 3, 8),), dynamic_axes=AXES)
        assert "tract_core_rms_norm" in text
        assert "rsqrt(" not in text


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean_last": lambda x: x.mean(-1),
    "mean_dynamic_axis": lambda x: x.mean(1, keepdim=True),
    "sum_two_axes": lambda x: x.sum((0, 2)),
    "sum_bool": lambda x: (x > 0).sum(-1),
    "amax": lambda x: x.amax((1, 2)),
    "amin_all": lambda x: x.amin(),
    "softmax": lambda x: torch.softmax(x, dim=1),
    "softmax_dtype": lambda x: torch.softmax(x, dim=-1, dtype=torch.float32),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    torch.manual_seed(0)
    check(REDUCTIONS[name], (torch.randn(2, 6, 8),), (torch.randn(2, 11, 8),), dynamic_axes=AXES)


def test_f16_means_do_not_overflow() -> None:
    # 8 * 3e4 is beyond 65504: PyTorch accumulates in f32, and so must the graph.
    check(lambda x: x.mean(-1), (torch.full((2, 8), 3e4, dtype=torch.float16),), atol=32)


class HalfBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-5)
        self.linear = nn.Linear(64, 64, bias=False)
        self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


@pytest.mark.parametrize("option", ["force_linear_accumulation_in_f32", "force_norm_in_f32"])
def test_each_f32_switch_shows_in_the_graph_and_stays_right(option: str) -> None:
    torch.manual_seed(0)
    model, args = HalfBlock(), (torch.randn(2, 64).half(),)
    plain = check(model, args, target=TractNNEF(check_io=False), atol=5e-3, rtol=5e-3)
    forced = check(model, args, target=TractNNEF(check_io=False, **{option: True}), atol=5e-3, rtol=5e-3)
    assert plain.count('to="f32"') + plain.count('acc="f32"') == 0
    assert forced.count('to="f32"') + forced.count('acc="f32"') > 0


def test_tanh_gelu_written_out_is_recognised() -> None:
    def new_gelu(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))

    text = check(new_gelu, (torch.randn(3, 8),))
    assert "tract_core_gelu_approx" in text
    assert "tanh(" not in text


def test_shared_parameter_is_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(F.silu(self.embed(ids)))

    text = check(Tied(), (torch.randint(0, 10, (1, 4)),))
    assert text.count("variable<scalar>") == 1


@pytest.mark.parametrize("axes", [{0: "B"}, {0: "B", 1: "S"}])
def test_a_product_over_rows_beside_one_repeated_row(axes: dict[int, str]) -> None:
    """DPT puts its class token beside every patch: nothing but the patches says how many rows there are."""

    class Readout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            patches = tokens[:, 1:]
            result: torch.Tensor = self.project(torch.cat((patches, tokens[:, :1].expand_as(patches)), -1))
            return result

    check(Readout(), (torch.randn(3, 5, 8),), (torch.randn(1, 5, 8),), dynamic_axes={"input_0": axes})


def test_a_product_over_rows_that_are_all_repeated() -> None:
    """PatchTSMixer puts mean and deviation of a series beside each other, once for each patch."""

    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(2, 4)

        def forward(self, mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
            columns = [value[:, :, None].repeat(1, 1, 6, 1) for value in (mean, deviation)]
            result: torch.Tensor = self.project(torch.cat(columns, -1))
            return result

    one, other = ((torch.randn(batch, 3, 1), torch.rand(batch, 3, 1)) for batch in (2, 1))
    check(Statistics(), one, other, dynamic_axes={"input_0": {0: "B"}, "input_1": {0: "B"}})
