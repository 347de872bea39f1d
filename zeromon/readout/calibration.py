"""The speeds at which a virtual machine takes as long as a run did on its devices. Pure."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from zeromon.base.errors import LaunchError
from zeromon.base.units import human_rate, human_seconds
from zeromon.readout.breakdown import WINDOW, pace
from zeromon.readout.preflight import OPERATOR_SECONDS, Two
from zeromon.ring.codes import Phase
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.levels import HOST_BOUND
from zeromon.snapshot.step import settled_steps

_LARGE_BYTES = 1 << 20
"""A collective of fewer bytes shows a latency, not a bandwidth."""


def calibrated_speeds(run: RunSnapshot, modelled: Sequence[tuple[Two, Two]]) -> dict[str, float]:
    """Returns values of the file of a virtual machine, by *run* on real devices.

    *modelled*: seconds of a step and of its exposed communication on each virtual device, for the
    command of *run*. Who sets the pace of the run decides what its time says: the devices, how long
    kernels take; the host, how long it takes for an operator. Raises :class:`LaunchError` for a run
    that was not timed on devices.
    """
    paces = [(measured, rank) for rank in run.ranks if (measured := pace(rank)) is not None]
    if not paces or not modelled:
        raise LaunchError(
            f"no steps of {run.run if not paces else 'the virtual devices'} are timed",
            "--calibrate needs a run on GPUs, of several steps under FSDP, DDP or DeepSpeed.",
        )
    computed = [
        measured.compute_seconds + _optimizer_seconds(rank) - (rank.communication.exposed_seconds or 0.0)
        for measured, rank in paces
    ]
    slowest = max(range(len(paces)), key=computed.__getitem__)
    device, host = (max(step[k] - wait[k] for step, wait in modelled) for k in (0, 1))
    speeds = {"slow": 1.0, "operator_ns": OPERATOR_SECONDS * 1e9}
    if paces[slowest][0].starved_ratio >= HOST_BOUND:
        speeds["operator_ns"] *= computed[slowest] / host
    else:
        speeds["slow"] = (computed[slowest] - paces[slowest][0].starved_seconds) / device
    for names, far in ((("node_speed", "pcie_speed"), False), (("network_speed",), True)):
        messages = [
            (round(row.nbytes / row.calls), row.busbw_bytes_per_second)
            for rank in run.ranks
            for row in rank.communication.traffic
            if row.calls and row.busbw_bytes_per_second and (row.nodes > 1) == far
        ]
        # Of the largest, on the rank that waits least for the others
        nbytes, rate = max(messages, default=(0, 0.0))
        if nbytes >= _LARGE_BYTES:
            speeds |= dict.fromkeys(names, rate)
    return speeds


def _optimizer_seconds(rank: RankSnapshot) -> float:
    steps = settled_steps(rank.steps.recent[-WINDOW:])
    return fmean(step.phase_ns[Phase.OPTIMIZER] for step in steps) / 1e9


def calibration_text(run: str, speeds: Mapping[str, float]) -> str:
    """``calibrated by NAME: kernels take 1.50 times as long, an operator 9 us, ...``."""
    links = [
        f"{place} {human_rate(speeds[name]) if name in speeds else 'as modelled (no large collective)'}"
        for name, place in (("node_speed", "within a node"), ("network_speed", "between nodes"))
    ]
    operator = f"an operator takes the host {human_seconds(speeds['operator_ns'] / 1e9)}"
    kernels = f"kernels take {speeds['slow']:.2f} times as long, {operator}"
    return f"calibrated by {run}: {kernels}, busbw {', '.join(links)}"
