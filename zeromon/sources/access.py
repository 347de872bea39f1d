"""Which HTTP requests collector, dashboard and MCP server refuse. Pure.

All servers use this one check. It stands beside the client's half of the same agreement, the token that
:mod:`zeromon.sources.live` sends, in the topmost package that all servers may import.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeromon.base.errors import CollectorError
from zeromon.ring.tokens import signature_of

ADDRESS, COOKIE = b"address", b"cookie"
"""Purposes of a derived key: opening a server by its address, or by a cookie."""
_DERIVED_DIGITS = 32
_MAX_LENGTH_DIGITS = 18
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that a Host header may have where a server listens on loopback."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that decide whether it is allowed."""

    method: str
    path: str
    host: str
    """The Host header."""
    origin: str = ""
    """The Origin header; "" for a request that no web page made."""
    token: str = ""
    """The token that the request carries; "" without one."""
    length: int | None = 0
    """Size of the body, bytes; None where its header is no number."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The requests that a server allows."""

    loopback: bool
    """The server listens on loopback only."""
    token: str
    """Needed by every request, also on loopback; "": nobody may make one."""
    token_hint: str
    """Where a token comes from, for who has none."""
    actions: Collection[str]
    """The paths of requests that change something, or their beginnings up to a slash; all are POST."""
    read_methods: Collection[str]
    """The methods of all other requests."""
    most_body: int
    """Size of the largest body, bytes."""
    signed: Collection[str] = ()
    """The paths among *actions* whose requests carry a proof of their own instead of a token."""
    open: Collection[str] = ()
    """The paths that need no token; what they answer is the same for every run."""

    def is_action(self, path: str) -> bool:
        """Returns whether a request for *path* changes something."""
        return any(path == act or (act.endswith("/") and path.startswith(act)) for act in self.actions)


class Refusal(NamedTuple):
    """The answer to a request that may not pass."""

    status: int
    reason: str


def refusal_of(request: Request, policy: Policy) -> Refusal | None:
    """Why *request* may not pass; None where it may.

    - On loopback the Host must name this machine: a web page elsewhere whose name was made to point here
      (DNS rebinding) must read nothing.
    - A request that a web page makes must come from a page of this server: its Origin is its Host.
    - Every request needs the token: all users of a node reach its loopback ports.
    """
    is_action = policy.is_action(request.path)
    if request.length is None:
        return Refusal(400, "Content-Length is no number")
    if request.length > policy.most_body:
        return Refusal(413, "the body is too large")
    if request.method not in (("POST",) if is_action else policy.read_methods):
        return Refusal(405, f"{request.method} is not allowed here")
    if policy.loopback and host_without_port(request.host) not in LOOPBACK:
        return Refusal(403, f"this server is not {request.host[:100]}")
    if request.origin and request.origin.partition("://")[2] != request.host:
        return Refusal(403, "the request comes from a page of another server")
    # After Host and Origin: a web page elsewhere must not reach these paths either
    if request.path in policy.signed or request.path in policy.open:
        return None
    return None if is_token(request.token, policy.token) else Refusal(401, policy.token_hint)


def parse_body_length(header: str) -> int | None:
    """The size of a body that a Content-Length header says, bytes; None where it is no number."""
    if not header.isascii() or not header.isdecimal():
        return None
    # int() raises ValueError above 4300 digits
    return int(header) if len(header) <= _MAX_LENGTH_DIGITS else 10**_MAX_LENGTH_DIGITS


def is_token(token: str, needed: str) -> bool:
    """Returns whether *token* is the token *needed*, in constant time; False for an empty one."""
    # As bytes: compare_digest raises TypeError for a str that is not ASCII
    return bool(needed) and hmac.compare_digest(token.encode(), needed.encode())


def derive_server_key(token: str, kind: bytes, server: str) -> str:
    """A key that opens *server* alone, and by which nobody finds *token*."""
    return signature_of(token, kind, server.encode())[:_DERIVED_DIGITS]


def host_without_port(host: str) -> str:
    """A Host header without its port; as it is where what follows the name is no port."""
    if host.startswith("["):
        name, _, suffix = host[1:].partition("]")
        return name if not suffix or suffix[1:].isdecimal() else host
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host


def check_loopback_only(host: str, token: str) -> bool:
    """Returns whether *host* is loopback; raises :class:`CollectorError` if not and without *token*."""
    if not (loopback := is_loopback_host(host)) and not token:
        raise CollectorError(
            f"refusing to listen on {host} without a token",
            "Set ZEROMON_TOKEN, or listen on 127.0.0.1 and forward the port over ssh.",
        )
    return loopback


def is_loopback_host(host: str) -> bool:
    """Returns whether only this machine can reach *host*, a name or an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---- ASGI servers: a request, and its refusal ----------------------------------------------------

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def headers_of_scope(scope: Scope) -> dict[bytes, str]:
    """Name in lower case -> value."""
    return {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}


def request_of_scope(scope: Scope, token: str = "") -> Request:
    """The :class:`Request` of *scope*; *token*: what it carries besides a bearer token."""
    headers = headers_of_scope(scope)
    bearer = headers.get(b"authorization", "")
    length = headers.get(b"content-length", "0")
    return Request(
        method=scope["method"],
        path=scope["path"],
        host=headers.get(b"host", ""),
        origin=headers.get(b"origin", ""),
        token=bearer.removeprefix("Bearer ") if bearer.startswith("Bearer ") else token,
        length=parse_body_length(length),
    )


class Guarded:
    """*app* behind *policy*: every request passes here first."""

    def __init__(self, app: App, policy: Policy) -> None:
        self.app, self._policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # no server has a web socket
            return await send({"type": "websocket.close", "code": 1008})
        return await self.answer(scope, bounded_receive(receive, self._policy.most_body), send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an HTTP request, whose body *receive* limits."""
        if (refused := refusal_of(request_of_scope(scope), self._policy)) is not None:
            return await send_text_answer(send, refused.status, refused.reason)
        return await self.app(scope, receive, send)


def bounded_receive(receive: Receive, most_body: int) -> Receive:
    """*receive* until the body exceeds the limit, whatever its header tells; then a disconnect."""
    bytes_left = most_body

    async def receive_limited() -> MutableMapping[str, Any]:
        nonlocal bytes_left
        message = await receive() if bytes_left >= 0 else {"type": "http.disconnect"}
        bytes_left -= len(message.get("body", b""))
        return message if bytes_left >= 0 else {"type": "http.disconnect"}

    return receive_limited


async def send_text_answer(send: Send, status: int, reason: str) -> None:
    """Sends *reason* as the whole answer."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"zeromon: {reason}\n".encode("utf-8", "replace")})
