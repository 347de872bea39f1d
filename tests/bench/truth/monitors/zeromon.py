"""zeromon: figures of the snapshot that `zeromon report` reads, and the verdict in its first line."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from monitor import Monitor, Run

if TYPE_CHECKING:
    from zeromon.snapshot import RankSnapshot, RunSnapshot

WINDOW = 20
"""Steps that a mean of the report is over."""
CAUSES = {
    "straggler": "late rank", "data_wait": "input", "launch_bound": "launch", "oom_risk": "leak",
    "slow_steps": "slow step", "device_idle": "idle device", "whole_model_unit": "communication",
    "uneven_work": "uneven",
}  # fmt: skip
"""The rule of the finding that the verdict is about -> what it means; other rules of the family ZM3 are
about communication."""
PHASES = {"forward": 1, "backward": 2, "optimizer": 3, "data": 4}
ROLES = {
    "parameters": "unsharded_param", "gradients": "unsharded_grad", "optimizer state": "optimizer_state",
}  # fmt: skip


def _launch(run: Run) -> list[str]:
    return [sys.executable, "-m", "zeromon", "run", "--", *run.ranks()]


def _live(run: Run) -> dict[str, Any]:
    return _answers(run)


def _after(run: Run) -> dict[str, Any]:
    """Once the collector has seen the end, which takes it a second or two."""
    return _answers(run, 20)


def _answers(run: Run, seconds: float = 0.0) -> dict[str, Any]:
    """From the snapshot that `zeromon report --wait SECONDS` reads, in this process."""
    from zeromon.base.errors import ZeromonError
    from zeromon.cli.report import newest_snapshot

    os.environ.update({name: run.variables[name] for name in ("ZEROMON_DIR", "ZEROMON_STORE")})
    deadline = time.monotonic() + seconds
    try:
        snapshot = newest_snapshot(None)
        while not snapshot.ended and time.monotonic() < deadline:
            time.sleep(0.25)
            snapshot = newest_snapshot(None)
    except ZeromonError:
        return {}
    ranks = sorted(snapshot.ranks, key=lambda rank: rank.rank)
    figures = _figures(ranks[0]) if ranks else {}
    return figures | _faults(snapshot) | _verdict(snapshot)


def _figures(rank: RankSnapshot) -> dict[str, Any]:
    """Times and bytes of the last steps of a rank, and its memory."""
    last = [step for step in rank.steps.recent[-WINDOW:] if not step.idle]
    if not rank.steps.mean_seconds or not last:
        return {}
    figures: dict[str, Any] = {
        name: sum(step.phase_ns[at] for step in last) / len(last) / 1e9 for name, at in PHASES.items()
    }
    roles = {row.role: row.host_bytes for row in rank.memory.roles}
    figures |= {name: roles.get(role) for name, role in ROLES.items()}
    in_collectives = [step.communication_ns for step in last]
    is_timed = min(in_collectives) >= 0
    figures["communication"] = sum(in_collectives) / len(last) / 1e9 if is_timed else None
    device, held = rank.machine.device, rank.memory.device
    return figures | {
        "step": rank.steps.mean_seconds,
        "exposed": rank.communication.exposed_seconds,
        "overlap": rank.communication.overlap_ratio,
        "bytes": sum(step.collective_bytes for step in last) / len(last),
        "calls": last[-1].collectives,
        "peak": held.peak_bytes if held else None,
        "device memory": device.used_bytes if device else None,
        "utilization": device.utilization_ratio if device else None,
    }


def _faults(snapshot: RunSnapshot) -> dict[str, Any]:
    """What it says of late, stuck and dead ranks, and of growing memory."""
    answers: dict[str, Any] = {"rank": "nobody"}
    for late in snapshot.stragglers:  # of a live run; of one that has ended, the verdict has the rank
        phases = [phase.partition("_")[0] for phase in late.phases]
        answers |= {"rank": late.rank, "late by": late.late_seconds}
        answers["late in"] = phases[0] if phases else None
    for risk in (risk for rank in snapshot.ranks[:1] for risk in rank.memory.risks):
        if risk.growth_bytes_per_step is not None:
            answers["grow by"] = risk.growth_bytes_per_step  # the host's is of all ranks
    for hang in snapshot.hangs:
        stuck = next(iter(hang.missing + hang.dead), None)
        stacks = [rank.status.stack for rank in snapshot.ranks if rank.rank == stuck]
        lines = [stack for stack in stacks if stack]
        answers |= {"rank": stuck, "stuck in": _function(lines[0][-1]) if lines else None}
    for rank in snapshot.ranks:
        if rank.status.failed and rank.status.ended in ("SIGKILL", "exception"):
            answers |= {"rank": rank.rank, "died at": rank.steps.last_step + 1}
    return answers


def _function(frame: str) -> str:
    """The name of the function of a frame such as ``train.py:57 in stand_still``."""
    return frame.rpartition(" in ")[2].split()[0]


def _verdict(snapshot: RunSnapshot) -> dict[str, Any]:
    """What the first line of the report means, and the line itself."""
    from zeromon.readout.verdict import Health, judge_run

    verdict = judge_run(snapshot)
    finding, cause = verdict.finding, None
    if verdict.health is Health.STALLED and snapshot.hangs:
        cause = "left" if _has_left(snapshot) else "hang"
    elif "OutOfMemoryError" in verdict.cause:
        cause = "oom"
    elif finding is None:
        is_well = verdict.health in (Health.HEALTHY, Health.FINISHED)
        cause = "healthy" if is_well else str(verdict.health)
    elif finding.rule == "slow_steps" and "checkpoint" in finding.text:
        cause = "checkpoint"
    else:
        is_network = finding.code.startswith("ZM3")
        cause = CAUSES.get(finding.rule, "communication" if is_network else finding.rule)
    answers = {"cause": cause, "sentence": f"{verdict.health}: {verdict.cause}"}
    if finding is not None and finding.rank is not None and cause in ("checkpoint", "late rank"):
        answers["rank"] = finding.rank
    return answers


def _has_left(snapshot: RunSnapshot) -> bool:
    """Whether a rank for which others wait has ended."""
    missing = {rank for hang in snapshot.hangs for rank in hang.missing + hang.dead}
    return any(rank.rank in missing and not rank.status.alive for rank in snapshot.ranks)


MONITOR = Monitor(
    "zeromon", "zeromon", lines=0, answers={"gloo": ["*"], "virtual": ["*"]},
    launch=_launch, live=_live, after=_after,
)  # fmt: skip
