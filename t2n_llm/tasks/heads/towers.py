"""A model of texts beside images in three archives: `text` and `image` make vectors, `scores` compares them.

In: its document. Out: three documents that share no weight, and what runs their archives as if they were the whole. Where the
vectors are kept, a new image meets all texts for the price of a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from generic_export.errors import OptionError
from generic_export.nnef.cutting import EXTERNAL, part_of
from generic_export.nnef.graph import ArrayLiteral, Block, DimLiteral, NnefGraph, NnefOperation
from generic_export.read.reading import GraphSignature, read_graph_text, signature_of
from t2n_llm.check.archive_sessions import ArchiveSession, open_archive_session
from t2n_llm.check.options import EngineOptions

TEXT, IMAGE, SCORES = "text", "image", "scores"
TOWERS = (TEXT, IMAGE, SCORES)
"""Their archives, in the order in which they run."""

_PIXELS = "pixel_values"


def cut_into_towers(
    graph: NnefGraph, outputs: Mapping[str, Sequence[int | str | None]], dtype: str
) -> dict[str, NnefGraph]:
    """Return the three documents of one.

    Args:
        graph: the whole.
        outputs: axes of each of its outputs, by name.
        dtype: of the vectors, a tract name.

    Raises:
        OptionError: it has no vectors of texts alone or of images alone.
    """
    alone = {name: part_of(graph, [name]) for name in outputs}
    images = [name for name, part in alone.items() if part.inputs == (_PIXELS,)]
    texts = [name for name, part in alone.items() if part.inputs and _PIXELS not in part.inputs]
    if not (images and texts):
        what = "images" if texts else "texts"
        raise OptionError(f"--towers: no output of the model depends on {what} alone.", "Omit --towers.")
    block = graph.operations[0].block  # of the inputs
    vectors = [_given(name, outputs[name], dtype, block) for name in (*texts, *images)]
    others = [name for name in outputs if name not in (*texts, *images)]
    return {
        TEXT: part_of(graph, texts, name=TEXT),
        IMAGE: part_of(graph, images, name=IMAGE),
        SCORES: part_of(graph, others, vectors, name=SCORES),
    }


def _given(name: str, axes: Sequence[int | str | None], dtype: str, block: Block) -> NnefOperation:
    shape = ArrayLiteral(tuple(axis if isinstance(axis, int) else DimLiteral(str(axis)) for axis in axes))
    note = f"{dtype} [{','.join(str(axis) for axis in axes)}]"
    return NnefOperation(EXTERNAL, (), (("shape", shape), ("datum_type", dtype)), (name,), block, note)


class JoinedTowers:
    """Three archives that answer as one."""

    def __init__(
        self, towers: Sequence[tuple[ArchiveSession, GraphSignature]], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        """Take the archives in their engines, in the order in which they run, and the names of what the whole is asked."""
        self._towers = towers
        self._inputs = inputs
        self._outputs = outputs
        first, _ = towers[0]
        self.engine_name, self.engine_version = first.engine_name, first.engine_version

    def answer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `ArchiveSession.answer`."""
        values = dict(zip(self._inputs, inputs, strict=True))
        for answerer, signature in self._towers:
            answers = answerer.answer([values[name] for name in signature.inputs])
            values |= dict(zip(signature.outputs, answers, strict=True))
        return [values[name] for name in self._outputs]


@contextmanager
def open_archives(
    archives: Mapping[str, Path], inputs: Sequence[str], outputs: Sequence[str], engine: EngineOptions
) -> Iterator[ArchiveSession]:
    """Yield the model in its engine: its one archive, or its three as one.

    Args:
        archives: by role.
        inputs, outputs: of the whole.
        engine: see `open_archive_session`.

    Raises:
        EngineError: the engine refused one.
    """
    if SCORES not in archives:
        with open_archive_session(list(archives.values())[-1], engine) as answerer:  # after that of the front end
            yield answerer
        return
    with ExitStack() as stack:
        opened = [stack.enter_context(open_archive_session(archives[role], engine)) for role in TOWERS]
        signatures = [signature_of(read_graph_text(archives[role])) for role in TOWERS]
        yield JoinedTowers(list(zip(opened, signatures, strict=True)), inputs, outputs)


__all__ = ["TOWERS", "cut_into_towers", "open_archives"]
