"""The mistakes a newcomer makes: one line that names the thing, a hint, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from t2n_llm.cli import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-real"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("*.txt", "*.md", "eval*"))
    return folder


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_config(folder: Path, **content: object) -> None:
    (folder / "config.json").write_text(json.dumps(content))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def shard(folder: Path) -> dict[str, str]:
    """Split the checkpoint in two shards with an index; returns the index's weight map."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in ((1, names[::2]), (2, names[1::2])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def truncated_shard(folder: Path) -> None:
    shard(folder)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])


def index_names_the_wrong_shard(folder: Path) -> None:
    weight_map = shard(folder)
    name = next(name for name, file in weight_map.items() if "00001" in file)
    write_index(folder, weight_map | {name: "model-00002-of-00002.safetensors"})


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BAD_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown model type": (lambda f: change_config(f, model_type="zzz"), "zzz"),
    "no language model": (lambda f: replace_config(f, model_type="vit"), "no causal language model for ViTConfig"),
    "encoder-decoder": (lambda f: replace_config(f, model_type="t5"), "no causal language model for T5Config"),
    "recurrent": (
        lambda f: replace_config(f, model_type="mamba", vocab_size=4096, hidden_size=64, num_hidden_layers=1),
        "MambaForCausalLM",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "truncated weights": (truncate, "1000 of 10957216 bytes are missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no safetensors file"),
    "missing shard": (missing_shard, "model-00002-of-00002.safetensors"),
    "truncated shard": (truncated_shard, "model-00002-of-00002.safetensors: truncated"),
    "index and shard disagree": (index_names_the_wrong_shard, "model-00002-of-00002.safetensors"),
    "pickled weights": (only_pickles, "pytorch_model.bin"),
    "another model's weights": (lambda f: change_config(f, intermediate_size=700), "needs shape [700, 256]"),
    "a layer too many": (lambda f: change_config(f, num_hidden_layers=7), "holds no tensor 'model.layers.6."),
    "quantised": (lambda f: change_config(f, quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer files"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot build its tokenizer"),
}


def expect_error(capsys: pytest.CaptureFixture[str], arguments: list[str], *, code: int = 2) -> str:
    """Run the command, and return its error line after checking its form."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == code
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    hints = [line for line in lines if line.startswith(" hint: ")]
    assert len(errors) == len(hints) == 1, lines
    assert not any("Traceback" in line for line in lines)
    return errors[0]


def succeed(arguments: list[str]) -> None:
    """Run the command in this process; it must end with exit code 0."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert not exit_info.value.code


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models(case: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, expected = BAD_MODELS[case]
    spoil(model)
    error = expect_error(capsys, ["export", str(model), "-o", str(model.parent / "out")])
    assert expected in error
    assert [path.name for path in model.parent.iterdir()] == ["model"]


BAD_OPTIONS = {
    "element type": (["--dtype", "bf16"], "'bf16' is not supported"),
    "archive": (["--archive", "zip"], "'zip' is unknown"),
    "engine": (["--engine", "onnx"], "'onnx' is unknown"),
    "no tract": (["--tract", "/bin/ls"], "/bin/ls"),
    "pattern": (["--keep-f32", "nothing*"], "matches no parameter"),
    "revision of a folder": (["--revision", "main"], "local folder"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, expected = BAD_OPTIONS[case]
    assert expected in expect_error(capsys, ["export", str(EXAMPLE), "-o", str(tmp_path / "out"), *options])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [("./not-here", "no such folder"), ("a b c", "neither a local folder nor a hub id")],
)
def test_bad_sources(source: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in expect_error(capsys, ["export", source, "-o", str(tmp_path / "out")])


def test_existing_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    arguments = ["export", str(EXAMPLE), "-o", str(foreign)]
    assert "exists already" in expect_error(capsys, arguments)
    assert "no earlier export" in expect_error(capsys, [*arguments, "--force"])
    assert (foreign / "thesis.txt").read_text() == "years of work"


def test_force_replaces_an_earlier_export_only_when_the_new_one_is_whole(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = model.parent / "out"
    arguments = ["export", str(model), "-o", str(out), "--no-check", "--quiet"]
    succeed(arguments)
    before = (out / "export.json").read_text()
    assert "exists already" in expect_error(capsys, arguments)
    change_config(model, num_hidden_layers=7)
    expect_error(capsys, [*arguments, "--force"])
    assert (out / "export.json").read_text() == before
    change_config(model, num_hidden_layers=6)
    succeed([*arguments, "--force", "--dtype", "f32"])
    assert json.loads((out / "export.json").read_text())["graph"]["dtype"] == "f32"
    assert sorted(path.name for path in model.parent.iterdir()) == ["model", "out"]


def test_json_speaks_json_for_results_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    succeed(["export", str(EXAMPLE), "-o", str(out), "--json", "--decode-steps", "4"])
    result = json.loads(capsys.readouterr().out)
    assert result["validation"]["passed"] is True
    assert result["files"]["model.nnef.tar"]["sha256"]
    with pytest.raises(SystemExit):
        main(["export", str(EXAMPLE), "-o", str(out), "--json"])
    error = json.loads(capsys.readouterr().out)
    assert error["error"] == "OutputExistsError"
    assert "--force" in error["hint"]


def test_a_tampered_archive_fails_validation_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    succeed(["export", str(EXAMPLE), "-o", str(out), "--archive", "dir", "--no-check", "--quiet", "--dtype", "f32"])
    succeed(["validate", str(out), "--reference", str(EXAMPLE), "--decode-steps", "4", "--quiet"])
    weight = out / "model.nnef" / "model.layers.3.mlp.up_proj.weight.dat"
    data = bytearray(weight.read_bytes())
    data[128 + 3 : 128 + 4 * 2000 : 4] = b"\x3f" * len(range(128 + 3, 128 + 4 * 2000, 4))
    weight.write_bytes(bytes(data))
    with pytest.raises(SystemExit) as exit_info:
        main(["validate", str(out), "--reference", str(EXAMPLE), "--decode-steps", "4"])
    assert exit_info.value.code == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_overflowing_weights_are_counted_and_can_be_kept(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.layers.2.mlp.down_proj.weight"
    tensors = load_file(model / "model.safetensors")
    tensors[name][3, 5] = 1e6
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = model.parent / "out"
    arguments = ["export", str(model), "-o", str(out), "--archive", "dir", "--force"]
    succeed([*arguments, "--no-check"])
    warning = capsys.readouterr().err
    assert name in warning and "1 values" in warning and f"--keep-f32 {name}" in warning
    assert json.loads((out / "export.json").read_text())["f16_overflows"][name]["count"] == 1

    from generic_export.nnef.dat import read_dat

    stored = read_dat(out / "model.nnef" / f"{name}.dat")
    assert float(stored[3, 5]) == 65504.0
    succeed([*arguments, "--no-check", "--keep-f32", name])
    assert name not in capsys.readouterr().err
    kept = read_dat(out / "model.nnef" / f"{name}.dat")
    assert str(kept.dtype) == "torch.float32"
    assert float(kept[3, 5]) == float(tensors[name][3, 5])


def test_keep_f32_gives_an_archive_that_agrees(tmp_path: Path) -> None:
    patterns = ["--keep-f32", "*.down_proj.weight", "--keep-f32", "model.layers.1.input_layernorm.weight"]
    succeed(["export", str(EXAMPLE), "-o", str(tmp_path / "out"), "--quiet", "--decode-steps", "8", *patterns])


@pytest.mark.parametrize("command", ["validate", "generate"])
def test_a_folder_that_is_no_export(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no export.json" in expect_error(
        capsys, [command, str(tmp_path), *(["hi"] if command == "generate" else [])]
    )


# --- in processes of their own --------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "t2n_llm.cli", *map(str, arguments)]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, t2n_llm.cli as cli\n"
        "try: cli.main(['export', '--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "assert not {'torch', 'transformers', 'tract', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "--keep-f32" in run.stdout


@pytest.mark.parametrize(
    ("moment", "sent"),
    [("Capturing", signal.SIGINT), ("Running PyTorch", signal.SIGTERM), ("Checking in tract: decode", signal.SIGINT)],
)
def test_an_interrupt_leaves_nothing_behind(moment: str, sent: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        command("export", EXAMPLE, "-o", out, "--decode-steps", "300"), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if moment in line:
            time.sleep(0.05)
            process.send_signal(sent)
            break
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 2, "".join(seen) + rest
    assert "error: interrupted." in rest
    assert list(tmp_path.iterdir()) == []
    assert children_running(str(tmp_path)) == []


def children_running(text: str) -> list[str]:
    """Return the command lines of running processes that mention a path."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize(("size", "moment"), [("8m", "before"), ("6m", "during")])
def test_a_full_disk(size: str, moment: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        # tgz: its size is not known beforehand, so that the disk fills up while writing.
        form = ["--archive", "tgz"] if moment == "during" else []
        run = subprocess.run(
            command("export", EXAMPLE, "-o", disk / "out", "--dtype", "f32", "--no-check", *form),
            capture_output=True,
            text=True,
        )
        assert run.returncode == 2, run.stderr
        assert run.stderr.count("error: ") == run.stderr.count(" hint: ") == 1
        assert "bytes" in run.stderr or "disk is full" in run.stderr
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_hub_snapshots_offline(tmp_path: Path) -> None:
    """The real hub path on a cache in hub layout: offline, by branch and by commit; an unknown one is a clear error."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(EXAMPLE)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_TOKEN", None)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment, cwd=tmp_path)

    assert run("export", "someone/tiny", "--no-check").returncode == 0
    manifest = json.loads((tmp_path / "tiny" / "export.json").read_text())
    assert manifest["source"]["name"] == "someone/tiny"
    assert manifest["source"]["revision"] == commit
    # The recorded id and revision are enough to validate later.
    assert run("validate", "tiny", "--decode-steps", "4").returncode == 0
    unknown = run("export", "someone/other")
    assert unknown.returncode == 2
    assert "not in the local cache" in unknown.stderr
