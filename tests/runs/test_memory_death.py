"""A leak that the forecast calls, the kernel ends, and the report explains: examples/leak.py."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from first_lines import first_lines
from support import FORKED, LAUNCH, ROOT, Node, train_command

from zeromon.readout.report import render_run
from zeromon.readout.verdict import Health
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.memory import KILLED_FOR_MEMORY

LIMIT = 1600 << 20


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit; v1, or v2 where children may have one."""
    root = Path("/sys/fs/cgroup")
    v1 = (root / "memory" / "memory.limit_in_bytes").exists()
    folder = (root / "memory" if v1 else root) / f"zeromon-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(LIMIT))
    except OSError:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip("needs root and a memory controller that can be divided")
    yield folder
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            return folder.rmdir()
        except OSError:  # a task is still leaving
            time.sleep(0.1)


def test_a_leak_is_called_before_the_kernel_kills_and_explained_after(node: Node, cgroup: Path) -> None:
    """The alarm comes with the step at which it happens; the record names the kernel and the limit."""
    snapshots: list[RunSnapshot] = []
    script = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", script, "sh", *FORKED, "2", str(ROOT / "examples" / "leak.py")]
    command += ["--batch", "8"]
    result = node.run(command, seen=snapshots.append)
    assert result.code != 0
    end = max(rank.steps.last_step for rank in result.snapshot.ranks)

    alarms = [
        (snapshot.ranks[0].steps.last_step, risk)
        for snapshot in snapshots
        for risk in (snapshot.ranks[0].memory.risks if snapshot.ranks else ())
        if risk.pool == "host" and risk.cause == "growth" and risk.ratio >= 0.5
    ]
    assert alarms, result.output
    step, risk = alarms[0]
    assert end - step >= 20  # of about 110 steps, warm-up included
    assert risk.steps_left is not None
    assert step + risk.steps_left == pytest.approx(end, rel=0.35)
    found = [f for p in snapshots for f in p.findings if f.rule == "oom_risk"]
    assert any("host memory runs out at about step" in f.text for f in found)
    living = [p for p in snapshots if p.ranks and all(rank.status.alive for rank in p.ranks)]
    risky = [p for p in living if any(risk.ratio >= 0.5 for risk in p.ranks[0].memory.risks)]
    for near in (risky[0], risky[-1]):  # it leaks; it is at the limit
        judged = first_lines(near)
        assert judged.health in (Health.AT_RISK, Health.DYING), judged
        assert "memory" in judged.cause, judged
    assert first_lines(result.snapshot).health is Health.DEAD

    killed = [rank for rank in result.snapshot.ranks if rank.status.ended == KILLED_FOR_MEMORY]
    assert killed, [rank.status.ended for rank in result.snapshot.ranks]
    assert killed[0].memory.host is not None
    assert killed[0].memory.host.limit_bytes == LIMIT
    assert killed[0].memory.host.oom_kills >= 1
    text = render_run(result.snapshot)
    assert "killed by the kernel for host memory" in text
    assert str(cgroup) in text
    assert "rest of RSS" in text
    assert re.search(r"before +step", text)


def test_state_that_will_not_fit_is_told_before_it_is_made(node: Node, cgroup: Path) -> None:
    """The arithmetic speaks up while the first optimizer step begins; the record keeps it."""
    living: list[RunSnapshot] = []
    script = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", script, "sh", *train_command(1, program="outgrow.py")]
    result = node.run(command, seen=living.append)
    (rank,) = result.snapshot.ranks
    assert rank.status.ended == KILLED_FOR_MEMORY, result.output
    before = [f for p in living if p.ranks and p.ranks[0].status.alive for f in p.findings]
    for findings in (before, result.snapshot.findings):
        told = next(f for f in findings if f.rule == "host_memory_short")
        assert told.severity == "critical"
        assert "model states of 1 rank take 1.7 GiB; this host has " in told.text


def test_a_kill_by_hand_is_not_blamed_on_the_kernel(node: Node) -> None:
    """SIGKILL without an OOM kill on record stays what it is."""
    command = [*LAUNCH, "1", str(ROOT / "examples" / "leak.py"), "--item"]
    snapshots: list[RunSnapshot] = []

    def kill(snapshot: RunSnapshot) -> None:
        snapshots.append(snapshot)
        if snapshot.ranks and snapshot.ranks[0].steps.last_step > 5 and snapshot.ranks[0].status.alive:
            with suppress(ProcessLookupError):  # the snapshot may be older than its end
                os.kill(snapshot.ranks[0].pid, 9)

    result = node.run(command, seen=kill)
    (rank,) = result.snapshot.ranks
    assert rank.status.failed
    assert rank.status.ended != KILLED_FOR_MEMORY
