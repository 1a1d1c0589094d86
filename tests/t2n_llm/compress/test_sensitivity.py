"""What quantising one tensor costs, estimated, against the cost measured by doing it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from generic_export.errors import CaptureError, WeightError
from generic_export.weights.source import InMemoryTensor
from quant.algorithms import BUILT_IN
from quant.budget import Candidate, TargetSize, kept_plain
from quant.recipe import TensorName
from t2n_llm.compress import sensitivity
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.progress import SensitivityProgress
from t2n_llm.compress.sensitivity import Inputs, Quantizable, Quantization, Sensitivities, divergences
from t2n_llm.export.pipeline import export_llm
from tests.families import FAMILIES, config, save_tiny_model
from tests.recurrent_families import RECURRENT_FAMILIES
from tests.t2n_llm.compress.test_calibrate import divergence, is_linear, load, text_ids
from tests.t2n_llm.compress.test_statistics import Warnings

MIN_MAX = Quantization("q4_0", BUILT_IN["min_max"])
_EXPERTS = {"mixtral": config("mixtral", num_local_experts=4)}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def estimated(short_model: Path) -> tuple[dict[str, float], list[SensitivityProgress]]:
    """The tensors of a trained model, on 32 short texts."""
    wanted = {name: MIN_MAX for name in load(short_model).state_dict() if is_linear(name) or name in (HEAD, TABLE)}
    told: list[SensitivityProgress] = []
    return divergences(short_model, wanted, text_ids("calib.txt", 32, 64), progress=told.append), told


def measured(folder: Path, changes: dict[str, Quantization], ids: torch.Tensor) -> float:
    """The divergence of a model some of whose tensors are quantised."""
    model = load(folder)
    state = model.state_dict()
    for name, form in changes.items():
        state[name].add_(form.error(state[name], None))
    return divergence(model, load(folder), ids)


def test_every_tensor_is_measured_and_every_layer_told(estimated) -> None:
    found, told = estimated
    assert all(value > 0 for value in found.values())
    assert {HEAD, TABLE} <= found.keys() and sum(map(is_linear, found)) == 2 * 7
    assert [(each.done, each.layers) for each in told] == [(1, 2), (2, 2)]


@pytest.mark.parametrize("kind", ["v_proj", "o_proj", "up_proj", "down_proj"])
def test_the_estimate_is_what_quantising_costs(estimated, short_model: Path, kind: str) -> None:
    found, _ = estimated
    names = [name for name in found if kind in name]
    true = measured(short_model, dict.fromkeys(names, MIN_MAX), text_ids("eval.txt", 8, 64))
    assert true / 1.6 < sum(found[name] for name in names) < true * 1.6


def test_kept_by_it_a_tenth_more_of_size_brings_the_divergence_down(estimated, short_model: Path) -> None:
    found, _ = estimated
    linears = [name for name in found if is_linear(name)]
    state = load(short_model).state_dict()
    sizes = {name: state[name].numel() for name in linears}
    candidates = [Candidate(name, 2 * sizes[name], sizes[name] * 9 // 16, found[name]) for name in linears]
    kept = kept_plain(candidates, 0, TargetSize(growth=0.1))
    ids = text_ids("eval.txt", 16, 64)
    everything = measured(short_model, dict.fromkeys(linears, MIN_MAX), ids)
    rest = measured(short_model, {name: MIN_MAX for name in linears if name not in kept}, ids)
    assert kept and rest < 0.8 * everything  # by chance it would be 0.96


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "mamba", "qwen3_next", "gemma2"])
def test_layers_of_any_kind_are_walked_back(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path / "model", configs=FAMILIES | RECURRENT_FAMILIES | _EXPERTS)
    model = load(folder)
    wanted = {
        name: Quantization("q4_0", BUILT_IN["min_max"], axes=(1, 0) if family == "gpt2" and "c_" in name else None)
        for name, values in model.named_parameters()
        if values.ndim >= 2 and values.shape[-1] % 32 == 0
    }
    ids = torch.randint(3, 160, (4, 24), generator=torch.Generator().manual_seed(0))
    found = divergences(folder, wanted, ids)
    inside = {name for name in wanted if any(part.isdecimal() for part in name.split("."))}
    assert inside and inside <= found.keys()
    assert all(value >= 0 for value in found.values()) and sum(found.values()) > 0


def test_a_turned_weight_is_quantised_along_its_inputs() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    turned = Quantization("q4_0", BUILT_IN["min_max"], axes=(1, 0)).error(weight, None)
    assert torch.equal(turned, MIN_MAX.error(weight.T.contiguous(), None).T)


def test_compensated_errors_cost_less(estimated, short_model: Path) -> None:
    found, _ = estimated
    linears = [parameter for parameter in found if is_linear(parameter)]
    form = Quantization("q4_0", CALIBRATED["gptq"].quantizer, Inputs.HESSIAN)
    costs = divergences(short_model, dict.fromkeys(linears, form), text_ids("calib.txt", 12, 64))
    assert sum(costs.values()) < 0.6 * sum(found[parameter] for parameter in linears)


def test_a_weight_that_holds_inf_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    model = load(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = float("inf")
    model.save_pretrained(folder)
    wanted = {each: MIN_MAX for each, _ in model.named_parameters() if is_linear(each)}
    with pytest.raises(WeightError, match=f"tensor {name}"):
        divergences(folder, wanted, torch.randint(3, 160, (2, 8)))


def test_what_has_no_derivative_is_named() -> None:
    states = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(CaptureError, match="layer 5 cannot be differentiated"):
        sensitivity._slopes(states.detach() + 1, [states], torch.ones(2, 4), "layer 5")


def test_without_a_tokenizer_it_is_guessed_and_said(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    heard = Warnings()
    export_llm(
        str(folder), tmp_path / "out", compress="q4_0-mixed", require_tokenizer=False, check=False, reporter=heard
    )
    assert any("estimated from the weights" in warning for warning in heard.warnings)


def test_what_was_not_measured_counts_in_the_unit_of_what_was() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: Quantizable((TensorName(name, "@linears"),), InMemoryTensor(name, values), "q4_0")
        for name, values in ((name, torch.randn(16, 64, generator=generator)) for name in ("a.q_proj", "b.q_proj"))
    }
    both = Sensitivities({}, {}, {"a.q_proj": 0.25, "b.q_proj": 0.5}).of(tensors)
    one = Sensitivities({}, {}, {"a.q_proj": 0.25}).of(tensors)
    assert both == {"a.q_proj": 0.25, "b.q_proj": 0.5}
    assert one["a.q_proj"] == 0.25 and one["b.q_proj"] == pytest.approx(0.25, rel=0.3)
