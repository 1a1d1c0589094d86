"""Sources through the encoder, and the decoder token by token, against transformers' own model in f32.

In: a checkpoint, and the two archives in an engine. Out: a `ValidationReport`: the four checks of language models for each of
several sources, and where batches are possible one of sources of several lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.read.reading import read_graph_text, signature_of
from kvcache.states.tensors import StateTensor
from t2n_llm.check.agreement import CheckResult, Tolerance, ValidationReport, compare_step
from t2n_llm.check.archive_sessions import ArchiveSession, open_archive_session
from t2n_llm.check.llm_checks import validate_archive
from t2n_llm.check.options import EngineOptions
from t2n_llm.check.reference import CHECK_TEXT, CheckPlan, ReferenceRun, plan_check
from t2n_llm.tasks.seq2seq.adapters import read_source, run_decoder
from t2n_llm.tasks.seq2seq.listener import Listener
from t2n_llm.tasks.seq2seq.model import DECODER, ENCODER, first_token
from t2n_llm.tasks.seq2seq.running import open_encoder, open_source_runner
from t2n_llm.tasks.seq2seq.sources import ENCODER_MASK, LENGTH, SourceForm, SourceInput

_PADDED, _TOGETHER = "sources of several lengths", "several sources at once"


@dataclass(frozen=True)
class SourceCase:
    """A source, and what the decoder is asked about it.

    Attributes:
        name: what is special about it.
        inputs: of the encoder, by name; one source.
        plan: the decoder's tokens.
    """

    name: str
    inputs: Mapping[str, np.ndarray]
    plan: CheckPlan


@dataclass(frozen=True)
class PaddedCase:
    """Sources in one batch.

    Attributes:
        inputs: of the encoder, by name; where lengths may differ padded on the right, its mask [B, T] among them.
        tokens: int64 [B, S] of the decoder.
    """

    inputs: Mapping[str, np.ndarray]
    tokens: np.ndarray

    @property
    def name(self) -> str:
        """What is special about it."""
        return _PADDED if ENCODER_MASK in self.inputs else _TOGETHER


@dataclass(frozen=True)
class Answers:
    """What PyTorch says.

    Attributes:
        runs: to each source.
        padded: [B, vocab], the last position's logits of the batch; None without one.
    """

    runs: tuple[ReferenceRun, ...]
    padded: np.ndarray | None = None


# --- questions --------------------------------------------------------------------------------------


def plan_sources(
    config: Any, form: SourceForm, tokenizer: Any | None, decode_steps: int, seed: int = 0
) -> tuple[SourceCase, ...]:
    """Choose sources of two lengths, and the decoder's tokens: text where there is a tokenizer, else random.

    Args:
        config: transformers config.
        form: how sources enter.
        tokenizer: makes texts into ids; None draws random ones.
        decode_steps: tokens to decode.
        seed: for everything that is random.
    """
    generator = np.random.default_rng(seed)
    plan = plan_check(config, tokenizer, decode_steps, seed)
    plan = replace(plan, text_ids=(first_token(config), *plan.text_ids[1:]))
    lengths = _text_lengths(form, tokenizer) if tokenizer is not None else form.lengths
    sources = []
    for number, length in enumerate(lengths if len(lengths) > 1 else lengths * 2):
        inputs = {each.name: each.random(generator, 1, length) for each in form.inputs}
        if tokenizer is not None and _reads_text(form):
            inputs = {form.inputs[0].name: _text(tokenizer, length)}
        name = f"a source of {length}" if form.dynamic else f"source {number + 1}"
        sources.append(SourceCase(name, inputs, plan))
    return tuple(sources)


def plan_padded(cases: Sequence[SourceCase], form: SourceForm, padding: int) -> PaddedCase:
    """Put the sources together, the shorter ones padded; where no mask tells padding from a source the longer ones cut.

    Args:
        cases, form: of the model.
        padding: the token that stands where no text is.
    """
    tokens = np.array([case.plan.text_ids[:5] for case in cases], np.int64)
    if not form.masked:
        return PaddedCase({each.name: _cut(cases, each) for each in form.inputs}, tokens)
    name = form.inputs[0].name
    longest = max(case.inputs[name].shape[1] for case in cases)
    rows, masks = [], []
    for case in cases:
        source = case.inputs[name]
        missing = longest - source.shape[1]
        fill = padding if form.inputs[0].vocabulary is not None else 0
        pad = [(0, 0), (0, missing), *((0, 0),) * (source.ndim - 2)]
        rows.append(np.pad(source, pad, constant_values=fill))
        masks.append(np.arange(longest)[None] < source.shape[1])
    return PaddedCase({name: np.concatenate(rows), ENCODER_MASK: np.concatenate(masks).astype(np.int64)}, tokens)


def _cut(cases: Sequence[SourceCase], part: SourceInput) -> np.ndarray:
    """Return an input of several sources, as long as the shortest."""
    rows = [case.inputs[part.name] for case in cases]
    if LENGTH not in part.shape:
        return np.concatenate(rows)
    axis = part.shape.index(LENGTH)
    shortest = min(row.shape[axis] for row in rows)
    return np.concatenate([row.take(range(shortest), axis=axis) for row in rows])


def _reads_text(form: SourceForm) -> bool:
    return len(form.inputs) == 1 and form.inputs[0].vocabulary is not None


def _text_lengths(form: SourceForm, tokenizer: Any) -> tuple[int, ...]:
    if not _reads_text(form):
        return form.lengths
    whole = len(tokenizer(CHECK_TEXT)["input_ids"])
    return max(2, whole // 7), whole


def _text(tokenizer: Any, length: int) -> np.ndarray:
    """Return the first tokens of the check's text, int64 [1, length], with the end as the tokenizer makes it."""
    ids = tokenizer(CHECK_TEXT)["input_ids"]
    return np.array([[*ids[: length - 1], ids[-1]]], np.int64)


# --- PyTorch ----------------------------------------------------------------------------------------


def run_seq2seq_reference(model: Any, cases: Sequence[SourceCase], padded: PaddedCase | None) -> Answers:
    """Return the answers of transformers' eager model in f32 to sources, and to a batch of them."""
    with torch.no_grad():
        runs = tuple(_answered(model, case) for case in cases)
        return Answers(runs, _answered_padded(model, padded) if padded is not None else None)


def _answered(model: Any, case: SourceCase) -> ReferenceRun:
    plan = case.plan
    text_logits = _read_at_once(model, case)
    listener = Listener(model, case.inputs)
    for token in plan.text_ids[: plan.prompt_length - 1]:  # as generate() goes on, one at a time
        listener.answer([token])
    pending: Sequence[int] = plan.text_ids[plan.prompt_length - 1 : plan.prompt_length]
    ids: list[int] = []
    rows: list[np.ndarray] = []
    for _ in range(plan.greedy_steps):
        rows.append(listener.answer(pending)[-1])
        ids.append(int(rows[-1].argmax()))
        pending = ids[-1:]
    return ReferenceRun(plan, text_logits, tuple(ids), np.stack(rows), listener.states())


def _read_at_once(model: Any, case: SourceCase) -> np.ndarray:
    """Return the logits [S, vocab] of a case's tokens without any cache: some decoders take one token at a time with it."""
    given = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    read, tokens = read_source(model, given), torch.tensor([list(case.plan.text_ids)])
    # The source is given too, which has been read: without it FSMT makes no causal mask.
    result = run_decoder(model, read, tokens, use_cache=False, **given)
    logits: np.ndarray = result.logits[0].float().numpy()
    return logits


def _answered_padded(model: Any, case: PaddedCase) -> np.ndarray:
    given = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    tokens = torch.from_numpy(case.tokens)
    mask = {ENCODER_MASK: given[ENCODER_MASK]} if ENCODER_MASK in given else {}
    result = run_decoder(model, read_source(model, given), tokens, **mask)
    logits: np.ndarray = result.logits[:, -1].float().numpy()
    return logits


# --- the engine -------------------------------------------------------------------------------------


def check_seq2seq(
    archives: Mapping[str, Path],
    states: Sequence[StateTensor],
    dtype: str,
    cases: Sequence[SourceCase],
    padded: PaddedCase | None,
    expected: Answers,
    *,
    engine: EngineOptions | None = None,
    tolerance: Tolerance | None = None,
    on_check: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Run each source through the encoder, and the four checks of a language model on the decoder.

    Args:
        archives: by role.
        states: that the decoder is fed back.
        dtype: `f32` or `f16`, of the archives.
        cases, padded, expected: what is asked, and PyTorch's answers.
        engine: which one; None takes the pip-installed one.
        tolerance: None takes the element type's.
        on_check: told the name of each check before it runs.

    Raises:
        EngineError: the engine refused an archive, or died.
    """
    tolerance = tolerance or Tolerance.for_dtype(dtype)
    announce = on_check or (lambda _: None)
    checks: list[CheckResult] = []
    with open_encoder(archives[ENCODER], engine) as encoder:
        said = [encoder.read(case.inputs) for case in cases]
        together = encoder.read(padded.inputs) if padded is not None else {}
    with open_source_runner(archives[DECODER], states, engine) as decoder:
        for case, told, reference in zip(cases, said, expected.runs, strict=True):
            runner = decoder.about(told)
            about = partial(_announce, announce, case.name)
            report = validate_archive(runner, reference, dtype, tolerance=tolerance, on_check=about)
            checks += [replace(check, name=f"{check.name}, {case.name}") for check in report.checks]
    if padded is not None and expected.padded is not None:
        announce(padded.name)
        with open_archive_session(archives[DECODER], engine) as answerer:
            checks.append(
                _check_padded(answerer, archives[DECODER], states, together, padded, expected.padded, tolerance)
            )
    return ValidationReport(report.engine, report.engine_version, dtype, tolerance, tuple(checks))


def _announce(announce: Callable[[str], None], source: str, check: str) -> None:
    announce(f"{check}, {source}")


def _check_padded(
    decoder: ArchiveSession,
    archive: Path,
    states: Sequence[StateTensor],
    told: Mapping[str, np.ndarray],
    case: PaddedCase,
    expected: np.ndarray,
    tolerance: Tolerance,
) -> CheckResult:
    """One call of the decoder for sources of several lengths at once."""
    batch = len(case.tokens)
    given = {"input_ids": case.tokens, **told, **{state.input_name: state.at_start(batch) for state in states}}
    logits = decoder.answer([given[name] for name in signature_of(read_graph_text(archive)).inputs])[0]
    steps = [compare_step(row, logits[row, -1], expected[row]) for row in range(batch)]
    return CheckResult.judged(case.name, steps, tolerance)
