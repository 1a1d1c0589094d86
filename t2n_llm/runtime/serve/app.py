"""The HTTP side: routes, bodies, streams of events, and clients that go away.

In: a `RequestQueue`. Out: an ASGI application.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from generic_export.errors import T2NError
from t2n_llm.runtime.answering import StreamedAnswer
from t2n_llm.runtime.serve.guard import Admission, Guard
from t2n_llm.runtime.serve.replies import ReplyForm, error_record, event, model_card, model_list, told
from t2n_llm.runtime.serve.request_queue import RequestQueue
from t2n_llm.runtime.serve.requests import AskedText, RefusedRequestError, read_request

_LEAST_SEND_SECONDS = 1.0  # that a client has to take what is sent, even when the time of its answer is up


def application(queue: RequestQueue, admission: Admission) -> Starlette:
    """Return the application.

    Args:
        queue: the model and its queue.
        admission: which requests are answered.
    """

    async def chat(request: Request) -> Response:
        return await _completion(request, queue, chat=True)

    async def text(request: Request) -> Response:
        return await _completion(request, queue, chat=False)

    async def models(request: Request) -> Response:
        del request
        return JSONResponse(model_list(queue.name, queue.opened))

    async def model(request: Request) -> Response:
        if request.path_params["name"] != queue.name:
            raise RefusedRequestError("there is no such model.", status=404, param="model", code="model_not_found")
        return JSONResponse(model_card(queue.name, queue.opened))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", text, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
        ],
        middleware=[Middleware(Guard, admission=admission)],
        exception_handlers={T2NError: _tell, HTTPException: _tell_http, Exception: _tell_bug},
    )


async def _completion(request: Request, queue: RequestQueue, *, chat: bool) -> Response:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedRequestError("the body is to be application/json.", status=415)
    asked = read_request(await _body(request, queue.limits.request_bytes), chat=chat, model=queue.name)
    return _Reply(queue, asked, ReplyForm(queue.name, chat, asked.with_usage))


async def _body(request: Request, most: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise RefusedRequestError(f"the request has more than {most} bytes.", status=413)
    return bytes(body)


class _Reply(Response):
    """An answer, made while it is sent; a client that goes away stops it."""

    def __init__(self, queue: RequestQueue, asked: AskedText, form: ReplyForm) -> None:
        super().__init__()
        self._queue, self._asked, self._form = queue, asked, form
        self._gone = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI's HTTP connection."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, receive)
            try:
                async with self._queue.turn():
                    if not self._gone.is_set():
                        end = time.monotonic() + self._queue.limits.seconds
                        await self._answer(scope, receive, _timely(send, end))
            except TimeoutError:  # it does not read: the server closes its connection, and the next one has its turn
                pass
            except T2NError as error:
                status, record = told(error)
                await JSONResponse(record, status)(scope, receive, send)
            finally:
                self._gone.set()
                tasks.cancel_scope.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone.set()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await to_thread.run_sync(self._queue.answer, self._asked, self._gone.is_set)
        pieces = iter(answer)
        # The engine's failures before the first piece have a status of their own.
        first = await to_thread.run_sync(next, pieces, None)
        if self._asked.streamed:
            await self._stream(answer, pieces, first, send)
            return
        await to_thread.run_sync(lambda: all(piece is not None for piece in pieces))
        await JSONResponse(self._form.whole(answer.text, answer.account))(scope, receive, send)

    async def _stream(self, answer: StreamedAnswer, pieces: Any, piece: str | None, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        begun = self._form.begun()
        if begun is not None:
            await _send(send, event(begun))
        try:
            while piece is not None:
                await _send(send, event(self._form.piece(piece)))
                piece = await to_thread.run_sync(next, pieces, None)
            for record in self._form.ended(answer.account):
                await _send(send, event(record))
            await _send(send, event("[DONE]"))
        except T2NError as error:  # too late for a status
            await _send(send, event(told(error)[1]))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _timely(send: Send, end: float) -> Send:
    """Return a `send` that waits for the client until `end`, at least for a second, and then raises TimeoutError."""

    async def send_timely(message: Message) -> None:
        with anyio.fail_after(max(end - time.monotonic(), _LEAST_SEND_SECONDS)):
            await send(message)

    return send_timely


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


# --- errors -----------------------------------------------------------------------------------


async def _tell(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, T2NError)
    status, record = told(error)
    return JSONResponse(record, status)


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    headers: Mapping[str, str] | None = error.headers
    return JSONResponse(error_record(message), error.status_code, dict(headers or {}))


async def _tell_bug(request: Request, error: Exception) -> Response:
    del request
    return JSONResponse(error_record(f"unexpected {type(error).__name__}.", kind="server_error"), 500)


__all__ = ["application"]
