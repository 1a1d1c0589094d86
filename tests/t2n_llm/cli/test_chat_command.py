"""`t2n-llm chat` as a user meets it: in a terminal, with Ctrl-C, and in a pipe."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

from t2n_llm.runtime.generate import ExportedModel
from tests.systems import needs_terminal
from tests.t2n_llm.command_line import Outcome, call, refused, run, strict_json
from tests.t2n_llm.typed_chat import typed_chat


def _piped(folder: Path, text: str | bytes, *arguments: object) -> Outcome:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.seek(0)
        return run("chat", folder, *arguments, stdin=file)


@needs_terminal
def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(endless_export: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with typed_chat(endless_export) as chat:
        chat.type("The old man")
        chat.wait_for("The old man\n")
        while len(chat.shown.split("The old man\n")[-1]) < 20:
            chat.wait_for(" ")
        chat.press_ctrl_c()
        assert "tokens/s" in chat.wait_for("; stopped")
        chat.wait_for("> ")
        chat.type("And then?")
        chat.wait_for("And then?\n")
        chat.wait_for(" ")
        time.sleep(0.7)  # two presses that are closer are one
        chat.press_ctrl_c()
        chat.wait_for("; stopped")
        chat.wait_for("> ")
        chat.type(f"/save {saved}")
        chat.wait_for("4 messages")
        chat.type("/exit")
        assert chat.end() == 0
    messages = json.loads(saved.read_text())
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == "The old man" and messages[1]["content"][:10] in chat.shown


@needs_terminal
def test_ctrl_c_at_the_prompt(real_export: Path) -> None:
    with typed_chat(real_export, "-n", 4) as chat:
        chat.press("half a line")
        chat.wait_for("half a line")
        chat.wait_until_it_reads()
        chat.press_ctrl_c()
        chat.wait_for("> ")
        chat.type("Hello")  # nothing of the dropped line is left
        chat.wait_for("tokens/s; cut off there (--max-new-tokens)")
        chat.wait_for("> ")
        chat.wait_until_it_reads()
        chat.press_ctrl_c()
        chat.wait_for("Ctrl-C again leaves")
        chat.wait_for("> ")
        chat.wait_until_it_reads()
        chat.press_ctrl_c()
        assert chat.end() == 0
    assert "Traceback" not in chat.shown


@needs_terminal
def test_a_stopped_answer_and_one_more_ctrl_c_leave(endless_export: Path) -> None:
    with typed_chat(endless_export) as chat:
        chat.type("The old man")
        chat.wait_for("The old man\n")
        chat.wait_for(" ")
        chat.press_ctrl_c()
        chat.wait_for("; stopped")
        chat.wait_for("> ")
        chat.wait_until_it_reads()
        chat.press_ctrl_c()
        assert chat.end() == 0


@needs_terminal
def test_commands_and_mistakes_in_a_terminal(real_export: Path, tmp_path: Path) -> None:
    saved = tmp_path / "with space.json"
    with typed_chat(real_export, "--system", "Be brief.", "-n", 4) as chat:
        for typed, told in [
            ("/help", "/save FILE"),
            ("/sing", "/sing is no command."),
            ("/save", "/save needs a file."),
            (f"/save {tmp_path}/nowhere/chat.json", "No such file"),
            ("Hello", "tokens/s"),
            ("/reset", "A new conversation."),
            (f"/save {saved}", "1 messages"),
            ("Hello " * 1200, "longest context is 1024"),
            ("Hello", "tokens/s"),
        ]:
            chat.type(typed)
            chat.wait_for(told)
            chat.wait_for("> ")
        chat.press("\x04")
        assert chat.end() == 0
    assert json.loads(saved.read_text()) == [{"role": "system", "content": "Be brief."}]


def test_lines_of_a_pipe_are_turns(real_export: Path) -> None:
    done = _piped(real_export, "Hello\n\nAnd then?\n/reset\nHello\n/exit\nnever read\n", "-n", 6, "--json")
    assert (done.code, done.err) == (
        0,
        "warning: an answer has 6 tokens: cut off there (--max-new-tokens).\n" * 3,
    )
    answers = [record for line in done.out.splitlines() if "prompt" in (record := strict_json(line))]
    assert [answer["prompt"] for answer in answers] == ["Hello", "And then?", "Hello"]
    first, second, third = answers
    assert third["text"] == first["text"] and third["held_tokens"] == first["held_tokens"] == 0
    assert second["held_tokens"] == first["read_tokens"] + 5 and second["read_tokens"] < 20
    plain = _piped(real_export, "Hello\nAnd then?\n", "-n", 6)
    assert plain.out == f"{first['text']}\n{second['text']}\n"


def test_a_chat_is_sampled_from_a_seed(real_export: Path) -> None:
    texts = [
        _piped(real_export, "Hello\nMore\n", "-n", 6, "--temperature", 1.5, "--seed", seed).out for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_longest_context_is_told(endless_export: Path) -> None:
    positions = ExportedModel.open(endless_export).max_positions
    done = _piped(endless_export, "word " * 990 + "\nMore\n")
    assert done.code == 2
    assert "the model's longest context is reached" in done.err
    assert f"longest context is {positions}" in done.err


def test_refusals(real_export: Path, tiny_export: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(real_export, tmp_path / "export"))
    (folder / "chat_template.jinja").unlink()
    outcome = call("chat", folder)
    refused(outcome, "no chat template")
    assert "--raw" in outcome.line("hint")
    refused(call("chat", tiny_export), "tokenizer")
    refused(call("chat", real_export, "--greedy", "--top-p", 0.5), "greedy")
    done = _piped(real_export, b"caf\xe9\n")
    assert done.code == 2 and "no UTF-8" in done.err


def test_variables_of_the_template(endless_export: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(endless_export, tmp_path / "export"))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{% if brief %}Say it in few words. {% endif %}" + template)
    kwargs = ("--template-kwargs", '{"brief": true}')

    def tokens(outcome: Outcome) -> int:
        assert outcome.code == 0, outcome
        return int(strict_json(outcome.out.splitlines()[-1])["prompt_tokens"])

    plain, brief = (tokens(call("generate", folder, "Hello", "-n", 1, "--json", *more)) for more in ((), kwargs))
    assert brief > plain
    assert tokens(_piped(folder, "Hello\n", "-n", 1, "--json", *kwargs)) == brief
    for command in (("generate", folder, "Hello"), ("chat", folder)):
        refused(call(*command, "--template-kwargs", "{"), "--template-kwargs", "JSON")
        refused(call(*command, "--template-kwargs", "[1]"), "--template-kwargs", "no JSON object")
    refused(call("generate", folder, "Hello", "--template-kwargs", '{"breif": 1}'), "no variable 'breif'", "brief")
    refused(call("generate", folder, "Hello", "--raw", *kwargs), "--raw")


def test_a_template_of_parts_reads_the_user_and_one_that_leaves_it_out_is_refused(
    endless_export: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(endless_export, tmp_path / "export"))
    part = "{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    counts = []
    for content in ("{{ m.content }}", f"{{% for part in m.content %}}{part}{{% endfor %}}"):
        (folder / "chat_template.jinja").write_text(f"{{% for m in messages %}}{content}<|end|>{{% endfor %}}")
        outcome = call("generate", folder, "The old man", "-n", 1, "--json")
        counts.append(strict_json(outcome.out.splitlines()[-1])["prompt_tokens"])
    assert counts[0] == counts[1] > 3
    (folder / "chat_template.jinja").write_text("<|user|>")
    refused(call("generate", folder, "The old man", "-n", 1), "leaves out the user's message")
