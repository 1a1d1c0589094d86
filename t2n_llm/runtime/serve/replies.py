"""OpenAI's JSON of answers, of pieces of one, of models and of errors."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from generic_export.errors import T2NError
from t2n_llm.runtime.answering import Account, AnswerEnding
from t2n_llm.runtime.serve.requests import RefusedRequestError

_STOPS = frozenset({AnswerEnding.END_TOKEN, AnswerEnding.STOP_TEXT})


@dataclass(frozen=True)
class ReplyForm:
    """How one answer is written.

    Attributes:
        model: name of the model.
        chat: whether it answers a chat, else continues a text.
        with_usage: whether the last piece says what it took.
        id, created: of the answer.
    """

    model: str
    chat: bool
    with_usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, account: Account) -> dict[str, Any]:
        """Return the answer in one."""
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._record("chat.completion", [self._choice(said, account)]) | {"usage": _usage(account)}

    def begun(self) -> dict[str, Any] | None:
        """Return what comes before the first piece of a chat's answer; None for other texts."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return self._record("chat.completion.chunk", [self._choice(said, None)]) if self.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        """Return a piece."""
        said = {"delta": {"content": text}} if self.chat else {"text": text}
        return self._record("chat.completion.chunk", [self._choice(said, None)])

    def ended(self, account: Account) -> list[dict[str, Any]]:
        """Return what comes after the last piece."""
        said: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        last = self._record("chat.completion.chunk", [self._choice(said, account)])
        usage = self._record("chat.completion.chunk", []) | {"usage": _usage(account)}
        return [last, usage] if self.with_usage else [last]

    def _record(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, said: Mapping[str, Any], account: Account | None) -> dict[str, Any]:
        reason = None if account is None else "stop" if account.ending in _STOPS else "length"
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def _usage(account: Account) -> dict[str, Any]:
    given = account.held_tokens + account.read_tokens
    return {
        "prompt_tokens": given,
        "completion_tokens": account.tokens,
        "total_tokens": given + account.tokens,
        "prompt_tokens_details": {"cached_tokens": account.held_tokens},
    }


def model_list(name: str, created: int) -> dict[str, Any]:
    """Return the models that are there: one."""
    return {"object": "list", "data": [model_card(name, created)]}


def model_card(name: str, created: int) -> dict[str, Any]:
    """Return what is said of a model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "t2n-llm"}


def error_record(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def told(error: T2NError) -> tuple[int, dict[str, Any]]:
    """Return the status and the record of an error of ours: a client's mistake, or the engine's failure."""
    from generic_export.errors import OptionError

    if isinstance(error, RefusedRequestError):
        return error.status, error_record(error.message, param=error.param, code=error.code)
    message = " ".join(filter(None, (error.message, error.hint)))
    if isinstance(error, OptionError):
        return 400, error_record(message)
    return 500, error_record(message, kind="server_error")


def event(record: Mapping[str, Any] | str) -> bytes:
    """Return a server-sent event (WHATWG HTML, section 9.2)."""
    text = record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


__all__ = ["ReplyForm", "error_record", "event", "model_card", "model_list", "told"]
