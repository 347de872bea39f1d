"""A synthetic fleet: N collectors of M ranks each, all served by one process.

`python tests/fleet.py NODES RANKS [--port P] [--core] [--prometheus INTERVAL]`

Each node has its own exporter (the real one) at `/node/17/metrics`, `/node/17/api/...`, and `/sd` lists
all of them as the collectors' own would. Figures move with the clock: counters grow, one rank is late,
one runs out of memory. `--core` leaves out all metrics but those of CORE, so that 16,384 ranks fit.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer, make_server

from builders import changed, device_memory, rank, run, summary
from prometheus_server import Prometheus, access, scrape

from zeromon.collector.http import Application, _QuietHandler, _Server
from zeromon.diagnosis.engine import advise
from zeromon.export.prometheus import metrics
from zeromon.fold.state import STEP_BUCKETS
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import Straggler
from zeromon.snapshot.memory import Risk
from zeromon.storage.snapshot_log import Past

GIB = 1 << 30
CAPACITY = 80 * GIB
LATE_RANK, GROWING_RANK = 5, 11

CORE = frozenset(
    """
    zeromon_rank_info zeromon_rank_up zeromon_rank_failed zeromon_steps_total zeromon_step_seconds
    zeromon_overlap_ratio zeromon_exposed_communication_ratio zeromon_collective_in_flight_seconds
    zeromon_wait_for_late_rank_seconds zeromon_late_seconds zeromon_hang
    zeromon_memory_allocated_bytes zeromon_memory_reserved_bytes zeromon_memory_capacity_bytes
    zeromon_memory_headroom_bytes zeromon_host_memory_rss_bytes zeromon_oom_risk_ratio
    zeromon_oom_steps_left zeromon_finding zeromon_events_dropped_total zeromon_agent_errors_total
    """.split()
)
"""About 20 series a rank, without the buckets of the step's histogram."""

NO_BUCKETS = {"source_labels": ["__name__"], "regex": "zeromon_.*_bucket", "action": "drop"}
"""A metric_relabel_config."""


def step_seconds(number: int, seconds: float) -> float:
    """How long a step of that rank takes now: 0.4 s and what moves; all are about as fast."""
    return 0.4 + 0.02 * math.sin(seconds / 60) + number % 16 / 5000


def exposed_ratio(number: int, seconds: float) -> float:
    return 0.08 + number % 23 / 150 + 0.02 * math.sin(seconds / 20 + number)


def used_bytes(number: int, seconds: float) -> int:
    """Rank 11 grows from half to nearly all of its device in ten minutes, and begins again."""
    if number == GROWING_RANK:
        return round(CAPACITY * (0.5 + 0.45 * (seconds % 600) / 600))
    return round((38 + number % 8 + math.sin(seconds / 30 + number)) * GIB)


class Moving:
    """One node of the run, whose snapshot is of the moment it is read."""

    def __init__(self, name: str, node: int, ranks: int, world: int, began: float) -> None:
        self._name, self._began = name, began
        self.node = f"node{node:04}"
        base = rank(0, recent=(), units=())
        self._ranks = [
            replace(
                base, rank=node * ranks + n, local_rank=n, world_size=world, pid=1000 + n,
                node=self.node, device=f"cuda:{n}", strategy="fsdp2",
            )
            for n in range(ranks)
        ]  # fmt: skip
        self.failed: set[int] = set()
        """Ranks that have died."""
        self.health = None

    @property
    def view(self) -> tuple[RunSnapshot, ...]:
        """Its only run, now."""
        return (self.view_at(time.time()),)

    def view_at(self, now: float) -> RunSnapshot:
        """Its run at a moment, seconds since the epoch."""
        seconds = now - self._began
        ranks = tuple(self._at(one, seconds) for one in self._ranks)
        late = Straggler(
            rank=LATE_RANK, late_seconds=0.021, share=0.11, since_step=101, phases=("data_wait",),
            longer_seconds=0.019,
        )  # fmt: skip
        numbers = {one.rank for one in ranks}
        snapshot = run(
            *ranks, run=self._name, node=self.node, taken_wall=now, started_wall=self._began,
            taken_ns=round(seconds * 1e9), stragglers=(late,) if LATE_RANK in numbers else (),
        )  # fmt: skip
        return replace(snapshot, findings=tuple(advise(snapshot)))

    def _at(self, one: RankSnapshot, seconds: float) -> RankSnapshot:
        number = one.rank
        each = step_seconds(number, seconds)
        # the integral of 1 / step, about: it only grows
        steps = max(0, int(seconds / 0.4 + 3 * math.cos(seconds / 60)))
        exposed = exposed_ratio(number, seconds)
        used = used_bytes(number, seconds)
        growing = number == GROWING_RANK
        left = (CAPACITY - used) / (CAPACITY * 0.45 / 600) / each if growing else None
        risk = Risk(
            pool="device", ratio=used / CAPACITY if growing else 0.1 + number % 5 / 20,
            cause="growth" if growing else "none", steps_left=left, used_bytes=used,
            capacity_bytes=CAPACITY,
        )  # fmt: skip
        counts = [0] * (len(STEP_BUCKETS) + 1)
        counts[5] = steps
        last = summary(
            steps, start_ns=round((seconds - each) * 1e9), end_ns=round(seconds * 1e9),
            exposed_ns=round(exposed * each * 1e9), reserved_bytes=used,
        )  # fmt: skip
        failed = number in self.failed
        return changed(
            one, last_step=steps, watched_steps=steps, median_seconds=each, mean_seconds=each,
            total_seconds=seconds,
            duration_buckets=tuple(counts), recent=(last,), alive=not failed, failed=failed,
            ended="SIGKILL" if failed else "", exposed_ratio=exposed,
            exposed_seconds=exposed * each, overlap_ratio=0.6 + number % 8 / 50,
            late_seconds=0.021 if number == LATE_RANK else 0.001 + number % 5 / 1000,
            wait_seconds=0.002 if number == LATE_RANK else 0.018 + number % 7 / 1000,
            risks=(risk,), traffic=traffic(number % 5), last_event_ns=last.end_ns,
            phase_seconds={
                "other": seconds * 0.03, "forward": seconds * 0.3, "backward": seconds * 0.55,
                "optimizer": seconds * 0.07, "data_wait": seconds * 0.05, "cpu_optimizer": 0.0,
            },
            collectives=tuple(
                replace(
                    row, count=steps * 48, timed=steps * 48, nbytes=steps * 6 * GIB,
                    seconds=seconds * 0.4,
                    exposed_seconds=seconds * exposed / len(one.communication.collectives),
                )
                for row in one.communication.collectives
            ),
            memory_device=device_memory(
                allocated_bytes=used - 4 * GIB, active_bytes=used - 3 * GIB, reserved_bytes=used,
                capacity_bytes=CAPACITY, free_bytes=CAPACITY - used,
            ),
        )  # fmt: skip

    def was_read(self, _: str = "view") -> None:
        """Nobody waits for that."""

    def past(self, name: str) -> Past:
        """Nothing is kept."""
        return Past(Path(tempfile.gettempdir()) / "zeromon-no-such-folder" / name)

    def trace(self, name: str, steps: int, ranks: Sequence[int]) -> Any:
        raise NotImplementedError


def traffic(variant: int) -> tuple[CollectiveStatsRow, ...]:
    """Two gathers and a reduction."""
    found = []
    for op, phase, ms in (("all_gather", "forward", 40), ("all_gather", "backward", 45),
                          ("reduce_scatter", "backward", 60)):  # fmt: skip
        busy = (ms + variant) / 1e3
        found.append(CollectiveStatsRow(
            op=op, group="dp_shard", group_size=8, nodes=1, phase=phase, unit="", count=160,
            calls=1.0, nbytes=218e6, seconds=busy, exposed_seconds=busy * 0.4,
            exposed_total_seconds=busy * 64, wait_seconds=busy * 0.15, transfer_seconds=busy * 0.8,
            algbw_bytes_per_second=218e6 / busy, busbw_bytes_per_second=218e6 / busy * 7 / 8,
            best_busbw_bytes_per_second=31e9,
        ))  # fmt: skip
    return tuple(found)


class Fleet:
    """All its nodes behind one port of loopback; serves between ``with`` and its end."""

    def __init__(self, nodes: int, ranks: int, *, name: str = "fleet", port: int = 0) -> None:
        self.name, self.ranks = name, ranks
        began = time.time() - random.Random(name).uniform(1000, 2000)
        self.nodes = [Moving(name, n, ranks, nodes * ranks, began) for n in range(nodes)]
        self.silent: set[int] = set()
        """Nodes that do not answer."""
        self.silent_api = False
        """No node answers but to Prometheus."""
        self._applications = [Application(node) for node in self.nodes]
        self.server: WSGIServer = make_server("127.0.0.1", port, self, _Server, _QuietHandler)
        self.server.socket.listen(1024)
        self.address = f"127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Fleet:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def __call__(self, environ: dict[str, Any], respond: Any) -> Iterable[bytes]:
        """The WSGI application: ``/sd``, and ``/node/N/...`` of node N's own."""
        path = environ.get("PATH_INFO", "/")
        if path == "/sd":
            body = json.dumps(list(self.targets())).encode()
            respond("200 OK", [("Content-Type", "application/json")])
            return [body]
        number, _, rest = path.removeprefix("/node/").partition("/")
        if not path.startswith("/node/") or int(number) in self.silent:
            respond("503 Service Unavailable", [])
            return [b""]
        if rest != "metrics" and self.silent_api:
            respond("503 Service Unavailable", [])
            return [b""]
        return self._applications[int(number)](environ | {"PATH_INFO": f"/{rest}"}, respond)

    def targets(self) -> Iterator[dict[str, Any]]:
        """What Prometheus HTTP SD wants; the instance is an address that a view can ask."""
        for n, node in enumerate(self.nodes):
            yield {
                "targets": [self.address],
                "labels": {
                    "__metrics_path__": f"/node/{n}/metrics",
                    "__meta_zeromon_run": self.name,
                    "__meta_zeromon_node": node.node,
                    "__meta_zeromon_ranks": f"{n * self.ranks}-{(n + 1) * self.ranks - 1}",
                    "instance": f"{self.address}/node/{n}",
                },
            }

    def job(self, *, discover: bool = True, **more: Any) -> dict[str, Any]:
        """How Prometheus scrapes it. To *discover* takes it five seconds more than to be told."""
        if not discover:
            return scrape(static_configs=list(self.targets()), **more)
        discovery = {"url": f"http://{self.address}/sd", "refresh_interval": "60s", **access()}
        return scrape(http_sd_configs=[discovery], **more)


def only_core() -> None:
    """Leaves CORE of the metrics, in this process."""
    metrics.METRICS = tuple(spec for spec in metrics.METRICS if spec.name in CORE)


@contextmanager
def scraped(
    fleet: Fleet, interval: str = "1s", *, core: bool = False, discover: bool = True
) -> Iterator[Prometheus]:
    """A Prometheus that has seen every node of *fleet* at least twice."""
    more = {"metric_relabel_configs": [NO_BUCKETS]} if core else {}
    with fleet, Prometheus([fleet.job(discover=discover, **more)], interval) as server:
        twice = "count(count_over_time(zeromon_rank_up[10m]) >= 2)"
        server.wait(twice, len(fleet.nodes) * fleet.ranks, timeout=600)
        yield server


def main() -> None:
    """Serves until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=int)
    parser.add_argument("ranks", type=int, help="of each node")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--core", action="store_true", help="only the metrics of CORE")
    parser.add_argument("--prometheus", metavar="INTERVAL", help="start one, too: 15s")
    options = parser.parse_args()
    if options.core:
        only_core()
    fleet = Fleet(options.nodes, options.ranks, port=options.port)
    print(f"fleet http://{fleet.address}/sd", flush=True)
    if not options.prometheus:
        fleet.server.serve_forever()
    with scraped(fleet, options.prometheus, core=options.core) as server:
        print(f"prometheus {server.url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        pass
