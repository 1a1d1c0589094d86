"""The skeleton: a causal LM without weights, wrapped so that its cache is plain inputs and outputs.

In: a transformers config. Out: a `Skeleton` that `torch.export` can capture on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from generic_export.errors import CaptureError, OptionError, UnknownArchitectureError
from generic_export.torch_graph.tracer import DynamicAxes
from kvcache.cache import CacheTensor, cache_from_tensors, cache_tensors, tensors_from_cache

WRAPPER_ATTRIBUTE = "causal_lm"


class CausalLMWithCache(nn.Module):
    """Gives a transformers causal LM a flat signature: `(input_ids, *past) -> (logits, *present)`."""

    def __init__(self, causal_lm: nn.Module, num_logits_to_keep: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.num_logits_to_keep = num_logits_to_keep

    def forward(self, input_ids: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model.

        Args:
            input_ids: int64 [B, S].
            past: key and value of each layer, [B, Hkv, P, D].

        Returns:
            Logits [B, kept, vocab], then the grown caches [B, Hkv, P + S, D].
        """
        cache = cache_from_tensors(past)
        result = self.causal_lm(
            input_ids=input_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=self._positions_to_keep(input_ids),
        )
        return (result.logits, *tensors_from_cache(cache))

    def _positions_to_keep(self, input_ids: torch.Tensor) -> int | torch.Tensor:
        if self.num_logits_to_keep <= 1:
            return self.num_logits_to_keep
        steps = input_ids.shape[1]
        # min(): a call with fewer tokens than asked for, such as a decode step, keeps all of them.
        first = steps - torch.sym_min(steps, self.num_logits_to_keep)
        return torch.arange(first, steps, device=input_ids.device)


@dataclass(frozen=True)
class Skeleton:
    """A causal LM on the meta device, and what is needed to capture and feed it.

    Attributes:
        module: the wrapped model; its parameters have shapes and dtypes, no values.
        buffers: the values of buffers that the model computes itself (rotary frequencies), by qualified name.
        caches: its states, in the order of inputs and outputs.
        tied: for each parameter that is another one's alias, the name of that other one.
        config: the transformers config.
        dtype: element type of weights, activations and caches.
        batched: whether the batch is the symbol `B` instead of 1.
    """

    module: CausalLMWithCache
    buffers: Mapping[str, torch.Tensor]
    caches: tuple[CacheTensor, ...]
    tied: Mapping[str, str]
    config: Any
    dtype: torch.dtype
    batched: bool = False

    @property
    def input_names(self) -> tuple[str, ...]:
        """`input_ids`, then the caches."""
        return ("input_ids", *(cache.input_name for cache in self.caches))

    @property
    def output_names(self) -> tuple[str, ...]:
        """`outputs` (logits), then the caches."""
        return ("outputs", *(cache.output_name for cache in self.caches))

    @property
    def dynamic_axes(self) -> DynamicAxes:
        """`S` new tokens, `P` past tokens, and `B` sequences when batched."""
        batch = {0: "B"} if self.batched else {}
        return {"input_ids": batch | {1: "S"}} | {cache.input_name: batch | {cache.axis: "P"} for cache in self.caches}

    def example_inputs(self, steps: int = 5, past: int = 7) -> tuple[torch.Tensor, ...]:
        """Return meta tensors of the right shapes; the sizes are only hints and never reach the graph."""
        batch = 3 if self.batched else 1
        ids = torch.zeros((batch, steps), dtype=torch.int64, device="meta")
        caches = (torch.zeros(cache.shape(batch, past), dtype=self.dtype, device="meta") for cache in self.caches)
        return (ids, *caches)


def build_skeleton(
    config: Any,
    dtype: torch.dtype,
    *,
    attention: str,
    num_logits_to_keep: int = 1,
    batched: bool = False,
    keep_f32: tuple[str, ...] = (),
    trust_remote_code: bool = False,
) -> Skeleton:
    """Instantiate the model class of a config without allocating a weight.

    Args:
        config: a transformers config; it is not modified.
        dtype: element type of the weights in the graph.
        attention: name of the attention implementation (see `kvcache.explicit_attention`).
        num_logits_to_keep: positions whose logits are computed, from the end; 0 for all.
        batched: make the batch a symbol.
        keep_f32: shell patterns of parameter names that stay in f32, with the layer that uses them.
        trust_remote_code: allow code that comes with the checkpoint.

    Raises:
        UnknownArchitectureError: transformers has no causal LM class for the config.
        CaptureError: the model keeps its state in a form that has no translation.
    """
    causal_lm = _instantiate(config, dtype, attention, trust_remote_code)
    for pattern in keep_f32:
        _widen(causal_lm, pattern, dtype)
    tied = _tied_names(causal_lm)
    buffers = _take_buffers(causal_lm)
    module = CausalLMWithCache(causal_lm, num_logits_to_keep).eval()
    caches = _probe_caches(causal_lm)
    return Skeleton(module, buffers, caches, tied, causal_lm.config, dtype, batched)


def _instantiate(config: Any, dtype: torch.dtype, attention: str, trust_remote_code: bool) -> nn.Module:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        # Parameters on meta, buffers with their values: only the model itself knows how to compute those.
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a config can name an activation, a rope type or a size that does not exist
        if "Unrecognized configuration class" not in str(error):
            raise CaptureError(
                f"{type(config).__name__}: transformers cannot build the model: {type(error).__name__}: {error}",
                "Check the values in config.json.",
            ) from error
        raise UnknownArchitectureError(
            f"transformers has no causal language model for {type(config).__name__} ({config.model_type!r}).",
            "Give a text generation model, or install a transformers release that knows it.",
        ) from error
    model.tie_weights()
    return model.eval()


def _widen(model: nn.Module, pattern: str, dtype: torch.dtype) -> None:
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


def _tied_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied


def _take_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers' values and leave meta tensors in their place."""
    values: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                values[f"{path}.{name}" if path else name] = buffer
                module._buffers[name] = buffer.to("meta")
    return values


def _probe_caches(model: nn.Module) -> tuple[CacheTensor, ...]:
    """Learn the states of a model by running it once on meta tensors."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except Exception as error:  # whatever the model's own code raises
        reason = str(error).strip().splitlines()
        raise CaptureError(
            f"{type(model).__name__} cannot run as a cached decoder on shapes alone: "
            f"{type(error).__name__}: {reason[0] if reason else ''}",
            "Models of this family have no translation yet; run with --debug to see where it stops.",
        ) from error
    if not cache.layers:
        raise CaptureError(
            f"{type(model).__name__} leaves transformers' key/value cache empty.",
            "Models with recurrent states have no translation yet.",
        )
    return cache_tensors(cache)


__all__ = ["WRAPPER_ATTRIBUTE", "CausalLMWithCache", "Skeleton", "build_skeleton"]
