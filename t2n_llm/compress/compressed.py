"""What an export does about a compression that was asked for.

In: `CompressionOptions` and the graphs of a model. Out: a `StoredGraph` for each, whose sources live as long as a `with` block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from generic_export.errors import CaptureError, MissingTokenizerError, NotEnoughMemoryError
from generic_export.weights.source import TensorSource
from quant.protocol import InputStatistics
from quant.stream import PackedBlocks
from quant.weighted_search import prepare_search
from t2n_llm.compress.algorithms import CALIBRATED, IMATRIX, CalibratedAlgorithm
from t2n_llm.compress.apply import compress
from t2n_llm.compress.calibration import Calibration
from t2n_llm.compress.plan import CompressionPlan, plan_compression, product_shapes, quantizations
from t2n_llm.compress.progress import Progress, SensitivityProgress
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.compress.sensitivity import Quantization
from t2n_llm.compress.statistics import read_statistics, write_statistics
from t2n_llm.compress.stored_graph import StoredGraph
from t2n_llm.model_graph import ModelGraph
from t2n_llm.reporter import Reporter
from t2n_llm.source.hub import ModelSource

if TYPE_CHECKING:
    from quant.recipe import Recipe
    from t2n_llm.compress.result import CalibrationResult

Workspace: TypeAlias = Callable[[], AbstractContextManager[Path]]
"""Gives the folder in which a calibration works, for as long as what it made is read."""

_WORTH_TELLING = 60.0  # seconds that a calibration goes on


def prepare(options: CompressionOptions, reporter: Reporter) -> None:
    """Compile what quantising will need, before the graph is captured: meanwhile torch has `max` and `min` replaced."""
    if options.algorithm_names() - {"min_max"}:
        reporter.stage("Preparing quantization")
        prepare_search()


@contextmanager
def compressed(
    options: CompressionOptions,
    source: ModelSource,
    calibration: Calibration,
    parts: Sequence[ModelGraph],
    reporter: Reporter,
    *,
    workspace: Workspace,
    dry: bool = False,
) -> Iterator[tuple[StoredGraph, ...]]:
    """Yield each archive of a model as a recipe stores it; plain without a recipe.

    Args:
        options: what was asked for.
        source: the model.
        calibration: runs it, once for all archives.
        parts: the archives.
        reporter: told the stages and what a user should know.
        workspace: used if something is calibrated.
        dry: nothing will be streamed, so that nothing is calibrated; the sizes are the same.

    Raises:
        OptionError: the recipe does not fit the model.
        WeightError: a tensor cannot be quantised.
    """
    recipe = options.recipe()
    if recipe is None or not recipe.rules:
        yield tuple(StoredGraph(part) for part in parts)
        return
    algorithms = options.algorithms()
    read = [_read_statistics(options, source, part, reporter) for part in parts]
    known = {name: entry for statistics in read for name, entry in statistics.items()}
    costs: Mapping[str, float] = {}
    if recipe.target_size is not None:
        reporter.stage("Measuring the sensitivity of each tensor")
        if options.imatrix is None and not dry:
            costs = _divergences(options, recipe, calibration, parts, reporter)
            if not costs and options.calibrates():
                known |= calibration.statistics()
    plans = [plan_compression(recipe, part, algorithms, known, costs) for part in parts]
    given = [_given(options, plan, statistics, reporter) for plan, statistics in zip(plans, read, strict=True)]
    chosen = {} if dry else _chosen(options, plans)
    with workspace() if chosen else nullcontext() as work:
        result = _calibrated(options, source, calibration, chosen, work, reporter) if work is not None else None
        compressions = []
        for part, plan, statistics in zip(parts, plans, given, strict=True):
            made = Calibrated.of(result, plan)
            compressions.append(
                compress(
                    plan,
                    part,
                    algorithms=algorithms,
                    overrides=made.sources,
                    output_errors=made.output_errors,
                    statistics=statistics,
                )
            )
        for warning in dict.fromkeys(warning for each in compressions for warning in each.warnings):
            reporter.warn(warning)
        yield tuple(compressions)


def _divergences(
    options: CompressionOptions,
    recipe: Recipe,
    calibration: Calibration,
    parts: Sequence[ModelGraph],
    reporter: Reporter,
) -> dict[str, float]:
    """Return what quantising each parameter alone costs, by name; nothing, and a warning, where it cannot be measured."""
    wanted: dict[str, Quantization] = {}
    for part in parts:
        wanted |= quantizations(recipe, part, options.algorithms())
    started = time.monotonic()
    try:
        return calibration.divergences(wanted, lambda done: reporter.stage(_told(done, time.monotonic() - started)))
    except (CaptureError, MissingTokenizerError, NotEnoughMemoryError) as error:
        reporter.warn(f"sensitivities were estimated from the weights: {error.message}")
        return {}


def _read_statistics(
    options: CompressionOptions, source: ModelSource, part: ModelGraph, reporter: Reporter
) -> Mapping[str, InputStatistics]:
    """Return what an imatrix file says, by parameter name; nothing without one."""
    if options.imatrix is None:
        return {}
    found = read_statistics(options.imatrix, source, product_shapes(part))
    for warning in found.warnings:
        reporter.warn(warning)
    return found.statistics


def _given(
    options: CompressionOptions,
    plan: CompressionPlan,
    statistics: Mapping[str, InputStatistics],
    reporter: Reporter,
) -> dict[str, InputStatistics]:
    """Return, by label, the statistics for the tensors that want them from a file; tell which get none."""
    if options.imatrix is None:
        return {}
    wanted = [label for label, algorithm in plan.calibrated().items() if algorithm == IMATRIX]
    found = {label: statistics[name] for label in wanted for name in plan.parameters[label] if name in statistics}
    missing = [label for label in wanted if label not in found]
    if missing:
        reporter.warn(
            f"imatrix {options.imatrix.name} has no entry for {len(missing)} tensors ({missing[0]}, ...); they "
            "use the data-free search."
        )
    return found


@dataclass(frozen=True)
class Calibrated:
    """What calibration made, by label in the archive.

    Attributes:
        sources: blocks, and plain tensors that a scaling was folded into.
        output_errors: squared error of a layer's outputs over their square, on the calibration text.
    """

    sources: Mapping[str, TensorSource]
    output_errors: Mapping[str, float]

    @staticmethod
    def of(result: CalibrationResult | None, plan: CompressionPlan) -> Calibrated:
        """Return what of a result an archive holds: blocks where it stores blocks, else what a scaling changed."""
        if result is None:
            return Calibrated({}, {})
        label_of = _labels(plan)
        packed = {
            label_of[name]: PackedBlocks(blocks)
            for name, blocks in result.packed.items()
            if plan.formats.get(label_of.get(name, "")) == "q4_0"
        }
        changed: dict[str, TensorSource] = {label_of.get(name, name): each for name, each in result.changed.items()}
        errors = {
            label_of[name]: error.relative for name, error in result.errors.items() if label_of.get(name) in packed
        }
        return Calibrated(changed | packed, errors)


def _labels(plan: CompressionPlan) -> dict[str, str]:
    """Return the label in an archive of each parameter that it holds."""
    return {name: label for label, names in plan.parameters.items() for name in names}


def _chosen(options: CompressionOptions, plans: Sequence[CompressionPlan]) -> dict[str, CalibratedAlgorithm]:
    """Return the calibrated algorithm of each parameter for which plans ask for one."""
    chosen: dict[str, CalibratedAlgorithm] = {}
    for plan in plans:
        wanted = plan.calibrated()
        labels = {name: label for name, label in _labels(plan).items() if label in wanted}
        chosen |= {name: CALIBRATED[wanted[label]] for name, label in labels.items()}
    if options.imatrix is not None:
        chosen = {name: algorithm for name, algorithm in chosen.items() if algorithm.name != IMATRIX}
    return chosen


def _calibrated(
    options: CompressionOptions,
    source: ModelSource,
    calibration: Calibration,
    chosen: Mapping[str, CalibratedAlgorithm],
    work: Path,
    reporter: Reporter,
) -> CalibrationResult:
    """Run calibrated algorithms; what they leave gets the data-free search."""
    reporter.stage(f"Calibrating on {options.calibration}")
    started = time.monotonic()
    result = calibration.quantized(chosen, work, lambda done: reporter.stage(_told(done, time.monotonic() - started)))
    for name, reason in result.left.items():
        reporter.warn(f"{name}: {reason}; it uses the data-free search.")
    _tell_of_starved(result, reporter)
    if options.save_imatrix is not None:
        write_statistics(options.save_imatrix, source, result.statistics)
    return result


def _told(done: Progress, elapsed: float) -> str:
    """Return what is said on the way; with the time that the rest takes, where that is worth a minute's thought."""
    if isinstance(done, SensitivityProgress):
        left = _left(elapsed / done.done * (done.layers - done.done))
        return f"Measured the sensitivity of {done.done} of {done.layers} layers{left}"
    left = _left(elapsed / (done.layer - done.begun) * (done.layers - done.layer))
    return f"Calibrated layer {done.layer} of {done.layers}{left}"


def _left(seconds: float) -> str:
    return f", about {seconds / 60:.0f} min left" if seconds >= _WORTH_TELLING else ""


def _tell_of_starved(result: CalibrationResult, reporter: Reporter) -> None:
    from t2n_llm.compress.calibrate import FEWEST_TOKENS

    starved = sum(error.starved for error in result.errors.values())
    if starved:
        reporter.warn(
            f"{starved} expert matrices saw fewer than {FEWEST_TOKENS} tokens and use the data-free search. A "
            "longer --calibration text reaches more of them."
        )
    few = [name for name, error in result.errors.items() if not error.starved and error.tokens < FEWEST_TOKENS]
    if few:
        reporter.warn(
            f"{len(few)} tensors ({few[0]}, ...) saw fewer than {FEWEST_TOKENS} positions and use the data-free "
            "search. More --calibration data reaches them."
        )
