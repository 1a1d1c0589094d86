"""What some models ask of values, while there are only shapes: answered without them, where the answer does not depend on them.

In: a network, and what it is given. Out: further keywords for it, and a block in which its constants are values of the graph.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from t2n_llm.compat import prepares_series, series_prepared_by

_MASK, _LENGTHS = "attention_mask", "lengths"


@dataclass(frozen=True)
class _Lengths:
    """Stands for the lengths of texts in models that a mask tells them as well (XLM, FlauBERT): nothing but their bound is read."""

    mask: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.mask.device

    def size(self, axis: int) -> int:
        return int(self.mask.shape[axis]) if axis else self.mask.shape[0]

    def max(self) -> _Lengths:
        return self

    def item(self) -> int:
        return 0


def further_keywords(network: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords that keep a network from looking at values that its mask makes superfluous."""
    known = inspect.signature(network.forward).parameters
    return {_LENGTHS: _Lengths(given[_MASK])} if _LENGTHS in known and _MASK in given else {}


@contextmanager
def lengths_from_masks(network: nn.Module) -> Iterator[None]:
    """Let the model inside of a head have such lengths too, where the head leaves them out (multiple choice)."""
    inner = getattr(network, "base_model", network)
    if inner is network or _LENGTHS not in inspect.signature(inner.forward).parameters:
        yield
        return
    forward = inner.forward

    def informed(*args: Any, **keywords: Any) -> Any:
        if keywords.get(_LENGTHS) is None and keywords.get(_MASK) is not None:
            keywords[_LENGTHS] = _Lengths(keywords[_MASK])
        return forward(*args, **keywords)

    with mock.patch.object(inner, "forward", informed):
        yield


_CHECK = "torch_compilable_check"  # transformers' name for an assertion about values


@contextmanager
def sizes_stay_symbols(network: nn.Module) -> Iterator[None]:
    """Let the files of a network's code see the length of a tensor as a symbol, and assert nothing about values.

    Python's own `len` gives a number, which would freeze the batch (RT-DETR).
    """
    files = [sys.modules[name] for name in sorted({type(part).__module__ for part in network.modules()})]
    with ExitStack() as stack:
        for file in files:
            if file.__name__.partition(".")[0] == "torch":
                continue
            stack.enter_context(mock.patch.object(file, "len", _length, create=True))
            if hasattr(file, _CHECK):
                stack.enter_context(mock.patch.object(file, _CHECK, lambda *_, **__: None))
        yield


def _length(sized: Any) -> int:
    return sized.shape[0] if isinstance(sized, torch.Tensor) else len(sized)


class ConstantsInGraph(TorchFunctionMode):
    """Makes operators of numbers that a model writes as a tensor on the device of its inputs: as a constant without values they
    would be lost (TAPAS; Deformable DETR's list of the sizes of its maps). One that it writes on the CPU is given as a number,
    since shapes alone are on no device that a CPU's number may meet (SEW-D).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and _are_numbers(args[0]):
            device = torch.device(kwargs.get("device") or "cpu")
            if device.type == "meta":
                dtype = kwargs.get("dtype") or torch.tensor(args[0]).dtype
                return _written(args[0], dtype, device)
        if func is torch.Tensor.masked_fill and isinstance(args[2], torch.Tensor) and args[2].device != args[0].device:
            return args[0].masked_fill(args[1], args[2].item())
        return func(*args, **kwargs)


def _are_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_are_numbers, value))
    return type(value) in (bool, int, float)


def _written(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers, or rows of them, as an operator each."""
    if isinstance(value, (list, tuple)):
        return torch.stack([_written(each, dtype, device) for each in value])
    return torch.full((), value, dtype=dtype, device=device)


class LastMarked(TorchFunctionMode):
    """Picks the row of each text's last end token by its place, not the rows of all of them by value (BART's classifier).

    transformers takes `hidden_states[eos_mask, :]`, as many rows a text, and then the last of each text.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.unique_consecutive:  # how many end tokens the texts have: as many, or transformers refuses
            return args[0][:1]
        if func is torch.Tensor.__getitem__ and _picks_rows(*args):
            states, (marked, _) = args
            places = torch.arange(marked.shape[1], device=marked.device)
            last = torch.where(marked, places, 0).amax(dim=1)
            return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))[:, 0]
        return func(*args, **(kwargs or {}))


def _picks_rows(states: torch.Tensor, index: Any) -> bool:
    mask = index[0] if isinstance(index, tuple) and len(index) == 2 and index[1] == slice(None) else None
    return isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.ndim == 2 and states.ndim == 3


_SERIES = "past_values"


@contextmanager
def series_side_by_side(network: nn.Module, given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what a network is given, any number of series as one: TimesFM takes a list of them, each made ready by itself,
    and a list is as long as it was while the model was captured.
    """
    prepared = prepares_series(network)
    if prepared is None or _SERIES not in given:
        yield given
        return

    def preprocess(inputs: Sequence[torch.Tensor], *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        (steps,) = inputs  # [T, B], as a series is [T]
        first, *further = prepared(
            [steps[:, 0]], *arguments, **keywords
        )  # padding [1, T], in TimesFM 1 the frequency [1, 1]
        rows = steps.transpose(0, 1)[:, -first.shape[1] :]
        rows = nn.functional.pad(rows, (first.shape[1] - rows.shape[1], 0))
        return rows, *(each.expand(rows.shape[0], -1) for each in further)

    with series_prepared_by(network, preprocess):
        yield {**given, _SERIES: [given[_SERIES].transpose(0, 1)]}


class _Places(tuple[torch.Tensor, ...]):
    """Where a mask is set: an index for each of its axes. How many there are is known at run time only, so they are made when
    they are asked for; what PyTorch itself finds in here is the mask, which is as good an index.
    """

    def __new__(cls, mask: torch.Tensor) -> _Places:
        return super().__new__(cls, (mask,))

    @property
    def mask(self) -> torch.Tensor:
        return super().__getitem__(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.nonzero(self.mask, as_tuple=True))

    def __getitem__(self, place: Any) -> Any:
        return torch.nonzero(self.mask, as_tuple=True)[place]

    def __len__(self) -> int:
        return self.mask.ndim


class PlacesOfMasks(TorchFunctionMode):
    """Writes a number wherever a mask is set, not to the places that it is set at (OneFormer: `x[torch.where(mask)] = False`)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.where and len(args) == 1 and not kwargs and args[0].dtype is torch.bool:
            return _Places(args[0])
        if func is torch.Tensor.__setitem__ and isinstance(args[1], _Places) and type(args[2]) in (bool, int, float):
            written, places, number = args
            mask = places.mask
            written.masked_fill_(mask.reshape(*mask.shape, *(1,) * (written.ndim - mask.ndim)), number)
            return None
        return func(*(tuple(iter(arg)) if isinstance(arg, _Places) else arg for arg in args), **(kwargs or {}))


def marked_by_place(network: nn.Module) -> AbstractContextManager[Any]:
    """Return `LastMarked` for the classifiers that end tokens mark a row for, and a block that does nothing for others."""
    config = getattr(network, "config", None)
    classifies = type(network).__name__.endswith("ForSequenceClassification")
    return LastMarked() if classifies and getattr(config, "is_encoder_decoder", False) else nullcontext()


__all__ = [
    "ConstantsInGraph",
    "LastMarked",
    "PlacesOfMasks",
    "further_keywords",
    "lengths_from_masks",
    "marked_by_place",
    "series_side_by_side",
    "sizes_stay_symbols",
]
