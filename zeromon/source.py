"""Where a view gets its picture from: a live collector, or the run store."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from zeromon import paths
from zeromon.errors import CaptureRefused, RunAmbiguous, RunNotFound, SourceError
from zeromon.history import Series
from zeromon.record import KnownFinding, Past
from zeromon.snapshot import RECENT_STEPS, RunSnapshot
from zeromon.store import Store, decode

_TIMEOUT_SECONDS = 5


class Source(Protocol):
    """Something that has the picture of one run, now and before."""

    @property
    def run(self) -> str:
        """Its name."""

    def latest(self) -> RunSnapshot:
        """The newest picture; raises :class:`~zeromon.errors.ZeromonError`, as do the others."""

    def span(self) -> tuple[float, float] | None:
        """The first kept moment and the last, seconds since the epoch; None without any."""

    def at(self, wall: float) -> RunSnapshot:
        """The picture at *wall*, or nearest before it."""

    def series(
        self,
        since_us: int = 0,
        until_us: int | None = None,
        ranks: Sequence[int] = (),
        most: int = 600,
    ) -> Series:
        """Its steps; see :func:`zeromon.history.series`."""

    def findings(self) -> list[KnownFinding]:
        """Every finding it ever had; see :func:`zeromon.record.findings`."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that a collector follows."""

    address: str
    """``host:port``"""
    run: str
    ended: bool
    ranks: int
    steps: int
    pids: tuple[int, ...]
    command: tuple[str, ...]


class LiveSource:
    """A run as its collector sees it."""

    def __init__(self, address: str, run: str) -> None:
        self.address = address
        self.run = run
        self._known: RunSnapshot | None = None

    def latest(self) -> RunSnapshot:
        """Asks the collector; of the last steps only for those that are new since the last time."""
        known = self._known
        since = 0 if known is None else _known_until(known)
        path = f"/api/runs/{quote(self.run)}" + (f"?since={since}" if since else "")
        picture = decode(_get(self.address, path))
        self._known = picture if known is None else _joined(known, picture)
        return self._known

    def span(self) -> tuple[float, float] | None:
        """Asks the collector."""
        return _decoded(_get(self.address, self._path("span")), _SPAN)

    def at(self, wall: float) -> RunSnapshot:
        """Asks the collector."""
        return decode(_get(self.address, self._path(f"at?wall={wall!r}")))

    def series(
        self,
        since_us: int = 0,
        until_us: int | None = None,
        ranks: Sequence[int] = (),
        most: int = 600,
    ) -> Series:
        """Asks the collector."""
        asked: dict[str, Any] = {"since": since_us, "most": most, "rank": list(ranks)}
        if until_us is not None:
            asked["until"] = until_us
        query = urlencode(asked, doseq=True)
        return _decoded(_get(self.address, self._path(f"series?{query}")), _SERIES)

    def findings(self) -> list[KnownFinding]:
        """Asks the collector."""
        return _decoded(_get(self.address, self._path("findings")), _FINDINGS)

    def _path(self, what: str) -> str:
        return f"/api/runs/{quote(self.run)}/{what}"

    def trace(self, steps: int, ranks: Sequence[int] = ()) -> int:
        """Asks the collector for a trace and returns its number; raises :class:`CaptureRefused`."""
        body = {"run": self.run, "steps": steps, "ranks": list(ranks)}
        made = json.loads(_send(self.address, "/api/trace", json.dumps(body).encode()))
        return int(made["number"])


def _known_until(run: RunSnapshot) -> int:
    """When the last step began that is known of all ranks that go on; it may change once more."""
    return min((r.recent[-1].start_ns for r in run.ranks if r.alive and r.recent), default=0)


def _joined(known: RunSnapshot, new: RunSnapshot) -> RunSnapshot:
    """*new* with the steps of *known* before its own."""
    before = {(rank.rank, rank.pid): rank.recent for rank in known.ranks}
    ranks = []
    for rank in new.ranks:
        old = before.get((rank.rank, rank.pid), ())
        if rank.recent:
            first = rank.recent[0].start_ns
            old = tuple(step for step in old if step.start_ns < first)
        ranks.append(replace(rank, recent=(*old, *rank.recent)[-RECENT_STEPS:]))
    return replace(new, ranks=tuple(ranks))


class StoreSource(Past):
    """A run as it was recorded."""

    def __init__(self, run: str | None = None, store: Store | None = None) -> None:
        self._store = store or Store()
        self.run = self._store.resolve(run)
        super().__init__(self._store.folder(self.run))

    def latest(self) -> RunSnapshot:
        """Reads the record."""
        return self._store.load(self.run)


_Known = TypeVar("_Known")
_SPAN: msgspec.json.Decoder[tuple[float, float] | None] = msgspec.json.Decoder(
    tuple[float, float] | None
)
_SERIES = msgspec.json.Decoder(dict[str, list[int]])
_FINDINGS = msgspec.json.Decoder(list[KnownFinding])


def _decoded(content: bytes, decoder: msgspec.json.Decoder[_Known]) -> _Known:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceError("the collector answers what this version does not know") from error


def _get(address: str, path: str) -> bytes:
    return _send(address, path, None)


def _send(address: str, path: str, body: bytes | None) -> bytes:
    """A GET, or with a *body* a POST."""
    request = urllib.request.Request(f"http://{address}{path}", data=body)
    token = os.environ.get("ZEROMON_TOKEN") or (key_of(address) if body is not None else "")
    if body is not None:
        request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    # a proxy has no business between a view and a collector
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        if error.code == 409:
            raise _refused(error) from error
        if error.code == 401:
            raise SourceError(f"{address} wants a token", "Set ZEROMON_TOKEN.") from error
        if error.code == 404:
            raise RunNotFound(f"{address} does not follow that run (any more)") from error
        raise SourceError(f"{address} answers {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise SourceError(f"no collector answers at {address}") from error


def _refused(error: urllib.error.HTTPError) -> CaptureRefused:
    try:
        said = json.loads(error.read())
        return CaptureRefused(str(said["error"]), str(said.get("hint", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return CaptureRefused("the collector refuses")


def key_of(address: str) -> str:
    """What the collector at *address* wants from those who ask it to act; "" where it is not ours."""
    for root in paths.ring_roots():
        if collector_address(root) == address:
            with suppress(OSError, ValueError, AttributeError):
                return str(json.loads((root / "collector.json").read_text()).get("key", ""))
    return ""


def runs_at(address: str) -> list[LiveRun]:
    """The runs that the collector at *address* follows."""
    try:
        content: Any = json.loads(_get(address, "/api/runs"))
        return [
            LiveRun(
                address=address,
                run=str(item["run"]),
                ended=bool(item["ended"]),
                ranks=int(item["ranks"]),
                steps=int(item["steps"]),
                pids=tuple(item["pids"]),
                command=tuple(item["command"]),
            )
            for item in content
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{address} is not a zeromon collector") from error


def collector_address(root: Path) -> str | None:
    """Where the collector of *root* listens, or None without one."""
    try:
        facts = json.loads((root / "collector.json").read_text())
        host = str(facts["host"])
        return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{int(facts['port'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def node_runs() -> list[LiveRun]:
    """The runs of this user on this node, the running ones first."""
    found: list[LiveRun] = []
    for root in paths.ring_roots():
        address = collector_address(root)
        if address is not None:
            try:
                found += runs_at(address)
            except SourceError:
                continue
    return sorted(found, key=lambda run: (run.ended, run.run))


def find(target: str | None) -> LiveSource | list[LiveRun]:
    """The run that *target* means: a run id (or its beginning), a pid, ``host:port``, or nothing.

    Several candidates come back as a list, for the caller to ask the user.
    """
    if target and ":" in target:
        candidates = runs_at(target)
    else:
        candidates = node_runs()
        if target and target.isdigit():
            candidates = [run for run in candidates if int(target) in run.pids]
        elif target:
            exact = [run for run in candidates if run.run == target]
            candidates = exact or [run for run in candidates if run.run.startswith(target)]
    running = [run for run in candidates if not run.ended]
    candidates = running or candidates
    if not candidates:
        what = f"no run matches {target}" if target else "no run is live on this node"
        raise RunNotFound(what, "`zeromon report` and `zeromon replay` show runs that have ended.")
    if len(candidates) == 1:
        return LiveSource(candidates[0].address, candidates[0].run)
    return candidates


def only(found: LiveSource | list[LiveRun]) -> LiveSource:
    """*found*, or :class:`RunAmbiguous` when it is a choice and nobody can be asked."""
    if isinstance(found, LiveSource):
        return found
    raise RunAmbiguous(f"several runs are live: {', '.join(run.run for run in found)}")
