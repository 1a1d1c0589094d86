"""`StoredGraph`: a graph of a model as it is written, and a record of each of its tensors.

In: a `ModelGraph` with document and sources. Out: what the writer reads, and the entries of `export.json`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from generic_export.documents import module_classes
from generic_export.nnef.composition import compose
from generic_export.weights.part import TensorPart
from generic_export.write.document import ArchivePlan, plan_document
from quant.recipe import RECIPE_FILE, Recipe, recipe_text
from quant.stream import QuantizationError, QuantizationReport
from t2n_llm.model_graph import ModelGraph
from t2n_llm.weights.archive_weights import ArchiveWeights


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
class StoredGraph:
    """A graph as it is written.

    Attributes:
        model: its document and sources are those of the archive.
        notes: facts about a checkpoint that is quantised already, for the user.
        recipe: the compression; None when every tensor is plain.
        records: of each tensor of a compressed graph.
        warnings: about the recipe, such as rules that match nothing.
        errors: filled while the sources are streamed.
    """

    model: ModelGraph
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None
    records: tuple[TensorRecord, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: QuantizationReport = field(default_factory=QuantizationReport)

    @cached_property
    def plan(self) -> ArchivePlan:
        """The sizes of the archive."""
        return plan_document(self.model.document, self.model.sources)

    @property
    def measured_errors(self) -> MutableMapping[str, QuantizationError] | None:
        """Quantisation error of each tensor, filled while the sources are streamed; None when every tensor is plain."""
        return self.errors.errors if self.recipe is not None else None

    def with_fragments(self) -> StoredGraph:
        """Return the graph with repeated layers as NNEF fragments, named after the classes of their modules."""
        document = compose(self.model.document, module_classes(self.model.network)).composed
        return replace(self, model=replace(self.model, nnef=document))

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

    def weights_in(self, archive: Path) -> ArchiveWeights | None:
        """Return the tensors of the written archive whose values are not the checkpoint's; None when every tensor is plain."""
        if self.recipe is None:
            return None
        return ArchiveWeights.of_records(archive, [asdict(record) for record in self.records])

    def summary(self) -> dict[str, Any] | None:
        """Return the entry of `export.json`: recipe, size and each tensor; None when every tensor is plain."""
        if self.recipe is None:
            return None
        records = self.measured_records()
        total, values = sum(record.bytes for record in records), sum(record.values for record in records)
        return {
            "recipe": self.recipe.asdict(),
            "bytes": total,
            "bits_per_weight": 8 * total / max(1, values),
            "tensors": [asdict(record) | {"bits_per_weight": record.bits_per_weight} for record in records],
        }

    def write_recipe(self, folder: Path) -> None:
        """Write the recipe beside the archive, when there is one."""
        if self.recipe is not None:
            (folder / RECIPE_FILE).write_text(recipe_text(self.recipe), encoding="utf-8")


def summary_of(graphs: Sequence[StoredGraph]) -> dict[str, Any] | None:
    """Return the entry of `export.json` for several archives; a tensor that two hold counts once."""
    summaries = [summary for graph in graphs if (summary := graph.summary()) is not None]
    if len(summaries) < 2:
        return summaries[0] if summaries else None
    tensors = {record["label"]: record for summary in reversed(summaries) for record in summary["tensors"]}
    total = sum(record["bytes"] for record in tensors.values())
    values = sum(math.prod(record["shape"]) for record in tensors.values())
    return {
        "recipe": summaries[0]["recipe"],
        "bytes": total,
        "bits_per_weight": 8 * total / max(1, values),
        "tensors": list(tensors.values()),
    }


__all__ = ["StoredGraph", "TensorRecord", "summary_of"]
