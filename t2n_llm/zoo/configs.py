"""A tiny config for any model class that transformers knows, made by looking at the fields of its config class.

In: a model type. Out: a transformers config with every size shrunk and every kind of layer kept. Nothing is listed by
family except in `overrides.py`, so that the families of a later transformers appear by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from generic_export.errors import T2NError
from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.zoo.overrides import FULL_SIZE_OVERRIDES
from t2n_llm.zoo.shrinking import CAUSAL, DECODER, ELSEWHERE, LAYERS, UNCHANGED, Rules


class TinyConfigError(T2NError):
    """No tiny config can be made for a model type."""


_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def tiny_config(model_type: str, task: str = TEXT_GENERATION, rules: Rules | None = None) -> Any:
    """Return a small config of a model type that keeps what makes the family different.

    Args:
        model_type: a key of `architectures(task)`.
        task: what the model is for.
        rules: how fields become small; None takes the task's own.

    Raises:
        TinyConfigError: transformers has no config class for it, or refuses the small values.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        rules = rules or (CAUSAL if task == TEXT_GENERATION else ELSEWHERE)
        return _shrunk(CONFIG_MAPPING[model_type], rules.overrides(model_type), rules)
    except T2NError:
        raise
    except Exception as error:  # whatever the config class raises
        raise TinyConfigError(
            f"{model_type}: no tiny config: {type(error).__name__}: {' '.join(str(error).split())[:400]}",
            "Add the fields that its config class needs to t2n_llm/zoo/overrides.py.",
        ) from error


def default_config(model_type: str) -> Any:
    """Return the config of a model type as transformers makes it when nothing is said: its real size, as a causal decoder.

    Args:
        model_type: of a causal LM.

    Raises:
        Exception: whatever its config class raises.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    names = {field.name for field in _fields(config_class)}
    decoder = {name: value for name, value in DECODER.items() if name in names}
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


def _shrunk(
    config_class: type, overrides: Mapping[str, Any], rules: Rules, said: Mapping[str, bool] | None = None
) -> Any:
    """Return a config of a class made small.

    Args:
        config_class: of transformers.
        overrides: values that stay as they are.
        rules: how the others become small.
        said: what a whole switches on or off in this part of it.
    """
    fields = _fields(config_class)
    names = {field.name for field in fields}
    values = dict(said or {}) | {
        field.name: small for field in fields if (small := rules.small(field.name, field.default)) is not UNCHANGED
    }
    if "kv_lora_rank" in names:  # latent attention: one key and value per query head, whose widths are sums of two
        heads = next(field.default for field in fields if field.name == "num_attention_heads")
        values["num_key_value_heads"] = values.get("num_attention_heads", heads)
        values.pop("head_dim", None)
    parts = _shrunk_parts(config_class, names, overrides, rules)
    plain = {name: value for name, value in overrides.items() if name not in parts}
    values |= parts
    return config_class(**{**_per_layer(config_class, names, values, plain), **plain})


def _shrunk_parts(config_class: type, names: set[str], overrides: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Return the nested configs, each shrunk like a whole one."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if not getattr(config_class, "sub_configs", None):
        return {}
    given = {name: dict(part) for name, part in overrides.items() if isinstance(part, Mapping) and "model_type" in part}
    parts = {name: _shrunk(CONFIG_MAPPING[part.pop("model_type")], part, rules) for name, part in given.items()}
    if parts:  # the class cannot be built without them
        return parts
    whole = config_class()
    for name in sorted(names):
        part = getattr(whole, name, None)
        if isinstance(part, PretrainedConfig):
            special = {**rules.overrides(part.model_type), **overrides.get(name, {})}
            parts[name] = _shrunk_part(part, special, rules, _said(config_class, name))
    return parts


def _said(config_class: Any, name: str) -> dict[str, bool]:
    """Return what a config class switches on or off in a part of it, other than the part's own class does.

    Sizes and lists of layers that it says are those of a large part. Releases before 5.23 say nothing.
    """
    spec = getattr(config_class, "sub_configs_defaults", {}).get(name)
    said = getattr(spec, "init_kwargs", None) or {}
    return {field: value for field, value in said.items() if isinstance(value, bool)}


def _shrunk_part(part: Any, overrides: Mapping[str, Any], rules: Rules, said: Mapping[str, bool]) -> Any:
    """Return a part made small that gives as many stages as before: the last ones where it has fewer."""
    wanted = list(getattr(part, "out_indices", None) or ()) if getattr(part, "stage_names", None) else []
    made = _shrunk(type(part), overrides, rules, said)
    if 1 < len(wanted) >= len(made.stage_names) and hasattr(part, "num_hidden_layers"):  # one stage a layer
        made = _shrunk(type(part), {**overrides, "num_hidden_layers": len(wanted)}, rules, said)
    if wanted and "out_indices" not in overrides and len(wanted) < len(made.stage_names):
        fits = max(wanted) < len(made.stage_names)
        made.out_indices = wanted if fits else list(range(len(made.stage_names) - len(wanted), len(made.stage_names)))
    return made


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
