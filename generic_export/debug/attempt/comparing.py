"""An engine's answers to one call of a piece, compared; where rounding may be to blame, PyTorch's float64 says how much.

In: a piece, a call, what PyTorch and the engine answer. Out: `Metrics`, an output at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from generic_export.capture import as_stored
from generic_export.debug.attempt.judging import Judge
from generic_export.debug.attempt.piece_module import PieceModule
from generic_export.debug.attempt.weights import in_float64
from generic_export.debug.record.recording import RecordedCall
from generic_export.debug.records import Metrics
from generic_export.inference_target.example import ExampleRun, as_array

logger = logging.getLogger(__name__)


def compared(
    judge: Judge, module: PieceModule, call: RecordedCall, example: ExampleRun, answers: Sequence[np.ndarray]
) -> Iterator[Metrics]:
    """Compare every output of a call with PyTorch's."""

    @cache
    def exact() -> list[np.ndarray] | None:
        """Return the outputs computed in float64, when first asked; None where the piece insists on an element type."""
        try:
            with in_float64(module.piece):
                return [as_array(as_stored(tensor)) for tensor in module.answers(call, torch.float64).values()]
        except Exception as error:  # whatever the model's code raises
            logger.info("%s cannot be computed in float64: %s", type(module).__name__, error)
            return None

    triples = zip(example.output_names, answers, example.outputs, strict=True)
    for position, (name, answer, reference) in enumerate(triples):

        def precise(position: int = position) -> np.ndarray | None:
            known = exact()
            return None if known is None else known[position]

        yield judge.metrics(name, call.call.set_index, answer, reference, _dtype_of(call, reference), precise)


def _dtype_of(recorded: RecordedCall, reference: np.ndarray) -> str:
    """Return the element type that PyTorch computes in: bf16 when the piece was recorded in it."""
    recorded_in_bf16 = any(leaf.dtype == "bfloat16" for leaf in (*recorded.call.inputs, *recorded.call.outputs))
    return "bfloat16" if recorded_in_bf16 and reference.dtype == np.float32 else str(reference.dtype)


__all__ = ["compared"]
