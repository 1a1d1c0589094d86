"""Guessed and checked in the engine, a text is the target's own; what ends a text ends it in the middle of a run, too."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from generic_export.errors import EngineCrashError, EngineLoadError, OptionError
from t2n_llm import export_llm
from t2n_llm.check.runner import WheelRunner
from t2n_llm.measure.answering import AnswerEnding
from t2n_llm.measure.generate import ExportedModel
from t2n_llm.sampling.rules import Said
from t2n_llm.sampling.wishes import Sampling
from t2n_llm.speculate.drafts import Draft
from t2n_llm.speculate.pair import OpenedPair, SpeculativePair
from tests.shared_folders import SharedExport
from tests.t2n_llm.command_line import call, refused
from tests.trained_model import REAL_MODEL

_PROMPTS = (
    "The king said to the people of the land",
    "And it came to pass, and it came to",
    "Fellow citizens of the Senate",
)
_TOKENS = 40
_TIE = 1e-3  # of logits: what a run of several tokens may differ by from runs of one
_GREEDY = Sampling(greedy=True)


def _exported(source: Path, target: Path, **options: object) -> Path:
    export: Callable = export_llm
    return Path(export(str(source), target, check=False, **options).output_dir)


@pytest.fixture(scope="module")
def target(short_model: Path, shared_export: SharedExport) -> Path:
    """Export of the trained model's first two layers, with logits at every position."""
    return shared_export(short_model, check=False, num_logits_to_keep=0)


@pytest.fixture(scope="module")
def good_draft(short_model: Path, shared_export: SharedExport) -> Path:
    """The target in four bits."""
    return shared_export(short_model, check=False, compress="q4_0")


@pytest.fixture(scope="module")
def bad_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one layer, with the trained model's tokenizer."""
    source = tmp_path_factory.mktemp("bad") / "source"
    config = AutoConfig.from_pretrained(REAL_MODEL, num_hidden_layers=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REAL_MODEL / name, source / name)
    return _exported(source, source.parent / "out")


@contextmanager
def _opened(target: Path, draft: Path | None, most: int = 8, sampling: Sampling = _GREEDY) -> Iterator[OpenedPair]:
    pair = SpeculativePair.open(target, draft, most)
    with pair.opened(sampling.choice(pair.target.settings)) as opened:
        yield opened


@dataclass(frozen=True)
class _Plain:
    """What the target says alone: tokens, and the logits that each was chosen of."""

    tokens: list[int]
    logits: list[np.ndarray]


@pytest.fixture(scope="module")
def plain(target: Path) -> dict[str, _Plain]:
    """The greedy continuation of each prompt, token by token."""
    model = ExportedModel.open(target)
    said = {}
    with model.opened() as held:
        for prompt in _PROMPTS:
            held.forget()
            ids, tokens, rows = model.encode(prompt, chat=False), [], []
            logits = held.read(ids)
            while logits is not None and len(tokens) < _TOKENS:
                rows.append(logits)
                tokens.append(int(logits.argmax()))
                logits = held.read(tokens[-1:])
            said[prompt] = _Plain(tokens, rows)
    return said


def _check_same(said: Sequence[int], plain: _Plain) -> None:
    """Assert that tokens are the same; after two that are as likely, anything may come."""
    for ours, theirs, logits in zip(said, plain.tokens, plain.logits, strict=True):
        if ours != theirs:
            assert logits[theirs] - logits[ours] < _TIE * np.abs(logits).max(), (ours, theirs)
            return


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("kind", ["good", "bad", "lookup"])
def test_greedy_tokens_are_the_targets(
    kind: str, tokens: int, target: Path, plain: dict[str, _Plain], request: pytest.FixtureRequest
) -> None:
    draft = None if kind == "lookup" else request.getfixturevalue(f"{kind}_draft")
    accepted = runs = 0
    with _opened(target, draft) as pair:
        for prompt in _PROMPTS:
            answer = pair.answer(pair.model.encode(prompt, chat=False), tokens, max_new_tokens=_TOKENS)
            assert "".join(answer)
            _check_same(answer.tokens, plain[prompt])
            assert answer.account.ending is AnswerEnding.MOST_TOKENS
            accepted, runs = accepted + answer.tally.accepted, runs + answer.tally.runs
            assert answer.tally.runs + answer.tally.accepted == answer.tally.decided
            assert list(pair.held.tokens) == [*answer.ids, *answer.tokens[:-1]]
    # The good draft shows that several tokens are taken at once, the bad one that rejected ones leave nothing behind.
    assert accepted > 40 if kind == "good" else runs > 30


class _Oracle:
    """Guesses what it was told, as if the text were known."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def draft(self, said: Said, most: int, random: np.random.Generator) -> Draft:
        del random
        return Draft(tuple(self._text[said.new : said.new + most]))


@contextmanager
def _told(target: Path, plain: _Plain, sampling: Sampling = _GREEDY) -> Iterator[OpenedPair]:
    with _opened(target, None, sampling=sampling) as pair:
        yield OpenedPair(pair.model, pair.held, _Oracle(plain.tokens), pair.choice)


@pytest.mark.parametrize("most", [1, 2, 7, 11])
def test_no_run_passes_the_most_tokens(most: int, target: Path, plain: dict[str, _Plain]) -> None:
    with _told(target, plain[_PROMPTS[0]]) as pair:
        answer = pair.answer(pair.model.encode(_PROMPTS[0], chat=False), 8, max_new_tokens=most)
        list(answer)
    assert answer.tokens == plain[_PROMPTS[0]].tokens[:most]
    assert answer.tally.runs == -(-(most - 1) // 9)  # nine tokens a run
    assert answer.tally.decided == most - 1


def test_an_end_token_ends_it_within_a_run(target: Path, plain: dict[str, _Plain]) -> None:
    known = plain[_PROMPTS[0]]
    end = known.tokens[5]
    first = known.tokens.index(end)
    with _told(target, known) as pair:
        choice = type(pair.choice)(ends=frozenset({end}))
        ending = OpenedPair(pair.model, pair.held, pair.drafter, choice)
        answer = ending.answer(pair.model.encode(_PROMPTS[0], chat=False), 8, max_new_tokens=_TOKENS)
        list(answer)
    assert answer.tokens == known.tokens[:first]
    assert answer.account.ending is AnswerEnding.END_TOKEN and answer.tally.runs <= 1


def test_a_stop_text_ends_it_within_a_run(target: Path, plain: dict[str, _Plain]) -> None:
    known = plain[_PROMPTS[0]]
    text = ExportedModel.open(target).decode(known.tokens)
    stop = text[18:24]
    with _told(target, known, Sampling(greedy=True, stop=(stop,))) as pair:
        answer = pair.answer(pair.model.encode(_PROMPTS[0], chat=False), 8, max_new_tokens=_TOKENS)
        said = "".join(answer)
    assert said.strip() == text[: text.index(stop)].strip()
    assert answer.account.ending is AnswerEnding.STOP_TEXT
    assert len(answer.tokens) < _TOKENS


def test_the_longest_context_is_not_passed(target: Path, good_draft: Path) -> None:
    with _opened(target, good_draft) as pair:
        ids = (pair.model.encode(" ".join(_PROMPTS), chat=False) * 60)[: 1024 - 6]
        answer = pair.answer(ids, 8, max_new_tokens=_TOKENS)
        list(answer)
    assert answer.account.ending in (AnswerEnding.CONTEXT, AnswerEnding.END_TOKEN)
    assert len(answer.tokens) <= 6


def test_sampled_first_tokens_have_the_targets_frequencies(target: Path, good_draft: Path) -> None:
    """The second token, given the first, over many seeds: through the engine, with a draft of another distribution."""
    sampling, count = Sampling(temperature=1.3, top_k=4), 400
    seen: dict[int, int] = {}
    with _opened(target, good_draft, sampling=sampling) as pair:
        ids = pair.model.encode(_PROMPTS[0], chat=False)
        expected = pair.choice.distribution(pair.held.continue_with(ids), Said(ids, len(ids)))
        # All tokens but the last are the prompt: the one that is drafted and judged is the first of the answer.
        for seed in range(count):
            answer = pair.answer(ids[:-1], 1, max_new_tokens=2)
            answer.random = np.random.default_rng(seed)
            answer.tokens.append(ids[-1])
            pair.held.keep(len(ids) - 1)
            token = answer._run()[0]
            seen[token] = seen.get(token, 0) + 1
    assert set(seen) <= set(np.flatnonzero(expected))
    statistic = sum(
        (seen.get(int(t), 0) - count * expected[t]) ** 2 / (count * expected[t]) for t in np.flatnonzero(expected)
    )
    assert statistic < 16.3, (seen, expected[expected > 0])  # chi-squared, 3 degrees of freedom: p 0.001


def test_a_seed_gives_the_same_text_again(target: Path, good_draft: Path) -> None:
    texts = []
    for _ in range(2):
        with _opened(target, good_draft, sampling=Sampling(temperature=1.0, seed=5)) as pair:
            ids = pair.model.encode(_PROMPTS[0], chat=False)
            texts.append("".join(pair.answer(ids, 3, max_new_tokens=20)))
    assert texts[0] == texts[1] != ""


def test_a_target_of_one_position_is_refused(real_export: Path, target: Path) -> None:
    with pytest.raises(OptionError, match="1 position") as refusal:
        SpeculativePair.open(real_export, None, 4)
    assert "--num-logits-to-keep 0" in str(refusal.value.hint)
    refused(call("speculate", real_export, target, "--prompt", "And"), "1 position")


def test_other_tokens_are_refused_by_name(target: Path, good_draft: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(good_draft, tmp_path / "other"))
    tokenizer = ExportedModel.open(other).tokenizer
    tokenizer.add_tokens(["qqzz"])
    tokenizer.save_pretrained(other)
    with pytest.raises(OptionError, match=r"token 4096 is no token in .* and 'qqzz' in"):
        SpeculativePair.open(target, other, 4)


def test_a_cache_that_the_engine_keeps_is_refused(short_model: Path, tmp_path: Path) -> None:
    stateful = _exported(short_model, tmp_path / "out", stateful=True, num_logits_to_keep=0)
    with pytest.raises(EngineLoadError, match="keeps the cache"), _opened(stateful, None):
        raise AssertionError


def test_an_engine_that_dies_is_one_error(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[WheelRunner] = []
    open_rewindable = WheelRunner.open_rewindable

    def noted(runner: WheelRunner) -> object:
        opened.append(runner)
        return open_rewindable(runner)

    monkeypatch.setattr(WheelRunner, "open_rewindable", noted)
    with _opened(target, None) as pair:
        ids = pair.model.encode(_PROMPTS[0], chat=False)
        pieces = iter(pair.answer(ids, 4, max_new_tokens=_TOKENS))
        assert list(itertools.islice(pieces, 2))
        (model,) = opened[0]._models.values()
        os.kill(model.pid, signal.SIGKILL)
        with pytest.raises(EngineCrashError, match="tract died during the turn"):
            list(pieces)


def test_the_command_tells_what_came_of_guessing(target: Path, good_draft: Path) -> None:
    import json

    asked = ("--prompt", _PROMPTS[1], "--raw", "--greedy", "-n", 20, "--compare", "--json")
    for pair in ((target, good_draft), (target, "--prompt-lookup")):
        outcome = call("speculate", *pair, *asked)
        *pieces, record = map(json.loads, outcome.out.splitlines())
        assert outcome.code == 0 and record["text"] == "".join(each["piece"] for each in pieces)
        assert record["tokens"] == record["plain_tokens"] == 20
        assert record["plain_tokens_per_second"] > 0 and record["speed_up"] > 0
        assert record["accepted_tokens"] <= record["drafted_tokens"]
    quiet = call("speculate", target, good_draft, "--prompt", "And", "--raw", "--greedy", "--max-tokens", 3, "--quiet")
    assert quiet.code == 0 and quiet.err == "" and quiet.out.strip()
    refused(call("speculate", target, "--prompt", "And"), "--prompt-lookup")
    refused(call("speculate", target, good_draft, "--prompt-lookup", "--prompt", "And"), "--prompt-lookup")
    refused(call("speculate", target, "--prompt-lookup"), "--prompt-file")
