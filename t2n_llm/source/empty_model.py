"""Transformers models without weights: shapes and element types for a capture, values only where the model computes them itself.

In: a config, and what kind of model to make of it. Out: an `nn.Module` whose parameters are on the meta device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from generic_export.compat import buffers_of
from generic_export.errors import CaptureError, OptionError, UnknownArchitectureError
from kvcache.rotary.scaling import express_length_switches
from t2n_llm.compat import dispensable_names, from_config, initialise

_LOOKS_AT_TOKENS = "warn_if_padding_and_no_attention_mask"


@dataclass(frozen=True)
class ModelKind:
    """One of transformers' ways to make a model of a config.

    Attributes:
        auto_class: name of the class in transformers.
        description: what it makes, for messages.
        advice: what a user should give instead where it makes nothing.
    """

    auto_class: str
    description: str
    advice: str


CAUSAL_LM = ModelKind("AutoModelForCausalLM", "causal language model", "Use a text generation model")
MULTIMODAL_MODEL = ModelKind(
    "AutoModelForMultimodalLM", "vision-language or speech model", "Choose another --task, such as text-generation"
)


def instantiate(
    kind: ModelKind, config: Any, dtype: torch.dtype, attention: str, experts: str, trust_remote_code: bool
) -> nn.Module:
    """Build the model class of a config, parameters on the meta device, buffers with their values.

    Args:
        kind: what transformers should make of the config.
        config: a transformers config; it is not modified.
        dtype: element type of the parameters.
        attention, experts: names of transformers' implementations.
        trust_remote_code: allow code that comes with the checkpoint.

    Raises:
        UnknownArchitectureError: transformers has no such class for the config.
        CaptureError: the config has a value that no model can be built with.
    """
    # Parameters on meta, buffers with their values: only the model itself knows how to compute those.
    model = _from_config(
        kind,
        config,
        include_buffers=False,
        dtype=dtype,
        attn_implementation=attention,
        experts_implementation=experts,
        trust_remote_code=trust_remote_code,
    )
    _silence(model)
    express_length_switches(model)
    return model.eval()


def meta_model(config: Any, *, kind: ModelKind = CAUSAL_LM, trust_remote_code: bool = False) -> nn.Module:
    """Build the model of a config, a causal LM by default, with every tensor on the meta device, in the config's own element type.

    Raises:
        UnknownArchitectureError, CaptureError: see `instantiate`.
    """
    return _from_config(kind, config, include_buffers=True, trust_remote_code=trust_remote_code).eval()


def _from_config(kind: ModelKind, config: Any, *, include_buffers: bool, **options: Any) -> Any:
    from accelerate import init_empty_weights

    def build() -> Any:
        with init_empty_weights(include_buffers=include_buffers):
            return from_config(kind.auto_class, copy.deepcopy(config), **options)

    try:
        model = build() if include_buffers else with_values_of_tables(build)
    except Exception as error:  # a config can name an activation, a rope type or a size that does not exist
        if "Unrecognized configuration class" not in str(error):
            raise CaptureError(
                f"{type(config).__name__}: transformers cannot build the model: {type(error).__name__}: {error}",
                "Check the values in config.json.",
            ) from error
        raise UnknownArchitectureError(
            f"transformers has no {kind.description} for {type(config).__name__} ({config.model_type!r}).",
            f"{kind.advice}, or install a transformers release that supports it.",
        ) from error
    model.tie_weights()
    return model


def _silence(model: nn.Module) -> None:
    """Leave out a warning of transformers' that looks at the tokens, which a capture has no values of."""
    for module in model.modules():
        if hasattr(module, _LOOKS_AT_TOKENS):
            setattr(module, _LOOKS_AT_TOKENS, lambda *_: None)


def widen(model: nn.Module, pattern: str, dtype: torch.dtype) -> None:
    """Keep the matching parameters, and the computation of the layers that own them, in f32."""
    found = False
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if not any(fnmatchcase(f"{path}.{name}" if path else name, pattern) for name in names):
            continue
        found = True
        module.float()
        module.register_forward_pre_hook(_cast_floats(torch.float32), with_kwargs=True)
        module.register_forward_hook(lambda _module, _args, result: _cast(result, dtype))
    if not found:
        raise OptionError(
            f"--keep-f32 {pattern!r} matches no parameter of the model.",
            "Patterns are shell patterns on full names, such as 'model.layers.0.mlp.*'.",
        )


def _cast_floats(dtype: torch.dtype) -> Callable:
    def hook(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return tuple(_cast(arg, dtype) for arg in args), {name: _cast(arg, dtype) for name, arg in kwargs.items()}

    return hook


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return value.to(dtype) if is_float else value


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return, for each parameter that is another one's alias, the name of that other one."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied


def names_shared(tied: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return, for each name of a tied parameter, all its names, the owner's first; `tied` is as of `tied_names`."""
    groups: dict[str, list[str]] = {}
    for name, owner in tied.items():
        groups.setdefault(owner, [owner]).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


def computed_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of parameters that a checkpoint may lack and that the model computes itself (sinusoidal positions)."""
    patterns = dispensable_names(model)
    tied = tied_names(model)
    found: dict[str, torch.Tensor] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name in tied or not any(re.search(pattern, name) for pattern in patterns):
            continue
        path, _, attribute = name.rpartition(".")
        first, second = (_initial(model, model.get_submodule(path), attribute) for _ in range(2))
        if torch.equal(first, second):  # not drawn at random
            found[name] = first
    return found


def _initial(model: nn.Module, module: nn.Module, attribute: str) -> torch.Tensor:
    own = copy.deepcopy(module).to_empty(device="cpu")
    torch.nn.init.normal_(own.get_parameter(attribute))  # what it leaves alone is not computed
    with torch.no_grad():
        initialise(model, own)
    return own.get_parameter(attribute).detach()


def take_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers' values and leave meta tensors in their place."""
    values: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                # tract has no bf16: the same values in f32, and what they meet has the graph's element type.
                value = buffer.float() if buffer.dtype == torch.bfloat16 else buffer
                values[f"{path}.{name}" if path else name] = value
                buffers_of(module)[name] = value.to("meta")
    return values


# --- tables that models compute ----------------------------------------------------------------------


LARGE = 1 << 24
"""Elements from which a new tensor is a parameter: tables that models compute (masks, positions) are smaller."""

_CONSTRUCTORS = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})


class LargeTensorsOnMeta(TorchFunctionMode):
    """New tensors of `LARGE` elements and more are on the meta device, whatever device they are asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func in _CONSTRUCTORS and keywords.get("out") is None:
            shape = func(*args, **{**keywords, "device": "meta", "pin_memory": False})
            if shape.numel() >= LARGE:
                return shape
        return func(*args, **keywords)


def with_values_of_tables(build: Callable[[], Any]) -> Any:
    """Build a model without memory for large tensors, unless one of them turns out to be a table that the model computes.

    Args:
        build: gives the `nn.Module`, its parameters on the meta device.
    """
    try:
        with LargeTensorsOnMeta():
            model = build()
        if not any(buffer.is_meta for buffer in model.buffers()):
            return model
    except Exception:  # a table computed of others that have values; or a config that is at fault, which shows again
        pass
    return build()
