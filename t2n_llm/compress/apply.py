"""Compressing a language model on its way into the archive: what a recipe means for it (`compression_plan`) and plain sources
in; the sources that make blocks, and a record of what became of each tensor out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from generic_export.errors import WeightError
from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.dtypes import TRACT_DTYPES
from generic_export.nnef.graph import NnefGraph, NnefVariable
from generic_export.weights.half import CastReport, cast_tensor
from generic_export.weights.part import TensorPart
from generic_export.weights.source import BlockTensorSource, RenamedTensor, TensorSource
from quant.algorithms import BUILT_IN, DEFAULT_ALGORITHM, find_algorithm
from quant.factors import multiplied
from quant.imatrix import ImatrixQuantizer
from quant.prequantized import ExactTensor, StoredQ4
from quant.protocol import InputStatistics, Quantizer
from quant.recipe import Recipe
from quant.stream import QuantizationReport, QuantizedTensor, Remainder
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.plan import CompressionPlan, oriented, uncast
from t2n_llm.weights.archive_weights import ArchiveWeights

KEPT_BLOCKS = "as stored"
"""What `TensorRecord.algorithm` says of blocks that come from the checkpoint as they are."""

_TORCH_DTYPES = {name: dtype for dtype, name in TRACT_DTYPES.items()}


@dataclass(frozen=True)
class TensorRecord:
    """What became of one tensor.

    Attributes:
        label: its name in the archive.
        parameters: the model's parameters that it stands for.
        shape: as stored.
        scheme: element type or block format.
        algorithm: what chose its values, or "".
        bytes: of its values.
        axes: the order of the parameter's axes in the archive, or None when unchanged.
        part: what the tensor is of its parameter, or None when it is all of it.
        replaced: calibration gave it other values than the checkpoint's.
        factor: what the parameter's values are multiplied with in the archive.
        kept_reason: why it is not quantised although its kind could be, or "".
        residual_of: label of the tensor to which this one is added, or "".
        relative_error: squared error over energy, once streamed; None when nothing was measured.
        output_error: the same of the layer's outputs on the calibration text; None without calibration.
    """

    label: str
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    scheme: str
    algorithm: str
    bytes: int
    axes: tuple[int, ...] | None = None
    part: TensorPart | None = None
    replaced: bool = False
    factor: float = 1.0
    kept_reason: str = ""
    residual_of: str = ""
    relative_error: float | None = None
    output_error: float | None = None

    @property
    def values(self) -> int:
        """How many values of the model it holds: none of its own, where it is added to another tensor."""
        return 0 if self.residual_of else math.prod(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """Bits that a value takes."""
        return 8 * self.bytes / max(1, math.prod(self.shape))


@dataclass(frozen=True)
class Compression:
    """A compressed model, ready to be written.

    Attributes:
        recipe: what was asked for.
        graph: reads the tensors as they will be stored.
        sources: one per variable of the graph.
        warnings: what the user should know (rules that match nothing).
        errors: filled while the sources are streamed.
    """

    recipe: Recipe
    graph: NnefGraph
    sources: Mapping[str, TensorSource]
    records: tuple[TensorRecord, ...]
    warnings: tuple[str, ...]
    errors: QuantizationReport = field(default_factory=QuantizationReport)

    def measured_records(self) -> tuple[TensorRecord, ...]:
        """Return the records with the errors that streaming measured."""
        rests = {record.residual_of: record.label for record in self.records if record.residual_of}
        return tuple(replace(record, relative_error=self._error(record, rests)) for record in self.records)

    def _error(self, record: TensorRecord, rests: Mapping[str, str]) -> float | None:
        """Return the relative error of a weight; of one that is the sum of two, that of the sum, which the first record has."""
        own = self.errors.errors.get(record.label)
        if own is None or record.residual_of:
            return record.relative_error
        left = self.errors.errors.get(rests.get(record.label, ""))
        return own.relative_error if left is None else replace(own, squared_error=left.squared_error).relative_error

    def weights_in(self, archive: Path) -> ArchiveWeights:
        """Return what puts the values that the archive holds into a PyTorch model."""
        return ArchiveWeights.of_records(archive, [asdict(record) for record in self.records])

    def summary(self) -> dict[str, Any]:
        """Return what `export.json` records: the recipe, the size, and each tensor."""
        records = self.measured_records()
        total, values = sum(record.bytes for record in records), sum(record.values for record in records)
        return {
            "recipe": self.recipe.asdict(),
            "bytes": total,
            "bits_per_weight": 8 * total / max(1, values),
            "tensors": [asdict(record) | {"bits_per_weight": record.bits_per_weight} for record in records],
        }


def compress(
    plan: CompressionPlan,
    sources: Mapping[str, TensorSource],
    *,
    algorithms: Mapping[str, Quantizer] = BUILT_IN,
    overrides: Mapping[str, TensorSource] | None = None,
    output_errors: Mapping[str, float] | None = None,
    statistics: Mapping[str, InputStatistics] | None = None,
) -> Compression:
    """Give every tensor of a plan its source.

    Args:
        plan: made for the model that the sources belong to.
        sources: per label, cast to the graph's element type; what is quantised is taken from before that cast.
        algorithms: name -> quantizer, for the algorithms that need no calibration.
        overrides: per label, what takes a source's place: blocks, or plain float values.
        output_errors: per label, what calibration measured of those.
        statistics: per label, what a file says of a tensor's inputs, for the search that is weighted by them.

    Raises:
        OptionError: an algorithm is unknown.
        WeightError: an override does not fit its variable.
    """
    report = QuantizationReport()
    replaced, given = dict(overrides or {}), dict(statistics or {})
    final: dict[str, TensorSource] = {}
    twice = {variable.residual_of for variable in plan.graph.variables}
    for variable in plan.graph.variables:
        label, plain = variable.label, sources[plan.shared.get(variable.label, variable.label)]
        if variable.residual_of or label in twice:
            changed = replaced.get(variable.residual_of or label)
            whole = plain if changed is None else multiplied(changed, variable.factor)
            final[label] = _half_of_sum(variable, plan, whole, report)
        elif label in replaced and label not in given:
            final[label] = _fitting(replaced[label], variable)
        else:
            final[label] = _source(label, plan, plain, algorithms, given.get(label), report)
    records = tuple(
        replace(
            _record(variable, plan, final[variable.label], replaced, variable.label in given),
            output_error=(output_errors or {}).get(variable.label),
        )
        for variable in plan.graph.variables
    )
    warnings = tuple(f"recipe {plan.recipe.name}: the rule {pattern!r} matches no tensor." for pattern in plan.idle)
    return Compression(plan.recipe, plan.graph, final, records, warnings, report)


def _half_of_sum(
    variable: NnefVariable, plan: CompressionPlan, plain: TensorSource, report: QuantizationReport
) -> TensorSource:
    """Return the blocks of a tensor that is stored as the sum of two, or those of what these leave."""
    search, label = BUILT_IN[DEFAULT_ALGORITHM], variable.residual_of or variable.label
    blocks = QuantizedTensor(RenamedTensor(oriented(uncast(plain), plan.axes[label]), label), search, report)
    if not variable.residual_of:
        return blocks
    return QuantizedTensor(RenamedTensor(Remainder(blocks), variable.label), search, report)


def _source(
    label: str,
    plan: CompressionPlan,
    plain: TensorSource,
    algorithms: Mapping[str, Quantizer],
    statistics: InputStatistics | None,
    report: QuantizationReport,
) -> TensorSource:
    """Return where the bytes of a variable come from that calibration did not make."""
    if label not in plan.formats:
        return plain
    stored = oriented(uncast(plain), plan.axes[label])
    if statistics is None and isinstance(stored, ExactTensor) and plan.formats[label] == "q4_0":
        return stored.stored(label)  # these very blocks, whatever the algorithm
    quantizer = _quantizer(label, plan, algorithms) if statistics is None else ImatrixQuantizer()
    return QuantizedTensor(RenamedTensor(stored, label), quantizer, report, plan.formats[label], statistics)


def _quantizer(label: str, plan: CompressionPlan, algorithms: Mapping[str, Quantizer]) -> Quantizer:
    name = plan.algorithms.get(label, DEFAULT_ALGORITHM)  # only q4_0 leaves a choice
    if name in CALIBRATED:
        # Calibration watches the inputs of linear layers; what it has not seen (embeddings) gets the data-free search.
        return BUILT_IN[DEFAULT_ALGORITHM]
    return find_algorithm(name, algorithms)


def _fitting(override: TensorSource, variable: NnefVariable) -> TensorSource:
    """Return what calibration made, as the variable stores it.

    Raises:
        WeightError: it made blocks of another format than the recipe asks for.
    """
    stored = override.block_format if isinstance(override, BlockTensorSource) else None
    if stored is None and variable.dtype in BLOCK_FORMATS:
        raise WeightError(
            f"tensor {variable.label}: the recipe requires {variable.dtype}, but calibration returned plain values."
        )
    if stored is not None and stored != variable.dtype:
        raise WeightError(
            f"tensor {variable.label}: the graph requires {variable.dtype}, but calibration returned {stored}."
        )
    scaled = multiplied(override, variable.factor)
    return scaled if stored is not None else cast_tensor(scaled, _TORCH_DTYPES[variable.dtype], CastReport())


def _record(
    variable: NnefVariable, plan: CompressionPlan, source: TensorSource, replaced: Collection[str], weighed: bool
) -> TensorRecord:
    label = variable.label
    quantized = label in plan.formats
    base = variable.residual_of or label
    algorithm = plan.algorithms.get(label, "")
    if algorithm in CALIBRATED and base not in replaced and not weighed:
        algorithm = DEFAULT_ALGORITHM
    if isinstance(source, StoredQ4):
        algorithm = KEPT_BLOCKS
    return TensorRecord(
        label=label,
        parameters=plan.parameters.get(base, (base,)) if variable.part is None else (variable.part.parameter,),
        shape=variable.shape,
        scheme=variable.dtype,
        algorithm=algorithm,
        bytes=source.nbytes,
        axes=plan.axes.get(label) if quantized else None,
        part=variable.part,
        replaced=base in replaced,
        factor=variable.factor,
        kept_reason="" if quantized else plan.kept.get(label, ""),
        residual_of=variable.residual_of,
    )
