"""The HTTP API of Prometheus, as far as views need it: queries in, samples out. It only reads.

The server is given as its web page is: ``https://host/prometheus``, or ``http://user:password@host:9090``.
``ZEROMON_PROMETHEUS_TOKEN`` is sent as a bearer token, ``ZEROMON_PROMETHEUS_TENANT`` as Mimir's
``X-Scope-OrgID``; both only to that server: redirects are not followed.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import ipaddress
import math
import os
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit, urlunsplit

import msgspec

from zeromon.errors import SourceError
from zeromon.units import human_seconds, printable

TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 256 << 20
_LONG_QUERY = 1500
_SKEW_SECONDS = 2.0
_ADDRESS_HINT = "Give the address of its web page: http://host:9090, or https://host/prometheus."


class Sample(msgspec.Struct, frozen=True):
    """One element of an instant vector."""

    labels: dict[str, str] = msgspec.field(name="metric")
    pair: tuple[float, str] = msgspec.field(name="value")

    @property
    def value(self) -> float:
        """NaN and infinities are as they were stored."""
        return float(self.pair[1])


class Line(msgspec.Struct, frozen=True):
    """One element of a matrix."""

    labels: dict[str, str] = msgspec.field(name="metric")
    values: list[tuple[float, str]] = []


class _Vector(msgspec.Struct):
    result: list[Sample]


class _VectorAnswer(msgspec.Struct):
    data: _Vector
    warnings: list[str] = []


class _Matrix(msgspec.Struct):
    result: list[Line]


class _MatrixAnswer(msgspec.Struct):
    data: _Matrix
    warnings: list[str] = []


class _ValuesAnswer(msgspec.Struct):
    data: list[str]
    warnings: list[str] = []


class _Refusal(msgspec.Struct):
    error: str = ""


_VECTOR = msgspec.json.Decoder(_VectorAnswer)
_MATRIX = msgspec.json.Decoder(_MatrixAnswer)
_VALUES = msgspec.json.Decoder(_ValuesAnswer)
_REFUSAL = msgspec.json.Decoder(_Refusal)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, *answer: Any) -> None:
        """A redirect would get the token."""
        there = printable(str(answer[-1])).partition("/api/v1")[0]
        raise SourceError(f"{req.host} redirects to {there}", "Give that address.")


@dataclass(slots=True)
class Cost:
    """What was asked of a server so far."""

    queries: int = 0
    nbytes: int = 0
    """Of its answers, as they came over the wire."""
    seconds: float = 0.0
    """From each question to its answer, added up."""


class Server:
    """One server; may be asked from several threads. Everything raises :class:`SourceError`."""

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceError(f"{printable(url)} is not the address of a server", _ADDRESS_HINT)
        host = parts.netloc.rpartition("@")[2]
        self.url = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        """Without a password."""
        self.cost = Cost()
        self.offset = 0.0
        """How far its clock is ahead of ours, seconds; 0 for what is within the noise."""
        self.warning = ""
        """What it says of its last answer that was not whole, "" where all were."""
        self._headers = {"Accept-Encoding": "gzip", "User-Agent": "zeromon"}
        given = os.environ.get("ZEROMON_PROMETHEUS_TOKEN", "") if token is None else token
        if given:
            self._headers["Authorization"] = f"Bearer {given}"
        elif parts.username:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        tenant = os.environ.get("ZEROMON_PROMETHEUS_TENANT", "")
        if tenant:
            self._headers["X-Scope-OrgID"] = tenant
        # on this machine no proxy has any business between us
        proxies = [urllib.request.ProxyHandler({})] if _is_local(parts.hostname) else []
        self._opener = urllib.request.build_opener(_NoRedirect, *proxies)
        self._lock = threading.Lock()

    def vector(self, expression: str, at: float | None = None) -> list[Sample]:
        """An instant query, now or *at* a moment of our clock. What is NaN is left out."""
        asked = {"query": expression, "timeout": f"{TIMEOUT_SECONDS:.0f}s"}
        if at is not None:
            asked["time"] = f"{at + self.offset:.3f}"
        began = time.time()
        answer = self._decoded(self._ask("query", asked), _VECTOR)
        if at is None and answer.data.result:
            self._compare_clocks(answer.data.result[0].pair[0], (began, time.time()))
        return [sample for sample in answer.data.result if not math.isnan(sample.value)]

    def values(self, label: str, selector: str, since: float) -> list[str]:
        """What a *label* was in the series of *selector* since a moment of our clock."""
        asked = {"match[]": selector, "start": f"{since + self.offset:.3f}"}
        found: list[str] = self._decoded(self._ask(f"label/{label}/values", asked), _VALUES).data
        return found

    def samples(self, selector: str, at: float | None = None) -> list[Line]:
        """The samples in a range selector as they were scraped, on our clock."""
        asked = {"query": selector, "timeout": f"{TIMEOUT_SECONDS:.0f}s"}
        if at is not None:
            asked["time"] = f"{at + self.offset:.3f}"
        return self._shifted(self._decoded(self._ask("query", asked), _MATRIX).data.result)

    def matrix(self, expression: str, span: tuple[float, float], step: float) -> list[Line]:
        """A range query over *span* of our clock, a point each *step* seconds; on our clock again."""
        asked = {
            "query": expression, "start": f"{span[0] + self.offset:.3f}",
            "end": f"{span[1] + self.offset:.3f}", "step": f"{step:.3f}",
            "timeout": f"{TIMEOUT_SECONDS:.0f}s",
        }  # fmt: skip
        return self._shifted(self._decoded(self._ask("query_range", asked), _MATRIX).data.result)

    def _shifted(self, found: list[Line]) -> list[Line]:
        if not self.offset:
            return found
        return [Line(o.labels, [(at - self.offset, v) for at, v in o.values]) for o in found]

    def _compare_clocks(self, theirs: float, ours: tuple[float, float]) -> None:
        """Its "now" lies between question and answer; beyond that, and some noise, it is skew."""
        began, ended = ours
        off = theirs - began if theirs < began else max(0.0, theirs - ended)
        self.offset = off if abs(off) > _SKEW_SECONDS else 0.0

    def _decoded(self, content: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
        try:
            answer = decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceError(
                f"what answers at {self.url} does not speak Prometheus's API", _ADDRESS_HINT
            ) from error
        self.warning = printable("; ".join(answer.warnings))[:200]
        return answer

    def _ask(self, what: str, asked: dict[str, str]) -> bytes:
        form, path = urlencode(asked), f"{self.url}/api/v1/{what}"
        long = len(form) > _LONG_QUERY  # some proxies let only GET pass, and no long one
        request = urllib.request.Request(
            path if long else f"{path}?{form}", form.encode() if long else None, self._headers
        )
        began = time.monotonic()
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                content: bytes = answer.read(_MOST_BYTES + 1)
                packed = answer.headers.get("Content-Encoding") == "gzip"
        except urllib.error.HTTPError as error:
            raise self._refused(error) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        with self._lock:
            self.cost.queries += 1
            self.cost.nbytes += len(content)
            self.cost.seconds += time.monotonic() - began
        if len(content) > _MOST_BYTES:
            raise SourceError(f"{self.url} answers with more than {_MOST_BYTES >> 20} MiB", "")
        return self._unpacked(content) if packed else content

    def _unpacked(self, content: bytes) -> bytes:
        try:
            return gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(f"the answer of {self.url} broke off", "") from error

    def _refused(self, error: urllib.error.HTTPError) -> SourceError:
        said = ""
        try:
            content = error.read(1 << 16)
            packed = error.headers.get("Content-Encoding") == "gzip"
            said = _REFUSAL.decode(gzip.decompress(content) if packed else content).error
        except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError):
            pass
        if error.code in (401, 403):
            return SourceError(
                f"{self.url} wants other credentials",
                "Set ZEROMON_PROMETHEUS_TOKEN, or give http://user:password@host.",
            )
        if error.code == 404 and not said:
            return SourceError(f"there is no Prometheus API at {self.url}", _ADDRESS_HINT)
        what = printable(said)[:300] or f"HTTP {error.code}"
        hint = "It may be starting, or overloaded." if error.code >= 500 else ""
        return SourceError(f"{self.url} refuses: {what}", hint)

    def _unreachable(self, error: Exception) -> SourceError:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return SourceError(
                f"{self.url} gives no answer in {human_seconds(TIMEOUT_SECONDS)}",
                "It may be overloaded; its own web page shows whether it answers.",
            )
        return SourceError(f"no Prometheus answers at {self.url}", _ADDRESS_HINT)


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---- the words of its language --------------------------------------------------------------------


def quoted(text: str) -> str:
    """*text* as a string of PromQL."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def one_of(texts: Sequence[str]) -> str:
    """A regular expression (RE2) that exactly *texts* match, as a string of PromQL."""
    signs = frozenset("\\.+*?()|[]{}^$")
    escaped = ("".join(f"\\{c}" if c in signs else c for c in text) for text in texts)
    return quoted("|".join(escaped))
