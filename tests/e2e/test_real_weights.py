"""Real weights, end to end: SmolLM2-135M-Instruct exported to f16, checked in the engine, and talked to.

The model is not part of the project: `scripts/fetch_test_models.py` puts it in the user's cache, and
T2N_FETCH_MODELS=1 makes these tests do so. Without it they are skipped.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from t2n_llm import export_llm
from t2n_llm.export.pipeline import ExportResult
from t2n_llm.runtime.chat.conversation import HeldConversation
from t2n_llm.runtime.chat.template import Message
from t2n_llm.runtime.conversation_reader import LanguageReader
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.sampling.options import Sampling
from t2n_llm.runtime.sampling.rules import Said
from t2n_llm.runtime.sampling.text import text_pieces
from t2n_llm.source.hub import load_tokenizer
from tests.load_script import load_script
from tests.trained_model import REAL_MODEL

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "scripts" / "fetch_test_models.py"

DECODE_STEPS = 64
NEW_TOKENS = 40

TEXTS = {
    "words": "Call me Ishmael. Some years ago, never mind how long precisely.",
    "emoji": "😀😀 a 😀b",
    "joined emoji": "the 👩‍🔬 and the 👨‍👩‍👧‍👦, under 🇫🇷🇬🇧 flags",
    "accents": "naïve café, Ångström, žluťoučký kůň",
    "other scripts": "日本語のテキスト 한국어 العربية हिन्दी",
    "spaces": "  two  spaces\n\n\tand lines\n",
    "punctuation": " isn 't it . , ! ? 's",
    "replacement character": "x\N{REPLACEMENT CHARACTER}y\N{REPLACEMENT CHARACTER}",
    "one space": " ",
    "nothing": "",
}


@pytest.fixture(scope="module")
def model_folder() -> Path:
    fetcher = load_script("fetch_test_models")
    folder = fetcher.default_output() / fetcher.MODEL_NAME
    if fetcher.is_complete(folder):
        return folder
    if os.environ.get("T2N_FETCH_MODELS") == "1":
        return fetcher.fetch(fetcher.default_output())
    pytest.skip(
        f"{fetcher.MODEL_NAME} is not in the cache; run scripts/fetch_test_models.py, or set T2N_FETCH_MODELS=1"
    )


@pytest.fixture(scope="module")
def exported(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExportResult]:
    """Export once for this module; 270 MB, so it is not left to pytest's kept folders."""
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    yield export_llm(str(model_folder), folder, dtype="f16", check=True, decode_steps=DECODE_STEPS)
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=["example", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    folder = REAL_MODEL if request.param == "example" else request.getfixturevalue("model_folder")
    return load_tokenizer(folder)


def test_f16_agrees_with_pytorch(exported: ExportResult) -> None:
    report = exported.validation
    assert report is not None and report.passed
    assert [check.name for check in report.checks] == ["prefill", "chunked prefill", "decode", "greedy"]
    decode = next(check for check in report.checks if check.name == "decode")
    assert len(decode.steps) == DECODE_STEPS
    # Where the engine prefers another token, PyTorch must have been undecided at the resolution of f16.
    differing = [step for step in decode.steps if not step.same_top1]
    assert all(step.agrees(report.tolerance) for step in differing)
    assert decode.same_top1_count == DECODE_STEPS - len(differing) >= DECODE_STEPS - 1
    assert decode.max_kl_divergence < 1e-3
    assert exported.manifest["f16_overflows"] == {}


def test_the_command_line_answers_a_chat(exported: ExportResult) -> None:
    prompt = "What is the capital of France?"
    answer = generate(exported.output_dir, prompt)
    assert "Paris" in answer
    assert answer == decoded_tokens(exported.output_dir, prompt) + "\n"


@pytest.mark.parametrize("prompt", ["Repeat these emoji and nothing else: 😀 👩‍🔬 🇫🇷", "Count to ten."])
def test_streamed_text_is_the_decoded_tokens(exported: ExportResult, prompt: str) -> None:
    text = decoded_tokens(exported.output_dir, prompt)
    model = ExportedModel.open(exported.output_dir)
    assert text.strip()
    assert "".join(model.generate(prompt, max_new_tokens=NEW_TOKENS)) == text


def test_two_turns_are_those_of_transformers(exported: ExportResult, model_folder: Path) -> None:
    model = ExportedModel.open(exported.output_dir)
    own = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    messages: list[Message] = []
    with model.opened() as held:
        conversation = HeldConversation(
            model, LanguageReader(model, held), Sampling().choice(model.settings), max_new_tokens=NEW_TOKENS
        )
        for text in ("What is the capital of France?", "And of Italy?"):
            messages.append({"role": "user", "content": text})
            ids = model.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            said = own.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
            before = len(held.tokens)
            answer = "".join(conversation.ask(text))
            assert answer == model.tokenizer.decode(said, skip_special_tokens=True)
            assert conversation.account is not None
            assert conversation.account.held_tokens == before
            assert before + conversation.account.read_tokens == ids.shape[1]
            messages.append({"role": "assistant", "content": answer})
    assert "Rome" in answer and 0 < conversation.account.read_tokens < before


def _pieces(tokenizer: Any, ids: Iterable[int]) -> Iterator[str]:
    return text_pieces(partial(tokenizer.decode, skip_special_tokens=True), iter(ids))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_pieces_of_text_add_up(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(_pieces(tokenizer, ids)) == text == tokenizer.decode(ids)


def test_pieces_of_any_tokens_add_up(tokenizer: Any) -> None:
    chosen = random.Random(0)
    parts = [number for number in range(len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([number])]
    for _ in range(500):
        # Half of them tokens that hold only a part of a character.
        ids = [chosen.choice(parts if chosen.random() < 0.5 else range(len(tokenizer))) for _ in range(12)]
        pieces = list(_pieces(tokenizer, ids))
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True), ids
        assert all(pieces[:-1]), ids


def test_pieces_come_as_soon_as_they_are_final(tokenizer: Any) -> None:
    ids = tokenizer("The sea was calm", add_special_tokens=False)["input_ids"]
    assert list(_pieces(tokenizer, ids)) == [tokenizer.decode([number]) for number in ids]


def decoded_tokens(folder: Path, prompt: str) -> str:
    """Return the greedy answer, its tokens decoded all at once."""
    model = ExportedModel.open(folder)
    choice, tokens, pending = Sampling().choice(model.settings), list[int](), model.encode(prompt, chat=True)
    with model.opened() as held:
        while len(tokens) < NEW_TOKENS:
            logits = held.read(pending)
            assert logits is not None
            pending = [choice.next_token(logits, Said(held.tokens, 0), choice.random())]
            if pending[0] in choice.ends:
                break
            tokens += pending
    return str(model.tokenizer.decode(tokens, skip_special_tokens=True))


def generate(folder: Path, prompt: str) -> str:
    """Return what the command prints."""
    command = [sys.executable, "-m", "t2n_llm.cli.app", "generate", str(folder), prompt, "-n", str(NEW_TOKENS)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, check=True, timeout=300)
    return done.stdout.decode("utf-8")
