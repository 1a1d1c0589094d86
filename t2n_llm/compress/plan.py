"""What a recipe means for one model, before anything is read: which tensors become blocks, chosen by what.

In: a recipe, a `ModelGraph` with sources. Out: a `CompressionPlan` with the graph that reads blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from generic_export.errors import OptionError
from generic_export.nnef.block_storage import StorageUse, may_store, split_products, storage_uses, store_in_blocks
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.half_storage import with_remainders
from generic_export.weights.half import CastTensor
from generic_export.weights.source import TensorSource
from quant.algorithms import BUILT_IN, DEFAULT_ALGORITHM
from quant.blocks import TWICE, scheme_bytes
from quant.budget import Candidate, TargetSize, kept_plain
from quant.protocol import InputStatistics, Quantizer
from quant.recipe import QUANTIZED_SCHEMES, Choice, Recipe, TensorName, choose
from quant.stream import PermutedTensor
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.sensitivity import Inputs, Quantizable, Quantization, Sensitivities
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.empty_model import names_shared

_PLAIN_BYTES = {"f16": 2, "f32": 4}


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
        shared: label of a second tensor -> the label whose values it is made of: of a tied table, or a remainder.
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
        return {label: name for label, name in self.algorithms.items() if name in CALIBRATED}


def plan_compression(
    recipe: Recipe,
    model: ModelGraph,
    algorithms: Mapping[str, Quantizer] = BUILT_IN,
    statistics: Mapping[str, InputStatistics] | None = None,
    divergences: Mapping[str, float] | None = None,
) -> CompressionPlan:
    """Apply a recipe to a graph.

    Args:
        recipe: which tensors become blocks.
        model: with a document of plain tensors, and their sources, which are read only when the recipe has a size to fill.
        algorithms: name -> quantizer, for the sensitivity of tensors.
        statistics: parameter name -> what is known of its inputs, for the same.
        divergences: parameter name -> KL that quantising it alone brings about, where that was measured.

    Raises:
        OptionError: the size asked for cannot be reached, or f32 is asked for in an f16 graph.
        WeightError: a tensor cannot be quantised (inf, nan).
    """
    graph, parts = model.document, _parts(model)
    choices, idle = choose(recipe, [part.name for part in parts])
    _check_plain_schemes(choices, parts, graph)
    kept = {part.name.name: _obstacle(part, choices) for part in parts}
    formats = {name: choices[name].scheme for name, reason in kept.items() if not reason}
    if recipe.target_size is not None:
        quantizers = {name: algorithms.get(choice.algorithm) for name, choice in choices.items()}
        known = Sensitivities(quantizers, statistics or {}, divergences or {})
        for name, scheme in _filling(recipe.target_size, graph, model.sources, parts, formats, known).items():
            formats[name] = scheme
            if not scheme:
                del formats[name]
                kept[name] = "it is among the most sensitive, and the target size leaves room for it"
    graph, parts, shared = _split_parts(graph, parts, formats)
    schemes = {part.label: formats[part.name.name] for part in parts if part.name.name in formats}
    second = {label: f"{label}_remainder" for label, scheme in schemes.items() if scheme == TWICE}
    graph = with_remainders(graph, second)
    stored = schemes | dict.fromkeys((*second, *second.values()), "q4_0")
    return CompressionPlan(
        recipe=recipe,
        graph=store_in_blocks(graph, stored),
        formats=stored,
        algorithms=dict.fromkeys((*second, *second.values()), DEFAULT_ALGORITHM)
        | {label: _algorithm(label, parts, choices) for label, scheme in schemes.items() if scheme == "q4_0"},
        kept={part.label: kept[part.name.name] for part in parts},
        parameters=_parameters(parts, model),
        axes={label: use.axes for label, use in storage_uses(graph).items()},
        shared=shared | {rest: shared.get(label, label) for label, rest in second.items()},
        idle=tuple(idle),
    )


def quantizations(
    recipe: Recipe, model: ModelGraph, algorithms: Mapping[str, Quantizer] = BUILT_IN
) -> dict[str, Quantization]:
    """Return how each parameter would be stored that a recipe quantises, whatever size it has to fill."""
    parts = _parts(model)
    choices, _ = choose(recipe, [part.name for part in parts])
    return {
        part.name.name: _quantization(choices[part.name.name], part.use.axes, algorithms)
        for part in parts
        if not _obstacle(part, choices)
    }


def _quantization(choice: Choice, axes: tuple[int, ...] | None, algorithms: Mapping[str, Quantizer]) -> Quantization:
    calibrated = CALIBRATED.get(choice.algorithm)
    if calibrated is None:
        return Quantization(choice.scheme, algorithms.get(choice.algorithm, BUILT_IN[DEFAULT_ALGORITHM]), axes=axes)
    inputs = Inputs.HESSIAN if calibrated.needs_hessian else Inputs.SQUARES
    return Quantization(choice.scheme, calibrated.quantizer, inputs, axes)


def product_shapes(model: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Return, for the parameters that are weights of products, their shape [..., K] as blocks want it."""
    shapes = {variable.label: variable.shape for variable in model.document.variables}
    return {
        part.name.name: tuple(shapes[part.label][axis] for axis in part.use.axes)
        if part.use.axes is not None
        else shapes[part.label]
        for part in _parts(model)
        if part.use.multiplied
    }


# --- what the recipe says of each tensor ----------------------------------------------------------


def _parts(model: ModelGraph) -> list[_Part]:
    """Return every tensor that blocks could be made of, with its role; a tied table counts as embeddings and as head."""
    embeddings, head = (_weight_name(model.network, f"get_{end}_embeddings") for end in ("input", "output"))
    tied = names_shared(model.tied)
    parts: list[_Part] = []
    for label, use in storage_uses(model.document).items():
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


def head_names(model: ModelGraph) -> tuple[str, ...]:
    """Return every name of the parameter that makes the logits; nothing where a model has no head."""
    name = _weight_name(model.network, "get_output_embeddings")
    if name is None:
        return ()
    stored = model.tied.get(name, name)
    return names_shared(model.tied).get(stored, (stored,))


def _weight_name(network: Any, getter: str) -> str | None:
    try:
        wanted = getattr(network, getter)()
    except (AttributeError, NotImplementedError):  # a model that has no such layer
        return None
    return next((f"{path}.weight" for path, module in network.named_modules() if module is wanted), None)


def _obstacle(part: _Part, choices: Mapping[str, Choice]) -> str:
    """Return why a part stays plain: what stands in the way of the scheme asked for, or that none was."""
    choice = choices.get(part.name.name)
    if choice is None or choice.scheme not in QUANTIZED_SCHEMES:
        return (
            _reason_kept(part, choice)
            or may_store(part.use, "q4_0")
            or "no rule of the recipe matches it; a recipe file can (--recipe)"
        )
    if choice.scheme != TWICE:
        return may_store(part.use, choice.scheme)
    return may_store(part.use, "q4_0") or (
        "" if part.use.addable else "an operation that reads it does not accept two tensors"
    )


def _reason_kept(part: _Part, choice: Choice | None) -> str:
    """Return why a recipe leaves a part plain, and how to change that; "" where no rule names it."""
    if choice is not None:
        return f"the recipe stores it as {choice.scheme}"
    if part.name.role in ("@embeddings", "@head"):
        return "the recipe excludes embeddings and head; q4_0+embeddings includes them"
    return ""


def _check_plain_schemes(choices: Mapping[str, Choice], parts: Sequence[_Part], graph: NnefGraph) -> None:
    halves = {variable.label for variable in graph.variables if variable.dtype == "f16"}
    stored = {part.name.name for part in parts if part.label in halves}
    wide = [name for name, choice in choices.items() if choice.scheme == "f32" and name in stored]
    if wide:
        raise OptionError(
            f"the recipe keeps {wide[0]} in f32, but the graph stores it in f16.",
            f"Add --keep-f32 {wide[0]!r} to the export.",
        )


@dataclass(frozen=True)
class _Fillable:
    """A stored tensor that may take more room than its recipe asks for.

    Attributes:
        names: of its parts.
        quantized_bytes: as the recipe has it.
        twice_bytes: as the sum of two; None where that is not possible, or no smaller than plain.
        plain_bytes: as it is.
        sensitivity: what quantising it costs.
    """

    names: tuple[str, ...]
    quantized_bytes: int
    twice_bytes: int | None
    plain_bytes: int
    sensitivity: float


def _filling(
    target: TargetSize,
    graph: NnefGraph,
    sources: Mapping[str, TensorSource],
    parts: Sequence[_Part],
    formats: Mapping[str, str],
    known: Sensitivities,
) -> dict[str, str]:
    """Return what is stored better than asked for, within the budget: its scheme, or "" of what stays plain.

    What would be in Q4_0 is stored as the sum of two where it can be: that leaves a two-hundredth of the error in nine bits a
    weight, and the room goes further than with 16 bits for what is as good as exact, too. Where all fit so, as many as possible
    are plain.
    """
    tensors, others = _fillables(graph, sources, parts, formats, known)
    budget = TargetSize(target.above(others + sum(each.quantized_bytes for each in tensors.values())))
    chosen = kept_plain(
        [
            Candidate(label, each.twice_bytes or each.plain_bytes, each.quantized_bytes, each.sensitivity)
            for label, each in tensors.items()
        ],
        others,
        budget,
    )
    schemes = {label: TWICE if tensors[label].twice_bytes else "" for label in chosen}
    if len(chosen) == len(tensors):
        twice = {label: each for label, each in tensors.items() if each.twice_bytes}
        plain = others + sum(each.plain_bytes for label, each in tensors.items() if label not in twice)
        better = [
            Candidate(label, each.plain_bytes, each.twice_bytes or 0, each.sensitivity) for label, each in twice.items()
        ]
        schemes |= dict.fromkeys(kept_plain(better, plain, budget), "")
    return {name: scheme for label, scheme in schemes.items() for name in tensors[label].names}


def _fillables(
    graph: NnefGraph,
    sources: Mapping[str, TensorSource],
    parts: Sequence[_Part],
    formats: Mapping[str, str],
    known: Sensitivities,
) -> tuple[dict[str, _Fillable], int]:
    """Return the tensors that a recipe quantises, by label, and the bytes of all others; a tied table is one with its head."""
    variables = {variable.label: variable for variable in graph.variables}
    by_label: dict[str, list[_Part]] = {}
    for part in parts:
        if part.name.name in formats:
            by_label.setdefault(part.label, []).append(part)
    costs = known.of(
        {
            label: Quantizable(
                tuple(member.name for member in members),
                oriented(uncast(sources[label]), members[0].use.axes),
                formats[members[0].name.name],
            )
            for label, members in by_label.items()
        }
    )
    tensors, others = {}, sum(sources[name].nbytes for name in variables if name not in by_label)
    for label, members in by_label.items():
        variable, names = variables[label], tuple(member.name.name for member in members)
        # A table that stays plain for its other use is there anyway: a quantised copy of it only adds to the size.
        alone = all(part.name.name in formats for part in parts if part.label == label)
        plain = math.prod(variable.shape) * _PLAIN_BYTES[variable.dtype] if alone else 0
        twice = scheme_bytes(TWICE, variable.shape)
        addable = all(member.use.addable and formats[member.name.name] == "q4_0" for member in members)
        tensors[label] = _Fillable(
            names,
            scheme_bytes(formats[names[0]], variable.shape),
            twice if addable and twice < plain else None,
            plain,
            costs[label],
        )
        others += 0 if alone else sources[label].nbytes
    return tensors, others


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


def _parameters(parts: Sequence[_Part], model: ModelGraph) -> dict[str, tuple[str, ...]]:
    """Return the names of the model's parameters that each stored tensor stands for."""
    tied = names_shared(model.tied)
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


# --- sources ------------------------------------------------------------------------------------------


def uncast(source: TensorSource) -> TensorSource:
    """Return a source as the checkpoint has it: rounding to f16 first would lose a little."""
    return source.source if isinstance(source, CastTensor) else source


def oriented(source: TensorSource, axes: tuple[int, ...] | None) -> TensorSource:
    return source if axes is None else PermutedTensor(source, axes)
