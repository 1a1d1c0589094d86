"""Compressing a model on its way into the archive.

In: a `CompressionPlan` and a `ModelGraph` with plain sources. Out: a `StoredGraph` whose sources make blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from generic_export.errors import WeightError
from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.dtypes import TRACT_DTYPES
from generic_export.nnef.graph import NnefVariable
from generic_export.weights.half import CastReport, cast_tensor
from generic_export.weights.source import BlockTensorSource, RenamedTensor, TensorSource
from quant.algorithms import BUILT_IN, DEFAULT_ALGORITHM, find_algorithm
from quant.factors import multiplied
from quant.imatrix import ImatrixQuantizer
from quant.prequantized import ExactTensor, StoredQ4
from quant.protocol import InputStatistics, Quantizer
from quant.stream import QuantizationReport, QuantizedTensor, Remainder
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.plan import CompressionPlan, oriented, uncast
from t2n_llm.compress.stored_graph import StoredGraph, TensorRecord
from t2n_llm.model_graph import ModelGraph

KEPT_BLOCKS = "as stored"
"""`TensorRecord.algorithm` of blocks that come from the checkpoint as they are."""

_TORCH_DTYPES = {name: dtype for dtype, name in TRACT_DTYPES.items()}


def compress(
    plan: CompressionPlan,
    model: ModelGraph,
    *,
    algorithms: Mapping[str, Quantizer] = BUILT_IN,
    overrides: Mapping[str, TensorSource] | None = None,
    output_errors: Mapping[str, float] | None = None,
    statistics: Mapping[str, InputStatistics] | None = None,
) -> StoredGraph:
    """Give every tensor of a plan its source.

    Args:
        plan: made for the model.
        model: its sources are cast to the graph's element type; what is quantised is taken from before that cast.
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
        label, plain = variable.label, model.sources[plan.shared.get(variable.label, variable.label)]
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
    stored = replace(model, nnef=plan.graph, sources=final)
    return StoredGraph(stored, (), plan.recipe, records, warnings, report)


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
