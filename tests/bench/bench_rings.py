"""Real rings, collectors and Prometheus: `bench_rings.py [COLLECTORS RANKS SECONDS RATE] [--compiled]`.

One run of COLLECTORS nodes: a collector process each, with its own folders and port, which exchange
reports with the first; RANKS rings of the usual size each, to which two writers write RATE records
a second and rank (10 to 90), a step every 0.9 s; and a Prometheus that finds all collectors through /sd
and evaluates the generated rules. Measured for SECONDS: how old the newest record is in the snapshots,
and the newest tick in Prometheus; dropped records; memory and CPU of each part. Then the same for one
collector with 64 ranks, for at most 20 s. All share this machine. `128 8 600 15` is the default; the
short form is `16 8 60 15`. On the last line: JSON. Exit code 1 where a collector is missing, a rank is
behind the others or does not answer, or a record was dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import psutil
from compiled import compile_into
from prometheus_server import Prometheus
from records import keep
from support import ROOT, wait_for
from synthetic import Synthetic

from zeromon.export.prometheus import rules
from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import decode_snapshot

RUN, TOKEN, INTERVAL = "rings", "bench-rings", 10
FIXED_RECORDS = 5
"""Of a step, beside two a collective."""
STEP_SECONDS = 0.9
"""Not the second of a tick: the age of a record would depend on when the collector began."""
WRITERS = 2
MOST_BEHIND = 10.0
"""Seconds that the newest record of a rank may be old at the end."""
WAVE = 2 * (os.cpu_count() or 1)
"""So many collectors start at once."""


def write(folders: Sequence[str], first: int, each: int, world: int, rate: int) -> None:
    """Writes the same step of all ranks at the same moment, until the parent ends."""
    parent, collectives = os.getppid(), round((rate * STEP_SECONDS - FIXED_RECORDS) / 2)
    ranks = [
        Synthetic(Path(folder), first + n * each + local, world)
        for n, folder in enumerate(folders)
        for local in range(each)
    ]
    print("written", flush=True)
    while os.getppid() == parent:
        due = (time.monotonic() // STEP_SECONDS + 1) * STEP_SECONDS
        time.sleep(max(0.0, due - time.monotonic()))
        for rank in ranks:
            rank.write_step(round(due * 1e9), collectives)


def own_address() -> str:
    """An address of this machine that is not loopback: nodes do not exchange reports over that."""
    found = (
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    )
    address = next(found, None)
    assert address is not None, "this machine has no address other than loopback"
    return address


class Node:
    """A collector process, as `zeromon run` starts it, with folders and a port of its own."""

    def __init__(self, folder: Path, host: str, code: Path) -> None:
        self.root, self.run = folder / "rings", folder / "rings" / RUN
        self.run.mkdir(mode=0o700, parents=True)
        facts = {"run": RUN, "command": ["bench"], "started": time.time(), "pid": os.getpid()}
        (self.run / "run.json").write_text(json.dumps(facts | {"mono_ns": time.monotonic_ns()}))
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zeromon.collector"], cwd="/", stderr=log,
                env=os.environ | {
                    "PYTHONPATH": str(code), "ZEROMON_DIR": str(self.root),
                    "ZEROMON_STORE": str(folder / "store"), "ZEROMON_PORT": str(port),
                    "ZEROMON_HOST": host, "ZEROMON_TOKEN": TOKEN,
                },
            )  # fmt: skip
        self.address = ""

    def listens(self) -> bool:
        """Whether it serves; from then on :attr:`address` is its own."""
        assert self.process.poll() is None, (self.process.returncode, self.log.read_text())
        with suppress(OSError, ValueError):
            facts = json.loads((self.root / "collector.json").read_text())
            self.address = f"{facts['host']}:{facts['port']}"
        return bool(self.address)

    def get(self, path: str) -> bytes:
        """Its answer."""
        request = urllib.request.Request(f"http://{self.address}{path}")
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: bytes = answer.read()
        return content

    def snapshot(self) -> RunSnapshot:
        """Its newest, without the steps."""
        return decode_snapshot(self.get(f"/api/runs/{RUN}?since={1 << 62}"))


class Watched:
    """CPU of some processes from when this was made."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.processes = [psutil.Process(pid) for pid in pids]
        self._began, self._before = time.monotonic(), self._used()

    def _used(self) -> list[float]:
        times = [one.cpu_times() for one in self.processes]
        return [each.user + each.system for each in times]

    def shares(self) -> list[float]:
        """Of each, as a share of one core."""
        took = time.monotonic() - self._began
        return [(b - a) / took for a, b in zip(self._before, self._used(), strict=True)]


def memory(pid: int) -> tuple[float, float]:
    """Resident bytes that count for the process alone, and of those the rings' (shared memory)."""
    fields = {
        words[0]: int(words[1]) * 1024
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        if len(words := line.split()) > 1
    }
    return fields["Pss:"], fields.get("Pss_Shmem:", 0)


def started(
    stack: ExitStack, folder: Path, code: Path, nodes: int, each: int, rate: int
) -> tuple[Any, Any]:
    """The collectors and the writers, when all collectors know all nodes and all rings are written."""

    processes: list[subprocess.Popen[bytes]] = []
    stack.callback(end, processes)
    host, world = own_address(), nodes * each
    collectors: list[Node] = []
    for first in range(0, nodes, WAVE):  # a real cluster starts one a machine
        wave = [Node(folder / str(n), host, code) for n in range(first, min(nodes, first + WAVE))]
        collectors += wave
        processes += [node.process for node in wave]
        for node in wave:
            wait_for(node.listens, 60)
    with suppress(
        PermissionError
    ):  # on a machine of its own the leader need not compete with the others
        os.setpriority(os.PRIO_PROCESS, collectors[0].process.pid, 0)
    cards = [
        {
            "node": f"node{n}", "address": node.address, "first_rank": n * each, "ranks": each,
            "run": "" if n else RUN,
        }
        for n, node in enumerate(collectors)
    ]  # fmt: skip
    for node in collectors:
        (node.run / "nodes.json").write_text(json.dumps(cards))
    share = -(-nodes // WRITERS)
    writers = []
    for first in range(0, nodes, share):
        folders = [str(node.run) for node in collectors[first : first + share]]
        words = [first * each, each, world, rate]
        command = [sys.executable, __file__, "--write", *folders, "--", *map(str, words)]
        writers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        processes.append(writers[-1])
    for writer in writers:
        assert writer.stdout.readline()
    for node in collectors:
        wait_for(lambda node=node: len(ranks_of(node)) == each, 120)
    wait_for(lambda: targets_of(collectors[0]) == nodes, 120)
    return collectors, writers


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends all of them, at the same time."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def ranks_of(node: Node) -> Sequence[Any]:
    """The ranks of its snapshot; none before it has the run."""
    with suppress(OSError):
        return node.snapshot().ranks
    return ()


def targets_of(node: Node) -> int:
    """How many collectors it knows; 0 while it does not answer."""
    with suppress(OSError):
        return len(json.loads(node.get("/sd")))
    return 0


def followed(collectors: Sequence[Node], server: Prometheus, seconds: float) -> dict[str, Any]:
    """Asks one collector after the other, and Prometheus, until *seconds* have passed."""
    records, snapshots, ticks, memories = [], [], [], []
    end, number, chance = time.monotonic() + seconds, 0, random.Random(0)
    unanswered = 0
    while time.monotonic() < end:
        try:
            run = collectors[number % len(collectors)].snapshot()
        except OSError as error:
            print(f"collector {number % len(collectors)}: {error}", file=sys.stderr)
            unanswered += 1
        else:
            now = time.monotonic_ns()
            records.append((now - min(one.status.last_event_ns for one in run.ranks)) / 1e9)
            snapshots.append((now - run.taken_ns) / 1e9)
        found = server.query("time() - zeromon_collector_last_tick_timestamp_seconds")
        ticks += [float(one["value"][1]) for one in found]
        memories.append(psutil.Process(server.process.pid).memory_info().rss)
        number += 1
        time.sleep(chance.uniform(0.5, 1.2))
    return {
        "record_age": spread(records), "snapshot_age": spread(snapshots),
        "prometheus_age": spread(ticks), "prometheus_bytes": max(memories),
        "asked": number, "unanswered": unanswered,
    }  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "most": max(values)}


def asked(server: Prometheus, seconds: float) -> dict[str, float]:
    """What Prometheus says of its scrapes and rules over that time."""
    window = f"[{max(30, round(seconds))}s]"
    numbers = {
        "targets": "count(up)",
        "failed_scrapes": f"sum(count_over_time(up{window}) - sum_over_time(up{window}))",
        "scrape": f"quantile(0.5, avg_over_time(scrape_duration_seconds{window}))",
        "slowest_scrape": f"max(max_over_time(scrape_duration_seconds{window}))",
        "series": "sum(scrape_samples_post_metric_relabeling)",
        "recorded": 'count({__name__=~"zeromon:.+"})',
        "tick_seconds": "avg(zeromon_collector_tick_seconds_total / zeromon_collector_ticks_total)",
    }
    found = {name: server.number(expression) for name, expression in numbers.items()}
    with urllib.request.urlopen(f"{server.url}/api/v1/rules", timeout=30) as answer:
        groups = json.load(answer)["data"]["groups"]
    return found | {
        "rules_seconds": sum(group["evaluationTime"] for group in groups),
        "rule_errors": sum(bool(rule.get("lastError")) for g in groups for rule in g["rules"]),
    }


def measured(code: Path, nodes: int, each: int, seconds: float, rate: int) -> dict[str, Any]:
    """All figures of one form; *code*: the folder with the package."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="zeromon-rings-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        collectors, writers = started(stack, folder, code, nodes, each, rate)
        (folder / "token").write_text(TOKEN)
        (folder / "rules.yml").write_text(json.dumps(rules.rule_document(rules.Thresholds())))
        sd = f"http://{collectors[0].address}/sd"
        made = rules.scrape_document([sd], [], token_file=str(folder / "token"))
        server = stack.enter_context(
            Prometheus(made["scrape_configs"], f"{INTERVAL}s", (folder / "rules.yml",))
        )
        server.wait("count(count_over_time(zeromon_rank_up[10m]))", nodes * each, 120)
        pids = [node.process.pid for node in collectors]
        own, others = Watched(pids), Watched(one.pid for one in writers)
        theirs = Watched([server.process.pid])
        psutil.cpu_percent()
        found: dict[str, Any] = followed(collectors, server, seconds)
        shares, machine = own.shares(), psutil.cpu_percent()
        held = [memory(pid) for pid in pids]
        ranks, behind = [], 0.0
        for node in collectors:  # which takes a while where there are many
            ranks += (there := node.snapshot().ranks)
            now = time.monotonic_ns()
            behind = max(behind, *((now - rank.status.last_event_ns) / 1e9 for rank in there))
        return found | asked(server, seconds) | {
            "collectors": nodes, "ranks": len(ranks), "seconds": seconds, "rate": rate,
            "collector_cpu": spread(shares), "collectors_cpu": sum(shares),
            "collector_bytes": spread([all_ - rings for all_, rings in held]),
            "collectors_bytes": sum(all_ - rings for all_, rings in held),
            "rings_bytes": sum(rings for _, rings in held),
            "writers_cpu": sum(others.shares()), "prometheus_cpu": theirs.shares()[0],
            "machine": machine / 100, "load": os.getloadavg()[0],
            "dropped": sum(rank.agent.dropped for rank in ranks),
            "behind": behind,
        }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """A form as text, and its figures for the file of `run.py`."""
    title = f"{row['collectors']} x {row['ranks'] // row['collectors']} ranks"
    print(f"{title}, {row['seconds']:.0f} s, {row['rate']} records/s a rank; load {row['load']:.1f},"
          f" the machine's cores {row['machine']:.0%} busy")  # fmt: skip
    for name, label in (
        ("record_age", "age of the newest record of the rank that is most behind"),
        ("snapshot_age", "age of the snapshot"),
        ("prometheus_age", "age of a collector's newest tick in Prometheus"),
    ):
        print(f"  {label}: median {row[name]['median']:.2f} s, most {row[name]['most']:.2f} s")
    print(f"  dropped records {row['dropped']}; the newest at the end at most {row['behind']:.1f} s old;"
          f" {row['unanswered']} of {row['asked']} questions unanswered")  # fmt: skip
    cpu, nbytes = row["collector_cpu"], row["collector_bytes"]
    print(f"  a collector: {cpu['median']:.2%} of a core (most {cpu['most']:.2%}), a tick"
          f" {row['tick_seconds'] * 1e3:.1f} ms, {nbytes['median'] / 1e6:.1f} MB"
          f" (most {nbytes['most'] / 1e6:.1f} MB) without the rings")  # fmt: skip
    print(f"  all collectors: {row['collectors_cpu']:.2f} cores,"
          f" {row['collectors_bytes'] / 1e6:,.0f} MB;"
          f" writers {row['writers_cpu']:.1%} of a core")  # fmt: skip
    print(f"  Prometheus: {row['series']:,.0f} series, {row['recorded']:.0f} recorded,"
          f" {row['prometheus_bytes'] / 1e6:.0f} MB, {row['prometheus_cpu']:.1%} of a core; a scrape"
          f" {row['scrape'] * 1e3:.0f} ms (most {row['slowest_scrape'] * 1e3:.0f} ms),"
          f" {row['failed_scrapes']:.0f} failed; rules {row['rules_seconds'] * 1e3:.0f} ms,"
          f" {row['rule_errors']} with errors", flush=True)  # fmt: skip
    keep(f"{title}, a collector", cpu["median"], "of a core")
    keep(f"{title}, memory of a collector", nbytes["median"], "bytes")
    keep(f"{title}, age of a rank's newest record", row["record_age"]["median"], "s")
    keep(f"{title}, dropped", row["dropped"], "records", noise=0)
    keep(f"{title}, failed scrapes", row["failed_scrapes"], "scrapes", noise=0)


def main() -> int:
    """Prints the figures of that form, and of one collector with 64 ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("collectors", 128), ("ranks", 8), ("seconds", 600), ("rate", 15)):
        parser.add_argument(name, type=int, nargs="?", default=usual)
    parser.add_argument("--compiled", action="store_true", help="collectors with a compiled fold")
    parser.add_argument("--write", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write, *(options.collectors, options.ranks, options.seconds, options.rate))
        return 0
    if shutil.which("prometheus") is None:
        parser.error("prometheus is not installed")
    if not 10 <= options.rate <= 90:
        parser.error("RATE is 10 to 90")
    forms = ((options.collectors, options.ranks, options.seconds), (1, 64, min(options.seconds, 20)))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) if options.compiled else ROOT
        if options.compiled:
            compile_into(code)
        for form in forms:
            found.append(measured(code, *form, options.rate))
            show(found[-1])
    print(json.dumps(found))
    return any(
        row["dropped"]
        or row["unanswered"]
        or row["behind"] > MOST_BEHIND
        or row["targets"] < row["collectors"]
        for row in found
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
