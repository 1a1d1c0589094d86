"""Does the engine say what PyTorch says? A few batches of texts, of several lengths and with padding on either side.

In: a model's folder and its exported archive. Out: a `ValidationReport`. transformers' own eager model in f32 is the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.inference_target.tract.engines.cli import write_bundle
from t2n_llm.check.agreement import CheckResult, StepResult, Tolerance, ValidationReport
from t2n_llm.check.answers import Answerer
from t2n_llm.check.reference import plan_check
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.heads.model import INPUT_NAMES, Head
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


def plan_cases(head: Head, config: Any, tokenizer: Any | None, *, batched: bool) -> tuple[HeadCase, ...]:
    """Choose the texts: a long one and a short one alone, and batches that need padding.

    Args:
        head: decides whether padding may be on the left: classifiers may read the first position, whatever is there.
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
    if batched and head.per_token:
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
    head: Head,
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
        head: which output.
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
        model, missing = eager_model(head.kind, source.folder, source.trust_remote_code)
    refuse_invented(source.name, needed.intersection(missing))
    if overrides is not None:
        overrides.apply(model)
    with torch.no_grad():
        return [_ask(model, head, case) for case in cases]


def _ask(model: Any, head: Head, case: HeadCase) -> np.ndarray:
    inputs = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    output: np.ndarray = getattr(model(**inputs), head.output).float().numpy()
    return output


def check_head(
    answerer: Answerer,
    head: Head,
    dtype: str,
    cases: Sequence[HeadCase],
    expected: Sequence[np.ndarray],
    *,
    tolerance: Tolerance | None = None,
    on_case: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Compare an archive with what PyTorch said.

    Args:
        answerer: the archive in an engine.
        head: which output.
        dtype: `f32` or `f16`, of the archive.
        cases, expected: the texts, and the output of PyTorch for each.
        tolerance: None takes the element type's; its divergence has no meaning here.
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
        step = _compared(head, case, got, wanted)
        checks.append(CheckResult.judged(case.name, [step], tolerance, shape=case.input_ids.shape))
    return ValidationReport(answerer.engine_name, answerer.engine_version, dtype, tolerance, tuple(checks))


def _compared(head: Head, case: HeadCase, got: np.ndarray, wanted: np.ndarray) -> StepResult:
    """Compare one output, padding left out."""
    scale = float(max(1.0, np.abs(wanted).max()))
    error = np.inf
    if got.shape == wanted.shape:
        seen = case.attention_mask.astype(bool) if head.per_token else np.ones(len(case.input_ids), bool)
        difference = np.abs(got[seen].astype(np.float64) - wanted[seen])
        error = float(difference.max()) if np.isfinite(difference).all() else np.inf
    return StepResult(0, error, scale)


def write_head_bundles(folder: Path, head: Head, cases: Sequence[HeadCase], expected: Sequence[np.ndarray]) -> None:
    """Write each case as an npz that tract's command line reads; see `t2n_llm.check.bundles`."""
    for case, wanted in zip(cases, expected, strict=True):
        outputs: Mapping[str, np.ndarray] = {head.output: wanted}
        write_bundle(folder / f"{case.name.replace(' ', '_')}.npz", [case.inputs], outputs)


def bundles_size(head: Head, cases: Sequence[HeadCase], width: int) -> int:
    """Return about how many bytes the bundles take; `width` is that of a row of the output."""
    rows = [case.input_ids.size if head.per_token else len(case.input_ids) for case in cases]
    return sum(16 * case.input_ids.size for case in cases) + 4 * width * sum(rows)
