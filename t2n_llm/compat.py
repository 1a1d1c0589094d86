"""Names of transformers and accelerate that no release promises, once each: what each is for, and the releases that have it.

All of them are in transformers 5.15 to 5.24 and in accelerate 1.1 to 1.15, where they were tried; where releases differ, the line
says so. Those that the cache, attention and experts need are in `kvcache.compat`, those of PyTorch in `generic_export.compat`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from quant.prequantized.gguf_merges import merges_of
from quant.prequantized.gguf_reader import LongArray, array_length

# --- transformers: special tokens in messages -----------------------------------------------------------


def marks_special_tokens(tokenizer: Any) -> bool:
    """Return whether a tokenizer can encode special tokens in messages as text (transformers 5.24, fast tokenizers)."""
    return bool(getattr(tokenizer, "is_fast", False)) and hasattr(tokenizer, "_mark_chat_inputs")


def mark_special_tokens(tokenizer: Any, template: str, messages: Sequence[Any]) -> list[Any]:
    """Return messages whose special tokens are marked, for `tokenizer(..., sanitize_control_tokens=True)`.

    `apply_chat_template(sanitize_control_tokens=True)` does both, and renders the template in this process.
    """
    marked, *_ = tokenizer._mark_chat_inputs(template, [list(messages)], None, None, {}, True, False)
    return list(marked[0])


# --- transformers: VITS ---------------------------------------------------------------------------------


def vits_spline(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the spline of values that are all inside of its interval, and log determinants."""
    from transformers.models.vits.modeling_vits import _rational_quadratic_spline

    made: tuple[torch.Tensor, torch.Tensor] = _rational_quadratic_spline(*inputs)
    return made


@contextmanager
def vits_replaced(
    spline: Callable[..., Any], gated: Callable[..., Any], positions: Callable[..., Any]
) -> Iterator[None]:
    """Replace what VITS decides by values, and by the length of a text, for the length of the block.

    Args:
        spline: of values inside and outside of its interval.
        gated: the activation of its convolutions.
        positions: relative embeddings for a length, a method of its attention.
    """
    from transformers.models.vits import modeling_vits

    with ExitStack() as stack:
        for owner, name, replacement in (
            (modeling_vits, "_unconstrained_rational_quadratic_spline", spline),
            (modeling_vits, "fused_add_tanh_sigmoid_multiply", gated),
            (modeling_vits, "torch_compilable_check", lambda *_, **__: None),
            (modeling_vits.VitsAttention, "_get_relative_embeddings", positions),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


# --- transformers: what a model's class says -------------------------------------------------------


def unsplit_classes(model: nn.Module) -> frozenset[str]:
    """Return the names of the classes of modules that must stay on one device."""
    return frozenset(getattr(model, "_no_split_modules", None) or ())


def superfluous_names(model: nn.Module) -> tuple[str, ...]:
    """Return the patterns of tensors that a checkpoint may have without need."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def dispensable_names(model: nn.Module) -> tuple[str, ...]:
    """Return the patterns of parameters that a checkpoint may lack."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def prepares_series(model: nn.Module) -> Callable[..., tuple[torch.Tensor, ...]] | None:
    """Return what makes a list of time series ready in TimesFM 1 and 2.5: (series, paddings, ...); None in other models."""
    return getattr(model, "_preprocess", None) if type(model).__name__.startswith("TimesFm") else None


def series_prepared_by(
    model: nn.Module, prepare: Callable[..., tuple[torch.Tensor, ...]]
) -> AbstractContextManager[Any]:
    """Let a TimesFM's series be made ready by another function, for the length of the block."""
    return mock.patch.object(model, "_preprocess", prepare)


def initialise(model: nn.Module, module: nn.Module) -> None:
    """Give a module of a model the values that it has before any training."""
    model._init_weights(module)  # type: ignore[operator]


def has_nowhere_to_count(error: Exception) -> bool:
    """Say whether a model failed since no layer of its cache counts positions: all of them are linear attention."""
    return isinstance(error, ValueError) and "can only be called on Attention layers" in str(error)


def from_config(class_name: str, config: Any, **options: Any) -> Any:
    """Return a model of a config: of an auto class, or of a class of its own."""
    import transformers

    model_class = getattr(transformers, class_name)
    if hasattr(model_class, "from_config"):
        return model_class.from_config(config, **options)
    return model_class._from_config(
        config, **{name: value for name, value in options.items() if name != "trust_remote_code"}
    )


# --- transformers: loading -------------------------------------------------------------------------


@contextmanager
def around_initialisers(around: Callable[[nn.Module, Callable[[], None]], None]) -> Iterator[None]:
    """Call `around(module, initialise)` in the place of each module's initialiser, for the length of the block."""
    from transformers import PreTrainedModel

    initialise = PreTrainedModel._initialize_weights

    def wrapped(self: Any, module: nn.Module, *options: Any, **named: Any) -> None:
        around(module, lambda: initialise(self, module, *options, **named))

    with mock.patch.object(PreTrainedModel, "_initialize_weights", wrapped):
        yield


def is_loaded(parameter: torch.Tensor) -> bool:
    """Say whether transformers has marked a parameter as the checkpoint's, which initialisers then leave alone."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


@contextmanager
def gguf_read_with(reader: type[Any]) -> Iterator[None]:
    """Let transformers read GGUF files with a reader of ours, arrays and strings whole, for the length of the block.

    It has no switch for any of these: it takes a string apart into numbers of bytes first, reads a file anew for each
    thing it wants to know, makes the table of tensor names anew for each module, halves tokens by four look-ups a time,
    and draws progress bars.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loader

    parse = loader._gguf_parse_value
    text = 8  # GGUFValueType.STRING

    def parsed(value: Any, types: Any) -> Any:
        if isinstance(value, LongArray):
            return value.values
        kinds = types if isinstance(types, list) else [types]
        return value.tobytes().decode() if kinds[-1] == text else parse(value, types)

    opened = cache(reader)

    def metadata_and_names(path: str, string_arrays: Container[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
        """As the function of that name says: strings of an array are counted unless they are asked for."""
        fields = opened(path).fields.values()
        counted = {each.name for each in fields if list(each.types) == [9, text] and each.name not in string_arrays}
        values = {each.name: array_length(each) if each.name in counted else each.contents() for each in fields}
        return values, tuple(str(tensor.name) for tensor in opened(path).tensors)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(loader, "tqdm", partial(loader.tqdm, disable=True)))
        patches.enter_context(mock.patch.object(loader, "_gguf_parse_value", parsed))
        patches.enter_context(mock.patch("gguf.GGUFReader", opened))
        patches.enter_context(mock.patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)))
        try:  # not in the oldest releases
            from transformers.integrations import gguf as parts
            from transformers.integrations.gguf import gguf_tokenizer_mapping
            from transformers.integrations.gguf import reader as header
        except ImportError:
            pass
        else:
            for module in (parts, header):
                patches.enter_context(mock.patch.object(module, "read_gguf_metadata", metadata_and_names))
            patches.enter_context(mock.patch.object(gguf_tokenizer_mapping, "generate_merges", merges_of))
        yield


# --- transformers: implementations by name ---------------------------------------------------------


def choose_implementations(config: Any, attention: str | None, experts: str | None) -> None:
    """Make models of a config run these implementations; None leaves the choice to transformers."""
    config._attn_implementation, config._experts_implementation = attention, experts


def keep_own_attention(network: Any) -> None:
    """Let parts of a model that compute their attention themselves have the masks that they expect (Gemma 4's audio encoder)."""
    from transformers import PreTrainedModel

    for module in network.modules():
        is_part = isinstance(module, PreTrainedModel) and module.config is not network.config
        if is_part and not (module._supports_sdpa or module._supports_attention_backend):
            module.config._attn_implementation = "eager"


@contextmanager
def experts_implementation(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Make models that were built with these configs run other experts for the length of the block."""
    before = [getattr(each, "_experts_implementation_internal", None) for each in configs]
    for each in configs:
        each._experts_implementation = name
    try:
        yield
    finally:
        for each, value in zip(configs, before, strict=True):
            each._experts_implementation_internal = value  # this one alone: the property sets those inside of it too


# --- accelerate ------------------------------------------------------------------------------------


def accelerate_hook(module: nn.Module) -> Any:
    """Return the hook that `dispatch_model` gave a module, or None."""
    return getattr(module, "_hf_hook", None)


__all__ = [
    "accelerate_hook",
    "around_initialisers",
    "choose_implementations",
    "experts_implementation",
    "gguf_read_with",
    "is_loaded",
    "keep_own_attention",
    "prepares_series",
    "series_prepared_by",
    "superfluous_names",
    "unsplit_classes",
]
