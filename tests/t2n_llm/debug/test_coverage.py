"""`t2n-llm coverage`: the operators of a model from its config alone, whole or module by module."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from generic_export.debug.coverage import Support
from generic_export.errors import CaptureError, SourceError
from t2n_llm.debug.coverage import DECODER, MODULES, CoverageReport, cover_model
from t2n_llm.debug.module_coverage import record_forward
from t2n_llm.source.hub import open_config
from tests.families import FAMILIES, config
from tests.shared_folders import content
from tests.t2n_llm.command_line import call, refused, run_new, strict_json

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, config: Any) -> Path:
    """Write a config, and nothing else, to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config if isinstance(config, dict) else config.to_dict(), default=str)
    (folder / "config.json").write_text(text)
    return folder


def counts(report: CoverageReport) -> dict[str, int]:
    return {row.operator: row.count for row in report.operators}


# Three layers of one or two kinds, so that at least two of them are the same.
REPEATED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "gpt2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.nightly if name in ("qwen2", "gpt2") else ()) for name in REPEATED]
)
def test_a_layer_of_each_kind_counts_for_all_of_them(family: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / family, config(family, num_hidden_layers=3, **REPEATED[family])())
    short, whole = cover_model(str(folder)), cover_model(str(folder), every_layer=True)
    assert short.how == whole.how == DECODER and short.complete and whole.complete
    assert len(short.layers) < len(whole.layers) == short.depth == whole.depth == 3
    assert counts(short) == counts(whole)
    assert {row.operator: row.support for row in short.operators} == {
        row.operator: row.support for row in whole.operators
    }
    linear = next(row for row in short.operators if row.operator == "aten.linear.default")
    assert linear.support is Support.SUPPORTED and linear.module_path and ".py:" in linear.source


@pytest.mark.nightly
def test_an_8b_model_takes_seconds_and_no_memory(tmp_path: Path) -> None:
    """In a process of its own: what a user waits for, Python's start included."""
    folder = write_config(tmp_path / "llama-8b", LLAMA_8B)
    before = content(folder)
    started = time.monotonic()
    outcome = run_new("coverage", folder, "--json")
    seconds = time.monotonic() - started
    assert outcome.code == 0, outcome
    record = strict_json(outcome.out)
    assert record["complete"] and record["depth"] == 32 and record["how"] == DECODER
    by_name = {row["operator"]: row for row in record["operators"]}
    assert by_name["aten.linear.default"]["count"] == 32 * 7 + 1
    assert by_name["t2n.attention.default"]["count"] == 32
    assert record["totals"]["missing"] == {"operators": 0, "calls": 0}
    assert content(folder) == before
    assert seconds < 60  # 8 s on an idle machine; CI's is shared


def test_a_model_without_a_key_value_cache_is_looked_at_module_by_module(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("openai-gpt", vocab_size=160, n_embd=64, n_layer=6, n_head=4, n_positions=64)
    report = cover_model(str(write_config(tmp_path / "openai-gpt", config)))
    assert report.how == MODULES and not report.complete and report.problems
    assert report.depth == 6
    product = next(row for row in report.operators if row.operator == "aten.addmm.default")
    assert product.count == 6 * 4  # two of the attention, two of the feed-forward network


def test_a_data_dependent_module_is_named_with_its_line(tmp_path: Path) -> None:
    """A copy of Llama whose MLP asks for a value: code that comes with the model, as with many on the hub."""
    folder = _llama_with_code(tmp_path, "if hidden.sum() > 0:\n            hidden = hidden * 2\n")
    outcome = call("coverage", folder, "--trust-remote-code", "--json")
    assert outcome.code == 1, outcome
    record = strict_json(outcome.out)
    assert record["how"] == MODULES
    (module,) = record["uncaptured"]
    assert module["class_name"] == "OddMLP" and module["path"] == "model.layers.0.mlp" and module["count"] == 2
    line = 1 + (folder / "modeling_odd.py").read_text().splitlines().index("        if hidden.sum() > 0:")
    assert module["source"] == f"modeling_odd.py:{line}"
    names = {row["operator"]: row for row in record["operators"]}
    assert names["aten.gt.Scalar"]["module_path"] == "model.layers.0.mlp"  # seen while it ran
    assert names["t2n.attention.default"]["count"] == 2


def test_a_missing_operator_is_named_with_its_line(tmp_path: Path) -> None:
    folder = _llama_with_code(tmp_path, "hidden = torch.nextafter(hidden, hidden)\n")
    outcome = call("coverage", folder, "--trust-remote-code")
    assert outcome.code == 1
    line = 1 + (folder / "modeling_odd.py").read_text().splitlines().index(
        "        hidden = torch.nextafter(hidden, hidden)"
    )
    first = next(row for row in outcome.out.splitlines() if "aten." in row)
    assert "aten.nextafter.default" in first and "missing" in first  # what is missing comes first
    (told,) = [row for row in outcome.out.splitlines() if row.startswith("missing:")]
    assert f"2 of 2 calls, first at model.layers.0.mlp (modeling_odd.py:{line}): no translation" in told
    assert "some operators are not supported" in outcome.out


def test_the_report_in_a_file_and_in_words(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", FAMILIES["gpt2"]())
    outcome = call("coverage", folder / "config.json", "--json-file", tmp_path / "report.json")
    assert outcome.code == 0, outcome
    record = strict_json((tmp_path / "report.json").read_text())
    assert record["model"] == str(folder / "config.json") and record["architecture"] == "GPT2LMHeadModel"
    assert "aten.addmm.default" in outcome.out and "every operator is supported" in outcome.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no/such/folder/at/all"], "no such folder"),
        (["{empty}"], "no config.json"),
        (["{odd}"], "does not know this model type"),
        (["{model}", "--revision", "main"], "--revision does not apply"),
        (["{model}/config.json", "--revision", "main"], "--revision does not apply"),
        (["{model}", "--json-file", "/no/such/folder/report.json"], "no such folder"),
    ],
)
def test_bad_input_is_told_in_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_config(tmp_path / "odd", {"model_type": "no_such_model"})
    write_config(tmp_path / "model", FAMILIES["gpt2"]())
    names = {name: tmp_path / name for name in ("empty", "odd", "model")}
    outcome = call("coverage", *(word.format(**names) for word in words))
    assert outcome.code == 2, outcome
    assert told in outcome.line("error") and outcome.line("hint")


def test_errors_are_json_only_when_json_goes_to_stdout(tmp_path: Path) -> None:
    assert strict_json(call("coverage", tmp_path / "none", "--json").out)["error"] == "SourceError"
    refused(call("coverage", tmp_path / "none", "--json-file", tmp_path / "report.json"), "no such folder")


def test_weights_are_never_opened(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", FAMILIES["gpt2"]())
    (folder / "model.safetensors").write_bytes(b"this is no safetensors file")
    assert cover_model(str(folder)).complete


def test_a_config_file_of_any_name_is_read(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", FAMILIES["gpt2"]())
    (folder / "config.json").rename(folder / "gpt2-small.json")
    assert open_config(str(folder / "gpt2-small.json")).config.model_type == "gpt2"
    with pytest.raises(SourceError, match=r"no config\.json"):
        open_config(str(folder))


def test_a_model_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", {**LLAMA_8B, "hidden_act": "no_such_activation"})
    with pytest.raises(CaptureError, match="cannot build the model"):
        cover_model(str(folder))


def test_a_recorded_run_leaves_no_hooks_and_knows_the_lines() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]()).eval()
    record = record_forward(model)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    (call,) = [recorded for recorded in record.recording.calls if recorded.call.path == "model.layers.1.mlp"]
    (given,) = call.inputs().values()
    assert given.shape == (1, 5, 64)
    products = [
        use for use in record.uses if use.module_path == "model.layers.0.mlp" and use.operator == "aten.mul.Tensor"
    ]
    assert products and all(use.source.startswith("modeling_llama.py:") for use in products)


def test_a_run_that_fails_leaves_no_hooks_either() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            raise ValueError("not today")

    model = Broken()
    with pytest.raises(CaptureError, match="ValueError: not today"):
        record_forward(model)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def _llama_with_code(tmp_path: Path, line: str) -> Path:
    """Write a config whose model comes with its own code: a Llama with a line more in its MLP."""
    folder = tmp_path / "odd"
    config = FAMILIES["llama"]().to_dict() | {"auto_map": {"AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}}
    write_config(folder, config)
    (folder / "modeling_odd.py").write_text(
        "import torch\n"
        "from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP\n\n\n"
        "class OddMLP(LlamaMLP):\n"
        "    def forward(self, hidden):\n"
        f"        {line}"
        "        return super().forward(hidden)\n\n\n"
        "class OddForCausalLM(LlamaForCausalLM):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        for layer in self.model.layers:\n"
        "            layer.mlp = OddMLP(config)\n"
    )
    return folder
