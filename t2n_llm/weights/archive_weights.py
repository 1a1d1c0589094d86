"""The weights that an archive really holds, put back into a PyTorch model: the judge of a compressed export.

In: the archive and which of its tensors are which parameters. Out: a model in which those parameters have the values that
the engine computes with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.errors import ArchiveError, ValidationError
from generic_export.nnef.dat import BLOCK_FORMATS, HEADER_BYTES, DatHeader, parse_header
from generic_export.read.entries import ArchiveEntry, archive_entries, readable
from generic_export.weights.part import TensorPart
from quant.blocks import TWICE
from quant.packing import dequantize_bytes

# Sixteen levels leave an energy error of about a hundredth; a matrix whose rows are mixed up has one near two.
_FOREIGN_ERROR = 0.5
_DAT = ".dat"


@dataclass(frozen=True)
class StoredParameter:
    """A tensor of an archive, and what it is in the model.

    Attributes:
        label: its name in the archive.
        parameters: the parameters that get its values.
        axes: the order of the parameter's axes in the archive, or None.
        part: what it is of the parameter, or None when it is all of it.
        replaced: calibration changed the values on purpose, so that they need not resemble the checkpoint's.
        factor: what the parameter's values are multiplied with in the archive.
        residual_of: label of the tensor that it is added to, or "".
    """

    label: str
    parameters: tuple[str, ...]
    axes: tuple[int, ...] | None = None
    part: TensorPart | None = None
    replaced: bool = False
    factor: float = 1.0
    residual_of: str = ""


@dataclass(frozen=True)
class ArchiveWeights:
    """Reads the compressed tensors of an archive into a model.

    Attributes:
        archive: a folder, .tar or .tgz.
        tensors: which to read.
        further: the same of archives beside it, which hold other parts of the model.
    """

    archive: Path
    tensors: tuple[StoredParameter, ...]
    further: tuple[ArchiveWeights, ...] = ()

    @staticmethod
    def joined(weights: Sequence[ArchiveWeights]) -> ArchiveWeights | None:
        """Return what several archives hold as one; None of none."""
        return replace(weights[0], further=tuple(weights[1:])) if weights else None

    @staticmethod
    def of_records(archive: Path, records: Sequence[Mapping[str, Any]]) -> ArchiveWeights:
        """Return the tensors that `export.json` records as quantised or replaced."""
        wanted = tuple(
            StoredParameter(
                str(record["label"]),
                tuple(record["parameters"]),
                axes=None if record["axes"] is None else tuple(record["axes"]),
                part=TensorPart.parse(record["part"]) if record.get("part") else None,
                replaced=bool(record["replaced"]),
                factor=float(record.get("factor", 1.0)),
                residual_of=str(record.get("residual_of", "")),
            )
            for record in records
            if record["scheme"] in BLOCK_FORMATS or record["replaced"]
        )
        return ArchiveWeights(archive, wanted)

    def apply(self, model: nn.Module) -> None:
        """Replace the parameters of a model by what the archive holds, in the parameters' own dtype.

        A tied table whose two uses are stored differently is untied.

        Raises:
            ArchiveError: a tensor is missing or damaged.
            ValidationError: the model has no such parameter, or the stored values do not resemble it.
        """
        wanted = {f"{tensor.label}.dat": tensor for tensor in self.tensors}
        early: list[tuple[StoredParameter, torch.Tensor]] = []  # remainders that lie before what they are added to
        for entry in archive_entries(self.archive):
            tensor = wanted.pop(entry.name.removeprefix("./"), None)
            if tensor is not None:
                values = _values(self.archive, entry)
                values = values if tensor.factor == 1.0 else values / tensor.factor
                if f"{tensor.residual_of}.dat" in wanted:
                    early.append((tensor, values))
                else:
                    _place(model, tensor, values)
        for tensor, values in early:
            _place(model, tensor, values)
        if wanted:
            raise ArchiveError(f"{self.archive}: no tensor {next(iter(wanted))!r} in it.", "Export the model again.")
        for other in self.further:
            other.apply(model)


def whole_records(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of `export.json`, the two of a tensor that is stored as a sum joined under the label of the first."""
    whole = {str(record["label"]): dict(record) for record in records}
    for label, rest in list(whole.items()):
        base = whole.get(str(rest.get("residual_of", "")))
        if base is not None:
            base |= {"scheme": TWICE}
            base |= {key: base[key] + rest[key] for key in ("bytes", "bits_per_weight")}
            del whole[label]
    return list(whole.values())


def stored_values(archive: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of an archive, label and dequantised values, in the order in which they lie there.

    Args:
        archive: a folder, .tar or .tgz.

    Raises:
        ArchiveError: it cannot be read.
    """
    for entry in archive_entries(archive):
        name = entry.name.removeprefix("./")
        if name.endswith(_DAT):
            yield name.removesuffix(_DAT), _values(archive, entry)


def _values(archive: Path, entry: ArchiveEntry) -> torch.Tensor:
    with readable(archive):
        header = parse_header(entry.stream.read(HEADER_BYTES), name=f"{archive}: {entry.name}")
        data = bytearray(entry.stream.read(header.data_size))
    if len(data) != header.data_size:
        raise ArchiveError(f"{archive}: {entry.name} ends early.", "Export the model again.")
    return _decoded(header, torch.frombuffer(data, dtype=torch.uint8), entry.name)


def _decoded(header: DatHeader, data: torch.Tensor, name: str) -> torch.Tensor:
    block = header.block_format
    if block is None:
        return data.view(header.element_type(name).dtype).reshape(header.shape)
    return dequantize_bytes(data, block.name).reshape(header.shape)


def _place(model: nn.Module, tensor: StoredParameter, values: torch.Tensor) -> None:
    if tensor.axes is not None:
        values = values.permute(_inverse(tensor.axes)).contiguous()
    for name in tensor.parameters:
        path, _, attribute = name.rpartition(".")
        try:
            owner = model.get_submodule(path)
            old = owner.get_parameter(attribute)
        except AttributeError as error:
            raise ValidationError(
                f"the archive holds {tensor.label}, and the model has no parameter {name}.", "Is it the same model?"
            ) from error
        place, stored = _place_in(old.detach(), tensor.part, values)
        if tuple(place.shape) != tuple(stored.shape):
            raise ValidationError(
                f"{name}: the model has shape {list(place.shape)}, the archive {list(stored.shape)}.",
                "Is it the model that was exported?",
            )
        if tensor.residual_of:
            stored = place + stored
        elif not tensor.replaced:
            _check_resemblance(name, place, stored)
        if tensor.part is None:
            setattr(owner, attribute, nn.Parameter(stored.to(old.dtype), requires_grad=False))
        else:
            place.copy_(stored)


def _place_in(
    parameter: torch.Tensor, part: TensorPart | None, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the view of a parameter that stored values belong to, and those values without padding."""
    if part is None:
        return parameter, values
    if parameter.numel() != math.prod(part.view):
        raise ValidationError(
            f"{part.parameter}: the model has shape {list(parameter.shape)}, the archive a part of {list(part.view)}.",
            "Is it the model that was exported?",
        )
    return part.of(parameter), part.inner(values)


def _check_resemblance(name: str, original: torch.Tensor, values: torch.Tensor) -> None:
    energy = float(original.float().square().sum())
    error = float((values.float() - original.float()).square().sum())
    if energy and error > _FOREIGN_ERROR * energy:
        raise ValidationError(
            f"{name}: the stored values differ from the model's by {error / energy:.2g} of their energy.",
            "Is it the model that was exported? If so, this is a bug of t2n-llm.",
        )


def _inverse(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axes.index(axis) for axis in range(len(axes)))
