"""The server as OpenAI's own client meets it: a process of its own, the real engine."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import APIStatusError, BadRequestError, InternalServerError, NotFoundError, OpenAI, RateLimitError

from t2n_llm.chat.conversation import HeldConversation
from t2n_llm.measure.generate import ExportedModel
from t2n_llm.sampling.wishes import Sampling
from tests.systems import WINDOWS
from tests.t2n_llm.fork_server import PipedCommand

_HELLO: Any = [{"role": "user", "content": "Hello"}]
_MOST_BYTES = 100_000


class _Server:
    """`t2n-llm serve` in a process of its own."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        command = ["serve", folder, "--port", 0, "--name", "tiny", *arguments]
        self._process = PipedCommand([str(each) for each in command], dict(os.environ))
        line = self._process.stderr.readline()
        found = re.search(r"tiny at http://127\.0\.0\.1:(\d+)/v1", line)
        assert found, line + self._process.stderr.read()
        self.port = int(found[1])

    @property
    def pid(self) -> int:
        return self._process.pid

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

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
        chat = HeldConversation(model, held, Sampling().choice(model.settings), max_new_tokens=8)
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
        ({"messages": []}, "messages", "no list of messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "no text"),
        ({"temperature": -1}, None, "temperature is -1"),
        ({"temperature": "hot"}, "temperature", "hot"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"n": 2}, "n", "not offered"),
        ({"logprobs": True}, "logprobs", "not offered"),
        ({"extra_body": {"magic": 1}}, "magic", "unknown"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, None, "1024"),
    ],
)
def test_mistakes(client: OpenAI, asked: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(BadRequestError) as refusal:
        client.chat.completions.create(**{"model": "tiny", "messages": _HELLO, "max_tokens": 4, **asked})
    assert refusal.value.param == param and words in refusal.value.message
    assert refusal.value.type == "invalid_request_error"


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
