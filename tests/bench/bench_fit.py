"""Whether `zeromon fit` finds the largest micro-batch under a limit of host memory, without a kill.

Needs root and a memory cgroup. The truth of a limit: launches of the command under `zeromon run` in the
same cgroup, which the kernel ends where they do not fit. `zeromon fit` itself is not in it then, nor is
anything of zeromon with --bare. 20 limits take about half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = Path("/sys/fs/cgroup")
GROUP = f"zmfit{os.getpid()}"
SCRIPT = HERE.parents[2] / "examples" / "train_gpt.py"
MODEL = ["--strategy", "ddp", "--width", "64", "--layers", "2", "--heads", "2"]
STEPS = 4
PATIENCE_SECONDS = 60.0
"""A command that takes longer gives its time to the kernel, which frees pages of files and reads
them again."""


LAUNCHER = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
]  # fmt: skip


def command(batch: str, length: int) -> list[str]:
    """The job: two ranks, whose memory is mostly activations."""
    return [*LAUNCHER, str(SCRIPT), *MODEL, "--length", str(length), "--batch", batch]


class Cgroup:
    """A memory cgroup of version 1 or 2, with a limit."""

    def __init__(self, limit: int) -> None:
        old = (ROOT / "memory" / "memory.limit_in_bytes").exists()
        self._folder = (ROOT / "memory" if old else ROOT) / GROUP
        self._folder.mkdir(exist_ok=True)
        name = "memory.limit_in_bytes" if old else "memory.max"
        (self._folder / name).write_text(str(limit))
        self._counter = self._folder / ("memory.oom_control" if old else "memory.events")

    def enter(self) -> None:
        """Moves the calling process."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def clear(self) -> None:
        """Ends what is left in it: the collector."""
        for pid in (self._folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGTERM)
        while (self._folder / "cgroup.procs").read_text():
            time.sleep(0.1)

    def kills(self) -> int:
        """Processes that the kernel has ended."""
        words = [line.split() for line in self._counter.read_text().splitlines()]
        return next(int(count) for name, count in words if name == "oom_kill")


def fits(group: Cgroup, batch: int, length: int, environment: dict[str, str], *, bare: bool) -> bool:
    """Whether the command ends some steps in time."""
    under = [] if bare else [sys.executable, "-m", "zeromon", "run", "--quiet", "--"]
    words = [*under, *command(str(batch), length), "--steps", str(STEPS)]
    running = subprocess.Popen(
        words, preexec_fn=group.enter, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        code = running.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        code = running.wait()
    group.clear()
    return code == 0


def one(limit: int, length: int, folder: Path, *, bare: bool) -> dict[str, Any]:
    """What fit finds under *limit*, and whether that and the next sizes fit in truth."""
    group = Cgroup(limit)
    began, before = time.monotonic(), group.kills()
    fit = [sys.executable, "-m", "zeromon", "fit", "--json", "--again", "--steps", str(STEPS)]
    environment = {
        **os.environ, "ZEROMON_DIR": str(folder / "live"), "ZEROMON_STORE": str(folder / "store"),
        "ZEROMON_PORT": "9555",
    }  # fmt: skip
    job = [*command("{micro_batch}", length), "--steps", "200"]
    done = subprocess.run(
        [*fit, "--output", str(folder / "fit"), "--", *job],
        preexec_fn=group.enter, capture_output=True, env=environment, text=True, check=False,
    )  # fmt: skip
    spent, kills = time.monotonic() - began, group.kills() - before
    group.clear()
    found = json.loads(done.stdout) if done.stdout else {"launches": [], "recommended": None}
    size = (found["recommended"] or {}).get("micro_batch", 0)
    truth = size
    while truth and not fits(group, truth, length, environment, bare=bare):
        truth -= 1
    if truth == size:
        while truth < size + 3 and fits(group, truth + 1, length, environment, bare=bare):
            truth += 1
    return {
        "limit_mib": limit >> 20, "found": size, "truth": truth, "launches": len(found["launches"]),
        "kills": kills, "seconds": round(spent, 1),
        "launched": [
            (t["micro_batch"], t["outcome"], *(t["peaks"].get("host", 0) * 1000 // r / 10
             for r in t["rooms"].values())) for t in found["launches"]
        ],
    }  # fmt: skip


def main() -> None:
    """A row for each limit, then the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", type=int, default=20)
    parser.add_argument("--least", type=int, default=900, help="MiB")
    parser.add_argument("--most", type=int, default=1900, help="MiB")
    parser.add_argument(
        "--length", type=int, default=4096, help="tokens a sample: the step from size to size"
    )
    parser.add_argument("--bare", action="store_true", help="the truth is that without zeromon")
    options = parser.parse_args()
    if os.geteuid() or not os.access(ROOT, os.W_OK):
        sys.exit("needs root and a memory cgroup")
    rows = []
    for number in range(options.limits):
        limit = options.least + (options.most - options.least) * number // max(1, options.limits - 1)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(one(limit << 20, options.length, Path(folder), bare=options.bare))
        print(json.dumps(rows[-1]), flush=True)
    good = sum(0 <= row["truth"] - row["found"] <= 1 for row in rows)
    print(
        f"{good} of {len(rows)} at the truth or one step below; {sum(r['kills'] for r in rows)} kills; "
        f"at most {max(r['launches'] for r in rows)} launches"
    )


if __name__ == "__main__":
    main()
