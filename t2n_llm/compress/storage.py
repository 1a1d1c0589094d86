"""How the tensors of an export are stored: plain, compressed as asked, or in the blocks that the checkpoint has already.

In: `ModelGraph`s with sources. Out: a `StoredGraph` for each, whose sources live as long as a `with` block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from t2n_llm.compress.calibration import Calibration
from t2n_llm.compress.checkpoint_blocks import keep_stored_blocks, quantized_again
from t2n_llm.compress.compressed import Workspace, compressed
from t2n_llm.compress.plan import head_names
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.compress.stored_graph import StoredGraph
from t2n_llm.model_graph import ModelGraph
from t2n_llm.reporter import Reporter
from t2n_llm.source.hub import ModelSource


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
            _stored(
                options, checkpoint, stored if options.recipe() is not None else keep_stored_blocks(stored), devices
            )
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
    again = quantized_again(stored)
    notes = (*checkpoint.notes, *([again] if again is not None else []))
    return replace(stored, model=replace(stored.model, nnef=document), notes=notes)


def _in_memory(graph: NnefGraph, model: ModelGraph, dtype: str) -> NnefGraph:
    """Return the graph whose products read weights as they are to lie in the engine's memory."""
    if dtype == "stored":
        return graph
    return widen_weights(graph, dtype, kept=head_names(model) if dtype == "f32" else ())
