"""A tiny config for any causal LM class that transformers knows, made by looking at the fields of its config class.

In: a model type. Out: a transformers config with every size shrunk and every kind of layer kept. Nothing is listed by
family except in `overrides.py`, so that the families of a later transformers appear by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from generic_export.errors import T2NError
from t2n_llm.source.small_sizes import WINDOW, most_of
from t2n_llm.zoo.overrides import FULL_SIZE_OVERRIDES, OVERRIDES

POSITIONS = 256
LAYERS = 3


class TinyConfigError(T2NError):
    """No tiny config can be made for a model type."""


# What makes a causal decoder with a cache of a config, whatever its default is.
_DECODER: Mapping[str, Any] = {"is_decoder": True, "add_cross_attention": False, "use_cache": True}

# field -> value, for every config class that has the field, whatever its default is
_FIXED: Mapping[str, Any] = {
    **_DECODER,
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

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def architectures() -> dict[str, str]:
    """Return the class name of each causal LM of the installed transformers, by model type, in its order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {kind: _class_name(name) for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}


def _class_name(entry: str | Iterable[str]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


def tiny_config(model_type: str) -> Any:
    """Return a small config of a model type that keeps what makes the family different.

    Args:
        model_type: a key of `architectures()`.

    Raises:
        TinyConfigError: transformers has no config class for it, or refuses the small values.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[model_type]
        return _shrunk(config_class, OVERRIDES.get(model_type, {}))
    except T2NError:
        raise
    except Exception as error:  # whatever the config class raises
        raise TinyConfigError(
            f"{model_type}: no tiny config: {type(error).__name__}: {' '.join(str(error).split())[:400]}",
            "Add what its config class needs to t2n_llm/zoo/overrides.py.",
        ) from error


def default_config(model_type: str) -> Any:
    """Return the config of a model type as transformers makes it when nothing is said: its real size, as a causal decoder.

    Args:
        model_type: a key of `architectures()`.

    Raises:
        Exception: whatever its config class raises.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    names = {field.name for field in _fields(config_class)}
    decoder = {name: value for name, value in _DECODER.items() if name in names}
    return config_class(**decoder, **FULL_SIZE_OVERRIDES.get(model_type, {}))


@dataclass(frozen=True)
class _Field:
    """One parameter of a config class."""

    name: str
    default: Any


def _fields(config_class: type) -> list[_Field]:
    from transformers import PretrainedConfig

    common = set(inspect.signature(PretrainedConfig).parameters)
    return [
        _Field(parameter.name, parameter.default)
        for parameter in inspect.signature(config_class).parameters.values()
        if parameter.name not in common and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def _shrunk(config_class: type, overrides: Mapping[str, Any]) -> Any:
    fields = _fields(config_class)
    names = {field.name for field in fields}
    values = {field.name: small for field in fields if (small := _small(field)) is not _UNCHANGED}
    if "kv_lora_rank" in names:  # latent attention: one key and value per query head, whose widths are sums of two
        values["num_key_value_heads"] = values["num_attention_heads"]
        values.pop("head_dim", None)
    parts = _shrunk_parts(config_class, names, overrides)
    plain = {name: value for name, value in overrides.items() if name not in parts}
    values |= parts
    return config_class(**{**_per_layer(config_class, names, values, plain), **plain})


_UNCHANGED = object()


def _small(field: _Field) -> Any:
    """Return the small value of a field, or `_UNCHANGED`."""
    if field.name in _FIXED:
        return _FIXED[field.name]
    if isinstance(field.default, bool) or not isinstance(field.default, int):
        return _UNCHANGED
    limit = next((most for pattern, most in _FEWER if fnmatchcase(field.name, pattern)), most_of(field.name))
    return limit if limit is not None and field.default > limit else _UNCHANGED


def _shrunk_parts(config_class: type, names: set[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested configs, each shrunk like a whole one."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if not getattr(config_class, "sub_configs", None):
        return {}
    given = {name: dict(part) for name, part in overrides.items() if isinstance(part, Mapping) and "model_type" in part}
    parts = {name: _shrunk(CONFIG_MAPPING[part.pop("model_type")], part) for name, part in given.items()}
    if parts:  # the class cannot be built without them
        return parts
    whole = config_class()
    for name in sorted(names):
        part = getattr(whole, name, None)
        if isinstance(part, PretrainedConfig):
            parts[name] = _shrunk(type(part), {**OVERRIDES.get(part.model_type, {}), **overrides.get(name, {})})
    return parts


def _per_layer(config_class: type, names: set[str], values: dict[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Choose as few layers as show every kind that the family's own pattern has.

    A first config is built with the family's own number of layers; what it wrote for each of them (kinds of attention,
    of feed-forward) is cut to the different kinds and the first one again.
    """
    count = next((name for name in _LAYER_COUNTS if name in names), None)
    if count is None or count in plain:
        return values
    listed = next((kinds for name, kinds in plain.items() if name.endswith("layer_types")), None)
    if listed is not None:
        return values | {count: len(listed)}
    full = config_class(**{**{name: value for name, value in values.items() if name != count}, **plain})
    layers = getattr(full, count)
    lists = {
        name: list(kinds)
        for name in sorted(names)
        if name not in plain and _is_per_layer(kinds := _peek(full, name), layers)
    }
    if not lists:
        return values
    rows = list(zip(*lists.values(), strict=True))
    chosen = list(dict.fromkeys(rows))
    chosen += [chosen[0]] * max(1, LAYERS - len(chosen))
    return (
        values
        | {count: len(chosen)}
        | {name: list(kinds) for name, kinds in zip(lists, zip(*chosen, strict=True), strict=True)}
    )


def _peek(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # transformers refuses to give one value for what differs by layer
        return None


def _is_per_layer(kinds: Any, layers: int) -> bool:
    return isinstance(kinds, (list, tuple)) and len(kinds) == layers and all(isinstance(kind, str) for kind in kinds)
