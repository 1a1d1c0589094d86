"""The tiny twin of a model: the same classes with random weights, a layer of each kind, small dimensions.

In: a transformers config. Out: a `TinyModel`, whose model runs in milliseconds and takes the same paths through the code.
Read by `t2n-llm diagnose --tiny` and, where a model cannot be captured whole, by `t2n-llm coverage`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from generic_export.errors import CaptureError, described
from kvcache.operators import OperatorNames
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.layer_cut import LayerCut, cut_layers, rebuilt, value_of
from t2n_llm.source.small_sizes import VOCABULARY, WINDOW, most_of

_HIDDEN = 64
_MOST_PARAMETERS = 50_000_000  # beyond that a twin is not tiny
_TRIAL_STEPS = 5

_WIDTHS = ("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "lru_width", "word_embed_proj_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
# Beside what `small_sizes` says: name -> the most that it becomes; what is smaller stays.
_MOST: Mapping[str, int] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), WINDOW),
    "qk_head_dim": 24,  # of which 16 bear no position and 8 do
}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_EXPERT_GROUPS = (("n_group", "topk_group"), ("num_expert_group", "topk_group"))
_MAMBA_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("num_heads", "head_dim", "expand"),
)
_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class TinyModel:
    """A small model that stands for a large one.

    Attributes:
        cut: its config, and the layers of the original that it keeps.
        narrow: its dimensions are small too; otherwise only its layers (and its vocabulary) are few.
        parameters: how many numbers it has.
    """

    cut: LayerCut
    narrow: bool
    parameters: int

    @property
    def config(self) -> Any:
        """The config of the twin."""
        return self.cut.config

    @property
    def sentence(self) -> str:
        """What it is, for people: `layers 0, 5 of 26, hidden size 64, 0.2 M random weights`."""
        text = self.config.get_text_config(decoder=True)
        layers = ", ".join(map(str, self.cut.picks)) or "all"
        return (
            f"layers {layers} of {self.cut.depth}, hidden size {getattr(text, 'hidden_size', '?')}, "
            f"{self.parameters / 1e6:.2f} M random weights"
        )

    def model(
        self, *, operators: OperatorNames | None = None, seed: int = 0, trust_remote_code: bool = False
    ) -> nn.Module:
        """Make the twin in f32 on the CPU, with weights that tell positions, layers and scales apart.

        Args:
            operators: attention and experts to run with; None takes the config's own.
            seed: of the weights.
            trust_remote_code: allow code that comes with the model.
        """
        from transformers import AutoModelForCausalLM

        options = operators.options if operators else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config), dtype=torch.float32, trust_remote_code=trust_remote_code, **options
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    # Norm scales and biases away from their neutral start, so that a forgotten one shows.
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.eval()


def tiny_model(config: Any, *, trust_remote_code: bool = False) -> TinyModel:
    """Return the smallest twin of a model that still runs in PyTorch.

    Args:
        config: transformers config of the original; it is not modified.
        trust_remote_code: allow code that comes with the model.

    Raises:
        CaptureError: no twin small enough can be built and run; the message says why for the last one tried.
    """
    cut = cut_layers(config, trust_remote_code=trust_remote_code)
    reason = ""
    for shrink in (_narrow, _few_experts_and_words, _as_it_is):
        try:
            small = _initialised_wide(shrink(cut.config))
            empty = meta_model(small, trust_remote_code=trust_remote_code)
            parameters = sum(parameter.numel() for parameter in empty.parameters())
            twin = TinyModel(LayerCut(small, cut.picks, cut.counts), shrink is _narrow, parameters)
            if parameters > _MOST_PARAMETERS:
                reason = reason or f"it would have {parameters / 1e6:.0f} M parameters"
                continue
            _try(twin, trust_remote_code)
        except Exception as error:  # what a config's or a model's own code says of sizes that do not fit
            reason = described(error)
            continue
        return twin
    raise CaptureError(
        f"{type(config).__name__}: no tiny twin of the model can be made: {reason}",
        "Diagnose the model itself (without --tiny), or give a smaller config of the family.",
    )


def _try(twin: TinyModel, trust_remote_code: bool) -> None:
    model = twin.model(trust_remote_code=trust_remote_code)
    with torch.no_grad():
        model(input_ids=torch.arange(_TRIAL_STEPS)[None] + 3, use_cache=False)


# --- smaller configs ------------------------------------------------------------------------------


def _narrow(config: Any) -> Any:
    """Return the config with small dimensions everywhere; the nested configs (a vision tower) as well."""
    return _each_part(config, _narrow_changes)


def _few_experts_and_words(config: Any) -> Any:
    """Return the config with what costs most and means least cut: the vocabulary and the number of experts."""
    return _each_part(config, lambda part: dict(_limited(part, {"vocab_size": VOCABULARY})) | _few_experts(part))


def _as_it_is(config: Any) -> Any:
    return copy.deepcopy(config)


def _initialised_wide(config: Any) -> Any:
    """Return the config with weights so spread that logits of different tokens differ clearly."""
    return _each_part(config, lambda part: {"initializer_range": 0.12} if hasattr(part, "initializer_range") else {})


def _each_part(config: Any, changes_of: Callable[[Any], dict[str, Any]]) -> Any:
    small = copy.deepcopy(config)
    for part in list(_parts(small)):
        changes = changes_of(part)
        if changes:
            small = rebuilt(small, part, changes)
    return small


def _parts(config: Any) -> Iterator[Any]:
    """Yield the nested configs, then the config itself."""
    from transformers import PretrainedConfig

    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield value
    yield config


def _narrow_changes(part: Any) -> dict[str, Any]:
    limits = {name: most for name in vars(part) if (most := _MOST.get(name, most_of(name))) is not None}
    changes = dict(_limited(part, limits)) | _few_experts(part) | _token_ids(part)
    changes |= _attention(part) | dict(_widths(part))
    for heads, head_dim, expand in _MAMBA_HEADS:
        if all(isinstance(value_of(part, name), (int, float)) for name in (heads, head_dim, expand)):
            width = int(getattr(part, expand) * _HIDDEN)
            changes[head_dim] = 16
            changes[heads] = width // 16
            if isinstance(value_of(part, "mamba_d_ssm"), int):
                changes["mamba_d_ssm"] = width
    if isinstance(value_of(part, "attention_hidden_size"), int):
        changes["attention_hidden_size"] = _HIDDEN
        if value_of(part, "attention_head_dim"):
            changes |= {
                "attention_hidden_size": 2 * _HIDDEN,
                "attention_head_dim": 2 * _HIDDEN // _first_heads(changes),
            }
    return changes | _rope(part, changes)


def _limited(part: Any, limits: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    for name, most in limits.items():
        value = value_of(part, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            yield name, most
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, int) for item in value):
            yield name, [min(item, most) for item in value]


def _widths(part: Any) -> Iterator[tuple[str, int]]:
    hidden = value_of(part, "hidden_size")
    for name in _WIDTHS:
        value = value_of(part, name)
        if isinstance(value, int) and value > _HIDDEN:
            yield name, _HIDDEN if value == hidden or hidden is None else _HIDDEN // 2


def _few_experts(part: Any) -> dict[str, Any]:
    groups = next((pair for pair in _EXPERT_GROUPS if (value_of(part, pair[0]) or 1) > 1), None)
    changes: dict[str, Any] = {groups[0]: 2, groups[1]: 1} if groups else {}
    most = 8 if groups else 4
    return changes | dict(_limited(part, dict.fromkeys(_EXPERTS, most)))


def _attention(part: Any) -> dict[str, Any]:
    """Return heads that keep what the originals are to each other: shared or not, as wide as the model or not."""
    heads_name = next((name for name in _HEADS if isinstance(value_of(part, name), int)), None)
    if heads_name is None:
        return {}
    heads = getattr(part, heads_name)
    kv_name = next((name for name in _KV_HEADS if isinstance(value_of(part, name), int)), None)
    kv_heads = getattr(part, kv_name) if kv_name else heads
    changes: dict[str, Any] = {heads_name: min(heads, 4)}
    if kv_name:
        changes[kv_name] = changes[heads_name] if kv_heads >= heads else 1 if kv_heads == 1 else 2
    head_dim, hidden = value_of(part, "head_dim"), value_of(part, "hidden_size")
    if isinstance(head_dim, int) and isinstance(hidden, int):
        own = _HIDDEN // changes[heads_name]
        if value_of(part, "qk_rope_head_dim") == head_dim:
            changes["head_dim"] = 8  # the width of what is rotated, in latent attention
        else:
            changes["head_dim"] = own if head_dim * heads == hidden else own + 8
    return changes


def _token_ids(part: Any) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, own in _TOKEN_IDS.items():
        value = value_of(part, name)
        ids = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, int) and item >= VOCABULARY for item in ids):
            changes[name] = own
    return changes


def _rope(part: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters whose lists (a factor per frequency, sections per axis) fit the narrower heads."""
    rope = value_of(part, "rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return {}
    before = _head_dim(part)
    after = changes.get("head_dim") or changes.get("qk_rope_head_dim") or _HIDDEN // max(1, _first_heads(changes))
    scale = after / before if before else 1.0
    return {"rope_parameters": _scaled_lists(copy.deepcopy(rope), scale)}


def _first_heads(changes: Mapping[str, Any]) -> int:
    return next((int(changes[name]) for name in _HEADS if name in changes), 4)


def _head_dim(part: Any) -> int:
    value = value_of(part, "head_dim")
    if isinstance(value, int):
        return value
    heads = next((getattr(part, name) for name in _HEADS if isinstance(value_of(part, name), int)), 1)
    return int(getattr(part, "hidden_size", 0) // max(heads, 1))


def _scaled_lists(value: Any, scale: float) -> Any:
    if isinstance(value, dict):
        return {key: _scaled_lists(item, scale) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, (int, float)) for item in value):
        if all(isinstance(item, int) for item in value):  # sections: their sum is what counts
            parts = [max(1, math.floor(item * scale)) for item in value]
            parts[-1] += max(0, round(sum(value) * scale) - sum(parts))
            return parts
        return list(value[: max(1, round(len(value) * scale))])
    return value


__all__ = ["TinyModel", "tiny_model"]
