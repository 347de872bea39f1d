"""Applies :mod:`zeromon.sources.access` to the dashboard; a key in an address becomes a cookie.

A browser gets the token itself neither in an address nor in a cookie: addresses are kept, and a browser
sends a cookie to every port of its host. Both have keys that are derived for this server and port.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from zeromon.sources import access

_MAX_BODY_BYTES = 1 << 20
_BY_PAGES = ("/_dash-update-component",)
"""Paths that only Dash's own pages request."""
_LOG = logging.getLogger("uvicorn.error")
_SECONDS_OF_COOKIE = 7 * 24 * 3600


def policy_of(token: str, *, loopback: bool) -> access.Policy:
    """Every request needs *token*, on loopback too."""
    return access.Policy(
        loopback=loopback,
        token=token,
        token_hint="open the address that zeromon dash printed: it has a key",
        actions=("/act/",),
        read_methods=("GET", "HEAD", "POST"),  # Dash sends its callbacks as POST
        most_body=_MAX_BODY_BYTES,
    )


def server_name(port: int) -> str:
    """The name that the keys of the dashboard at *port* of this node are derived for."""
    return f"dashboard {socket.gethostname()} {port}"


def address_key(token: str, port: int) -> str:
    """The key that the printed address brings, as ``token``."""
    return access.derive_server_key(token, access.ADDRESS, server_name(port))


class Guard(access.Guarded):
    """Middleware around the whole application: every request passes here first."""

    def __init__(
        self,
        app: Any,
        *,
        token: str,
        loopback: bool,
        port: int,
        hashes: Sequence[str],
        has: Callable[[str, str], bool] = lambda path, query: True,  # noqa: ARG005
    ) -> None:
        super().__init__(app, policy_of(token, loopback=loopback))
        self._has = has
        self._token = token
        self._cookie = f"zeromon-{port}"
        self._address_key = address_key(token, port)
        self._cookie_key = access.derive_server_key(token, access.COOKIE, server_name(port))
        self._hashes = hashes

    async def answer(self, scope: access.Scope, receive: access.Receive, send: access.Send) -> None:
        """Refuses a request, redirects one that brings a token, or passes it on."""
        request, brought = self._read(scope)
        refused = access.refusal_of(request, self._policy)
        if refused is not None:
            return await access.send_text_answer(send, refused.status, refused.reason)
        if access.is_token(brought, self._address_key):
            return await self._redirect_without_key(scope, send)
        try:
            await self.app(scope, receive, self._wrap_send(scope, send))
        except Exception as error:
            if request.path not in _BY_PAGES and not _is_dash_script(request.path):
                raise
            if request.path in _BY_PAGES:  # it was answered with 400, and may be a fault of ours
                _LOG.error("a callback failed", exc_info=error)

    def _read(self, scope: access.Scope) -> tuple[access.Request, str]:
        """The request, and the key that its address brings."""
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        brought = query.get("token", "")
        cookie = self._key_from_cookie(access.headers_of_scope(scope).get(b"cookie", ""))
        has_key = access.is_token(brought, self._address_key) or access.is_token(
            cookie, self._cookie_key
        )
        return access.request_of_scope(scope, self._token if has_key else ""), brought

    def _key_from_cookie(self, header: str) -> str:
        # A browser also sends the cookies of all other servers on this host, and SimpleCookie returns
        # nothing where one of them is malformed
        pairs = (pair.strip().partition("=") for pair in header.split(";"))
        return next((value for name, _, value in pairs if name == self._cookie), "")

    async def _redirect_without_key(self, scope: access.Scope, send: access.Send) -> None:
        """Redirects to the address without the key, which would stay in the browser's history."""
        pairs = [
            pair for pair in parse_qsl(scope["query_string"].decode("latin-1")) if pair[0] != "token"
        ]
        # a path that begins with two slashes would lead to another host
        target = (
            "/"
            + quote(scope["path"].lstrip("/\\"), errors="replace")
            + (f"?{urlencode(pairs)}" if pairs else "")
        )
        cookie = (
            f"{self._cookie}={self._cookie_key}; Path=/; HttpOnly; SameSite=Strict; "
            f"Max-Age={_SECONDS_OF_COOKIE}"
        )
        headers = [(b"location", target.encode()), (b"set-cookie", cookie.encode())]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _wrap_send(self, scope: access.Scope, send: access.Send) -> access.Send:
        """*send*, with security headers added, and 404 where a page says that a thing is not there."""
        path = scope["path"]

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                if message["status"] == 200 and _is_page_frame(path, headers):
                    query = scope.get("query_string", b"").decode("latin-1")
                    # In the event loop, a collector that is slow to answer would hold up every tab
                    exists = await asyncio.to_thread(self._has, path, query)
                    message["status"] = 200 if exists else 404
                elif message["status"] == 500 and (path in _BY_PAGES or _is_dash_script(path)):
                    # Dash raises for a script that it does not have, and for what no page sends
                    message["status"] = 400 if path in _BY_PAGES else 404
                message["headers"] = [*headers, *self._security_headers(path)]
            await send(message)

        return send_with_headers

    def _security_headers(self, path: str) -> list[tuple[bytes, bytes]]:
        if path.startswith("/report/"):
            # a document with its own scripts inside: a sandbox gives it an origin of its own
            policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
            policy += "img-src data: blob:; sandbox allow-scripts allow-downloads"
        else:
            scripts = " ".join(self._hashes)
            policy = f"default-src 'self'; script-src 'self' {scripts}; "
            policy += "style-src 'self' 'unsafe-inline'; "
            policy += "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
            policy += (
                "object-src 'none'; base-uri 'none'; form-action 'none'; "
                # a notebook of this machine may show the page
                "frame-ancestors http://localhost:* http://127.0.0.1:*"
            )
        return [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]


def _is_dash_script(path: str) -> bool:
    return path.startswith("/_dash-component-suites/")


def _is_page_frame(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Returns whether an answer with *headers* is the frame in which Dash draws the pages."""
    kinds = (value for name, value in headers if name.lower() == b"content-type")
    return not path.startswith("/report/") and any(v.startswith(b"text/html") for v in kinds)
