"""Exports for a GPU: how the graph is written, what is said of it, what is refused, and the checks of a device, here on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from generic_export.errors import OptionError, WrongOnDeviceError
from generic_export.inference_target.tract.engines.device_forms import DETECT_ALL, refuse_wrong_forms
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.nnef.attention_forms import AttentionForm, attention_forms
from t2n_llm.check.agreement import Tolerance, ValidationReport
from t2n_llm.check.devices import EngineKeepsCaches, device_checks, named_after
from t2n_llm.check.reference import ReferenceRun, plan_check, run_reference
from t2n_llm.check.runner import WheelRunner
from t2n_llm.graph.options import GraphOptions
from tests.families import FAMILIES, config, save_tiny_model
from tests.model_graphs import model_graph
from tests.shared_folders import SharedFolders
from tests.t2n_llm.command_line import Outcome, call
from tests.trained_model import REAL_MODEL

WIDE = {"wide": config("llama", head_dim=64)}  # 256 positions: decoding crosses 128


@pytest.fixture(scope="module")
def wide_model(shared_folders: SharedFolders) -> Path:
    return shared_folders("wide-llama", lambda folder: save_tiny_model("wide", folder, torch.float16, configs=WIDE))


@pytest.fixture(scope="module")
def cuda_outcome(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("cuda") / "export"
    arguments = ("--device", "cuda", "--device", "cpu", "--no-tokenizer", "--decode-steps", 4)
    return folder, call("export", wide_model, "-o", folder, *arguments)


@pytest.fixture(scope="module")
def cuda_export(cuda_outcome: tuple[Path, Outcome]) -> Path:
    return cuda_outcome[0]


@pytest.fixture(scope="module")
def reference(wide_model: Path) -> ReferenceRun:
    from transformers import AutoConfig

    return run_reference(wide_model, plan_check(AutoConfig.from_pretrained(wide_model), None, 4, at_least=2016))


def test_an_export_says_for_which_device_it_is_and_why(cuda_export: Path) -> None:
    manifest = json.loads((cuda_export / "export.json").read_text())
    (note,) = manifest["devices"]
    assert (note["device"], note["forms"]) == ("cuda", {"padded sdpa": 2})
    assert "before it has arrived" in note["reasons"][0]
    assert manifest["options"]["device"] == ["cuda", "cpu"]
    assert "| device | cuda: 2 x padded sdpa" in (cuda_export / "README.md").read_text()
    shown = call("inspect", cuda_export, "--no-engine")
    assert "cuda: 2 x padded sdpa" in " ".join(shown.out.split())


def test_an_export_for_cuda_is_not_refused_there(cuda_export: Path) -> None:
    refuse_wrong_forms(cuda_export / "model.nnef.tar", "cuda", "0.23.9", [DETECT_ALL])
    with TractWheel().load(cuda_export / "model.nnef.tar", transforms=[DETECT_ALL]) as model:
        assert model.operators()["DynamicKeyValueCache"] == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_the_device_an_export_says_how_to_check_it_there(
    wide_model: Path, cuda_outcome: tuple[Path, Outcome]
) -> None:
    folder, outcome = cuda_outcome
    assert outcome.code == 0
    said = " ".join(outcome.err.split())
    assert "validated on the CPU only" in said and f"t2n-llm validate {folder} --device cuda" in said
    missing = call("validate", folder, "--reference", wide_model, "--device", "cuda")
    assert missing.code == 2 and "cannot compute on cuda here" in missing.err and "PyTorch" not in missing.err


@pytest.mark.parametrize("command", ["generate", "bench", "profile", "validate", "inspect"])
def test_an_export_with_the_operator_is_refused_on_cuda_by_every_command(command: str, half_export: Path) -> None:
    words = {"generate": ["The old man"], "validate": ["--reference", REAL_MODEL]}.get(command, [])
    outcome = call(command, half_export, *words, "--device", "cuda")
    assert outcome.code == (1 if command == "inspect" else 2)
    said = " ".join((outcome.out + outcome.err).split())
    assert "written as sdpa" in said and "--device cuda" in said


def test_an_export_with_the_operator_is_refused_on_cuda(half_export: Path) -> None:
    with pytest.raises(WrongOnDeviceError, match="sdpa"):
        TractWheel(device="cuda").load(half_export / "model.nnef.tar", transforms=[DETECT_ALL])


def test_checks_of_a_device(cuda_export: Path, reference: ReferenceRun) -> None:
    with WheelRunner(cuda_export / "model.nnef.tar") as runner:
        checks = device_checks(EngineKeepsCaches(runner), reference, Tolerance.for_export("f16", mixed=True))
    assert [check.name for check in checks][::2] == [
        "prompt of 64 in chunks of 64",
        "prompt of 100 in chunks of 64",
        "prompt of 120 in chunks of 128",
        "prompt of 128 in chunks of 128",
        "prompt of 240 in chunks of 128",
    ]
    assert all(check.passed for check in checks)
    report = named_after(ValidationReport("wheel", "0.23.9", "f16", Tolerance(1, 1), checks), "cuda")
    assert report.engine == "wheel on cuda" and report.checks[0].name.startswith("cuda: prompt of 64")


def test_a_device_that_answers_differently_each_time_fails(cuda_export: Path, reference: ReferenceRun) -> None:
    class Unsteady(EngineKeepsCaches):
        def run_turns(self, turns, *, stateful):  # type: ignore[no-untyped-def]
            rows = super().run_turns(turns, stateful=stateful)
            return [row + torch.randn(1).item() * 1e-6 for row in rows]

    with WheelRunner(cuda_export / "model.nnef.tar") as runner:
        checks = device_checks(Unsteady(runner), reference, Tolerance.for_export("f16", mixed=True))
    assert [check.passed for check in checks] == [True, False] * 5
    assert checks[1].note == "two runs of the same tokens give different results"


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "deepseek_v2"])
def test_no_family_has_a_form_that_is_wrong_on_cuda(family: str) -> None:
    further = {
        "gpt_oss": config("gpt_oss", head_dim=64, num_local_experts=4, num_experts_per_tok=2),
        "deepseek_v2": config("deepseek_v2", q_lora_rank=None, n_routed_experts=4, first_k_dense_replace=2),
    }
    graph = model_graph((FAMILIES | further)[family](), GraphOptions(device=("cuda",))).document
    assert set(attention_forms(graph.operations)) <= {AttentionForm.PADDED_SDPA, AttentionForm.PLAIN_SOFTMAX}


def test_devices_are_checked() -> None:
    with pytest.raises(OptionError, match="device 'gpu' is unknown"):
        GraphOptions(device=("gpu",))
    assert GraphOptions(device=()).device == ("cpu",)
