"""Models whose residual stream leaves f16, made of models whose stream does not, so that both must say the same, bit for bit.

What enters the stream is multiplied by 2^k, and epsilons by 4^k: a function-preserving change where norms read the stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from generic_export.errors import NumericRangeError
from t2n_llm import export_llm
from t2n_llm.check.runner import WheelRunner
from t2n_llm.export.pipeline import ExportResult
from tests.families import COMMON, save_tiny_model
from tests.t2n_llm.command_line import call

_NO_EPSILON = 1e-30  # where norms of the stream and of other tensors share one
_TURNS = ([5, 9, 2, 7, 11, 3], [4], [8, 1])


@dataclass(frozen=True)
class Kind:
    """A family, and what enters its residual stream.

    Attributes:
        config: of transformers.
        entries: patterns of the parameters that are multiplied.
        readers: patterns of the parameters that are divided: what reads the stream without a norm.
        around_one: patterns of norm weights that stand for 1 + weight.
        epsilon: field of the config that grows with the stream, or "".
        multipliers: fields of the config that multiply what enters the stream.
        power: k.
        exact: the theory says bit-equal; not so where a weight in f16 has other bits than one of another size.
    """

    config: Mapping[str, Any]
    entries: tuple[str, ...]
    around_one: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    epsilon: str = ""
    multipliers: tuple[str, ...] = ()
    power: int = 18
    exact: bool = True


_SMALL = COMMON | {"num_hidden_layers": 1, "use_cache": True}
_LLAMA = ("*.o_proj.weight", "*.down_proj.weight", "*.embed_tokens.weight")
_POST_NORMS = ("*.post_attention_layernorm.weight", "*.post_feedforward_layernorm.weight")

KINDS: Mapping[str, Kind] = {
    "RMS norm": Kind({"model_type": "llama", "tie_word_embeddings": False}, _LLAMA, epsilon="rms_norm_eps"),
    "a table for input and output": Kind(
        {"model_type": "granite", "tie_word_embeddings": True, "attention_multiplier": 0.25},
        _LLAMA[:2],
        epsilon="rms_norm_eps",
        multipliers=("embedding_multiplier",),
    ),
    "1 + weight, post-norms, q and k norms": Kind(
        {"model_type": "gemma3_text", "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 8, "rms_norm_eps": _NO_EPSILON,
         "tie_word_embeddings": False},
        ("*.embed_tokens.weight",),
        _POST_NORMS,
        power=13,
        exact=False,
    ),
    "post-norms": Kind(
        {"model_type": "olmo2", "num_hidden_layers": 2, "rms_norm_eps": _NO_EPSILON, "tie_word_embeddings": False},
        ("*.embed_tokens.weight", *_POST_NORMS),
        readers=tuple(f"*.{name}_proj.weight" for name in ("q", "k", "v", "gate", "up")),
        exact=False,
    ),
    "parallel blocks, layer norms with biases": Kind(
        {"model_type": "gpt_neox", "use_parallel_residual": True},
        ("*.embed_in.weight", "*.dense.*", "*.dense_4h_to_h.*"),
        epsilon="layer_norm_eps",
    ),
    "one norm for two branches": Kind(
        {"model_type": "phi", "tie_word_embeddings": False},
        ("*.embed_tokens.weight", "*.dense.*", "*.fc2.*"),
        epsilon="layer_norm_eps",
    ),
    "mixture with a router": Kind(
        {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "rms_norm_eps": _NO_EPSILON, "tie_word_embeddings": False, "decoder_sparse_step": 1, "num_hidden_layers": 2},
        ("*.embed_tokens.weight", "*.o_proj.weight", "*.experts.*down_proj*"),
    ),
    "learned positions": Kind(
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, "tie_word_embeddings": False},
        ("*.wte.weight", "*.wpe.weight", "*.c_proj.*"),
        epsilon="layer_norm_epsilon",
    ),
}  # fmt: skip

# What it squares and what it adds to normalised values is a stream that no power of two fits.
ALTERNATING_UPDATES = Kind(
    {"model_type": "gemma3n_text", "head_dim": 16, "sliding_window": 8, "rms_norm_eps": _NO_EPSILON, "laurel_rank": 16,
     "tie_word_embeddings": False, "num_hidden_layers": 1, "num_kv_shared_layers": 0, "altup_num_inputs": 2,
     "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": COMMON["vocab_size"], "activation_sparsity_pattern": None,
     "layer_types": ["full_attention"]},
    ("*.embed_tokens.weight", *_POST_NORMS, "*.input_layernorm.weight", "*.post_laurel_norm.weight",
     "*.post_per_layer_input_norm.weight"),
    readers=("*.per_layer_input_gate.weight",),
    power=14,
)  # fmt: skip
_EVERY_KIND = (*KINDS.values(), ALTERNATING_UPDATES)


def _config(kind: Kind) -> Callable[[], Any]:
    def build() -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(**(_SMALL | dict(kind.config)))

    return build


def _inflate(folder: Path, kind: Kind) -> None:
    """Multiply what enters the stream, in place."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    touched, every = set(), (*kind.entries, *kind.around_one, *kind.readers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in kind.entries):
                parameter.mul_(2.0**kind.power)
            elif any(fnmatchcase(name, pattern) for pattern in kind.around_one):
                parameter.add_(1).mul_(2.0**kind.power).sub_(1)
            elif any(fnmatchcase(name, pattern) for pattern in kind.readers):
                parameter.mul_(2.0**-kind.power)
            else:
                continue
            touched.add(next(pattern for pattern in every if fnmatchcase(name, pattern)))
    assert touched == set(every)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for field, factor in [(kind.epsilon, 4.0), *((field, 2.0) for field in kind.multipliers)]:
        if field:
            config[field] *= factor**kind.power
    (folder / "config.json").write_text(json.dumps(config))


def _exported(source: Path, target: Path, **choices: Any) -> tuple[ExportResult, list[np.ndarray]]:
    options: dict[str, Any] = {"dtype": "f16", "activations": "f16", "require_tokenizer": False, "decode_steps": 3}
    result = export_llm(str(source), target, **(options | choices))
    with WheelRunner(result.archive) as runner:
        return result, runner.run_turns(_TURNS, stateful=False)


# Whose mechanisms two others have together.
_IN_OTHERS = ("RMS norm", "parallel blocks, layer norms with biases")


@pytest.fixture(scope="module")
def plain_export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], tuple[ExportResult, list[np.ndarray]]]:
    """Returns the export of a kind as it is, and what it says."""

    @cache
    def made(number: int) -> tuple[ExportResult, list[np.ndarray]]:
        folder = tmp_path_factory.mktemp("plain")
        return _exported(_saved(_EVERY_KIND[number], folder / "model"), folder / "export")

    return lambda kind: made(_EVERY_KIND.index(kind))


def _saved(kind: Kind, folder: Path) -> Path:
    return save_tiny_model("it", folder, configs={"it": _config(kind)})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in _IN_OTHERS else ()) for name in KINDS]
)
def test_an_inflated_model_says_the_same_bit_for_bit(
    name: str, plain_export: Callable[[Kind], tuple[ExportResult, list[np.ndarray]]], tmp_path: Path
) -> None:
    kind = KINDS[name]
    plain, expected = plain_export(kind)
    source = _saved(kind, tmp_path / "model")
    _inflate(source, kind)
    inflated, found = _exported(source, tmp_path / "inflated")
    assert not plain.manifest["activation_ranges"]["model"]["rescaled"]
    (group, *_) = inflated.manifest["activation_ranges"]["model"]["rescaled"]
    assert group["max_abs"] > 65504 and group["factor"] < 2**-3
    if kind.exact:
        for before, after in zip(expected, found, strict=True):
            np.testing.assert_array_equal(before, after)
    else:
        assert _error(inflated) <= 1.2 * _error(plain)


@pytest.mark.parametrize(
    ("kind", "residual"), [(ALTERNATING_UPDATES, "auto"), (KINDS["mixture with a router"], "always")]
)
def test_a_stream_in_f32_is_no_worse_than_one_that_fits(
    kind: Kind, residual: str, plain_export: Callable[[Kind], tuple[ExportResult, list[np.ndarray]]], tmp_path: Path
) -> None:
    plain, _ = plain_export(kind)
    source = _saved(kind, tmp_path / "model")
    _inflate(source, kind)
    inflated, _ = _exported(source, tmp_path / "inflated", f32_residual=residual)
    kept = [group for group in inflated.manifest["activation_ranges"]["model"]["rescaled"] if group["in_f32"]]
    assert kept and max(group["max_abs"] for group in kept) > 65504
    assert _error(inflated) <= 1.2 * _error(plain)


def _error(result: ExportResult) -> float:
    assert result.validation is not None
    return max(check.max_abs_error for check in result.validation.checks)


def test_what_cannot_be_kept_smaller_names_the_module_that_overflows(tmp_path: Path) -> None:
    """Values are the interface, whose type is f16: nothing to be done, and said before a weight is written."""
    kind = KINDS["post-norms"]
    source = _saved(kind, tmp_path / "model")
    _inflate(source, Kind(kind.config, kind.entries, power=15))  # readers are not divided: values overflow
    with pytest.raises(NumericRangeError, match=r"values of model\.layers\.\d\.\S+ reach \S+; f16 holds at most 65504"):
        _exported(source, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    _, logits = _exported(source, tmp_path / "wide", activations="f32", cache_dtype="f32")
    assert all(np.isfinite(row).all() for row in logits)


def test_without_a_check_it_is_said_that_nobody_looked(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result, _ = _exported(tiny_llama, tmp_path / "exported", check=False)
    assert "Activation ranges were not measured" in caplog.text
    assert result.manifest["activation_ranges"] == {}


_MOST_POWER = 16


def _with_large_keys(folder: Path, power: int) -> Path:
    """Write a model whose keys are multiplied by 2^power; what queries are multiplied with makes up for it.

    All of them have one config: they are captured once.
    """
    multiplier = 0.25 * 2.0**-_MOST_POWER
    config: dict[str, Any] = {"model_type": "granite", "attention_multiplier": multiplier}
    source = _saved(Kind(config, ()), folder / "model")
    _inflate(source, Kind(config, ("*.k_proj.*",), power=power))
    _inflate(source, Kind(config, ("*.q_proj.*",), power=_MOST_POWER - power))
    return source


def test_keys_beyond_f16_have_a_cache_in_f32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, _ = _exported(_with_large_keys(tmp_path / "fits", 0), tmp_path / "plain", activations="f32")
    source = _with_large_keys(tmp_path / "beyond", _MOST_POWER)
    with pytest.raises(
        NumericRangeError, match=r"cache_key of layer \d reaches \S+ on the check's text.*--cache-dtype f32"
    ):
        _exported(source, tmp_path / "asked", activations="f32", cache_dtype="f16")
    result, _ = _exported(source, tmp_path / "wide", activations="f32")
    assert re.search(
        r"cache_key of layer \d reaches \S+ on the check's text; f16 holds at most 65504: caches are f32",
        caplog.text,
    )
    assert {state["dtype"] for state in plain.manifest["graph"]["states"]} == {"f16"}
    assert {state["dtype"] for state in result.manifest["graph"]["states"]} == {"f32"}
    assert result.manifest["options"]["cache_dtype"] == "f32"
    assert result.manifest["validation"]["state_max_abs"]["cache_key"] > 65504
    assert _error(result) <= 1.2 * _error(plain)


def test_keys_that_f16_holds_without_room_have_a_cache_in_f32(tmp_path: Path) -> None:
    source = _with_large_keys(tmp_path, 13)
    chosen, _ = _exported(source, tmp_path / "chosen", activations="f32")
    asked, _ = _exported(source, tmp_path / "asked", activations="f32", cache_dtype="f16")
    assert {state["dtype"] for state in chosen.manifest["graph"]["states"]} == {"f32"}
    assert {state["dtype"] for state in asked.manifest["graph"]["states"]} == {"f16"}
    assert 65504 / 8 < asked.manifest["validation"]["state_max_abs"]["cache_key"] < 65504


@pytest.mark.parametrize(("dtype", "told"), [("f16", True), ("f32", False)])
def test_without_a_check_it_is_said_that_nobody_looked_at_keys(
    dtype: str, told: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    done = call("export", tiny_llama, "-o", tmp_path / "exported", "--dtype", dtype, "--no-check", "--no-tokenizer")
    assert done.code == 0
    assert ("ranges of the KV cache were not measured" in " ".join(done.out.split())) == told
