"""What tests share: a node of their own, and real training on it."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import polars as pl
from forks import ForkServer, Launcher
from prometheus_client.parser import text_string_to_metric_families
from served import get

from zeromon.cli.run import child_environment
from zeromon.collector.daemon import Collector
from zeromon.collector.http import start_http_server
from zeromon.export.prometheus.metrics import Writer
from zeromon.ring.ring_file import remove_ring_file
from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import Store
from zeromon.storage.step_history.queries import collect_segment_rows
from zeromon.storage.step_history.rows import seg_files

ROOT = Path(__file__).resolve().parents[1]
ENDED_WELL = ("finished", "ended")
"""Linux before 6.15 does not tell the exit status of a process that is not one's child."""

PROGRAMS = ROOT / "tests" / "programs"
LAUNCH = (sys.executable, str(PROGRAMS / "launch.py"))
"""Ranks as torchrun starts them, some seconds sooner: it does not import torch. `start` forks them from
a process that has."""
FORKED = (sys.executable, str(PROGRAMS / "fork_server.py"), "ranks")
"""The same below a `zeromon run` or in a cgroup: one import of torch for all ranks."""
if "FORK_SERVERS" not in os.environ:
    os.environ["FORK_SERVERS"] = tempfile.mkdtemp(prefix="zeromon-forks-")
    atexit.register(shutil.rmtree, os.environ["FORK_SERVERS"], ignore_errors=True)
FORK_SERVERS = Path(os.environ["FORK_SERVERS"])
"""Where the fork servers have their sockets: the first test process chooses for its workers."""
ASKED = (sys.executable, str(PROGRAMS / "fork_server.py"), "asked", str(FORK_SERVERS / "torch"))
"""As FORKED, by the fork server of the tests, which must run: the ranks are no descendants."""
ZEROMON = (
    sys.executable,
    "-c",
    f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'agents'), str(ROOT / 'dashboard')]};"
    " from zeromon.cli import main; sys.exit(main())",
)
"""The `zeromon` of this tree, whatever is installed, from every folder."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def clean_environment() -> dict[str, str]:
    """This process's environment without zeromon's and the launchers' variables."""
    dropped = ("ZEROMON_", "MASTER_", "TORCHELASTIC", "SLURM_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH", "NO_COLOR")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped) and k not in names}
    kept |= {k: v for k, v in os.environ.items() if k == "ZEROMON_PURE"}  # hooks in Python alone
    kept["OMP_NUM_THREADS"] = "1"
    kept["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    kept.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch 2.9 keeps no Flight Recorder without it
    return kept


@cache
def fork_server(with_deepspeed: bool) -> ForkServer:
    """The server of this test session."""
    words = ["deepspeed"] if with_deepspeed else []
    return ForkServer(
        *words, environment=clean_environment() | {"DS_ACCELERATOR": "cpu"},
        place=FORK_SERVERS / (words or ["torch"])[0],
    )  # fmt: skip


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path = ROOT,
    stdout: IO[Any] | int | None = None,
    stderr: IO[Any] | int | None = None,
    server: ForkServer | None = None,
) -> subprocess.Popen[bytes] | Launcher:
    """Starts *command*. Ranks of LAUNCH are forked from a process that has imported torch.

    Where DS_ACCELERATOR is set, that process has imported DeepSpeed, too. *server*: the one that forks
    the ranks of *command*, whose Python is another one.
    """
    forked = tuple(command[:2]) == LAUNCH and command[3] != "--no-python"
    if not forked and server is None:
        return subprocess.Popen(command, env=environment, cwd=cwd, stdout=stdout, stderr=stderr)
    with open(os.devnull, "w") as null:

        def descriptor(file: IO[Any] | int | None, inherited: int) -> int:
            if file is None:
                return inherited
            if isinstance(file, int):
                return null.fileno() if file == subprocess.DEVNULL else output
            return file.fileno()

        output = descriptor(stdout, 1)
        errors = descriptor(stderr, 2)
        server = server or fork_server("DS_ACCELERATOR" in environment)
        return server.launch(list(command[2:]), environment, cwd, output, errors)


def ended(running: subprocess.Popen[bytes] | Launcher, seconds: float) -> bool:
    """Whether *running* ends within so many *seconds*."""
    try:
        running.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel may give to a connection meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(question: Callable[[], Any], timeout: float = 60.0, pause: float = 0.05) -> Any:
    """The first true answer of *question*."""
    deadline = time.monotonic() + timeout
    while not (answer := question()):
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(pause)
    return answer


@dataclass
class Result:
    """What a training command did."""

    run: str
    code: int
    output: str
    newest: RunSnapshot | None = None

    @property
    def snapshot(self) -> RunSnapshot:
        """The newest snapshot, which must be there."""
        assert self.newest is not None, self.output
        return self.newest


@dataclass
class Node:
    """A node of its own: ring folder, store, and a collector that this process drives."""

    folder: Path
    collector: Collector = field(init=False)
    server: Any = field(init=False)
    runs: int = 0

    def __post_init__(self) -> None:
        self.root = self.folder / "rings"
        self.root.mkdir(mode=0o700, parents=True)
        self.store = Store(self.folder / "store")
        self.collector = Collector(self.root, self.store)
        self.server = start_http_server(self.collector, "127.0.0.1", 0)

    @property
    def address(self) -> str:
        """Where /metrics is."""
        return f"127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        """Stops the server and frees the rings."""
        self.server.shutdown()
        for ring in self.root.glob("*/*.ring"):
            remove_ring_file(ring)
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self, run: str, **extra: str) -> dict[str, str]:
        """What `zeromon run` would give the command."""
        run_dir = self.root / run
        run_dir.mkdir(mode=0o700, exist_ok=True)
        child = child_environment(clean_environment(), run_dir)
        child.update(
            ZEROMON_COLLECTOR="off",
            ZEROMON_DIR=str(self.root),
            ZEROMON_STORE=str(self.folder / "store"),
            **extra,
        )
        return child

    def run(
        self,
        command: list[str],
        *,
        watched: bool = True,
        launched: bool = False,
        run: str = "",
        timeout: float = 180,
        cwd: Path = ROOT,
        seen: Callable[[RunSnapshot], None] | None = None,
        server: ForkServer | None = None,
        **extra: str,
    ) -> Result:
        """Runs *command* to its end and reads what the collector knows of it.

        *seen* gets each snapshot that is taken meanwhile. *launched*: the collector knows the pid of the
        command, as it does after `zeromon run`, so that the run goes on between two attempts.
        """
        self.runs += 1
        name = run or f"run{self.runs}"
        environment = self.environment(name, **extra) if watched else clean_environment() | extra
        with tempfile.TemporaryFile("w+") as output:
            running = start(command, environment, cwd, output, subprocess.STDOUT, server)
            if launched:
                facts = {"pid": running.pid, "mono_ns": time.monotonic_ns(), "started": time.time()}
                (self.root / name / "run.json").write_text(json.dumps(facts))
            deadline = time.monotonic() + timeout
            while not ended(running, 0.25):
                if time.monotonic() > deadline:
                    running.kill()
                    raise AssertionError(f"{command} did not end in {timeout} s")
                if watched:  # a collector that follows the ranks while they live
                    self.collector.tick()
                    snapshot = self.snapshot(name)
                    if seen is not None and snapshot is not None:
                        seen(snapshot)
            output.seek(0)
            result = Result(name, running.wait(), output.read())
        if watched:
            result.newest = self.settle(name)
        return result

    def settle(self, run: str, timeout: float = 60.0) -> RunSnapshot | None:
        """Ticks the collector until *run* has ended; its last snapshot, or None if nobody reported."""
        known = self.snapshot(run)
        has_ranks = known is not None and known.ranks
        if not has_ranks and not list((self.root / run).glob("rank*.ring")):
            return None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.collector.tick()
            snapshot = self.snapshot(run)
            if snapshot is not None and snapshot.ended:
                return snapshot
            time.sleep(0.1)
        raise AssertionError(f"{run} did not end: {self.snapshot(run)}")

    def snapshot(self, run: str) -> RunSnapshot | None:
        """What the collector knows of *run* now."""
        return next((r for r in self.collector.view if r.run == run), None)

    def metrics(self, run: str) -> dict[str, dict[tuple[str, ...], float]]:
        """/metrics over HTTP: name -> (rank, other label values in order of name) -> value.

        Of a run that has ended its last gauges, too, which are not exported any more.
        """
        text = get(self.server.server_port, "/metrics")[1].decode()
        ended = [replace(one, ended=False) for one in self.collector.view if one.ended]
        text += Writer().write(ended, None, openmetrics=False).decode()
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = dict(sample.labels)
                if labels.pop("run", None) == run:
                    rank = labels.pop("rank")
                    key = (rank, *(labels[name] for name in sorted(labels)))
                    found.setdefault(sample.name, {})[key] = sample.value
        return found


def over_link(command: list[str], rate: str) -> list[str]:
    """*command* in a network namespace of its own, whose loopback carries no more than *rate*.

    So that communication takes time and no CPU. Needs root and the kernel's token bucket filter.
    """
    limit = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 512kb latency 1s"
    return ["unshare", "-n", "bash", "-c", f'{limit} && exec "$@"', "over_link", *command]


def train_command(nproc: int, *arguments: str, program: str = "train_counted.py") -> list[str]:
    """The command that trains tests/programs/*program* on *nproc* ranks."""
    return [*LAUNCH, str(nproc), str(PROGRAMS / program), *arguments]


def without_zeromon(home: Path) -> str:
    """Makes a virtual environment with all that is installed here but zeromon; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    site = next((home / "lib").glob("python*")) / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "zeromon" not in entry.name and not entry.name.endswith(".pth"):
            (site / entry.name).symlink_to(entry)
    return str(home / "bin" / "python")


class Held(NamedTuple):
    """What a process holds of the system."""

    descriptors: int
    threads: int
    mappings: int
    rss_bytes: int


def held(pid: int) -> Held:
    """What process *pid* holds now; raises OSError when it has ended."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    return Held(
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
        len((process / "maps").read_text().splitlines()),
        pages * os.sysconf("SC_PAGE_SIZE"),
    )


def load_all_rows(folder: Path, ranks: Sequence[int] = ()) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """All rows of a step history (of *ranks*) by time, and the names of segments that cannot be read."""

    def of_ranks(rows: pl.LazyFrame) -> pl.LazyFrame:
        mine = rows.filter(pl.col("rank").is_in(list(ranks))) if ranks else rows
        return mine.sort("start_us", "rank")

    return collect_segment_rows(list(seg_files(folder).values()), of_ranks)
