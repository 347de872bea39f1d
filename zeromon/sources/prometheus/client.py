"""A client of Prometheus's HTTP API: queries in, samples out. It only reads.

The address is that of the server's web page: ``https://host/prometheus``, or ``http://user:password@host:9090``.
``ZEROMON_PROMETHEUS_TOKEN`` is sent as a bearer token, ``ZEROMON_PROMETHEUS_TENANT`` as Mimir's
``X-Scope-OrgID``; both only to that server: a redirect is an error.
"""

import base64
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import unquote, urlencode, urlsplit, urlunsplit

import msgspec

from zeromon.base.errors import SourceError
from zeromon.base.units import human_seconds, printable
from zeromon.sources.access import is_loopback_host
from zeromon.sources.http_client import HttpClient, HttpError, Refused

TIMEOUT_SECONDS = 30.0
_MAX_BYTES = 256 << 20
_LONG_QUERY = 1500
_SKEW_SECONDS = 2.0
_ADDRESS_HINT = "Give the address of its web page: http://host:9090, or https://host/prometheus."


class Sample(msgspec.Struct, frozen=True):
    """One element of an instant vector."""

    labels: dict[str, str] = msgspec.field(name="metric")
    pair: tuple[float, str] = msgspec.field(name="value")

    @property
    def value(self) -> float:
        """The sample, also NaN and infinities; NaN for what is no number."""
        try:
            return float(self.pair[1])
        except ValueError:
            return math.nan

    @property
    def count(self) -> int:
        """The sample as a whole number; 0 for what is none."""
        return int(self.value) if math.isfinite(self.value) else 0


class Line(msgspec.Struct, frozen=True):
    """One element of a matrix."""

    labels: dict[str, str] = msgspec.field(name="metric")
    values: list[tuple[float, str]] = []


_T = TypeVar("_T")


class _Found(msgspec.Struct, Generic[_T]):
    result: list[_T]


class _Answer(msgspec.Struct, Generic[_T]):
    data: _T
    warnings: list[str] = []


class _Refusal(msgspec.Struct):
    error: str = ""


_VECTOR = msgspec.json.Decoder(_Answer[_Found[Sample]])
_MATRIX = msgspec.json.Decoder(_Answer[_Found[Line]])
_VALUES = msgspec.json.Decoder(_Answer[list[str]])
_REFUSAL = msgspec.json.Decoder(_Refusal)


@dataclass(slots=True)
class Cost:
    """The cost of the queries to a server so far."""

    queries: int = 0
    nbytes: int = 0
    """Size of the answers as they were sent."""
    seconds: float = 0.0
    """Time from each query to its answer, added up."""


class Server:
    """One server; any thread may call it. Every method raises :class:`SourceError`."""

    def __init__(self, url: str, token: str | None = None) -> None:
        split = urlsplit(url if "://" in url else f"http://{url}")
        if split.scheme not in ("http", "https") or not split.hostname:
            raise SourceError(f"{printable(url)} is not the address of a server", _ADDRESS_HINT)
        host = split.netloc.rpartition("@")[2]
        self.url = urlunsplit((split.scheme, host, split.path.rstrip("/"), "", ""))
        """Its address without a password."""
        self.cost = Cost()
        self.offset = 0.0
        """How far its clock is ahead of ours, seconds; 0 within the noise."""
        self.warning = ""
        """The warning of the last answer, "" for none."""
        headers = {"Accept-Encoding": "gzip", "User-Agent": "zeromon"}
        bearer = os.environ.get("ZEROMON_PROMETHEUS_TOKEN", "") if token is None else token
        if bearer:
            headers["Authorization"] = f"Bearer {bearer}"
        elif split.username:
            pair = f"{unquote(split.username)}:{unquote(split.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        tenant = os.environ.get("ZEROMON_PROMETHEUS_TENANT", "")
        if tenant:
            headers["X-Scope-OrgID"] = tenant
        direct = is_loopback_host(split.hostname)  # no proxy reaches this machine's own server
        self._http = HttpClient(headers, most_bytes=_MAX_BYTES, direct=direct)
        self._lock = threading.Lock()

    def vector(self, expression: str, at: float | None = None) -> list[Sample]:
        """Returns the samples of an instant query, now or *at* a moment of our clock, without NaN."""
        sent_at = time.time()
        answer = self._decode_as(self._query_at(expression, at), _VECTOR)
        # A query at a moment is answered with that moment, which says nothing of the server's clock
        if at is None and answer.data.result:
            self._compare_clocks(answer.data.result[0].pair[0], (sent_at, time.time()))
        return [sample for sample in answer.data.result if not math.isnan(sample.value)]

    def values(self, label: str, selector: str, start: float) -> list[str]:
        """Returns the values of a *label* in the series of *selector* since a moment of our clock."""
        parameters = {"match[]": selector, "start": f"{start + self.offset:.3f}"}
        return self._decode_as(self._ask(f"label/{label}/values", parameters), _VALUES).data

    def samples(self, selector: str, at: float | None = None) -> list[Line]:
        """Returns the samples of a range selector as they were scraped, on our clock."""
        return self._shift_times(self._decode_as(self._query_at(selector, at), _MATRIX).data.result)

    def matrix(self, expression: str, span: tuple[float, float], step: float) -> list[Line]:
        """Returns a range query over *span*, a point every *step* seconds; times are of our clock."""
        parameters = {
            "query": expression, "start": f"{span[0] + self.offset:.3f}",
            "end": f"{span[1] + self.offset:.3f}", "step": f"{step:.3f}",
            "timeout": f"{TIMEOUT_SECONDS:.0f}s",
        }  # fmt: skip
        return self._shift_times(
            self._decode_as(self._ask("query_range", parameters), _MATRIX).data.result
        )

    def _query_at(self, expression: str, at: float | None) -> bytes:
        parameters = {"query": expression, "timeout": f"{TIMEOUT_SECONDS:.0f}s"}
        if at is not None:
            parameters["time"] = f"{at + self.offset:.3f}"
        return self._ask("query", parameters)

    def _shift_times(self, series: list[Line]) -> list[Line]:
        if not self.offset:
            return series
        return [Line(o.labels, [(at - self.offset, v) for at, v in o.values]) for o in series]

    def _compare_clocks(self, theirs: float, ours: tuple[float, float]) -> None:
        """Estimates the clock offset: its time must lie between query and answer, but for some noise."""
        sent_at, answered_at = ours
        skew = theirs - sent_at if theirs < sent_at else max(0.0, theirs - answered_at)
        self.offset = skew if abs(skew) > _SKEW_SECONDS else 0.0

    def _decode_as(self, content: bytes, decoder: msgspec.json.Decoder[_Answer[_T]]) -> _Answer[_T]:
        try:
            answer = decoder.decode(content)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"what answers at {self.url} does not speak Prometheus's API", _ADDRESS_HINT
            ) from error
        self.warning = printable("; ".join(answer.warnings))[:200]
        return answer

    def _ask(self, endpoint: str, parameters: dict[str, str]) -> bytes:
        form, path = urlencode(parameters), f"{self.url}/api/v1/{endpoint}"
        # some proxies let only GET pass, and no long one
        url, body = (path, form.encode()) if len(form) > _LONG_QUERY else (f"{path}?{form}", None)
        sent_at = time.monotonic()
        try:
            answer = self._http.request(url, body, timeout_seconds=TIMEOUT_SECONDS)
        except HttpError as error:
            raise self._explain_error(error) from error
        # Queries run in several threads, and += on an attribute is not atomic
        with self._lock:
            self.cost.queries += 1
            self.cost.nbytes += answer.wire_bytes
            self.cost.seconds += time.monotonic() - sent_at
        return answer.content

    def _explain_error(self, error: HttpError) -> SourceError:
        if isinstance(error, Refused):
            return self._explain_refusal(error)
        address = printable(error.detail).partition("/api/v1")[0]
        explained = {
            "redirect": (f"{self.url} redirects to {address}", "Give that address."),
            "too large": (f"{self.url} answers with more than {_MAX_BYTES >> 20} MiB", ""),
            "broken off": (f"the answer of {self.url} broke off", ""),
            "timeout": (
                f"{self.url} gives no answer in {human_seconds(TIMEOUT_SECONDS)}",
                "It may be overloaded; its own web page shows whether it answers.",
            ),
        }
        unreachable = f"no Prometheus answers at {self.url}", _ADDRESS_HINT
        return SourceError(*explained.get(error.trouble, unreachable))

    def _explain_refusal(self, error: Refused) -> SourceError:
        try:
            reason = _REFUSAL.decode(error.content).error
        except (ValueError, RecursionError):
            reason = ""
        if error.status in (401, 403):
            return SourceError(
                f"{self.url} wants other credentials",
                "Set ZEROMON_PROMETHEUS_TOKEN, or give http://user:password@host.",
            )
        if error.status == 404 and not reason:
            return SourceError(f"there is no Prometheus API at {self.url}", _ADDRESS_HINT)
        cause = printable(reason)[:300] or f"HTTP {error.status}"
        hint = "It may be starting, or overloaded." if error.status >= 500 else ""
        return SourceError(f"{self.url} refuses: {cause}", hint)


# ---- PromQL literals -----------------------------------------------------------------------------


def quote_promql_literal(string: str) -> str:
    """Returns *string* as a string literal of PromQL."""
    escaped = string.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def one_of(strings: Sequence[str]) -> str:
    """Returns a regular expression (RE2) that matches exactly *strings*, as a literal of PromQL."""
    signs = frozenset("\\.+*?()|[]{}^$")
    escaped = ("".join(f"\\{c}" if c in signs else c for c in string) for string in strings)
    return quote_promql_literal("|".join(escaped))


def chosen_server(url: str | None, *, named: bool = False) -> Server | None:
    """The server at *url*; that of the environment only where no local run is *named*."""
    url = url or ("" if named else os.environ.get("ZEROMON_PROMETHEUS", ""))
    return Server(url) if url else None
