"""Where PyTorch's f32 and ours disagree, PyTorch's float64 decides: one pass over the whole text, without a cache between calls.

In: a checkpoint that the zoo made, its export, and the tokens that the checks decoded. Out: the same checks against float64. Random
weights can make sums that f32 does not hold to four digits: a single-pass export may then be as far off as PyTorch's own f32 is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.compat import TorchDispatchMode
from kvcache.forms import state_form
from t2n_llm.check.agreement import Tolerance, ValidationReport
from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.check.llm_checks import validate_archive
from t2n_llm.check.reference import ReferenceRun, plan_check, run_reference
from t2n_llm.check.runner import open_runner
from t2n_llm.export.folder import archive_in, read_manifest
from t2n_llm.graph.interface import recorded_states
from t2n_llm.source.hub import open_source
from t2n_llm.tasks.heads.cases import HeadCase, plan_cases
from t2n_llm.tasks.heads.check import check_head, compared
from t2n_llm.tasks.heads.image_size import image_size_of
from t2n_llm.tasks.heads.inputs import BATCH, reading_of
from t2n_llm.tasks.heads.model import answers_of
from t2n_llm.tasks.heads.pooling import Pooling, pooling_of
from t2n_llm.tasks.heads.table import HEADS, kind_of
from t2n_llm.weights.f32_model import eager_model, load_f32

AS_FAR_OFF = 4.0  # of PyTorch's own f32: sums in another order are about as far off
NO_JUDGE = 1e-2  # where PyTorch's own f32 is further off than this, agreement says nothing


def float64_report(checkpoint: Path, export: Path, decode_steps: int) -> ValidationReport:
    """Run the four checks of an f32 export against PyTorch in float64.

    Sums in another order are not the only way for f32 to be off: transformers' own step of a recurrence may differ from its
    pass over a sequence (Zamba-2 and Nemotron-H clamp the step size in the latter alone). One pass is what both stand for.

    Args:
        checkpoint: folder of config and safetensors, small enough for memory.
        export: folder that `export_llm` made of it in f32, or kept because its validation failed.
        decode_steps: tokens that are decoded.

    Raises:
        Exception: whatever PyTorch raises, for instance for an operator that float64 does not have.
    """
    model = load_f32(checkpoint)
    reference = run_reference(checkpoint, plan_check(model.config, None, decode_steps))
    manifest = read_manifest(export)
    with open_runner(archive_in(export, manifest), recorded_states(manifest), "f32") as runner:
        return validate_archive(runner, _in_float64(model, reference), "f32")


def head_float64_report(checkpoint: Path, export: Path, task: str) -> ValidationReport:
    """Run the check of a single-pass f32 export against PyTorch in float64.

    The tolerance is that of f32, or four times what PyTorch's own f32 is off where that is more, and never over one percent.

    Args:
        checkpoint: folder of config and safetensors, small enough for memory.
        export: folder that `export_llm` made of it in f32, or kept because its validation failed.
        task: of the table.

    Raises:
        Exception: whatever PyTorch raises, for instance for an operator that float64 does not have.
    """
    head, manifest = HEADS[task], read_manifest(export)
    source = open_source(str(checkpoint), require_tokenizer=False)
    model, _ = eager_model(kind_of(head, source.config), checkpoint, trust_remote_code=False)
    reading = reading_of(head, model, image_size_of(source.config, checkpoint))
    cases = plan_cases(head, replace(reading, reads_batches=BATCH in manifest["graph"]["symbols"]), source.config, None)
    pooling, outputs = pooling_of(checkpoint) if head.pooled else None, manifest["graph"]["outputs"]
    with torch.no_grad():
        single = [_asked(model, case, pooling, torch.float32) for case in cases]
        model.double()
        with Doubled():
            expected = [_asked(model, case, pooling, torch.float64) for case in cases]
    steps = [step for each in zip(cases, single, expected, strict=True) for step in compared(head, outputs, *each)]
    tolerance = no_stricter_than(max(step.max_abs_error / step.scale for step in steps))
    with open_archive_session(archive_in(export, manifest)) as answerer:
        return check_head(answerer, head, outputs, "f32", cases, expected, tolerance=tolerance)


def _asked(model: Any, case: HeadCase, pooling: Pooling | None, dtype: torch.dtype) -> dict[str, np.ndarray]:
    given = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    answers = answers_of(model(**given, return_dict=True), given, pooling)
    return {name: tensor.double().numpy() for name, tensor in answers.items()}


def no_stricter_than(own: float) -> Tolerance:
    """Return the tolerance of f32 beside a reference that is itself `own` of the largest value off."""
    usual = Tolerance.for_dtype("f32")
    return replace(usual, rtol=max(usual.rtol, min(AS_FAR_OFF * own, NO_JUDGE)))


def _in_float64(model: Any, reference: ReferenceRun) -> ReferenceRun:
    """Return the run with its logits computed again, for the same tokens."""
    plan = reference.plan
    # The grouped product of experts has no float64 form.
    implement: Callable[[str], None] | None = getattr(model, "set_experts_implementation", None)
    if implement is not None:
        implement("eager")
    model.double()
    decoded = _one_pass(model, [*plan.text_ids[: plan.prompt_length], *reference.greedy_ids[:-1]])
    return replace(
        reference,
        text_logits=_one_pass(model, plan.text_ids),
        greedy_logits=decoded[plan.prompt_length - 1 :],
    )


def _one_pass(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Return the logits [S, vocab] of tokens that are given all at once."""
    with torch.no_grad(), Doubled():
        conversation = state_form(model).conversation(model, windowed=False)
        logits: np.ndarray = conversation.answer(torch.tensor([list(ids)]))[0].numpy()
    return logits


class Doubled(TorchDispatchMode):
    """Makes float64 of what a model asks to have in f32 (norms, softmax, routers, recurrences)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


__all__ = ["AS_FAR_OFF", "NO_JUDGE", "Doubled", "float64_report", "head_float64_report", "no_stricter_than"]
