"""The common part of ASGI servers: a request for :mod:`zeromon.sources.access`, and its refusal."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from zeromon.sources.access import Policy, Request, body_length, refusal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def headers_of(scope: Scope) -> dict[bytes, str]:
    """Name in lower case -> value."""
    return {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}


def request_of(scope: Scope, token: str = "") -> Request:
    """The :class:`Request` of *scope*; *token*: what it carries besides a bearer token."""
    headers = headers_of(scope)
    bearer = headers.get(b"authorization", "")
    length = headers.get(b"content-length", "0")
    return Request(
        method=scope["method"],
        path=scope["path"],
        host=headers.get(b"host", ""),
        origin=headers.get(b"origin", ""),
        token=bearer.removeprefix("Bearer ") if bearer.startswith("Bearer ") else token,
        length=body_length(length),
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
        refused = refusal(request_of(scope), self._policy)
        if refused is not None:
            return await answer(send, refused.status, refused.reason)
        await self.app(scope, bounded(receive, self._policy.most_body), send)
        return None


def bounded(receive: Receive, most_body: int) -> Receive:
    """*receive* until the body exceeds the limit, whatever its header tells; then a disconnect."""
    left = most_body

    async def limited() -> MutableMapping[str, Any]:
        nonlocal left
        message = await receive() if left >= 0 else {"type": "http.disconnect"}
        left -= len(message.get("body", b""))
        return message if left >= 0 else {"type": "http.disconnect"}

    return limited


async def answer(send: Send, status: int, text: str) -> None:
    """Sends *text* as the whole answer."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send(
        {"type": "http.response.body", "body": f"zeromon: {text}\n".encode("utf-8", "replace")}
    )
