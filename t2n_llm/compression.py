"""Compressing a language model on its way into the archive: a recipe, the graph and plain sources in; the graph that reads
blocks, the sources that make them, and a record of what became of each tensor out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from generic_export.errors import OptionError, WeightError
from generic_export.nnef.block_storage import (
    StorageUse,
    may_store,
    split_products,
    storage_uses,
    store_in_blocks,
)
from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.graph import NnefGraph, NnefVariable
from generic_export.ops.builder import TRACT_DTYPES
from generic_export.weights.part import TensorPart
from generic_export.weights.source import BlockTensorSource, RenamedTensor, TensorSource
from quant.algorithms import BUILT_IN, DEFAULT_ALGORITHM, find_algorithm
from quant.budget import Candidate, kept_plain, kind_factor, layer_count, weight_sensitivity
from quant.half import CastReport, CastTensor, cast_tensor
from quant.imatrix import ImatrixQuantizer
from quant.prequantized import ExactTensor, StoredQ4
from quant.protocol import InputStatistics, Quantizer
from quant.recipe import QUANTIZED_SCHEMES, Choice, Recipe, TensorName, choose
from quant.stream import PermutedTensor, QuantizationReport, QuantizedTensor
from t2n_llm.archive_weights import ArchiveWeights
from t2n_llm.weightless import Weightless

CALIBRATED_ALGORITHMS = ("imatrix", "gptq", "awq", "best")
"""Algorithms that look at the whole model: `t2n_llm.calibrate` makes their tensors before the others are streamed."""
FOLDING_ALGORITHMS = ("awq", "best")
"""Those that scale channels first, so that their tensors, and neighbours, are no longer the checkpoint's."""

KEPT_BLOCKS = "as stored"
"""What `TensorRecord.algorithm` says of blocks that come from the checkpoint as they are."""

_PLAIN_BYTES = {"f16": 2, "f32": 4}
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
        kept: why it is not quantised although its kind could be, or "".
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
    kept: str = ""
    relative_error: float | None = None
    output_error: float | None = None

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
        return tuple(
            replace(record, relative_error=self.errors.errors[record.label].relative_error)
            if record.label in self.errors.errors
            else record
            for record in self.records
        )

    def weights_in(self, archive: Path) -> ArchiveWeights:
        """Return what puts the values that the archive holds into a PyTorch model."""
        return ArchiveWeights.of_records(archive, [asdict(record) for record in self.records])

    def summary(self) -> dict[str, Any]:
        """Return what `export.json` records: the recipe, the size, and each tensor."""
        records = self.measured_records()
        total, values = sum(record.bytes for record in records), sum(math.prod(record.shape) for record in records)
        return {
            "recipe": self.recipe.asdict(),
            "bytes": total,
            "bits_per_weight": 8 * total / max(1, values),
            "tensors": [asdict(record) | {"bits_per_weight": record.bits_per_weight} for record in records],
        }


@dataclass(frozen=True)
class _Part:
    """One way in which a stored tensor is used, under the parameter name that goes with it."""

    label: str
    name: TensorName
    use: StorageUse


@dataclass(frozen=True)
class CompressionPlan:
    """What a recipe means for one model; everything is by label in the archive.

    Attributes:
        recipe: what was asked for.
        graph: reads the tensors as they will be stored.
        formats: block format of each tensor that gets one.
        algorithms: what chooses the values of those.
        kept: why a tensor that could be quantised is not.
        parameters: the model's parameters that each tensor stands for.
        axes: the order of a parameter's axes in the archive, where it changes.
        shared: label of a tied table's second tensor -> the label whose values it shares.
        idle: patterns that match nothing.
    """

    recipe: Recipe
    graph: NnefGraph
    formats: Mapping[str, str]
    algorithms: Mapping[str, str]
    kept: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]
    axes: Mapping[str, tuple[int, ...] | None]
    shared: Mapping[str, str]
    idle: tuple[str, ...]

    def calibrated(self) -> dict[str, str]:
        """Return the labels whose values calibration chooses, with the algorithm."""
        return {label: name for label, name in self.algorithms.items() if name in CALIBRATED_ALGORITHMS}


def plan_compression(
    recipe: Recipe,
    skeleton: Weightless,
    graph: NnefGraph,
    sources: Mapping[str, TensorSource],
    algorithms: Mapping[str, Quantizer] = BUILT_IN,
    statistics: Mapping[str, InputStatistics] | None = None,
) -> CompressionPlan:
    """Apply a recipe to a graph.

    Args:
        recipe: which tensors become blocks.
        skeleton: gives tied names, and which parameters are embeddings and head.
        graph: with plain tensors only.
        sources: per label; read only when the recipe has a size to fill.
        algorithms: name -> quantizer, for the sensitivity of tensors.
        statistics: parameter name -> what is known of its inputs, for the same.

    Raises:
        OptionError: the size asked for cannot be reached, or f32 is asked for in an f16 graph.
        WeightError: a tensor cannot be quantised (inf, nan).
    """
    parts = _parts(graph, skeleton)
    choices, idle = choose(recipe, [part.name for part in parts])
    _check_plain_schemes(choices, skeleton)
    kept = {part.name.name: _obstacle(part, choices) for part in parts}
    formats = {name: choices[name].scheme for name, reason in kept.items() if not reason}
    if recipe.target_size is not None:
        sensitivity = _Sensitivity(choices, algorithms, statistics or {}, layer_count(part.name.name for part in parts))
        for name in _over_budget(recipe.target_size, graph, sources, parts, formats, sensitivity):
            del formats[name]
            kept[name] = "it is among the most sensitive, and the size asked for has room for it"
    graph, parts, shared = _split_parts(graph, parts, formats)
    stored = {part.label: formats[part.name.name] for part in parts if part.name.name in formats}
    return CompressionPlan(
        recipe=recipe,
        graph=store_in_blocks(graph, stored),
        formats=stored,
        algorithms={label: _algorithm(label, parts, choices) for label, scheme in stored.items() if scheme == "q4_0"},
        kept={part.label: kept[part.name.name] for part in parts},
        parameters=_parameters(parts, skeleton),
        axes={label: use.axes for label, use in storage_uses(graph).items()},
        shared=shared,
        idle=tuple(idle),
    )


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
    final = {}
    for variable in plan.graph.variables:
        plain = sources[plan.shared.get(variable.label, variable.label)]
        final[variable.label] = (
            _weighed(variable, plan, plain, given[variable.label], report)
            if variable.label in given
            else _source(variable, plan, plain, replaced.get(variable.label), algorithms, report)
        )
    records = tuple(
        replace(
            _record(variable, plan, final[variable.label], variable.label in replaced, variable.label in given),
            output_error=(output_errors or {}).get(variable.label),
        )
        for variable in plan.graph.variables
    )
    warnings = tuple(f"recipe {plan.recipe.name}: the rule {pattern!r} matches no tensor." for pattern in plan.idle)
    return Compression(plan.recipe, plan.graph, final, records, warnings, report)


def product_shapes(graph: NnefGraph, skeleton: Weightless) -> dict[str, tuple[int, ...]]:
    """Return, for the parameters that are weights of products, their shape [..., K] as blocks want it."""
    shapes = {variable.label: variable.shape for variable in graph.variables}
    return {
        part.name.name: tuple(shapes[part.label][axis] for axis in part.use.axes)
        if part.use.axes is not None
        else shapes[part.label]
        for part in _parts(graph, skeleton)
        if part.use.multiplied
    }


# --- what the recipe says of each tensor ----------------------------------------------------------


def _parts(graph: NnefGraph, skeleton: Weightless) -> list[_Part]:
    """Return every tensor that blocks could be made of, with its role; a tied table counts as embeddings and as head."""
    embeddings, head = _embedding_name(skeleton), _head_name(skeleton)
    tied = _tied_names(skeleton)
    parts: list[_Part] = []
    for label, use in storage_uses(graph).items():
        names = tied.get(label, (label,))
        if use.gathered and use.multiplied and len(names) > 1:
            product = head if head in names else next(name for name in names if name != label)
            gather = embeddings if embeddings in names and embeddings != product else label
            parts.append(_Part(label, TensorName(gather, "@embeddings"), replace(use, multiplied=False)))
            parts.append(_Part(label, TensorName(product, "@head"), replace(use, gathered=False)))
        else:
            parts.append(_Part(label, TensorName(label, _role(use, head in names)), use))
    return parts


def _role(use: StorageUse, is_head: bool) -> str:
    if is_head:
        return "@head"
    if use.multiplied:
        return "@linears"
    return "@embeddings" if use.gathered else ""


def _tied_names(skeleton: Weightless) -> dict[str, tuple[str, ...]]:
    """Return, for each name of a tied parameter, all its names."""
    groups: dict[str, list[str]] = {}
    for name, owner in skeleton.tied.items():
        groups.setdefault(owner, [owner]).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


def _embedding_name(skeleton: Weightless) -> str | None:
    return _weight_name(skeleton, "get_input_embeddings")


def _head_name(skeleton: Weightless) -> str | None:
    return _weight_name(skeleton, "get_output_embeddings")


def _weight_name(skeleton: Weightless, getter: str) -> str | None:
    model: Any = skeleton.network
    try:
        wanted = getattr(model, getter)()
    except (AttributeError, NotImplementedError):  # a model that has no such layer
        return None
    return next((f"{path}.weight" for path, module in model.named_modules() if module is wanted), None)


def _obstacle(part: _Part, choices: Mapping[str, Choice]) -> str:
    """Return why a part stays plain: what stands in the way of the scheme asked for, or that none was."""
    choice = choices.get(part.name.name)
    if choice is None or choice.scheme not in QUANTIZED_SCHEMES:
        return "the recipe keeps it"
    return may_store(part.use, choice.scheme)


def _check_plain_schemes(choices: Mapping[str, Choice], skeleton: Weightless) -> None:
    narrow = skeleton.dtype is torch.float16
    wide = next((name for name, choice in choices.items() if choice.scheme == "f32"), None)
    if narrow and wide is not None:
        raise OptionError(
            f"the recipe keeps {wide} in f32, in a graph that computes in f16.",
            f"Add --keep-f32 {wide!r} to the export.",
        )


@dataclass(frozen=True)
class _Sensitivity:
    """How much a model suffers from quantising one of its tensors, as far as that can be said beforehand."""

    choices: Mapping[str, Choice]
    algorithms: Mapping[str, Quantizer]
    statistics: Mapping[str, InputStatistics]
    layers: int

    def of(self, names: Sequence[TensorName], source: TensorSource, block_format: str) -> float:
        quantizer = self.algorithms.get(self.choices[names[0].name].algorithm, BUILT_IN[DEFAULT_ALGORITHM])
        known = next((self.statistics[each.name] for each in names if each.name in self.statistics), None)
        harm = weight_sensitivity(source, quantizer, block_format, known)
        return harm * sum(kind_factor(each.name, each.role, self.layers) for each in names)


def _over_budget(
    budget: int,
    graph: NnefGraph,
    sources: Mapping[str, TensorSource],
    parts: Sequence[_Part],
    formats: Mapping[str, str],
    sensitivity: _Sensitivity,
) -> set[str]:
    """Return the names that stay plain within the budget; a tied table is one tensor with its head."""
    variables = {variable.label: variable for variable in graph.variables}
    by_label: dict[str, list[_Part]] = {}
    for part in parts:
        if part.name.name in formats:
            by_label.setdefault(part.label, []).append(part)
    candidates, stays = [], 0
    for label, members in by_label.items():
        name, variable = members[0].name.name, variables[label]
        source = _oriented(_uncast(sources[label]), members[0].use.axes)
        harm = sensitivity.of([member.name for member in members], source, formats[name])
        # A table that stays plain for its other use is there anyway: a quantised copy of it only adds to the size.
        alone = all(part.name.name in formats for part in parts if part.label == label)
        plain = math.prod(variable.shape) * _PLAIN_BYTES[variable.dtype] if alone else 0
        candidates.append(Candidate(label, plain, BLOCK_FORMATS[formats[name]].data_size(variable.shape), harm))
        stays += 0 if alone else sources[label].nbytes
    others = stays + sum(sources[name].nbytes for name in variables if name not in by_label)
    kept = kept_plain(candidates, others, budget)
    return {part.name.name for label in kept for part in by_label[label]}


def _split_parts(
    graph: NnefGraph, parts: Sequence[_Part], formats: Mapping[str, str]
) -> tuple[NnefGraph, list[_Part], dict[str, str]]:
    """Give the head of a tied table a tensor of its own where the two are stored differently.

    Returns:
        The graph, the parts, and for each new label the one whose values it shares.
    """
    copies: dict[str, str] = {}
    for part in parts:
        twin = next((other for other in parts if other.label == part.label and other is not part), None)
        differs = twin is not None and formats.get(twin.name.name) != formats.get(part.name.name)
        if differs and part.name.role == "@head":
            copies[part.label] = _copy_label(part)
    split = [
        replace(part, label=copies[part.label]) if part.label in copies and part.name.role == "@head" else part
        for part in parts
    ]
    shared = {copy: label for label, copy in copies.items()}
    return (split_products(graph, copies) if copies else graph), split, shared


def _copy_label(part: _Part) -> str:
    """Return a label for the head's own tensor: its parameter's name, unless the table lies under that one."""
    return part.name.name if part.name.name != part.label else f"{part.name.name}_head"


def _algorithm(label: str, parts: Sequence[_Part], choices: Mapping[str, Choice]) -> str:
    return next(choices[part.name.name].algorithm for part in parts if part.label == label)


# --- sources and records ----------------------------------------------------------------------------


def _uncast(source: TensorSource) -> TensorSource:
    """Return a source as the checkpoint has it: rounding to f16 first would lose a little."""
    return source.source if isinstance(source, CastTensor) else source


def _oriented(source: TensorSource, axes: tuple[int, ...] | None) -> TensorSource:
    return source if axes is None else PermutedTensor(source, axes)


def _source(
    variable: NnefVariable,
    plan: CompressionPlan,
    plain: TensorSource,
    override: TensorSource | None,
    algorithms: Mapping[str, Quantizer],
    report: QuantizationReport,
) -> TensorSource:
    """Return where the bytes of a variable come from."""
    label = variable.label
    if override is not None:
        return _fitting(override, variable)
    if label not in plan.formats:
        return plain
    stored = _oriented(_uncast(plain), plan.axes[label])
    if isinstance(stored, ExactTensor) and plan.formats[label] == "q4_0":
        return stored.stored(label)  # these very blocks, whatever the algorithm
    source = RenamedTensor(stored, label)
    return QuantizedTensor(source, _quantizer(label, plan, algorithms), report, plan.formats[label])


def _weighed(
    variable: NnefVariable,
    plan: CompressionPlan,
    plain: TensorSource,
    statistics: InputStatistics,
    report: QuantizationReport,
) -> TensorSource:
    """Return the search weighted by what a file says of the inputs, as the bytes of a variable."""
    source = RenamedTensor(_oriented(_uncast(plain), plan.axes[variable.label]), variable.label)
    return QuantizedTensor(source, ImatrixQuantizer(), report, plan.formats[variable.label], statistics)


def _quantizer(label: str, plan: CompressionPlan, algorithms: Mapping[str, Quantizer]) -> Quantizer:
    name = plan.algorithms.get(label, DEFAULT_ALGORITHM)  # only q4_0 leaves a choice
    if name in CALIBRATED_ALGORITHMS:
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
        raise WeightError(f"tensor {variable.label}: the recipe wants {variable.dtype}, calibration gave plain values.")
    if stored is not None and stored != variable.dtype:
        raise WeightError(f"tensor {variable.label}: the graph reads {variable.dtype}, calibration gave {stored}.")
    return override if stored is not None else cast_tensor(override, _TORCH_DTYPES[variable.dtype], CastReport())


def _parameters(parts: Sequence[_Part], skeleton: Weightless) -> dict[str, tuple[str, ...]]:
    """Return the names of the model's parameters that each stored tensor stands for."""
    tied = _tied_names(skeleton)
    names: dict[str, list[str]] = {}
    for part in parts:
        names.setdefault(part.label, []).append(part.name.name)
    return {
        label: tuple(found) if len(found) > 1 or found[0] != label else _all_names(label, names, tied)
        for label, found in names.items()
    }


def _all_names(label: str, names: Mapping[str, Sequence[str]], tied: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return a tensor's parameter names, less those that another stored tensor stands for."""
    elsewhere = {name for other, found in names.items() if other != label for name in found}
    return tuple(name for name in tied.get(label, (label,)) if name not in elsewhere)


def _record(
    variable: NnefVariable, plan: CompressionPlan, source: TensorSource, replaced: bool, weighed: bool
) -> TensorRecord:
    label = variable.label
    quantized = label in plan.formats
    algorithm = plan.algorithms.get(label, "")
    if algorithm in CALIBRATED_ALGORITHMS and not replaced and not weighed:
        algorithm = DEFAULT_ALGORITHM
    if isinstance(source, StoredQ4):
        algorithm = KEPT_BLOCKS
    return TensorRecord(
        label=label,
        parameters=plan.parameters.get(label, (label,)) if variable.part is None else (variable.part.parameter,),
        shape=variable.shape,
        scheme=variable.dtype,
        algorithm=algorithm,
        bytes=source.nbytes,
        axes=plan.axes.get(label) if quantized else None,
        part=variable.part,
        replaced=replaced,
        kept="" if quantized else plan.kept.get(label, ""),
    )
