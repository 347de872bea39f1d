"""Who may ask the dashboard for what: loopback reads, a token acts, another page does neither."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_BODY = 1 << 20
_SECONDS_OF_COOKIE = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a request decides."""

    method: str
    path: str
    host: str
    origin: str
    token: str
    """That it carries, "" without one."""
    length: int = 0


def refusal(asked: Asked, token: str, *, loopback: bool) -> tuple[int, str] | None:
    """Status and reason, or None where the request may pass. Pure.

    - On loopback the Host must name this machine: a page elsewhere whose name was made to point here
      (DNS rebinding) reads nothing.
    - Elsewhere every request needs the token.
    - Whatever comes from a page must come from ours: its Origin is the Host.
    - What changes something (``/act/``) needs the token also on loopback.
    """
    if asked.length > _MOST_BODY:
        return 413, "too large"
    if loopback and host_name(asked.host) not in LOOPBACK:
        return 403, f"this is not {asked.host[:100]}"
    if asked.origin and asked.origin.partition("://")[2] != asked.host:
        return 403, "asked by another page"
    known = bool(token) and hmac.compare_digest(asked.token.encode(), token.encode())
    if not known and (not loopback or asked.path.startswith("/act/")):
        return 401, "open the address that zeromon dash printed: it has the token"
    if asked.path.startswith("/act/") and asked.method != "POST":
        return 405, "POST only"
    return None


def host_name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host


class Guard:
    """The first to see a request."""

    def __init__(
        self, app: App, *, token: str, loopback: bool, port: int, hashes: Sequence[str]
    ) -> None:
        self._app = app
        self._token = token
        self._loopback = loopback
        self._cookie = f"zeromon-{port}"
        self._hashes = hashes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses, trades a token for a cookie, or lets pass."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # nothing here speaks over sockets
            return await send({"type": "websocket.close", "code": 1008})
        asked, brought = self._read(scope)
        refused = refusal(asked, self._token, loopback=self._loopback)
        if refused is not None:
            return await _answer(send, refused[0], refused[1])
        if brought and hmac.compare_digest(brought.encode(), self._token.encode()):
            return await self._trade(scope, send)
        return await self._app(scope, receive, self._dressed(asked.path, send))

    def _read(self, scope: Scope) -> tuple[Asked, str]:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        brought = query.get("token", "")
        bearer = headers.get(b"authorization", "")
        given = brought or self._from_cookie(headers.get(b"cookie", ""))
        if bearer.startswith("Bearer "):
            given = bearer.removeprefix("Bearer ")
        length = headers.get(b"content-length", "0")
        asked = Asked(
            method=scope["method"],
            path=scope["path"],
            host=headers.get(b"host", ""),
            origin=headers.get(b"origin", ""),
            token=given,
            length=int(length) if length.isdecimal() else _MOST_BODY + 1,
        )
        return asked, brought

    def _from_cookie(self, text: str) -> str:
        try:
            morsel = SimpleCookie(text).get(self._cookie)
        except CookieError:
            return ""
        return morsel.value if morsel is not None else ""

    async def _trade(self, scope: Scope, send: Send) -> None:
        """The token leaves the address: it would stay in histories."""
        rest = [
            pair
            for pair in parse_qsl(scope["query_string"].decode("latin-1"))
            if pair[0] != "token"
        ]
        # a path that begins with two slashes would lead to another host
        target = "/" + scope["path"].lstrip("/\\") + (f"?{urlencode(rest)}" if rest else "")
        cookie = (
            f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict; "
            f"Max-Age={_SECONDS_OF_COOKIE}"
        )
        headers = [
            (b"location", target.encode("latin-1", "ignore")),
            (b"set-cookie", cookie.encode()),
        ]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _dressed(self, path: str, send: Send) -> Send:
        async def dressed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers(path)]
            await send(message)

        return dressed

    def _headers(self, path: str) -> list[tuple[bytes, bytes]]:
        if path.startswith("/report/"):
            # a document of its own, with its scripts inside: it gets an origin of its own, too
            policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
            policy += "img-src data: blob:; sandbox allow-scripts allow-downloads"
        else:
            scripts = " ".join(self._hashes)
            policy = f"default-src 'self'; script-src 'self' {scripts}; "
            policy += "style-src 'self' 'unsafe-inline'; "
            policy += "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
            policy += (
                "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
        return [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]


async def _answer(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send(
        {"type": "http.response.body", "body": f"zeromon: {text}\n".encode("utf-8", "replace")}
    )
