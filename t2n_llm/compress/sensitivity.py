"""What quantising each tensor alone costs a language model: the KL divergence of the next token, to second order.

In: a model folder, token ids, and how each parameter would be quantised. Out: nats by parameter name. No model is quantised for it:
with the error D of a tensor's weights and a token y drawn from the model's own prediction, the divergence is half the mean of
(d log p(y) / dW . D)^2, the Fisher information of the model along D. Tokens are drawn at all positions of a text at once: their
slopes are uncorrelated, so that one pass back serves all of them.

Two walks with one layer in memory: forth, for what enters each layer, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import cast

import torch
from torch import nn

from generic_export.compat import parameters_of
from generic_export.errors import CaptureError
from generic_export.interrupts import asking
from generic_export.weights.source import TensorSource
from quant.algorithms import BUILT_IN, DEFAULT_ALGORITHM
from quant.blocks import GROUP
from quant.budget import kind_factor, layer_count, rounded, weight_sensitivity
from quant.packing import check_quantizable
from quant.protocol import InputStatistics, Quantizer
from quant.recipe import TensorName
from quant.stream import row_length
from t2n_llm.compress.observe import observe
from t2n_llm.compress.progress import SensitivityProgress
from t2n_llm.compress.walk import (
    LayerCall,
    WalkableModel,
    first_inputs,
    inputs_of_layers,
    layer_runs,
    logits_behind,
    open_walkable,
)

TEXTS, LENGTH = 32, 128
"""How much text is read: many short ones, since each gives one sample."""


class Inputs(Enum):
    """What a quantizer looks at of what a weight is multiplied with."""

    NONE = "none"
    SQUARES = "mean squares"
    HESSIAN = "mean products"


@dataclass(frozen=True)
class Quantization:
    """How a parameter would be stored.

    Attributes:
        block_format: one of `quant.recipe.QUANTIZED_SCHEMES`.
        quantizer: chooses the values of `q4_0`.
        inputs: what it looks at besides the weight.
        axes: the order of axes that puts the summed one last; None where it is last.
    """

    block_format: str
    quantizer: Quantizer
    inputs: Inputs = Inputs.NONE
    axes: tuple[int, ...] | None = None

    def error(self, weight: torch.Tensor, statistics: InputStatistics | None) -> torch.Tensor:
        """Return what quantising adds to a float32 weight."""
        turned = weight if self.axes is None else weight.permute(self.axes).contiguous()
        rows = turned.reshape(-1, row_length(tuple(turned.shape)))
        fits = statistics is not None and statistics.mean_square.shape == (rows.shape[-1],)
        known = statistics if fits and self.inputs is not Inputs.NONE else None
        made = (rounded(rows, self.quantizer, self.block_format, "weight", known) - rows).reshape(turned.shape)
        if self.axes is None:
            return made
        back = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return made.permute(back).contiguous()


@dataclass(frozen=True)
class Quantizable:
    """A stored tensor that would be quantised.

    Attributes:
        names: of the parameters that it stands for, with their roles; a tied table has two.
        source: its values, rows as blocks want them.
        block_format: one of `quant.recipe.QUANTIZED_SCHEMES`.
    """

    names: tuple[TensorName, ...]
    source: TensorSource
    block_format: str


@dataclass(frozen=True)
class Sensitivities:
    """What is known of how tensors can be quantised, and of what that costs: measured, else guessed from the weights.

    Attributes:
        quantizers: by parameter name; None where it looks at the whole model.
        statistics: of what a tensor is multiplied with, by parameter name.
        divergences: KL that quantising a parameter alone brings about, where it was measured.
    """

    quantizers: Mapping[str, Quantizer | None]
    statistics: Mapping[str, InputStatistics]
    divergences: Mapping[str, float]

    def of(self, tensors: Mapping[str, Quantizable]) -> dict[str, float]:
        """Return what quantising each tensor costs, by label, in one unit for `quant.budget.kept_plain` to choose by."""
        measured = {
            label: sum(self.divergences[each.name] for each in tensor.names)
            for label, tensor in tensors.items()
            if all(each.name in self.divergences for each in tensor.names)
        }
        if len(measured) == len(tensors):
            return measured
        layers = layer_count(each.name for tensor in tensors.values() for each in tensor.names)
        guessed = {label: self._guessed(tensor, layers) for label, tensor in tensors.items()}
        known = sum(guessed[label] for label in measured)
        unit = sum(measured.values()) / known if known else 1.0
        return {label: measured.get(label, unit * guess) for label, guess in guessed.items()}

    def _guessed(self, tensor: Quantizable, layers: int) -> float:
        quantizer = self.quantizers.get(tensor.names[0].name) or BUILT_IN[DEFAULT_ALGORITHM]
        known = next((self.statistics[each.name] for each in tensor.names if each.name in self.statistics), None)
        weights = weight_sensitivity(tensor.source, quantizer, tensor.block_format, known)
        return weights * sum(kind_factor(each.name, each.role, layers) for each in tensor.names)


def divergences(
    folder: Path,
    wanted: Mapping[str, Quantization],
    text_ids: torch.Tensor,
    *,
    progress: Callable[[SensitivityProgress], None] | None = None,
    trust_remote_code: bool = False,
) -> dict[str, float]:
    """Return the mean KL, in nats, that quantising each parameter alone brings about.

    Args:
        folder: config.json and safetensors.
        wanted: by parameter name. Those that are in no layer, nor the embeddings or the head, are left out of the answer.
        text_ids: int64 [n, L].
        progress: told after every layer of the way back.
        trust_remote_code: whether code beside the checkpoint may run.

    Raises:
        CaptureError: the model has no decoder layers to walk, or PyTorch cannot differentiate one.
        NotEnoughMemoryError: the whole model must be loaded, and does not fit.
        WeightError: a tensor of a layer holds inf or nan; the message has its name.
    """
    model = open_walkable(folder, trust_remote_code=trust_remote_code)
    return _Walk(model, wanted, text_ids, torch.Generator().manual_seed(0)).back(progress)


@dataclass(frozen=True)
class _Entered:
    """What the walk forth leaves.

    Attributes:
        hidden: [1, L, H] of each text, for each layer, and for what follows the last one.
        calls: of each layer.
        statistics: of what each linear inside of a layer reads, by parameter name.
    """

    hidden: Sequence[Sequence[torch.Tensor]]
    calls: Sequence[LayerCall]
    statistics: Mapping[str, InputStatistics]


@dataclass(frozen=True)
class _Walk:
    model: WalkableModel
    wanted: Mapping[str, Quantization]
    ids: torch.Tensor
    generator: torch.Generator

    def back(self, progress: Callable[[SensitivityProgress], None] | None) -> dict[str, float]:
        """Return the divergences, from the head to the embeddings."""
        entered = self._forth()
        found, slopes = self._of_head(entered.hidden[-1])
        count = len(entered.calls)
        for done, index in enumerate(asking(range(count - 1, -1, -1)), start=1):
            with self.model.resident(index) as layer:
                of_layer, slopes = self._of_layer(layer, index, entered, slopes)
            found |= of_layer
            if progress is not None:
                progress(SensitivityProgress(done, count))
        return found | self._of_embeddings(entered.hidden[0], slopes)

    def _forth(self) -> _Entered:
        states, calls = first_inputs(self.model, self.ids)
        hidden = [states]
        statistics: dict[str, InputStatistics] = {}
        for index, call in enumerate(asking(calls)):
            prefix = self.model.layer_name(index)
            with self.model.resident(index) as layer, torch.no_grad():
                self._refuse_nonfinite(layer, prefix)
                linears = {
                    name: self.wanted[f"{prefix}.{name}.weight"].inputs is Inputs.HESSIAN
                    for name, module in layer.named_modules()
                    if isinstance(module, nn.Linear) and f"{prefix}.{name}.weight" in self.wanted
                }
                outputs, seen = observe(layer, layer_runs(layer, hidden[-1], call), linears)
            hidden.append(outputs)
            statistics |= {f"{prefix}.{name}.weight": entry for name, entry in seen.items()}
        return _Entered(hidden, calls, statistics)

    def _refuse_nonfinite(self, layer: nn.Module, prefix: str) -> None:
        """Raises: WeightError: what is to be quantised holds inf or nan; afterwards nobody could tell where that came from."""
        for name, values in layer.named_parameters():
            if f"{prefix}.{name}" in self.wanted:
                check_quantizable(values.detach().reshape(-1, GROUP), f"{prefix}.{name}")

    def _of_head(self, hidden: Sequence[torch.Tensor]) -> tuple[dict[str, float], list[torch.Tensor]]:
        """Return what quantising the head costs, and d log p(y) / d hidden states that leave the last layer, by text."""
        head, total, slopes = self.model.head, 0.0, []
        with self.model.outside_resident():
            name, changed = self._changed(head)
            for row, states in zip(self.ids, hidden, strict=True):
                leaf = states.detach().requires_grad_()
                with torch.enable_grad():
                    likely = logits_behind(self.model, row, leaf).float().log_softmax(-1)
                drawn = torch.multinomial(likely.detach().exp(), 1, generator=self.generator)
                chosen = torch.zeros_like(likely).scatter_(-1, drawn, 1.0)
                slopes += _slopes(likely, [leaf], chosen, "the code after the last layer")
                if changed is not None:
                    with _given(head, changed), torch.no_grad():
                        total += _divergence(likely, logits_behind(self.model, row, states).float().log_softmax(-1))
        return {name: total / self.ids.numel()} if changed is not None else {}, slopes

    def _of_layer(
        self, layer: nn.Module, index: int, entered: _Entered, slopes: Sequence[torch.Tensor]
    ) -> tuple[dict[str, float], list[torch.Tensor]]:
        """Return what quantising each parameter of a layer costs, and the slopes of what enters it, by text."""
        prefix, call = self.model.layer_name(index), entered.calls[index]
        weights = {
            name: values.detach() for name, values in layer.named_parameters() if f"{prefix}.{name}" in self.wanted
        }
        errors = {
            name: self.wanted[f"{prefix}.{name}"].error(values, entered.statistics.get(f"{prefix}.{name}"))
            for name, values in weights.items()
        }
        totals, before = dict.fromkeys(weights, 0.0), []
        for states, slope in zip(entered.hidden[index], slopes, strict=True):
            leaf = states.detach().requires_grad_()
            shares = {name: torch.zeros((), requires_grad=True) for name in weights}
            with torch.enable_grad():
                values = {name: weight + shares[name] * errors[name] for name, weight in weights.items()}
                result = torch.func.functional_call(layer, values, (leaf, *call.args), dict(call.kwargs))
                outputs = result[0] if isinstance(result, tuple) else result
            entering, *along = _slopes(outputs, [leaf, *shares.values()], slope, f"layer {index}")
            before.append(entering)
            for name, found in zip(weights, along, strict=True):
                totals[name] += float(found) ** 2
        return {f"{prefix}.{name}": total / 2 / self.ids.numel() for name, total in totals.items()}, before

    def _of_embeddings(self, hidden: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor]) -> dict[str, float]:
        """Return what quantising the table of embeddings costs, by how it changes what enters the first layer."""
        table = self.model.causal_lm.get_input_embeddings()
        with self.model.outside_resident():
            name, changed = self._changed(table)
            if changed is None:
                return {}
            with _given(table, changed):
                moved, _ = inputs_of_layers(self.model, self.ids)
        triples = zip(slopes, moved, hidden, strict=True)
        total = sum(float((slope * (new - states)).sum()) ** 2 for slope, new, states in triples)
        return {name: total / 2 / self.ids.numel()}

    def _changed(self, module: nn.Module | None) -> tuple[str, torch.Tensor | None]:
        """Return the name of a module's weight, and its quantised values; None where it is not to be quantised."""
        path = next((path for path, each in self.model.causal_lm.named_modules() if each is module), "")
        name = f"{path}.weight"
        if module is None or name not in self.wanted:
            return name, None
        weight = module.get_parameter("weight").detach()
        return name, weight + self.wanted[name].error(weight, None)


def _slopes(outputs: torch.Tensor, of: Sequence[torch.Tensor], upstream: torch.Tensor, what: str) -> list[torch.Tensor]:
    """Return the gradients of outputs.

    Raises:
        CaptureError: PyTorch has none.
    """
    try:
        found = torch.autograd.grad(outputs, of, upstream, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:  # something is written in place, or has no derivative
        raise CaptureError(
            f"{what} cannot be differentiated: {str(error).splitlines()[0]}",
            "Name the tensors to leave unquantized in a --recipe.",
        ) from error
    return [torch.zeros_like(leaf) if slope is None else slope.detach() for leaf, slope in zip(of, found, strict=True)]


def _divergence(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the KL divergence of log-probabilities [L, vocab], summed over positions."""
    return float((expected.detach().exp() * (expected.detach() - actual)).sum(dtype=torch.float64))


@contextmanager
def _given(module: nn.Module | None, weight: torch.Tensor) -> Iterator[None]:
    """Give a module another weight for a `with` block."""
    parameters = parameters_of(cast(nn.Module, module))
    own = parameters["weight"]
    parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    try:
        yield
    finally:
        parameters["weight"] = own


__all__ = ["LENGTH", "TEXTS", "Inputs", "Quantizable", "Quantization", "Sensitivities", "divergences"]
