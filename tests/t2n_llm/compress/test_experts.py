"""Stacked experts: each is weighed by the tokens routed to it, and starved ones are left to the data-free search."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from generic_export.weights.values import read_tensor
from quant.gptq import GptqQuantizer
from quant.imatrix import ImatrixQuantizer, StatisticsAccumulator
from quant.packing import unpack_q4_0
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.calibrate import FEWEST_TOKENS, calibrate
from t2n_llm.compress.experts import ExpertWatch, expert_parameters, one_expert_at_a_time, pooled, quantize_experts
from t2n_llm.compress.observe import observe
from t2n_llm.compress.walk import first_inputs, layer_runs, open_walkable
from tests.t2n_llm.compress.test_calibrate import _mixtral, load

STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts, two for each token; random."""
    return _mixtral(tmp_path_factory.mktemp("mixtral"))


IDS = torch.randint(3, 160, (3, 40), generator=torch.Generator().manual_seed(0))


def test_each_expert_sees_the_tokens_routed_to_it(mixtral: Path) -> None:
    model = open_walkable(mixtral)
    hidden, calls = first_inputs(model, IDS)
    with model.resident(0) as layer:
        watch = ExpertWatch({name: layer.get_parameter(name) for name in STACKS}, frozenset(STACKS[:1]))
        assert set(expert_parameters(layer)) == set(STACKS)
        routed: list[tuple[torch.Tensor, torch.Tensor]] = []
        experts = layer.get_submodule("mlp.experts")
        hook = experts.register_forward_pre_hook(lambda _, args: routed.append((args[0], args[1])))
        before = model.causal_lm.config._experts_implementation
        with one_expert_at_a_time(model.causal_lm.config), watch:
            observe(layer, layer_runs(layer, hidden, calls[0]), {})
        hook.remove()
    assert model.causal_lm.config._experts_implementation == before
    seen = watch.statistics()
    for expert in range(4):
        rows = torch.cat([states[(index == expert).any(-1)] for states, index in routed])
        found = seen[STACKS[0]][expert]
        assert found.tokens == len(rows) == seen[STACKS[1]][expert].tokens
        torch.testing.assert_close(found.mean_square, rows.square().mean(0))
        assert found.hessian is not None
        torch.testing.assert_close(found.hessian, rows.T @ rows / len(rows))
        assert seen[STACKS[1]][expert].hessian is None
    assert sum(each.tokens for each in seen[STACKS[0]]) == 2 * IDS.numel()


@pytest.mark.parametrize("name", ["imatrix", "gptq"])
def test_experts_are_quantised_and_those_with_few_tokens_borrow_or_fall_back(
    mixtral: Path, tmp_path: Path, name: str
) -> None:
    ids = IDS[:2, :32]  # 128 routings to 4 experts: some get fewer than 32
    result = calibrate(mixtral, lambda _: CALIBRATED[name], ids, work_dir=tmp_path)
    state = load(mixtral).state_dict()
    assert not [left for left in result.left if "experts" in left]
    starved = 0
    for stack in STACKS:
        parameter = f"model.layers.0.{stack}"
        values = unpack_q4_0(read_tensor(result.packed[parameter])).dequantize().reshape(state[parameter].shape)
        error = result.errors[parameter]
        assert error.tokens == 128 and 0 < error.relative < 0.02
        blind = ImatrixQuantizer().quantize(state[parameter]).dequantize()
        same = [torch.equal(ours, theirs) for ours, theirs in zip(values, blind, strict=True)]
        assert sum(same) == error.starved
        starved += error.starved
        assert not error.starved or "down" in stack  # what reads hidden states borrows
    assert 0 < starved < 4 and FEWEST_TOKENS == 32


def test_what_is_borrowed_is_better_than_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 48, 64, generator=generator)
    shared = torch.randn(64, 64, generator=generator) / 8 * torch.logspace(-1, 0.5, 64)
    statistics = []
    for tokens in (200, 300, 4):
        rows = torch.randn(tokens, 64, generator=generator) @ shared
        seen = StatisticsAccumulator(64, True)
        seen.add(rows)
        statistics.append(seen.statistics())
    other = torch.randn(500, 64, generator=generator) @ shared
    errors = {}
    for reads_states in (False, True):
        made = quantize_experts(weights, statistics, GptqQuantizer(), 32, reads_states=reads_states)
        assert made.starved == (0 if reads_states else 1)
        errors[reads_states] = float((other @ (weights[2] - made.blocks.dequantize()[2]).T).square().mean())
    assert errors[True] < 0.6 * errors[False]
    whole = pooled(statistics)
    assert whole.tokens == 504 and whole.hessian is not None
    torch.testing.assert_close(whole.hessian.diagonal(), whole.mean_square, rtol=1e-4, atol=1e-4)


def test_more_tokens_make_the_outputs_better_than_blind_search(mixtral: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 160, (8, 120), generator=generator)
    errors = {}
    for name in ("imatrix", "gptq"):
        folder = tmp_path / name
        folder.mkdir()
        result = calibrate(mixtral, lambda _, name=name: CALIBRATED[name], ids, work_dir=folder)
        found = [result.errors[f"model.layers.0.{stack}"] for stack in STACKS]
        assert all(error.starved == 0 for error in found)
        errors[name] = sum(error.relative for error in found)
    assert errors["gptq"] < errors["imatrix"]
