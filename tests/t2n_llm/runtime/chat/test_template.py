"""What is left to read of a conversation, and when its past has to be read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import OptionError
from t2n_llm.runtime.chat.template import ChatTemplate, Message
from t2n_llm.source.hub import load_tokenizer
from tests.trained_model import REAL_MODEL

_THOUGHTLESS = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'].split('</think>')[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(REAL_MODEL)


@pytest.fixture(scope="module")
def template(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate.of(tokenizer, REAL_MODEL)


def _turns(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_ids_are_those_of_transformers(tokenizer: Any) -> None:
    turns = _turns("Hi", "Hello, you.", "And?")
    theirs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert ChatTemplate(tokenizer, REAL_MODEL).written(turns).ids == theirs


def test_a_new_turn_alone_is_read(tokenizer: Any, template: ChatTemplate) -> None:
    first, second = template.written(_turns("Hi")), template.written(_turns("Hi", " Hello, you.", "And?"))
    held = [*first.ids, *_ids(tokenizer, " Hello, you.")]
    assert second.ids[: len(held)] == held
    for count in (len(held), len(held) - 1, 0):
        assert template.left_to_read(second, held[:count]) == second.ids[count:]


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.text("aeé日😀 th.", min_size=1, max_size=6), min_size=1, max_size=6))
def test_other_tokens_of_the_same_text_are_held_too(tokenizer: Any, template: ChatTemplate, pieces: list[str]) -> None:
    answer = "".join(pieces)
    said = [token for piece in pieces for token in _ids(tokenizer, piece)]
    held = [*template.written(_turns("Hi")).ids, *said]
    whole = template.written(_turns("Hi", answer, "And?"))
    left = template.left_to_read(whole, held)
    assert left is not None and tokenizer.decode([*held, *left]) == whole.text
    assert list(left) == list(whole.ids[-len(left) :])


def test_half_a_character_is_no_text(tokenizer: Any, template: ChatTemplate) -> None:
    emoji = _ids(tokenizer, "😀")
    assert len(emoji) > 1
    held = [*template.written(_turns("Hi")).ids, *emoji[:-1]]
    said = "\N{REPLACEMENT CHARACTER}"
    assert template.left_to_read(template.written(_turns("Hi", said, "And?")), held) is None


def test_a_template_that_leaves_out_reasoning_begins_anew(tokenizer: Any) -> None:
    thoughtless = load_tokenizer(REAL_MODEL)
    thoughtless.chat_template = _THOUGHTLESS
    template, answer = ChatTemplate(thoughtless, REAL_MODEL), "<think>So</think>Yes"
    held = [*template.written(_turns("Hi")).ids, *_ids(thoughtless, answer)]
    assert template.left_to_read(template.written(_turns("Hi", answer, "And?")), held) is None
    assert template.left_to_read(template.written(_turns("Hi")), held) is None


def test_refusals(tokenizer: Any) -> None:
    plain = load_tokenizer(REAL_MODEL)
    plain.chat_template = None
    with pytest.raises(OptionError, match="no chat template") as refusal:
        ChatTemplate.of(plain, Path("out"))
    assert "--raw" in (refusal.value.hint or "")
    plain.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(OptionError, match="System role not supported"):
        ChatTemplate(plain, REAL_MODEL).written([{"role": "system", "content": "x"}])


def test_one_of_several_templates_is_chosen() -> None:
    several = load_tokenizer(REAL_MODEL)
    write = "{{ messages[0].content }}"
    for templates in ({"default": f"d {write}", "b": write}, {"tool_use": write, "chat": f"d {write}"}):
        several.chat_template = templates
        assert ChatTemplate.of(several, Path("out")).written(_turns("Hi")).text == "d Hi"
    several.chat_template = {"one": write, "two": write}
    with pytest.raises(OptionError, match="templates one, two; none is the default") as refusal:
        ChatTemplate.of(several, Path("out"))
    assert "chat_template.jinja" in (refusal.value.hint or "")
    several.chat_template = 5
    with pytest.raises(OptionError, match="no text"):
        ChatTemplate.of(several, Path("out"))


def test_special_tokens_in_messages_are_tokens_or_text(tokenizer: Any) -> None:
    (end,) = _ids(tokenizer, "<|end|>")
    turns = _turns("a<|end|>b")
    counts = [
        list(ChatTemplate.of(tokenizer, REAL_MODEL, sanitized=sanitized).written(turns).ids).count(end)
        for sanitized in (False, True)
    ]
    assert counts[0] == counts[1] + 1
    ids = ChatTemplate.of(tokenizer, REAL_MODEL, sanitized=True).written(turns).ids
    assert "a<|end|>b" in tokenizer.decode(ids)


def test_a_prompt_that_is_no_text_is_refused(tokenizer: Any) -> None:
    broken = load_tokenizer(REAL_MODEL)
    broken.chat_template = "{{ '\\ud800' }}{{ messages[0].content }}"
    with pytest.raises(OptionError, match="half of a character"):
        ChatTemplate.of(broken, REAL_MODEL).written(_turns("Hi"))
    with pytest.raises(OptionError, match="set by the conversation"):
        ChatTemplate.of(tokenizer, REAL_MODEL, {"messages": []})
