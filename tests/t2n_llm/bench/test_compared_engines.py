"""Rivals of an archive: each says what PyTorch says of the same weights, in a process that ends however it is treated."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from generic_export.errors import (
    EngineCrashError,
    EngineLoadError,
    EngineRunError,
    EngineTimeoutError,
    MissingExtraError,
    OptionError,
    SourceError,
    T2NError,
)
from generic_export.weights.values import value_pieces
from t2n_llm import export_llm
from t2n_llm.bench.compared_engines import COMPARED_ENGINES, compared_engine
from t2n_llm.bench.compared_engines.archive import ArchiveContender
from t2n_llm.bench.compared_engines.child import RunningChild
from t2n_llm.bench.compared_engines.gguf_file import write_gguf
from t2n_llm.bench.compared_engines.llama_cpp import MODULES_VARIABLE, LlamaCpp
from t2n_llm.bench.compared_engines.protocol import Contender, Running, SharedModel
from t2n_llm.export.archive_lookup import LocatedArchive, locate_archive
from t2n_llm.source.hub import open_source
from t2n_llm.source.reference import SourceRef
from tests.families import COMMON, LLAMA3_ROPE, config, save_tiny_model
from tests.t2n_llm.bench.engine_programs import llama_cpp_lacks
from tests.trained_model import REAL_MODEL

NEEDS_LLAMA_CPP = pytest.mark.skipif(bool(llama_cpp_lacks()), reason=llama_cpp_lacks())
NEEDS_ONNXRUNTIME = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnxruntime_genai", "onnx", "onnx_ir")),
    reason="pip install 't2n-llm[bench]'",
)

# What has a plain GGUF form, each with a feature that its form must keep.
FAMILIES: Mapping[str, Callable[[], Any]] = {
    "llama": config("llama", tie_word_embeddings=True),
    "llama_scaled_rope": config("llama", rope_parameters=LLAMA3_ROPE, attention_bias=True),
    "llama_linear_rope": config("llama", rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
    "mistral": config("mistral", sliding_window=None, head_dim=24),
    "qwen2": config("qwen2", use_sliding_window=False, tie_word_embeddings=True),
    "qwen3": config("qwen3", head_dim=24),
    "gemma": config("gemma", head_dim=16),
}

# family -> why its file cannot be read back here; llama.cpp reads it.
NOT_READ_BACK = {
    "llama_scaled_rope": "transformers takes a Llama in GGUF to have no biases",
    "qwen3": "transformers does not read the size of heads from GGUF",
    "gemma": "transformers reads no Gemma 1 from GGUF",
}

IDS = [(index * 37 + 11) % COMMON["vocab_size"] for index in range(150)]
TURNS = [IDS[:100], IDS[100:149], IDS[149:]]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of a family, whose weights f16 holds exactly."""
    folder = tmp_path_factory.mktemp("rivals") / request.param
    return save_tiny_model(request.param, folder, torch.float16, configs=FAMILIES)


def shared(checkpoint: Path, archive: Path | None = None, seconds: float = 120.0) -> SharedModel:
    located = LocatedArchive(checkpoint, "model") if archive is None else locate_archive(archive)
    return SharedModel(located, SourceRef(str(checkpoint)), seconds)


def started(contender: Contender, scratch: Path, threads: int = 1, positions: int = 256) -> Running:
    contender.check()
    contender.prepare(scratch)
    return contender.start(threads, positions)


def pytorch_logits(checkpoint: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0, -1]


def agrees(found: list[tuple[int, float]], expected: torch.Tensor, tolerance: float) -> None:
    """Assert that the largest logits are PyTorch's, to a share of their spread."""
    allowed = tolerance * float(expected.std())
    for token, logit in found:
        assert abs(float(expected[token]) - logit) < allowed, (token, logit, float(expected[token]))
    best = float(expected.max())
    assert best - float(expected[found[0][0]]) < 2 * allowed


def goes_on_until_fresh(running: Running) -> None:
    """Assert that a state with room for 256 tokens goes on from turn to turn, and that a fresh one is empty."""
    assert len(running.time_turns([IDS[:20], IDS[20:21]], fresh=True)) == 2
    assert all(seconds > 0 for seconds in running.time_turns([IDS[21:22]] * 3, fresh=False))
    for _ in range(3):  # 300 tokens
        running.time_turns([IDS[:100]], fresh=True)
    assert running.load_seconds > 0
    assert 10e6 < running.peak_rss_bytes() < 4e9


# --- the same logits --------------------------------------------------------------------------


@NEEDS_LLAMA_CPP
def test_llama_cpp_says_what_pytorch_says(checkpoint: Path, tmp_path: Path) -> None:
    with closing(started(LlamaCpp(shared(checkpoint)), tmp_path)) as running:
        assert isinstance(running, RunningChild)
        # Its activations are f16 in the products, its cache is f16.
        agrees(running.top_logits(TURNS, 8), pytorch_logits(checkpoint), 0.02)
        assert "llama.cpp" in running.version


def test_torch_says_what_pytorch_says(tmp_path: Path) -> None:
    """Of one family: its driver leaves all of them to transformers."""
    checkpoint = save_tiny_model("qwen3", tmp_path / "qwen3", torch.float16, configs=FAMILIES)
    with closing(started(compared_engine("torch", shared(checkpoint)), tmp_path)) as running:
        assert isinstance(running, RunningChild)
        agrees(running.top_logits(TURNS, 8), pytorch_logits(checkpoint), 1e-4)
        assert running.version.startswith("torch ")
        goes_on_until_fresh(running)


@NEEDS_ONNXRUNTIME
def test_onnxruntime_says_what_pytorch_says(tmp_path: Path) -> None:
    # Not a random model: the builder wants a tokenizer.
    with closing(started(compared_engine("onnxruntime", shared(REAL_MODEL)), tmp_path)) as running:
        assert isinstance(running, RunningChild)
        agrees(running.top_logits(TURNS, 8), pytorch_logits(REAL_MODEL), 1e-3)
        assert len(running.time_turns(TURNS, fresh=True)) == len(TURNS)


@NEEDS_LLAMA_CPP
def test_a_compressed_export_gets_a_file_of_its_element_types(tmp_path: Path) -> None:
    from gguf import GGUFReader

    checkpoint = save_tiny_model("llama", tmp_path / "llama", configs=FAMILIES)
    export = export_llm(
        str(checkpoint), tmp_path / "out", compress="q4_0", check=False, require_tokenizer=False
    ).output_dir
    model = shared(checkpoint, Path(export))
    assert model.is_four_bit
    with closing(started(LlamaCpp(model), tmp_path)) as running:
        assert isinstance(running, RunningChild)
        agrees(running.top_logits(TURNS, 1), pytorch_logits(checkpoint), 1.0)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.2.ffn_down.weight"] == "Q4_0"
    assert kinds["token_embd.weight"] == "F16" and "output.weight" not in kinds  # the tied table
    assert kinds["blk.0.attn_norm.weight"] == "F32"


def test_a_gguf_file_holds_the_checkpoints_values(checkpoint: Path, tmp_path: Path) -> None:
    """Read back by this project's own reader of GGUF files, which undoes what llama.cpp wants otherwise."""
    if checkpoint.name in NOT_READ_BACK:
        pytest.skip(NOT_READ_BACK[checkpoint.name])
    source = open_source(str(checkpoint), require_tokenizer=False)
    write_gguf(source, {}, tmp_path / "model.gguf")
    read = open_source(str(tmp_path / "model.gguf"), require_tokenizer=False)
    before, after = source.checkpoint().tensors, read.checkpoint().tensors
    assert {name for name in before if "lm_head" not in name} <= set(after)
    for name in after:
        expected = torch.cat([piece.float() for piece in value_pieces(before[name])])
        values = torch.cat([piece.float() for piece in value_pieces(after[name])])
        assert torch.allclose(values, expected, rtol=0, atol=2e-7), name


# --- what is timed ----------------------------------------------------------------------------


@NEEDS_LLAMA_CPP
def test_llama_cpp_computes_logits_at_every_step(tmp_path: Path) -> None:
    """A step of a model that is all output table takes as long as the table is large; without logits it would not."""
    medians = []
    for vocabulary in (1_000, 400_000):
        build = config("llama", vocab_size=vocabulary, num_hidden_layers=1, hidden_size=128, tie_word_embeddings=True)
        folder = save_tiny_model("wide", tmp_path / str(vocabulary), torch.float16, configs={"wide": build})
        scratch = tmp_path / f"{vocabulary}-gguf"
        scratch.mkdir()
        with closing(started(LlamaCpp(shared(folder)), scratch)) as running:
            seconds = running.time_turns([[3]] * 20, fresh=True)
            medians.append(sorted(seconds)[10])
            assert max(seconds) > 0
    assert medians[1] > 4 * medians[0], medians


@pytest.mark.parametrize("name", [pytest.param("llama.cpp", marks=NEEDS_LLAMA_CPP), "tract"])
def test_a_state_goes_on_until_a_fresh_one_is_asked_for(
    name: str, tiny_llama: Path, tiny_export: Path, tmp_path: Path
) -> None:
    model = shared(tiny_llama, tiny_export)
    tract = ArchiveContender(model.archive, "tract", 120.0)
    with closing(started(tract if name == "tract" else compared_engine(name, model), tmp_path)) as running:
        goes_on_until_fresh(running)


# --- what is refused, and how processes end ----------------------------------------------------


def test_families_without_a_plain_form_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    windowed = config("mistral", sliding_window=8)
    for number, build in enumerate((config("olmo2"), windowed)):
        folder = save_tiny_model("other", tmp_path / str(number), configs={"other": build})
        with pytest.raises(OptionError, match=r"llama.cpp:FILE.gguf"):
            write_gguf(open_source(str(folder), require_tokenizer=False), {}, tmp_path / "none.gguf")
    assert not (tmp_path / "none.gguf").exists()


def test_a_file_of_the_users_own_needs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if llama_cpp_lacks():
        pytest.skip(llama_cpp_lacks())
    nothing = SharedModel(LocatedArchive(tmp_path, "somebody's"))
    (tmp_path / "own.gguf").touch()
    LlamaCpp(nothing, str(tmp_path / "own.gguf")).check()
    with pytest.raises(OptionError, match="no such file"):
        LlamaCpp(nothing, str(tmp_path / "other.gguf")).check()
    with pytest.raises(OptionError, match="--reference"):
        LlamaCpp(nothing).check()


def test_what_is_not_installed_is_named(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared(tiny_llama)
    monkeypatch.setenv(MODULES_VARIABLE, str(tmp_path))
    with pytest.raises(MissingExtraError, match="node"):
        LlamaCpp(model).check()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match="node 20"):
        LlamaCpp(model).check()
    if find_spec("onnxruntime_genai") is None:
        with pytest.raises(MissingExtraError, match="onnxruntime-genai"):
            compared_engine("onnxruntime", model).check()


def test_names_and_variants_that_do_not_exist_are_refused(tiny_llama: Path) -> None:
    model = shared(tiny_llama)
    with pytest.raises(OptionError, match=", ".join(COMPARED_ENGINES).replace(".", r"\.")):
        compared_engine("vllm", model)
    with pytest.raises(OptionError, match="bfloat16"):
        compared_engine("torch:int3", model)


def test_a_local_checkpoint_that_is_not_here_must_be_named(tiny_export: Path) -> None:
    with pytest.raises(OptionError, match="--reference"):
        _ = SharedModel(locate_archive(tiny_export)).source


def test_a_checkpoint_that_only_we_can_read_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    write_gguf(open_source(str(tiny_llama), require_tokenizer=False), {}, tmp_path / "model.gguf")
    with pytest.raises(SourceError, match="--reference"):
        compared_engine("torch", shared(tmp_path / "model.gguf")).check()


def driver(code: str, seconds: float = 30.0, **load: object) -> RunningChild:
    """Start a driver that is not one of ours."""
    return RunningChild("rival", [sys.executable, "-c", code], load, timeout_seconds=seconds)


LOADS = (
    'import sys, json\nsys.stdin.readline()\nprint(json.dumps({"ok": {"seconds": 1.5, "version": "1"}}), flush=True)\n'
)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("raise SystemExit('no such library')", EngineCrashError, "no such library"),
        ("import os; os.abort()", EngineCrashError, "SIGABRT"),
        ('print(\'{"error": "bad file"}\', flush=True); input(); input()', EngineLoadError, "bad file"),
        ("print('hello', flush=True); input(); input()", EngineRunError, "not JSON"),
        ("import time; time.sleep(60)", EngineTimeoutError, "--timeout"),
    ],
)
def test_a_driver_that_fails_is_an_error_of_ours(code: str, error: type[T2NError], words: str) -> None:
    with pytest.raises(error, match=words):
        driver(code, 1.0 if error is EngineTimeoutError else 30.0)


@pytest.fixture
def children() -> Iterator[None]:
    """Assert that no process of the test is left."""
    before = set(psutil.Process().children())
    yield
    until = time.monotonic() + 20
    while set(psutil.Process().children()) - before and time.monotonic() < until:
        time.sleep(0.05)
    assert not set(psutil.Process().children()) - before


def test_a_driver_that_dies_later_leaves_nothing(children: None) -> None:
    running = driver(LOADS + "sys.stdin.readline(); sys.exit('out of memory')")
    assert (running.load_seconds, running.version) == (1.5, "1")
    with pytest.raises(EngineCrashError, match="out of memory"):
        running.time_turns([[1]], fresh=True)
    running.close()


def test_closing_ends_a_driver_at_work(children: None) -> None:
    running = driver(LOADS + "import time; time.sleep(600)")
    assert running.peak_rss_bytes() > 1e6
    running.close()
    running.close()
