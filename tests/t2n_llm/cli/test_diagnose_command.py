"""`t2n-llm diagnose`: the guilty module, operator and line of models with planted faults; reports, interruption, advice."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from generic_export.diagnose import Diagnosis, Outcome, Stage
from generic_export.errors import CaptureError, EngineLoadError, SourceError, UnsupportedOperatorError, ValidationError
from kvcache.compat import cache_in
from t2n_llm.debug.call_sets import calls_of
from t2n_llm.debug.tiny_model import tiny_model
from t2n_llm.export.failure_hint import diagnose_command
from t2n_llm.source.reference import SourceRef
from tests.families import FAMILIES
from tests.systems import needs_posix
from tests.t2n_llm.command_line import RunningCommand, call, refused, strict_json
from tests.t2n_llm.debug.test_coverage import LLAMA_8B, write_config
from tests.trained_model import REAL_MODEL

_BRANCH = "if hidden.sum() > 0:\n            hidden = hidden * 2\n"
_UNSUPPORTED = "hidden = hidden + torch.special.hermite_polynomial_h(hidden, hidden.abs() + 1)\n"
_FROZEN = "hidden = hidden / float(int(hidden.shape[1]))\n"
# A norm whose translation has another epsilon than its forward.
_WRONG_NORM = """

from generic_export.translate.builder import ints
from generic_export.translate.modules import translates_module


class OddNorm(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden):
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-3) * self.weight


@translates_module(OddNorm)
def odd_norm(b, module, inputs, state):
    (x,) = inputs
    axes = {"axes": ints([x.rank - 1])}
    mean = b.emit("mean_reduce", [b.binary("mul", x, x)], shape=(*x.shape[:-1], 1), dtype=x.dtype, attributes=axes)
    scaled = b.binary("mul", x, b.unary("rsqrt", b.binary("add", mean, b.scalar(1.0, x.dtype))))
    return b.binary("mul", scaled, b.align_rank(state["weight"], x.rank))


class OddForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.input_layernorm = OddNorm(layer.input_layernorm.weight.detach().clone())
"""


def odd_llama(folder: Path, line: str, config: dict[str, Any] | None = None, classes: str = "") -> Path:
    """Write a config whose model comes with its own code: a Llama with one line more in its MLP, or other classes."""
    content = dict(config or FAMILIES["llama"]().to_dict())
    write_config(folder, content | {"auto_map": {"AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}})
    mlp = f"""


class OddMLP(LlamaMLP):
    def forward(self, hidden):
        {line}        return super().forward(hidden)


class OddForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OddMLP(config)
"""
    head = "import torch\nfrom transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP\n"
    (folder / "modeling_odd.py").write_text(head + (classes or mlp))
    return folder


def line_of(folder: Path, text: str) -> str:
    """Return `file.py:line` of the line that has a text."""
    lines = (folder / "modeling_odd.py").read_text().splitlines()
    return f"modeling_odd.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def diagnosis_of(*words: object) -> Diagnosis:
    """Run the command and return its JSON; exit code 1 and a fault belong together."""
    outcome = call("diagnose", *words, "--json")
    assert outcome.code in (0, 1), outcome
    strict_json(outcome.out)
    diagnosis = Diagnosis.from_json(outcome.out)
    assert (outcome.code == 0) == diagnosis.ok
    return diagnosis


# --- planted faults on a 32-layer 8B model, without weights -----------------------------------------


@pytest.mark.parametrize(
    ("line", "stage", "text", "words"),
    [
        (_BRANCH, Stage.CAPTURE, "if hidden.sum", ["--only", "model.layers.0"]),
        pytest.param(_UNSUPPORTED, Stage.TRANSLATE, "special.hermite_polynomial_h", [], marks=pytest.mark.nightly),
        (_FROZEN, Stage.CAPTURE, "shape[1]", ["--only", "model.layers.0.mlp"]),
    ],
    ids=["branch", "unsupported", "frozen"],
)
def test_the_twin_of_an_8b_model_names_the_guilty_module_and_line(
    tmp_path: Path, line: str, stage: Stage, text: str, words: list[str]
) -> None:
    folder = odd_llama(tmp_path / "odd", line, LLAMA_8B)
    diagnosis = diagnosis_of(folder, "--tiny", "--trust-remote-code", *words)
    (culprit,) = diagnosis.culprits()
    assert (culprit.piece.class_name, culprit.verdict.stage) == ("OddMLP", stage)
    assert culprit.piece.paths == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert culprit.source == line_of(folder, text)
    assert len(diagnosis.pieces) <= 20
    assert any("layers 0, 1 of 32" in warning for warning in diagnosis.warnings)


def test_a_wrong_translation_in_the_twin_of_an_8b_model_is_blamed(tmp_path: Path) -> None:
    folder = odd_llama(tmp_path / "odd", "", LLAMA_8B, classes=_WRONG_NORM)
    diagnosis = diagnosis_of(folder, "--tiny", "--trust-remote-code")
    (culprit,) = diagnosis.culprits()
    assert (culprit.piece.class_name, culprit.verdict.stage) == ("OddNorm", Stage.COMPARE)
    assert len(diagnosis.pieces) <= 20


@pytest.mark.parametrize(
    ("config", "layers", "parameters", "words"),
    [
        pytest.param(None, 2, "0.1 M parameters", ["--only", "model.layers.0"], id="2 layers"),
        pytest.param(LLAMA_8B, 32, "8030.3 M parameters", [], id="8B", marks=pytest.mark.nightly),
    ],
)
def test_a_skeleton_without_weights_names_the_guilty_module_and_line(
    config: dict[str, Any] | None, layers: int, parameters: str, words: list[str], tmp_path: Path
) -> None:
    folder = odd_llama(tmp_path / "odd", _UNSUPPORTED, config)
    diagnosis = diagnosis_of(folder, "--trust-remote-code", *words)
    (culprit,) = diagnosis.culprits()
    assert (culprit.piece.class_name, len(culprit.piece.paths)) == ("OddMLP", layers)
    assert culprit.verdict.stage is Stage.TRANSLATE
    assert culprit.verdict.operator == "aten.special_hermite_polynomial_h.default"
    assert culprit.source == line_of(folder, "special.hermite_polynomial_h")
    assert len(diagnosis.pieces) <= 20
    assert any(parameters in warning for warning in diagnosis.warnings)


def test_a_fault_that_keeps_the_skeleton_from_running_points_to_the_twin(tmp_path: Path) -> None:
    folder = odd_llama(tmp_path / "odd", _BRANCH, LLAMA_8B)
    outcome = call("diagnose", folder, "--trust-remote-code")
    refused(outcome, "with shapes only")
    assert "--tiny" in outcome.line("hint")


# --- reports ----------------------------------------------------------------------------------------


def test_a_healthy_model_its_reports_and_a_second_run(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", FAMILIES["gpt2"]())
    words = ["diagnose", folder, "--tiny", "--output", tmp_path / "out", "--html", tmp_path / "page.html"]
    first = call(*words)
    assert first.code == 0, first
    assert "no fault" in first.out and "page.html" in first.out and "ok  " in first.err
    seconds = [float(each) for each in re.findall(r"^ *([\d.]+) s  ", first.err, re.MULTILINE)]
    assert len(seconds) > 2 and seconds == sorted(seconds)
    diagnosis = Diagnosis.from_json((tmp_path / "out" / "diagnosis.json").read_text())
    assert diagnosis.ok and "transformers" in diagnosis.versions
    assert [symbol for symbol, _ in diagnosis.axes.symbols] == ["S", "P"]
    page = (tmp_path / "page.html").read_text()
    assert page == (tmp_path / "out" / "report.html").read_text() and "GPT2LMHeadModel" in page
    again = call(*words, "--resume", "--json-file", tmp_path / "again.json")
    assert again.code == 0, again
    assert Diagnosis.from_json((tmp_path / "again.json").read_text()).verdicts[0].cached


def test_a_part_of_a_model_with_its_weights() -> None:
    diagnosis = diagnosis_of(REAL_MODEL, "--weights", "--only", "model.layers.0.mlp", "--strategy", "numerics")
    assert diagnosis.ok
    tried = [verdict for verdict in diagnosis.verdicts if verdict.outcome is Outcome.OK]
    assert tried and all(verdict.path.startswith("model.layers.0.mlp") and verdict.metrics for verdict in tried)


@needs_posix
def test_ctrl_c_leaves_a_report(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", FAMILIES["llama"]())
    words = ["--tiny", "--strategy", "leaves", "--html", tmp_path / "page.html", "--json-file", tmp_path / "part.json"]
    command = RunningCommand("diagnose", folder, *words)
    command.wait_for_stage("ok  ")
    command.press_ctrl_c()
    outcome = command.end()
    assert outcome.code == 1, outcome
    assert "interrupted" in outcome.err and "Traceback" not in outcome.err
    diagnosis = Diagnosis.from_json((tmp_path / "part.json").read_text())
    outcomes = {verdict.outcome for verdict in diagnosis.verdicts}
    assert diagnosis.interrupted and Outcome.OK in outcomes and Outcome.NOT_TRIED in outcomes
    assert "interrupted: some modules were not tried" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{model}", "--tiny", "--weights"], "exclude each other"),
        (["{model}", "--strategy", "guess"], "unknown strategy"),
        (["{model}", "--dtype", "bf16"], "--dtype bf16 is unknown"),
        (["{model}", "--resume"], "--resume continues an earlier run"),
        (["{model}", "--max-memory", "lots"], "lots"),
        (["{model}", "--tiny", "--only", "model.nowhere"], "model.nowhere"),
        (["{model}", "--html", "/no/such/folder/page.html"], "no such folder"),
        (["{model}", "--json-file", "/no/such/folder/page.json"], "no such folder"),
        (["{model}/none"], "no such folder"),
        (["{model}", "--weights"], "no safetensors"),
    ],
)
def test_bad_input_is_told_in_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", FAMILIES["gpt2"]())
    outcome = call("diagnose", *(word.format(model=folder) for word in words))
    assert outcome.code == 2, outcome
    assert told in outcome.line("error") and outcome.line("hint")


# --- what is run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "phi3"])
def test_the_calls_are_a_prefill_a_decode_step_and_a_chunk(family: str) -> None:
    model = tiny_model(FAMILIES[family]()).model()
    calls = calls_of(model)
    steps = [keywords["input_ids"].shape[1] for keywords in calls.keywords]
    pasts = [cache_in(keywords).get_seq_length() for keywords in calls.keywords]
    assert calls.names == ("prefill", "decode", "chunk")
    assert list(zip(steps, pasts, strict=True)) == [(7, 0), (1, 11), (5, 13)]
    with torch.no_grad():
        for keywords in calls.keywords:
            assert model(**keywords).logits.shape[1] == keywords["input_ids"].shape[1]


def test_a_recurrent_model_is_called_with_its_own_state() -> None:
    from transformers import AutoConfig

    model = tiny_model(AutoConfig.for_model("mamba2")).model()
    calls = calls_of(model)
    assert len(calls.keywords) >= 2
    assert {slot.kind for slot in cache_in(calls.keywords[0]).states()} == {"conv_state", "recurrent_state"}
    with torch.no_grad():
        for keywords in calls.keywords:
            model(**keywords)


def test_a_model_without_any_state_is_called_with_several_lengths() -> None:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=160, n_embd=32, n_layer=2, n_head=2)).eval()
    calls = calls_of(model)
    lengths = {keywords["input_ids"].shape[1] for keywords in calls.keywords}
    assert len(lengths) == 3 and not any(keywords["use_cache"] for keywords in calls.keywords)


# --- a failed export points here ----------------------------------------------------------------------


def test_a_failed_export_ends_with_a_command_that_finds_the_cause(tmp_path: Path) -> None:
    folder = odd_llama(tmp_path / "a model", _BRANCH)
    shutil.copyfile(_any_weights(tmp_path), folder / "model.safetensors")
    outcome = call("export", folder, "-o", tmp_path / "out", "--no-tokenizer", "--trust-remote-code", "--dtype", "f32")
    assert outcome.code == 2, outcome
    hint = outcome.line("hint")
    command = shlex.split(hint[hint.index("t2n-llm diagnose") :])
    assert command == ["t2n-llm", "diagnose", str(folder), "--tiny", "--trust-remote-code"]
    told = call(*command[1:], "--only", "model.layers.0")
    assert told.code == 1
    assert (
        "OddMLP (model.layers.0.mlp and 1 more) fails to capture" in told.out
        and line_of(folder, "if hidden.sum") in told.out
    )


def _any_weights(tmp_path: Path) -> Path:
    from tests.families import save_tiny_model

    return save_tiny_model("llama", tmp_path / "weights") / "model.safetensors"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CaptureError("x"), "t2n-llm diagnose org/model --tiny --dtype f16"),
        (UnsupportedOperatorError("x"), "t2n-llm diagnose org/model --tiny --dtype f16"),
        (EngineLoadError("x"), "t2n-llm diagnose org/model --tiny --dtype f16"),
        (ValidationError("x"), "t2n-llm diagnose org/model --weights --strategy numerics --dtype f16"),
        (SourceError("x"), None),
    ],
)
def test_the_advice_fits_the_error(error: Exception, expected: str | None) -> None:
    assert diagnose_command(error, SourceRef("org/model")) == expected  # type: ignore[arg-type]


def test_the_advice_names_everything_the_model_needs() -> None:
    command = diagnose_command(
        CaptureError("x"), SourceRef("/a folder/it's", revision="v1", trust_remote_code=True), "f32"
    )
    assert command is not None
    assert shlex.split(command)[2:] == ["/a folder/it's", "--tiny", "--revision", "v1", "--trust-remote-code"]


def test_json_and_words_say_the_same(tmp_path: Path) -> None:
    folder = odd_llama(tmp_path / "odd", _UNSUPPORTED)
    outcome = call(
        "diagnose", folder, "--tiny", "--max-depth", "0", "--trust-remote-code", "--json-file", tmp_path / "it.json"
    )
    assert outcome.code == 1
    record = json.loads((tmp_path / "it.json").read_text())
    assert record["verdicts"][0]["outcome"] == "failed" and "failed: translate" in outcome.out
    assert all(verdict["outcome"] in ("failed", "not tried") for verdict in record["verdicts"])
