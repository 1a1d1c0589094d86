"""Quantising a language model with what its layers really see, one decoder layer in memory at a time.

In: a model folder, token ids, and which algorithm each parameter gets. Out: Q4_0 files, the tensors that a scaling
changed, and the error of every tensor. Algorithms that compensate errors see what the quantised layers before give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.compat import parameters_of
from generic_export.errors import OptionError
from generic_export.interrupts import asking
from generic_export.weights.source import FileTensor
from quant.awq import scaled_statistics, search_factors
from quant.blocks import GROUP, Q4Blocks
from quant.gptq import output_power
from quant.imatrix import StatisticsAccumulator
from quant.packing import pack_q4_0
from quant.protocol import InputStatistics
from t2n_llm.compress.algorithms import CalibratedAlgorithm
from t2n_llm.compress.experts import ExpertWatch, expert_parameters, one_expert_at_a_time, quantize_experts
from t2n_llm.compress.folds import Fold, apply_fold, find_folds, producer_parameters
from t2n_llm.compress.journal import CalibrationJournal, CalibrationStage
from t2n_llm.compress.observe import Run, observe
from t2n_llm.compress.progress import LayerProgress
from t2n_llm.compress.reconstruct import Original, reconstruct, replace_weight, split
from t2n_llm.compress.result import CalibrationResult, TensorError, write_tensor
from t2n_llm.compress.walk import WalkableModel, first_inputs, head_inputs, layer_runs, open_walkable

logger = logging.getLogger(__name__)

# Fewer input rows than this say little about a channel: the search by magnitude is the better guess.
FEWEST_TOKENS = 32
_JUDGED_ROWS = 1024
_NOT_MULTIPLIED = "it is not used in a matmul outside the decoder layers"


# Parameter name -> its algorithm, or None when calibration has nothing to do with it.
Choice = Callable[[str], CalibratedAlgorithm | None]


def calibrate(
    model_source_folder: Path,
    recipe_choice: Choice,
    text_ids: torch.Tensor,
    *,
    work_dir: Path,
    journal: CalibrationJournal | None = None,
    progress: Callable[[LayerProgress], None] | None = None,
    trust_remote_code: bool = False,
) -> CalibrationResult:
    """Quantise the linears of a model, layer by layer, on the inputs that the quantised prefix gives them.

    Args:
        model_source_folder: config.json and safetensors.
        recipe_choice: which algorithm each parameter gets.
        text_ids: int64 [n, L], n sequences of one length.
        work_dir: where the packed tensors are written; it must exist, and outlive the result.
        journal: keeps in that folder what is done, and knows what an earlier run with the same arguments had done.
        progress: told after every layer.
        trust_remote_code: whether code beside the checkpoint may run.

    Raises:
        OptionError: there are no tokens.
        CaptureError: the model has no decoder layers to walk.
        WeightError: values or statistics are not finite.
    """
    if text_ids.ndim != 2 or not text_ids.numel():
        raise OptionError("the calibration text is empty.", "Use a text of a few thousand words.")
    model = open_walkable(model_source_folder, trust_remote_code=trust_remote_code)
    hidden, calls = first_inputs(model, text_ids)
    stage = journal.recalled() if journal is not None else None
    run = CalibrationRun(model.causal_lm, recipe_choice, work_dir, stage.made if stage else CalibrationResult())
    if stage is None:
        stage = CalibrationStage(0, run.made, hidden, list(hidden) if run.reconstructs else None)
    begun = stage.layers
    for index in asking(range(begun, len(calls))):
        with model.resident(index) as layer:
            runs = layer_runs(layer, stage.hidden, calls[index])
            originals = None if stage.original is None else layer_runs(layer, stage.original, calls[index])
            done = run.quantize_layer(layer, model.layer_name(index), runs, originals)
        stage = CalibrationStage(index + 1, run.made, done.outputs, done.original)
        if journal is not None:
            journal.keep(stage)
        if progress is not None:
            progress(LayerProgress(index + 1, len(calls), done.error, begun))
    run.quantize_head(model, text_ids, stage.hidden)
    return run.made


def collect_statistics(
    folder: Path, text_ids: torch.Tensor, *, trust_remote_code: bool = False
) -> dict[str, InputStatistics]:
    """Return the mean squares of what every linear of a model reads, by parameter name; nothing is quantised.

    Args:
        folder: config.json and safetensors.
        text_ids: int64 [n, L], n sequences of one length.
        trust_remote_code: whether code beside the checkpoint may run.

    Raises:
        CaptureError: the model has no decoder layers to walk.
    """
    model = open_walkable(folder, trust_remote_code=trust_remote_code)
    found: dict[str, InputStatistics] = {}
    hidden, calls = first_inputs(model, text_ids)
    for index, call in enumerate(asking(calls)):
        with model.resident(index) as layer:
            linears = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
            hidden, statistics = observe(layer, layer_runs(layer, hidden, call), dict.fromkeys(linears, False))
        found |= {f"{model.layer_name(index)}.{name}.weight": entry for name, entry in statistics.items()}
    return found | _head_statistics(model, text_ids, hidden)


def _head_statistics(
    model: WalkableModel, ids: torch.Tensor, hidden: Sequence[torch.Tensor]
) -> dict[str, InputStatistics]:
    """Return what the head reads, under each of the names of its weight."""
    head = model.head
    if head is None:
        return {}
    names = [name for name, each in model.causal_lm.named_parameters(remove_duplicate=False) if each is head.weight]
    seen = StatisticsAccumulator(head.weight.shape[-1])
    with model.outside_resident():
        for inputs in head_inputs(model, head, ids, hidden):
            seen.add(inputs)
    return dict.fromkeys(names, seen.statistics())


@dataclass(frozen=True)
class QuantizedLayer:
    """What became of a layer.

    Attributes:
        outputs: what the next one reads, for each run.
        original: what it reads in the original model, where somebody looks at that.
        error: squared change of the outputs by quantising the layer, over their square.
    """

    outputs: list[torch.Tensor]
    original: list[torch.Tensor] | None
    error: float


@dataclass
class CalibrationRun:
    """Quantises a model, layer by layer.

    Attributes:
        network: the model.
        choice: which algorithm each parameter gets.
        folder: where the packed tensors are written.
        made: filled on the way.
    """

    network: Any
    choice: Choice
    folder: Path
    made: CalibrationResult = field(default_factory=CalibrationResult)

    def quantize_layer(
        self, layer: nn.Module, prefix: str, runs: Sequence[Run], originals: Sequence[Run] | None = None
    ) -> QuantizedLayer:
        """Quantise a resident layer in place.

        Args:
            layer: with float32 values.
            prefix: its qualified name.
            runs: of it.
            originals: the same on what the original layers before give; an algorithm that reconstructs needs them.
        """
        experts = self._chosen_experts(layer, prefix)
        chosen = self._chosen_linears(layer, prefix, experts)
        if not chosen and not experts:
            plain = None if originals is None else [run() for run in originals]
            return QuantizedLayer([run() for run in runs], plain, 0.0)
        watch = ExpertWatch(
            {name: layer.get_parameter(name) for name in experts},
            frozenset(name for name, algorithm in experts.items() if algorithm.needs_hessian),
        )
        with one_expert_at_a_time(self.network.config) if experts else nullcontext(), watch:
            # What judges a second quantisation must not have been learned from by the first.
            learned = range(len(runs)) if originals is None else split(len(runs))[0]
            expected, statistics = observe(layer, runs, {n: a.needs_hessian for n, a in chosen.items()}, learned)
        chosen = self._reached(prefix, chosen, statistics)
        for name, seen in statistics.items():  # as they are before a scaling is folded in
            self.made.statistics[f"{prefix}.{name}.weight"] = InputStatistics(seen.mean_square, seen.tokens)
        if any(algorithm.folds for algorithm in chosen.values()):
            self._fold(layer, prefix, chosen, statistics, runs[0], expected[0])
        again = {name: algorithm.quantizer for name, algorithm in chosen.items() if algorithm.reconstructs}
        original = None if originals is None else Original.of(layer, originals, again)
        weights = {name: layer.get_parameter(f"{name}.weight").detach() for name in again}
        for name, algorithm in chosen.items():
            self._quantize(f"{prefix}.{name}.weight", layer.get_submodule(name), algorithm, statistics[name])
        routed = watch.statistics()
        for name, algorithm in experts.items():
            self._quantize_experts(f"{prefix}.{name}", layer, name, algorithm, routed[name])
        if not self.sequential:
            return QuantizedLayer(expected, None, _relative_error([runs[0]()], expected[:1]))
        if original is not None:
            for name, made in reconstruct(layer, weights, again, runs, original, FEWEST_TOKENS).items():
                self._store(f"{prefix}.{name}.weight", weights[name], chosen[name], made.blocks, made.statistics)
        actual = [run() for run in runs]
        return QuantizedLayer(actual, None if original is None else original.outputs, _relative_error(actual, expected))

    @cached_property
    def reconstructs(self) -> bool:
        """Whether an algorithm looks at what the original layers give."""
        names = (name for name, _ in self.network.named_parameters(remove_duplicate=False))
        return any(algorithm is not None and algorithm.reconstructs for algorithm in map(self.choice, names))

    @cached_property
    def sequential(self) -> bool:
        """Whether the layers after a quantised one see what it gives; they see the original if no algorithm minds."""
        names = (name for name, _ in self.network.named_parameters(remove_duplicate=False))
        return any(algorithm is not None and algorithm.sequential for algorithm in map(self.choice, names))

    def quantize_head(self, model: WalkableModel, ids: torch.Tensor, hidden: Sequence[torch.Tensor]) -> None:
        """Quantise what turns the last hidden states into logits, under each of its chosen names; report the rest."""
        head = model.head
        weight = getattr(head, "weight", None)
        outside = self._chosen_outside((model.layers_name,))
        of_head = self._names_of(weight, outside)
        self._leave(outside.keys() - of_head.keys(), _NOT_MULTIPLIED)
        if head is None or weight is None or not self._fits(weight, of_head):
            return
        seen = StatisticsAccumulator(weight.shape[-1], _any_hessian(of_head))
        with model.outside_resident():
            for inputs in head_inputs(model, head, ids, hidden):
                seen.add(inputs)
            self._pack_under(of_head, head.weight.detach(), seen.statistics())

    def quantize_outside(self, inside: Sequence[str], runs: Sequence[Run]) -> None:
        """Quantise the linears outside of some modules, all at once, under each of their chosen names; report the rest.

        Args:
            inside: names of the modules, which are left alone.
            runs: of the whole model, whose weights are in memory.
        """
        outside = self._chosen_outside(inside)
        linears: dict[str, dict[str, CalibratedAlgorithm]] = {}
        for path, module in self.network.named_modules():
            if isinstance(module, nn.Linear):
                names = self._names_of(module.weight, outside)
                if self._fits(module.weight, names):
                    linears[path] = names
        _, statistics = observe(self.network, runs, {path: _any_hessian(names) for path, names in linears.items()})
        for path, seen in statistics.items():
            self._pack_under(linears[path], self.network.get_submodule(path).weight.detach(), seen)
        self._leave(outside.keys() - self.made.packed.keys() - self.made.left.keys(), _NOT_MULTIPLIED)

    def _names_of(
        self, weight: torch.Tensor | None, names: Mapping[str, CalibratedAlgorithm]
    ) -> dict[str, CalibratedAlgorithm]:
        """Return those of the names that a weight has."""
        return {name: chosen for name, chosen in names.items() if self.network.get_parameter(name) is weight}

    def _fits(self, weight: torch.Tensor, names: Mapping[str, CalibratedAlgorithm]) -> bool:
        """Say whether there is something to quantise under these names; report a width that blocks do not have."""
        if names and weight.shape[-1] % GROUP:
            self._leave(names, _odd_width(weight.shape[-1]))
            return False
        return bool(names)

    def _leave(self, names: Iterable[str], reason: str) -> None:
        self.made.left.update(dict.fromkeys(names, reason))

    def _pack_under(
        self, names: Mapping[str, CalibratedAlgorithm], weight: torch.Tensor, statistics: InputStatistics
    ) -> None:
        """Quantise a weight under each of its names."""
        for name, algorithm in names.items():
            self.made.statistics[name] = InputStatistics(statistics.mean_square, statistics.tokens)
            self._pack(name, weight, algorithm, statistics)

    def _chosen_outside(self, inside: Sequence[str]) -> dict[str, CalibratedAlgorithm]:
        prefixes = tuple(f"{name}." for name in inside)
        names = [name for name, _ in self.network.named_parameters(remove_duplicate=False)]
        chosen = {name: self.choice(name) for name in names if not name.startswith(prefixes)}
        return {name: algorithm for name, algorithm in chosen.items() if algorithm is not None}

    def _reached(
        self, prefix: str, chosen: Mapping[str, CalibratedAlgorithm], seen: Collection[str]
    ) -> dict[str, CalibratedAlgorithm]:
        """Return the chosen linears that something was given to; report the others."""
        self._leave(
            (f"{prefix}.{name}.weight" for name in chosen if name not in seen), "no calibration token reached it"
        )
        return {name: algorithm for name, algorithm in chosen.items() if name in seen}

    def _chosen_experts(self, layer: nn.Module, prefix: str) -> dict[str, CalibratedAlgorithm]:
        chosen = {name: self.choice(f"{prefix}.{name}") for name in expert_parameters(layer)}
        return {name: algorithm for name, algorithm in chosen.items() if algorithm is not None}

    def _chosen_linears(
        self, layer: nn.Module, prefix: str, experts: Collection[str]
    ) -> dict[str, CalibratedAlgorithm]:
        chosen = {}
        for name, module in layer.named_modules():
            for parameter, values in module.named_parameters(recurse=False):
                algorithm = self.choice(f"{prefix}.{name}.{parameter}")
                if algorithm is None or values.ndim < 2 or f"{name}.{parameter}" in experts:
                    continue
                if not isinstance(module, nn.Linear):
                    self.made.left[f"{prefix}.{name}.{parameter}"] = f"{type(module).__name__} is not a linear layer"
                elif values.shape[-1] % GROUP:
                    self.made.left[f"{prefix}.{name}.{parameter}"] = _odd_width(values.shape[-1])
                else:
                    chosen[name] = algorithm
        return chosen

    def _fold(
        self,
        layer: nn.Module,
        prefix: str,
        chosen: Mapping[str, CalibratedAlgorithm],
        statistics: dict[str, InputStatistics],
        run: Run,
        expected: torch.Tensor,
    ) -> None:
        folds = find_folds(layer)
        reached = {name for fold in folds for name in fold.quantized}
        for name, algorithm in chosen.items():
            if algorithm.folds and name not in reached:
                self.made.unfolded.append(f"{prefix}.{name}: no operation before it can be scaled")
        for fold in folds:
            wanted = [name for name in fold.quantized if name in chosen and chosen[name].folds]
            if wanted:
                self._apply(layer, prefix, fold, wanted, statistics, run, expected)

    def _apply(
        self,
        layer: nn.Module,
        prefix: str,
        fold: Fold,
        wanted: Sequence[str],
        statistics: dict[str, InputStatistics],
        run: Run,
        expected: torch.Tensor,
    ) -> None:
        weights = [layer.get_parameter(f"{name}.weight") for name in wanted]
        found = search_factors(weights, statistics[wanted[0]], sources=fold.sources)
        if not found.helps:
            return
        if not apply_fold(layer, fold, found.factors, run, expected):
            self.made.unfolded.append(f"{prefix}.{fold.producer}: scaling its outputs would change the layer's")
            return
        wide = found.factors if fold.sources is None else found.factors[fold.sources]
        before = {name: statistics[name] for name in fold.quantized if name in statistics}
        shared = {id(seen): seen for seen in before.values()}
        scaled = {key: scaled_statistics(seen, wide) for key, seen in shared.items()}
        statistics.update({name: scaled[id(seen)] for name, seen in before.items()})
        for name in (*fold.readers, *producer_parameters(layer, fold)):
            values = layer.get_parameter(name).detach().to(torch.float32).contiguous()
            self.made.changed[f"{prefix}.{name}"] = self._write(f"{prefix}.{name}.f32", values)

    def _quantize(
        self, parameter: str, module: nn.Module, algorithm: CalibratedAlgorithm, statistics: InputStatistics
    ) -> None:
        values = self._pack(parameter, module.get_parameter("weight").detach(), algorithm, statistics)
        replace_weight(module, values)

    def _quantize_experts(
        self,
        parameter: str,
        layer: nn.Module,
        name: str,
        algorithm: CalibratedAlgorithm,
        statistics: Sequence[InputStatistics],
    ) -> None:
        """Quantise stacked experts in place and into the result."""
        stacked = layer.get_parameter(name).detach()
        states = stacked.shape[-1] == self.network.config.get_text_config().hidden_size
        made = quantize_experts(stacked, statistics, algorithm.quantizer, FEWEST_TOKENS, reads_states=states)
        values = made.blocks.dequantize()
        self._keep(parameter, made.blocks)
        relative = _output_error(zip(stacked, values, statistics, strict=True))
        self.made.errors[parameter] = TensorError(algorithm.name, relative, made.tokens, made.starved)
        owner, _, attribute = name.rpartition(".")
        parameters_of(layer.get_submodule(owner))[attribute] = nn.Parameter(values, requires_grad=False)

    def _pack(
        self, parameter: str, weight: torch.Tensor, algorithm: CalibratedAlgorithm, statistics: InputStatistics
    ) -> torch.Tensor:
        """Quantise one weight into the result; returns its new values."""
        enough = statistics.tokens >= FEWEST_TOKENS
        blocks = algorithm.quantizer.quantize(weight, statistics if enough else None)
        return self._store(parameter, weight, algorithm, blocks, statistics)

    def _store(
        self,
        parameter: str,
        weight: torch.Tensor,
        algorithm: CalibratedAlgorithm,
        blocks: Q4Blocks,
        statistics: InputStatistics,
    ) -> torch.Tensor:
        """Put the blocks of a weight into the result; returns its new values."""
        values = blocks.dequantize()
        self._keep(parameter, blocks)
        relative = _output_error([(weight, values, statistics)])
        self.made.errors[parameter] = TensorError(algorithm.name, relative, statistics.tokens)
        return values

    def _keep(self, parameter: str, blocks: Q4Blocks) -> None:
        self.made.changed.pop(parameter, None)
        self.made.packed[parameter] = self._write(f"{parameter}.q4_0", pack_q4_0(blocks))

    def _write(self, name: str, values: torch.Tensor) -> FileTensor:
        return write_tensor(self.folder / name, name.rpartition(".")[0], values)


def _output_error(weights: Iterable[tuple[torch.Tensor, torch.Tensor, InputStatistics]]) -> float:
    """Return the squared error of the outputs over their square.

    Only of rows spread over a weight: all of them would take half as long as a forward pass.

    Args:
        weights: of each what it was [N, K], what it is, and what it reads.
    """
    wrong = power = 0.0
    for weight, values, seen in weights:
        step = max(1, -(-len(weight) // _JUDGED_ROWS))
        rows = weight[::step]
        power += output_power(rows, seen) * seen.tokens
        wrong += output_power(rows - values[::step], seen) * seen.tokens
    return wrong / power if power else 0.0


def _any_hessian(names: Mapping[str, CalibratedAlgorithm]) -> bool:
    return any(algorithm.needs_hessian for algorithm in names.values())


def _odd_width(channels: int) -> str:
    return f"{channels} input channels are not a multiple of {GROUP}"


def _relative_error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    wrong = sum(float((a - e).square().sum()) for a, e in zip(actual, expected, strict=True))
    power = sum(float(e.square().sum()) for e in expected)
    return wrong / power if power else 0.0
