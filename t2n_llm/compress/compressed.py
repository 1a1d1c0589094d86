"""What an export does about a compression that was asked for.

In: `CompressionOptions` and a captured model. Out: a `Compression` whose sources live as long as a `with` block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from generic_export.nnef.graph import NnefGraph
from generic_export.weights.source import TensorSource
from quant.protocol import InputStatistics
from quant.stream import PackedBlocks
from quant.weighted_search import prepare_search
from t2n_llm.compress.algorithms import CALIBRATED, IMATRIX
from t2n_llm.compress.apply import Compression, compress
from t2n_llm.compress.plan import CompressionPlan, plan_compression, product_shapes
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.compress.statistics import read_statistics, write_statistics
from t2n_llm.reporter import Reporter
from t2n_llm.source.empty_model import Weightless
from t2n_llm.source.hub import ModelSource


def prepare(options: CompressionOptions, reporter: Reporter) -> None:
    """Compile what quantising will need, before the graph is captured: meanwhile torch has `max` and `min` replaced."""
    if options.algorithm_names() - {"min_max"}:
        reporter.stage("Preparing to quantise")
        prepare_search()


@contextmanager
def compressed(
    options: CompressionOptions,
    source: ModelSource,
    skeleton: Weightless,
    graph: NnefGraph,
    sources: Mapping[str, TensorSource],
    reporter: Reporter,
    *,
    dry: bool = False,
) -> Iterator[Compression | None]:
    """Yield the compressed form of a model, or None when no compression was asked for.

    Args:
        options: what was asked for.
        source: the model, for calibration.
        skeleton, graph, sources: as an export without compression would write them.
        reporter: told the stages and what a user should know.
        dry: nothing will be streamed, so that nothing is calibrated; the sizes are the same.

    Raises:
        OptionError: the recipe does not fit the model.
        WeightError: a tensor cannot be quantised.
    """
    recipe = options.recipe()
    if recipe is None or not recipe.rules:
        yield None
        return
    algorithms = options.algorithms()
    statistics = _read_statistics(options, source, skeleton, graph, reporter)
    harm = dict(statistics)
    if recipe.target_size is not None:
        if options.calibrates() and not dry:
            reporter.stage("Looking at the inputs of each tensor")
            harm |= _collected(options, source)
        reporter.stage("Measuring how sensitive each tensor is")
    plan = plan_compression(recipe, skeleton, graph, sources, algorithms, harm)
    given = _given(options, plan, statistics, reporter)
    with tempfile.TemporaryDirectory(prefix="t2n-llm-") as work:
        made = Calibrated({}, {}) if dry else _calibrated(options, source, plan, Path(work), reporter)
        compression = compress(
            plan,
            sources,
            algorithms=algorithms,
            overrides=made.sources,
            output_errors=made.output_errors,
            statistics=given,
        )
        for warning in compression.warnings:
            reporter.warn(warning)
        yield compression


def _read_statistics(
    options: CompressionOptions, source: ModelSource, skeleton: Weightless, graph: NnefGraph, reporter: Reporter
) -> Mapping[str, InputStatistics]:
    """Return what an imatrix file says, by parameter name; nothing without one."""
    if options.imatrix is None:
        return {}
    found = read_statistics(options.imatrix, source, product_shapes(graph, skeleton))
    for warning in found.warnings:
        reporter.warn(warning)
    return found.statistics


def _collected(options: CompressionOptions, source: ModelSource) -> Mapping[str, InputStatistics]:
    """Return the statistics of the unquantised model, by parameter name."""
    from t2n_llm.compress.calibrate import collect_statistics
    from t2n_llm.compress.text import calibration_ids

    ids = calibration_ids(options.calibration, source)
    return collect_statistics(source.folder, ids, trust_remote_code=source.trust_remote_code)


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
            f"imatrix {options.imatrix.name} says nothing of {len(missing)} tensors ({missing[0]}, ...): their values "
            "come from the data-free search."
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


def _calibrated(
    options: CompressionOptions, source: ModelSource, plan: CompressionPlan, work: Path, reporter: Reporter
) -> Calibrated:
    """Run the calibrated algorithms that a plan asks for; what they leave gets the data-free search."""
    from_file = options.imatrix is not None
    wanted = {label: name for label, name in plan.calibrated().items() if not (from_file and name == IMATRIX)}
    if not wanted:
        return Calibrated({}, {})
    from t2n_llm.compress.calibrate import FEWEST_TOKENS, calibrate
    from t2n_llm.compress.text import calibration_ids

    label_of = {name: label for label, names in plan.parameters.items() for name in names}
    chosen = {name: CALIBRATED[wanted[label]] for name, label in label_of.items() if label in wanted}
    reporter.stage(f"Calibrating on {options.calibration}")
    ids = calibration_ids(options.calibration, source)
    result = calibrate(
        source.weights,
        chosen.get,
        ids,
        work_dir=work,
        progress=lambda layer: reporter.stage(f"Calibrated layer {layer.layer} of {layer.layers}"),
        trust_remote_code=source.trust_remote_code,
    )
    for name, reason in result.left.items():
        reporter.warn(f"{name}: {reason}; its values come from the data-free search.")
    starved = sum(error.starved for error in result.errors.values())
    if starved:
        reporter.warn(
            f"{starved} expert matrices saw fewer than {FEWEST_TOKENS} tokens; their values come from the data-free "
            "search. A longer --calibration text would reach more of them."
        )
    if options.save_imatrix is not None:
        write_statistics(options.save_imatrix, source, result.statistics)
    packed = {label_of.get(name, name): PackedBlocks(blocks) for name, blocks in result.packed.items()}
    changed = {label_of.get(name, name): values for name, values in result.changed.items()}
    errors = {label_of.get(name, name): error.relative for name, error in result.errors.items()}
    return Calibrated(changed | packed, errors)
