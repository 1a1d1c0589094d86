"""`--stateful` and `--kv-cache`: the engine keeps keys and values from the start, and token ids are the only input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from generic_export.errors import CaptureError, OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm import export_llm
from t2n_llm.export.archive_lookup import locate_archive
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.pipeline import ExportResult
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.inspect.inspection import inspect_archive
from tests.families import save_tiny_model
from tests.recurrent_families import RECURRENT_FAMILIES


def export(source: Path, folder: Path, **options: object) -> ExportResult:
    return export_llm(
        str(source), folder / "export", **{"dtype": "f32", "decode_steps": 24, "require_tokenizer": False, **options}
    )


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_token_ids_are_the_only_input(tiny_llama: Path, tmp_path: Path, dtype: str) -> None:
    result = export(tiny_llama, tmp_path, stateful=True, dtype=dtype)
    assert result.validation is not None and result.validation.passed
    with TractWheel().load(result.archive) as model:
        assert [fact.name for fact in model.inputs] == ["input_ids"]
        assert len(model.outputs) == 1
        session = model.spawn_state()
        whole = model.run([np.array([[5, 9, 11]], np.int64)])[0]
        for token in (5, 9, 11):
            (logits,) = session.run([np.array([[token]], np.int64)])
    assert np.abs(logits - whole).max() < (1e-5 if dtype == "f32" else 2e-2)


def test_a_sliding_window_is_right_when_the_engine_keeps_all_positions(tmp_path: Path) -> None:
    source = save_tiny_model("gemma3_text", tmp_path / "model")
    report = export(source, tmp_path, stateful=True).validation
    assert report is not None
    assert max(check.max_abs_error for check in report.checks) <= 1e-4


def test_the_manifest_says_what_the_engine_keeps(tiny_llama: Path, tmp_path: Path) -> None:
    result = export(tiny_llama, tmp_path, stateful=True)
    graph = result.manifest["graph"]
    assert graph["inputs"] == ["input_ids"] and graph["states"] == []
    assert [state["input_name"] for state in graph["engine_states"]][:2] == ["in_cache_key_0", "in_cache_value_0"]
    assert validate_folder(result.output_dir, str(tiny_llama), options=ValidateOptions.of(decode_steps=4)).passed
    names = {path.stem for path in (result.output_dir / "tests").iterdir()}
    assert names == {"prefill", "chunked_prefill", "generation"}, "no past can be given to a decode step"


@pytest.mark.parametrize("kv_cache", ["int8", "int4"])
def test_a_quantised_cache_costs_what_its_resolution_says(tiny_llama: Path, tmp_path: Path, kv_cache: str) -> None:
    report = export(tiny_llama, tmp_path, kv_cache=kv_cache).validation
    assert report is not None and report.passed
    error = max(check.max_abs_error for check in report.checks)
    low, high = {"int8": (1e-5, 0.05), "int4": (1e-3, 1.0)}[kv_cache]
    assert low < error < high, "the cache is neither exact nor noise"


def test_inspection_counts_the_bits_of_a_quantised_cache(tiny_llama: Path, tmp_path: Path) -> None:
    sizes = {}
    for kv_cache in (None, "int8", "int4"):
        result = export(tiny_llama, tmp_path / str(kv_cache), kv_cache=kv_cache, check=False)
        state = inspect_archive(locate_archive(result.archive)).cache
        assert state is not None and state.tensors == 4
        sizes[kv_cache] = state.bytes_per_token
    assert sizes[None] == 4 * sizes["int8"] == 8 * sizes["int4"]


def test_states_of_fixed_size_are_refused_with_the_reason(tmp_path: Path) -> None:
    source = save_tiny_model("lfm2", tmp_path / "model", configs=RECURRENT_FAMILIES)
    with pytest.raises(CaptureError, match=r"in_conv_state_0.*grow with the tokens"):
        export(source, tmp_path, stateful=True)


def test_options_that_have_no_meaning_together_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--batch"):
        export(tiny_llama, tmp_path, stateful=True, batch=True)
    with pytest.raises(OptionError, match="int2"):
        export(tiny_llama, tmp_path, kv_cache="int2")
