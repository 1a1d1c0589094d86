"""What a client asks, read from OpenAI's JSON; what is not offered is refused by name.

In: the bytes of a request. Out: `AskedText`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from generic_export.errors import OptionError
from t2n_llm.runtime.chat.template import Message, template_variables
from t2n_llm.runtime.sampling.options import Sampling

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SAMPLING: Mapping[str, type] = {
    "temperature": float,
    "top_p": float,
    "seed": int,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}

# What is allowed where it asks for nothing, by the values that do.
_NOTHING: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_UNHEARD = frozenset({"user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key"})
_READ = frozenset({"model", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens", *_SAMPLING})
_READ_OF_CHAT = frozenset({"messages", "chat_template_kwargs", "reasoning_effort"})
_READ_OF_TEXT = frozenset({"prompt"})
_LARGEST = 2**63 - 1  # of a number


class RefusedRequestError(OptionError):
    """A request that cannot be answered.

    Attributes:
        status: of HTTP.
        param: the part of the request that it is about.
        code: OpenAI's word for it, where there is one.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class AskedText:
    """One request.

    Attributes:
        messages: of a chat; None for a text to continue.
        files: contents of the images or recordings that the messages are about, in order.
        variables: of the chat template.
        prompt: that text, or its tokens.
        sampling: how a token is chosen.
        max_new_tokens: most tokens; None for the server's limit.
        streamed: whether pieces are wanted as they come.
        with_usage: whether the last of them is to say what it took.
    """

    messages: Sequence[Message] | None
    files: Sequence[bytes]
    variables: Mapping[str, Any]
    prompt: str | Sequence[int] | None
    sampling: Sampling
    max_new_tokens: int | None
    streamed: bool
    with_usage: bool


def read_request(body: bytes, *, chat: bool, model: str) -> AskedText:
    """Read a request.

    Args:
        body: JSON.
        chat: whether it came to `/v1/chat/completions`, else to `/v1/completions`.
        model: the name of the model that is there.

    Raises:
        RefusedRequestError: it is no such request, or asks for something that is not there.
        OptionError: a setting of the sampling is out of range.
    """
    asked = _parsed(body)
    said = {name: value for name, value in asked.items() if value is not None}
    _refuse(said, _READ_OF_CHAT if chat else _READ_OF_TEXT)
    if said.get("model") != model:
        raise RefusedRequestError(
            f"the model {said.get('model')!r} is not served here; use {model!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )
    if said.get("max_tokens") is not None and said.get("max_completion_tokens") is not None:
        raise RefusedRequestError("use max_completion_tokens or max_tokens, not both.", param="max_tokens")
    most = next((name for name in ("max_completion_tokens", "max_tokens") if name in said), None)
    files: list[bytes] = []
    return AskedText(
        messages=_messages(said.get("messages"), files) if chat else None,
        files=files,
        variables=_variables(said),
        prompt=None if chat else _prompt(said.get("prompt")),
        sampling=Sampling(stop=_stops(said.get("stop", [])), **_numbers(said)),
        max_new_tokens=None if most is None else _positive(said[most], most),
        streamed=said.get("stream") is True,
        with_usage=isinstance(said.get("stream_options"), dict) and said["stream_options"].get("include_usage") is True,
    )


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
        json.dumps(asked, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise RefusedRequestError("a text of the request contains a lone surrogate.") from error
    except RecursionError as error:
        raise RefusedRequestError("the body is nested too deeply.") from error
    except ValueError as error:  # with NaN and 1e400, which are no numbers of JSON
        raise RefusedRequestError(f"the body is not JSON: {error}.") from error
    if not isinstance(asked, dict):
        raise RefusedRequestError("the body is not a JSON object.")
    return asked


def _refuse(said: Mapping[str, Any], content: Set[str]) -> None:
    for name, value in said.items():
        if name in _NOTHING and value not in _NOTHING[name]:
            raise RefusedRequestError(f"{name} is not supported; omit it.", param=name)
        if name not in _NOTHING and name not in _READ and name not in _UNHEARD and name not in content:
            raise RefusedRequestError(f"{name} is unknown; omit it.", param=name)


def _messages(value: Any, files: list[bytes]) -> list[Message]:
    """Return the messages, and append the contents of their files."""
    if not isinstance(value, list) or not value:
        raise RefusedRequestError("messages must be a list of messages.", param="messages")
    return [_message(each, f"messages[{number}]", files) for number, each in enumerate(value)]


def _message(value: Any, place: str, files: list[bytes]) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise RefusedRequestError(f"{place} must have one of the roles {', '.join(_ROLES)}.", param=place)
    content = value.get("content")
    if isinstance(content, list):
        parts = [_part(part, place, files) for part in content]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        content = "".join(texts) if len(texts) == len(parts) else parts
    elif not isinstance(content, str):
        raise RefusedRequestError(f"the content of {place} must be text or a list of parts.", param=place)
    return {"role": _ROLES[role], "content": content}


def _part(part: Any, place: str, files: list[bytes]) -> dict[str, str]:
    """Return a part of a message as chat templates read it, and append its file."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        files.append(_decoded(_data_of_url(_member(part, kind, "url", place), place), place))
        return {"type": "image", "image": "image"}
    if kind == "input_audio":
        files.append(_decoded(_member(part, kind, "data", place), place))
        return {"type": "audio", "audio": "audio"}
    raise RefusedRequestError(
        f"a part of the content of {place} is not supported; use text, image_url or input_audio.", param=place
    )


def _member(part: Mapping[str, Any], kind: str, name: str, place: str) -> str:
    inner = part.get(kind)
    value = inner.get(name) if isinstance(inner, dict) else None
    if not isinstance(value, str):
        raise RefusedRequestError(f"{kind} of {place} must have the text {name}.", param=place)
    return value


def _data_of_url(url: str, place: str) -> str:
    """Return the base64 text of a `data:` URL (RFC 2397); nothing is downloaded."""
    start, comma, data = url.partition(",")
    if not (comma and start.startswith("data:") and start.endswith(";base64")):
        raise RefusedRequestError(
            f"the image of {place} must be a URL data:image/...;base64,...; the server downloads nothing.", param=place
        )
    return data


def _decoded(text: str, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise RefusedRequestError(f"a file of {place} is not valid base64.", param=place) from error


def _variables(said: Mapping[str, Any]) -> dict[str, Any]:
    effort = {name: said[name] for name in ("reasoning_effort",) if name in said}
    return {**effort, **template_variables(said.get("chat_template_kwargs", {}))}


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(each) is int and each >= 0 for each in value):
        return value
    raise RefusedRequestError("prompt must be one text or one list of tokens.", param="prompt")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise RefusedRequestError("stop must be a text or a list of texts.", param="stop")
    return tuple(stops)


def _numbers(said: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: said[name] for name in _SAMPLING if name in said}
    for name, value in given.items():
        whole = type(value) is int
        if not whole and not (type(value) is float and _SAMPLING[name] is float):
            raise RefusedRequestError(f"{name} is {value!r}, which is not an allowed number.", param=name)
        if abs(value) > _LARGEST:
            raise RefusedRequestError(f"{name} is too large.", param=name)
    return {name: _SAMPLING[name](value) for name, value in given.items()}


def _positive(value: Any, name: str) -> int:
    if type(value) is not int or value < 1:
        raise RefusedRequestError(f"{name} is {value!r}; it must be 1 or more tokens.", param=name)
    return value


__all__ = ["AskedText", "RefusedRequestError", "read_request"]
