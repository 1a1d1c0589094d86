"""GGUF files as sources: the blocks of the file are the blocks of the archive, and the engine says what PyTorch says."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from generic_export.errors import (
    CorruptCheckpointError,
    MissingTokenizerError,
    SourceError,
    UnknownArchitectureError,
    WeightError,
)
from generic_export.nnef.dat import HEADER_BYTES
from generic_export.weights.values import read_tensor
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.pipeline import ExportResult, export_llm, plan_llm_export
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.source.hub import open_source
from t2n_llm.weights.archive_weights import stored_values
from tests.gguf_files import HEADS, KV_HEADS, permuted, write_llama_gguf

LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
Q4 = dict.fromkeys(LINEARS, "Q4_0") | {"token_embd": "F16"}
PARAMETERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
STEPS = 6


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `permuted`, found by sorting: independent of how either is written."""
    moved = permuted(np.arange(len(rows), dtype=np.float32)[:, None], heads)[:, 0].astype(int)
    return rows[np.argsort(moved)]


def stored_bytes(result: ExportResult, label: str) -> bytes:
    return (result.archive / f"{label}.dat").read_bytes()[HEADER_BYTES:]


def exported(path: Path, folder: Path, **options: object) -> ExportResult:
    settings = {"archive": "dir", "decode_steps": STEPS} | options
    return export_llm(str(path), folder / "export", **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def q4_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_llama_gguf(path, Q4)


@pytest.fixture(scope="module")
def q4_export(q4_file: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return exported(q4_file[0], tmp_path_factory.mktemp("exported"))


def test_the_blocks_of_the_archive_are_those_of_the_file(
    q4_file: tuple[Path, dict[str, np.ndarray]], q4_export: ExportResult
) -> None:
    for name, parameter in PARAMETERS.items():
        rows = q4_file[1][f"blk.1.{name}"]
        if name in ("attn_q", "attn_k"):
            rows = unpermuted(rows, HEADS if name == "attn_q" else KV_HEADS)
        assert stored_bytes(q4_export, f"model.layers.1.{parameter}.weight") == rows.tobytes(), name
    assert stored_bytes(q4_export, "model.embed_tokens.weight") == q4_file[1]["token_embd"].tobytes()


def test_loading_the_reference_prints_nothing(
    q4_file: tuple[Path, dict[str, np.ndarray]], capfd: pytest.CaptureFixture[str]
) -> None:
    from t2n_llm.weights.f32_model import load_dequantized

    assert load_dequantized(q4_file[0]) is not None
    printed = capfd.readouterr()
    assert "%|" not in printed.err + printed.out


def test_the_engine_says_what_transformers_makes_of_the_file(q4_export: ExportResult) -> None:
    report = q4_export.validation
    assert report is not None and report.passed
    # The archive's values are the file's: PyTorch runs once, and there is nothing to compare it with.
    assert report.original is None
    compression = q4_export.manifest["compression"]
    kept = {record["label"]: record["algorithm"] for record in compression["tensors"] if record["scheme"] == "q4_0"}
    assert len(kept) == 2 * len(LINEARS) and set(kept.values()) == {"as stored"}
    assert compression["recipe"]["name"] == "as stored"


def test_config_and_tokenizer_come_with_the_archive(q4_export: ExportResult) -> None:
    names = {file.name for file in q4_export.output_dir.iterdir()}
    assert {"config.json", "tokenizer.json", "recipe.yaml"} <= names
    assert json.loads((q4_export.output_dir / "config.json").read_text())["hidden_size"] == 64
    assert q4_export.manifest["source"]["name"] == "tiny"
    assert q4_export.manifest["source"]["architecture"] == "LlamaForCausalLM"


def test_validate_takes_the_file_as_reference(
    q4_file: tuple[Path, dict[str, np.ndarray]], q4_export: ExportResult
) -> None:
    assert validate_folder(q4_export.output_dir, str(q4_file[0]), options=ValidateOptions.of(decode_steps=STEPS)).passed
    with pytest.raises(SourceError, match="whose path is not recorded"):
        validate_folder(q4_export.output_dir, options=ValidateOptions.of(decode_steps=STEPS))


def test_an_explicit_recipe_decides_and_still_keeps_the_blocks(
    q4_file: tuple[Path, dict[str, np.ndarray]], q4_export: ExportResult, tmp_path: Path
) -> None:
    result = exported(q4_file[0], tmp_path, compress="q4_0+embeddings", check=False)
    label = "model.layers.0.mlp.down_proj.weight"
    assert stored_bytes(result, label) == stored_bytes(q4_export, label)
    schemes = {record["label"]: record for record in result.manifest["compression"]["tensors"]}
    assert schemes["model.embed_tokens.weight"]["algorithm"] == "search"
    plain = exported(q4_file[0], tmp_path, compress="f16", check=False, force=True)
    assert plain.manifest["compression"] is None
    assert len(stored_bytes(plain, label)) == 2 * 64 * 96


def test_other_types_are_dequantised_and_say_so(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kinds = {"attn_q": "Q8_0", "ffn_up": "Q4_1", "attn_v": "Q4_0", "token_embd": "BF16", "output": "Q4_0"}
    written = write_llama_gguf(tmp_path / "mixed.gguf", kinds, tied=False)
    result = exported(tmp_path / "mixed.gguf", tmp_path, dtype="f32")
    assert result.validation is not None and result.validation.passed
    assert any("2 tensors of type Q4_1 are dequantized" in note for note in result.manifest["notes"])
    assert stored_bytes(result, "lm_head.weight") == written["output"].tobytes()
    values = dict(stored_values(result.archive))
    up = dequantize(written["blk.0.ffn_up"], GGMLQuantizationType.Q4_1)
    assert np.array_equal(values["model.layers.0.mlp.up_proj.weight"].numpy(), up)
    query = unpermuted(dequantize(written["blk.0.attn_q"], GGMLQuantizationType.Q8_0), HEADS)
    assert np.array_equal(values["model.layers.0.self_attn.q_proj.weight"].numpy(), query)


def test_quantising_a_second_time_warns(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "q8.gguf", dict.fromkeys(LINEARS, "Q8_0"))
    result = exported(tmp_path / "q8.gguf", tmp_path, compress="q4_0", check=False)
    assert any(note.startswith("14 tensors") and "adds its own error" in note for note in result.manifest["notes"])


def test_a_plan_reads_no_weight(q4_file: tuple[Path, dict[str, np.ndarray]]) -> None:
    plan = plan_llm_export(str(q4_file[0]))
    assert plan.archive_bytes > 0


def test_the_parameters_are_those_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_llama_gguf(tmp_path / "all.gguf", Q4 | {"ffn_up": "Q5_0", "token_embd": "BF16"})
    source = open_source(str(tmp_path / "all.gguf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="all.gguf", dtype=torch.float32)
    tensors = source.checkpoint().tensors
    assert tensors.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(read_tensor(tensors[name]).float(), parameter), name


def test_gemma_norms_are_stored_plus_one(tmp_path: Path) -> None:
    """A change of values, which is left to transformers."""
    from transformers.modeling_gguf_pytorch_utils import Gemma2TensorProcessor

    from quant.prequantized import GgufTensor
    from t2n_llm.source.gguf_layout import _parameter

    values = np.array([[1.5, 2.0, 0.5, 1.0]], np.float32)
    tensor = GgufTensor("blk.0.attn_norm.weight", (4,), "F32", values.view(np.uint8), None)
    source = _parameter(tensor, "model.layers.0.input_layernorm.weight", (4,), Gemma2TensorProcessor(config={}))
    assert read_tensor(source).tolist() == [0.5, 1.0, -0.5, 0.0]


# --- what is wrong with a file ------------------------------------------------------------------------


def test_no_tokenizer(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "bare.gguf", Q4, tokenizer=False)
    with pytest.raises(MissingTokenizerError, match=r"bare\.gguf"):
        open_source(str(tmp_path / "bare.gguf"))
    source = open_source(str(tmp_path / "bare.gguf"), require_tokenizer=False)
    assert not source.has_tokenizer()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.3, 0.999])
def test_a_file_that_ends_early(q4_file: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, share: float) -> None:
    data = q4_file[0].read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CorruptCheckpointError, match=r"cut\.gguf"):
        open_source(str(tmp_path / "cut.gguf"))


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not at all a model, only a text of some length" * 10)
    with pytest.raises(CorruptCheckpointError, match="not a complete GGUF file"):
        open_source(str(tmp_path / "text.gguf"))
    with pytest.raises(SourceError):
        open_source(str(tmp_path / "absent.gguf"))


def test_an_architecture_that_transformers_does_not_read(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(str(tmp_path / "odd.gguf"), "clip")
    writer.add_tensor("a.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnknownArchitectureError, match="'clip'"):
        open_source(str(tmp_path / "odd.gguf"), require_tokenizer=False)


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    written = write_llama_gguf(tmp_path / "bad.gguf", Q4)
    data = (tmp_path / "bad.gguf").read_bytes()
    place = data.index(written["blk.1.ffn_down"].tobytes())
    (tmp_path / "bad.gguf").write_bytes(data[:place] + struct.pack("<e", float("nan")) + data[place + 2 :])
    with pytest.raises(WeightError, match="inf or nan"):
        exported(tmp_path / "bad.gguf", tmp_path, check=False)
