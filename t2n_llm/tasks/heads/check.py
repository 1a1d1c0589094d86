"""Does the engine say what PyTorch says? A few batches of texts, of several lengths and with padding on either side.

In: a model's folder and its exported archive. Out: a `HeadReport`. transformers' own eager model in f32 is the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.errors import ValidationError
from generic_export.inference_target.tract.engines.cli import write_bundle
from t2n_llm.check.answers import Answerer
from t2n_llm.check.causal_lm import Tolerance
from t2n_llm.check.reference import plan_check
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.heads.model import INPUT_NAMES, HeadTask
from t2n_llm.weights.archive_weights import ArchiveWeights
from t2n_llm.weights.f32_model import dequantized, eager_model, refuse_invented
from t2n_llm.weights.placement import Placement, require_memory


@dataclass(frozen=True)
class HeadCase:
    """Texts that are read together.

    Attributes:
        name: what is special about them.
        input_ids, attention_mask: int64 [B, S].
    """

    name: str
    input_ids: np.ndarray
    attention_mask: np.ndarray

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """By the names of the graph."""
        return dict(zip(INPUT_NAMES, (self.input_ids, self.attention_mask), strict=True))


@dataclass(frozen=True)
class HeadCheck:
    """One case, compared.

    Attributes:
        name: of the case.
        batch, length: of its input.
        max_abs_error: worst value of the output, padding left out.
        scale: largest absolute value that PyTorch gives, at least 1.
        passed: the error is within the tolerance.
    """

    name: str
    batch: int
    length: int
    max_abs_error: float
    scale: float
    passed: bool


@dataclass(frozen=True)
class HeadReport:
    """All cases of one archive with one engine.

    Attributes:
        engine, engine_version: what ran the archive.
        dtype: element type of its graph.
        tolerance: what counts as agreement; its divergence is that of language models.
        checks: one per case.
    """

    engine: str
    engine_version: str
    dtype: str
    tolerance: Tolerance
    checks: tuple[HeadCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether every case agrees."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def failure(self, subject: str, hint: str) -> FailedHeadError:
        """Return the error that says which texts differ; of a report that did not pass."""
        return FailedHeadError(subject, hint, self)

    def asdict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self) | {"passed": self.passed}


class FailedHeadError(ValidationError):
    """A `ValidationError` that carries its report."""

    def __init__(self, subject: str, hint: str, report: HeadReport) -> None:
        bad = next(check for check in report.checks if not check.passed)
        super().__init__(
            f"{subject}: tract disagrees with PyTorch on {bad.name} ({bad.batch} x {bad.length} tokens): max abs error "
            f"{bad.max_abs_error:.3g} of values up to {bad.scale:.3g}.",
            hint,
        )
        self.report = report


def plan_cases(task: HeadTask, config: Any, tokenizer: Any | None, *, batched: bool) -> tuple[HeadCase, ...]:
    """Choose the texts: a long one and a short one alone, and batches that need padding.

    Args:
        task: decides whether padding may be on the left: classifiers may read the first position, whatever is there.
        config: transformers config (vocabulary, position limit, window, padding token).
        tokenizer: turns a text into ids; None draws random ones.
        batched: whether the graph reads several texts at once.
    """
    text = config.get_text_config(decoder=True)
    padding = _padding_id(config)
    # Inside a text the padding token would be padding to models that look for it themselves.
    other = (padding + 1) % text.vocab_size
    ids = [other if token == padding else token for token in plan_check(config, tokenizer).text_ids]
    if text.model_type in _OFFSET_POSITIONS:
        ids = ids[: max(2, text.max_position_embeddings - padding - 1)]
    long, half, short = len(ids), max(1, len(ids) // 2), max(1, len(ids) // 5)
    cases = [_case("a long text", ids, [long]), _case("a short text", ids, [short])]
    if batched:
        cases += [
            _case("a batch without padding", ids, [half, half], padding),
            _case("a batch padded on the right", ids, [long, 1, half], padding),
        ]
    if batched and task.per_token:
        cases.append(_case("a batch padded on the left", ids, [short, half], padding, left=True))
    return tuple(cases)


_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm"})
"""Families that count positions from the one after the padding token's number."""


def _case(name: str, ids: Sequence[int], lengths: Sequence[int], padding: int = 0, *, left: bool = False) -> HeadCase:
    """Return a batch whose row i is a text of `lengths[i]` ids, each from another place."""
    width = max(lengths)
    rows = np.full((len(lengths), width), padding, np.int64)
    mask = np.zeros_like(rows)
    for row, length in enumerate(lengths):
        places = slice(width - length, width) if left else slice(0, length)
        rows[row, places] = np.roll(ids, -row)[:length]
        mask[row, places] = 1
    return HeadCase(name, rows, mask)


def _padding_id(config: Any) -> int:
    """Return what stands where there is no text."""
    text = config.get_text_config(decoder=True)
    padding = getattr(config, "pad_token_id", None)
    padding = getattr(text, "pad_token_id", None) if padding is None else padding
    return int(padding) if padding is not None else 0


def run_head_reference(
    source: ModelSource,
    task: HeadTask,
    network: Any,
    needed: frozenset[str],
    cases: Sequence[HeadCase],
    *,
    placement: Placement | None = None,
    overrides: ArchiveWeights | None = None,
) -> list[np.ndarray]:
    """Return what transformers' model says to each case, in f32; the model is released before this returns.

    Args:
        source: the checkpoint.
        task: which output.
        network: the same model without weights, for its class and its size.
        needed: parameters that the checkpoint must have; others, such as a pooler's, are not looked at.
        cases: the texts.
        placement: what the user allows of memory.
        overrides: the weights of a compressed archive, to run with.

    Raises:
        NotEnoughMemoryError: the model does not fit.
        CorruptCheckpointError: transformers had to invent weights that are needed.
    """
    require_memory(network, placement)
    if source.quantization is not None:
        model, missing = dequantized(source, type(network))
    else:
        model, missing = eager_model(task.kind, source.folder, source.trust_remote_code)
    refuse_invented(source.name, needed.intersection(missing))
    if overrides is not None:
        overrides.apply(model)
    with torch.no_grad():
        return [_ask(model, task, case) for case in cases]


def _ask(model: Any, task: HeadTask, case: HeadCase) -> np.ndarray:
    inputs = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    output: np.ndarray = getattr(model(**inputs), task.output).float().numpy()
    return output


def check_head(
    answerer: Answerer,
    task: HeadTask,
    dtype: str,
    cases: Sequence[HeadCase],
    expected: Sequence[np.ndarray],
    *,
    tolerance: Tolerance | None = None,
    on_case: Callable[[str], None] | None = None,
) -> HeadReport:
    """Compare an archive with what PyTorch said.

    Args:
        answerer: the archive in an engine.
        task: which output.
        dtype: `f32` or `f16`, of the archive.
        cases, expected: the texts, and the output of PyTorch for each.
        tolerance: None takes the element type's.
        on_case: told the name of each case before it runs.

    Raises:
        EngineError: the engine refused the archive, or died.
    """
    tolerance = tolerance or Tolerance.for_dtype(dtype)
    checks = []
    for case, wanted in zip(cases, expected, strict=True):
        if on_case is not None:
            on_case(case.name)
        got = answerer.answer([case.input_ids, case.attention_mask])[0]
        checks.append(_compared(task, case, got, wanted, tolerance))
    return HeadReport(answerer.engine_name, answerer.engine_version, dtype, tolerance, tuple(checks))


def _compared(task: HeadTask, case: HeadCase, got: np.ndarray, wanted: np.ndarray, tolerance: Tolerance) -> HeadCheck:
    batch, length = case.input_ids.shape
    scale = float(max(1.0, np.abs(wanted).max()))
    error = np.inf
    if got.shape == wanted.shape:
        seen = case.attention_mask.astype(bool) if task.per_token else np.ones(batch, bool)
        difference = np.abs(got[seen].astype(np.float64) - wanted[seen])
        error = float(difference.max()) if np.isfinite(difference).all() else np.inf
    limit = tolerance.absolute + tolerance.max_abs_error * scale
    return HeadCheck(case.name, batch, length, error, scale, error <= limit)


def write_head_bundles(folder: Path, task: HeadTask, cases: Sequence[HeadCase], expected: Sequence[np.ndarray]) -> None:
    """Write each case as an npz that tract's command line reads; see `t2n_llm.check.bundles`."""
    for case, wanted in zip(cases, expected, strict=True):
        outputs: Mapping[str, np.ndarray] = {task.output: wanted}
        write_bundle(folder / f"{case.name.replace(' ', '_')}.npz", [case.inputs], outputs)


def bundles_size(task: HeadTask, cases: Sequence[HeadCase], width: int) -> int:
    """Return about how many bytes the bundles take; `width` is that of a row of the output."""
    rows = [case.input_ids.size if task.per_token else len(case.input_ids) for case in cases]
    return sum(16 * case.input_ids.size for case in cases) + 4 * width * sum(rows)
