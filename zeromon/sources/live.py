"""A live run, through the HTTP API of the collector that follows it; and which runs are live."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from zeromon.base.errors import (
    CaptureRefused,
    RunAmbiguous,
    RunNotFound,
    SourceError,
    SourceRefused,
    TrialRefused,
)
from zeromon.probes.network import listening_user_ids
from zeromon.probes.process import read_output_tail
from zeromon.ring import paths
from zeromon.ring.files import read_json_object
from zeromon.ring.tokens import READ, job_token, request_proof_headers, server_token
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.step import RECENT_STEPS, Lanes
from zeromon.sources.access import host_without_port, is_loopback_host
from zeromon.sources.base import Output, Playback, Source
from zeromon.sources.http_client import HttpClient, HttpError, Refused
from zeromon.storage.run_store import WHOLE_RUN, StepQuery, Store, decode_snapshot
from zeromon.storage.step_history.rows import Series

_TIMEOUT_SECONDS = 5
_MAX_BYTES = 256 << 20
# a proxy of the environment does not reach the collectors
_HTTP = HttpClient(most_bytes=_MAX_BYTES, direct=True)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """One run in a collector's list."""

    run: str
    ended: bool
    detached: bool
    """The agent was removed from all its ranks, so that it goes on without being watched."""
    ranks: int
    step: int
    """The step of the job, as its ranks count."""
    pids: tuple[int, ...]
    command: tuple[str, ...]
    address: str = ""
    """``host:port``, by which the list was read."""

    def open(self) -> "LiveSource":
        """A source of this run's snapshots."""
        return LiveSource(self.address, self.run)

    @property
    def state(self) -> str:
        """``live, step 340``; how it is where it has ended or is not watched."""
        if self.ended:
            return "ended"
        return f"{'not watched since' if self.detached else 'live,'} step {self.step:,}"


class LiveSource:
    """One run of the collector at *address*, ``host:port``."""

    live = True
    relocatable = True
    playback: Playback | None = None

    def __init__(self, address: str, run: str, *, signs: bool = False) -> None:
        self.address = address
        self.run = run
        self._signs = signs
        """True if the collector gets a proof of the token and not the token: no user has named it."""
        self._known: RunSnapshot | None = None

    def latest(self) -> RunSnapshot:
        """Reads the newest snapshot; of its steps only those that are new since the last call."""
        previous = self._known
        since_ns = 0 if previous is None else _steps_known_until(previous)
        path = f"/api/runs/{quote(self.run)}" + (f"?since={since_ns}" if since_ns else "")
        snapshot = decode_snapshot(self._read_path(path))
        self._known = snapshot if previous is None else _join_recent_steps(previous, snapshot)
        return self._known

    def span(self) -> tuple[float, float] | None:
        """Reads the first and the last moment of the collector's record."""
        return _decode_answer(self._read_path(self._run_path("span")), _SPAN)

    def at(self, wall_time: float) -> RunSnapshot:
        """Reads the snapshot at *wall_time* from the collector's record."""
        return decode_snapshot(self._read_path(self._run_path(f"at?wall={wall_time!r}")))

    def series(self, query: StepQuery = WHOLE_RUN) -> Series:
        """Reads the steps that *query* selects from the collector's record."""
        fields = {name: value for name, value in asdict(query).items() if value is not None}
        encoded = urlencode(fields, doseq=True)
        return _decode_answer(self._read_path(self._run_path(f"series?{encoded}")), _SERIES)

    def findings(self) -> list[Finding]:
        """Reads all findings from the collector's record."""
        return _decode_answer(self._read_path(self._run_path("findings")), _FINDINGS)

    def lanes(self, steps: int, ranks: Sequence[int] = ()) -> Lanes:
        """Reads the spans of the last *steps* steps that the collector's node has."""
        encoded = urlencode({"steps": steps, "rank": list(ranks)}, doseq=True)
        return _decode_answer(self._read_path(self._run_path(f"lanes?{encoded}")), _LANES)

    def output(self, pid: int) -> Output:
        """Reads the output on this machine; no collector passes it on."""
        if not is_loopback_host(host_without_port(self.address)):
            raise SourceError("the output of a rank is read on its own node", "zeromon attach there.")
        return Output(*read_output_tail(pid))

    def _read_path(self, path: str) -> bytes:
        return _send_request(self.address, path, None, signs=self._signs)

    def _run_path(self, endpoint: str) -> str:
        return f"/api/runs/{quote(self.run)}/{endpoint}"

    def trace(self, steps: int, ranks: Sequence[int] = ()) -> int:
        """Requests a trace from the collector; returns its number, raises :class:`CaptureRefused`."""
        body = {"run": self.run, "steps": steps, "ranks": list(ranks)}
        answer = json.loads(_send_request(self.address, "/api/trace", json.dumps(body).encode()))
        return int(answer["number"])

    def try_change(self, rule: str, rounds: int) -> int:
        """Requests a trial of the remedy of *rule*; returns its number, raises :class:`TrialRefused`."""
        return int(self._post_trial({"run": self.run, "rule": rule, "rounds": rounds})["number"])

    def renew_trial(self, number: int, *, go_on: bool) -> None:
        """Lets trial *number* go on, which it needs every few seconds, or ends it."""
        self._post_trial({"run": self.run, "number": number, "go_on": go_on})

    def _post_trial(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(
                _send_request(self.address, "/api/try", json.dumps(body).encode())
            )
        except CaptureRefused as error:
            # _send_request reads every 409 as a refused trace, also that of a trial
            raise TrialRefused(str(error), error.hint) from error
        return answer

    def request_detail(self, ranks: Sequence[int] = (), node: str = "") -> None:
        """Does nothing: every snapshot of a collector has all of its ranks."""


def _steps_known_until(run: RunSnapshot) -> int:
    """When the last step that all living ranks have began, ns; that step may change once more."""
    return min(
        (r.steps.recent[-1].start_ns for r in run.ranks if r.status.alive and r.steps.recent), default=0
    )


def _join_recent_steps(previous: RunSnapshot, new: RunSnapshot) -> RunSnapshot:
    """*new* with the steps of *previous* in front of its own."""
    # By pid too: the steps of an earlier attempt do not belong in front of those of the new process
    old_steps = {(rank.rank, rank.pid): rank.steps.recent for rank in previous.ranks}
    ranks = []
    for rank in new.ranks:
        old = old_steps.get((rank.rank, rank.pid), ())
        if rank.steps.recent:
            first_ns = rank.steps.recent[0].start_ns
            old = tuple(step for step in old if step.start_ns < first_ns)
        ranks.append(rank.with_recent((*old, *rank.steps.recent)[-RECENT_STEPS:]))
    return replace(new, ranks=tuple(ranks))


_Known = TypeVar("_Known")
_SPAN: msgspec.json.Decoder[tuple[float, float] | None] = msgspec.json.Decoder(
    tuple[float, float] | None
)
_SERIES = msgspec.json.Decoder(dict[str, list[int | float | None]])
_FINDINGS = msgspec.json.Decoder(list[Finding])
_LANES = msgspec.json.Decoder(Lanes)
_RUNS = msgspec.json.Decoder(list[LiveRun])


def _decode_answer(content: bytes, decoder: msgspec.json.Decoder[_Known]) -> _Known:
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError) as error:
        raise SourceError("this version of zeromon cannot decode the collector's answer") from error


def _send_request(address: str, path: str, body: bytes | None, *, signs: bool = False) -> bytes:
    """Sends a GET, or with a *body* a POST; returns the content."""
    headers = {} if body is None else {"Content-Type": "application/json"}
    token = token_for_address(address)
    if token and signs:
        # The collector signs path, question mark and query, also without a query
        headers |= request_proof_headers(token, READ, (path if "?" in path else f"{path}?").encode())
    elif token and is_trusted_address(address):
        headers["Authorization"] = f"Bearer {token}"
    try:
        return _HTTP.request(
            f"http://{address}{path}", body, timeout_seconds=_TIMEOUT_SECONDS, headers=headers
        ).content
    except Refused as error:
        if error.status == 409:
            raise _refusal_of_trace(error.content) from error
        if error.status == 401:
            hint = "Set ZEROMON_TOKEN to that of its job, or to ~/.local/state/zeromon/token there."
            raise SourceRefused(f"{address} requires another token", hint) from error
        if error.status == 404:
            raise RunNotFound(f"{address} does not follow that run (any more)") from error
        raise SourceError(f"{address} answers {error.status}") from error
    except HttpError as error:
        raise SourceError(f"no collector answers at {address}") from error


def is_trusted_address(address: str) -> bool:
    """Returns whether *address*, ``host:port``, may have a token: locally only what this user runs.

    The port of a collector that has been killed is free for everybody on the node. What the kernel does
    not tell, and another machine, are trusted as the user named them.
    """
    authority = address.partition("/")[0]
    if not is_loopback_host(host_without_port(authority)):
        return True
    users = listening_user_ids(int(authority.rpartition(":")[2]))
    return users is None or users <= {os.getuid(), 0}


def _refusal_of_trace(content: bytes) -> CaptureRefused:
    try:
        answer = json.loads(content)
        return CaptureRefused(str(answer["error"]), str(answer.get("hint", "")))
    except (ValueError, KeyError, TypeError):
        return CaptureRefused("the collector refused the trace")


def token_for_address(address: str) -> str:
    """The token that the collector at *address* needs, as far as this user has it; "" without one."""
    authority = address.partition("/")[0]
    if not is_loopback_host(host_without_port(authority)):
        return job_token()
    for facts in map(_read_collector_facts, paths.user_ring_roots()):
        if str(facts.get("port")) == authority.rpartition(":")[2] and facts.get("key"):
            return str(facts["key"])
    return server_token()


def runs_at_address(address: str) -> list[LiveRun]:
    """The runs that the collector at *address* follows."""
    port = address.rpartition(":")[2]
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise SourceError(f"{port or address} is not a port", "Like: zeromon attach node0:9417")
    try:
        listed = _RUNS.decode(_send_request(address, "/api/runs", None))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{address} is not a zeromon collector") from error
    return [replace(run, address=address) for run in listed]


def collector_address(root: Path) -> str | None:
    """``host:port`` of the collector of *root*; None without one, and for a file of somebody else."""
    facts = _read_collector_facts(root)
    try:
        host, port = str(facts["host"]), int(facts["port"])
        if listening_user_ids(port) == set():
            return None  # a collector that was killed has left its file
        return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    except (ValueError, KeyError, TypeError):
        return None


def _read_collector_facts(root: Path) -> dict[str, Any]:
    """The facts that the collector of *root* writes; {} without one, and for a file of somebody else."""
    path = root / "collector.json"
    if path.is_symlink() or paths.owner_uid_of(path) not in (os.getuid(), paths.owner_uid_of(root)):
        return {}
    return read_json_object(path)


def runs_of_node() -> list[LiveRun]:
    """The runs of this user's collectors on this node, those that have not ended first."""
    runs: list[LiveRun] = []
    for root in paths.user_ring_roots():
        if (address := collector_address(root)) is not None:
            with suppress(SourceError):
                runs += runs_at_address(address)
    return sorted(runs, key=lambda run: (run.ended, run.detached, run.run))


def find_live_runs(target: str | None) -> list[LiveRun]:
    """The runs that *target* may mean, at least one; raises :class:`RunNotFound` without any.

    *target*: a run id or its beginning, the pid of a rank, ``host:port`` of a collector, or None for all
    runs of this node. One that has ended or is not watched is only among them where no other matches.
    """
    if target and ":" in target:
        candidates = runs_at_address(target)
    else:
        candidates = runs_of_node()
        if target and target.isdigit():
            candidates = [run for run in candidates if int(target) in run.pids]
        elif target:
            candidates = [run for run in candidates if run.run.startswith(target)]
    candidates = [run for run in candidates if not (run.ended or run.detached)] or candidates
    # The exact name wins: train is also the beginning of train-2
    candidates = [run for run in candidates if run.run == target] or candidates
    if not candidates and target and target in Store().names():
        raise RunNotFound(f"{target} has ended", f"zeromon report {target}")
    if not candidates:
        note = f"no run matches {target}" if target else "no run is live on this node"
        raise RunNotFound(note, "`zeromon report` and `attach --replay` show runs that have ended.")
    return candidates


def only_live_run(candidates: Sequence[LiveRun]) -> LiveRun:
    """The only one of *candidates*; raises :class:`RunAmbiguous` for several."""
    if len(candidates) > 1:
        raise RunAmbiguous(f"several runs are live: {', '.join(run.run for run in candidates)}")
    return candidates[0]


# ---- the new steps of a live run, of all its nodes, from the records of their collectors --------

_MAX_NEW_STEPS = 5000
"""Maximum number of new steps of a rank; of more, those that stand out are read."""
_LATE_US = 600_000_000
"""A step that ends so long after those of other ranks began is not waited for."""
_LEFT_OUT = (
    "left out: {}, whose collectors refuse to be read; all nodes need the same ZEROMON_TOKEN and the"
    " same version of zeromon"
)


class NewSteps:
    """Reads what is new; what :meth:`rows` gave comes again, unless it was :meth:`kept`."""

    def __init__(self, source: Source) -> None:
        self.first = source
        """The collector of this node, or the record that it has left."""
        self._others: dict[str, Source] = {}
        self._seen: list[tuple[Source, RunSnapshot]] = []
        self._known: dict[int, int] = {}
        """Rank -> when its last step began, microseconds since the epoch."""
        self._read: dict[int, int] = {}
        self.left_out = ""
        """Which nodes refuse to be read, and why; "" for none."""

    def run(self) -> RunSnapshot:
        """The run with the ranks of all nodes; a node that does not answer is left out.

        Raises :class:`SourceError` and :class:`RunNotFound` of the first node alone.
        """
        run = self.first.latest()
        ranks = {rank.rank: rank for rank in run.ranks}
        self._seen = [(self.first, run)]
        for node in run.nodes if self.first.live else ():
            if node.address and not node.here:
                self._others.setdefault(node.address, LiveSource(node.address, run.run, signs=True))
        refusing = []
        for address, source in self._others.items():
            try:
                snapshot = source.latest()
            except SourceRefused:  # noqa: PERF203
                refusing += [node.node for node in run.nodes if node.address == address]
            except (SourceError, RunNotFound):
                continue
            else:
                ranks |= {rank.rank: rank for rank in snapshot.ranks}
                self._seen.append((source, snapshot))
        self.left_out = _LEFT_OUT.format(", ".join(refusing)) if refusing else ""
        return replace(run, ranks=tuple(ranks[number] for number in sorted(ranks)))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the new steps, of the nodes that :meth:`run` has found; raises as that does."""
        rows = self._rows_of_source(*self._seen[0])
        for source, run in self._seen[1:]:
            with suppress(SourceError, RunNotFound):
                rows += self._rows_of_source(source, run)
        self._read = dict(self._known)
        for row in rows:
            self._read[row["rank"]] = max(self._read.get(row["rank"], 0), row["start_us"])
        return rows

    def kept(self) -> None:
        """Marks the rows that were read: they do not have to come again."""
        self._known = self._read

    def _rows_of_source(self, source: Source, run: RunSnapshot) -> list[dict[str, Any]]:
        started = self._known
        starts = [started[r.rank] for r in run.ranks if r.status.alive and r.rank in started]
        latest_us = max((started[r.rank] for r in run.ranks if r.rank in started), default=0)
        since_us = max(min(starts, default=latest_us), latest_us - _LATE_US)
        series = source.series(StepQuery(since_us=since_us, most=_MAX_NEW_STEPS))
        rows = (dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True))
        return [row for row in rows if row["start_us"] > started.get(row["rank"], -1)]
