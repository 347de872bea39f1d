"""What is fed with broken input: one function a target, which may raise only errors that users see.

``python tests/fuzz/targets.py TARGET NUMBER`` repeats one case; with ``--cases N`` it runs the first N.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")]

from evidence_pages import Entry, measured_here, publish
from fuzz.mutation import DIVIDED, Mutations

from zeromon.base.errors import ZeromonError
from zeromon.check.runner import check
from zeromon.cli.check import problems_as_text
from zeromon.collector import cluster_client
from zeromon.collector.cluster import Leader, NodeInfo
from zeromon.collector.cluster_client import ClusterSync, answer_report, read_node_infos, run_of_report
from zeromon.collector.daemon import Collector
from zeromon.collector.http import Application, _QuietHandler
from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.flight import calls_under_way, flight_findings, flight_text
from zeromon.export.prometheus.metrics import Writer
from zeromon.fold.checkpoint import decode_checkpoints as decode_totals, restore_totals
from zeromon.fold.fold import fold_event
from zeromon.fold.state import RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.report import render_run
from zeromon.readout.trace_report import SECTIONS, as_text as as_traces, memory_text
from zeromon.readout.verdict import judge_run
from zeromon.ring.buffer import NameKind, RingReader, RingWriter
from zeromon.ring.events import RECORD, Raw, decode_record
from zeromon.sources.prometheus.client import Server
from zeromon.sources.prometheus.source import PrometheusSource, runs_of
from zeromon.storage import run_store, snapshot_log
from zeromon.storage.run_store import StepQuery, Store
from zeromon.storage.snapshot_log import Past
from zeromon.storage.step_history import queries, rows as step_rows
from zeromon.traces.allocations import memory_by_device, memory_growers, read_snapshot
from zeromon.traces.analysis import analyze_trace, collective_durations, rank_waits
from zeromon.traces.critical import critical_path
from zeromon.traces.flight import read_flight_dump
from zeromon.traces.kineto import read_host_step, read_trace
from zeromon_agents.runtime.rendezvous import node_of

Feed = Callable[[bytes, Path], None]

ALLOWED = (ZeromonError,)
SLOW_SECONDS = 1.0
_CAPACITY, _NAMES = 64, 4096


class Slow(Exception):
    """A case that takes longer than a second."""


# ---- ring ----------------------------------------------------------------------------------------


def ring_file(data: bytes, folder: Path) -> None:
    """A ring with broken bytes: header, names, records."""
    path = folder / "rank0.ring"
    path.write_bytes(data)
    reader = RingReader(path)
    try:
        reader.names()
        state = RankState(rank=reader.header.rank)
        for final in (False, True):
            for raw in reader.read(final=final):
                if (event := decode_record(raw)) is not None:
                    fold_event(state, event)
        summarize_rank(state)
    finally:
        reader.close()


def _signed(value: Any) -> int:
    word = value & (1 << 64) - 1 if isinstance(value, int) else 0
    return word - (1 << 64) if word >> 63 else word


def ring_records(data: bytes, folder: Path) -> None:
    """A whole ring whose records hold any words: what they mean is nonsense, and their order, too."""
    rows = _loaded(data)
    if not isinstance(rows, list):
        return
    state = RankState(rank=0)
    state.groups = {1: {"label": "world", "ranks": [0, 1]}, 2: {"label": "dp", "ranks": [0]}}
    state.units = {1: "layers.0", 2: "layers.1"}
    for number, row in enumerate(rows, 1):
        words = [_signed(one) for one in row] if isinstance(row, list) else []
        t, kind, place, a, b, c, d = (words + [0] * 7)[:7]
        event = decode_record(_raw(number, t, kind, place, a, b, c, d))
        if event is not None:
            fold_event(state, event)
    run = _run(summarize_rank(state))
    _shown(run)


def _raw(n: int, t: int, head: int, place: int, *rest: int) -> Raw:
    words = n, t, head & 0xFFFFFFFF, place & 0xFFFFFFFF, *rest, n, 0
    raw: Raw = RECORD.unpack(struct.pack("<QqIIqqqqII", *words))  # type: ignore[assignment]
    return raw


def ring_names(data: bytes, folder: Path) -> None:
    """A rank whose names are of other types: the rank beside it stays, and so does the run."""
    names = _loaded(data)
    run = folder / "rings" / "run1"
    run.mkdir(mode=0o700, parents=True)
    for rank in (0, 1):
        writer = RingWriter(run / f"rank{rank}.ring", rank=rank, capacity=_CAPACITY, names_size=_NAMES)
        for name in names if rank and isinstance(names, list) else ():
            if isinstance(name, list) and len(name) == 2 and isinstance(name[1], dict):
                kind = name[0] if isinstance(name[0], int) else NameKind.META
                with suppress(UnicodeEncodeError, struct.error):
                    writer.name(kind & 0xFFFF, name[1])
        for row in _events():
            writer.write(*row)
        writer.close()
    collector = Collector(folder / "rings", Store(folder / "store"))
    for _ in range(2):
        collector.tick()
        assert [rank.rank for one in collector.view for rank in one.ranks][:1] == [0], "no healthy rank"
        for one in collector.view:
            _shown(one)


@cache
def _events() -> list[tuple[int, ...]]:
    rows = json.loads(Mutations("ring_records").seeds[0])
    return [tuple(row) for row in rows[:40]]


# ---- store -----------------------------------------------------------------------------------------


def _run(*ranks: Any) -> Any:
    from builders import run

    return run(*ranks)


def _shown(run: Any, *, live: bool = True) -> None:
    """What the views make of a snapshot; of a *live* one of this node also /metrics."""
    judge_run(run)
    render_run(run)
    if live:
        Writer().write([run], None, openmetrics=True)


def store_snapshot(data: bytes, folder: Path) -> None:
    """The last snapshot of a recorded run, and what views show of it."""
    run = run_store.decode_snapshot(data)
    _shown(run, live=False)
    advise(run)


def store_record(data: bytes, folder: Path) -> None:
    """The files of a recorded run: each part of *data*, which ``====`` divides, is one of them."""
    store = Store(folder)
    record = store.folder("run1")
    for name, part in zip(_FILES, data.split(DIVIDED), strict=False):
        record.mkdir(parents=True, exist_ok=True)
        (record / name).write_bytes(part)
    store.list_manifests()
    store.about("run1")
    Past(record).findings()
    with suppress(ZeromonError):
        store.load("run1")


_FILES = ("snapshot.json", "manifest.json", "about.json", "findings.jsonl")


def store_log(data: bytes, folder: Path) -> None:
    """The snapshots over time; half of the cases have sums that are right."""
    place = folder / "snapshots"
    place.mkdir()
    if data[-1:] < b"\x80" and data[:8] == snapshot_log.MAGIC:
        data = _with_sums(data)
    (place / "0000001-0000001.moments").write_bytes(data)
    for moment in snapshot_log.logged_snapshots(place):
        snapshot_log.read_logged(moment)
    snapshot_log.span_of_log(place)
    snapshot_log.snapshot_at_time(place, 1e9)


def _with_sums(data: bytes) -> bytes:
    head = snapshot_log._HEAD
    found, at = [data[: len(snapshot_log.MAGIC)]], len(snapshot_log.MAGIC)
    while at + head.size <= len(data):
        length, _, moment = head.unpack_from(data, at)
        payload = data[at + head.size : at + head.size + min(length, 1 << 16)]
        crc = zlib.crc32(snapshot_log._MOMENT.pack(moment) + payload)
        found.append(head.pack(len(payload), crc, moment) + payload)
        at += head.size + max(1, len(payload))
    return b"".join(found)


def store_steps(data: bytes, folder: Path) -> None:
    """The history of steps: whole records of any content."""
    size, head = step_rows.BODY.size, len(step_rows.MAGIC)
    bodies = [data[at : at + size] for at in range(head, len(data) - size + 1, size + 4)]
    summed = b"".join(body + struct.pack("<I", zlib.crc32(body)) for body in bodies)
    path = folder / "000001.log"
    path.write_bytes(data[:head] + summed + data[len(data) & ~3 :])
    rows = list(step_rows.read_log(path))
    for row in rows:
        step_rows.step_of(row, 0)


def store_history(data: bytes, folder: Path) -> None:
    """Queries over a history of steps, by polars."""
    store_steps(data, folder)
    queries.series_of_steps(folder, StepQuery(most=50))
    queries.last_steps_before(folder, 1 << 62, 5)
    queries.ranges_of_steps(folder)


def store_parquet(data: bytes, folder: Path) -> None:
    """The same from a Parquet file."""
    (folder / "000001.parquet").write_bytes(data)
    queries.series_of_steps(folder, StepQuery(most=50))


def store_totals(data: bytes, folder: Path) -> None:
    """What a collector saved for the next one."""
    for totals in decode_totals(data).values():
        state = RankState(rank=0)
        restore_totals(state, totals)
        summarize_rank(state)


# ---- traces, configurations ------------------------------------------------------------------------


def trace(data: bytes, folder: Path) -> None:
    """A Kineto trace."""
    path = folder / "t.json"
    path.write_bytes(data)
    content = read_trace(path)
    analyze_trace(content, 0)
    rank_waits([collective_durations(content)] * 2)
    text = as_traces([analyze_trace(content, 0)], SECTIONS)
    assert text
    critical_path(content, read_host_step(path, content, lambda _: None, None))


def memory_snapshot(data: bytes, folder: Path) -> None:
    """A snapshot of torch's allocator."""
    path = folder / "s.pickle"
    path.write_bytes(data)
    devices = memory_by_device(read_snapshot(path))
    memory_text("s", devices)
    memory_growers((), [one for device in devices for one in device.held])


def flight_recorder(data: bytes, folder: Path) -> None:
    """The dumps of two ranks, of which one is broken."""
    for rank, part in enumerate((data, Mutations("flight_recorder").seeds[0])):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(part)
    dumps = [read_flight_dump(path) for path in sorted(folder.iterdir())]
    calls_under_way(dumps)
    flight_text(flight_findings(dumps), [dump.rank for dump in dumps], ())


def _checked(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    problems_as_text(check([str(path)]))


def config_json(data: bytes, folder: Path) -> None:
    """A configuration of DeepSpeed or accelerate."""
    _checked(data, folder / "ds.json")


def config_yaml(data: bytes, folder: Path) -> None:
    """A configuration of accelerate."""
    _checked(data, folder / "accelerate.yaml")


def config_script(data: bytes, folder: Path) -> None:
    """A training script."""
    _checked(data, folder / "train.py")


def config_launch(data: bytes, folder: Path) -> None:
    """A launch file."""
    _checked(data, folder / "launch.sh")


# ---- nodes -----------------------------------------------------------------------------------------


def node_card(data: bytes, folder: Path) -> None:
    """What a node publishes in the job's store, and what its agent writes for the collector."""
    node_of(data, "")
    (folder / "nodes.json").write_bytes(data)
    read_node_infos(folder)


def node_message(data: bytes, folder: Path) -> None:
    """A report to the leader."""
    leader = _leader()
    with suppress(ValueError):
        run_of_report(data)
        for at in (10**9, 10**10):
            cluster_client._REPLY.decode(answer_report(leader, data, at))


@cache
def _leader() -> Leader:
    return Leader()


def node_reply(data: bytes, folder: Path) -> None:
    """The reply of the leader."""
    cards = [NodeInfo(node=n, address="a:1", first_rank=r, ranks=2, run="r") for n, r in _TWO]
    sync = ClusterSync("r", cards[1], cards, Leader())
    with suppress(ValueError):
        reply = cluster_client._decode_message(cluster_client._REPLY, data)
        sync.clock.heard(1, reply.received_ns, reply.replied_ns, 2)
        best = sync.clock.best(3)
        sync._take(reply, round(best.value_ns) if best is not None else 0)
        from builders import rank, run

        shown = run(rank(2), nodes=sync.nodes(), hangs=sync.hangs, away=sync.away, nodes_note=sync.note)
        _shown(shown)


_TWO = (("n0", 0), ("n1", 2))


# ---- HTTP and Prometheus ---------------------------------------------------------------------------

KEY = "0123456789abcdef"


class _Socket:
    """What a handler of HTTP needs of a connection."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._data)

    def sendall(self, _: bytes) -> None:
        pass

    def settimeout(self, _: float) -> None:
        pass


@cache
def _served() -> Any:
    """A collector's server without a socket, with one recorded run; it keeps what its requests raise."""
    from builders import full_run

    folder = Path(tempfile.mkdtemp(prefix="zeromon-fuzz-"))
    (folder / "rings").mkdir(mode=0o700)
    store = Store(folder / "store")
    run = full_run()
    store.save(run)
    collector = Collector(folder / "rings", store)
    collector.view = (run,)
    application = Application(collector, KEY)
    errors: list[BaseException] = []

    def guarded(environ: Any, respond: Any) -> Any:
        try:
            return application(environ, respond)
        except Exception as error:
            errors.append(error)
            raise

    return SimpleNamespace(
        get_app=lambda: guarded, server_name="localhost", server_port=9417, errors=errors,
        base_environ={
            "SERVER_NAME": "localhost", "GATEWAY_INTERFACE": "CGI/1.1", "SERVER_PORT": "9417",
            "REMOTE_HOST": "", "CONTENT_LENGTH": "", "SCRIPT_NAME": "",
        },
    )  # fmt: skip


def http(data: bytes, folder: Path) -> None:
    """A request to the collector, byte by byte."""
    server = _served()
    kept, sys.stderr = sys.stderr, io.StringIO()
    try:
        _QuietHandler(_Socket(data), ("127.0.0.1", 1), server)  # type: ignore[arg-type]
    except Exception as error:
        server.errors.append(error)
    finally:
        sys.stderr = kept
    if server.errors:
        raise server.errors.pop()


class _Answers(Server):
    """A Prometheus that answers each kind of question with a part of its data."""

    def __init__(self, data: bytes) -> None:
        super().__init__("http://localhost:9")
        self._parts = (data.split(DIVIDED) * 4)[:4]

    def _ask(self, what: str, parameters: dict[str, str]) -> bytes:
        question = parameters.get("query", "")
        if what.startswith("label"):
            return self._parts[0] if len(self._parts[0]) % 2 else b'{"data":["0"]}'
        if what == "query_range" or question.endswith("]"):
            return self._parts[3]
        listed = 'label_replace(count(zeromon_rank_up{run="r"})' in question or "known" in question
        return self._parts[0 if listed else 1 + len(question) % 2]


def prometheus(data: bytes, folder: Path) -> None:
    """The answers of a Prometheus to all that a source asks."""
    server = _Answers(data)
    source = PrometheusSource(server, "r")
    for ask in (
        lambda: runs_of(server),
        lambda: _shown(source.latest(), live=False),
        lambda: _shown(source.at(1e9), live=False),
        source.series,
        source.findings,
    ):
        with suppress(ZeromonError):
            ask()


# ---- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """A function to feed, and its share of all cases, of a thousand."""

    feed: Feed
    share: int

    @property
    def name(self) -> str:
        return self.feed.__name__


TARGETS = (
    Target(ring_file, 130), Target(ring_records, 40), Target(ring_names, 5),
    Target(store_snapshot, 60), Target(store_record, 60), Target(store_log, 50), Target(store_steps, 70),
    Target(store_history, 3), Target(store_parquet, 6), Target(store_totals, 60),
    Target(trace, 60), Target(memory_snapshot, 20), Target(flight_recorder, 20),
    Target(config_json, 60), Target(config_yaml, 30), Target(config_script, 30),
    Target(config_launch, 40), Target(node_card, 60), Target(node_message, 60), Target(node_reply, 40),
    Target(http, 86), Target(prometheus, 10),
)  # fmt: skip


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


@contextmanager
def little_memory() -> Iterator[None]:
    """Gives this process no more than two GiB more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises :class:`Slow` in what takes more of this process's time than so many *seconds*."""

    def stop(*_: Any) -> None:
        raise Slow(f"more than {seconds} s")

    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def run_case(target: Target, data: bytes, folder: Path) -> float:
    """Feeds *data*; returns its seconds of CPU. Raises what the target must not raise."""
    began = time.process_time()
    with bounded(20 * SLOW_SECONDS), suppress(*ALLOWED):
        target.feed(data, folder)
    spent = time.process_time() - began
    if spent > SLOW_SECONDS:
        raise Slow(f"{spent:.2f} s")
    return spent


def run_cases(target: Target, numbers: range, root: Path) -> tuple[dict[str, int], float]:
    """Runs the cases; returns each kind of failure with its first case, and the longest time."""
    mutations = Mutations(target.name)
    failures: dict[str, int] = {}
    slowest = 0.0
    with tempfile.TemporaryDirectory(dir=root) as scratch, little_memory():
        for number in numbers:
            folder = Path(scratch, str(number))
            folder.mkdir()
            try:
                slowest = max(slowest, run_case(target, mutations.case(number), folder))
            except Exception as error:
                failures.setdefault(_kind(error), number)
            _clear(folder)
    return failures, slowest


def _kind(error: Exception) -> str:
    """``KeyError at fold/units.py:40``: what tells one defect from another."""
    at = error.__traceback__
    place = "?"
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if "/zeromon" in name or "/fuzz/" in name:
            place = f"{'/'.join(Path(name).parts[-2:])}:{at.tb_lineno}"
        at = at.tb_next
    return f"{type(error).__name__} at {place}"


def _clear(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir():
            _clear(Path(entry.path))
        else:
            os.unlink(entry.path)
    folder.rmdir()


def main() -> int:
    """Runs cases of one target, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?")
    parser.add_argument("number", nargs="?", type=int)
    parser.add_argument("--cases", type=int, default=1000, help="of all targets together, or of the one")
    parser.add_argument("--piece", default="1/1", help="2/4: the second quarter of the cases")
    parser.add_argument("--publish", action="store_true", help="store the table for the page")
    options = parser.parse_args()
    chosen = [t for t in TARGETS if options.target in (None, t.name)]
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    if options.number is not None:
        data = Mutations(chosen[0].name).case(options.number)
        print(data[:3000])
        with tempfile.TemporaryDirectory(dir=root) as folder:
            print(run_case(chosen[0], data, Path(folder)))
        return 0
    bad, rows = 0, []
    piece, pieces = map(int, options.piece.split("/"))
    for target in chosen:
        whole = options.cases if options.target else max(1, options.cases * target.share // 1000)
        numbers = range(whole * (piece - 1) // pieces, whole * piece // pieces)
        count = max(1, len(numbers))
        began = time.process_time()
        failures, slowest = run_cases(target, numbers, root)
        spent = time.process_time() - began
        print(
            f"{target.name:16} {count:8,} cases {spent:8.1f} s  {1e3 * spent / count:7.2f} ms  "
            f"slowest {slowest:.2f} s  {len(failures)} failures", flush=True,
        )  # fmt: skip
        for kind, number in failures.items():
            print(f"    {number}: {kind}", flush=True)
        bad += len(failures)
        fed_with = (target.feed.__doc__ or "").partition("\n")[0].rstrip(".")
        rows.append(Fed(f"`{target.name}`", fed_with, count, spent, slowest, len(failures)))
    if options.publish:
        publish("reliability", {"fuzz": page_entry(rows)})
    return bool(bad)


@dataclass(frozen=True)
class Fed:
    """What came of the cases of one target."""

    name: str
    input: str
    count: int
    seconds: float
    slowest: float
    failures: int


def page_entry(fed: list[Fed]) -> Entry:
    """The table of docs/evidence/reliability.md, with the sum of all targets below."""
    counts, seconds = sum(one.count for one in fed), sum(one.seconds for one in fed)
    slowest, failures = max(one.slowest for one in fed), sum(one.failures for one in fed)
    return measured_here(
        "tests/fuzz/targets.py",
        head=["target", "input", "cases", "CPU, s", "slowest case, s", "failures"],
        rows=[
            [one.name, one.input, f"{one.count:,}", f"{one.seconds:.0f}", f"{one.slowest:.2f}",
             str(one.failures)]
            for one in [*fed, Fed("all", "", counts, seconds, slowest, failures)]
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
