"""How the tensors of an export are stored: plain, compressed as asked, or in the blocks that the checkpoint has already.

In: `ModelGraph`s with sources. Out: a `StoredGraph` for each, whose sources live as long as a `with` block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from generic_export.devices import CPU
from generic_export.errors import OptionError
from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.long_reductions import split_long_reductions
from generic_export.nnef.rounding_products import round_in_products
from generic_export.nnef.weights_in_memory import widen_weights
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.half import CastTensor
from generic_export.weights.source import RenamedTensor, TensorSource
from quant.prequantized import DecodedTensor, ExactTensor
from quant.recipe import Choice, Recipe, Rule
from quant.stream import PermutedTensor, QuantizedTensor
from t2n_llm.compress.apply import compress
from t2n_llm.compress.calibration import Calibration
from t2n_llm.compress.compressed import Workspace, compressed
from t2n_llm.compress.plan import head_names, plan_compression
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.compress.stored_graph import StoredGraph
from t2n_llm.model_graph import ModelGraph
from t2n_llm.reporter import Reporter
from t2n_llm.source.hub import ModelSource

AS_STORED = "as stored"
"""Name of the recipe of an export that was asked for none and whose checkpoint holds Q4_0's values."""

_EXAMPLES = 2


@contextmanager
def store_graphs(
    options: CompressionOptions,
    source: ModelSource,
    checkpoint: Checkpoint,
    calibration: Calibration,
    parts: Sequence[ModelGraph],
    reporter: Reporter,
    *,
    workspace: Workspace,
    devices: Sequence[str] = (CPU,),
    dry: bool = False,
) -> Iterator[tuple[StoredGraph, ...]]:
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
        graphs = tuple(
            _stored(options, checkpoint, stored if options.recipe() is not None else _kept_as_stored(stored), devices)
            for stored in compressions
        )
        _refuse_nothing_to_widen(options.weights_in_memory, graphs)
        yield graphs


def _refuse_nothing_to_widen(dtype: str, graphs: Sequence[StoredGraph]) -> None:
    """Refuse weights in memory of a type in which, or in a wider one, the archives have them all."""
    stored = {variable.dtype for graph in graphs for variable in graph.model.document.variables}
    if dtype == "f16" and stored.isdisjoint(BLOCK_FORMATS):
        raise OptionError("--weights-in-memory f16: no tensor is stored in fewer bits.", "Add --compress q4_0.")
    if dtype == "f32" and stored.isdisjoint({"f16", *BLOCK_FORMATS}):
        raise OptionError(
            "--weights-in-memory f32: the weights are stored in f32 already.", "Omit it, or omit --dtype f32."
        )


def _stored(
    options: CompressionOptions, checkpoint: Checkpoint, stored: StoredGraph, devices: Sequence[str]
) -> StoredGraph:
    document = _in_memory(round_in_products(stored.model.document), stored.model, options.weights_in_memory)
    if CPU in devices:
        document = split_long_reductions(document)
    again = _quantized_again(stored)
    notes = (*checkpoint.notes, *([again] if again is not None else []))
    return replace(stored, model=replace(stored.model, nnef=document), notes=notes)


def _in_memory(graph: NnefGraph, model: ModelGraph, dtype: str) -> NnefGraph:
    """Return the graph whose products read weights as they are to lie in the engine's memory."""
    if dtype == "stored":
        return graph
    return widen_weights(graph, dtype, kept=head_names(model) if dtype == "f32" else ())


# --- checkpoints that are quantised already --------------------------------------------------------


def _kept_as_stored(plain: StoredGraph) -> StoredGraph:
    """Return a plain graph with every tensor that is exactly Q4_0 in the blocks of the checkpoint."""
    model = plain.model
    exact = [label for label, source in model.sources.items() if _is_exact(source)]
    if not exact:
        return plain
    names = dict.fromkeys(name for label in exact for name in (label, *_other_names(label, model.tied)))
    recipe = Recipe(AS_STORED, tuple(Rule(name, Choice("q4_0")) for name in names))
    return replace(compress(plan_compression(recipe, model), model), warnings=())


def _is_exact(source: TensorSource) -> bool:
    """Say whether a source's values are exactly those of Q4_0 blocks that the checkpoint holds."""
    return isinstance(_in_checkpoint(source), ExactTensor)


def _quantized_again(graph: StoredGraph) -> str | None:
    """Return a warning that names the tensors that lose values for the second time, or None."""
    names = [
        label
        for label, source in graph.model.sources.items()
        if isinstance(source, QuantizedTensor)
        and isinstance(stored := _in_checkpoint(source.source), DecodedTensor)
        and stored.was_quantized
    ]
    if not names:
        return None
    some = ", ".join(names[:_EXAMPLES]) + (", ..." if len(names) > _EXAMPLES else "")
    return (
        f"{len(names)} tensor{'s' * (len(names) > 1)} ({some}) were quantized in another format before; Q4_0 "
        "adds its own error. The original checkpoint gives a more accurate archive."
    )


def _in_checkpoint(source: TensorSource) -> TensorSource:
    """Return a source as the checkpoint has it, whatever is done to it on the way."""
    while isinstance(source, CastTensor | RenamedTensor | PermutedTensor):
        source = source.source
    return source


def _other_names(label: str, tied: Mapping[str, str]) -> list[str]:
    """Return the other names of a tied parameter."""
    owner = tied.get(label, label)
    return [name for name in (owner, *(name for name, of in tied.items() if of == owner)) if name != label]
