"""Which checkpoint tensor is which model parameter, and how its bytes become the graph's element type.

In: a checkpoint, a model without weights, a document's variables. Out: a source for each variable, and the names of the
checkpoint tensors that have no parameter. Names and conversions are those of transformers' own tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch
from torch import nn

from generic_export.errors import MissingTensorError, WeightError
from generic_export.nnef.dtypes import TRACT_DTYPES
from generic_export.nnef.graph import NnefVariable
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.half import CastReport, cast_tensor, watched_tensor
from generic_export.weights.part import part_source
from generic_export.weights.source import FileTensor, InMemoryTensor, TensorSource
from quant.factors import multiplied
from quant.prequantized import DecodedTensor, ExactTensor
from t2n_llm.compat import superfluous_names
from t2n_llm.source.adapter_merge import Update
from t2n_llm.source.empty_model import names_shared
from t2n_llm.weights.conversion import ConvertedTensor, RecordedTensor, record

_TORCH_DTYPES = {name: dtype for dtype, name in TRACT_DTYPES.items()}

# Buffers that models once saved and now compute; transformers makes the same exception for every family.
_COMPUTED_BUFFERS = r"rotary_emb\.inv_freq$|(^|\.)position_ids$"


@dataclass(frozen=True)
class ParameterMatch:
    """Checkpoint tensors under the names of the model's parameters.

    Attributes:
        tensors: parameter or persistent buffer -> its values as stored, converted where the names do not map one to one.
        unclaimed: checkpoint tensors that are no parameter, nor part of one, in their own names.
    """

    tensors: Mapping[str, TensorSource]
    unclaimed: tuple[str, ...]


@dataclass(frozen=True)
class ParameterSources:
    """The values of a model's parameters and buffers, before any cast.

    Attributes:
        match: the checkpoint under the model's names.
        network: the model.
        tied: alias -> name of the parameter that it shares.
        buffers: values of the buffers that the model computes itself.
        files: number of files of the checkpoint.
        updates: what an adapter changes, by parameter.
    """

    match: ParameterMatch
    network: nn.Module
    tied: Mapping[str, str]
    buffers: Mapping[str, torch.Tensor]
    files: int
    updates: Mapping[str, Update]

    @staticmethod
    def of(
        network: nn.Module,
        tied: Mapping[str, str],
        buffers: Mapping[str, torch.Tensor],
        checkpoint: Checkpoint | None = None,
        updates: Mapping[str, Update] | None = None,
    ) -> ParameterSources:
        """Find a model's tensors in a checkpoint; None has none. Nothing is read.

        Raises:
            WeightError: tensors that belong together do not fit together.
        """
        if checkpoint is None:
            return ParameterSources(ParameterMatch({}, ()), network, tied, buffers, 0, {})
        match = match_parameters(network, checkpoint.tensors)
        return ParameterSources(match, network, tied, buffers, len(checkpoint.files), updates or {})

    def find(self, parameter: str) -> TensorSource:
        """Return the source of a parameter or buffer.

        Raises:
            MissingTensorError: neither the checkpoint nor the model has it.
        """
        found = self._stored(parameter)
        if found is None and parameter in self.buffers:
            found = InMemoryTensor(parameter, self.buffers[parameter])
        if found is None:
            raise _missing(parameter, self.files, self.match.unclaimed)
        update = self.updates.get(parameter)
        return found if update is None else update.apply(found)

    def of_variables(self, variables: Iterable[NnefVariable], report: CastReport) -> dict[str, TensorSource]:
        """Return the source of each variable of a document by label, cast to the dtype that the document reads.

        Args:
            variables: of the document; they have the names of the model's parameters.
            report: filled, while the sources are streamed, with the values that do not fit f16 or are not finite.

        Raises:
            MissingTensorError: neither the checkpoint nor the model has one.
        """
        sources: dict[str, TensorSource] = {}
        for variable in variables:
            found = self.find(variable.parameter)
            if variable.part is not None:
                found = part_source(variable.label, variable.part, found)
            # A mask that the model computes itself may well hold -inf.
            stored = cast_tensor if self._is_computed(variable.parameter) else watched_tensor
            found = multiplied(found, variable.factor)
            sources[variable.label] = stored(found, _TORCH_DTYPES[variable.dtype], report)
        return sources

    @property
    def unused(self) -> tuple[str, ...]:
        """Checkpoint tensors that no parameter is made of, sorted, without those that the model's class declares superfluous."""
        return _unexpected(self.network, self.match.unclaimed)

    def _is_computed(self, parameter: str) -> bool:
        """Say whether the values are the model's own, and not the checkpoint's."""
        return self._stored(parameter) is None and parameter in self.buffers

    def _stored(self, parameter: str) -> TensorSource | None:
        names = (parameter, *self._shared.get(parameter, ()))
        return next((self.match.tensors[name] for name in names if name in self.match.tensors), None)

    @cached_property
    def _shared(self) -> Mapping[str, Sequence[str]]:
        return names_shared(self.tied)


def _unexpected(model: nn.Module, unclaimed: Sequence[str]) -> tuple[str, ...]:
    """Leave out what the model's class knows to be superfluous."""
    patterns = (*superfluous_names(model), _COMPUTED_BUFFERS)
    superfluous = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return tuple(name for name in sorted(unclaimed) if not superfluous.search(name))


def _missing(name: str, files: int, unclaimed: Sequence[str]) -> MissingTensorError:
    """Return the error for a parameter that has no tensor; `unclaimed` are the tensors that have no parameter."""
    near = get_close_matches(name, unclaimed, n=1, cutoff=0.5)
    hint = "The checkpoint is incomplete, or does not fit this config."
    return MissingTensorError(
        f"the checkpoint ({files} file{'s' * (files > 1)}) has no tensor {name!r}.",
        f"The most similar name is {near[0]!r}." if near else hint,
    )


# --- names ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Checkpoint tensors that are converted together.

    Attributes:
        target: the parameter they become, the first one where they become several.
        converter: transformers' rule.
        members: pattern of the rule -> the names that matched it and their tensors, in transformers' order.
    """

    target: str
    converter: Any
    members: dict[str, list[tuple[str, TensorSource]]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for members in self.members.values() for name, _ in members)


def match_parameters(model: nn.Module, tensors: Mapping[str, TensorSource]) -> ParameterMatch:
    """Return the checkpoint's tensors under the names of the model's parameters; nothing is read.

    The order of steps is that of transformers' own loader (`core_model_loading`, 5.23): renamings, then at most one
    converter, then the base model's prefix; names that only a renaming estranges keep their own.

    Args:
        model: a transformers model, on the meta device.
        tensors: by checkpoint name.

    Raises:
        MissingTensorError: a part of a parameter made of several tensors is not there.
        WeightError: parts do not fit together.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, parameters = getattr(model, "base_model_prefix", None), model.state_dict()

    direct: dict[str, TensorSource] = {}
    groups: dict[str, _Group] = {}
    unclaimed: list[str] = []
    for key in sorted(tensors, key=dot_natural_key):
        tensor = tensors[key]
        name, pattern = rename_source_key(key, renamings, converters, prefix, parameters)
        if name not in parameters and key in parameters:
            name, pattern = rename_source_key(key, [], [], prefix, parameters)
        if name not in parameters or (pattern is None and (name in direct or name in groups)):
            unclaimed.append(key)
        elif pattern is None:
            direct[name] = _named(tensor, name)
        elif name in direct:
            unclaimed.append(key)
        else:
            group = groups.setdefault(name, _Group(name, by_pattern[pattern], {}))
            group.members.setdefault(pattern, []).append((key, tensor))
    for group in groups.values():
        direct |= _convert(group, model, parameters)
    return ParameterMatch(direct, tuple(sorted(unclaimed)))


def _named(source: TensorSource, name: str) -> TensorSource:
    """Return the source under its parameter's name, which is what warnings about its values should say."""
    if source.name != name and isinstance(source, FileTensor | InMemoryTensor | DecodedTensor | ExactTensor):
        return replace(source, name=name)
    return source


# --- conversions ------------------------------------------------------------------------------


def _convert(group: _Group, model: nn.Module, parameters: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Return the parameters that one group of tensors becomes, as sources that convert while they stream."""
    from copy import deepcopy

    converter = deepcopy(group.converter)
    for pattern, members in group.members.items():
        for name, tensor in members:
            converter.add_tensor(group.target, name, pattern, record(tensor))
    try:
        made = converter.convert(group.target, model=model, config=model.config)
    except Exception as error:  # the operations check nothing: stacking what differs, a pattern without tensors
        raise _unconvertible(group, parameters, str(error)) from error
    converted: dict[str, TensorSource] = {}
    for name, value in made.items():
        recorded = value[0] if isinstance(value, list) else value
        if name not in parameters:
            continue
        source = ConvertedTensor(name, _checked(recorded, name, group), group.names)
        if source.shape != tuple(parameters[name].shape):
            raise _unconvertible(group, parameters, f"they make {list(source.shape)}")
        converted[name] = source if source.plain is None else _named(source.plain, name)
    return converted


def _checked(value: Any, name: str, group: _Group) -> RecordedTensor:
    if not isinstance(value, RecordedTensor):
        raise WeightError(
            f"tensor {name}: transformers' conversion of {group.names[0]} returned no tensor.",
            "Load the model with transformers and save it again with save_pretrained.",
        )
    return value


def _unconvertible(group: _Group, parameters: Mapping[str, Any], reason: str) -> WeightError:
    """Return the error for a group that does not make its parameter: what is missing, if anything is."""
    missing = _missing_member(group)
    if missing is not None:
        return MissingTensorError(
            f"the checkpoint has no tensor {missing!r}, a part of {group.target}.",
            "The checkpoint is incomplete, or does not fit this config.",
        )
    return WeightError(
        f"tensor {group.target} of shape {list(parameters[group.target].shape)} cannot be built from "
        f"{len(group.names)} checkpoint tensors ({group.names[0]} and others): {reason.splitlines()[0]}.",
        "The checkpoint does not fit this config.",
    )


def _missing_member(group: _Group) -> str | None:
    """Return the first name that the others call for: an expert that one pattern has and another has not, or a gap."""
    numbered = {
        pattern: {number: name for name, _ in members if (number := _number(pattern, name)) is not None}
        for pattern, members in group.members.items()
    }
    every = {number for members in numbered.values() for number in members}
    for number in range(max(every, default=-1) + 1):
        for members in numbered.values():
            if members and number not in members:
                known, example = next(iter(members.items()))
                return re.sub(rf"(?<=\.){known}(?=\.(?!.*\.{known}\.))", str(number), example)
    for pattern in group.converter.source_patterns:
        if pattern not in group.members:
            return pattern.replace("\\", "")
    return None


def _number(pattern: str, name: str) -> int | None:
    """Return the number that stands for the `*` of a pattern; None for a pattern without."""
    if "*" not in pattern:
        return None
    numbers = re.findall(r"\.(\d+)(?=\.)", name)
    return int(numbers[-1]) if numbers else None
