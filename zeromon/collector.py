"""The node's collector: follows every ring, folds, and once a second swaps one frozen picture.

One process a node and user (a lock file says so). It is started by ``zeromon run`` or by the first
agent that finds none, serves all runs of the node, and ends when they have ended and the views have
read the end. Killed, it is started again by an agent, and reads the rings from their beginning.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from zeromon import paths
from zeromon.advice import Settled, advise, doing
from zeromon.capture import Captures
from zeromon.device import Nvml
from zeromon.disk import DiskReader
from zeromon.errors import (
    CaptureRefused,
    CollectorError,
    RingError,
    RunNotFound,
    ZeromonError,
)
from zeromon.events import ExitKind, decode
from zeromon.exchange import Exchange, answer, read_cards, report_of
from zeromon.forecast import host_risk, rank_risks
from zeromon.hangs import SILENT_SECONDS, hangs
from zeromon.history import Row, row_of
from zeromon.hostmemory import HostReader
from zeromon.links import network_peak
from zeromon.nodes import Card, Head, Peer
from zeromon.pressure import PressureReader
from zeromon.process import ProcessWatch, describe_status
from zeromon.record import Past, Record
from zeromon.ring import NameKind, RingReader
from zeromon.skew import Skew, stragglers
from zeromon.snapshot import (
    KILLED_FOR_MEMORY,
    Capture,
    Disk,
    Health,
    HostMemory,
    Links,
    NodeView,
    Pressure,
    RankSnapshot,
    Risk,
    RunSnapshot,
    Straggler,
)
from zeromon.state import RankState, fold, group_id, summarize
from zeromon.store import Store
from zeromon.totals import Totals, take_over, totals_of
from zeromon.totals import decode as decode_totals
from zeromon.totals import encode as encode_totals

DEFAULT_PORT = 9417
_TICK_SECONDS = 1.0
_SAVE_EVERY = 5
_STATUS_PATIENCE = 3
_KILL_ROUNDS = 8  # a kill is counted at once, and a large process takes long to be gone
_LINGER_SECONDS = 60.0
_LEAST_LINGER_SECONDS = 3.0
_START_PATIENCE_SECONDS = 30.0
_MEET_SECONDS = 15.0
_FORECAST_NS_A_RANK = 50_000_000
_WITHOUT_A_WORD = "killed without a word (SIGKILL or a crash)"
TOTALS = "totals.msgpack"
_OURS = (
    "rank*.ring", ".rank*.ring.*", "run.json", ".run.*", "name.json", "nodes.json", "meets",
    TOTALS, f".{TOTALS}.*",
)  # fmt: skip
"""What is in a run's folder."""
_SILENT_ENDS = ("SIGKILL", _WITHOUT_A_WORD)


class RankFollower:
    """One ring: its reader, its state, and the process behind it."""

    def __init__(self, path: Path, earlier: Totals | None = None) -> None:
        self.path = path
        self.reader = RingReader(path)
        header = self.reader.header
        self._earlier: Totals | None = None
        """What the collector before this one had counted, until it is taken over."""
        if earlier is not None and earlier.born_ns == header.mono_ns:
            self._earlier, self.reader.known = earlier, earlier.records
        self.state = RankState(rank=header.rank, pid=header.pid)
        self.process = ProcessWatch(header.pid, header.mono_ns)
        self.alive = True
        self._dead_ticks = 0
        self._disk: Disk | None = None
        self._disk_reader = DiskReader(header.pid)
        self._kept_ns = 0
        """Start of the newest step that was given to the history."""
        self._pressure = PressureReader(header.pid)
        self._waits_for: Pressure | None = None
        self._host: HostMemory | None = None
        self._host_is_final = False
        self._kills: deque[int] = deque([0], maxlen=_KILL_ROUNDS)
        """As counted in the last rounds of its life."""
        self.settled = False

    def poll(self) -> None:
        """Folds what is new. After the process's death the ring is read to its very end."""
        was_alive = self.alive
        self.alive = self.process.alive()
        self._learn_names()
        for raw in self.reader.read(final=not self.alive):
            if self._earlier is not None:
                self._count_on(raw[0])
            event = decode(raw)
            if event is None:
                self.state.dropped += 1
            else:
                fold(self.state, event)
        self._count_on(self.reader.position)
        self._learn_names()
        self.state.dropped += self.reader.lost
        self.reader.lost = 0
        if not self.alive:
            self._dead_ticks += 0 if was_alive else 1
            known = self.process.status() is not None
            self.settled = known or self._dead_ticks >= _STATUS_PATIENCE

    def _count_on(self, number: int) -> None:
        """Takes over what was counted before, where the next record is the first that was not."""
        if self._earlier is not None and number >= self._earlier.records:
            take_over(self.state, self._earlier)
            self._earlier = None

    def _learn_names(self) -> None:
        state = self.state
        for name in self.reader.names():
            if name.kind == NameKind.META:
                state.meta.update(name.payload)
            elif name.kind == NameKind.GROUP:
                state.groups[name.id] = name.payload
            elif name.kind == NameKind.UNIT:
                state.units[name.id] = str(name.payload.get("fqn", ""))
                nbytes = name.payload.get("nbytes")
                state.unit_bytes[name.id] = nbytes if isinstance(nbytes, int) else 0
            elif name.kind == NameKind.TEXT:
                state.texts[name.id] = str(name.payload.get("text", ""))

    def new_rows(self, *, final: bool) -> list[Row]:
        """Steps since the last call. The newest waits: what comes with the next one may belong to it.

        Their wall clock is that of the ring's making, so that they are the same whoever reads them.
        """
        steps = list(self.state.history)
        if not final:
            steps = steps[:-1]
        fresh = [step for step in steps if step.start_ns > self._kept_ns]
        if fresh:
            self._kept_ns = fresh[-1].start_ns
        header = self.reader.header
        shift = header.wall_ns - header.mono_ns
        return [row_of(self.state.rank, step, shift) for step in fresh]

    @property
    def was_left(self) -> bool:
        """Whether its agent has said goodbye and the process went on."""
        said = self.state.exit
        return said is not None and said.how == ExitKind.DETACHED

    def ending(self) -> tuple[str, bool]:
        """How it ended (empty while it lives), and whether that was a failure."""
        said, status = self.state.exit, self.process.status()
        if self.alive:
            return ("detached", False) if self.was_left else ("", False)
        if said is not None and said.how == ExitKind.EXCEPTION:
            return "exception", True
        if status is not None:
            text = describe_status(status)
            return text, text != "finished"
        if said is not None:
            return "ended", False  # how is known only where the kernel tells the exit status
        return _WITHOUT_A_WORD, True

    def snapshot(self) -> RankSnapshot:
        """The picture of this rank."""
        ended, failed = self.ending()
        picture = summarize(self.state, alive=self.alive, ended=ended, failed=failed)
        return replace(picture, disk=self._read_disk(), pressure=self._read_pressure())

    def host(self, reader: HostReader) -> HostMemory | None:
        """The host's memory now; of a dead rank as it was when its end was settled."""
        if self._host_is_final:
            return self._host
        now = reader.read(self.state.pid)
        if self.alive:
            self._kills.append(_kills(now))
        self._host = replace(now, kills_at_end=max(0, _kills(now) - self._kills[0]))
        self._host_is_final = self.settled
        return self._host

    def _read_disk(self) -> Disk | None:
        """The disk now; after the end of the rank as it was last."""
        if self.alive:
            now = time.monotonic_ns()
            self._disk = self._disk_reader.read(self._disk_path(), now) or self._disk
        return self._disk

    def _read_pressure(self) -> Pressure | None:
        """The same of what it waits for."""
        if self.alive:
            self._waits_for = self._pressure.read(time.monotonic_ns())
        return self._waits_for

    def _disk_path(self) -> str:
        for name, facts in self.state.meta.items():
            if name.startswith("engine") and isinstance(facts, dict) and "disk_path" in facts:
                return str(facts["disk_path"])
        return ""


def explain_kills(ranks: list[RankSnapshot]) -> list[RankSnapshot]:
    """Says of ranks that ended without a word that the kernel killed them, where it counted kills.

    It counts processes, not names: of several such ranks the largest are meant, as the kernel chooses.
    Only what was counted about when a rank ended is evidence for it.
    """
    silent = [r for r in ranks if r.failed and r.ended in _SILENT_ENDS and r.host is not None]
    counts = [r.host.kills_at_end for r in silent if r.host]
    silent.sort(key=lambda rank: -rank.rss_bytes)
    killed = {id(rank) for rank in silent[: max(counts, default=0)]}
    return [
        replace(rank, ended=KILLED_FOR_MEMORY) if id(rank) in killed else rank for rank in ranks
    ]


def _kills(host: HostMemory) -> int:
    """Of its cgroup, or of the whole machine where the cgroup does not count."""
    return host.oom_kills if host.oom_kills >= 0 else host.oom_kills_everywhere


class RunFollower:
    """One run's folder: its ranks and its launcher."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder.name
        self.info = _read_json(folder / "run.json")
        self.started_wall = float(self.info.get("started") or _named_at(folder) or time.time())
        self.ranks: dict[str, RankFollower] = {}
        self.bad_rings: dict[str, str] = {}
        self._earlier = _read_totals(folder / TOTALS)
        self.ended = False
        self.ended_wall = 0.0
        self._host = HostReader()
        self._network = network_peak()
        self._links: dict[int, Links] = {}
        self.captures: Captures | None = None
        self.record: Record | None = None
        self._skew = Skew()
        self._settled = Settled()
        self._stragglers: tuple[Straggler, ...] = ()
        self._risks: dict[int, tuple[int, tuple[Risk, ...]]] = {}
        """Rank -> when its risks were made, and what they were."""
        self._host_risk: Risk | None = None
        self._host_forecast_ns = -(1 << 62)
        self.exchange: Exchange | None = None
        self._peers: list[Peer] = []
        """The ranks of the last picture, for other nodes."""
        self._first_ring = 0.0
        self._failed_since = 0.0
        launcher = self.info.get("pid")
        born = self.info.get("mono_ns")
        self._launcher = ProcessWatch(int(launcher), born) if launcher else None

    def poll(self) -> None:
        """Finds new rings, reads all, and notices the end."""
        for path in sorted(self.folder.glob("rank*.ring")):
            if path.name not in self.ranks and path.name not in self.bad_rings:
                self._follow(path)
        for follower in self.ranks.values():
            follower.poll()
        if not self.ended and self._is_over():
            self.ended = True
            self.ended_wall = time.time()

    def _follow(self, path: Path) -> None:
        try:
            new = self.ranks[path.name] = RankFollower(path, self._earlier.pop(path.name, None))
        except (RingError, OSError, ValueError) as error:
            self.bad_rings[path.name] = str(error)
            return
        for name, old in list(self.ranks.items()):
            if old.was_left and old.state.pid == new.state.pid and name != path.name:
                # one was detached, and joined again
                del self.ranks[name]
                old.reader.close()
                old.path.unlink(missing_ok=True)

    def _is_over(self) -> bool:
        if self.exchange is not None and self._may_be_silent():
            return False
        if self._launcher is not None and self._launcher.alive():
            return False
        if any(not follower.settled for follower in self.ranks.values()):
            return False
        if self.captures is not None and self.captures.busy:
            return False
        if self.ranks or self._launcher is not None:
            return True
        return time.time() - self.started_wall > _START_PATIENCE_SECONDS

    def newest(self) -> list[RankFollower]:
        """One follower a rank: after an elastic restart, the newest."""
        newest: dict[int, RankFollower] = {}
        for follower in self.ranks.values():
            rank = follower.state.rank
            known = newest.get(rank)
            if known is None or known.reader.header.mono_ns < follower.reader.header.mono_ns:
                newest[rank] = follower
        return [newest[rank] for rank in sorted(newest)]

    def snapshot(self, nvml: Nvml) -> RunSnapshot:
        """The picture of the run, with risks and findings."""
        now = time.monotonic_ns()
        followers = self.newest()
        self._host.new_round()
        # before they are summed up: waits and transfers belong to these steps
        self._match(followers)
        self._hear()
        ranks = [
            replace(
                follower.snapshot(),
                host=follower.host(self._host),
                device_stats=nvml.read(str(follower.state.meta.get("device_uuid", "")), now),
                links=self._links_of(follower, nvml),
            )
            for follower in followers
        ]
        ranks = [
            replace(
                rank,
                wait_seconds=self._skew.wait_seconds(rank.rank),
                late_seconds=self._skew.late_seconds(rank.rank),
            )
            for rank in ranks
        ]
        nodes = self.exchange.nodes() if self.exchange else ()
        if all(rank.alive for rank in ranks):  # after that, as it was last
            self._stragglers = stragglers(self._skew, ranks, _node_of(nodes), self._clock_error())
        ranks = explain_kills([replace(r, risks=risks) for r, risks in self._forecast(ranks, now)])
        capture = None
        if self.captures is not None:
            capture = self.captures.follow(ranks, now)
            checks = self.captures.checks
            ranks = [replace(rank, check=checks.get(rank.rank)) for rank in ranks]
        run = RunSnapshot(
            run=self.run,
            command=tuple(str(word) for word in self.info.get("command") or ()),
            node=socket.gethostname(),
            started_wall=self.started_wall,
            taken_wall=self.ended_wall or time.time(),
            taken_ns=now,
            ended=self.ended,
            ranks=tuple(ranks),
            findings=(),
            note=self._note(),
            stragglers=self._stragglers,
            capture=capture,
            history_note=self.record.note if self.record else "",
            alias=self.folder.name if self.folder.name != self.run else "",
            nodes=nodes,
        )
        if self.exchange is not None:
            self._peers = [as_peer(rank, self.exchange.own.node) for rank in ranks]
        run = self._with_others(replace(run, hangs=hangs(run)))
        found = advise(run)
        return replace(run, findings=found if run.ended else self._settled.shown(found, now))

    # ---- other nodes ---------------------------------------------------------------------------

    def is_named(self) -> bool:
        """Whether it is known what the run is called: on other nodes than the first, by the first."""
        states = [follower.state for follower in self.newest()]
        if self.ended or not states:
            return self.ended
        self._first_ring = self._first_ring or time.monotonic()
        if any(state.rank == 0 for state in states) or read_cards(self.folder):
            return True
        # the agents say whether there are other nodes; if they find none, it stays as it is
        alone = any(_is_alone(state.meta) for state in states)
        return alone or time.monotonic() - self._first_ring > _MEET_SECONDS

    def meet(self, heads: Callable[[str], Head]) -> None:
        """Begins to talk to the other nodes, once the agents have found them."""
        cards = read_cards(self.folder)
        if self.exchange is not None:
            self.exchange.learn(cards)
            return
        own = next(
            (c for c in cards if any(c.first_rank == f.state.rank for f in self.newest())), None
        )
        if own is None or len(cards) < 2:
            return
        head = heads(self.run) if own is cards[0] else None
        self.exchange = Exchange(cards[0].run or self.run, own, cards, head)

    def _hear(self) -> None:
        """Tells the others what is new, and takes in what they said."""
        if self.exchange is None:
            return
        self.exchange.tell(self._skew.outgoing, self._peers)
        for match in self.exchange.matches():
            self._skew.book(match)
        self._skew.joined = self.exchange.is_heard

    def _clock_error(self) -> float:
        """The bound of the error between this node's clock and the head's, seconds."""
        offset = self.exchange.offset() if self.exchange else None
        return offset.error_at(time.monotonic_ns()) / 1e9 if offset else 0.0

    def _with_others(self, run: RunSnapshot) -> RunSnapshot:
        """*run* with what the head says of all nodes, while it is heard."""
        exchange = self.exchange
        if exchange is None:
            return run
        if exchange.is_heard:
            run = replace(run, hangs=exchange.hangs, away=exchange.away)
        return replace(run, nodes_note=exchange.note)

    def keep_steps(self) -> None:
        """Writes the steps that have come since."""
        if self.record is not None:
            for follower in self.newest():
                self.record.keep(follower.new_rows(final=self.ended))

    def keep_totals(self) -> None:
        """Writes what was counted, for a collector that has to go on."""
        followers = self.newest()
        found = {
            f.path.name: totals_of(f.state, f.reader.position, f.reader.header.mono_ns)
            for f in followers
        }
        write_private(self.folder / TOTALS, encode_totals(found))

    def _links_of(self, follower: RankFollower, nvml: Nvml) -> Links | None:
        """The peaks of a rank's links; a rank on the host has none of its own."""
        uuid = str(follower.state.meta.get("device_uuid", ""))
        rank = follower.state.rank
        if not uuid and self._network[0] is None:
            return None
        if rank not in self._links or (uuid and not self._links[rank].device_kind):
            device, host, network = nvml.links(uuid), nvml.host_link(uuid), self._network
            self._links[rank] = Links(
                device_bytes_per_second=device[0],
                device_kind=device[1],
                network_bytes_per_second=network[0],
                network_kind=network[1],
                host_bytes_per_second=host[0],
                host_kind=host[1],
            )
        return self._links[rank]

    def _match(self, followers: list[RankFollower]) -> None:
        """Gives what has arrived at each rank to be matched with the others."""
        here = {follower.state.rank for follower in followers}
        for follower in followers:
            state = follower.state
            known: dict[int, tuple[str, int, int]] = {}
            while state.arrivals:
                one = state.arrivals.popleft()
                if one.group not in known:
                    ranks = state.groups.get(one.group, {}).get("ranks", ())
                    local = len(here.intersection(ranks))
                    known[one.group] = group_id(state, one.group), local, len(ranks)
                name, members, size = known[one.group]
                self._skew.arrived(state.rank, name, members, one, size)

    def _forecast(
        self, ranks: list[RankSnapshot], now: int
    ) -> Iterator[tuple[RankSnapshot, tuple[Risk, ...]]]:
        """Each rank with its risks; made anew the more seldom, the more ranks there are."""
        patience = _FORECAST_NS_A_RANK * len(ranks)
        if now - self._host_forecast_ns >= patience:
            self._host_forecast_ns, self._host_risk = now, host_risk(ranks)
        of_host = () if self._host_risk is None else (self._host_risk,)
        for rank in ranks:
            made, risks = self._risks.get(rank.rank, (-patience, ()))
            if now - made >= patience:
                risks = rank_risks(rank)
                self._risks[rank.rank] = (now, risks)
            yield rank, (*risks, *(of_host if rank.alive else ()))

    def _may_be_silent(self) -> bool:
        """Whether a rank failed so lately that the node behind it may yet be missed."""
        failed = any(follower.ending()[1] for follower in self.newest())
        if failed and not self._failed_since:
            self._failed_since = time.monotonic()
        return failed and time.monotonic() - self._failed_since < SILENT_SECONDS + 3

    def _note(self) -> str:
        if self.bad_rings:
            return "; ".join(self.bad_rings.values())
        if self.ranks or not self.ended:
            return ""
        return (
            "no rank ever reported: the command ended before init_process_group and before any"
            " optimizer step, or another sitecustomize kept zeromon out"
        )

    def keep(self, store: Store) -> None:
        """Moves the rings of an ended run from memory to the store."""
        for follower in self.ranks.values():
            store.keep_ring(self.run, follower.path)
        for follower in self.ranks.values():  # only now that every copy is made
            follower.reader.close()
        # nothing that is not ours is deleted, whatever folder the user has pointed us at
        for pattern in _OURS:
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        if self.captures is not None:
            self.captures.withdraw()
        with suppress(OSError):
            self.folder.rmdir()


def as_peer(rank: RankSnapshot, node: str) -> Peer:
    """What the ranks of other nodes may have to know of *rank*."""
    return Peer(
        rank=rank.rank,
        node=node,
        alive=rank.alive,
        failed=rank.failed and not rank.stopped,
        ended=rank.ended,
        step_seconds=rank.step_seconds,
        doing=doing(rank),
        in_flight=rank.in_flight,
        groups=rank.groups,
    )


def _node_of(nodes: Sequence[NodeView]) -> Callable[[int], str]:
    """Rank -> its node, "" where it is not known."""
    return lambda rank: next((node.node for node in nodes if node.has(rank)), "")


def _is_alone(meta: dict[str, Any]) -> bool:
    """Whether all ranks of the job are on the node of the one that told *meta*."""
    local = meta.get("local_world_size")
    return isinstance(local, int) and 0 < meta.get("world_size", 1) <= local


class Collector:
    """Follows all runs below *root*. ``view`` is the one thing that other threads read."""

    def __init__(
        self, root: Path, store: Store | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.root = root
        self.store = store or Store()
        self.view: tuple[RunSnapshot, ...] = ()
        self.health = Health(runs=0, ticks=0, busy_seconds=0.0, last_tick_wall=time.time())
        self._clock = clock
        self._runs: dict[str, RunFollower] = {}
        self._over: dict[str, RunSnapshot] = {}
        self._stuck: set[str] = set()
        """Runs that cannot be read, or not be stored: their files stay where they are."""
        self._heads: dict[str, Head] = {}
        self._nvml = Nvml()
        self._ticks = 0
        self._quiet_since = clock()
        self._last_read = 0.0
        self._read_since_end = False

    def was_read(self) -> None:
        """A view has asked for the picture."""
        self._last_read = self._clock()
        self._read_since_end = True

    def past(self, name: str) -> Past:
        """The record of run *name*."""
        return Past(self.store.folder(name))

    def trace(self, name: str, steps: int, ranks: Sequence[int]) -> Capture:
        """Asks the live ranks of run *name* for a trace; raises :class:`CaptureRefused`."""
        picture = next((run for run in self.view if run.run == name), None)
        follower = next((run for run in list(self._runs.values()) if run.run == name), None)
        if picture is None:
            raise CaptureRefused(f"no run {name} is followed here")
        if follower is None or follower.captures is None or picture.ended:
            raise CaptureRefused(f"run {name} has ended", "A trace needs a live run.")
        return follower.captures.ask(picture.ranks, steps, ranks, time.monotonic_ns())

    def tick(self) -> None:
        """Reads everything that is new and swaps the picture."""
        began = time.monotonic()
        self._find_runs()
        pictures = dict(self._over)
        for name, run in list(self._runs.items()):
            try:
                run.poll()
                self._name(run)
                run.meet(self._head)
                run.keep_steps()
                picture = run.snapshot(self._nvml)
                if run.record is not None:
                    run.record.see(picture)
            except _SICK as error:  # one broken run must not hide the others
                del self._runs[name]
                self._stuck.add(name)
                sys.stderr.write(f"zeromon: cannot follow {name}: {error}\n")
                continue
            pictures[run.run] = picture
            if run.ended:
                self._finish(name, run, picture)
            elif self._ticks % _SAVE_EVERY == 0 and run.record is not None:
                with suppress(OSError, ZeromonError):
                    run.keep_totals()
                    self.store.save(picture)
        self.view = tuple(pictures[name] for name in sorted(pictures))
        self._ticks += 1
        self.health = Health(
            runs=len(self._runs),
            ticks=self._ticks,
            busy_seconds=self.health.busy_seconds + time.monotonic() - began,
            last_tick_wall=time.time(),
        )
        if self._runs:
            self._quiet_since = self._clock()
            self._read_since_end = False

    def _find_runs(self) -> None:
        for folder in self.root.glob("*/"):
            name = folder.name
            if name in self._runs or name in self._stuck or not is_run_folder(folder):
                continue
            try:
                run = RunFollower(folder)
            except _SICK:
                self._stuck.add(name)
            else:
                self._runs[name] = run

    def _name(self, run: RunFollower) -> None:
        """Gives a run its name, and its place in the store, once it is known what others call it."""
        if run.record is not None or not run.is_named():
            return
        first = next(iter(read_cards(run.folder)), None)
        if first is not None and first.run and paths.is_run_id(first.run):
            run.run = self.store.free_name(first.run, first.started)
            run.started_wall = first.started
        else:
            run.run = self.store.free_name(run.folder.name, run.started_wall)
        with suppress(OSError):  # for the agent of rank 0, which tells it to the other nodes
            write_private(run.folder / "name.json", [run.run, run.started_wall])
        run.record = Record(self.store.folder(run.run))
        run.captures = Captures(run.folder, self.store.runs / run.run / "traces")

    def _head(self, run: str) -> Head:
        """The head of *run*, which is this node."""
        head = self._heads[run] = Head()
        return head

    def exchange(self, body: bytes) -> bytes:
        """Answers another node; raises a ValueError for what is no report, and RunNotFound."""
        received = time.monotonic_ns()
        head = self._heads.get(report_of(body))
        if head is None:
            raise RunNotFound("this collector is not the head of that run")
        return answer(head, body, received)

    def targets(self) -> list[Card]:
        """The collectors of all nodes of all live runs, as far as they are known here."""
        found = {
            (card.run or run.run, card.first_rank): msgspec.structs.replace(card, run=run.run)
            for run in list(self._runs.values())
            if run.exchange is not None
            for card in run.exchange.cards()
            # elsewhere, an address of that machine alone would lead to another collector
            if card.first_rank == run.exchange.own.first_rank or not card.is_local
        }
        return list(found.values())

    def _finish(self, name: str, run: RunFollower, picture: RunSnapshot) -> None:
        del self._runs[name]
        self._heads.pop(run.run, None)
        if run.exchange is not None:
            run.exchange.close()
        self._over[run.run] = picture
        try:
            self.store.save(picture)
            run.keep(self.store)
            self.store.prune()
        except (OSError, ZeromonError):
            self._stuck.add(name)

    def may_end(self) -> bool:
        """Nothing is left to follow, and whoever has been looking has seen the end."""
        quiet = self._clock() - self._quiet_since
        if self._runs or quiet < _LEAST_LINGER_SECONDS:
            return False
        watched = self._last_read > 0 and self._clock() - self._last_read < _LINGER_SECONDS
        return self._read_since_end or not watched or quiet > _LINGER_SECONDS


_SICK = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    AttributeError,
    ZeromonError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
"""What broken files and hostile contents raise."""


def is_run_folder(folder: Path) -> bool:
    """Whether *folder* is a run of ours, by its name and by what lies in it."""
    if not paths.is_run_id(folder.name):
        return False
    return (folder / "run.json").exists() or any(folder.glob("rank*.ring"))


def write_private(path: Path, content: Any) -> None:
    """Replaces *path* by *content*, bytes or else as JSON, for this user's eyes only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    temporary.replace(path)


def _read_totals(path: Path) -> dict[str, Totals]:
    try:
        return decode_totals(path.read_bytes())
    except OSError:
        return {}


def _named_at(folder: Path) -> float:
    """When the run began, as the collector before this one has said; 0 without one."""
    with suppress(OSError, ValueError, TypeError):
        _, started = json.loads((folder / "name.json").read_text())
        return float(started)
    return 0.0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_folder(folder: Path) -> RunSnapshot:
    """The picture of a run straight from its rings, without a collector."""
    run = RunFollower(folder)
    for _ in range(_STATUS_PATIENCE + 1):
        run.poll()
    return run.snapshot(Nvml())


# ---- the process ---------------------------------------------------------------------------------


def lock(root: Path) -> int | None:
    """The collector's lock of *root* as a file descriptor, or None when another one holds it."""
    fd = os.open(root / "collector.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


_ANY_ADDRESS = ("0.0.0.0", "::")


class TargetFile:
    """What ``/sd`` lists, in a file for Prometheus's file_sd; "" for none."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._written = ""

    def write(self, groups: list[dict[str, Any]]) -> None:
        """Replaces the file when something has changed; tried again next time where it cannot."""
        text = json.dumps(groups, indent=1)
        if self._path is None or text == self._written:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            temporary.write_text(text)
            temporary.replace(self._path)
            self._written = text


def serve(root: Path, host: str, port: int, token: str, *, strict_port: bool) -> int:
    """Runs a collector until its work is done. Returns 0, also when another one runs already."""
    paths.make_private(root, tighten=False)
    if lock(root) is None:
        return 0
    from zeromon.exporter import start_server, targets

    collector = Collector(root)
    key = token or secrets.token_urlsafe(16)
    server = start_server(collector, host, port, token, strict_port=strict_port, key=key)
    address = root / "collector.json"
    facts = {"pid": os.getpid(), "host": host, "port": server.server_port, "key": key}
    write_private(address, facts)
    files = TargetFile(os.environ.get("ZEROMON_SD_FILE", ""))
    here = f"{socket.gethostname() if host in _ANY_ADDRESS else host}:{server.server_port}"
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        while not stop.is_set() and not collector.may_end():
            began = time.monotonic()
            collector.tick()
            files.write(targets(collector.targets(), collector.view, here))
            stop.wait(max(0.05, _TICK_SECONDS - (time.monotonic() - began)))
    finally:
        address.unlink(missing_ok=True)
        server.shutdown()
    return 0


def go_to_background() -> None:
    """Detaches from the starter: two forks, a session of its own, no terminal."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def main(arguments: list[str] | None = None) -> int:
    """The command line of the collector process."""
    parser = argparse.ArgumentParser(prog="zeromon.collector", description=__doc__)
    parser.add_argument("--host", default=os.environ.get("ZEROMON_HOST", "127.0.0.1"))
    parser.add_argument("--port", type=int, help=f"default {DEFAULT_PORT} or ZEROMON_PORT")
    parser.add_argument("--daemon", action="store_true", help="go to the background at once")
    options = parser.parse_args(arguments)
    asked = options.port or os.environ.get("ZEROMON_PORT")
    port = int(asked) if asked else DEFAULT_PORT
    root = paths.ring_roots()[0] if os.environ.get("ZEROMON_DIR") else paths.choose_root()
    if options.daemon:
        go_to_background()
    os.nice(10)  # the cores belong to the training
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    token = os.environ.get("ZEROMON_TOKEN", "")
    try:
        return serve(root, options.host, port, token, strict_port=False)
    except (CollectorError, RingError) as error:
        sys.stderr.write(f"zeromon: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
