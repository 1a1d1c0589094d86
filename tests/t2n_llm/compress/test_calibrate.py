"""Calibration of whole models, layer by layer: what it stores is what the prefix was quantised to, and it is better."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from generic_export.errors import CaptureError, OptionError
from generic_export.weights.values import read_tensor
from quant.packing import unpack_q4_0
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.calibrate import calibrate
from t2n_llm.compress.progress import LayerProgress
from t2n_llm.compress.result import CalibrationResult
from t2n_llm.compress.walk import first_inputs, head_inputs, open_walkable, run_layer
from tests.families import save_tiny_model
from tests.t2n_llm.compress.stored_values import mean_divergence, with_stored_values
from tests.trained_model import REAL_MODEL


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def text_ids(name: str, sequences: int = 4, length: int = 64) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REAL_MODEL)
    ids = tokenizer.encode((REAL_MODEL / name).read_text()[: 8 * sequences * length], add_special_tokens=False)
    return torch.tensor(ids[: sequences * length]).reshape(sequences, length)


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantised(result: CalibrationResult, folder: Path):
    """The model with the values that the result stores."""
    return with_stored_values(load(folder), result)


@torch.no_grad()
def divergence(model, reference, ids: torch.Tensor) -> float:
    return mean_divergence(*(each(ids, use_cache=False).logits for each in (model, reference)))


@pytest.fixture(scope="module", params=[3, pytest.param(6, marks=pytest.mark.nightly)])
def trained(request, first_layers) -> Path:
    """The first layers of the trained model: enough of them that the algorithms differ; at night all."""
    return first_layers(request.param)


@pytest.fixture(scope="module")
def results(trained, tmp_path_factory) -> dict[str, CalibrationResult]:
    ids = text_ids("calib.txt", sequences=12)
    return {
        name: calibrate(
            trained,
            lambda parameter, algorithm=algorithm: algorithm if is_linear(parameter) else None,
            ids,
            work_dir=tmp_path_factory.mktemp(name),
        )
        for name, algorithm in CALIBRATED.items()
    }


def test_every_linear_of_a_trained_model_is_quantised_and_the_order_of_algorithms_holds(results, trained):
    reference, ids = load(trained), text_ids("eval.txt")
    names = {name for name in reference.state_dict() if is_linear(name)}
    loss = {}
    for name, result in results.items():
        assert set(result.packed) == set(result.errors) == set(result.statistics) == names
        assert result.left == {} and result.unfolded == []
        loss[name] = divergence(quantised(result, trained), reference, ids)
    assert 0 < loss["gptq"] < loss["imatrix"] < 0.01
    assert all(loss[name] < loss["imatrix"] for name in ("best", "tuned", "awq"))


def test_only_folding_algorithms_change_other_tensors(results):
    assert not results["imatrix"].changed and not results["gptq"].changed
    for name in ("awq", "best", "tuned"):
        assert results[name].changed and all("norm" in parameter for parameter in results[name].changed)


def test_compensation_lowers_the_error_of_nearly_every_tensor(results):
    gptq, imatrix = results["gptq"].errors, results["imatrix"].errors
    lower = [gptq[name].relative < imatrix[name].relative for name in gptq if ".layers.0." in name]
    assert all(lower)
    assert gptq["model.layers.0.mlp.up_proj.weight"].tokens == 12 * 64


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt_neox"])
def test_folded_and_quantised_families_stay_close(family, tmp_path):
    folder = save_tiny_model(family, tmp_path / "model")
    ids = torch.randint(3, 160, (8, 32), generator=torch.Generator().manual_seed(0))
    parameters = {name for name, module in load(folder).named_modules() if isinstance(module, torch.nn.Linear)}
    chosen = {f"{name}.weight" for name in parameters if "layers." in name}
    loss = {}
    for name in ("imatrix", "best"):
        work = tmp_path / name
        work.mkdir()
        result = calibrate(folder, lambda p, name=name: CALIBRATED[name] if p in chosen else None, ids, work_dir=work)
        assert set(result.packed) == chosen
        loss[name] = divergence(quantised(result, folder), load(folder), ids)
    assert 0 < loss["best"] < loss["imatrix"]


def test_progress_is_told_after_every_layer(first_layers, tmp_path):
    told: list[LayerProgress] = []
    ids = text_ids("calib.txt", 2, 32)
    choice = lambda name: CALIBRATED["imatrix"] if ".layers.1." in name and is_linear(name) else None  # noqa: E731
    result = calibrate(first_layers(3), choice, ids, work_dir=tmp_path, progress=told.append)
    assert [(step.layer, step.layers) for step in told] == [(1, 3), (2, 3), (3, 3)]
    assert told[0].error == 0.0 and told[1].error > 0.0 and told[2].error == 0.0
    assert all(".layers.1." in name for name in result.packed)


def test_a_tied_head_is_quantised_under_each_name_asked_for(short_model, tmp_path):
    ids = text_ids("calib.txt", 2, 48)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    result = calibrate(short_model, lambda n: CALIBRATED["gptq"] if n in names else None, ids, work_dir=tmp_path)
    assert set(result.packed) == set(names)
    first, second = (read_tensor(result.packed[name]) for name in names)
    assert torch.equal(first, second)
    assert 0 < result.errors["lm_head.weight"].relative < 0.02


def test_what_cannot_be_calibrated_is_reported(tmp_path):
    folder = save_tiny_model("gpt2", tmp_path / "model")
    ids = torch.randint(3, 160, (2, 16))
    result = calibrate(folder, lambda name: CALIBRATED["gptq"], ids, work_dir=tmp_path)
    assert "transformer.h.0.mlp.c_fc.weight" in result.left
    assert "Conv1D" in result.left["transformer.h.0.mlp.c_fc.weight"]
    assert "transformer.wpe.weight" in result.left
    assert set(result.packed) == {"transformer.wte.weight", "lm_head.weight"}


def test_few_tokens_fall_back_to_the_search(short_model, tmp_path):
    ids = text_ids("calib.txt", 1, 16)
    choice = lambda name: CALIBRATED["gptq"] if is_linear(name) else None  # noqa: E731
    result = calibrate(short_model, choice, ids, work_dir=tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert result.errors[name].tokens == 16
    from quant.imatrix import ImatrixQuantizer

    stored = unpack_q4_0(read_tensor(result.packed[name]))
    assert torch.equal(stored.q, ImatrixQuantizer().quantize(load(short_model).state_dict()[name]).q)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "smollm3", "mixtral"])
def test_walking_layer_by_layer_is_running_the_model(family, tmp_path):
    folder = _mixtral(tmp_path) if family == "mixtral" else save_tiny_model(family, tmp_path / "model")
    ids = torch.randint(3, 160, (2, 20))
    model = open_walkable(folder)
    hidden, calls = first_inputs(model, ids)
    for index, call in enumerate(calls):
        with model.resident(index) as layer:
            hidden = [run_layer(layer, states, call) for states in hidden]
        if model.stored is not None:
            assert all(parameter.is_meta for parameter in layer.parameters())
    with model.outside_resident() as causal_lm, torch.no_grad():
        head = causal_lm.get_output_embeddings()
        ours = torch.cat([head(inputs) for inputs in head_inputs(model, head, ids, hidden)])
        expected = load(folder).get_output_embeddings()
        theirs = load(folder)(ids, use_cache=False).logits
    if family == "gemma2":  # its logits are capped after the head
        ours = torch.tanh(ours / 30.0) * 30.0
    assert head.weight.is_meta or model.stored is None
    assert expected.weight.shape == head.weight.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _mixtral(folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.families import COMMON

    config = AutoConfig.for_model("mixtral", **(COMMON | {"num_local_experts": 4}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    return folder / "model"


def test_empty_text_is_refused(short_model, tmp_path):
    with pytest.raises(OptionError, match="empty"):
        calibrate(short_model, lambda _: None, torch.zeros(0, 8, dtype=torch.int64), work_dir=tmp_path)


def test_a_model_without_a_list_of_layers_is_named(short_model):
    from t2n_llm.compress import walk as calibrate_blocks

    model = load(short_model)
    model.config.num_hidden_layers = 5
    with pytest.raises(CaptureError, match="no list of decoder layers"):
        calibrate_blocks._layers_name(model)
