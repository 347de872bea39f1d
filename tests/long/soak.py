"""What zeromon holds over hours: `python tests/long/soak.py --hours 6 [--out FILE]`.

Eight ranks train below `zeromon run` on a store of 256 MiB, while three readers follow the
page of `zeromon dash` and a scraper reads /metrics. Meanwhile the collector is killed, the ranks start
again, and the store is filled twice. Descriptors, threads and memory of every process go to FILE once
a minute, one JSON object a line; `--report FILE` prints their slopes, also of a run that was cut.
Needs root, for the store is a file system of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from bench_dash import tab
from served import get
from support import LAUNCH, PROGRAMS, ROOT, ZEROMON, clean_environment, free_port, held, wait_for

from zeromon.attach.rank_processes import ranks_of, running_processes
from zeromon.storage.run_store import Store

RANKS = 8
RUN, TOKEN = "live", "t"
"""As bench_dash's tab calls them."""
EVENTS = ((0.1, "kill the collector"), (0.2, "start the ranks again"), (0.6, "fill the store"),
          (0.75, "kill the collector"), (0.85, "fill the store"))  # fmt: skip
"""What happens, and after which share of the time."""
FULL_SHARE = 0.04
"""So long the store stays full, as a share of the time."""
WARM_SECONDS, WARM_SHARE = 1200.0, 0.2
"""A process counts from here on, whichever comes first: until then its ring fills up."""
BLOCKS, T_OF_BLOCKS = 10, 2.262
"""Pieces of the jackknife, and the 97.5 % quantile of Student's t with one degree of freedom less."""

Series = Sequence[tuple[float, float]]


# ---- the figures ----------------------------------------------------------------------------------


def slope(of_processes: Sequence[Series]) -> tuple[float, float] | None:
    """Slope per second that all series share, and half of its 95 % interval; None with too few values.

    Each process has a level of its own. The interval is that of a jackknife by blocks of time, for
    what a process holds now depends on what it held a minute ago.
    """
    values = sorted(
        (at, of, value)
        for of, series in enumerate(of_processes)
        for at, value in series
        if at - series[0][0] >= min(WARM_SECONDS, WARM_SHARE * (series[-1][0] - series[0][0]))
    )
    if len(values) < 2 * BLOCKS:
        return None

    def fitted(kept: Sequence[tuple[float, int, float]]) -> float:
        groups = defaultdict(list)
        for at, of, value in kept:
            groups[of].append((at, value))
        above = below = 0.0
        for group in groups.values():
            mid, level = (statistics.fmean(column) for column in zip(*group, strict=True))
            above += sum((at - mid) * (value - level) for at, value in group)
            below += sum((at - mid) ** 2 for at, _ in group)
        return above / below

    edges = [len(values) * n // BLOCKS for n in range(BLOCKS + 1)]
    without = [fitted(values[:a] + values[b:]) for a, b in pairwise(edges)]
    error = math.sqrt((BLOCKS - 1) * statistics.pvariance(without))
    return fitted(values), T_OF_BLOCKS * error


def report(file: Path) -> str:
    """A table of what each process held, from a whole or a cut *file*."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    events, hours, lost = [], 0.0, {"dropped": 0, "errors": 0, "error": ""}
    for line in file.read_text().splitlines():
        with suppress(ValueError):  # the last line of a run that was killed
            row = json.loads(line)
            hours = max(hours, row["seconds"] / 3600)
            if "event" in row:
                events.append(f"{row['event']} after {row['seconds'] / 3600:.2f} h")
            elif "dropped" in row:
                lost = row
            else:
                found[row["name"]][row["pid"]].append(row)
    lines = [
        f"{hours:.2f} hours; {'; '.join(events) or 'no event'}", "",
        f"records dropped: {lost['dropped']}; failed hooks: {lost['errors']} {lost['error']}", "",
        "| process | samples | descriptors: first, last, max | threads: first, last "
        "| RSS, MB: first, last | RSS, MB per hour | PSS, MB per hour |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, pids in sorted(found.items()):
        rows = [row for one in pids.values() for row in one]
        first, last = rows[len(rows) // 5], rows[-1]
        cells = [name, str(len(rows))]
        most = max(row["descriptors"] for row in rows)
        cells += [f"{first['descriptors']}, {last['descriptors']}, {most}"]
        cells += [f"{first['threads']}, {last['threads']}"]
        cells += [f"{first['rss'] / 1e6:.1f}, {last['rss'] / 1e6:.1f}"]
        for figure in ("rss", "pss"):
            each = [[(row["seconds"], row[figure]) for row in one] for one in pids.values()]
            known = slope(each)
            cells.append(
                f"{known[0] * 3600e-6:+.2f} ± {known[1] * 3600e-6:.2f}"
                if known
                else "n/a (too few samples)"
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- the run --------------------------------------------------------------------------------------


class Soak:
    """The training, all that reads it, and what befalls it."""

    def __init__(self, folder: Path, file: Path, seconds: float) -> None:
        self.root, self.store = folder / "rings", folder / "store"
        self.out, self.file, self.seconds = folder / "out", file, seconds
        self.out.mkdir()
        self.store.mkdir(mode=0o700)
        mount = ["mount", "-t", "tmpfs", "-o", "size=256m,mode=700", "none", str(self.store)]
        subprocess.run(mount, check=True)
        self.pages, self.scrapes, self.ending = ([list[int]() for _ in range(3)], 0, threading.Event())
        os.environ.update(ZEROMON_DIR=str(self.root), ZEROMON_STORE=str(self.store), ZEROMON_TOKEN=TOKEN)
        environment = clean_environment() | {k: v for k, v in os.environ.items() if "ZEROMON" in k}
        port = free_port()
        launch = shlex.join([*LAUNCH, str(RANKS), str(PROGRAMS / "soaked.py"), str(self.out)])
        self.training = subprocess.Popen(
            [*ZEROMON, "run", "--name", RUN, "--", "sh", "-c", f"{launch} 0; exec {launch} 1"], cwd=ROOT,
            env=environment | {"ZEROMON_PORT": str(free_port())},
        )  # fmt: skip
        self.dash = subprocess.Popen(
            [*ZEROMON, "dash", "--no-browser", "--port", str(port)], env=environment, cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for read, *words in ((self._scrape,), *((self._read, port, page) for page in self.pages)):
            threading.Thread(target=read, args=words, daemon=True).start()

    def _read(self, port: int, answers: list[int]) -> None:
        while not self.ending.is_set():
            with suppress(OSError, ValueError, RuntimeError):  # a browser reads such a page again
                tab(port, self.ending, answers, whole=False)
            self.ending.wait(1.0)

    def _scrape(self) -> None:
        while not self.ending.wait(5.0):
            with suppress(OSError):
                status, _ = get(self.facts()["port"], "/metrics", Authorization=f"Bearer {TOKEN}")
                self.scrapes += status == 200

    def facts(self) -> dict[str, int]:
        """Pid and port of the collector; zeros without one."""
        with suppress(OSError, ValueError):
            facts: dict[str, int] = json.loads((self.root / "collector.json").read_text())
            return facts
        return {"pid": 0, "port": 0}

    def steps(self, attempt: int) -> list[int]:
        """Steps that the ranks of an attempt counted themselves."""
        files = [self.out / f"steps.{attempt}.{rank}" for rank in range(RANKS)]
        return [int(one.read_text() or 0) if one.exists() else 0 for one in files]

    def write(self, **row: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"seconds": time.monotonic() - self.began, **row}) + "\n")

    def sample(self) -> None:
        """Writes down what each process holds."""
        pids = {f"rank {one.rank}": one.pid for one in ranks_of(self.training.pid, running_processes())}
        pids |= {"collector": self.facts()["pid"], "dashboard": self.dash.pid}
        for name, pid in pids.items():
            with suppress(OSError, StopIteration):
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                pss = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
                now = held(pid)
                self.write(name=name, pid=pid, descriptors=now.descriptors, threads=now.threads,
                           rss=now.rss_bytes, pss=pss << 10)  # fmt: skip

        with suppress(OSError, ValueError):
            _, body = get(self.facts()["port"], f"/api/runs/{RUN}", Authorization=f"Bearer {TOKEN}")
            run = json.loads(body)
            lost = {of: sum(rank["agent"][of] for rank in run["ranks"]) for of in ("dropped", "errors")}
            told = (one["text"] for one in run["findings"] if one["rule"] == "agent_errors")
            self.write(**lost, error=next(told, ""))

    def befall(self, event: str) -> None:
        self.write(event=event)
        if event == "kill the collector":
            os.kill(self.facts()["pid"], signal.SIGKILL)
        elif event == "start the ranks again":
            self.end_at("again", 0)
        else:
            free = os.statvfs(self.store)
            with suppress(OSError), (self.store / "fill").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
            timer = threading.Timer(FULL_SHARE * self.seconds, (self.store / "fill").unlink)
            timer.daemon = True
            timer.start()

    def end_at(self, name: str, attempt: int) -> None:
        """Lets the ranks end an attempt together, some steps from now."""
        (self.out / ".last").write_text(str(max(self.steps(attempt)) + 20))
        (self.out / ".last").rename(self.out / name)

    def follow(self, every: float) -> None:
        """Samples, and what befalls it, until the time is over."""
        wait_for(lambda: self.steps(0)[0] >= 5, 600)
        self.began, due, next_sample = time.monotonic(), list(EVENTS), 0.0
        while (spent := time.monotonic() - self.began) < self.seconds:
            assert self.training.poll() is None, "the training has ended"
            if due and spent >= due[0][0] * self.seconds:
                self.befall(due.pop(0)[1])
            if spent >= next_sample:
                self.sample()
                next_sample += every
            time.sleep(0.2)

    def finish(self) -> bool:
        """Ends the training; returns whether the record has the steps that the program counted."""
        self.end_at("stop", 1)
        code = self.training.wait(300)
        run = wait_for(lambda: (one := Store(self.store).load(RUN)).ended and one, 120)
        counted = [self.steps(0), self.steps(1)]
        kept = [[attempt.steps for attempt in run.attempts], [r.steps.watched_steps for r in run.ranks]]
        dropped, errors = (
            sum(getattr(rank.agent, of) for rank in run.ranks) for of in ("dropped", "errors")
        )
        print(f"exit code {code}; counted by the program: {counted}; in the record: {kept}")
        print(
            f"records dropped: {dropped}; failed hooks: {errors}; history: {run.history_note or 'whole'}"
        )
        print(f"answers to three pages: {[len(one) for one in self.pages]}; scrapes: {self.scrapes}")
        return code == 0 and dropped == errors == 0 and kept == [[counted[0][0]], counted[1]]

    def close(self) -> None:
        self.ending.set()
        for process in (self.dash, self.training):
            process.terminate()
            process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak.jsonl")
    parser.add_argument("--report", type=Path, help="print the table of this file, and end")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.report:
        print(report(given.report))
        return 0
    if not given.inside:  # the store goes with the process, however that ends
        words = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--inside"]
        os.execvp("unshare", ["unshare", "--mount", *words])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("")
    folder = Path(tempfile.mkdtemp(prefix="zeromon-soak-"))
    soak, whole = Soak(folder, given.out, given.hours * 3600), False
    try:
        soak.follow(min(60.0, soak.seconds / 60))
        whole = soak.finish()
    except KeyboardInterrupt:
        print("cut", file=sys.stderr)
    finally:
        soak.close()
        subprocess.run(["umount", "-l", str(soak.store)], check=False)
        shutil.rmtree(folder, ignore_errors=True)
    print(report(given.out))
    return not whole


if __name__ == "__main__":
    sys.exit(main())
