"""What strangers send, for scripts/attack.py: chat templates, requests, folders and manifests.

In: an arena, dice. Out: how many inputs survived.
"""

from __future__ import annotations

import copy
import http.client
import json
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attack_arena import FORMS, Arena, NotSurvivedError, Run, refuse_bad_end

_TOKENIZER = Path(__file__).resolve().parents[1] / "examples" / "models" / "tiny-llama-real"
_RENDER_SECONDS = 60.0  # of a whole command: start, 5 s of the template, and a busy machine
_BODIES = 60
_SERVED_SECONDS = 3
_EXPRESSIONS = (
    *("messages", "messages[0].content", "m.content", "'x' * 100000", "'x' * 10000000000", "range(100000) | list"),
    *("m.content | tojson", "a.b.c", "''.__class__.__mro__", "raise_exception('no')", "9 ** 9 ** 9", "[1] * 100000000"),
    *("'%99999999d' % 1", "'{:>99999999}'.format(1)", "cycler.__init__.__globals__", "'\\ud800'", "f(1)", "part.text"),
)
_BLOCKS = (
    *(
        "{{% for a in range(99999) %}}{0}{{% endfor %}}",
        "{{% for m in messages %}}{0}{{% endfor %}}",
        "{{% if a %}}{0}",
    ),
    *(
        "{{% macro f(x) %}}{0}{{% endmacro %}}{{{{ f(1) }}}}",
        "{{% for part in messages[0].content %}}{0}{{% endfor %}}",
    ),
    *("{{% set x %}}{0}{{% endset %}}{{{{ x }}}}", "\n{0}\n{0}"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, "", "x", [], {}, [[]], "\ud800", 10**30, ["user"], {"role": ["user"]}, "w " * 20_000),
    *(float("nan"), float("inf"), 1e-320, "<|end|>", [{"type": "text", "text": {}}], {"messages": 1}),
)
_FIELDS = (
    *(
        "messages",
        "prompt",
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
        "stop",
        "max_tokens",
        "stream",
    ),
    *("stream_options", "n", "logit_bias", "metadata", "chat_template_kwargs", "reasoning_effort", "tools", "other"),
)
_RAW = (
    *(
        b"",
        b"[",
        b"{",
        b"null",
        b"[" * 50_000 + b"]" * 50_000,
        b'{"a":' * 50_000,
        b'{"temperature": 1e400}',
        b"\xff\xfe",
    ),
    *(b'{"seed": 1' + b"0" * 5000 + b"}", b'"\\ud800"'),
)


def templates(arena: Arena, dice: random.Random) -> int:
    """A random chat template that loops, recurses, grows, fails or leaves the user's text out, given to `generate`."""
    folder = _with_tokenizer(arena)
    (folder / "chat_template.jinja").write_text(_template(dice), encoding="utf-8", errors="surrogatepass")
    began = time.monotonic()
    end = Run(["generate", folder, "Hello", "-n", 1], folder.parent / "log").wait()
    refuse_bad_end(end)
    took = time.monotonic() - began
    if end.code == 1 or took > _RENDER_SECONDS:
        raise NotSurvivedError(f"exit code {end.code} after {took:.0f} s: {end.said[-300:]}")
    if end.code == 2 and "template" not in end.said and "positions" not in end.said and "token" not in end.said:
        raise NotSurvivedError(f"the template is not named: {end.said[-300:]}")
    return 1


def _template(dice: random.Random) -> str:
    text = "".join(f"{{{{ {dice.choice(_EXPRESSIONS)} }}}}" for _ in range(dice.randrange(1, 4)))
    for _ in range(dice.randrange(4)):
        text = dice.choice(_BLOCKS).format(text)
    return text


def _with_tokenizer(arena: Arena) -> Path:
    folder = Path(shutil.copytree(arena.reference("tar"), arena.case() / "export"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(_TOKENIZER / name, folder / name)
    return folder


def requests(arena: Arena, dice: random.Random) -> int:
    """Random bodies, foreign names, a missing key and a client that never reads, sent to `serve`; then Ctrl-C."""
    folder = _with_tokenizer(arena)
    words = [
        "serve",
        folder,
        "--port",
        0,
        "--host",
        "0.0.0.0",
        "--api-key",
        "key",
        "--max-seconds",
        _SERVED_SECONDS,
        "-n",
        4,
    ]
    run, log = Run(words, folder.parent / "log"), folder.parent / "log"
    try:
        port = _port(run, log)
        with ExitStack() as stack:
            stack.enter_context(_idle(port))
            for _ in range(_BODIES):
                _send(port, dice)
    finally:
        run.signal(signal.SIGINT)
    end = run.wait()
    refuse_bad_end(end)
    if end.code:
        raise NotSurvivedError(f"Ctrl-C: {end}")
    return _BODIES


def _port(run: Run, log: Path) -> int:
    while not run.ended():
        found = re.search(r"http://0\.0\.0\.0:(\d+)/v1", log.read_text(errors="replace") if log.exists() else "")
        if found:
            return int(found[1])
        time.sleep(0.05)
    raise NotSurvivedError(f"the server did not start: {log.read_text(errors='replace')[-300:]}")


def _idle(port: int) -> socket.socket:
    """Return the connection of a client that asks for a stream and never reads it."""
    idle = socket.create_connection(("127.0.0.1", port))
    body = b'{"model": "export", "prompt": "Hello", "stream": true, "max_tokens": 4}'
    lines = (b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Authorization: Bearer key")
    further = (b"Content-Type: application/json", b"Content-Length: %d" % len(body), b"", body)
    idle.sendall(b"\r\n".join([*lines, *further]))
    return idle


def _send(port: int, dice: random.Random) -> None:
    headers = {"Content-Type": "application/json", "Host": "localhost", "Authorization": "Bearer key"}
    allowed = {200, 400, 404}
    kind = dice.randrange(8)
    if kind == 0:
        headers["Host"], allowed = dice.choice(("evil.example", "[", "localhost.evil.example", "")), {400}
    elif kind == 1:
        headers["Authorization"], allowed = dice.choice(("", "Bearer", "Bearer kex", "Basic key")), {401}
    chat = dice.random() < 0.7
    body = dice.choice(_RAW) if kind == 2 else _body(dice, chat)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_RENDER_SECONDS)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        said = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise NotSurvivedError(f"no answer ({error!r}) to {body[:200]!r}") from error
    finally:
        connection.close()
    if answer.status not in allowed:
        raise NotSurvivedError(f"{answer.status} {said[:200]!r} to {body[:200]!r} with {headers}")


def _body(dice: random.Random, chat: bool) -> bytes:
    asked: dict[str, Any] = {"model": "export", "max_tokens": 2}
    asked |= {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    for _ in range(dice.randrange(1, 3)):
        asked[dice.choice(_FIELDS)] = dice.choice(_VALUES)
    if chat and dice.random() < 0.3:
        asked["messages"] = [{"role": dice.choice(("user", *_VALUES)), "content": dice.choice(_VALUES)}]
    return json.dumps(asked).encode()


def folders(arena: Arena, dice: random.Random) -> int:
    """An export whose files became links, or that holds files that nobody recorded: `verify` reports each."""
    export = Path(shutil.copytree(arena.reference(dice.choice(FORMS)), arena.case() / "export"))
    file = dice.choice([path for path in sorted(export.rglob("*")) if path.is_file() and path.name != "README.md"])
    change = dice.choice(("link", "code", "file"))
    name = file.name
    if change == "link":
        elsewhere = export.parent / "elsewhere"
        file.rename(elsewhere)
        file.symlink_to(elsewhere)
    else:
        name = "extra.py" if change == "code" else "extra.txt"
        (file.parent / name).write_text("1")
    end = Run(["verify", export], export.parent / "log").wait()
    refuse_bad_end(end)
    inside = file.parent != export and change != "link"
    if name not in end.said or end.code != int(change == "link" or inside):
        raise NotSurvivedError(f"{change} of {name}: {end}")
    return 1


def manifests(arena: Arena, dice: random.Random) -> int:
    """A random value of `export.json` replaced or deleted: a command works, or names it."""
    export = Path(shutil.copytree(arena.reference("tar", checked=dice.random() < 0.5), arena.case() / "export"))
    path = export / "export.json"
    manifest = json.loads(path.read_text())
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        manifest = _changed(manifest, dice)
    path.write_text(json.dumps(manifest))
    words: list[object] = dice.choice((["verify", export], ["card", export, "--print"], ["inspect", export]))
    refuse_bad_end(Run(words, export.parent / "log").wait())
    return 1


def _changed(manifest: Any, dice: random.Random) -> Any:
    made = copy.deepcopy(manifest)
    holder, key = dice.choice(list(_places(made)))
    if dice.random() < 0.2:
        del holder[key]
    else:
        holder[key] = dice.choice(_VALUES)
    return made


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)
