"""Bad input gets a one-line error that names the thing, a hint, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from generic_export.errors import DiskFullError
from generic_export.write.archive import WriteProgress
from t2n_llm.export.pipeline import export_llm
from t2n_llm.reporter import LogReporter
from tests.systems import needs_posix
from tests.t2n_llm.command_line import call, fill, refused, small_disk, unchanged

UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def change_config(model: Path, **changes: object) -> None:
    """Set entries of a config; None removes one."""
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_tensors(model: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint, by name with `_` for `.`; None removes one."""
    tensors = load_file(model / "model.safetensors")
    names = {name.replace(".", "_"): name for name in tensors}
    for key, value in changes.items():
        tensors.pop(names[key])
        if value is not None:
            tensors[names[key]] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def shard(model: Path) -> Path:
    """Split a checkpoint in three shards with an index; return the index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        held = dict(list(tensors.items())[number::3])
        save_file(held, model / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, name)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


# --- the source -------------------------------------------------------------------------------


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def broken_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "llama",')


def unknown_architecture(model: Path) -> None:
    change_config(model, model_type="gpt17")


def no_model_type(model: Path) -> None:
    change_config(model, model_type=None)


def encoder_decoder(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "t5"}')


def image_model(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "vit"}')


def wrong_type_in_config(model: Path) -> None:
    change_config(model, hidden_size="big")


def contradiction_in_config(model: Path) -> None:
    change_config(model, num_attention_heads=5, head_dim=None)


def no_heads(model: Path) -> None:
    change_config(model, num_attention_heads=0)


def own_code(model: Path) -> None:
    change_config(model, model_type="homemade", auto_map={"AutoConfig": "configuration_homemade.HomemadeConfig"})
    (model / "configuration_homemade.py").write_text("raise SystemExit('this code was run')")


def gptq(model: Path) -> None:
    change_config(model, quantization_config={"quant_method": "gptq", "bits": 4})


def only_pickles(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def unsafe_pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save(torch.nn.Linear(2, 2), model / "pytorch_model.bin")


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def truncated_file(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


def missing_shard(model: Path) -> None:
    shard(model)
    (model / "model-00002-of-00003.safetensors").unlink()


def truncated_shard(model: Path) -> None:
    shard(model)
    path = model / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def tensor_in_another_shard(model: Path) -> None:
    index = shard(model)
    content = json.loads(index.read_text())
    content["weight_map"][UP_PROJ] = next(
        name for name in content["weight_map"].values() if name != content["weight_map"][UP_PROJ]
    )
    index.write_text(json.dumps(content))


def broken_index(model: Path) -> None:
    shard(model).write_text("{")


def missing_tensor(model: Path) -> None:
    change_tensors(model, **{UP_PROJ.replace(".", "_"): None})


def wrong_shape(model: Path) -> None:
    change_tensors(model, **{UP_PROJ.replace(".", "_"): torch.zeros(3, 3)})


def integer_tensor(model: Path) -> None:
    change_tensors(model, **{UP_PROJ.replace(".", "_"): torch.zeros(96, 64, dtype=torch.int8)})


def float8_tensor(model: Path) -> None:
    change_tensors(model, **{UP_PROJ.replace(".", "_"): torch.zeros(96, 64, dtype=torch.float8_e4m3fn)})


def unknown_activation(model: Path) -> None:
    change_config(model, hidden_act="wobble")


def unknown_rope(model: Path) -> None:
    change_config(model, rope_parameters={"rope_type": "twist", "rope_theta": 1e4})


SOURCES: dict[Callable[[Path], object], tuple[str, ...]] = {
    no_config: ("config.json",),
    broken_config: ("config.json", "JSON"),
    unknown_architecture: ("gpt17",),
    no_model_type: ("model_type",),
    encoder_decoder: ("t5",),
    image_model: ("vit",),
    wrong_type_in_config: ("config.json", "hidden_size"),
    contradiction_in_config: ("config.json", "attention heads (5)"),
    no_heads: ("config.json",),
    own_code: ("Python code",),
    gptq: ("gptq",),
    only_pickles: ("pytorch_model.bin", "damaged"),
    unsafe_pickle: ("pytorch_model.bin", "refused", "torch.nn.modules.linear.Linear"),
    no_weights: ("no safetensors file",),
    truncated_file: ("model.safetensors", "truncated"),
    missing_shard: ("model-00002-of-00003.safetensors", "missing"),
    truncated_shard: ("model-00003-of-00003.safetensors", "1 of"),
    tensor_in_another_shard: (UP_PROJ, "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"),
    broken_index: ("model.safetensors.index.json",),
    missing_tensor: (UP_PROJ,),
    wrong_shape: (UP_PROJ, "[96, 64]", "[3, 3]"),
    integer_tensor: (UP_PROJ, "int8"),
    float8_tensor: (UP_PROJ, "float8_e4m3fn"),
}


@pytest.mark.parametrize("damage", SOURCES, ids=lambda damage: damage.__name__)
def test_damaged_source(damage: Callable[[Path], object], model: Path, parent: Path) -> None:
    damage(model)
    with unchanged(model, parent):
        refused(call("export", model, "-o", parent / "x", "--no-tokenizer"), *SOURCES[damage])


@pytest.mark.parametrize(("damage", "word"), [(unknown_activation, "wobble"), (unknown_rope, "twist")])
def test_config_that_names_what_does_not_exist(damage: Callable, word: str, model: Path, parent: Path) -> None:
    damage(model)
    refused(call("export", model, "-o", parent / "x", "--no-tokenizer"), word)


def no_tokenizer(model: Path) -> None:
    del model


def broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nothing"}}')


def not_json_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_bytes(b"\x00\xff")


@pytest.mark.parametrize("damage", [no_tokenizer, broken_tokenizer, not_json_tokenizer], ids=lambda it: it.__name__)
def test_no_usable_tokenizer(damage: Callable[[Path], object], model: Path, parent: Path) -> None:
    damage(model)
    with unchanged(parent):
        outcome = call("export", model, "-o", parent / "x", "--no-check")
        refused(outcome, str(model), "tokenizer")
    assert "--no-tokenizer" in outcome.line("hint")


def test_no_tokenizer_means_without_one_even_where_one_lies(model: Path, parent: Path) -> None:
    broken_tokenizer(model)
    outcome = call("export", model, "-o", parent / "x", "--no-tokenizer", "--decode-steps", 2)
    assert outcome.code == 0, outcome


# --- options ----------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Sequence[str], tuple[str, ...]]] = {
    "bf16": (["--dtype", "bf16"], ("bf16", "f16", "f32")),
    "int8": (["--dtype", "int8"], ("int8",)),
    "archive": (["--archive", "zip"], ("zip",)),
    "engine": (["--engine", "foo"], ("foo",)),
    "not a tract": (["--tract", "/bin/ls"], ("/bin/ls",)),
    "no tract there": (["--tract", "/nowhere/tract"], ("/nowhere/tract",)),
    "keep-f32": (["--keep-f32", "nothing.*"], ("nothing.*",)),
    "revision": (["--revision", "main"], ("--revision",)),
    "decode steps": (["--decode-steps", "0"], ("--decode-steps",)),
    "logits": (["--num-logits-to-keep", "-1"], ("--num-logits-to-keep",)),
    "unknown option": (["--frobnicate"], ("--frobnicate",)),
    "removed option": (["--budget", "30min"], ("--budget was removed", "tuned has no training stage")),
    "removed seed": (["--calibration-seed=3"], ("--calibration-seed was removed", "a fixed seed")),
    "not a number": (["--decode-steps", "many"], ("--decode-steps",)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_option(name: str, tiny_llama: Path, parent: Path) -> None:
    arguments, words = OPTIONS[name]
    with unchanged(parent):
        refused(call("export", tiny_llama, "-o", parent / "x", "--no-tokenizer", *arguments), *words)


@pytest.mark.parametrize("option", ["--engine=foo", "--tract=/bin/ls", "--dtype=bf16"])
def test_wrong_option_is_refused_before_any_work(option: str, tiny_llama: Path, parent: Path) -> None:
    outcome = call("export", tiny_llama, "-o", parent / "x", "--no-tokenizer", option)
    assert outcome.code == 2
    assert "Capturing" not in outcome.err


# --- the output -------------------------------------------------------------------------------


def test_output_is_a_file(tiny_llama: Path, parent: Path) -> None:
    (parent / "x").write_text("mine")
    with unchanged(parent):
        for force in ([], ["--force"]):
            refused(call("export", tiny_llama, "-o", parent / "x", "--no-tokenizer", *force), str(parent / "x"))


def test_output_is_a_folder_of_something_else(tiny_llama: Path, parent: Path) -> None:
    (parent / "x").mkdir()
    (parent / "x" / "thesis.txt").write_text("mine")
    with unchanged(parent):
        outcome = call("export", tiny_llama, "-o", parent / "x", "--no-tokenizer")
        refused(outcome, str(parent / "x"), "exists")
        refused(call("export", tiny_llama, "-o", parent / "x", "--no-tokenizer", "--force"), "not an export")


def test_earlier_export_needs_force(tiny_llama: Path, parent: Path) -> None:
    arguments = ("export", tiny_llama, "-o", parent / "x", "--no-tokenizer", "--no-check")
    assert call(*arguments).code == 0
    with unchanged(parent):
        outcome = call(*arguments, "--dtype", "f32")
        refused(outcome, str(parent / "x"), "exists")
        assert "--force" in outcome.line("hint")
    assert call(*arguments, "--dtype", "f32", "--force").code == 0
    assert json.loads((parent / "x" / "export.json").read_text())["graph"]["dtype"] == "f32"
    assert [path.name for path in parent.iterdir()] == ["x"]


def test_a_failing_export_leaves_the_earlier_one_alone(tiny_export: Path, model: Path, parent: Path) -> None:
    shutil.copytree(tiny_export, parent / "x")
    missing_tensor(model)
    with unchanged(parent):
        refused(call("export", model, "-o", parent / "x", "--no-tokenizer", "--force"), UP_PROJ)


@pytest.mark.parametrize("name", [".", "..", "/", "", "sub/.."])
def test_output_without_a_name(name: str, tiny_export: Path, tiny_llama: Path, parent: Path, monkeypatch) -> None:
    shutil.copytree(tiny_export, parent / "x")
    monkeypatch.chdir(parent / "x")
    with unchanged(parent):
        outcome = call("export", tiny_llama, "-o", name, "--no-tokenizer", "--no-check", "--force")
        refused(outcome, "output")


def test_missing_parents_are_made_and_removed_again(tiny_llama: Path, model: Path, parent: Path) -> None:
    target = parent / "a" / "b" / "x"
    missing_tensor(model)
    with unchanged(parent):
        refused(call("export", model, "-o", target, "--no-tokenizer"), UP_PROJ)
    wrong_shape_after_staging = ("export", tiny_llama, "-o", parent / "a" / ("n" * 250), "--no-tokenizer", "--no-check")
    with unchanged(parent):
        refused(call(*wrong_shape_after_staging), "too long")
    assert call("export", tiny_llama, "-o", target, "--no-tokenizer", "--no-check").code == 0
    assert (target / "export.json").is_file()


def test_parent_is_a_file(tiny_llama: Path, parent: Path) -> None:
    (parent / "file").write_text("mine")
    with unchanged(parent):
        refused(call("export", tiny_llama, "-o", parent / "file" / "x", "--no-tokenizer"), str(parent / "file"))


def test_parent_cannot_be_written(tiny_llama: Path, parent: Path) -> None:
    with small_disk(parent / "disk", "1m", "ro") as disk:
        if disk is None:
            pytest.skip("needs the right to mount a read-only tmpfs")
        refused(call("export", tiny_llama, "-o", disk / "x", "--no-tokenizer"), str(disk))


# --- disk full --------------------------------------------------------------------------------


def test_disk_full_is_seen_before_writing(tiny_llama: Path, parent: Path) -> None:
    with small_disk(parent / "disk", "256k") as disk:
        if disk is None:
            pytest.skip("needs the right to mount a tmpfs")
        with unchanged(disk):
            outcome = call("export", tiny_llama, "-o", disk / "x", "--no-tokenizer")
            refused(outcome, str(disk / "x"), "bytes")
        assert "Writing" not in outcome.err


class FillAt(LogReporter):
    """Another program takes the rest of the disk at a given moment of the export."""

    def __init__(self, moment: str, disk: Path) -> None:
        self.moment = moment
        self.disk = disk

    def stage(self, title: str) -> None:
        if title.startswith(self.moment):
            fill(self.disk)

    def progress(self, progress: WriteProgress) -> None:
        done = progress.done_bytes
        if (self.moment == "weights" and done > 0) or (self.moment == "end" and done == progress.total_bytes):
            fill(self.disk)


@pytest.mark.parametrize(
    ("archive", "moment"),
    [
        pytest.param("tar", "Writing", id="before the weights"),
        pytest.param("dir", "Writing", id="before the weights of a folder"),
        pytest.param("tgz", "weights", id="in the weights"),
        pytest.param("tar", "end", id="at the end of the weights"),
        pytest.param("tar", "Running PyTorch", id="in the test bundles"),
        pytest.param("tar", "Recording", id="in export.json"),
    ],
)
def test_disk_full_while_writing(moment: str, archive: str, tiny_llama: Path, parent: Path) -> None:
    with small_disk(parent / "disk", "8m") as disk:
        if disk is None:
            pytest.skip("needs the right to mount a tmpfs")
        with pytest.raises(DiskFullError) as caught:
            export_llm(
                str(tiny_llama),
                disk / "x",
                archive=archive,
                require_tokenizer=False,
                decode_steps=3,
                reporter=FillAt(moment, disk),
            )
        assert caught.value.message.startswith(str(disk / "x"))
        assert "\n" not in caught.value.message
        assert caught.value.hint
        assert [path.name for path in disk.iterdir()] == ["ballast"]


@needs_posix
def test_a_limit_on_file_sizes_is_an_error_like_others(tiny_llama: Path, parent: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with unchanged(parent):
            outcome = call("export", tiny_llama, "-o", parent / "x", "--no-tokenizer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    refused(outcome, str(parent / "x" / "model.nnef.tar"), "File too large")
