"""What an adapter does to each parameter of a model: merged in f32, block of rows by block of rows, while it streams.

In: the tensors of a LoRA (rsLoRA, DoRA) and the module they belong to. Out: an `Update` per parameter, which turns the
base tensor's source into the fine-tuned one's; the same for models in memory and for those that accelerate dispatched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from generic_export.errors import AdapterError
from generic_export.weights.source import CHUNK_BYTES, DerivedTensor, InMemoryTensor, RenamedTensor, TensorSource
from generic_export.weights.values import read_tensor, row_pieces
from t2n_llm.compat import accelerate_hook

MERGE_ELSEWHERE = "Merge it with peft (merge_and_unload), save the model, and export that."


@dataclass(frozen=True)
class LoraModule:
    """The tensors of one adapted module, where they lie.

    Attributes:
        path: module of the base model.
        a, b: [r, in] and [out, r]; of an embedding [r, tokens] and [width, r].
        embedding: the module is an embedding.
        scaling: factor of b @ a.
        magnitude: DoRA's [out] (of an embedding [width]), or None.
        bias: [out], times `scaling` added to the module's bias, or None.
        base: what replaces the module's weight before the update (PEFT saves adapted embeddings whole), or None.
    """

    path: str
    a: TensorSource
    b: TensorSource
    embedding: bool
    scaling: float
    magnitude: TensorSource | None = None
    bias: TensorSource | None = None
    base: TensorSource | None = None

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return self.a.shape[0]


class Update(Protocol):
    """What an adapter does to one parameter."""

    def apply(self, base: TensorSource) -> TensorSource:
        """Return the source of the fine-tuned tensor."""
        ...


@dataclass(frozen=True)
class Replacement:
    """The adapter holds the parameter whole."""

    source: TensorSource

    def apply(self, base: TensorSource) -> TensorSource:
        """Return the adapter's tensor under the base tensor's name."""
        return RenamedTensor(self.source, base.name)


@dataclass(frozen=True)
class BiasShift:
    """The adapter adds its own bias, times a factor."""

    source: TensorSource
    scaling: float

    def apply(self, base: TensorSource) -> TensorSource:
        """Return the sum, f32."""
        return InMemoryTensor(
            base.name, _values(base) + _values(self.source) * self.scaling
        )  # a bias is small enough to be held


@dataclass(frozen=True)
class LowRankUpdate:
    """The adapter adds a product of two small matrices, and for DoRA scales the result's rows.

    Attributes:
        lora: the tensors.
        transposed: the weight is [in, out], as in Conv1D and in embeddings.
    """

    lora: LoraModule
    transposed: bool

    def apply(self, base: TensorSource) -> TensorSource:
        """Return the merged tensor, f32."""
        return MergedTensor(RenamedTensor(self.lora.base, base.name) if self.lora.base is not None else base, self)


@dataclass(frozen=True)
class MergedTensor(DerivedTensor):
    """A weight with a low-rank update, merged block of rows by block of rows in f32 while it streams.

    LoRA (arXiv 2106.09685): W + s B A. DoRA (arXiv 2402.09353): m (W + s B A) / |W + s B A|, the norm of each output's
    weights; where outputs are columns, the base is streamed twice.
    """

    source: TensorSource
    update: LowRankUpdate

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def chunks(self) -> Iterator[memoryview]:
        """The merged values; raises whatever the base and the adapter raise."""
        lora = self.update.lora
        magnitude = _values(lora.magnitude).view(-1) if lora.magnitude is not None else None
        column_scale = None
        if magnitude is not None and self.update.transposed:
            squares = torch.zeros(self.shape[1], dtype=torch.float64)
            for _, rows in self._merged_rows():
                squares += rows.double().square_().sum(0)
            column_scale = magnitude / squares.sqrt().float()
        for start, rows in self._merged_rows():
            if column_scale is not None:
                rows *= column_scale
            elif magnitude is not None:
                rows *= (magnitude[start : start + len(rows)] / torch.linalg.norm(rows, dim=1)).unsqueeze(1)
            yield rows.view(-1).view(torch.uint8).numpy().data

    def _merged_rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield blocks of rows of the sum, f32 [n, columns], with the number of their first row."""
        lora = self.update.lora
        a, b = _values(lora.a), _values(lora.b)
        left, right = (a.T, b.T) if self.update.transposed else (b, a)
        start = 0
        for stored in row_pieces(self.source, self.shape[1], CHUNK_BYTES // 4):
            rows = torch.empty(stored.shape).copy_(
                stored
            )  # never the source's own memory, which is not to be written to
            rows.addmm_(left[start : start + len(rows)], right, alpha=lora.scaling)
            yield start, rows
            start += len(rows)


def _values(source: TensorSource) -> torch.Tensor:
    return read_tensor(source, torch.float32)


def lora_updates(lora: LoraModule, model: nn.Module, adapter: str) -> dict[str, Update]:
    """Return what one module's LoRA or DoRA does, by parameter of the model: its weight, and its bias if it has one.

    Args:
        lora: `a` [rank, inputs] and `b` [outputs, rank]; the other way round for embeddings.
        model: only its shapes matter.
        adapter: its name, for errors.

    Raises:
        AdapterError: the model has no such module, or one of other sizes.
    """
    module = _module(lora.path, model, adapter)
    weight = f"{lora.path}.weight"
    transposed = _outputs_are_columns(module, lora, adapter)
    rank = lora.rank
    a_shape, b_shape = tuple(lora.a.shape), tuple(lora.b.shape)
    given = (a_shape[1], b_shape[0]) if transposed else (b_shape[0], a_shape[1])
    expected = tuple(module.get_parameter("weight").shape)
    if given != expected:
        inner, outer = expected if transposed else expected[::-1]
        raise AdapterError(
            f"{adapter}: module {lora.path} has lora_A {list(a_shape)} and lora_B {list(b_shape)}; the model's weight "
            f"of {list(expected)} expects [{rank}, {inner}] and [{outer}, {rank}].",
            "The adapter was trained on another model: use its base model.",
        )
    outputs = expected[1] if transposed else expected[0]
    for what, source, size in (
        ("lora_magnitude_vector", lora.magnitude, outputs),
        ("lora_B bias", lora.bias, outputs),
        ("base weight", lora.base, math.prod(expected)),
    ):
        if source is not None and math.prod(source.shape) != size:
            raise AdapterError(
                f"{adapter}: module {lora.path} has {what} {list(source.shape)}, expected {size} values."
            )
    updates: dict[str, Update] = {weight: LowRankUpdate(lora, transposed)}
    if lora.bias is not None:
        if getattr(module, "bias", None) is None:
            raise AdapterError(f"{adapter}: module {lora.path} has a lora_B bias, but the model has no bias there.")
        updates[f"{lora.path}.bias"] = BiasShift(lora.bias, lora.scaling)
    return updates


def _module(path: str, model: nn.Module, adapter: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise AdapterError(
            f"{adapter}: it adapts module {path}, which {type(model).__name__} does not have.",
            "Use the model it was trained on; an adapter of single experts must be merged with peft first.",
        ) from None


def _outputs_are_columns(module: nn.Module, lora: LoraModule, adapter: str) -> bool:
    """Say how a module stores its weight; the class knows, `fan_in_fan_out` is only what the trainer was told."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Embedding) and lora.embedding:
        return True
    if isinstance(module, nn.Linear | Conv1D) and not lora.embedding:
        return isinstance(module, Conv1D)
    raise AdapterError(
        f"{adapter}: module {lora.path} is a {type(module).__name__}, which does not support this kind of LoRA.",
        MERGE_ELSEWHERE,
    )


def replacement(name: str, source: TensorSource, model: nn.Module, adapter: str) -> Replacement:
    """Return the replacement of a whole parameter (`modules_to_save`).

    Raises:
        AdapterError: the model has no such parameter, or one of another shape.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name not in parameters:
        raise AdapterError(
            f"{adapter}: it has the parameter {name}, which {type(model).__name__} does not have.",
            "Use the model it was trained on.",
        )
    expected = tuple(parameters[name].shape)
    if tuple(source.shape) != expected:
        raise AdapterError(
            f"{adapter}: parameter {name} has shape {list(source.shape)}, but the model's has {list(expected)}.",
            "The adapter was trained on another model, or with a larger vocabulary: use that base model.",
        )
    return Replacement(source)


def refuse_tied(updates: Mapping[str, Update], model: nn.Module, adapter: str) -> None:
    """Refuse to change one of two names of the same tensor: merged, the change would show under the other one too."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        changed = [name for name in shared if name in updates]
        if changed and len(shared) > 1:
            other = next(name for name in shared if name != changed[0])
            raise AdapterError(
                f"{adapter}: it changes {changed[0]}, which the model shares with {other}.",
                'Save the base model untied ("tie_word_embeddings": false, with both tensors) and export that.',
            )


def merge_in_place(parameter: torch.Tensor, name: str, update: Update) -> None:
    """Apply an update to a parameter in memory, of any shape and float dtype; it is computed in f32 and rounded once."""
    merged = read_tensor(update.apply(InMemoryTensor(name, parameter.detach())), torch.float32)
    with torch.no_grad():
        parameter.copy_(merged)


# --- models dispatched by accelerate ----------------------------------------------------------


class MergedWeights(Mapping[str, torch.Tensor]):
    """A hook's weights, one of which is merged when it is read."""

    def __init__(self, weights: Mapping[str, torch.Tensor], name: str, update: Update) -> None:
        self._weights = weights
        self._name = name
        self._update = update

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._weights[name]
        if name != self._name:
            return value
        return read_tensor(self._update.apply(InMemoryTensor(name, value)), torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def offloading_hooks(module: nn.Module) -> Sequence[Any]:
    """Return the hooks of accelerate that bring a module's weights."""
    hook = accelerate_hook(module)
    hooks = getattr(hook, "hooks", (hook,))
    return [each for each in hooks if getattr(each, "weights_map", None) is not None]
