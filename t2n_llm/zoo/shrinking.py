"""What a field of a config class becomes in a tiny model, by its name: a table for decoders, and one for whatever else.

In: the name and the default of a field. Out: a small value, or `UNCHANGED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from t2n_llm.source.small_sizes import VOCABULARY, WINDOW, most_of
from t2n_llm.zoo.overrides import OVERRIDES, TASK_OVERRIDES

POSITIONS = 256
_IMAGE = 64
LAYERS = 3
UNCHANGED = object()

# What makes a causal decoder with a cache of a config, whatever its default is.
DECODER: Mapping[str, Any] = {"is_decoder": True, "add_cross_attention": False, "use_cache": True}

# field -> value, for every config class that has the field, whatever its default is
_FIXED: Mapping[str, Any] = {
    **DECODER,
    # Weights wide enough that logits differ clearly between tokens.
    "initializer_range": 0.12,
    "init_std": 0.12,
    "initializer_factor": 0.12,
    "embed_init_std": 0.12,
    # Ids that the check's random text does not contain (a test holds that): a padding token would get another position.
    "pad_token_id": 7,
    "bos_token_id": 8,
    "eos_token_id": 2,
    # Windows, small enough to be left behind by the checks.
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_window": 2 * WINDOW,  # counted on both sides
    "attention_chunk_size": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    # Fewer key and value heads than query heads, also where the default is as many.
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "v_head_dim": 16,
    "num_experts_per_tok": 2,
}

_COUNTS: tuple[tuple[str, int], ...] = (
    ("*num_hidden_layers", LAYERS),
    ("n_layer", LAYERS),
    ("n_layers", LAYERS),
    ("num_layers", LAYERS),
    ("encoder_layers", LAYERS),
    ("decoder_layers", LAYERS),
    ("num_encoder_layers", LAYERS),
    ("num_decoder_layers", LAYERS),
    ("depth", LAYERS),
)

# shell pattern on field names -> the same for what else a default has much of: layers, positions, further heads
_FEWER: tuple[tuple[str, int], ...] = (
    ("first_k_dense_replace", 1),
    ("*num_dense_layers", 1),
    ("n_positions", POSITIONS),
    ("n_ctx", POSITIONS),
    ("max_seq_len", POSITIONS),
    ("context_length", POSITIONS),
    ("max_source_positions", 64),
    ("max_target_positions", POSITIONS),
    ("original_max_position_embeddings", 64),
    ("max_position_embeddings", POSITIONS),
    ("num_mtp_layers", 0),
    ("num_nextn_predict_layers", 0),
    ("*_interval", 2),
    ("*_period", 2),
    *_COUNTS,
)

# Beside those, what models that see, hear or encode first have much of.
_FEWER_ELSEWHERE: tuple[tuple[str, int], ...] = (
    ("image_size", _IMAGE),
    ("crop_size", _IMAGE),
    ("out_hidden_size", 64),  # of the text
    ("num_mel_bins", 16),
    ("feature_size", 16),
    ("num_frames", 4),
    ("frames_per_clip", 4),
    ("d_latents", 64),
    ("num_latents", 8),
    ("num_self_attends_per_block", 2),
    ("num_queries", 8),
    ("*num_conv_pos_embeddings", 16),
    ("*num_conv_pos_embedding_groups", 4),
    ("projection_dim", 64),
    ("*_proj_size", 64),
    ("*_embedding_dim", 64),
    ("xvector_output_dim", 64),
    ("d_kv", 16),
    ("d_ff", 96),
    ("*_attention_heads", 4),
    *_FEWER,
)

_LARGEST_OF_A_LIST = 64
_WIDTH_STEP = 16
_CHANNELS_OF_AN_IMAGE = 4


def _overrides(kind: str) -> Mapping[str, Any]:
    return {**OVERRIDES.get(kind, {}), **TASK_OVERRIDES.get(kind, {})}


def _fewer_stages(name: str, sizes: Sequence[int]) -> list[int] | None:
    """Return depths, one a stage, or sides of images made small; None where the name says nothing of the kind."""
    if name == "image_size":
        return [min(size, _IMAGE) for size in sizes]
    return [min(size, 2) for size in sizes] if _is_depths(name) else None


def _is_depths(name: str) -> bool:
    return name in ("depths", "layers", "num_blocks", "num_layers") or name.endswith(("_depths", "_layers", "_blocks"))


def _smaller_list(name: str, sizes: Sequence[int]) -> list[int] | None:
    """Return a list of widths, heads or depths, one a stage, made small; None where the name says nothing of the kind."""
    if "head" in name:
        return [min(size, 2) for size in sizes]
    if _is_depths(name) or name == "image_size":
        return _fewer_stages(name, sizes)
    if not fnmatchcase(name, "*sizes") and not any(word in name for word in ("dim", "channels", "width")):
        return None
    largest = max(sizes)
    if largest <= _LARGEST_OF_A_LIST or "kernel" in name or name == "patch_size":
        return None
    return [_narrower(size, largest) for size in sizes]


def _narrower(size: int, largest: int) -> int:
    """Return a width made small; the few channels of an image, before a stem, stay."""
    if size <= _CHANNELS_OF_AN_IMAGE:
        return size
    return max(1, round(_LARGEST_OF_A_LIST * size / largest / _WIDTH_STEP)) * _WIDTH_STEP


@dataclass(frozen=True)
class Rules:
    """How the fields of a config class become small.

    Attributes:
        fixed: field -> value, for every class that has the field.
        fewer: shell pattern on field names -> the most that an integer may be.
        lists: likewise for each integer of a list; None leaves lists as they are.
        overrides: by model type.
    """

    fixed: Mapping[str, Any]
    fewer: tuple[tuple[str, int], ...]
    lists: Callable[[str, Sequence[int]], list[int] | None] | None
    overrides: Callable[[str], Mapping[str, Any]]

    def small(self, name: str, default: Any) -> Any:
        """Return the small value of a field, or `UNCHANGED`."""
        if name in self.fixed:
            return self.fixed[name]
        if self.lists is not None and _is_sizes(default):
            smaller = self.lists(name, default)
            return UNCHANGED if smaller is None else smaller  # a list, as a checkpoint's file has
        if isinstance(default, bool) or not isinstance(default, int):
            return UNCHANGED
        limit = next((most for pattern, most in self.fewer if fnmatchcase(name, pattern)), most_of(name))
        return limit if limit is not None and default > limit else UNCHANGED


def _is_sizes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(type(each) is int for each in value)


CAUSAL = Rules(_FIXED, _FEWER, None, lambda kind: OVERRIDES.get(kind, {}))
_FIXED_ELSEWHERE = (
    # Ids of what generates must be below the vocabulary; encoders are no decoders.
    {name: value for name, value in _FIXED.items() if name not in DECODER}
    | {"decoder_start_token_id": 3, "forced_bos_token_id": None, "forced_eos_token_id": None}
    | {"suppress_tokens": None, "begin_suppress_tokens": None}
    # Tokens that images and sound stand for.
    | dict.fromkeys(("image_token_id", "image_token_index", "media_placeholder_token_id"), VOCABULARY - 10)
    | {"audio_token_id": VOCABULARY - 9, "audio_token_index": VOCABULARY - 9, "video_token_id": VOCABULARY - 8}
    | {"vision_start_token_id": VOCABULARY - 7, "vision_end_token_id": VOCABULARY - 6}
    | {"image_start_token_id": VOCABULARY - 5, "image_end_token_id": VOCABULARY - 4}
)
ELSEWHERE = Rules(_FIXED_ELSEWHERE, _FEWER_ELSEWHERE, _smaller_list, _overrides)

# Of widths that stay as they are: larger ones grow from layer to layer, until nothing but rounding is seen.
_WEIGHTS_OF_WIDE_LAYERS = {
    "initializer_range": 0.02,
    "init_std": 0.02,
    "initializer_factor": 1.0,
    "embed_init_std": 0.02,
}
_TYING = ("window", "head", "experts")  # what widths that stay may be multiples of
GENTLE = Rules(
    {name: value for name, value in _FIXED_ELSEWHERE.items() if not any(word in name for word in _TYING)},
    (
        ("image_size", _IMAGE),
        ("crop_size", _IMAGE),
        ("*vocab_size*", VOCABULARY),
        ("num_frames", 4),
        ("frames_per_clip", 4),
        ("num_queries", 8),
        *_COUNTS,
        ("*", 1 << 62),
    ),
    _fewer_stages,
    _overrides,
)
"""Fewer layers, tokens and pixels, every width as it is: for families whose own sizes are tied to each other."""
TEMPERED = replace(GENTLE, fixed={**GENTLE.fixed, **_WEIGHTS_OF_WIDE_LAYERS})
"""The same with weights of the size that wide layers begin with: for families that larger ones leave with nothing but rounding."""
