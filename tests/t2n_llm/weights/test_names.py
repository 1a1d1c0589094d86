"""Which tensor of a checkpoint becomes which tensor of the archive, under which name and with which values."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from generic_export.errors import MissingTensorError, WeightError
from generic_export.nnef.dat import read_dat
from generic_export.read.reading import unpack
from generic_export.weights.half import CastReport
from t2n_llm.export.pipeline import export_llm
from t2n_llm.reporter import LogReporter
from t2n_llm.source.hub import open_source
from tests.families import FAMILIES, save_tiny_model
from tests.model_graphs import model_graph
from tests.t2n_llm.command_line import call, strict_json

Tensors = dict[str, torch.Tensor]


class Warnings(LogReporter):
    """Collects what an export warns about."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, message: str) -> None:
        self.said.append(message)


def export(source: Path, target: Path, **options: Any) -> Path:
    """Export without a check, unless asked for; return the archive."""
    return export_llm(str(source), target, **{"check": False, "require_tokenizer": False, **options}).archive


def archived(archive: Path) -> Tensors:
    """Return the tensors of an archive by label."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(archive, Path(folder))
        return {path.name.removesuffix(".dat"): read_dat(path) for path in Path(folder).glob("*.dat")}


def rewrite(model: Path, tensors: Tensors) -> None:
    """Replace the weights of a checkpoint."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, model / "model.safetensors")


def stored(model: Path) -> Tensors:
    """Return the weights of a checkpoint."""
    return load_file(model / "model.safetensors")


# --- files ------------------------------------------------------------------------------------


def test_two_exports_are_the_same_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    first, second = (export(tiny_llama, tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("shards", [2, 5])
def test_a_sharded_checkpoint_is_the_single_file(shards: int, tiny_llama: Path, tmp_path: Path) -> None:
    tensors = stored(tiny_llama)
    sharded = Path(shutil.copytree(tiny_llama, tmp_path / "tiny-llama"))
    (sharded / "model.safetensors").unlink()
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        held = dict(list(tensors.items())[number::shards])
        save_file(held, sharded / name)
        weight_map |= dict.fromkeys(held, name)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert export(sharded, tmp_path / "a").read_bytes() == export(tiny_llama, tmp_path / "b").read_bytes()


def test_the_order_of_a_file_does_not_matter(model: Path, tmp_path: Path) -> None:
    first = export(model, tmp_path / "a")
    rewrite(model, dict(reversed(stored(model).items())))
    assert export(model, tmp_path / "b").read_bytes() == first.read_bytes()


@pytest.mark.parametrize("form", ["zip", "legacy", "nested", "sharded"])
def test_a_pytorch_checkpoint_is_the_safetensors_one(form: str, model: Path, tmp_path: Path) -> None:
    expected = export(model, tmp_path / "a").read_bytes()
    tensors = stored(model)
    (model / "model.safetensors").unlink()
    if form == "sharded":
        names = list(tensors)
        shards = {f"pytorch_model-0000{number}-of-00002.bin": names[number - 1 :: 2] for number in (1, 2)}
        for shard, held in shards.items():
            torch.save({name: tensors[name] for name in held}, model / shard)
        weight_map = {name: shard for shard, held in shards.items() for name in held}
        (model / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        content = {"state_dict": tensors, "epoch": 3} if form == "nested" else tensors
        torch.save(content, model / "pytorch_model.bin", _use_new_zipfile_serialization=form != "legacy")
    # The check loads the same folder with transformers, which knows no nested files.
    check = form in ("zip", "sharded")
    assert export(model, tmp_path / "b", check=check, decode_steps=4).read_bytes() == expected


# --- names ------------------------------------------------------------------------------------


def test_tied_weights_are_written_once(tiny_llama: Path, tmp_path: Path) -> None:
    tensors = archived(export(tiny_llama, tmp_path / "x", dtype="f32"))
    assert "lm_head.weight" not in tensors
    assert {name for name in tensors if "embed" in name} == {"model.embed_tokens.weight"}
    parameters = {name for name in tensors if name in stored(tiny_llama)}
    assert parameters == set(stored(tiny_llama))
    for name in parameters:
        assert torch.equal(tensors[name], stored(tiny_llama)[name]), name


def test_tied_weights_under_the_other_name(model: Path, tmp_path: Path) -> None:
    """Some checkpoints keep the head and drop the embedding."""
    first = export(model, tmp_path / "a")
    tensors = stored(model)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    rewrite(model, tensors)
    assert export(model, tmp_path / "b").read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama", "gpt_neox", "qwen2"))]
)
def test_a_checkpoint_of_the_base_model(family: str, tmp_path: Path) -> None:
    """Saved from AutoModel: names without the prefix. The head must then be tied, for it is not there."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.tie_word_embeddings = True
    whole = AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path / "model")
    expected = export(tmp_path / "model", tmp_path / "a")
    shutil.rmtree(tmp_path / "model")
    whole.base_model.save_pretrained(tmp_path / "model")
    assert not any(name.startswith(f"{whole.base_model_prefix}.") for name in stored(tmp_path / "model"))
    assert export(tmp_path / "model", tmp_path / "b").read_bytes() == expected.read_bytes()


def test_a_base_model_without_its_head(tmp_path: Path) -> None:
    from transformers import AutoModel

    config = FAMILIES["qwen3"]()
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(MissingTensorError, match=r"lm_head\.weight"):
        export(tmp_path / "model", tmp_path / "x")


def test_gpt_neox_calls_its_head_embed_out(tmp_path: Path) -> None:
    model = save_tiny_model("gpt_neox", tmp_path / "gpt_neox")
    expected = archived(export(model, tmp_path / "a"))
    tensors = stored(model)
    old = {"lm_head.weight": "embed_out.weight", "embed_out.weight": "embed_out.weight"}
    rewrite(model, {old.get(name, name): value for name, value in tensors.items()})
    assert "embed_out.weight" in stored(model)
    found = archived(export(model, tmp_path / "b"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_buffers_of_old_checkpoints_are_left_alone(model: Path, tmp_path: Path) -> None:
    """Early Llama and GPT-2 files hold rotary frequencies and causal masks."""
    first = export(model, tmp_path / "a")
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for layer in range(3)}
    rewrite(model, stored(model) | extra)
    assert export(model, tmp_path / "b").read_bytes() == first.read_bytes()


def test_tensors_that_no_parameter_uses_are_told(model: Path) -> None:
    tensors = stored(model)
    extra = {"model.layers.7.norm.weight": torch.ones(2), "head.extra": torch.ones(3)}
    known = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(model, {**tensors, **extra, **known, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    source = open_source(str(model), require_tokenizer=False)
    found = model_graph(source.config).with_parameters(source.checkpoint()).with_sources(CastReport())
    assert found.unused == tuple(sorted(extra))
    assert list(found.sources) == [variable.label for variable in found.document.variables]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_checkpoint_saved_from_a_wrapped_model(prefix: str, model: Path, tmp_path: Path) -> None:
    first = export(model, tmp_path / "a")
    rewrite(model, {prefix + name: value for name, value in stored(model).items()})
    assert export(model, tmp_path / "b").read_bytes() == first.read_bytes()


def test_the_nearest_name_is_offered(model: Path, tmp_path: Path) -> None:
    tensors = stored(model)
    tensors["model.layers.1.mlp.up_projection.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    rewrite(model, tensors)
    with pytest.raises(MissingTensorError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight'") as caught:
        export(model, tmp_path / "x")
    assert "model.layers.1.mlp.up_projection.weight" in str(caught.value.hint)


def test_a_tensor_of_another_layer_is_not_offered(model: Path, tmp_path: Path) -> None:
    tensors = stored(model)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    rewrite(model, tensors)
    with pytest.raises(MissingTensorError) as caught:
        export(model, tmp_path / "x")
    assert "incomplete" in str(caught.value.hint)


def test_another_number_of_layers(model: Path, tmp_path: Path) -> None:
    rewrite(model, {name: value for name, value in stored(model).items() if ".layers.1." not in name})
    with pytest.raises(MissingTensorError, match=r"model\.layers\.1\."):
        export(model, tmp_path / "x")


def test_a_shape_of_another_model(model: Path, tmp_path: Path) -> None:
    tensors = stored(model)
    tensors["model.norm.weight"] = torch.ones(32)
    rewrite(model, tensors)
    with pytest.raises(WeightError, match=r"model\.norm\.weight.*\[64\].*\[32\]"):
        export(model, tmp_path / "x")


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_width_to_f16(origin: torch.dtype, model: Path, tmp_path: Path) -> None:
    tensors = {name: value.to(origin) for name, value in stored(model).items()}
    rewrite(model, tensors)
    found = archived(export(model, tmp_path / "x", dtype="f16"))
    for name, value in tensors.items():
        assert torch.equal(found[name], value.half() if value.ndim > 1 else value.float()), name  # vectors stay in f32


def test_a_checkpoint_of_mixed_widths_to_f32(model: Path, tmp_path: Path) -> None:
    widths = (torch.bfloat16, torch.float32, torch.float16)
    tensors = {name: value.to(widths[index % 3]) for index, (name, value) in enumerate(stored(model).items())}
    rewrite(model, tensors)
    found = archived(export(model, tmp_path / "x", dtype="f32"))
    for name, value in tensors.items():
        assert torch.equal(found[name], value.float()), name


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def outlier(model: Path) -> Path:
    """A bf16 checkpoint with two weights beyond f16, one of which the result depends on."""
    tensors = stored(model)
    tensors["model.layers.1.mlp.up_proj.weight"][5] *= 1e-4
    tensors[DOWN][3, 5] = 1e6
    tensors[DOWN][4, 6:] = 0
    tensors[DOWN][4, 5] = -70000.0
    rewrite(model, {name: value.to(torch.bfloat16) for name, value in tensors.items()})
    return model


def test_values_beyond_f16_are_cut_counted_and_told(outlier: Path, tmp_path: Path) -> None:
    warnings = Warnings()
    archive = export(outlier, tmp_path / "x", reporter=warnings)
    (warning,) = warnings.said
    assert DOWN in warning
    assert "2 values" in warning
    assert "9.99e+05" in warning  # 1e6 rounded to bf16
    assert f"--keep-f32 {DOWN}" in warning
    found = archived(archive)
    assert (found[DOWN][3, 5].item(), found[DOWN][4, 5].item()) == (65504.0, -65504.0)
    assert all(value.isfinite().all() for value in found.values())
    listed = json.loads((tmp_path / "x" / "export.json").read_text())["f16_overflows"]
    largest = stored(outlier)[DOWN].float().abs().max().item()
    assert listed == {DOWN: {"count": 2, "max_abs": largest}}


def test_the_warning_goes_to_stderr_in_every_mode(outlier: Path, parent: Path) -> None:
    arguments = ("export", outlier, "-o", parent / "x", "--no-tokenizer", "--no-check", "--force")
    for mode in ("--quiet", "--json"):
        outcome = call(*arguments, mode)
        assert outcome.code == 0, outcome
        assert DOWN in outcome.line("warning")
    assert strict_json(outcome.out)["f16_overflows"]


@pytest.mark.parametrize("activations", ["f16", "f32"])
def test_keep_f32_keeps_the_value_and_the_result(activations: str, outlier: Path, tmp_path: Path) -> None:
    warnings = Warnings()
    options = {"check": True, "decode_steps": 8, "keep_f32": [DOWN], "activations": activations}
    archive = export(outlier, tmp_path / "x", reporter=warnings, **options)
    assert warnings.said == []
    found = archived(archive)
    assert torch.equal(found[DOWN], stored(outlier)[DOWN].float())
    narrow = {name for name, value in stored(outlier).items() if value.ndim > 1 or activations == "f16"}
    assert {found[name].dtype for name in narrow - {DOWN}} == {torch.float16}
    manifest = json.loads((tmp_path / "x" / "export.json").read_text())
    assert manifest["f16_overflows"] == {}
    assert manifest["validation"]["passed"] is True


def test_without_keep_f32_the_check_finds_the_cut_value(outlier: Path, parent: Path) -> None:
    outcome = call("export", outlier, "-o", parent / "x", "--no-tokenizer", "--decode-steps", 8)
    assert outcome.code == 1, outcome
    assert "differs from" in outcome.line("error")


@pytest.mark.parametrize("activations", ["f16", "f32"])
def test_keep_f32_takes_patterns(activations: str, tiny_llama: Path, tmp_path: Path) -> None:
    patterns: Sequence[str] = ["*.up_proj.weight", "model.norm.weight"]
    options = {"keep_f32": patterns, "activations": activations}
    checked = activations == "f16"  # where products of both widths meet
    found = archived(export(tiny_llama, tmp_path / "x", check=checked, decode_steps=4, **options))
    kept = {name for name in stored(tiny_llama) if found[name].dtype is torch.float32}
    vectors = {name for name, value in stored(tiny_llama).items() if value.ndim == 1}
    matrices = {f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)}
    assert kept == matrices | ({"model.norm.weight"} if activations == "f16" else vectors)
