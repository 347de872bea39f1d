"""The parts of the study: each runs its jobs, and returns a table and a chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jobs
from charts import Chart, Series
from jobs import PSI
from lab import GB, OUT_OF_MEMORY, RANKS, Job, Lab, Result


@dataclass(frozen=True)
class Part:
    """A table, with all cells as text, and a chart."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    chart: Chart


def gigabytes(nbytes: float) -> str:
    """Bytes as GB with a tenth, without a sign for a zero."""
    return f"{nbytes / GB + 0.0:.1f}"


def shown(result: Result, cells: Callable[[Result], Sequence[str]], count: int) -> list[str]:
    """Returns the *cells* of a run that trained; *count* times OOM where it ran out of memory."""
    return ["OOM"] * count if result.outcome else list(cells(result))


# ---- memory ------------------------------------------------------------------------------------------

PAPER_STATES = {
    "DDP": 16.0, "DDP, gradients in buckets": 16.0, "ZeRO-1": 4 + 12 / RANKS, "ZeRO-2": 2 + 14 / RANKS,
    "ZeRO-3": 16 / RANKS, "FSDP1": 16 / RANKS, "FSDP2": 16 / RANKS,
}  # fmt: skip
"""Bytes per parameter by section 5 of the paper."""

BESIDE_STATES: dict[str, Sequence[tuple[float, str]]] = {
    "DDP": [(4 * PSI, "buckets")],
    "DDP, gradients in buckets": [(2 * PSI, "autocast's 16-bit weights")],
    "ZeRO-1": [(2 * PSI / RANKS, "copy of the own gradients")],
    "ZeRO-2": [(6 * PSI / RANKS, "own gradients in fp32 and flat")],
    "ZeRO-3": [(1e9, "bucket"), (6e9, "a sub-group's gradients in fp32 and flat")],
}
"""Strategy -> bytes of the peak that are no states, by the code of the frameworks."""


SMALL_BYTES = 0.15e9
"""Activations of 128 tokens take less, and are not named."""


def other_memory(title: str, peak: int) -> str:
    """Returns what the peak has besides the states of the paper, in GB."""
    known = list(BESIDE_STATES.get(title, ()))
    rest = peak - PAPER_STATES[title] * PSI - sum(nbytes for nbytes, _ in known)
    if abs(rest) > SMALL_BYTES:
        known.append((rest, "activations" if known else "gathered units, their gradients, activations"))
    return ", ".join(f"{gigabytes(nbytes)} {name}" for nbytes, name in known)


def memory(lab: Lab) -> Part:
    """States and peaks of a model of seven billion parameters on four devices."""
    rows, states, peaks = [], [], []
    for title, job in jobs.MEMORY.items():
        result = lab.run(job)
        counted = sum(result.roles.values())
        plan = jobs.plan_peak(lab.folder, job.strategy) if not job.settings else None
        cells = shown(
            result,
            lambda r, title=title, counted=counted: [
                gigabytes(counted), gigabytes(r.peak), other_memory(title, r.peak),
            ],
            3,
        )  # fmt: skip
        planned = "n/a (no option)" if plan is None else gigabytes(plan)
        rows.append([title, gigabytes(PAPER_STATES[title] * PSI), *cells[:2], planned, *cells[2:]])
        states.append(counted / GB)
        peaks.append(result.peak / GB)
    titles = [title.replace(", gradients", ",<br>gradients") for title in jobs.MEMORY]
    paper = [PAPER_STATES[title] * PSI / GB for title in jobs.MEMORY]
    chart = Chart(
        "GB per device", "",
        [Series("paper", titles, paper, "bar", 2), Series("states", titles, states, "bar", 0),
         Series("peak", titles, peaks, "bar", 1)],
        height=400,
    )  # fmt: skip
    head = ("strategy", "paper", "states", "peak", "`plan`", "in the peak beside the states")
    return Part(head, rows, chart)


# ---- volumes -----------------------------------------------------------------------------------------

GATHERED_BYTES = 2
"""Bytes of a gathered element; reduced ones have those of :data:`REDUCED_BYTES`."""
REDUCED_BYTES = {"ddp": 4, "fsdp2": 4}


def sent_elements(job: Job, result: Result) -> float:
    """Elements that a rank sends in a step, in Psi, as section 7 of the paper counts them.

    An all-reduce counts twice; a gather, a reduction to one rank or a reduce-scatter once.
    """
    reduced = REDUCED_BYTES.get(job.strategy, 2)
    sizes = {"all_reduce": reduced / 2, "reduce": reduced, "reduce_scatter": reduced}
    sizes |= {"all_gather": GATHERED_BYTES, "broadcast": GATHERED_BYTES}
    return sum(nbytes / sizes[op] for op, nbytes in result.collectives.items() if op in sizes) / PSI


def volumes(lab: Lab) -> Part:
    """Bytes that the collectives of a step carry, and when ZeRO-3 sends less than three Psi."""
    chosen: dict[str, tuple[Job, str]] = {
        title: (job, "3" if title in ("ZeRO-3", "FSDP1", "FSDP2") else "2")
        for title, job in jobs.MEMORY.items()
        if title != "DDP, gradients in buckets"
    }
    chosen["ZeRO-2 without `use_multi_rank_bucket_allreduce`"] = (jobs.REDUCING, "2")
    for live, kept_jobs in ((1e9, jobs.REUSE), (1e8, jobs.LOW_LIVE)):
        for distance, job in kept_jobs.items():
            chosen[f"ZeRO-3, reuse {distance / 1e9:g}e9, live {live:.0e}".replace("+0", "")] = (job, "3")
    rows = []
    for title, (job, paper) in chosen.items():
        result = lab.run(job)
        carried = [result.collectives.get(op, 0) for op in ("all_reduce", "all_gather")]
        carried += [sum(result.collectives.get(op, 0) for op in ("reduce", "reduce_scatter"))]
        cells = [gigabytes(nbytes) for nbytes in carried]
        sent = f"{sent_elements(job, result):.2f}"
        rows.append([title, *shown(result, lambda _, c=cells, s=sent: [*c, s], 4), paper])
    kept = {0: jobs.REUSE[0], 1e9: jobs.MEMORY["ZeRO-3"], **jobs.REUSE}
    distances = sorted(kept)
    sent_psi = [sent_elements(kept[one], lab.run(kept[one])) for one in distances]
    xs = [distance / 1e9 for distance in distances]
    chart = Chart(
        "stage3_max_reuse_distance, 1e9 elements", "elements sent per step, Psi",
        [Series("ZeRO-3", xs, sent_psi), Series("paper", xs, [3.0] * len(xs), "dotted", 2)],
    )  # fmt: skip
    head = ("run", "all-reduce", "all-gather", "reduce, reduce-scatter", "sent, Psi", "paper")
    return Part(head, rows, chart)


# ---- overlap -----------------------------------------------------------------------------------------


def overlap(lab: Lab) -> Part:
    """The gain by overlap_comm over the speed of the link."""
    rows = [[f"{speed / GB:g} GB/s"] for speed in jobs.LINK_SPEEDS]
    xs, series = [speed / GB for speed in jobs.LINK_SPEEDS], []
    for colour, stage in enumerate((2, 3)):
        gains, shares = [], []
        for row, speed in zip(rows, jobs.LINK_SPEEDS, strict=True):
            off, on = (lab.run(jobs.OVERLAP[stage, speed, overlaps]) for overlaps in (False, True))
            gains.append(100 * (1 - on.step / off.step))
            shares.append(100 * off.exposed / off.step)
            row += [f"{off.step * 1e3:.0f} ms", f"{shares[-1]:.0f} %", f"{gains[-1]:.1f} %"]
        series.append(Series(f"ZeRO-{stage}: gain", xs, gains, "line", colour))
        series.append(Series("exposed without", xs, shares, "dotted", colour))
    chart = Chart("link, GB/s on the bus", "% of the step", series, x_log=True, x_ticks=xs)
    columns = [f"ZeRO-{stage}, {name}" for stage in (2, 3) for name in ("step", "exposed", "gain")]
    return Part(("link", *columns), rows, chart)


# ---- batch -------------------------------------------------------------------------------------------


def batch(lab: Lab) -> Part:
    """Samples per second by micro-batch, until the device runs out of memory."""
    rates: dict[tuple[int, int], Result] = {}
    for stage in (2, 3):
        for size in jobs.BATCHES:
            rates[stage, size] = lab.run(jobs.BATCH[stage, size])
            if rates[stage, size].outcome:
                break
    rows, series = [], []
    for size in jobs.BATCHES:
        cells = []
        for stage in (2, 3):
            result = rates.get((stage, size), Result(OUT_OF_MEMORY))
            cells += shown(
                result, lambda r, size=size: [f"{RANKS * size / r.step:.1f}", gigabytes(r.peak)], 2
            )
        rows.append([str(size), *cells])
    for colour, stage in enumerate((2, 3)):
        trained = {n: r for (s, n), r in rates.items() if s == stage and not r.outcome}
        samples = [RANKS * size / result.step for size, result in trained.items()]
        series.append(Series(f"ZeRO-{stage}", list(trained), samples, "line", colour))
        ends = [n for (s, n), r in rates.items() if s == stage and r.outcome]
        series.append(Series(f"ZeRO-{stage}: OOM", ends, [samples[-1]] * len(ends), "mark", colour))
    chart = Chart("sequences per device", "samples/s on four devices", series, x_ticks=jobs.BATCHES)
    head = ("micro-batch", "ZeRO-2, samples/s", "ZeRO-2, peak", "ZeRO-3, samples/s", "ZeRO-3, peak")
    return Part(head, rows, chart)


# ---- offload -----------------------------------------------------------------------------------------

ADAM_BYTES = 28
"""Bytes that Adam reads and writes per parameter: gradient, parameter and two moments of 32 bits."""
HOST_SPEED = 200e9
"""Bytes per second of a host's memory, which all four ranks share."""
SMALL_PSI = 4 * (12 * 4096**2 + 13 * 4096) + (2 * 256 + 2048 + 2) * 4096


def offload(lab: Lab) -> Part:
    """The time of a step with the optimizer on the host, over the speed of PCIe."""
    rows = [[f"{speed / GB:g} GB/s"] for speed in jobs.PCIE_SPEEDS]
    xs, series = [speed / GB for speed in jobs.PCIE_SPEEDS], []
    adam = ADAM_BYTES * SMALL_PSI / HOST_SPEED
    for colour, stage in enumerate((2, 3)):
        resident = lab.run(jobs.RESIDENT[stage])
        copied, whole = [], []
        for row, speed in zip(rows, jobs.PCIE_SPEEDS, strict=True):
            result = lab.run(jobs.OFFLOAD[stage, speed])
            copied.append(100 * (result.step / resident.step - 1))
            whole.append(100 * ((result.step + adam) / resident.step - 1))
            row += [f"{result.step * 1e3:.0f} of {resident.step * 1e3:.0f} ms"]
            row += [f"{copied[-1]:+.0f} %", f"{whole[-1]:+.0f} %"]
        series.append(Series(f"ZeRO-{stage}: copies", xs, copied, "line", colour))
        series.append(Series("with Adam", xs, whole, "dotted", colour))
    chart = Chart("PCIe, GB/s", "% longer than on the device", series, x_log=True, x_ticks=xs)
    names = ("step", "by copies", "and by Adam")
    return Part(("PCIe", *(f"ZeRO-{stage}, {name}" for stage in (2, 3) for name in names)), rows, chart)


# ---- checkpointing -----------------------------------------------------------------------------------


def checkpointing(lab: Lab) -> Part:
    """Memory saved and time lost by the number of layers that are recomputed."""
    results = {layers: lab.run(job) for layers, job in jobs.CHECKPOINTING.items()}
    plain = results[0]
    rows, saved, lost = [], [], []
    for layers, result in results.items():
        saved.append(100 * (1 - result.peak / plain.peak))
        lost.append(100 * (result.step / plain.step - 1))
        rows.append([
            f"{layers} of {jobs.SEVEN_BILLION['layers']}", gigabytes(result.peak),
            f"{result.step * 1e3:.0f} ms", f"{saved[-1]:.0f} %", f"{lost[-1]:+.0f} %",
        ])  # fmt: skip
    series = [
        Series("peak saved", list(results), saved),
        Series("time lost", list(results), lost, "line", 1),
    ]
    chart = Chart("layers that are recomputed", "%", series, x_ticks=list(results))
    return Part(("layers recomputed", "peak", "step", "peak saved", "time lost"), rows, chart)


PARTS: dict[str, Callable[[Lab], Part]] = {
    "memory": memory, "volumes": volumes, "overlap": overlap, "batch": batch, "offload": offload,
    "checkpointing": checkpointing,
}  # fmt: skip
