"""With guesses that the engine checks several at a time, a text is the same; what ends a text ends it within a run."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from generic_export.errors import EngineCrashError, EngineLoadError, OptionError
from t2n_llm.check.runner import WheelRunner
from t2n_llm.runtime import prompt_lookup
from t2n_llm.runtime.answering import AnswerEnding
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.prompt_lookup import (
    LookupAnswer,
    RewindableTokens,
    continuation,
    lookup_answer,
    opened_rewindable,
    require_logits,
)
from t2n_llm.runtime.sampling.choice import TokenChoice
from t2n_llm.runtime.sampling.options import Sampling
from tests.shared_folders import SharedExport
from tests.t2n_llm.command_line import call, refused, strict_json

_PROMPTS = (
    "The king said to the people of the land",
    "And it came to pass, and it came to",
    "Fellow citizens of the Senate",
)
_TOKENS = 40
_TIE = 1e-3  # of logits: what a run of several tokens may differ by from runs of one
_GREEDY = Sampling(greedy=True)


@pytest.fixture(scope="module")
def export(short_model: Path, shared_export: SharedExport) -> Path:
    """Export of the trained model's first two layers, with logits at every position."""
    return shared_export(short_model, check=False, num_logits_to_keep=0)


@dataclass(frozen=True)
class _Opened:
    """An export with its engine running."""

    model: ExportedModel
    held: RewindableTokens
    choice: TokenChoice

    def answer(
        self, prompt: str, guessed_tokens: int, most: int = _TOKENS, choice: TokenChoice | None = None
    ) -> LookupAnswer:
        self.held.forget()
        return lookup_answer(
            self.model,
            self.held,
            self.model.encode(prompt, chat=False),
            choice or self.choice,
            max_new_tokens=most,
            guessed_tokens=guessed_tokens,
        )


@contextmanager
def _opened(export: Path, sampling: Sampling = _GREEDY) -> Iterator[_Opened]:
    model = ExportedModel.open(export)
    with opened_rewindable(model) as held:
        yield _Opened(model, held, sampling.choice(model.settings))


@dataclass(frozen=True)
class _Plain:
    """What is generated without guesses: tokens, and the logits that each was chosen of."""

    given: int
    tokens: list[int]
    logits: list[np.ndarray]


@pytest.fixture(scope="module")
def plain(export: Path) -> dict[str, _Plain]:
    """The greedy continuation of each prompt, token by token."""
    model = ExportedModel.open(export)
    found = {}
    with model.opened() as held:
        for prompt in _PROMPTS:
            held.forget()
            ids, tokens, rows = model.encode(prompt, chat=False), [], []
            logits = held.read(ids)
            while logits is not None and len(tokens) < _TOKENS:
                rows.append(logits)
                tokens.append(int(logits.argmax()))
                logits = held.read(tokens[-1:])
            found[prompt] = _Plain(len(ids), tokens, rows)
    return found


def _check_same(tokens: Sequence[int], plain: _Plain) -> None:
    """Assert that tokens are the same; after two that are as likely, anything may come."""
    for ours, theirs, logits in zip(tokens, plain.tokens, plain.logits, strict=True):
        if ours != theirs:
            assert logits[theirs] - logits[ours] < _TIE * np.abs(logits).max(), (ours, theirs)
            return


def _guess(monkeypatch: pytest.MonkeyPatch, plain: _Plain, wrong: int = 0) -> None:
    """Let guesses be right, as if the text were known, or each token wrong by so much."""

    def known(text: Sequence[int], most: int) -> tuple[int, ...]:
        start = len(text) - plain.given
        return tuple(token + wrong for token in plain.tokens[start : start + most])

    monkeypatch.setattr(prompt_lookup, "continuation", known)


# --- guesses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "followed"),
    [
        ([1, 2, 3, 4, 1, 2], (3, 4, 1)),
        ([1, 2, 3, 1, 2, 4, 1, 2], (4, 1, 2)),  # the last time counts
        ([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], (5, 8, 1)),  # more tokens count more
        ([1, 2, 9, 1, 2], (9, 1, 2)),
        ([7, 7, 7], (7,)),
        ([1, 2, 3, 4], ()),
        ([5, 1, 5], ()),  # a single token predicts too little
        ([5], ()),
        ([], ()),
    ],
)
def test_continuation(text: list[int], followed: tuple[int, ...]) -> None:
    assert continuation(text, 3) == followed


@pytest.mark.parametrize("guessed_tokens", [1, 2, 5])
def test_greedy_tokens_are_the_same(guessed_tokens: int, export: Path, plain: dict[str, _Plain]) -> None:
    accepted = guessed = 0
    with _opened(export) as opened:
        for prompt in _PROMPTS:
            answer = opened.answer(prompt, guessed_tokens)
            assert "".join(answer) == answer.text != ""
            tokens = [*opened.held.tokens[plain[prompt].given :]]
            _check_same(
                tokens, replace(plain[prompt], tokens=plain[prompt].tokens[:-1], logits=plain[prompt].logits[:-1])
            )
            assert answer.account.ending is AnswerEnding.MOST_TOKENS and answer.account.tokens == _TOKENS
            counts = answer.counts
            assert counts.runs + counts.accepted == counts.decided == _TOKENS - 1
            accepted, guessed = accepted + counts.accepted, guessed + counts.guessed
    assert 0 < accepted < guessed


@pytest.mark.parametrize("guessed_tokens", [1, 8])
def test_wrong_guesses_leave_nothing_behind(
    guessed_tokens: int, export: Path, plain: dict[str, _Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = plain[_PROMPTS[0]]
    _guess(monkeypatch, known, wrong=1)
    with _opened(export) as opened:
        answer = opened.answer(_PROMPTS[0], guessed_tokens)
        list(answer)
        _check_same(
            opened.held.tokens[known.given :], replace(known, tokens=known.tokens[:-1], logits=known.logits[:-1])
        )
    assert answer.counts.accepted == 0 and answer.counts.runs == _TOKENS - 1


def test_sampled_text_is_that_of_the_same_seed(export: Path) -> None:
    same = accepted = 0
    model = ExportedModel.open(export)
    with _opened(export) as opened, model.opened() as held:
        for seed in range(6):
            choice = Sampling(temperature=0.7, top_k=8, repetition_penalty=0.8, seed=seed).choice(model.settings)
            held.forget()
            without = model.answer(held, model.encode(_PROMPTS[1], chat=False), choice, max_new_tokens=24)
            answer = opened.answer(_PROMPTS[1], 3, 24, choice)
            same += "".join(without) == "".join(answer)
            accepted += answer.counts.accepted
    assert same >= 5  # a draw may lie where rounding decides
    assert accepted > 10


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 7, 11])
def test_no_run_passes_the_most_tokens(
    most: int, export: Path, plain: dict[str, _Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = plain[_PROMPTS[0]]
    _guess(monkeypatch, known)
    with _opened(export) as opened:
        answer = opened.answer(_PROMPTS[0], 8, most)
        list(answer)
        assert list(opened.held.tokens[known.given :]) == known.tokens[: most - 1]
    assert answer.account.tokens == most
    assert answer.counts.runs == -(-(most - 1) // 9)  # nine tokens a run
    assert answer.counts.decided == most - 1


def test_an_end_token_ends_it_within_a_run(
    export: Path, plain: dict[str, _Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = plain[_PROMPTS[0]]
    _guess(monkeypatch, known)
    end = known.tokens[5]
    with _opened(export) as opened:
        answer = opened.answer(_PROMPTS[0], 8, choice=TokenChoice(ends=frozenset({end})))
        text = "".join(answer)
        assert text == opened.model.decode(known.tokens[: known.tokens.index(end)])
    assert answer.account.tokens == known.tokens.index(end)
    assert answer.account.ending is AnswerEnding.END_TOKEN and answer.counts.runs <= 1


def test_a_stop_text_ends_it_within_a_run(
    export: Path, plain: dict[str, _Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = plain[_PROMPTS[0]]
    _guess(monkeypatch, known)
    text = ExportedModel.open(export).decode(known.tokens)
    stop = text[18:24]
    with _opened(export, Sampling(greedy=True, stop=(stop,))) as opened:
        answer = opened.answer(_PROMPTS[0], 8)
        assert "".join(answer).strip() == text[: text.index(stop)].strip()
    assert answer.account.ending is AnswerEnding.STOP_TEXT
    assert answer.account.tokens < _TOKENS


def test_the_longest_context_is_not_passed(export: Path) -> None:
    with _opened(export) as opened:
        ids = (opened.model.encode(" ".join(_PROMPTS), chat=False) * 60)[: 1024 - 6]
        answer = lookup_answer(opened.model, opened.held, ids, opened.choice, max_new_tokens=_TOKENS, guessed_tokens=8)
        list(answer)
        assert len(opened.held.tokens) <= 1024
    assert answer.account.ending in (AnswerEnding.CONTEXT, AnswerEnding.END_TOKEN)
    assert answer.account.tokens <= 6


# --- refusals and faults ----------------------------------------------------------------------


def test_an_export_of_few_positions_is_refused(real_export: Path, export: Path) -> None:
    with pytest.raises(OptionError, match=r"logits of 1 position, .* needs 5") as refusal:
        require_logits(ExportedModel.open(real_export), 4)
    assert "--num-logits-to-keep 0" in str(refusal.value.hint)
    require_logits(ExportedModel.open(export), 4)
    outcome = call("generate", real_export, "And", "--prompt-lookup")
    refused(outcome, "1 position")
    assert "--num-logits-to-keep 0" in outcome.line("hint")


def test_a_cache_that_the_engine_keeps_is_refused(short_model: Path, shared_export: SharedExport) -> None:
    stateful = shared_export(short_model, check=False, stateful=True, num_logits_to_keep=0)
    with pytest.raises(EngineLoadError, match="keeps the cache"), _opened(stateful):
        raise AssertionError
    outcome = call("generate", stateful, "And", "--prompt-lookup")
    refused(outcome, "keeps the cache")
    assert "--stateful" in outcome.line("hint")


def test_an_engine_that_dies_is_one_error(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runners: list[WheelRunner] = []
    open_rewindable = WheelRunner.open_rewindable

    def noted(runner: WheelRunner) -> object:
        runners.append(runner)
        return open_rewindable(runner)

    monkeypatch.setattr(WheelRunner, "open_rewindable", noted)
    with _opened(export) as opened:
        pieces = iter(opened.answer(_PROMPTS[0], 4))
        assert list(itertools.islice(pieces, 2))
        (model,) = runners[0]._models.values()
        os.kill(model.pid, signal.SIGKILL)
        with pytest.raises(EngineCrashError, match="tract died during the turn"):
            list(pieces)


# --- the command ------------------------------------------------------------------------------


def test_the_command(export: Path) -> None:
    asked = ("generate", export, _PROMPTS[1], "--raw", "--greedy", "-n", 20)
    without = call(*asked)
    for option in ((), ("--prompt-lookup-tokens", 5)):
        assert call(*asked, "--prompt-lookup", *option).out == without.out
    *pieces, record = map(strict_json, call(*asked, "--prompt-lookup", "--json").out.splitlines())
    plain = json.loads(call(*asked, "--json").out.splitlines()[-1])
    assert record["text"] == "".join(each["piece"] for each in pieces) == plain["text"]
    assert record["prompt"] == _PROMPTS[1] and record["tokens"] == 20 and record["ending"] == "most tokens"
    assert 0 < record["accepted_tokens"] <= record["guessed_tokens"] and record["runs"] < 19
    assert record["acceptance"] == record["accepted_tokens"] / record["guessed_tokens"]
    assert record.keys() - plain.keys() == {"runs", "guessed_tokens", "accepted_tokens", "acceptance", "tokens_per_run"}
    refused(call(*asked, "--prompt-lookup-tokens", 3), "--prompt-lookup-tokens", "--prompt-lookup")


@pytest.mark.parametrize("arguments", [("A", "B", "--draft-tokens", "4"), ("--help",), ()])
def test_the_former_command_names_its_replacement(arguments: tuple[str, ...]) -> None:
    outcome = call("speculate", *arguments)
    refused(outcome, "t2n-llm speculate was removed")
    assert "t2n-llm generate EXPORT --prompt-lookup" in outcome.line("hint")
    assert "speculate" not in call("--help").out
