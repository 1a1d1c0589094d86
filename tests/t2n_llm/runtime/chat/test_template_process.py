"""Chat templates are rendered as transformers does, in the form that keeps the user's text, and within limits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from generic_export.errors import OptionError
from t2n_llm.runtime.chat.template_process import TemplateProcess

_TURNS = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": " Grüße\n"},
    {"role": "assistant", "content": "Hello 😀"},
    {"role": "user", "content": "And?"},
]
_PART = "{% if part.type == 'text' %}{{ part.text }}{% endif %}"


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(seconds=1.0)
    yield process
    process.close()


def _rendered(process: TemplateProcess, template: str, *texts: str, **variables: Any) -> str:
    turns = [{"role": "user", "content": text} for text in texts or ("Hello",)]
    return process.render(template, turns, variables=variables)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}\n  <|{{ m.role }}|>\n  {{ m['content'] | trim }}<|end|>\n{% endfor %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% set x = namespace(n=0) %}{% for m in messages %}{% set x.n = x.n + 1 %}{{ x.n }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content | tojson(indent=2) }}{% endgeneration %}{% endfor %}",
        "{{ dict(a=tools, b=documents) }}{{ strftime_now('%Y') }}{{ messages[-1].content }}{{ add_generation_prompt }}",
        "{%- macro say(m) -%} {{ m.content }} {%- endmacro -%}{% for m in messages %}{{ say(m) }}{% endfor %}",
    ],
)
def test_prompts_are_those_of_transformers(process: TemplateProcess, template: str) -> None:
    theirs, _ = render_jinja_template([_TURNS], chat_template=template, add_generation_prompt=True, bos_token="<s>")
    assert process.render(template, _TURNS, variables={"bos_token": "<s>"}) == theirs[0]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (f"{{% for m in messages %}}{{% for part in m.content %}}{_PART}{{% endfor %}}{{% endfor %}}", "Be user"),
        ("{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}", "Be user"),
        ("{{ messages[0].content }}{{ messages[1].content | map(attribute='text') | join }}", "Be user"),
        ("{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}", "Be user"),
        ("<|user|>{{ messages[-1].content | tojson | upper }}", '<|user|>"USER"'),
    ],
    ids=["parts", "first part", "parts of the user alone", "both", "escaped"],
)
def test_contents_have_the_form_that_the_template_reads(process: TemplateProcess, template: str, prompt: str) -> None:
    turns = [{"role": "system", "content": "Be "}, {"role": "user", "content": "user"}]
    assert process.render(template, turns, variables={}) == prompt


def test_images_come_where_the_template_writes_them(process: TemplateProcess) -> None:
    asked = [{"type": "image"}, {"type": "text", "text": "what?"}]
    turns = [{"role": "system", "content": "Be "}, {"role": "user", "content": asked}]
    parts = f"{{% if part.type == 'image' %}}<image>{{% else %}}{_PART}{{% endif %}}"
    template = f"{{% for m in messages %}}{{% for part in m.content %}}{parts}{{% endfor %}}{{% endfor %}}"
    assert process.render(template, turns, variables={}) == "Be <image>what?"
    own = f"{{{{ messages[0].content }}}}{{% for part in messages[1].content %}}{parts}{{% endfor %}}"
    assert process.render(own, turns, variables={}) == "Be <image>what?"
    with pytest.raises(OptionError, match="drops the user's message"):
        process.render("{% for m in messages %}{{ m.content }}{% endfor %}", turns, variables={})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("<|user|>", "refuses the conversation: it drops the user's message"),
        ("\n{% for %}", "fails in line 2: TemplateSyntaxError"),
        ("{% set x = 1 %}\n\n{{ a.b.c }}", "fails in line 3: UndefinedError: 'a' is undefined"),
        ("\n{{ ''.__class__.__mro__ }}", "fails in line 2: SecurityError"),
        ("{% macro f() %}\n{{ f() }}{% endmacro %}{{ f() }}", "fails in line 2: RecursionError"),
        ("\n{{ raise_exception('Only two turns.') }}", "refuses the conversation in line 2: Only two turns."),
        ('\n{% for a in range(5000) %}{{ "x" * 100000 }}{% endfor %}', "stopped in line 2: it wrote more than"),
        ('\n{{ "x" * 10000000000 }}', "stopped in line 2: it needs more than 512 MiB"),
        (
            "\n{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "stopped in line 2: it ran",
        ),
    ],
)
def test_failures_name_their_line(process: TemplateProcess, template: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(OptionError) as refusal:
        _rendered(process, template)
    assert words in refusal.value.message and refusal.value.hint
    assert time.monotonic() - began < 8
    assert _rendered(process, "{{ messages[0].content }}") == "Hello"  # the next one is rendered


def test_variables(process: TemplateProcess) -> None:
    template = "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }} {{ messages[0].content }}"
    turns = [{"role": "user", "content": "Hi"}]
    assert process.render(template, turns, variables={}) == "low Hi"
    assert process.render(template, turns, variables={"effort": "high"}, named=["effort"]) == "high Hi"
    with pytest.raises(OptionError, match="has no variable 'efort'; its variables: effort"):
        process.render(template, turns, variables={"efort": "high"}, named=["efort"])
