"""The commands as a user runs them: what they print, in which mode, with which exit code, also when cut short."""

from __future__ import annotations

import json
import shutil
import signal
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from generic_export.inference_target.tract.releases.install import find_tract_cli
from generic_export.nnef.dat import HEADER_BYTES
from tests.families import save_tiny_model
from tests.shared_folders import content
from tests.systems import needs_posix
from tests.t2n_llm.command_line import RunningCommand, call, refused, run_python, strict_json, unchanged
from tests.trained_model import REAL_MODEL

STAGES = ("Reading", "Capturing", "Writing", "Running PyTorch", "Checking in tract: greedy", "Recording")


def fresh(model: Path, folder: Path) -> tuple[object, ...]:
    """Return an export command that checks a few tokens."""
    return ("export", model, "-o", folder, "--no-tokenizer", "--dtype", "f32", "--decode-steps", 4)


# --- help and usage ---------------------------------------------------------------------------

_HELP = """
import resource, sys
from t2n_llm.cli.app import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
usage = resource.getrusage(resource.RUSAGE_SELF)
print("\\n", usage.ru_utime + usage.ru_stime, *{"torch", "transformers", "numpy"} & set(sys.modules))
"""

_SMALLEST_HELP = """
import resource, sys, typer
app = typer.Typer(rich_markup_mode="rich")
@app.command()
def one(x: str = "y") -> None: ...
app(["--help"], standalone_mode=False)
usage = resource.getrusage(resource.RUSAGE_SELF)
print("\\n", usage.ru_utime + usage.ru_stime)
"""


def _seconds(script: str, *arguments: str) -> tuple[float, list[str]]:
    """Return the processor time of a command that prints its help, and which heavy packages it imported."""
    text, _, last = run_python(script, *arguments).rstrip().rpartition("\n")
    assert "Usage:" in text
    seconds, *imported = last.split()
    return float(seconds), imported


@pytest.mark.parametrize("arguments", [["--help"], [], ["export", "--help"]], ids=" ".join)
def test_help_is_quick_and_imports_no_torch(arguments: list[str]) -> None:
    tries = []
    while not tries or (tries[-1] >= 3 and len(tries) < 5):  # other work on the machine slows one of the two
        seconds, imported = _seconds(_HELP, *arguments)
        assert not imported
        tries.append(seconds / _seconds(_SMALLEST_HELP)[0])
    assert tries[-1] < 3, tries  # half of it is typer's and rich's own start


def test_version() -> None:
    assert call("--version").out.startswith("t2n-llm ")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["exprt"], "exprt"),
        (["export"], "source"),
        (["validate"], "folder"),
        (["generate", "x", "hi", "--temperature", "-1"], "--temperature"),
        (["validate", "x", "--decode-steps"], "--decode-steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_line(arguments: list[str], word: str) -> None:
    outcome = call(*arguments)
    refused(outcome, word)
    assert "--help" in outcome.line("hint")
    in_json = json.loads(call(*arguments, "--json").out)
    assert word in in_json["message"]


# --- modes ------------------------------------------------------------------------------------


def test_export_for_people(tiny_llama: Path, parent: Path) -> None:
    outcome = call(*fresh(tiny_llama, parent / "x"))
    assert outcome.code == 0, outcome
    for stage in STAGES:
        assert stage in outcome.err
    for name in ("prefill", "chunked prefill", "decode", "greedy"):
        assert f"{name} " in outcome.out
    assert outcome.out.count("agrees") == 4
    assert str(parent / "x" / "model.nnef.tar") in outcome.out
    assert [path.name for path in parent.iterdir()] == ["x"]


def test_export_in_json(tiny_llama: Path, parent: Path) -> None:
    outcome = call(*fresh(tiny_llama, parent / "x"), "--json")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    result = strict_json(outcome.out)
    assert result["output_dir"] == str(parent / "x")
    assert result["validation"]["passed"] is True
    assert result["archive"] == str(parent / "x" / "model.nnef.tar")
    manifest = strict_json((parent / "x" / "export.json").read_text())
    assert result.items() >= {key: value for key, value in manifest.items() if key != "archive"}.items()


def test_quiet_export(tiny_llama: Path, parent: Path) -> None:
    outcome = call(*fresh(tiny_llama, parent / "x"), "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_errors_in_json(tiny_llama: Path, parent: Path) -> None:
    for arguments in (["--dtype", "bf16"], ["--keep-f32", "nothing"], ["--frobnicate"], ["--revision", "main"]):
        outcome = call(*fresh(tiny_llama, parent / "x"), *arguments, "--json")
        assert (outcome.code, outcome.err) == (2, ""), outcome
        error = strict_json(outcome.out)
        assert set(error) == {"error", "message", "hint"}
        assert error["message"]
        assert error["hint"]


def test_one_run_tells_the_next_nothing(parent: Path) -> None:
    loud, plain = call("--debug", "verify", parent / "x", "--json"), call("verify", parent / "x")
    assert "Traceback" in loud.err and strict_json(loud.out)["message"]
    assert "Traceback" not in plain.err and plain.out == "" and plain.line("error")


def test_quiet_error(tiny_llama: Path, parent: Path) -> None:
    outcome = call(*fresh(tiny_llama, parent / "x"), "--quiet", "--keep-f32", "nothing")
    assert len(outcome.err.splitlines()) == 2
    refused(outcome, "nothing")


def test_traceback_only_with_debug(parent: Path) -> None:
    assert "Traceback" not in call("export", "/nowhere", "-o", parent / "x").err
    assert "Traceback" in call("--debug", "export", "/nowhere", "-o", parent / "x").err


# --- disagreement -----------------------------------------------------------------------------


def scaled_model(folder: Path, factors: Mapping[str, float]) -> Path:
    """Write a random Llama some of whose weights are multiplied."""
    from safetensors.torch import load_file, save_file

    save_tiny_model("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        for part, factor in factors.items():
            if part in name:
                tensors[name] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("activations", ["f16", "f32"])
def test_activations_beyond_f16_do_not_overflow(tmp_path: Path, parent: Path, activations: str) -> None:
    source = scaled_model(tmp_path / "model", {"down_proj": 1000, "up_proj": 1000})
    arguments = ("export", source, "-o", parent / "x", "--no-tokenizer", "--decode-steps", 3, "--json")
    outcome = call(*arguments, "--activations", activations)
    assert outcome.code == 0, outcome
    assert strict_json(outcome.out)["validation"]["passed"] is True


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights that f16 does not hold: set to its largest, they make another model."""
    return scaled_model(tmp_path_factory.mktemp("models") / "overflowing", {"down_proj": 1e6})


def test_an_archive_that_disagrees_is_kept_as_failed(overflowing: Path, parent: Path) -> None:
    arguments = (
        "export",
        overflowing,
        "-o",
        parent / "x",
        "--no-tokenizer",
        "--decode-steps",
        3,
    )
    outcome = call(*arguments)
    assert outcome.code == 1, outcome
    assert "disagrees" in outcome.line("error")
    assert str(parent / "x.failed") in outcome.line("hint")
    assert "DIFFERS" in outcome.out
    assert [path.name for path in parent.iterdir()] == ["x.failed"]
    manifest = strict_json((parent / "x.failed" / "export.json").read_text())
    assert manifest["validation"]["passed"] is False
    assert (parent / "x.failed" / "model.nnef.tar").is_file()
    outcome = call(*arguments, "--json")
    assert outcome.code == 1 and all(line.startswith("warning: ") for line in outcome.err.splitlines())
    assert strict_json(outcome.out)["validation"]["passed"] is False
    assert [path.name for path in parent.iterdir()] == ["x.failed"]


def test_a_failed_folder_replaces_nothing_of_the_user(overflowing: Path, parent: Path) -> None:
    (parent / "x.failed").mkdir()
    (parent / "x.failed" / "thesis.txt").write_text("mine")
    outcome = call(*("export", overflowing, "-o", parent / "x", "--no-tokenizer", "--decode-steps", 3))
    assert outcome.code == 1, outcome
    assert (parent / "x.failed" / "thesis.txt").read_text() == "mine"
    assert (parent / "x.failed-2" / "export.json").is_file()
    assert str(parent / "x.failed-2") in outcome.line("hint")


def test_a_disagreeing_archive_does_not_replace_the_earlier_export(
    overflowing: Path, tiny_export: Path, parent: Path
) -> None:
    shutil.copytree(tiny_export, parent / "x")
    before = content(parent / "x")
    arguments = ("export", overflowing, "-o", parent / "x", "--no-tokenizer", "--decode-steps", 3, "--force")
    assert call(*arguments).code == 1
    assert content(parent / "x") == before
    assert sorted(path.name for path in parent.iterdir()) == ["x", "x.failed"]


# --- interrupted ------------------------------------------------------------------------------


def bytes_below(folder: Path) -> int:
    """Return how much lies in a folder right now."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@needs_posix
def test_ctrl_c_while_capturing(tiny_llama: Path, parent: Path) -> None:
    running = RunningCommand(*fresh(tiny_llama, parent / "x"))
    running.wait_for_stage("Capturing")
    with unchanged(parent):
        running.press_ctrl_c()
        refused(running.end(), "interrupted")


@needs_posix
def test_interrupted_while_writing_weights(large_model: Path, parent: Path) -> None:
    running = RunningCommand("export", large_model, "-o", parent / "a" / "x", "--no-tokenizer", "--no-check")
    running.wait_for_stage("Writing")
    running.wait_until(lambda: bytes_below(parent) > 8_000_000)
    running.terminate()
    refused(running.end(), "interrupted")
    assert list(parent.rglob("*")) == []


@needs_posix
def test_ctrl_c_while_the_engine_runs(tiny_llama: Path, tiny_export: Path, parent: Path) -> None:
    """Twice, as impatient people do."""
    shutil.copytree(tiny_export, parent / "x")
    with unchanged(parent):
        running = RunningCommand(*fresh(tiny_llama, parent / "x"), "--force")
        running.wait_for_stage("Checking in tract: prefill")
        running.wait_until(lambda: bool(running.children("wheel_worker")))
        running.press_ctrl_c()
        running.press_ctrl_c()
        refused(running.end(), "interrupted")


@needs_posix
def test_terminated_in_json(tiny_llama: Path, parent: Path) -> None:
    running = RunningCommand(*fresh(tiny_llama, parent / "x"), "--json")
    running.wait_until(lambda: bool(running.children("wheel_worker")))
    running.terminate()
    outcome = running.end()
    assert (outcome.code, outcome.err) == (2, ""), outcome
    assert strict_json(outcome.out)["message"] == "interrupted."
    assert list(parent.rglob("*")) == []


@needs_posix
def test_terminated_while_pytorch_runs_in_its_own_process(tiny_llama: Path, parent: Path) -> None:
    running = RunningCommand(*fresh(tiny_llama, parent / "x"), "--low-memory")
    running.wait_for_stage("Running PyTorch")
    running.wait_until(lambda: bool(running.children("spawn_main")))
    time.sleep(0.3)  # until it is wholly started
    running.terminate()
    time.sleep(0.7)  # it needs longer than that to import PyTorch
    still_there = running.children("spawn_main")
    refused(running.end(), "interrupted")
    assert not still_there
    assert list(parent.rglob("*")) == []


def test_the_command_gives_signals_back(parent: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    call("export", "/nowhere", "-o", parent / "x")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- validate ---------------------------------------------------------------------------------


def test_validate(tiny_export: Path, tiny_llama: Path) -> None:
    arguments = ("validate", tiny_export, "--reference", tiny_llama, "--decode-steps", 4)
    with unchanged(tiny_export):
        outcome = call(*arguments)
        assert outcome.code == 0, outcome
        assert outcome.out.count("agrees") == 4
    report = strict_json(call(*arguments, "--json").out)
    assert report["passed"] is True
    assert report["engine"] == "wheel"
    quiet = call(*arguments, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")


def test_validate_within_limits_of_ones_own(tiny_export: Path, tiny_llama: Path) -> None:
    arguments = ("validate", tiny_export, "--reference", tiny_llama, "--decode-steps", 2, "--engine", "auto", "--json")
    wide = call(*arguments, "--atol", 0.5)
    assert wide.code == 0, wide
    assert strict_json(wide.out)["tolerance"]["atol"] == 0.5
    narrow = call(*arguments, "--rtol", 0)
    assert narrow.code == 1, "no engine sums in exactly PyTorch's order"
    assert strict_json(narrow.out)["passed"] is False


def test_validate_with_the_command(tiny_export: Path, tiny_llama: Path) -> None:
    tract = find_tract_cli()
    if tract is None:
        pytest.skip("the tract command is not installed")
    arguments = ("validate", tiny_export, "--reference", tiny_llama, "--decode-steps", 4, "--json")
    for option in (["--engine", "cli"], ["--tract", tract]):
        outcome = call(*arguments, *option)
        assert outcome.code == 0, outcome
        assert strict_json(outcome.out)["engine"] == "cli"


@pytest.fixture
def export_copy(tiny_export: Path, tmp_path: Path) -> Path:
    """A copy of the checked export, to be damaged."""
    return Path(shutil.copytree(tiny_export, tmp_path / "export"))


def tamper(archive: Path, member: str) -> None:
    """Set one weight's values to other ones, in place in the tar."""
    with tarfile.open(archive) as tar:
        entry = tar.getmember(member)
    with archive.open("r+b") as file:
        file.seek(entry.offset_data + HEADER_BYTES)
        values = np.frombuffer(file.read(entry.size - HEADER_BYTES), np.float32)
        file.seek(entry.offset_data + HEADER_BYTES)
        file.write((-values).tobytes())


def test_validate_finds_a_changed_weight(export_copy: Path, tiny_llama: Path) -> None:
    tamper(export_copy / "model.nnef.tar", "model.layers.1.mlp.down_proj.weight.dat")
    arguments = ("validate", export_copy, "--reference", tiny_llama, "--decode-steps", 4)
    outcome = call(*arguments)
    assert outcome.code == 1, outcome
    assert "DIFFERS" in outcome.out
    assert "disagrees" in outcome.line("error")
    in_json = call(*arguments, "--json")
    assert in_json.code == 1
    assert strict_json(in_json.out)["passed"] is False
    quiet = call(*arguments, "--quiet")
    assert (quiet.code, quiet.out) == (1, "")
    assert "disagrees" in quiet.line("error")


def no_manifest(folder: Path) -> None:
    (folder / "export.json").unlink()


def broken_manifest(folder: Path) -> None:
    (folder / "export.json").write_text("{")


def manifest_of_another_format(folder: Path) -> None:
    (folder / "export.json").write_text('{"format": 99}')


def hollow_manifest(folder: Path) -> None:
    (folder / "export.json").write_text('{"format": 1}')


def no_archive(folder: Path) -> None:
    (folder / "model.nnef.tar").unlink()


def truncated_archive(folder: Path) -> None:
    data = (folder / "model.nnef.tar").read_bytes()
    (folder / "model.nnef.tar").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (no_manifest, "no export.json"),
        (broken_manifest, "export.json"),
        (manifest_of_another_format, "format"),
        (hollow_manifest, "export.json"),
        (no_archive, "model.nnef.tar"),
        (truncated_archive, "model.nnef.tar"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_validate_a_damaged_export(damage: Callable, word: str, export_copy: Path, tiny_llama: Path) -> None:
    damage(export_copy)
    refused(call("validate", export_copy, "--reference", tiny_llama, "--decode-steps", 2), word)


def test_validate_against_the_wrong_model(tiny_export: Path, tmp_path: Path) -> None:
    other_family = save_tiny_model("qwen3", tmp_path / "qwen3")
    refused(call("validate", tiny_export, "--reference", other_family), "llama", "qwen3")
    refused(call("validate", tiny_export, "--reference", REAL_MODEL), "160", "4096")
    other_weights = save_tiny_model("llama", tmp_path / "other", seed=1)
    assert call("validate", tiny_export, "--reference", other_weights, "--decode-steps", 2).code == 1


def test_validate_needs_to_know_the_original(tiny_export: Path) -> None:
    outcome = call("validate", tiny_export)
    refused(outcome, "tiny-llama")
    assert "--reference" in outcome.line("hint")


@pytest.mark.parametrize("option", ["--engine=foo", "--tract=/bin/ls"])
def test_validate_knows_its_engine_before_any_work(option: str, tiny_export: Path, tiny_llama: Path) -> None:
    outcome = call("validate", tiny_export, "--reference", tiny_llama, option)
    refused(outcome, option.split("=")[1])
    assert "PyTorch" not in outcome.err.splitlines()[0]


# --- generate ---------------------------------------------------------------------------------


def test_generate(real_export: Path) -> None:
    arguments = ("generate", real_export, "The old man", "-n", 12, "--raw")
    outcome = call(*arguments)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert len(outcome.out.split()) > 3
    *pieces, last = map(strict_json, call(*arguments, "--json").out.splitlines())
    assert (last["prompt"], last["text"]) == ("The old man", outcome.out.removesuffix("\n"))
    assert "".join(each["piece"] for each in pieces) == last["text"] and len(pieces) > 3
    assert (last["tokens"], last["ending"], last["held_tokens"]) == (12, "most tokens", 0)
    assert last["prompt_tokens"] == last["read_tokens"] and last["tokens_per_second"] > 0
    of_archive = call("generate", real_export / "model.nnef.tar", "The old man", "-n", 12, "--raw")
    assert of_archive.out == outcome.out


def test_generate_says_what_pytorch_says(real_export: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REAL_MODEL)
    model = AutoModelForCausalLM.from_pretrained(REAL_MODEL, dtype=torch.float32)
    raw = tokenizer("The old man", return_tensors="pt")["input_ids"]
    message = [{"role": "user", "content": "The old man"}]
    chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    for ids, option in ((raw, "--raw"), (chat["input_ids"], "--chat")):
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        expected = tokenizer.decode(answer, skip_special_tokens=True)
        outcome = call("generate", real_export, "The old man", "-n", 12, option)
        assert outcome.out == expected + "\n"


def first_token(folder: Path, prompt: str) -> int:
    """Return the token that greedy generation starts with."""
    from t2n_llm.check.runner import WheelRunner
    from t2n_llm.runtime.generate import ExportedModel

    model = ExportedModel.open(folder)
    with WheelRunner(model.archive) as runner:
        ids = np.array([model.encode(prompt, chat=False)], np.int64)
        return int(runner.open_session().run([ids])[0][0, -1].argmax())


def test_generate_ends_at_the_end_token(real_export: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(real_export, tmp_path / "export"))
    end = first_token(folder, "The old man")
    for ids in (end, [7, end]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        outcome = call("generate", folder, "The old man", "--raw")
        assert (outcome.code, outcome.out) == (0, "\n")


def test_a_prompt_in_chunks_says_the_same(real_export: Path, tmp_path: Path) -> None:
    arguments = ("The old man and the sea", "-n", 6, "--raw")
    whole = call("generate", real_export, *arguments)
    assert call("generate", real_export, *arguments, "--prefill-chunk", 2).out == whole.out
    folder = Path(shutil.copytree(real_export, tmp_path / "export"))
    manifest = json.loads((folder / "export.json").read_text())
    assert manifest["graph"]["prefill"] == [{"past": 0, "chunk": 128}]
    manifest["graph"]["prefill"] = [{"past": 0, "chunk": 3}, {"past": 3, "chunk": 1}]
    (folder / "export.json").write_text(json.dumps(manifest))
    assert call("generate", folder, *arguments).out == whole.out
    manifest["graph"]["prefill"] = [{"past": 0, "chunk": 0}]
    (folder / "export.json").write_text(json.dumps(manifest))
    refused(call("generate", folder, *arguments), "graph.prefill", "export.json")


def test_generate_from_a_seed(real_export: Path) -> None:
    arguments = ("generate", real_export, "The old man", "-n", 8, "--raw", "--temperature", 1.5, "--seed")
    first, again, other = (call(*arguments, seed).out for seed in (1, 1, 2))
    assert first == again != other


def test_generate_samples_as_its_folder_says(real_export: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(real_export, tmp_path / "export"))
    settings = {"do_sample": True, "temperature": 1.5, "eos_token_id": [2, 6], "typical_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    arguments = ("The old man", "-n", 8, "--raw")
    sampled = call("generate", folder, *arguments, "--seed", 1)
    assert "typical_p" in sampled.line("warning")
    assert sampled.out == call("generate", real_export, *arguments, "--seed", 1, "--temperature", 1.5).out
    greedy = call("generate", real_export, *arguments)
    assert call("generate", folder, *arguments, "--greedy").out == greedy.out != sampled.out
    assert call("generate", folder, *arguments, "--greedy").err == ""


def test_generate_stops(real_export: Path) -> None:
    arguments = ("generate", real_export, "The old man", "-n", 12, "--raw")
    whole = call(*arguments).out
    stop = whole.split()[2]
    assert call(*arguments, "--stop", "nowhere", "--stop", stop).out == whole[: whole.index(stop)] + "\n"
    last = strict_json(call(*arguments, "--stop", stop, "--json").out.splitlines()[-1])
    assert last["ending"] == "stop text" and last["tokens"] < 12


def test_generate_takes_the_length_of_its_folder(real_export: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(real_export, tmp_path / "export"))
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3}))
    last = strict_json(call("generate", folder, "The old man", "--raw", "--json").out.splitlines()[-1])
    assert last["tokens"] == 3
    last = strict_json(call("generate", folder, "The old man", "--raw", "--json", "-n", 5).out.splitlines()[-1])
    assert last["tokens"] == 5


def test_generate_refusals(real_export: Path, tiny_export: Path, tmp_path: Path) -> None:
    refused(call("generate", tiny_export, "hi"), str(tiny_export), "tokenizer")
    refused(call("generate", real_export, "word " * 2000, "--raw"), "1024")
    refused(call("generate", real_export, "hi", "--top-p", "0"), "top_p")
    refused(call("generate", real_export, "hi", "--greedy", "--min-p", "0.1"), "greedy")
    refused(call("generate", tmp_path, "hi"), "export.json")
    refused(call("generate", tmp_path / "nowhere", "hi"), "no such folder", str(tmp_path / "nowhere"))
