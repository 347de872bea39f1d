"""The HTTP client of the sources: one request, with a timeout, a size limit and no redirects.

A redirect is an error, because it would pass the token on to another server.
"""

import http.client
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

Trouble = Literal["unreachable", "timeout", "redirect", "too large", "broken off", "refused"]


class HttpError(Exception):
    """The server did not answer with content. *detail*: the address of a redirect."""

    def __init__(self, trouble: Trouble, detail: str = "") -> None:
        super().__init__(f"{trouble} {detail}".strip())
        self.trouble, self.detail = trouble, detail


class Refused(HttpError):
    """The server answered with the error *status* and *content*."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__("refused", f"HTTP {status}")
        self.status, self.content = status, content


class Answer(NamedTuple):
    """The content of an answer, and its size as it was sent, bytes."""

    content: bytes
    wire_bytes: int


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        """Refuses."""
        raise HttpError("redirect", str(arguments[-1]))


class HttpClient:
    """Sends requests with the same headers, from any thread; *direct*: past the environment's proxy."""

    def __init__(
        self, headers: Mapping[str, str] | None = None, *, most_bytes: int, direct: bool
    ) -> None:
        self._headers = dict(headers or {})
        self._most_bytes = most_bytes
        self._direct = direct

    @cached_property
    def _url_opener(self) -> urllib.request.OpenerDirector:
        # made by the first request: it may load all certificates
        proxies = [urllib.request.ProxyHandler({})] if self._direct else []
        return urllib.request.build_opener(_NoRedirect, *proxies)

    def request(
        self,
        url: str,
        body: bytes | None = None,
        *,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends a GET, or with a *body* a POST; raises :class:`HttpError` without status 200."""
        request = urllib.request.Request(url, body, {**self._headers, **(headers or {})})
        try:
            with self._url_opener.open(request, timeout=timeout_seconds) as answer:
                content: bytes = answer.read(self._most_bytes + 1)
                packed = answer.headers.get("Content-Encoding") == "gzip"
        except urllib.error.HTTPError as error:
            raise Refused(error.code, _error_answer_content(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            # urllib wraps a timeout while it connects in URLError, and no timeout while it reads
            reason = getattr(error, "reason", error)
            raise HttpError("timeout" if isinstance(reason, TimeoutError) else "unreachable") from error
        if len(content) > self._most_bytes:
            raise HttpError("too large")
        try:
            decoded = unpack_gzip(content, self._most_bytes + 1) if packed else content
        except zlib.error as error:
            raise HttpError("broken off") from error
        if len(decoded) > self._most_bytes:
            raise HttpError("too large")
        return Answer(decoded, len(content))


def unpack_gzip(content: bytes, max_bytes: int) -> bytes:
    """Returns the first *max_bytes* of gzip *content*; raises zlib.error where it is not whole."""
    unpacking = zlib.decompressobj(wbits=31)
    output = unpacking.decompress(content, max_bytes)
    if len(output) < max_bytes and not unpacking.eof:
        raise zlib.error("the content ends early")
    return output


def _error_answer_content(error: urllib.error.HTTPError) -> bytes:
    """Returns the body of an error answer; b"" where it cannot be read."""
    try:
        content = error.read(1 << 16)
        packed = error.headers.get("Content-Encoding") == "gzip"
        return unpack_gzip(content, 1 << 16) if packed else content
    except (OSError, zlib.error):
        return b""
