"""GGUF files of mixtures of experts: the parameters and logits of the model that they come from, in PyTorch and tract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from generic_export.errors import CorruptCheckpointError
from generic_export.weights.values import read_tensor
from quant.prequantized import ExactTensor, GgufTensor, open_gguf
from t2n_llm.export.pipeline import export_llm
from t2n_llm.source.gguf import load_gguf_model
from t2n_llm.source.hub import open_source
from t2n_llm.weights.archive_weights import stored_values
from t2n_llm.weights.f32_model import load_dequantized
from tests.moe_gguf_files import EXPERTS, FAMILIES, INNER, random_model, write_moe_gguf

TOKENS = torch.tensor([[5, 9, 40, 41, 7, 100, 3, 77]])
EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_logits_are_those_of_the_original(family: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[family])
    write_moe_gguf(tmp_path / "moe.gguf", FAMILIES[family], model)
    source = open_source(str(tmp_path / "moe.gguf"))
    assert source.config.model_type == model.config.model_type
    tensors = source.checkpoint().tensors
    expected = dict(model.named_parameters())
    assert tensors.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(read_tensor(tensors[name]).float(), parameter), name
    read = load_dequantized(tmp_path / "moe.gguf")
    assert read is not None and torch.equal(logits(read), logits(model))


# The weights and PyTorch's logits of each are compared above, Mixtral in the engine below.
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.nightly if name != "qwen2moe" else ()) for name in FAMILIES]
)
def test_the_engine_says_what_the_original_says(family: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[family])
    write_moe_gguf(tmp_path / "moe.gguf", FAMILIES[family], model)
    result = export_llm(str(tmp_path / "moe.gguf"), tmp_path / "export", archive="dir", dtype="f32", decode_steps=6)
    assert result.validation is not None and result.validation.passed


def test_blocks_of_experts_stay_the_blocks_of_the_file(tmp_path: Path) -> None:
    family = FAMILIES["qwen3moe"]
    write_moe_gguf(tmp_path / "moe.gguf", family, random_model(family), dict.fromkeys(EXPERT_TENSORS, "Q4_0"))
    tensors = open_source(str(tmp_path / "moe.gguf")).checkpoint().tensors
    both, file = tensors["model.layers.1.mlp.experts.gate_up_proj"], open_gguf(tmp_path / "moe.gguf").tensors
    assert isinstance(both, ExactTensor)
    rows = b"".join(bytes(chunk) for chunk in both.stored("x").chunks())
    gate, up = (file[f"blk.1.ffn_{part}_exps.weight"].data.reshape(EXPERTS, INNER, -1) for part in ("gate", "up"))
    expected = b"".join(gate[expert].tobytes() + up[expert].tobytes() for expert in range(EXPERTS))
    assert rows == expected
    assert torch.equal(read_tensor(both), torch.cat([_decoded(file, "gate"), _decoded(file, "up")], dim=1))


def _decoded(file: Mapping[str, GgufTensor], part: str) -> torch.Tensor:
    from gguf.quants import dequantize

    tensor = file[f"blk.1.ffn_{part}_exps.weight"]
    return torch.from_numpy(dequantize(tensor.data, tensor.code)).reshape(tensor.shape)


def test_experts_of_other_types_are_dequantised(tmp_path: Path) -> None:
    family = FAMILIES["mixtral"]
    kinds = {"ffn_gate_exps": "Q4_1", "ffn_up_exps": "Q8_0", "ffn_down_exps": "Q5_0"}
    write_moe_gguf(tmp_path / "moe.gguf", family, random_model(family), kinds)
    result = export_llm(str(tmp_path / "moe.gguf"), tmp_path / "export", archive="dir", dtype="f32", decode_steps=4)
    assert result.validation is not None and result.validation.passed
    file = open_gguf(tmp_path / "moe.gguf").tensors
    down = torch.from_numpy(file["blk.0.ffn_down_exps.weight"].values())
    (stored,) = (value for name, value in stored_values(result.archive) if "layers.0" in name and "down" in name)
    assert torch.equal(stored[:, : down.shape[1]], down)


def test_single_tensors_for_each_expert(tmp_path: Path) -> None:
    family = FAMILIES["mixtral"]
    model = random_model(family)
    write_moe_gguf(tmp_path / "old.gguf", family, model, single=True)
    read = load_dequantized(tmp_path / "old.gguf")
    assert read is not None and torch.equal(logits(read), logits(model))


def test_transformers_judges_the_families_that_it_knows(tmp_path: Path) -> None:
    for name, judged in {"qwen3moe": True, "mixtral": False}.items():
        write_moe_gguf(tmp_path / f"{name}.gguf", FAMILIES[name], random_model(FAMILIES[name]))
        assert (load_gguf_model(tmp_path / f"{name}.gguf") is not None) == judged


def test_a_missing_expert_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import moe_gguf_files

    every = moe_gguf_files._single
    lacking = "ffn_up.2."
    monkeypatch.setattr(moe_gguf_files, "_single", lambda *of: [each for each in every(*of) if lacking not in each[0]])
    write_moe_gguf(tmp_path / "m.gguf", FAMILIES["mixtral"], random_model(FAMILIES["mixtral"]), single=True)
    with pytest.raises(CorruptCheckpointError, match=r"blk\.0 has no up projection of expert 2"):
        open_source(str(tmp_path / "m.gguf")).checkpoint()
