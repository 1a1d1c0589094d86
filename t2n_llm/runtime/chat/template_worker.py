"""A process that renders chat templates, which come with models and are not trusted: it limits memory, time and output.

In: requests on stdin, one JSON object per line (`template`, `messages`, `variables`,
`named`: variables that it has to read, `seconds` that it may take). Out: replies on stdout: `text`, or `error`, `line`
and `kind`. It runs as a script and imports jinja2 only, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if sys.platform != "win32":
    import resource

MEMORY_BYTES = 1 << 29  # address space of this process; the interpreter takes 30 MB of it
LEAST_CHARACTERS = 1 << 20  # of output that is always allowed
_PER_CHARACTER = 4  # characters of output for each one of the messages, beyond that
_LONGEST_MESSAGE = 400
_COMPILED_NAME = "<template>"  # file name of the code that jinja2 compiles a text to
_WORD = "t2nword0417"  # no template writes it by itself
_PRINTED_PARTS = "{'type': 'text', 'text': "  # a list of parts that a template prints instead of reading it

# What ended a rendering: the template's own words, an error in it, a limit.
REFUSED, FAILED, STOPPED = "refused", "failed", "stopped"

Message = dict[str, Any]


class _LimitError(Exception):
    """The template exceeded a limit."""


class _MissingTextError(Exception):
    """The rendered prompt lacks the user's text."""


# --- the environment, as transformers makes it (utils/chat_template_utils.py) -------------------------


class _Generation(Extension):
    """`{% generation %}`, which marks answers for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """A namespace without names that begin with an underscore, which could lead into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Namespace: `self` may be a name
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _refuse_private(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


class _Dict:
    """`dict`, of which a template can reach no attribute but `fromkeys`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=4)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dict(),
        namespace=_PublicNamespace,
    )
    return environment.from_string(source)


# --- rendering ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Render:
    """One request.

    Attributes:
        source: of the template.
        variables: that it reads besides `messages` and `add_generation_prompt`.
        most: characters of output.
    """

    source: str
    variables: Mapping[str, Any]
    most: int

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the prompt, with contents in the first form that keeps the user's text.

        Raises:
            _MissingTextError: no form does.
            Exception: the template fails with plain texts, and with every other form.
        """
        failure: Exception | None = None
        for form in _forms(messages):
            try:
                if self._keeps_user_text(form, messages):
                    return self._text(form)
            except _LimitError:
                raise
            except Exception as error:
                failure = failure or error
        raise failure or _MissingTextError

    def _text(self, messages: Sequence[Message]) -> str:
        template = _compiled(self.source)
        values = {"tools": None, "documents": None, **self.variables}
        context = template.new_context({**values, "messages": messages, "add_generation_prompt": True})
        stream: Any = template.root_render_func(context)
        pieces, count = [], 0
        for piece in stream:
            pieces.append(piece)
            count += len(piece)
            if count > self.most:
                line = _template_line(_compiled(self.source), [(stream.gi_code, stream.gi_frame.f_lineno)])
                raise _LimitError(f"it wrote more than {self.most:,} characters", line)
        return "".join(pieces)

    def _keeps_user_text(self, form: Sequence[Message], messages: Sequence[Message]) -> bool:
        """Return whether the template writes the last user message; its text may be trimmed or escaped, so a word stands for it."""
        last = next((number for number in reversed(range(len(form))) if form[number]["role"] == "user"), None)
        if last is None:
            return True
        probe = [*form[:last], {**form[last], "content": _with_word(form[last]["content"])}]
        text = self._text([*probe, *form[last + 1 :]])
        printed = _PRINTED_PARTS in text and not any(_PRINTED_PARTS in each["content"] for each in messages)
        return _WORD in text.lower() and not printed


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _with_word(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """Return a content whose texts are a word; images and recordings stay."""
    if isinstance(content, str):
        return _WORD
    return [{**part, "text": _WORD} if part["type"] == "text" else part for part in content]


def _forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield a conversation with contents as texts, as lists of parts, and as lists of parts in user messages only.

    One that has images, which come as parts, begins with lists: whoever reads parts finds nothing in a text.
    """
    if not any(isinstance(each["content"], list) for each in messages):
        yield messages
    yield [{**each, "content": _parts(each["content"])} for each in messages]
    yield [{**each, "content": _parts(each["content"])} if each["role"] == "user" else each for each in messages]


# --- errors -------------------------------------------------------------------------------------------


def _template_line(template: Template, places: Sequence[tuple[CodeType, int | None]]) -> int | None:
    """Return the line of a template for the innermost place in its compiled code."""
    for code, number in reversed(places):
        if code.co_filename == _COMPILED_NAME and number is not None:
            return template.get_corresponding_lineno(number)
    return None


def _failed_line(source: str, error: BaseException) -> int | None:
    written = getattr(error, "lineno", None)  # of a syntax error
    if written is not None:
        return int(written)
    places, step = [], error.__traceback__
    while step is not None:
        places.append((step.tb_frame.f_code, step.tb_lineno))
        step = step.tb_next
    return _template_line(_compiled(source), places) if places else None


def _running_line(source: str, frame: FrameType | None) -> int | None:
    places: list[tuple[CodeType, int | None]] = []
    while frame is not None:
        places.insert(0, (frame.f_code, frame.f_lineno))
        frame = frame.f_back
    compiles = all(code.co_filename != _COMPILED_NAME for code, _ in places)
    return None if compiles else _template_line(_compiled(source), places)


def _error(message: str, line: int | None, kind: str = FAILED) -> dict[str, Any]:
    return {"error": message[:_LONGEST_MESSAGE].rstrip("."), "line": line, "kind": kind}


def _reply(request: Mapping[str, Any]) -> dict[str, Any]:
    source, messages = request["template"], request["messages"]
    given = sum(len(str(each["content"])) for each in messages)
    try:
        unread = _unread(source, request["named"])
        if unread is not None:
            return _error(unread, None, REFUSED)
        render = _Render(source, request["variables"], LEAST_CHARACTERS + _PER_CHARACTER * given)
        return {"text": render.prompt(messages)}
    except _LimitError as error:
        return _error(error.args[0], error.args[1], STOPPED)
    except _MissingTextError:
        return _error("it drops the user's message", None, REFUSED)
    except MemoryError as error:
        return _error(f"it needs more than {MEMORY_BYTES >> 20} MiB", _failed_line(source, error), STOPPED)
    except Exception as error:
        line = _failed_line(source, error)
        if type(error) is TemplateError:  # raise_exception of the template
            return _error(str(error), line, REFUSED)
        return _error(f"{type(error).__name__}: {error}", line)


def _unread(source: str, named: Sequence[str]) -> str | None:
    """Return what is wrong where a template never mentions a variable; None when it mentions all."""
    parsed = _compiled(source).environment.parse(source)
    mentioned = {each.name for each in parsed.find_all(nodes.Name)}
    name = next((each for each in named if each not in mentioned), None)
    if name is None:
        return None
    known = sorted(meta.find_undeclared_variables(parsed) - {"messages", "add_generation_prompt"})
    return f"it has no variable {name!r}; its variables: {', '.join(known) or 'none'}"


# --- the process --------------------------------------------------------------------------------------


def _write(reply: Mapping[str, Any]) -> None:
    data = memoryview(json.dumps(reply).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


def _stop_late(source: str, seconds: float, main: int) -> None:
    """Report that the time is up, and end the process: the thread that renders cannot be interrupted."""
    line = _running_line(source, sys._current_frames().get(main))
    _write(_error(f"it ran for more than {seconds:g} s", line, STOPPED))
    os._exit(1)


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which decides
    if sys.platform != "win32":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        source, seconds = request["template"], request["seconds"]
        late = threading.Timer(seconds, _stop_late, (source, seconds, threading.get_ident()))
        late.daemon = True
        late.start()
        reply = _reply(request)
        late.cancel()
        _write(reply)


if __name__ == "__main__":
    main()
