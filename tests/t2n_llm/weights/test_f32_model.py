"""Reference runs whose weights are on disk: where they are placed, that they say the same, and how much memory they take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from generic_export.errors import DiskFullError, NotEnoughMemoryError, OptionError
from t2n_llm.check.reference import (
    OFFLOADED_GREEDY_STEPS,
    CheckPlan,
    ReferenceRun,
    plan_check,
    run_reference,
)
from t2n_llm.export.pipeline import export_llm
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.hub import open_source
from t2n_llm.weights import placement as placing
from t2n_llm.weights.f32_model import load_f32
from t2n_llm.weights.placement import Placement, Residency, available_memory, plan_residency
from t2n_llm.zoo.tiny_model import build_tiny_model
from tests.families import FAMILIES, save_tiny_model
from tests.model_graphs import model_graph
from tests.t2n_llm.command_line import call, refused, small_disk, strict_json


@pytest.fixture(autouse=True)
def _tiny_layers_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_ALWAYS_RESIDENT_BYTES", 0)


def _mixtral() -> Any:
    from transformers import AutoConfig

    shape = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoConfig.for_model(
        "mixtral",
        vocab_size=160,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.12,
        max_position_embeddings=256,
        **shape,
    )


def saved(family: str, folder: Path, dtype: torch.dtype) -> Any:
    """Write a random checkpoint; return its config."""
    if family != "mixtral":
        save_tiny_model(family, folder, dtype)
        return FAMILIES[family]()
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(_mixtral(), dtype=torch.float32).to(dtype).save_pretrained(folder)
    return _mixtral()


def same(first: ReferenceRun, second: ReferenceRun) -> bool:
    """Say whether two runs gave the same bits."""
    arrays = [(first.text_logits, second.text_logits), (first.greedy_logits, second.greedy_logits)]
    arrays += list(zip(first.text_states.values(), second.text_states.values(), strict=True))
    return first.greedy_ids == second.greedy_ids and all(np.array_equal(left, right) for left, right in arrays)


# --- the same answers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in ("llama", "gemma2", "mixtral", "gpt2", "phi3", "qwen3")),
        ("llama", torch.bfloat16),
        ("mixtral", torch.bfloat16),
    ],
    ids=str,
)
def test_weights_on_disk_give_the_same_bits(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """llama ties its embeddings; mixtral's experts are stacked while loading, and lie in no file as they are used."""
    config = saved(family, tmp_path, dtype)
    placements = (Placement("disk"), Placement("auto", {"cpu": 150_000}))
    for forced in (True, False):
        plan = plan_check(config, None, 6, teacher_forced=forced)
        in_memory = run_reference(tmp_path, plan)
        for placement in placements:
            residency = plan_residency(meta_model(config), placement)
            assert residency.offloaded
            assert same(run_reference(tmp_path, plan, residency=residency), in_memory)


def renamed(folder: Path, file: str, prefix: str) -> None:
    """Give the weights of a checkpoint another file and other names."""
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / file)


@pytest.mark.parametrize(
    ("file", "prefix"),
    [
        ("consolidated.safetensors", ""),
        ("epoch-3.pt", ""),
        ("model.safetensors", "_orig_mod."),
        ("pytorch_model.bin", "module."),
        ("best.safetensors", "module._orig_mod."),
    ],
)
def test_files_and_tensors_of_any_name_are_the_same_reference(file: str, prefix: str, tmp_path: Path) -> None:
    config = saved("mixtral", tmp_path, torch.bfloat16)
    plan = plan_check(config, None, 2, teacher_forced=True)
    expected = run_reference(tmp_path, plan)
    renamed(tmp_path, file, prefix)
    assert same(run_reference(tmp_path, plan), expected)
    from_disk = run_reference(tmp_path, plan, residency=plan_residency(meta_model(config), Placement("disk")))
    assert np.array_equal(from_disk.text_logits, expected.text_logits)


def test_a_wrapped_checkpoint_is_reported(tmp_path: Path) -> None:
    saved("llama", tmp_path, torch.bfloat16)
    renamed(tmp_path, "model.safetensors", "_orig_mod.")
    (note,) = open_source(str(tmp_path), require_tokenizer=False).checkpoint().notes
    assert "_orig_mod. (torch.compile)" in note


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved("mixtral", tmp_path / "model", torch.float32)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    plan = plan_check(config, None, 2, teacher_forced=True)
    run_reference(tmp_path / "model", plan, residency=plan_residency(meta_model(config), Placement("disk")))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_full_temporary_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved("mixtral", tmp_path / "model", torch.float32)
    plan = plan_check(config, None, 2, teacher_forced=True)
    residency = plan_residency(meta_model(config), Placement("disk"))
    with small_disk(tmp_path / "temporary", "128k") as disk:
        if not disk:
            pytest.skip("needs the right to mount a tmpfs")
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        with pytest.raises(DiskFullError, match="the disk is full") as caught:
            run_reference(tmp_path / "model", plan, residency=residency)
        assert "TMPDIR" in str(caught.value.hint)
        assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    config = saved("llama", tmp_path, torch.float32)
    plan = plan_check(config, None, 4)
    in_memory = run_reference(tmp_path, plan)
    for memory in ({}, {"0": 200_000, "cpu": 100_000}):
        residency = plan_residency(meta_model(config), Placement("cuda", memory))
        answer = run_reference(tmp_path, plan, residency=residency)
        np.testing.assert_allclose(answer.text_logits, in_memory.text_logits, atol=1e-3)


# --- plans ------------------------------------------------------------------------------------


def test_a_teacher_forced_plan_decodes_the_text() -> None:
    config = FAMILIES["llama"]()
    plan = plan_check(config, None, 64, teacher_forced=True)
    assert len(plan.text_ids) == plan.prompt_length + 64
    assert (plan.decode_steps, plan.greedy_steps) == (64, OFFLOADED_GREEDY_STEPS)
    assert plan.passes == OFFLOADED_GREEDY_STEPS
    usual = plan_check(config, None, 64)
    assert (usual.greedy_steps, usual.passes) == (64, 65)


def test_teacher_forcing_within_few_positions() -> None:
    config = FAMILIES["gpt2"]()
    config.n_positions = 20
    plan = plan_check(config, None, 64, teacher_forced=True)
    assert (len(plan.text_ids), plan.prompt_length + plan.decode_steps) == (20, 20)


def test_the_decoded_rows_are_those_of_the_text(tmp_path: Path) -> None:
    config = saved("llama", tmp_path, torch.float32)
    run = run_reference(tmp_path, plan_check(config, None, 9, teacher_forced=True))
    start = run.plan.prompt_length
    assert run.decode_ids == run.plan.text_ids[start : start + 9]
    assert np.array_equal(run.decode_logits, run.text_logits[start - 1 : start + 8])
    assert run.greedy_ids[0] == run.text_logits[start - 1].argmax()
    usual = run_reference(tmp_path, CheckPlan(run.plan.text_ids, run.plan.chunk_ends, start, 4))
    assert (usual.decode_ids, usual.greedy_ids) == (run.greedy_ids, run.greedy_ids)
    np.testing.assert_allclose(usual.greedy_logits, run.greedy_logits, atol=1e-4)


# --- placing ----------------------------------------------------------------------------------


def on_meta(*sizes: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(size, 1, bias=False) for size in sizes])


def test_memory_is_filled_before_the_disk() -> None:
    residency = plan_residency(on_meta(100, 100, 100, 100), Placement("auto", {"cpu": 850}))
    assert residency == Residency({"0": "cpu", "1": "cpu", "2": "disk", "3": "disk"}, 800)


def test_what_fits_stays_in_memory() -> None:
    residency = plan_residency(on_meta(100, 100), Placement("auto", {"cpu": 800}))
    assert set(residency.devices.values()) == {"cpu"}
    assert not residency.offloaded


def test_tied_layers_go_together() -> None:
    model = on_meta(100, 100, 100)
    model[2].weight = model[0].weight
    assert plan_residency(model, Placement("auto", {"cpu": 400})).devices == {"0": "cpu", "1": "disk", "2": "cpu"}
    assert plan_residency(model, Placement("disk")).devices == {"0": "cpu", "1": "disk", "2": "cpu"}
    model = on_meta(100, 50, 100)
    model[2].weight = model[0].weight
    assert plan_residency(model, Placement("disk")).devices == {"0": "disk", "1": "cpu", "2": "disk"}


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(0, 40_000))
def test_the_cap_holds_for_any_model(sizes: list[int], cap: int) -> None:
    model = on_meta(*sizes)
    residency = plan_residency(model, Placement("auto", {"cpu": cap}))
    held = sum(4 * sizes[int(path)] for path, device in residency.devices.items() if device == "cpu")
    assert len(residency.devices) == len(sizes)
    assert residency.disk_bytes + held == 4 * sum(sizes)
    # Accelerate wants something to compute beside: one smallest layer may exceed the cap.
    assert held <= cap or (list(residency.devices.values()).count("cpu") == 1 and held == 4 * min(sizes))


def test_a_model_larger_than_memory_is_offloaded_unless_memory_is_asked_for() -> None:
    free = available_memory()
    layers = on_meta(*[free // 80] * 30)  # 1.5 times the free memory, a twentieth each
    residency = plan_residency(layers)
    assert 0 < residency.disk_bytes < 1.5 * free
    with pytest.raises(NotEnoughMemoryError, match=r"needs [\d.]+ GB of memory, but [\d.]+ GB are free") as caught:
        plan_residency(layers, Placement("cpu"))
    assert "--device-map auto" in str(caught.value.hint)


def test_one_layer_larger_than_memory_is_refused_with_figures() -> None:
    free = available_memory()
    for device_map in ("auto", "disk"):
        with pytest.raises(NotEnoughMemoryError, match=r"needs [\d.]+ GB of memory, but [\d.]+ GB are free") as caught:
            plan_residency(on_meta(free // 3), Placement(device_map))
        assert "--no-check" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (None, {}),
        ("8GB", {"cpu": 8 * 10**9}),
        ("500MiB", {"cpu": 500 << 20}),
        ("1.5g", {"cpu": 1_500_000_000}),
        ("123", {"cpu": 123}),
        ("cpu=1kb, 0=2GiB,", {"cpu": 1000, "0": 2 << 30}),
    ],
)
def test_sizes(text: str | None, sizes: dict[str, int]) -> None:
    assert Placement.parse("auto", text).max_memory == sizes


@pytest.mark.parametrize("text", ["many", "-1", "8XB", "gpu=8GB", "=8GB", "cpu=", "1e9"])
def test_sizes_without_meaning(text: str) -> None:
    with pytest.raises(OptionError):
        Placement.parse("auto", text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(OptionError, match="no GPU"):
        plan_residency(on_meta(10), Placement("cuda"))


# --- through the commands ---------------------------------------------------------------------


def test_export_and_validate_from_disk(tiny_llama: Path, parent: Path) -> None:
    options = ("--device-map", "disk", "--decode-steps", 8)
    outcome = call("export", tiny_llama, "-o", parent / "x", "--no-tokenizer", "--dtype", "f32", *options)
    assert outcome.code == 0, outcome
    assert f"read about {OFFLOADED_GREEDY_STEPS + 1} times" in " ".join(outcome.err.split())
    assert "4 tokens instead of 8" in " ".join(outcome.out.split())
    checked = call("validate", parent / "x", "--reference", tiny_llama, *options, "--json")
    assert (checked.code, checked.err) == (0, ""), checked
    report = strict_json(checked.out)
    steps = {check["name"]: len(check["steps"]) for check in report["checks"]}
    assert (steps["decode"], steps["greedy"]) == (8, 4)
    apart = call("validate", parent / "x", "--reference", tiny_llama, *options, "--low-memory", "--json")
    assert strict_json(apart.out)["checks"] == report["checks"], "PyTorch in a process of its own says the same"


def test_a_memory_limit_on_the_command_line(tiny_llama: Path, parent: Path) -> None:
    words = ("export", tiny_llama, "--no-tokenizer", "--dtype", "f32", "--decode-steps", 4)
    outcome = call(*words, "-o", parent / "x", "--max-memory", "150kB")
    assert outcome.code == 0, outcome
    assert "stay on disk" in " ".join(outcome.err.split())
    for arguments in (("--max-memory", "some"), ("--device-map", "tape")):
        refused(call(*words, "-o", parent / "y", *arguments), arguments[1])
    refused(call(*words, "-o", parent / "y", "--device-map", "cpu", "--max-memory", "1kB"), "memory")


def test_the_bundles_of_a_short_generation_are_consistent(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from t2n_llm.check.bundles import make_bundles
    from t2n_llm.graph.options import GraphOptions

    config = AutoConfig.from_pretrained(tiny_llama)
    reference = run_reference(tiny_llama, plan_check(config, None, 20, teacher_forced=True))
    graph = model_graph(config, GraphOptions(dtype="f32"))
    generation = next(one for one in make_bundles(reference, graph.states, 1) if one.name == "generation")
    assert len(generation.turns) == OFFLOADED_GREEDY_STEPS  # the prompt, and all tokens but the last
    assert np.array_equal(generation.expected["outputs"][0, 0], reference.greedy_logits[-1])


# --- memory -----------------------------------------------------------------------------------


def test_padding_row_is_the_checkpoints(tmp_path: Path) -> None:
    """Youtu's initialiser writes zeros to the row, also to one that is loaded."""
    from transformers import AutoModelForCausalLM

    model = build_tiny_model("youtu")
    row = model.config.pad_token_id
    expected = model.model.embed_tokens.weight[row].detach().clone()
    model.save_pretrained(tmp_path)
    loaded = load_f32(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight[row], expected)
    assert torch.equal(loaded.lm_head.weight[row], expected)
    # What it is for: when this fails, transformers keeps the row itself.
    assert not AutoModelForCausalLM.from_pretrained(tmp_path).model.embed_tokens.weight[row].any()


_LARGE = """
import os, re, sys, threading
from pathlib import Path
from transformers import AutoConfig
from t2n_llm.check.reference import plan_check, run_reference
from t2n_llm.weights.placement import Placement, plan_residency
from t2n_llm.source.empty_model import meta_model

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

def grown(folder):
    # Return how many MiB of its own, and with mapped pages of the checkpoint, a run takes at most.
    config = AutoConfig.from_pretrained(folder)
    residency = plan_residency(meta_model(config), Placement("auto", {"cpu": 100_000_000}))
    assert residency.offloaded
    before, most, done = {}, {}, threading.Event()

    def watch():
        while not done.wait(0.005):
            for field in ("RssAnon", "VmRSS"):
                most[field] = max(most[field], megabytes(field))

    before.update({field: megabytes(field) for field in ("RssAnon", "VmRSS")})
    most.update(before)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    run_reference(folder, plan_check(config, None, 2, teacher_forced=True), residency=residency)
    done.set()
    watcher.join()
    return [most[field] - before[field] for field in before]

tiny, *folders = map(Path, sys.argv[1:])
run_reference(tiny, plan_check(AutoConfig.from_pretrained(tiny), None, 2, teacher_forced=True))
for folder in folders:
    if not os.fork():  # each begins with the same memory
        print(folder.name, *grown(folder), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_is_bounded_by_the_budget(tiny_llama: Path, tmp_path: Path) -> None:
    """A model of 0.5 GB in f32, of which 0.1 GB may stay in memory."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llama",
        vocab_size=4000,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    shapes = {name: value.shape for name, value in meta_model(config).state_dict().items() if name != "lm_head.weight"}
    assert sum(4 * shape.numel() for shape in shapes.values()) > 5e8
    folders = []
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        config.save_pretrained(folder)
        tensors = {name: torch.full(shape, 0.01, dtype=dtype) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        del tensors
        folders.append(str(folder))
    command = [sys.executable, "-c", _LARGE, str(tiny_llama), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    for folder in folders:
        (Path(folder) / "model.safetensors").unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()[-2:]
    print(*lines, sep="\n")
    for dtype, own, resident in map(str.split, lines):
        assert int(own) < 250, f"{dtype}: {own} MiB"
        assert int(resident) < 400, f"{dtype}: {resident} MiB with mapped pages of the checkpoint"


def test_options_are_recorded(tiny_llama: Path, tmp_path: Path) -> None:
    result = export_llm(
        str(tiny_llama),
        tmp_path / "x",
        check=False,
        require_tokenizer=False,
        device_map="disk",
        max_memory="1GB",
    )
    assert result.manifest["options"]["placement"] == {"device_map": "disk", "max_memory": {"cpu": 10**9}}
