"""How the tensors of an export are stored: plain, compressed as asked, or in the blocks that the checkpoint has already.

In: a captured graph and its sources. Out: the graph and the sources that are written, as long as a `with` block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from generic_export.devices import CPU
from generic_export.documents import module_classes
from generic_export.errors import OptionError
from generic_export.nnef.composition import compose
from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.long_reductions import split_long_reductions
from generic_export.nnef.rounding_products import round_in_products
from generic_export.nnef.weights_in_memory import widen_weights
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.half import CastTensor
from generic_export.weights.source import RenamedTensor, TensorSource
from generic_export.write.document import ArchivePlan, plan_document
from quant.prequantized import DecodedTensor, ExactTensor
from quant.recipe import RECIPE_FILE, Choice, Recipe, Rule, recipe_text
from quant.stream import PermutedTensor, QuantizationError, QuantizedTensor
from t2n_llm.compress.apply import Compression, compress
from t2n_llm.compress.calibration import Calibration
from t2n_llm.compress.compressed import Captured, Workspace, compressed
from t2n_llm.compress.plan import head_names, plan_compression
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.reporter import Reporter
from t2n_llm.source.empty_model import Weightless
from t2n_llm.source.hub import ModelSource
from t2n_llm.weights.archive_weights import ArchiveWeights

AS_STORED = "as stored"
"""Name of the recipe of an export that was asked for none and whose checkpoint holds Q4_0's values."""

_EXAMPLES = 2


@dataclass(frozen=True)
class StoredForm:
    """What an archive will hold.

    Attributes:
        graph, sources: as they are written.
        plan: the sizes.
        compression: None when everything is plain.
        notes: what a user should know of a checkpoint that is quantised already.
    """

    graph: NnefGraph
    sources: Mapping[str, TensorSource]
    plan: ArchivePlan
    compression: Compression | None
    notes: tuple[str, ...]

    @property
    def errors(self) -> MutableMapping[str, QuantizationError] | None:
        """What quantising does to each tensor, filled while the sources are streamed; None when everything is plain."""
        return self.compression.errors.errors if self.compression is not None else None

    def composed(self, network: nn.Module) -> StoredForm:
        """Return the same with what is repeated in the graph as fragments, named after the classes of its modules."""
        graph = compose(self.graph, module_classes(network)).composed
        return replace(self, graph=graph, plan=plan_document(graph, self.sources))

    @property
    def needed(self) -> frozenset[str]:
        """The parameters that the archive holds."""
        return frozenset(variable.parameter for variable in self.graph.variables)

    def overrides(self, archive: Path) -> ArchiveWeights | None:
        """Return the values of a written archive that are not those of the checkpoint."""
        return self.compression.weights_in(archive) if self.compression is not None else None

    def summary(self) -> dict[str, Any] | None:
        """Return what `export.json` says of the compression."""
        return self.compression.summary() if self.compression is not None else None

    def write_recipe(self, folder: Path) -> None:
        """Write the recipe beside the archive, when there is one."""
        if self.compression is not None:
            (folder / RECIPE_FILE).write_text(recipe_text(self.compression.recipe), encoding="utf-8")


def summary_of(forms: Sequence[StoredForm]) -> dict[str, Any] | None:
    """Return what `export.json` says of the compression of archives together; a tensor that two hold counts once."""
    summaries = [form.summary() for form in forms if form.compression is not None]
    if len(summaries) < 2:
        return summaries[0] if summaries else None
    tensors = {record["label"]: record for summary in reversed(summaries) for record in (summary or {})["tensors"]}
    total, values = sum(each["bytes"] for each in tensors.values()), sum(map(_values, tensors.values()))
    return {
        "recipe": (summaries[0] or {})["recipe"],
        "bytes": total,
        "bits_per_weight": 8 * total / max(1, values),
        "tensors": list(tensors.values()),
    }


def _values(record: Mapping[str, Any]) -> int:
    return prod(record["shape"])


@contextmanager
def stored_forms(
    options: CompressionOptions,
    source: ModelSource,
    checkpoint: Checkpoint,
    calibration: Calibration,
    parts: Sequence[Captured],
    reporter: Reporter,
    *,
    workspace: Workspace,
    devices: Sequence[str] = (CPU,),
    dry: bool = False,
) -> Iterator[tuple[StoredForm, ...]]:
    """Yield how the tensors of each archive of a model are stored.

    Args:
        options: the compression that was asked for; without one, blocks of the checkpoint that are exactly Q4_0 stay.
        source, checkpoint: the model.
        calibration: runs it, where a recipe wants that.
        parts: the archives, as an export without compression would write them.
        reporter: told the stages and what a user should know.
        workspace: used if something is calibrated.
        devices: that compute.
        dry: calibrate nothing; sizes are the same.

    Raises:
        OptionError: the recipe does not fit the model.
        WeightError: a tensor cannot be quantised.
    """
    with compressed(options, source, calibration, parts, reporter, workspace=workspace, dry=dry) as compressions:
        forms = tuple(
            _stored_form(options, checkpoint, part, compression, devices)
            for part, compression in zip(parts, compressions, strict=True)
        )
        _refuse_nothing_to_widen(options.weights_in_memory, forms)
        yield forms


def _refuse_nothing_to_widen(dtype: str, forms: Sequence[StoredForm]) -> None:
    """Refuse weights in memory of a type in which, or in a wider one, the archives have them all."""
    stored = {variable.dtype for form in forms for variable in form.graph.variables}
    if dtype == "f16" and stored.isdisjoint(BLOCK_FORMATS):
        raise OptionError("--weights-in-memory f16: no tensor is stored in fewer bits.", "Add --compress q4_0.")
    if dtype == "f32" and stored.isdisjoint({"f16", *BLOCK_FORMATS}):
        raise OptionError(
            "--weights-in-memory f32: the weights are stored in f32 already.", "Omit it, or omit --dtype f32."
        )


def _stored_form(
    options: CompressionOptions,
    checkpoint: Checkpoint,
    part: Captured,
    compression: Compression | None,
    devices: Sequence[str],
) -> StoredForm:
    if options.recipe() is None:
        compression = _kept_as_stored(part.skeleton, part.graph, part.sources)
    graph, sources = (part.graph, part.sources) if compression is None else (compression.graph, compression.sources)
    graph = _in_memory(round_in_products(graph), part.skeleton, options.weights_in_memory)
    if CPU in devices:
        graph = split_long_reductions(graph)
    notes = checkpoint.notes
    if compression is not None:
        again = _quantized_again(compression)
        notes = (*notes, *([again] if again is not None else []))
        compression = replace(compression, graph=graph)
    return StoredForm(graph, sources, plan_document(graph, sources), compression, notes)


def plain_form(graph: NnefGraph, sources: Mapping[str, TensorSource]) -> StoredForm:
    """Return how tensors that nobody compresses are stored: as they are."""
    return StoredForm(graph, sources, plan_document(graph, sources), None, ())


def _in_memory(graph: NnefGraph, skeleton: Weightless, dtype: str) -> NnefGraph:
    """Return the graph whose products read weights as they are to lie in the engine's memory."""
    if dtype == "stored":
        return graph
    return widen_weights(graph, dtype, kept=head_names(skeleton) if dtype == "f32" else ())


# --- checkpoints that are quantised already --------------------------------------------------------


def _kept_as_stored(skeleton: Weightless, graph: NnefGraph, sources: Mapping[str, TensorSource]) -> Compression | None:
    """Return what stores every tensor that is exactly Q4_0 as it is and leaves the others plain; None when none is.

    Args:
        skeleton, graph, sources: as an export without compression would write them.
    """
    exact = [label for label, source in sources.items() if _is_exact(source)]
    if not exact:
        return None
    names = dict.fromkeys(name for label in exact for name in (label, *_other_names(label, skeleton)))
    recipe = Recipe(AS_STORED, tuple(Rule(name, Choice("q4_0")) for name in names))
    return replace(compress(plan_compression(recipe, skeleton, graph, sources), sources), warnings=())


def _is_exact(source: TensorSource) -> bool:
    """Say whether a source's values are exactly those of Q4_0 blocks that the checkpoint holds."""
    return isinstance(_stored(source), ExactTensor)


def _quantized_again(compression: Compression) -> str | None:
    """Return a warning that names the tensors that lose values for the second time, or None."""
    names = [
        label
        for label, source in compression.sources.items()
        if isinstance(source, QuantizedTensor)
        and isinstance(stored := _stored(source.source), DecodedTensor)
        and stored.was_quantized
    ]
    if not names:
        return None
    some = ", ".join(names[:_EXAMPLES]) + (", ..." if len(names) > _EXAMPLES else "")
    return (
        f"{len(names)} tensor{'s' * (len(names) > 1)} ({some}) were quantized in another format before; Q4_0 "
        "adds its own error. The original checkpoint gives a more accurate archive."
    )


def _stored(source: TensorSource) -> TensorSource:
    """Return a source as the checkpoint has it, whatever is done to it on the way."""
    while isinstance(source, CastTensor | RenamedTensor | PermutedTensor):
        source = source.source
    return source


def _other_names(label: str, skeleton: Weightless) -> list[str]:
    """Return the other names of a tied parameter."""
    owner = skeleton.tied.get(label, label)
    return [name for name in (owner, *(name for name, of in skeleton.tied.items() if of == owner)) if name != label]
