"""What a request needs before anything of it is read: a Host header that names this server, and the key where there is one.

In: headers. Out: the application's answer, or a refusal. A web page can send requests to this server, if its own name is made to
lead here; then the Host header has that name.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from t2n_llm.runtime.serve.replies import error_record

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Admission:
    """Which requests are answered.

    Attributes:
        names: of this server in Host headers; `*` is any.
        addresses: whether any IP address is a name of it: no page was loaded from the server's address but by itself.
        api_key: that requests carry as OpenAI's clients do; None for no key.
    """

    names: frozenset[str]
    addresses: bool = False
    api_key: str | None = None

    @staticmethod
    def of(host: str, allowed: Sequence[str] = (), api_key: str | None = None) -> Admission:
        """Return who is answered on an address.

        Args:
            host: address that the server listens on.
            allowed: more names of the server.
            api_key: see the attribute.
        """
        names = {*LOOPBACK, *allowed}
        if host not in LOOPBACK:
            own = socket.gethostname()
            names |= {host, own, f"{own}.local"}
        return Admission(frozenset(name.lower() for name in names), host not in LOOPBACK, api_key)

    def admits(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return "*" in self.names or name in self.names or (self.addresses and _is_address(name))

    def knows(self, authorization: str) -> bool:
        """Return whether an Authorization header carries the key."""
        kind, _, given = authorization.partition(" ")
        if self.api_key is None:
            return True
        return kind.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self.api_key.encode())


class Guard:
    """Middleware that answers what is not admitted with 400 or 401."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI's HTTP connection."""
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        if not self._admission.admits(headers.get("host", "")):
            record = error_record("the Host header does not name this server; --allowed-host NAME adds a name.")
            return JSONResponse(record, 400)
        if not self._admission.knows(headers.get("authorization", "")):
            record = error_record("the API key is missing or wrong.", code="invalid_api_key")
            return JSONResponse(record, 401, {"www-authenticate": "Bearer"})
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


__all__ = ["LOOPBACK", "Admission", "Guard"]
