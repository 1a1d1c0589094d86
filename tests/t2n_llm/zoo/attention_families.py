"""One check for a family: a tiny random model of it through `export_llm`, all four checks in the real engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from t2n_llm import export_llm
from t2n_llm.source.small_sizes import WINDOW
from t2n_llm.zoo import overrides
from t2n_llm.zoo.configs import tiny_config
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model

MAX_ABS_ERROR = 1e-4
DECODE_STEPS = 12
PROMPT = 12

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_ONE_OF_EACH_KIND: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    # Layers of the other kind make their entries by a part of its code (tests/kvcache/attention/test_compressed.py).
    "deepseek_v4": {
        "num_hidden_layers": 1,
        "layer_types": ["compressed_sparse_attention"],
        "mlp_layer_types": ["moe"],
        "hc_mult": 2,
        "hc_sinkhorn_iters": 1,
    },
    "diffllama": {"num_hidden_layers": 2},  # how much is subtracted depends on the layer
    "gemma3n_text": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "activation_sparsity_pattern": [0.95, 0.0],
    },
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "granite_swa": {"layer_types": ["full_attention", "sliding_attention"], "layer_rope_theta": [1e4, 1e4]},
    "llama4_text": {"num_hidden_layers": 2},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 1,
        "layer_types": ["minimax_m3_sparse"],
        "mlp_layer_types": ["sparse"],
    },
    "qwen2_moe": {"num_hidden_layers": 2},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"]},
}


def export_family(family: str, folder: Path, *, dtype: str = "f32", compress: str | None = None, **changes: Any) -> Any:
    """Export a family with one layer of each kind, `changes` made to its tiny config, and hold it to what every family is
    held to; returns the result.
    """
    save_tiny_model(family_model(family, {**fewest_layers(family), **changes}), folder / "model")
    result = export_llm(
        str(folder / "model"),
        folder / "export",
        dtype=dtype,
        compress=compress,
        decode_steps=DECODE_STEPS,
        require_tokenizer=False,
        archive="dir",
    )
    report = result.validation
    assert report is not None and report.passed
    assert [check.name for check in report.checks] == ["prefill", "chunked prefill", "decode", "greedy"]
    if dtype == "f32":
        for check in report.checks:
            assert check.max_abs_error <= MAX_ABS_ERROR, check.name
            assert check.same_top1_count == len(check.steps), check.name
    assert max(step.scale for check in report.checks for step in check.steps) > 1.5  # worth comparing
    if result.manifest["model"].get("sliding_window") == WINDOW:
        assert PROMPT + DECODE_STEPS >= 3 * WINDOW
    return result


def nightly_unless(names: Collection[str], families: Iterable[str]) -> list[Any]:
    """Return parameters of a test, all but some of them nightly; the nightly zoo has every family in full anyway."""
    return [family if family in names else pytest.param(family, marks=pytest.mark.nightly) for family in families]


def fewest_layers(family: str) -> Mapping[str, Any]:
    """Return the changes to a family's tiny config that leave one layer of each kind."""
    if family in _ONE_OF_EACH_KIND:
        return _ONE_OF_EACH_KIND[family]
    known = tiny_config(family).to_dict()
    return {next(name for name in _COUNTS if name in known): 1}


def family_model(family: str, changes: dict[str, Any]) -> Any:
    """Return a tiny model of a family, with changes made to its config."""
    with changed_config(family, changes):
        return build_tiny_model(family)


def changed_config(family: str, changes: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Make changes to the tiny config of a family, for the length of a block."""
    return mock.patch.dict(overrides.OVERRIDES, {family: {**overrides.OVERRIDES.get(family, {}), **changes}})


def graph_text(result: Any) -> str:
    """Return the text of an export's graph."""
    return (Path(result.archive) / "graph.nnef").read_text(encoding="utf-8")
