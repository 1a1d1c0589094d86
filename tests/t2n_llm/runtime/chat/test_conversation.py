"""A chat in the engine says what transformers' greedy generation says over the same template, and reads only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from generic_export.errors import OptionError
from t2n_llm import export_llm
from t2n_llm.runtime.chat.conversation import HeldConversation
from t2n_llm.runtime.chat.template import Message
from t2n_llm.runtime.conversation_reader import LanguageReader
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.sampling.options import Sampling
from tests.families import FAMILIES
from tests.recurrent_families import RECURRENT_FAMILIES
from tests.t2n_llm.runtime.chat.conftest import save_talking_model

_TOKENS = 7


@contextmanager
def _conversation(folder: Path, **further: Any) -> Iterator[HeldConversation]:
    model = ExportedModel.open(folder)
    with model.opened() as held:
        yield HeldConversation(model, LanguageReader(model, held), Sampling().choice(model.settings), **further)


class _Theirs:
    """transformers' own chat."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def ids(self, messages: list[Message]) -> list[int]:
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def answer(self, messages: list[Message]) -> str:
        ids = torch.tensor([self.ids(messages)])
        said = self._model.generate(ids, max_new_tokens=_TOKENS, do_sample=False)[0, ids.shape[1] :]
        return str(self._tokenizer.decode(said, skip_special_tokens=True)).removesuffix(" w6")


def test_three_turns_are_those_of_transformers(talking_export: Path, talking_model: Path) -> None:
    _check_three_turns(talking_export, talking_model)


@pytest.mark.parametrize(
    ("family", "options"), [("mistral", {"window_cache": True}), ("mamba", {})], ids=["windows", "fixed states"]
)
def test_states_of_other_kinds_hold_a_chat_too(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = save_talking_model(family, tmp_path / "model", {**FAMILIES, **RECURRENT_FAMILIES})
    exported = export_llm(str(model), tmp_path / "out", dtype="f32", check=False, **options)
    _check_three_turns(exported.output_dir, model)


def _check_three_turns(exported: Path, model: Path) -> None:
    theirs = _Theirs(model)
    messages: list[Message] = [{"role": "system", "content": "w30 w31"}]
    held = 0
    with _conversation(exported, system="w30 w31", max_new_tokens=_TOKENS) as conversation:
        for text in ("w10 w11 w12", "w40", "w20 w21 w22 w23"):
            messages.append({"role": "user", "content": text})
            answer = "".join(conversation.ask(text))
            assert answer == theirs.answer(messages) != ""
            account = conversation.account
            assert account is not None and account.tokens > 1
            assert account.held_tokens == held
            assert account.held_tokens + account.read_tokens == len(theirs.ids(messages))
            messages.append({"role": "assistant", "content": answer})
            assert list(conversation.messages) == messages
            cut = account.tokens == _TOKENS  # then nobody has read the last token
            held += account.read_tokens + account.tokens - cut
        assert account.read_tokens < held // 2


def test_reset_begins_anew(talking_export: Path) -> None:
    with _conversation(talking_export, max_new_tokens=_TOKENS) as conversation:
        first = "".join(conversation.ask("w10 w11"))
        list(conversation.ask("w12"))
        conversation.reset()
        assert conversation.messages == ()
        assert "".join(conversation.ask("w10 w11")) == first
        assert conversation.account is not None and conversation.account.held_tokens == 0


def test_a_stopped_answer_is_kept_as_far_as_it_was_said(talking_export: Path, talking_model: Path) -> None:
    theirs = _Theirs(talking_model)
    with _conversation(talking_export, max_new_tokens=_TOKENS) as conversation:
        whole = conversation.ask("w10 w11", lambda: len(said) == 3)
        said: list[str] = []
        for piece in whole:
            said.append(piece)
        assert conversation.account is not None and not conversation.account.ended
        assert conversation.messages[-1] == {"role": "assistant", "content": "".join(said)} and len(said) == 3
        held = conversation.account.read_tokens + 2
        turns = [*conversation.messages, {"role": "user", "content": "w12"}]
        assert "".join(conversation.ask("w12")) == theirs.answer(turns)
        assert conversation.account.held_tokens == held


def test_a_turn_that_is_stopped_while_it_is_read_is_forgotten(talking_export: Path, talking_model: Path) -> None:
    model = ExportedModel.open(talking_export, prefill_chunk=2)
    with model.opened() as held:
        conversation = HeldConversation(
            model, LanguageReader(model, held), Sampling().choice(model.settings), max_new_tokens=_TOKENS
        )
        assert list(conversation.ask("w10 w11 w12 w13", lambda: True)) == []
        assert conversation.messages == () and len(held.tokens) == 2
        asked: list[Message] = [{"role": "user", "content": "w14"}]
        assert "".join(conversation.ask("w14")) == _Theirs(talking_model).answer(asked)


def test_the_longest_context(talking_export: Path) -> None:
    model = ExportedModel.open(talking_export)
    assert model.max_positions is not None
    with _conversation(talking_export, max_new_tokens=model.max_positions) as conversation:
        list(conversation.ask("w10 " * (model.max_positions - 7) + "w11"))
        account = conversation.account
        assert account is not None and account.read_tokens + account.tokens <= model.max_positions
        before = conversation.messages
        with pytest.raises(OptionError, match=f"longest context is {model.max_positions}"):
            list(conversation.ask("w12 " * 20))
        assert conversation.messages == before
        conversation.reset()
        assert "".join(conversation.ask("w12"))
