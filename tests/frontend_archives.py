"""Front ends of tests: a processor saved as a source's, and the archive that is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import AutoConfig

from generic_export.weights.half import CastReport
from generic_export.write.document import write_document
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.storage import finish_model
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.frontends.frontend import frontend_graphs, frontend_of
from t2n_llm.tasks.frontends.kind import FrontEnd


@dataclass(frozen=True)
class FrontEndArchive:
    """A front end and its archive."""

    front: FrontEnd
    path: Path
    text: str


def source_with(folder: Path, processor: Any, model_type: str, **config: Any) -> ModelSource:
    """Return a source without weights that has a processor."""
    own = Path(mkdtemp(dir=folder))
    processor.save_pretrained(own)
    return ModelSource(str(own), own, None, AutoConfig.for_model(model_type, **config))


def written(
    folder: Path,
    processor: Any,
    model_type: str,
    input_name: str,
    *,
    dtype: str = "f32",
    activations: str = "auto",
    config: dict[str, Any] | None = None,
    **options: Any,
) -> FrontEndArchive:
    """Write the front end of a processor; it must have one."""
    source = source_with(folder, processor, model_type, **(config or {}))
    graph_options = GraphOptions(dtype=dtype, activations=activations, **options)
    front = frontend_of(source, graph_options, input_name)
    assert front is not None
    (captured,) = frontend_graphs(source, graph_options, input_name)
    graph = finish_model(captured, graph_options).with_sources(CastReport())
    archive = Path(mkdtemp(dir=folder)) / "frontend.nnef"
    write_document(archive, graph.document, graph.sources, compression_level=None)
    return FrontEndArchive(front, archive, (archive / "graph.nnef").read_text())
