"""Calibration of experts whose weights are stacked in one tensor: each expert is judged by the tokens routed to it.

In: a resident layer that holds modules with parameters [E, N, K]. Out: statistics for each expert, and stacked blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quant.blocks import GROUP, Q4Blocks
from quant.imatrix import StatisticsAccumulator
from quant.protocol import InputStatistics, Quantizer
from t2n_llm.compat import experts_implementation

# E[x x^T] of all experts of a layer at once must fit beside the layer; beyond this they are weighed by E[x^2] alone.
_LARGEST_HESSIANS = 1 << 30


def expert_parameters(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the stacked weights [E, N, K] of a layer that its products read expert by expert, by name inside the layer.

    Those stored input-first ([E, K, N], as `is_transposed` of transformers' experts says) are left out: blocks want K last.
    """
    found = {}
    for name, module in layer.named_modules():
        if hasattr(module, "is_transposed") and not module.is_transposed:
            for parameter, values in module.named_parameters(recurse=False):
                if values.ndim == 3 and values.shape[-1] % GROUP == 0:
                    found[f"{name}.{parameter}" if name else parameter] = values
    return found


@contextmanager
def one_expert_at_a_time(config: Any) -> Iterator[None]:
    """Make transformers run experts in a plain loop, one product for each, for the length of a `with` block."""
    configs = {id(each): each for each in (config, config.get_text_config())}.values()
    with experts_implementation(tuple(configs), "eager"):
        yield


@dataclass
class ExpertWatch(TorchFunctionMode):
    """Sees what each expert's products read, inside a `with` block.

    Args:
        weights: stacked weights [E, N, K] by name.
        hessians: those whose E[x x^T] is wanted.
    """

    weights: Mapping[str, torch.Tensor]
    hessians: frozenset[str] = frozenset()
    seen: dict[str, list[StatisticsAccumulator]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        wide = sum(
            each.shape[0] * each.shape[-1] ** 2 * 4 for name, each in self.weights.items() if name in self.hessians
        )
        for name, each in self.weights.items():
            hessian = name in self.hessians and wide <= _LARGEST_HESSIANS
            self.seen[name] = [StatisticsAccumulator(each.shape[-1], hessian) for _ in range(each.shape[0])]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear and len(args) >= 2:
            self._look(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _look(self, inputs: torch.Tensor, weight: torch.Tensor) -> None:
        storage = weight.untyped_storage().data_ptr()
        for name, stacked in self.weights.items():
            if stacked.untyped_storage().data_ptr() == storage and weight.shape == stacked.shape[1:]:
                offset = weight.storage_offset() - stacked.storage_offset()
                self.seen[name][offset // stacked[0].numel()].add(inputs)

    def statistics(self) -> dict[str, list[InputStatistics]]:
        """Return what each expert read, by name."""
        return {name: [each.statistics() for each in experts] for name, experts in self.seen.items()}


@dataclass(frozen=True)
class QuantizedExperts:
    """Stacked blocks, and how they came about.

    Attributes:
        blocks: of [E, N, K].
        starved: experts that too few tokens were routed to, and for which nobody else's say anything: the search by magnitude.
        tokens: routed to all of them.
    """

    blocks: Q4Blocks
    starved: int
    tokens: int


def pooled(statistics: Sequence[InputStatistics]) -> InputStatistics:
    """Return what all experts of a layer read, as if one had; E[x x^T] where it is known of each that read something."""
    reached = [each for each in statistics if each.tokens]
    tokens = sum(each.tokens for each in reached)
    if not tokens:
        return statistics[0]
    mean_square = sum(each.mean_square * (each.tokens / tokens) for each in reached)
    hessians = [each.hessian * (each.tokens / tokens) for each in reached if each.hessian is not None]
    whole = torch.stack(hessians).sum(0) if len(hessians) == len(reached) else None
    return InputStatistics(torch.as_tensor(mean_square), tokens, whole)


def quantize_experts(
    stacked: torch.Tensor,
    statistics: Sequence[InputStatistics],
    quantizer: Quantizer,
    fewest: int,
    *,
    reads_states: bool = False,
) -> QuantizedExperts:
    """Quantise each expert with its own statistics.

    Args:
        stacked: float32 [E, N, K].
        statistics: of each expert.
        quantizer: chooses levels and scales.
        fewest: tokens below which an expert's statistics are not used.
        reads_states: all experts read the layer's hidden states, so that one that saw few tokens borrows what the others saw.
            The channels inside of an expert are its own.
    """
    shared = pooled(statistics) if reads_states else None
    lent = shared if shared is not None and shared.tokens >= fewest else None
    enough = [each.tokens >= fewest or lent is not None for each in statistics]
    made = [
        quantizer.quantize(weight, seen if seen.tokens >= fewest else lent)
        for weight, seen in zip(stacked, statistics, strict=True)
    ]
    blocks = Q4Blocks(torch.stack([each.q for each in made]), torch.stack([each.d for each in made]))
    return QuantizedExperts(blocks, enough.count(False), sum(each.tokens for each in statistics))
