"""How a user asks for compression, and what an export does about it.

In: the options of the command line. Out: a recipe, and a `Compression` whose sources live as long as a `with` block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from generic_export.errors import OptionError
from generic_export.nnef.graph import NnefGraph
from generic_export.weights.source import TensorSource
from quant.algorithms import BUILT_IN, load_algorithms
from quant.protocol import InputStatistics, Quantizer
from quant.recipe import Recipe, named_recipe, parse_size, read_recipe
from quant.stream import PackedBlocks
from quant.weighted_search import prepare_search
from t2n_llm.compress.algorithms import CALIBRATED, IMATRIX
from t2n_llm.compress.apply import Compression, compress
from t2n_llm.compress.plan import CompressionPlan, plan_compression, product_shapes
from t2n_llm.compress.statistics import check_name, read_statistics, recorded_file, write_statistics
from t2n_llm.source.empty_model import Weightless
from t2n_llm.source.hub import ModelSource

DEFAULT_CALIBRATION = "builtin"


class Messages(Protocol):
    """The part of an export's reporter that is used here."""

    def stage(self, title: str) -> None: ...

    def warn(self, message: str) -> None: ...


@dataclass(frozen=True)
class CompressionOptions:
    """What the user asked for; all None means no compression.

    Attributes:
        name: `NAME` or `NAME:ALGORITHM` of `quant.recipe.NAMED_RECIPES`.
        file: a recipe in YAML.
        target_size: bytes, or text such as `900MB`.
        quantizers: `module:attribute` of further algorithms.
        calibration: `builtin`, `auto` (the model writes it) or the path of a text.
        imatrix: statistics to use for the algorithm `imatrix`, instead of calibrating.
        save_imatrix: where to keep the statistics of a calibration.
    """

    name: str | None = None
    file: Path | None = None
    target_size: str | int | None = None
    quantizers: str | None = None
    calibration: str = DEFAULT_CALIBRATION
    imatrix: Path | None = None
    save_imatrix: Path | None = None

    def __post_init__(self) -> None:
        if self.name is not None and self.file is not None:
            raise OptionError("both --compress and --recipe are given.", "A recipe has a name or a file, not both.")
        if self.name is None and self.file is None and self.target_size is not None:
            raise OptionError("--target-size is given without a recipe.", "Add --compress q4_0-mixed.")
        self.recipe()  # whatever is wrong with it should be known before the work
        if self.imatrix is not None and IMATRIX not in self._algorithm_names():
            raise OptionError(
                "--imatrix is given, and no tensor uses it.",
                f"Only the algorithm {IMATRIX} can: --compress q4_0:{IMATRIX}.",
            )
        if self.save_imatrix is not None:
            check_name(self.save_imatrix)
            if not self.calibrates():
                raise OptionError("--save-imatrix is given, and nothing is calibrated.", "Add --compress q4_0:imatrix.")

    def algorithms(self) -> Mapping[str, Quantizer]:
        """Return the algorithms that work on one tensor at a time."""
        return load_algorithms(self.quantizers) if self.quantizers or self.name or self.file else BUILT_IN

    def recipe(self) -> Recipe | None:
        """Return the recipe, or None.

        Raises:
            OptionError: it is unknown, unreadable or wrong.
        """
        known = (*self.algorithms(), *CALIBRATED)
        size = parse_size(self.target_size) if self.target_size is not None else None
        if self.name is not None:
            return named_recipe(self.name, known, size)
        return read_recipe(self.file, known, size) if self.file is not None else None

    def dtype(self) -> str | None:
        """Return the element type that the recipe wants for the graph, or None."""
        recipe = self.recipe()
        return recipe.dtype if recipe is not None else None

    def calibrates(self) -> bool:
        """Say whether the recipe asks for an algorithm that runs the model."""
        from_file = {IMATRIX} if self.imatrix is not None else set()
        return not (self._algorithm_names() - from_file).isdisjoint(CALIBRATED)

    def prepare(self, messages: Messages) -> None:
        """Compile what quantising will need, before the graph is captured: meanwhile torch has `max` and `min` replaced."""
        if self._algorithm_names() - {"min_max"}:
            messages.stage("Preparing to quantise")
            prepare_search()

    def _algorithm_names(self) -> set[str]:
        recipe = self.recipe()
        return recipe.algorithms() if recipe is not None else set()

    def recorded(self) -> dict[str, Any]:
        """Return the options as plain data; where files lie on this machine is nobody else's business."""
        calibration = self.calibration
        return {
            "name": self.name,
            "file": self.file.name if self.file is not None else None,
            "target_size": self.target_size,
            "quantizers": self.quantizers,
            "calibration": calibration if calibration in ("builtin", "auto") else Path(calibration).name,
            "imatrix": recorded_file(self.imatrix) if self.imatrix is not None else None,
        }


@contextmanager
def compressed(
    options: CompressionOptions,
    source: ModelSource,
    skeleton: Weightless,
    graph: NnefGraph,
    sources: Mapping[str, TensorSource],
    messages: Messages,
    *,
    dry: bool = False,
) -> Iterator[Compression | None]:
    """Yield the compressed form of a model, or None when no compression was asked for.

    Args:
        options: what was asked for.
        source: the model, for calibration.
        skeleton, graph, sources: as an export without compression would write them.
        messages: told the stages and what a user should know.
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
    statistics = _read_statistics(options, source, skeleton, graph, messages)
    harm = dict(statistics)
    if recipe.target_size is not None:
        if options.calibrates() and not dry:
            messages.stage("Looking at the inputs of each tensor")
            harm |= _collected(options, source)
        messages.stage("Measuring how sensitive each tensor is")
    plan = plan_compression(recipe, skeleton, graph, sources, algorithms, harm)
    given = _given(options, plan, statistics, messages)
    with tempfile.TemporaryDirectory(prefix="t2n-llm-") as work:
        made = Calibrated({}, {}) if dry else _calibrated(options, source, plan, Path(work), messages)
        compression = compress(
            plan,
            sources,
            algorithms=algorithms,
            overrides=made.sources,
            output_errors=made.output_errors,
            statistics=given,
        )
        for warning in compression.warnings:
            messages.warn(warning)
        yield compression


def _read_statistics(
    options: CompressionOptions, source: ModelSource, skeleton: Weightless, graph: NnefGraph, messages: Messages
) -> Mapping[str, InputStatistics]:
    """Return what an imatrix file says, by parameter name; nothing without one."""
    if options.imatrix is None:
        return {}
    found = read_statistics(options.imatrix, source, product_shapes(graph, skeleton))
    for warning in found.warnings:
        messages.warn(warning)
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
    messages: Messages,
) -> dict[str, InputStatistics]:
    """Return, by label, the statistics for the tensors that want them from a file; tell which get none."""
    if options.imatrix is None:
        return {}
    wanted = [label for label, algorithm in plan.calibrated().items() if algorithm == IMATRIX]
    found = {label: statistics[name] for label in wanted for name in plan.parameters[label] if name in statistics}
    missing = [label for label in wanted if label not in found]
    if missing:
        messages.warn(
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
    options: CompressionOptions, source: ModelSource, plan: CompressionPlan, work: Path, messages: Messages
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
    messages.stage(f"Calibrating on {options.calibration}")
    ids = calibration_ids(options.calibration, source)
    result = calibrate(
        source.weights,
        chosen.get,
        ids,
        work_dir=work,
        progress=lambda layer: messages.stage(f"Calibrated layer {layer.layer} of {layer.layers}"),
        trust_remote_code=source.trust_remote_code,
    )
    for name, reason in result.left.items():
        messages.warn(f"{name}: {reason}; its values come from the data-free search.")
    starved = sum(error.starved for error in result.errors.values())
    if starved:
        messages.warn(
            f"{starved} expert matrices saw fewer than {FEWEST_TOKENS} tokens; their values come from the data-free "
            "search. A longer --calibration text would reach more of them."
        )
    if options.save_imatrix is not None:
        write_statistics(options.save_imatrix, source, result.statistics)
    packed = {label_of.get(name, name): PackedBlocks(blocks) for name, blocks in result.packed.items()}
    changed = {label_of.get(name, name): values for name, values in result.changed.items()}
    errors = {label_of.get(name, name): error.relative for name, error in result.errors.items()}
    return Calibrated(changed | packed, errors)
