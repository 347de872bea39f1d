"""What zeromon holds over a long run: `python tests/bench/bench_soak.py [--restarts N]`.

Two FSDP2 ranks train under `zeromon run`, with a dashboard, a tab that asks it once a second, and a
terminal view, and beside them the same training alone, which is the load. Prints what each process holds
near the beginning, in the middle, and near the end; whether the losses of both trainings are the same;
and what the record has. With --restarts the collector is killed so often meanwhile. The store of all but
the first collector has the limits of :data:`LIMITS`, which the run exceeds. Needs tmux.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attaching import Job
from bench_dash import tab
from bench_tui import Terminal
from support import ZEROMON, Held, free_port, held, load_all_rows, wait_for

from zeromon.ring.buffer import CAPACITY, RingReader
from zeromon.sources.live import collector_address
from zeromon.storage import snapshot_log
from zeromon.storage.run_store import Store
from zeromon.storage.step_history.writer import Writer

HERE = Path(__file__).resolve()
LIMITS = (
    (Writer, {"segment_rows": 2_000, "limit_bytes": 300_000}),
    (snapshot_log.Writer, {"segment_moments": 16, "limit_bytes": 300_000}),
)
RUN = "live"
"""As bench_dash's tab calls it."""


def collect() -> int:
    """A collector with a small store."""
    from zeromon.collector.collector_process import main

    for writer, limits in LIMITS:
        writer.__init__.__kwdefaults__.update(limits)  # type: ignore[misc]
    return main(["--daemon"])


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Soak:
    """The run, all that watches it, and what they held at each moment."""

    def __init__(self, folder: Path, steps: int, pause: float) -> None:
        self.root, self.steps = folder / "rings", steps
        self.store = Store(folder / "store")
        self.samples: dict[str, list[tuple[int, Held]]] = {}
        self.back: list[float] = []
        """Seconds from each kill of the collector until another answers."""
        environment = {
            "ZEROMON_DIR": str(self.root),
            "ZEROMON_STORE": str(folder / "store"),
            "ZEROMON_PORT": str(free_port()),
        }
        os.environ.update(environment)
        python = folder / "python"
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {HERE} --collect\n")
        python.chmod(0o700)
        around = [*ZEROMON, "run", "--name", RUN, "--", "env", f"ZEROMON_PYTHON={python}"]
        for name in ("watched", "alone"):
            (folder / name).mkdir()
            (folder / name / "stop").write_text(str(steps))
        how = {"AGAIN": "0", "PAUSE": str(pause)}
        self.alone = Job("fsdp2", folder / "alone", **how)
        self.job = Job("fsdp2", folder / "watched", around=around, **how, **environment)
        self.job.wait_until(10)
        port = free_port()
        self.dash = subprocess.Popen(
            [*ZEROMON, "dash", "--no-browser", "--port", str(port)], stderr=subprocess.DEVNULL
        )
        self.view = Terminal([*ZEROMON, "attach", RUN])
        self._stop, self.answers = threading.Event(), list[int]()
        self._tab = threading.Thread(target=self._ask, args=(port,), daemon=True)
        self._tab.start()

    def _ask(self, port: int) -> None:
        """A tab, which a browser opens again when its server does not answer."""
        while not self._stop.is_set():
            with suppress(OSError, ValueError):
                tab(port, self._stop, self.answers, whole=False)
            self._stop.wait(1.0)

    def collector(self) -> int:
        """The pid of the collector; 0 without one."""
        with suppress(OSError, ValueError, KeyError):
            return int(json.loads((self.root / "collector.json").read_text())["pid"])
        return 0

    def sample(self) -> None:
        """Writes down what each process holds."""
        pids = {"collector": self.collector(), "dashboard": self.dash.pid, "terminal": self.view.pid}
        for job, which in ((self.job, ""), (self.alone, ", alone")):
            if job.step < 0.99 * self.steps:  # before it is on its way out
                pids |= {f"rank {n}{which}": rank.pid for n, rank in enumerate(job.ranks())}
        for name, pid in pids.items():
            with suppress(OSError):
                self.samples.setdefault(name, []).append((self.job.step, held(pid)))

    def restart(self) -> None:
        """Kills the collector, and waits until another one answers."""
        pid, began = self.collector(), time.monotonic()
        if not pid:
            return
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.collector() not in (0, pid) and collector_address(self.root), 120)
        self.back.append(time.monotonic() - began)

    def follow(self, restarts: int) -> None:
        """Until the training ends: samples, and kills at even distances from a tenth to nine tenths."""
        due = [self.steps * (0.1 + 0.8 * n / max(1, restarts)) for n in range(restarts)]
        sampled = 0.0
        while self.job.alive:
            if time.monotonic() - sampled > 2:
                self.sample()
                sampled = time.monotonic()
            if due and self.job.step >= due[0]:
                due.pop(0)
                self.restart()
            time.sleep(0.2)

    def close(self) -> None:
        self._stop.set()
        self.view.close()
        self.dash.kill()
        self.dash.wait()
        self.job.kill()
        self.alone.kill()

    def show(self) -> None:
        """The table: near the beginning, in the middle, near the end."""
        print("| process | | descriptors | threads | mappings | RSS, MB |\n|---|---|---|---|---|---|")
        for name, samples in self.samples.items():
            for when, share in (("begin", 0.1), ("middle", 0.5), ("end", 0.97)):
                step, at = min(samples, key=lambda one: abs(one[0] - share * self.steps))
                print(
                    f"| {name} | {when}, step {step:,} | {at.descriptors} | {at.threads} "
                    f"| {at.mappings} | {at.rss_bytes / 1e6:.1f} |"
                )
            most = [max(one[n] for _, one in samples) for n in range(4)]
            print(f"| {name} | most | {most[0]} | {most[1]} | {most[2]} | {most[3] / 1e6:.1f} |")


def report(soak: Soak, newest: list[int]) -> bool:
    """Prints what came of it; returns whether nothing was lost."""
    soak.show()
    losses = []
    for job in (soak.job, soak.alone):
        assert job.process.wait(600) == 0, job.log.read_text()
        found = [json.loads(path.read_text()) for path in sorted(job.out.glob("*.json"))]
        losses.append([rank["losses"] for rank in found])
    same = losses[0] == losses[1] and len(losses[0][0]) == soak.steps
    print(f"losses of {len(losses[0][0]):,} steps the same with and without: {same}")
    run = wait_for(lambda: (s := soak.store.load(RUN)).ended and s, 60)
    ranks = [(r.steps.watched_steps, r.agent.dropped, r.agent.errors) for r in run.ranks]
    print(f"record: {ranks} (steps, dropped, errors); note: {run.history_note or 'none'}")
    print(f"records of a ring: {newest}, of {CAPACITY:,} places")
    folder = soak.store.folder(RUN)
    table, broken = load_all_rows(folder / "history")
    sizes = [f"{name} {size(folder / name):,} B" for name in ("history", "moments")]
    print(f"store: {', '.join(sizes)}; {table.height:,} rows of {table['steps'].sum():,} steps")
    if soak.back:
        print(f"collector killed {len(soak.back)} times; another answered after median"
              f" {statistics.median(soak.back):.1f} s, most {max(soak.back):.1f} s")  # fmt: skip
    print(f"the tab got {len(soak.answers):,} answers")
    return same and ranks == [(soak.steps, 0, 0)] * 2 and not broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds a step")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()
    if options.collect:
        return collect()
    folder = Path(tempfile.mkdtemp(prefix="zeromon-soak-"))
    soak = Soak(folder, options.steps, options.pause)
    try:
        soak.follow(options.restarts)
        newest = [RingReader(path).newest() for path in sorted(soak.root.glob(f"{RUN}/rank*.ring"))]
        print(soak.view.text())
        return not report(soak, newest)
    finally:
        soak.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
