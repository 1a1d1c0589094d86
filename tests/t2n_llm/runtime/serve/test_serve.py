"""The server as OpenAI's own client meets it: a process of its own, the real engine."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import APIStatusError, BadRequestError, InternalServerError, NotFoundError, OpenAI, RateLimitError

from t2n_llm.runtime.chat.conversation import HeldConversation
from t2n_llm.runtime.conversation_reader import LanguageReader
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.sampling.options import Sampling
from tests.systems import WINDOWS
from tests.t2n_llm.command_line import call, refused
from tests.t2n_llm.fork_server import PipedCommand

_HELLO: Any = [{"role": "user", "content": "Hello"}]
_MOST_BYTES = 100_000


class _Server:
    """`t2n-llm serve` in a process of its own."""

    def __init__(self, folder: Path, *arguments: object, name: str = "tiny") -> None:
        command = ["serve", folder, "--port", 0, "--name", name, *arguments]
        self._process = PipedCommand([str(each) for each in command], dict(os.environ))
        found = next(
            filter(None, (re.search(r"at http://[\d.]+:(\d+)/v1", line) for line in self._process.stderr)), None
        )
        assert found, "it never said where it is"
        self.port = int(found[1])

    @property
    def pid(self) -> int:
        return self._process.pid

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
        """Send a request as it is; return status and record of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {"Content-Type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        status, record = answer.status, json.loads(answer.read())
        connection.close()
        return status, record

    def end(self) -> None:
        """Interrupt it; assert that it ends well. On Windows it can only be killed."""
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=60)
        self._process.close()
        assert WINDOWS or self._process.returncode == 0


@pytest.fixture(scope="module")
def server(endless_export: Path) -> Iterator[_Server]:
    """A server with small limits."""
    running = _Server(endless_export, "--max-waiting", 2, "--max-request-bytes", _MOST_BYTES)
    yield running
    running.end()


@pytest.fixture
def client(server: _Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def own(endless_export: Path) -> list[str]:
    """The answers of a chat of two turns without any server."""
    model = ExportedModel.open(endless_export)
    with model.opened() as held:
        chat = HeldConversation(model, LanguageReader(model, held), Sampling().choice(model.settings), max_new_tokens=8)
        return ["".join(chat.ask(text)) for text in ("Hello", "And then?")]


def test_a_chat_reads_only_what_is_new(client: OpenAI, own: list[str]) -> None:
    first = client.chat.completions.create(model="tiny", messages=_HELLO, max_tokens=8)
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == (own[0], "length")
    assert first.usage is not None and first.usage.completion_tokens == 8
    assert first.usage.total_tokens == first.usage.prompt_tokens + 8
    turns = [*_HELLO, {"role": "assistant", "content": own[0]}, {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model="tiny", messages=turns, max_completion_tokens=8)
    assert second.choices[0].message.content == own[1]
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens + 7


def test_a_streamed_chat(client: OpenAI, own: list[str]) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=_HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(said) == own[0] and len(list(filter(None, said))) > 3
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_texts_go_on(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="The old man", max_tokens=8)
    pieces = client.completions.create(model="tiny", prompt="The old man", max_tokens=8, stream=True)
    text = whole.choices[0].text
    assert "".join(piece.choices[0].text for piece in pieces) == text
    word = text.split()[2]
    stopped = client.completions.create(model="tiny", prompt="The old man", max_tokens=8, stop=[word])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (text[: text.index(word)], "stop")

    def drawn(seed: int) -> str:
        made = client.completions.create(model="tiny", prompt="The old man", max_tokens=8, temperature=1.5, seed=seed)
        return made.choices[0].text

    assert drawn(1) == drawn(1) != drawn(2)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "t2n-llm"
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"messages": []}, "messages", "must be a list of messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "must have the text url"),
        ({"temperature": -1}, None, "temperature is -1"),
        ({"temperature": "hot"}, "temperature", "hot"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"n": 2}, "n", "not supported"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"extra_body": {"magic": 1}}, "magic", "unknown"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, None, "1024"),
    ],
)
def test_mistakes(client: OpenAI, asked: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(BadRequestError) as refusal:
        client.chat.completions.create(**{"model": "tiny", "messages": _HELLO, "max_tokens": 4, **asked})
    assert refusal.value.param == param and words in refusal.value.message
    assert refusal.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('"temperature": 1e400', "not JSON"),
        ('"temperature": NaN', "not JSON"),
        (f'"temperature": 1{"0" * 400}', "temperature is too large"),
        (f'"seed": 1{"0" * 30}', "seed is too large"),
        ('"metadata": ' + "[" * 40_000 + "]" * 40_000, "nested too deeply"),
        (r'"stop": "\ud800"', "lone surrogate"),
        ('"messages": [{"role": ["user"], "content": "Hello"}]', "one of the roles"),
        ('"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]', "is not supported"),
        ('"chat_template_kwargs": []', "not a JSON object"),
        ('"chat_template_kwargs": {"messages": []}', "set by the conversation"),
        ('"reasoning_effort": "low"', "has no variable 'reasoning_effort'"),
    ],
    ids=lambda value: value[:30],
)
def test_bodies_that_no_client_sends(server: _Server, more: str, words: str) -> None:
    messages = "" if "messages" in more[:11] else '"messages": [{"role": "user", "content": "Hello"}], '
    status, record = server.ask(
        "POST", "/v1/chat/completions", f'{{"model": "tiny", "max_tokens": 1, {messages}{more}}}'
    )
    assert (status, record["error"]["type"]) == (400, "invalid_request_error")
    assert words in record["error"]["message"]


def test_mistakes_of_another_kind(server: _Server, client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=_HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(APIStatusError) as large:
        client.completions.create(model="tiny", prompt="x" * _MOST_BYTES)
    assert large.value.status_code == 413
    for method, path, headers, status in [
        ("GET", "/nowhere", {}, 404),
        ("GET", "/v1/completions", {}, 405),
        ("POST", "/v1/completions", {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/completions", {"Content-Type": "application/json"}, 400),
    ]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        assert answer.status == status
        assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"
    connection.request("GET", "/v1/models", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 400


def test_a_client_that_goes_away_stops_its_answer(client: OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt="The old man", max_tokens=900, stream=True)
    next(iter(stream))
    begun = time.monotonic()
    stream.close()
    client.completions.create(model="tiny", prompt="The old man", max_tokens=1)
    whole = time.monotonic() - begun
    begun = time.monotonic()
    client.completions.create(model="tiny", prompt="The old man", max_tokens=900)
    assert whole < (time.monotonic() - begun) / 3


def test_requests_wait_for_their_turn_and_not_too_many_do(server: _Server, client: OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt="The old man", max_tokens=900, stream=True)
    next(iter(stream))
    done: list[str] = []

    def ask(word: str) -> None:
        with server.client() as other:
            done.append(f"{word}{other.completions.create(model='tiny', prompt=word, max_tokens=2).choices[0].text}")

    waiting = [threading.Thread(target=ask, args=(word,)) for word in ("one", "two")]
    for thread in waiting:
        thread.start()
        time.sleep(0.5)  # so that they come in this order
    with pytest.raises(RateLimitError):
        client.completions.create(model="tiny", prompt="three", max_tokens=2)
    stream.close()
    for thread in waiting:
        thread.join(timeout=60)
    assert [text[:3] for text in done] == ["one", "two"]


def test_an_engine_that_dies_costs_one_answer(server: _Server, client: OpenAI) -> None:
    before = client.completions.create(model="tiny", prompt="The old man", max_tokens=4).choices[0].text
    engines = [
        child for child in psutil.Process(server.pid).children(recursive=True) if "wheel_worker" in str(child.cmdline())
    ]
    assert len(engines) == 1
    engines[0].kill()
    with pytest.raises(InternalServerError, match="tract"):
        client.completions.create(model="tiny", prompt="The old man", max_tokens=4)
    assert client.completions.create(model="tiny", prompt="The old man", max_tokens=4).choices[0].text == before


def test_an_answer_ends_when_its_time_is_up(endless_export: Path) -> None:
    server = _Server(endless_export, "--max-seconds", 0.2, "-n", 900)
    try:
        with server.client() as client:
            made = client.completions.create(model="tiny", prompt="The old man", max_tokens=100_000)
            assert made.choices[0].finish_reason == "length"
            assert made.usage is not None and 0 < made.usage.completion_tokens < 900
    finally:
        server.end()


def test_a_client_that_never_reads_costs_others_no_more_than_its_time(endless_export: Path) -> None:
    name = "n" * 8000  # it is in every event, so that these fill the system's buffers
    server = _Server(endless_export, "--max-seconds", 3, name=name)
    try:
        with socket.socket() as idle, server.client() as client:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            idle.connect(("127.0.0.1", server.port))
            body = json.dumps({"model": name, "prompt": "The old man", "stream": True, "max_tokens": 1000})
            lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
            idle.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode())
            time.sleep(0.5)
            begun = time.monotonic()
            client.completions.create(model=name, prompt="The old man", max_tokens=1, timeout=20)
            assert time.monotonic() - begun < 10
    finally:
        server.end()


def test_names_and_keys(endless_export: Path) -> None:
    key = {"Authorization": "Bearer secret"}
    server = _Server(endless_export, "--host", "0.0.0.0", "--allowed-host", "llm.example", "--api-key", "secret")
    try:
        for host, status in [
            ("evil.example", 400),
            ("llm.example", 200),
            (socket.gethostname(), 200),
            ("127.0.0.1:80", 200),
            ("10.1.2.3", 200),
            ("[::1]:80", 200),
            ("[", 400),
        ]:
            assert server.ask("GET", "/v1/models", Host=host, **key)[0] == status, host
        for wrong in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
            status, record = server.ask("GET", "/v1/models", **wrong)
            assert (status, record["error"]["code"]) == (401, "invalid_api_key")
    finally:
        server.end()
    refused(call("serve", endless_export, "--api-key", ""), "--api-key")


def test_templates_that_do_not_end_and_variables(endless_export: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(endless_export, tmp_path / "export"))
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        f"{{% if forever %}}\n{loop}{{% endif %}}{{{{ reasoning_effort }}}}{template}"
    )
    server = _Server(folder, "--sanitize-special-tokens")

    def count(text: str, **more: Any) -> int:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}
        status, record = server.ask("POST", "/v1/chat/completions", json.dumps(asked))
        assert status == 200, record
        return int(record["usage"]["prompt_tokens"])

    def ask_and_lose(body: str) -> None:
        with pytest.raises((OSError, http.client.HTTPException, ValueError)):
            server.ask("POST", "/v1/chat/completions", body)

    try:
        assert count("Hello", reasoning_effort="<|end|>") == count(
            "Hello", chat_template_kwargs={"reasoning_effort": "<|end|>"}
        )
        assert count("Hello<|end|>") > count("Hello") + 1  # text, not one token
        body = json.dumps({"model": "tiny", "messages": _HELLO, "chat_template_kwargs": {"forever": True}})
        status, record = server.ask("POST", "/v1/chat/completions", body)
        assert status == 400 and "stopped in line 2: it ran for more than 5 s" in record["error"]["message"]
        begun = time.monotonic()
        asking = threading.Thread(target=ask_and_lose, args=(body,))
        asking.start()
        time.sleep(0.5)
    finally:
        server.end()
    assert time.monotonic() - begun < 15
