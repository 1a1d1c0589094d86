"""Our recurrences: what transformers computes over a whole sequence, and the same in pieces of any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.rwkv import modeling_rwkv

from generic_export.errors import CaptureError
from kvcache.forms.rwkv import weighted_average
from kvcache.recurrent import explicit_recurrences
from kvcache.recurrent.delta_rule import gated_delta_rule
from kvcache.recurrent.mamba import selective_scan, state_space_dual
from kvcache.recurrent.short_conv import short_convolution
from tests.engine_check import check

STEPS, HEADS, WIDTH, SIZE, GROUPS = 11, 4, 6, 5, 2
Piece = Callable[[int, int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def in_pieces(run: Piece, ends: tuple[int, ...], axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run positions 0..ends[-1] piece by piece, handing on the state."""
    outputs, state, start = [], None, 0
    for end in ends:
        output, state = run(start, end, state)
        outputs.append(output)
        start = end
    assert state is not None
    return torch.cat(outputs, axis), state


def same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


PIECES = [(STEPS,), (4, 5, STEPS), tuple(range(1, STEPS + 1))]


@pytest.mark.parametrize("ends", PIECES)
def test_selective_scan(ends: tuple[int, ...]) -> None:
    x, dt, z = (torch.randn(2, WIDTH, STEPS) for _ in range(3))
    rate, b, c = -torch.rand(WIDTH, SIZE), torch.randn(2, SIZE, STEPS), torch.randn(2, SIZE, STEPS)
    options: dict[str, Any] = {
        "D": torch.randn(WIDTH),
        "delta_bias": torch.randn(WIDTH),
        "delta_softplus": True,
        "return_last_state": True,
    }
    expected = modeling_mamba.mamba_selective_scan(x, dt, rate, b, c, z=z, **options)

    def run(start: int, end: int, past: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x_, dt_, b_, c_, z_ = (tensor[..., start:end] for tensor in (x, dt, b, c, z))
        result = selective_scan(past, x_, dt_, rate, b_, c_, z=z_, **options)
        assert isinstance(result, tuple)
        return result

    same(in_pieces(run, ends, 2), expected)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.2, 0.9)])
@pytest.mark.parametrize("ends", PIECES)
def test_state_space_dual(ends: tuple[int, ...], limit: tuple[float, float]) -> None:
    x, dt = torch.randn(2, STEPS, HEADS, WIDTH), torch.randn(2, STEPS, HEADS)
    rate, b, c = -torch.rand(HEADS), torch.randn(2, STEPS, GROUPS, SIZE), torch.randn(2, STEPS, GROUPS, SIZE)
    options: dict[str, Any] = {
        "D": torch.randn(HEADS),
        "dt_bias": torch.randn(HEADS),
        "dt_softplus": True,
        "dt_limit": limit,
        "return_final_states": True,
    }
    start_state = torch.randn(2, HEADS, WIDTH, SIZE)
    expected = modeling_mamba2.mamba2_chunk_scan(x, dt, rate, b, c, chunk_size=4, initial_states=start_state, **options)

    def run(start: int, end: int, past: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x_, dt_, b_, c_ = (tensor[:, start:end] for tensor in (x, dt, b, c))
        result = state_space_dual(start_state if past is None else past, x_, dt_, rate, b_, c_, **options)
        assert isinstance(result, tuple)
        return result

    same(in_pieces(run, ends, 1), expected)


@pytest.mark.parametrize("ends", PIECES)
@pytest.mark.parametrize("per_channel", [False, True])
def test_gated_delta_rule(ends: tuple[int, ...], per_channel: bool) -> None:
    key_heads = HEADS if per_channel else GROUPS
    query, key = torch.randn(2, STEPS, key_heads, SIZE), torch.randn(2, STEPS, key_heads, SIZE)
    value, beta = torch.randn(2, STEPS, HEADS, WIDTH), torch.rand(2, STEPS, HEADS)
    decay = -torch.rand(2, STEPS, HEADS, *((SIZE,) if per_channel else ()))
    reference = (
        modeling_kimi_linear.chunk_kimi_delta_attention
        if per_channel
        else modeling_qwen3_next.torch_chunk_gated_delta_rule
    )
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = reference(query, key, value, g=decay, beta=beta, chunk_size=4, **options)

    def run(start: int, end: int, past: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [tensor[:, start:end] for tensor in (query, key, value, decay, beta)]
        output, state = gated_delta_rule(None, *parts, initial_state=past, **options)
        assert state is not None
        return output, state

    same(in_pieces(run, ends, 1), expected)


@pytest.mark.parametrize("ends", PIECES)
def test_rwkv_average_starts_from_zeros(ends: tuple[int, ...]) -> None:
    """transformers starts from an exponent of -1e38; a state of zeros means the same to us."""
    decay, bonus = torch.randn(WIDTH), torch.randn(WIDTH)
    key, value = torch.randn(2, STEPS, WIDTH) * 4, torch.randn(2, STEPS, WIDTH)
    output, state = modeling_rwkv.rwkv_linear_attention_cpu(decay, bonus, key, value, return_state=True)

    def run(start: int, end: int, past: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        states = list(torch.zeros(3, 2, WIDTH) if past is None else past)
        found, after = weighted_average(decay, bonus, key[:, start:end], value[:, start:end], states)
        assert after is not None
        return found, torch.stack(list(after))

    same(in_pieces(run, ends, 1), (output, torch.stack(state)))


def test_short_convolution_sees_the_columns_before() -> None:
    kernel = 4
    x, weight, bias = torch.randn(2, WIDTH, STEPS), torch.randn(WIDTH, kernel), torch.randn(WIDTH)
    expected = modeling_mamba.causal_conv1d_fn(x, weight, bias, activation="silu")
    first = short_convolution(torch.cat([torch.zeros(2, WIDTH, kernel), x[..., :5]], -1), weight, bias, "silu")
    rest = short_convolution(x[..., 5 - kernel :], weight, bias, "silu")
    torch.testing.assert_close(torch.cat([first[..., -5:], rest[..., -(STEPS - 5) :]], -1), expected)


class Scan(torch.nn.Module):
    """A selective scan alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.nn.Parameter(-torch.rand(WIDTH, SIZE))

    def forward(self, x: torch.Tensor, dt: torch.Tensor, bc: torch.Tensor, past: torch.Tensor) -> Any:
        b, c = bc.chunk(2, dim=1)
        return selective_scan(past, x, dt, self.rate, b, c, delta_softplus=True, return_last_state=True)


SCAN_INPUTS = (
    torch.randn(1, WIDTH, STEPS),
    torch.randn(1, WIDTH, STEPS),
    torch.randn(1, 2 * SIZE, STEPS),
    torch.randn(1, WIDTH, SIZE),
)
SCAN_AXES = {f"input_{index}": {2: "S"} for index in range(3)}


def test_a_recurrence_is_one_loop_and_right_at_other_lengths() -> None:
    shorter = [(*(tensor[..., :steps] for tensor in SCAN_INPUTS[:3]), SCAN_INPUTS[3]) for steps in (1, 3)]
    text = check(Scan(), SCAN_INPUTS, *shorter, dynamic_axes=SCAN_AXES)
    assert text.count("tract_core_scan(") == 1


def test_transformers_has_its_own_functions_back_after_the_block() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4)
    model = MambaForCausalLM(config)
    before = modeling_mamba.mamba_selective_scan, modeling_mamba.causal_conv1d_fn
    with explicit_recurrences(model, lambda rank: None):
        assert modeling_mamba.causal_conv1d_fn is short_convolution
        assert modeling_mamba.mamba_selective_scan is not before[0]
    assert (modeling_mamba.mamba_selective_scan, modeling_mamba.causal_conv1d_fn) == before


def test_a_recurrence_under_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that renames it would else have it captured as it is: right for the example's length alone."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4, num_heads=4, head_dim=4, n_groups=1
    )
    model = Mamba2ForCausalLM(config)
    renamed = modeling_mamba2.mamba2_chunk_scan
    monkeypatch.delattr(modeling_mamba2, "mamba2_chunk_scan")
    monkeypatch.setattr(modeling_mamba2, "chunked_scan", renamed, raising=False)
    said = r"Mamba2Mixer at backbone\.layers\.0\.mixer: .*modeling_mamba2 has no recurrence that is known"
    with pytest.raises(CaptureError, match=said) as refused, explicit_recurrences(model, lambda rank: None):
        pass
    assert refused.value.hint == "Use transformers 5.15 to 5.24, with which it was tried."
