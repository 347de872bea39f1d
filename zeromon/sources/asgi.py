"""The common part of ASGI servers: a request for :mod:`zeromon.sources.access`, and its refusal."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from zeromon.sources.access import Policy, Request, parse_body_length, refusal_of

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

    def __init__(self, app: Any, policy: Policy) -> None:
        self.app, self._policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return None
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        refused = refusal_of(request_of_scope(scope), self._policy)
        if refused is not None:
            return await send_text_answer(send, refused.status, refused.reason)
        await self.app(scope, bounded_receive(receive, self._policy.most_body), send)
        return None


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
    await send(
        {"type": "http.response.body", "body": f"zeromon: {reason}\n".encode("utf-8", "replace")}
    )
