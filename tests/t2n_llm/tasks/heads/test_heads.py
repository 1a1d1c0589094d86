"""Single-pass tasks of texts: the archive says what transformers says, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generic_export.errors import MissingTensorError, OptionError, UnknownArchitectureError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.export.archive_lookup import locate_archive
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.options import ExportOptions, ValidateOptions
from t2n_llm.export.pipeline import ExportResult, export_llm, plan_llm_export
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.export.verify import verify_export
from t2n_llm.inspect.inspection import inspect_archive
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.tasks.heads.cases import plan_cases
from t2n_llm.tasks.heads.check import check_head
from t2n_llm.tasks.heads.inputs import reading_of
from t2n_llm.tasks.heads.table import HEADS
from t2n_llm.tasks.names import FEATURE_EXTRACTION, SEQUENCE_CLASSIFICATION
from tests.t2n_llm.command_line import call

LABELS = ("bad", "fair", "good")

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 3,
    "sep_token_id": 4,
    "pad_token_id": 0,
    "id2label": dict(enumerate(LABELS)),
    "label2id": {label: number for number, label in enumerate(LABELS)},
}

# model_type, and what differs from the common config
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "bert": {},
    "roberta": {"pad_token_id": 1, "bos_token_id": 0},
    "modernbert": {"local_attention": 8, "num_hidden_layers": 2},
    "gpt2": {"pad_token_id": None},
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the folder of a random checkpoint of a family for a task; each is made once."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, task: str) -> Path:
        if (family, task) not in made:
            made[family, task] = _save(family, task, tmp_path_factory.mktemp("heads") / f"{family}-{task}")
        return made[family, task]

    return make


def _save(family: str, task: str, folder: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(_COMMON | _FAMILIES[family]))
    model = getattr(transformers, HEADS[task].kind.auto_class).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norm scales and biases away from their neutral start
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def exported(source: Path, target: Path, task: str, **options: Any) -> ExportResult:
    chosen = ExportOptions.of(task=task, require_tokenizer=False, **({"dtype": "f32"} | options))
    return export_llm(str(source), target, options=chosen)


def pytorch(folder: Path, task: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    import transformers

    head = HEADS[task]
    model = getattr(transformers, head.kind.auto_class).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        result = model.eval()(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
    output: np.ndarray = getattr(result, head.outputs[0]).numpy()
    return output


def padded(family: str, lengths: tuple[int, ...], seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    padding = _FAMILIES[family].get("pad_token_id", 0) or 0
    ids = np.random.default_rng(seed).integers(5, 160, size=(len(lengths), max(lengths)))
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    return np.where(mask == 1, ids, padding), mask


# Each family once; what one task does with a decoder, or with an encoder, it does with every one.
_EVERY_TIME = [
    ("llama", FEATURE_EXTRACTION),
    ("qwen3", SEQUENCE_CLASSIFICATION),
    ("bert", FEATURE_EXTRACTION),
    ("roberta", FEATURE_EXTRACTION),
    ("modernbert", SEQUENCE_CLASSIFICATION),
]
_NIGHTLY = [
    pytest.param(family, task, marks=pytest.mark.nightly)
    for family, _ in _EVERY_TIME
    for task in (FEATURE_EXTRACTION, SEQUENCE_CLASSIFICATION)
    if (family, task) not in _EVERY_TIME
]


@pytest.mark.parametrize(("family", "task"), [*_EVERY_TIME, *_NIGHTLY])
def test_f32_archives_agree_with_transformers(
    family: str, task: str, checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    source = checkpoint(family, task)
    result = exported(source, tmp_path / "out", task)
    assert result.validation is not None
    assert {(check.shape[0] > 1, check.passed) for check in result.validation.checks} == {(True, True), (False, True)}
    with open_archive_session(result.archive) as answerer:
        for lengths in ((1,), (9, 4, 2, 9), (21, 20)):
            ids, mask = padded(family, lengths)
            wanted = pytorch(source, task, ids, mask)
            got = answerer.answer([ids, mask])[0]
            seen = mask == 1 if task == FEATURE_EXTRACTION else np.ones(len(ids), bool)
            assert np.abs(wanted[seen]).max() > 0.1
            np.testing.assert_allclose(got[seen], wanted[seen], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("llama", SEQUENCE_CLASSIFICATION),
        pytest.param("bert", FEATURE_EXTRACTION, marks=pytest.mark.nightly),
    ],
)
def test_f16_archives(family: str, task: str, checkpoint: Callable[[str, str], Path], tmp_path: Path) -> None:
    result = exported(checkpoint(family, task), tmp_path / "out", task, dtype="f16")
    assert result.validation is not None
    assert result.validation.passed
    assert all(0 < check.max_abs_error < 2e-2 * check.scale for check in result.validation.checks)
    graph = result.manifest["graph"]
    with TractWheel().load(result.archive) as model:
        (answer,) = model.run([np.ones((1, 3), np.int64)] * 2)
    assert [graph["interface"][name]["dtype"] for name in graph["outputs"]] == ["f32"]
    assert answer.dtype == np.float32


def test_padding_is_not_read(checkpoint: Callable[[str, str], Path], tmp_path: Path) -> None:
    result = exported(checkpoint("bert", FEATURE_EXTRACTION), tmp_path / "out", FEATURE_EXTRACTION, check=False)
    ids, mask = padded("bert", (6, 3))
    other = np.where(mask == 1, ids, 77)
    with open_archive_session(result.archive) as answerer:
        first, second = (answerer.answer([tokens, mask])[0] for tokens in (ids, other))
        unmasked = answerer.answer([ids, np.ones_like(mask)])[0]
    np.testing.assert_allclose(first[mask == 1], second[mask == 1], atol=1e-6)
    assert np.abs(first - unmasked)[1, :3].max() > 1e-3


def test_a_classifier_without_padding_token_reads_one_text(
    checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    result = exported(checkpoint("gpt2", SEQUENCE_CLASSIFICATION), tmp_path / "out", SEQUENCE_CLASSIFICATION)
    assert result.validation is not None
    assert {check.shape[0] for check in result.validation.checks} == {1}
    assert result.manifest["graph"]["symbols"] == ["S"]
    assert result.manifest["graph"]["interface"]["input_ids"]["shape"] == [1, "S"]


def test_the_folder_is_like_any_other(checkpoint: Callable[[str, str], Path], tmp_path: Path) -> None:
    source = checkpoint("llama", SEQUENCE_CLASSIFICATION)
    result = exported(source, tmp_path / "out", SEQUENCE_CLASSIFICATION, archive="dir")
    manifest = read_manifest(result.output_dir)
    assert manifest["task"] == SEQUENCE_CLASSIFICATION
    assert manifest["graph"]["inputs"] == ["input_ids", "attention_mask"]
    assert manifest["graph"]["outputs"] == ["logits"]
    assert manifest["graph"]["interface"]["logits"] == {"shape": ["B", 3], "dtype": "f32"}
    assert manifest["model"]["id2label"] == {"0": "bad", "1": "fair", "2": "good"}
    assert manifest["source"]["architecture"] == "LlamaForSequenceClassification"
    report = verify_export(result.output_dir)
    assert report.passed
    assert report.tensors > 10
    inspection = inspect_archive(locate_archive(result.output_dir))
    assert [external.name for external in inspection.outline.externals] == ["input_ids", "attention_mask"]
    assert inspection.problems == ()
    assert sorted(path.name for path in (result.output_dir / "tests").iterdir()) == [
        "a_batch_padded_on_the_right.npz",
        "a_batch_without_padding.npz",
        "a_long_text.npz",
        "a_short_text.npz",
    ]
    again = validate_folder(result.output_dir, str(source))
    assert again.passed


def test_hidden_states_of_a_language_model_leave_its_head_out(tiny_llama: Path, tmp_path: Path) -> None:
    result = exported(tiny_llama, tmp_path / "out", FEATURE_EXTRACTION)
    assert result.validation is not None
    assert result.validation.passed
    assert not [label for label in result.manifest["tensors"] if "lm_head" in label]
    assert result.manifest["model"]["hidden_size"] == 64


def test_a_language_model_is_no_classifier(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingTensorError, match=r"'score\.weight', a weight of the classification head") as caught:
        exported(tiny_llama, tmp_path / "out", SEQUENCE_CLASSIFICATION)
    assert "feature-extraction" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_compressed_weights_are_compared_with_themselves(
    checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    source = checkpoint("llama", SEQUENCE_CLASSIFICATION)
    result = exported(source, tmp_path / "out", SEQUENCE_CLASSIFICATION, compress="q4_0")
    assert result.validation is not None
    assert result.validation.passed
    schemes = {tensor["label"]: tensor["scheme"] for tensor in result.manifest["compression"]["tensors"]}
    assert schemes["model.layers.0.mlp.up_proj.weight"] == "q4_0"
    assert result.manifest["graph"]["symbols"] == ["B", "S"]  # the check has batches
    assert validate_folder(result.output_dir, str(source)).passed


def test_a_wrong_archive_fails(checkpoint: Callable[[str, str], Path], tmp_path: Path) -> None:
    task = HEADS[FEATURE_EXTRACTION]
    source = checkpoint("bert", FEATURE_EXTRACTION)
    result = exported(source, tmp_path / "out", FEATURE_EXTRACTION, check=False)
    from transformers import AutoModel

    model = AutoModel.from_pretrained(source)
    cases = plan_cases(task, reading_of(task, model, (8, 8)), model.config, None)
    expected = [{"last_hidden_state": pytorch(source, task.name, *case.inputs.values())} for case in cases]
    expected[1]["last_hidden_state"][0, 0, 3] += 0.01
    with open_archive_session(result.archive) as answerer:
        report = check_head(answerer, task, ["last_hidden_state"], "f32", cases, expected)
    assert [check.passed for check in report.checks] == [True, False, True, True, True]
    assert not report.passed
    assert report.checks[1].max_abs_error == pytest.approx(0.01, abs=1e-4)


def test_the_plan_says_what_would_be_written(checkpoint: Callable[[str, str], Path], tmp_path: Path) -> None:
    source = checkpoint("bert", FEATURE_EXTRACTION)
    options = ExportOptions.of(task=FEATURE_EXTRACTION, require_tokenizer=False)
    plan = plan_llm_export(str(source), tmp_path / "out", options=options)
    assert plan.output_dir == tmp_path / "out"
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(checkpoint: Callable[[str, str], Path], tmp_path: Path) -> None:
    source, target = checkpoint("bert", SEQUENCE_CLASSIFICATION), tmp_path / "out"
    done = call("export", source, "-o", target, "--task", SEQUENCE_CLASSIFICATION, "--dtype", "f32", "--no-tokenizer")
    assert done.code == 0, done.err
    assert "a long text" in done.out
    assert "agrees" in done.out
    again = call("validate", target, "--reference", source)
    assert again.code == 0, again.err
    assert "DIFFERS" not in again.out
    strict = call("validate", target, "--reference", source, "--atol", "1e-12")
    assert strict.code == 1
    refused = call("quantize-report", target, "--reference", source)
    assert refused.code == 2
    assert "does not support" in refused.line("error")
    with pytest.raises(OptionError, match="was exported for sequence-classification"):
        ExportedModel.open(target)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task", "juggling"), "task 'juggling' is unknown"),
        (("--task", FEATURE_EXTRACTION, "--image-size", 64), "takes no images"),
        (("--task", FEATURE_EXTRACTION, "--adapter", "some/lora"), "does not merge adapters"),
        (("--task", FEATURE_EXTRACTION, "--kv-cache", "int8"), "--kv-cache"),
        (("--task", FEATURE_EXTRACTION, "--compress", "q4_0:gptq"), "calibration runs a language model"),
    ],
)
def test_what_has_no_meaning_is_refused(
    arguments: tuple[str, ...], words: str, checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    source = checkpoint("bert", FEATURE_EXTRACTION)
    done = call("export", source, "-o", tmp_path / "out", "--no-tokenizer", *arguments)
    assert done.code == 2
    assert words in done.line("error")


def test_a_model_without_that_head_is_explained(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaModel

    MambaModel(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)).save_pretrained(tmp_path / "mamba")
    with pytest.raises(UnknownArchitectureError, match="no sequence classifier for MambaConfig"):
        exported(tmp_path / "mamba", tmp_path / "out", SEQUENCE_CLASSIFICATION)


def test_the_command_line_engine_agrees_too(checkpoint: Callable[[str, str], Path], tmp_path: Path) -> None:
    from generic_export.inference_target.tract.releases.install import find_tract_cli

    if find_tract_cli() is None:
        pytest.skip("the tract command is not installed")
    source = checkpoint("llama", SEQUENCE_CLASSIFICATION)
    result = exported(source, tmp_path / "out", SEQUENCE_CLASSIFICATION, dtype="f16", check=False)
    assert validate_folder(result.output_dir, str(source), options=ValidateOptions.of(engine="cli")).passed
