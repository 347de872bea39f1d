"""What a GPU must show: a row is one function, and one line above it.

A function yields checks; ``here=True`` marks those that hold without a GPU, too. NCCL ranks that share a
GPU take turns on it, so no row judges how long their collectives take: it holds the agent's figures
against those of the same rank and the same steps.
"""

from __future__ import annotations

import gzip
import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite import ROOT, Bench, Check, Done, NotHere, row

from zeromon.readout.breakdown import pace
from zeromon.snapshot.levels import DEVICE_BOUND

if TYPE_CHECKING:
    from zeromon.snapshot import RankSnapshot, RunSnapshot

KINDS = ("fsdp2", "fsdp2-prefetch", "fsdp1", "ddp", "tp", "p2p", "coalesced")
TRACED, STEPS = KINDS[:5], 60
HELD = ("all_gather", "reduce_scatter", "all_reduce", "send", "recv")
"""Operations whose counts are compared: what groups do at their start and end is not among them."""
MODES = {
    "native": {},
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "cudaMallocAsync": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "no-caching": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "fraction": {},
}
COUNTING = ("native", "expandable", "fraction")
"""Modes of the caching allocator, which counts everything."""
GIB, MIB, MS = 1 << 30, 1 << 20, 1e6
MOST_MIB = 64
"""What may travel to a machine that is lent: the files of the repository, and those carried beside."""


# ---- time ---------------------------------------------------------------------------------------


@row("1", "exposed time against a kernel of known length", part="1", seconds=90)
def known_truth(bench: Bench) -> Iterator[Check]:
    if bench.dry:
        yield bench.figure(
            "child process", f"{len(bench.run('known', rounds=1).facts[0]['cases'])} cases"
        )
        cases, c1 = virtual_cases(), 10 * MS
    else:
        cases = bench.run("known", rounds=20).facts[0]["cases"]
        c1 = statistics.median(case[2] for case in cases)
    for ratio in (0.0, 0.5, 1.0, 2.0):
        of_ratio = [case for case in cases if case[0] == ratio and case[5] is not None]
        if not of_ratio:
            yield bench.check(f"c2 = {ratio} c1", "no round was timed", "some", False, here=True)
            continue
        *_, c2, events, agent = (statistics.median(column) for column in zip(*of_ratio, strict=True))
        worst = max(abs(case[5] - case[4]) for case in of_ratio)
        told = {"unit": "ms", "scale": MS, "here": True}
        yield bench.near(
            f"agent, c2 = {ratio} c1", agent, max(0.0, c1 - c2), ratio=0.05, absolute=50e3, **told
        )
        yield bench.near(
            f"agent beside events, c2 = {ratio} c1", agent, events, ratio=0.05, absolute=20e3, **told
        )
        yield bench.figure(f"largest difference to events, of {len(of_ratio)}", f"{worst / 1e3:.1f} us")


def virtual_cases() -> list[list[Any]]:
    """The program of row 1 on the virtual device, under the agent's own hooks and timer."""
    import tempfile

    from device_programs import Ring, run

    cases, c1 = [], int(10 * MS)
    with tempfile.TemporaryDirectory() as folder:
        ring = Ring(Path(folder) / "r.ring")
        for ratio in (0.0, 0.5, 1.0, 2.0):
            c2 = int(ratio * c1)
            side = ("on", 1, [("compute", c1), ("issue", 0, 0, 0, True)])
            result = run(ring, [side, ("compute", c2), ("wait", 0), ("step", True)])
            true = result.true.get(1, 0)
            cases.append([ratio, 0, c1, c2, true, result.recorded.get(1, 0)])
    return cases


def trained(bench: Bench, kind: str) -> Done:
    """A watched run of a strategy on two ranks; of most, a trace of three steps is asked for."""
    asked: list[int] = []

    def look(run: RunSnapshot, _: Any) -> bool:
        if (
            kind in TRACED
            and not asked
            and run.ranks
            and min(rank.steps.watched_steps for rank in run.ranks) >= 8
        ):
            asked.append(bench.node.collector.trace(run.run, 3, ()).number)
        return bool(run.ranks) and all(rank.status.ended for rank in run.ranks)

    pause = 0.1 if kind in TRACED else 0.0
    make = partial(bench.run, "train", 2, kind=kind, steps=STEPS, pause=pause, seen=look)
    return bench.once(kind, make)


@row("2", "strategies: counts, bytes, losses, peak memory", part="1", seconds=380)
def strategies(bench: Bench) -> Iterator[Check]:
    from zeromon.ring.codes import operation_by_name

    for kind in KINDS:
        bare = bench.run("train", 2, watched=False, kind=kind, steps=STEPS).facts
        done = trained(bench, kind)
        same = [one["losses"] for one in done.facts] == [one["losses"] for one in bare]
        yield bench.check(
            f"{kind}: losses with and without", "equal" if same else "differ", "equal", same, here=True
        )
        peaks = [one["peak"] for one in done.facts], [one["peak"] for one in bare]
        yield bench.check(f"{kind}: peak memory with, without", *peaks, peaks[0] == peaks[1])
        rank = next(rank for rank in done.snapshot.ranks if rank.rank == 0)
        yield bench.check(
            f"{kind}: errors of hooks", rank.agent.errors, 0, not rank.agent.errors, here=True
        )
        counts, nbytes = dict.fromkeys(HELD, 0), dict.fromkeys(HELD, 0)
        for name, (calls, size) in done.facts[0]["flight"].items():
            op = operation_by_name(name.partition(" ")[0]).label
            if op in counts:
                counts[op], nbytes[op] = counts[op] + calls, nbytes[op] + size
        truth = done.facts[0]["issued"] or {op: count for op, count in counts.items() if count}
        for op, count in truth.items():
            rows = [one for one in rank.communication.collectives if one.op == op]
            seen = sum(one.count for one in rows)
            yield bench.check(f"{kind}: {op}, calls", seen, count, seen == count)
            if op in ("all_gather", "reduce_scatter") and counts[op] == seen:
                size = sum(one.nbytes for one in rows)
                yield bench.check(f"{kind}: {op}, bytes", size, nbytes[op], size == nbytes[op])


@row("3", "exposed time beside Kineto, on the same rank and steps", part="1", seconds=250)
def beside_kineto(bench: Bench) -> Iterator[Check]:
    compared = bench.dry
    for kind in TRACED:
        run = trained(bench, kind).snapshot
        made = run.capture
        state = "none" if made is None else f"{made.state} {made.note}"
        yield bench.check(
            f"{kind}: trace capture", state, "done", made is not None and made.state == "done", here=True
        )
        if made is None:
            continue
        for rank, check in made.checks.items():
            live, trace = check.live_exposed_seconds, check.trace_exposed_seconds
            told = {"ratio": 0.05, "absolute": 150e-6, "unit": "ms in 3 steps", "scale": 1e-3}
            if bench.dry or is_device_bound(run.ranks[rank]):
                compared = True
                yield bench.near(f"{kind}, rank {rank}: exposed", live, trace, **told)
            both = check.live_communication_seconds, check.trace_communication_seconds
            yield bench.figure(
                f"{kind}, rank {rank}: communication, live and trace",
                " ".join("n/a" if seconds is None else f"{seconds:.4g} s" for seconds in both),
            )
        for file in made.files[:1]:
            bench.keep(f"kineto-{kind}.json.gz", lean_trace(Path(file)))
    if not compared:
        raise NotHere("needs a host ahead of the device: every rank was launch-bound")


def is_device_bound(rank: RankSnapshot) -> bool:
    """Whether live and trace define exposed time alike: the host was ahead of the device.

    A stream that waits for its host blocks for no collective; the trace counts its idle time as exposed.
    """
    known = pace(rank)
    return known is not None and known.starved_ratio <= DEVICE_BOUND


def lean_trace(path: Path) -> bytes:
    """A trace with the events of the device, marks, and launches."""
    content = json.loads(path.read_bytes())
    device = "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"
    kept = {*device, "user_annotation", "cuda_runtime", "cuda_driver"}
    content["traceEvents"] = [
        event
        for event in content["traceEvents"]
        if event.get("cat") in kept or "nccl" in str(event.get("name")) or event.get("ph") == "M"
    ]
    return gzip.compress(json.dumps(content).encode(), mtime=0)


@row("4", "nothing waits for the device", part="1", seconds=90)
def nothing_waits(bench: Bench) -> Iterator[Check]:
    steps = 200 if not bench.dry else 12
    bare = bench.run("quiet", watched=False, steps=steps).facts[0]["errors"]
    facts = bench.run("quiet", steps=steps).facts[0]
    errors, queries = facts["errors"], facts["queries"]
    what, found = f"synchronizing calls in {steps} steps", (len(errors), *errors[:1])
    yield bench.check(what, found, len(bare), errors == bare, here=True)
    within = queries.get("within a step", 0)
    yield bench.check("event queries within a step", within, 0, not within, here=True)
    yield bench.figure("event queries at the end of steps", queries.get("at its end", 0))


@row("5", "cost of a step, the agent on and off in turns", part="bench", seconds=240)
def cost_of_a_step(bench: Bench) -> Iterator[Check]:
    from bench_step import interval, quads, trimmed

    steps, least = (480, 50.0) if not bench.dry else (64, 5.0)
    facts = bench.run("cost", steps=steps, least_ms=least, seconds=230).facts[0]
    times = facts["times"]
    fours = quads([(mode, spent, 0) for mode, spent in times])
    whole = trimmed([statistics.fmean((b[1], c[1])) for _, b, c, _ in fours])
    ratios = [(a[1] + d[1]) / (b[1] + c[1]) - 1 for a, b, c, d in fours]
    low, high = interval(ratios)
    mean = trimmed(ratios)
    yield bench.figure("step", f"{whole / MS:.1f} ms, {len(times)} steps")
    told = f"{mean:+.3%} ({low:+.3%} to {high:+.3%})"
    yield bench.figure(
        "without against without", f"{trimmed([b[1] / c[1] - 1 for _, b, c, _ in fours]):+.3%}"
    )
    if not facts["computes"]:
        yield bench.figure("with against without", told)
        raise NotHere("needs a device that takes no time of the host: this one runs on its cores")
    yield bench.check(
        "with against without", told, "below 0.5 %, or no cost to tell", mean < 0.005 or low < 0
    )


@row("6", "overlap under CUDA_DEVICE_MAX_CONNECTIONS", part="bench", seconds=240)
def connections(bench: Bench) -> Iterator[Check]:
    from zeromon.traces.analysis import analyze_trace
    from zeromon.traces.kineto import read_trace

    for number in ("1", "8", "32"):
        found: dict[bool, list[float]] = {True: [], False: []}
        for watched in (True, False, False, True):
            file = bench.out / f"trace-{number}.json"
            options = {"kind": "fsdp2", "steps": 14, "traced": str(file)}
            bench.run(
                "train", 2, watched=watched, env={"CUDA_DEVICE_MAX_CONNECTIONS": number}, **options
            )
            found[watched].append(analyze_trace(read_trace(file), 0).overlap_ratio or 0.0)
            file.unlink()
        noise = max(max(ratios) - min(ratios) for ratios in found.values())
        change = statistics.fmean(found[True]) - statistics.fmean(found[False])
        allowed = max(0.03, 2 * noise)
        what = f"{number} connections: overlap with, less without"
        yield bench.check(what, f"{change:+.3f}", f"within {allowed:.3f}", abs(change) <= allowed)


# ---- graphs and streams -------------------------------------------------------------------------


@row("7", "graph capture and replay, with all that the agent does meanwhile", part="2", seconds=230)
def graphs(bench: Bench) -> Iterator[Check]:
    if bench.dry:
        yield from virtual_captures(bench)
    beside = ("", "heartbeat", "census", "oom", "fork", "attached", "step")
    cases = [("global", one) for one in beside]
    cases += [(mode, "heartbeat") for mode in ("thread_local", "relaxed")]
    for mode, what in cases:
        # a group of one launches no NCCL kernel
        ranks = 2 if what in ("", "heartbeat", "step") else 1
        folder = bench.node.root / f"graph-{what}"
        env = {"ATTACH_TO": str(folder)} if what == "attached" else {}
        folder.mkdir(exist_ok=True, mode=0o700)
        watched = what != "attached"
        options = {"mode": mode, "beside_it": what}
        done = bench.run("graph", ranks, watched=watched, env=env, seconds=60, **options)
        facts = done.facts[0]
        told = facts["error"] or facts["errors"] or facts["value"]
        expected, title = facts["expected"], f"{mode}, {what or 'nothing else'}"
        if not facts["computes"]:
            told, expected = facts["error"] or facts["errors"] or "no error", "no error"
            title += " (values n/a: a device that does not compute)"
        yield bench.check(f"{title}: three replays", told, expected, told == expected, here=True)
    facts = bench.run("graph", watched=False, mode="global", beside_it="query").facts[0]
    title = "an event query of another thread ends a global capture (the suite can tell)"
    yield bench.check(title, facts["error"][:80] or "no", "error", bool(facts["error"]))


def virtual_captures(bench: Bench) -> Iterator[Check]:
    """What the timer does in a capture of the virtual device, where a query is an error."""
    import tempfile

    from device_programs import Ring, disagreement, run

    inside = [("issue", 0, 0, 5000, True), ("compute", 900), ("wait", 0), ("step", False)]
    program = [("issue", 0, 0, 9000, True), ("capture", inside), ("wait", 0), ("step", True)]
    with tempfile.TemporaryDirectory() as folder:
        wrong = disagreement(run(Ring(Path(folder) / "r.ring"), program))
    yield bench.check(
        "virtual device: capture, then a step",
        wrong or "as the schedule",
        "as the schedule",
        not wrong,
        here=True,
    )


@row("8", "synchronous collectives, tensors that die early, gloo on the device", part="1", seconds=100)
def streams(bench: Bench) -> Iterator[Check]:
    number = 100_000 if not bench.dry else 3_000
    facts = bench.run("many", collectives=number).facts[0]
    yield bench.check(
        f"events after {number} collectives",
        facts["events"],
        "<= 4096",
        facts["events"] <= 4096,
        here=True,
    )
    kept = facts["kept_bytes"]
    yield bench.check("bytes that live on", kept, "<= 1 MiB", kept <= 1 << 20)
    done = bench.run("host_clock", 2)
    rank = next(rank for rank in done.snapshot.ranks if rank.rank == 0)
    reduced = [one for one in rank.communication.collectives if one.op == "all_reduce"]
    seen = sum(one.exposed_seconds for one in reduced) * 1e9
    waits = done.facts[0]["waits"]
    yield bench.near(
        "gloo: blocked time by the host's clock", seen, sum(waits),
        ratio=0.2, unit="ms", scale=MS, here=True,
    )  # fmt: skip


# ---- memory -------------------------------------------------------------------------------------


@row("9", "allocator figures in every mode, OOM, pinned memory", part="2", seconds=200)
def allocators(bench: Bench) -> Iterator[Check]:
    for mode, env in MODES.items():
        options = {"fraction": 0.25} if mode == "fraction" else {}
        done = bench.run("memory", env=env, pause=2.5 if not bench.dry else 0.0, **options)
        facts, rank = done.facts[0], done.snapshot.ranks[0]
        bench.keep(f"statistics-{mode}.json", json.dumps(facts["statistics"]).encode())
        bench.keep(f"snapshot-{mode}.json", json.dumps(facts.get("snapshot")).encode())
        memory = rank.memory.device
        if memory is None:
            yield bench.check(
                f"{mode}: memory", "n/a", "figures, or unknown ones with a reason", mode == "no-caching"
            )
            continue
        for name in ("allocated", "reserved"):
            value = getattr(memory, f"{name}_bytes")
            good = value in (facts[name], -1) if mode == "no-caching" else value == facts[name]
            yield bench.check(f"{mode}: {name}", value, facts[name], good)
        share = facts["fraction"] or 1.0
        yield bench.near(
            f"{mode}: capacity",
            memory.capacity_bytes,
            facts.get("total", 0) * share,
            ratio=0.001,
            unit="GiB",
            scale=GIB,
        )
        failed = rank.memory.out_of_memory
        if mode in COUNTING:
            asked = failed.requested_bytes if failed else None
            yield bench.check(
                f"{mode}: OOM, bytes asked", asked, facts["asked"], asked == facts["asked"]
            )
            block = failed.largest_block_bytes if failed else None
            yield bench.check(
                f"{mode}: OOM, largest free block", block, "known", block is not None and block >= 0
            )
        known = (facts["ooms"],) if mode in COUNTING else (facts["ooms"], -1)
        yield bench.check(f"{mode}: OOMs", memory.ooms, facts["ooms"], memory.ooms in known)
        yield bench.near(
            f"{mode}: pinned",
            rank.memory.pinned_bytes,
            facts["pinned"],
            ratio=0.5,
            unit="GiB",
            scale=GIB,
        )


@row("9b", "forecast of a leak of 1 % per step", part="2", seconds=90)
def forecast(bench: Bench) -> Iterator[Check]:
    told: dict[int, float] = {}

    def look(run: RunSnapshot, _: Any) -> bool:
        for rank in run.ranks:
            for risk in rank.memory.risks:
                if risk.pool == "device" and risk.steps_left is not None:
                    told[rank.steps.last_step] = rank.steps.last_step + risk.steps_left
        return bool(run.ranks) and all(rank.status.ended for rank in run.ranks)

    done = bench.run("leak", share=0.01, fraction=0.05, most=300 if not bench.dry else 20, seen=look)
    died = done.facts[0]["died_at"]
    yield bench.figure("died at step", died)
    first = min((step for step in told if step >= 0.6 * died), default=None)
    yield bench.near(f"forecast at step {first}", told.get(first or -1), died, ratio=0.1, unit="steps")


@row("10", "roles, and memory that is not torch's, of two processes on one GPU", part="2", seconds=120)
def roles(bench: Bench) -> Iterator[Check]:
    from zeromon.memory.reconcile import unattributed_memory

    newest: list[RunSnapshot] = []

    def look(run: RunSnapshot, _: Any) -> bool:
        """Keeps the last snapshot in which both hold what the program holds at its end."""
        if len(run.ranks) == 2 and all(
            rank.status.alive and rank.steps.watched_steps >= 12 for rank in run.ranks
        ):
            newest[:] = [run]
        return False

    done = bench.run("memory", 2, pause=3.0 if not bench.dry else 0.5, seen=look)
    run = (newest or [done.snapshot])[0]
    if any(rank.memory.device is None for rank in run.ranks):
        yield bench.check("memory of both ranks", "n/a", "figures", False)
        return
    reserved = sum(rank.memory.device.reserved_bytes for rank in run.ranks)
    for rank in run.ranks:
        by_role = sum(one.device_bytes for one in rank.memory.roles)
        most = rank.memory.device.allocated_bytes
        yield bench.check(
            f"rank {rank.rank}: roles within allocated", by_role, f"1 to {most}", 0 < by_role <= most
        )
        used = rank.machine.device.used_bytes if rank.machine.device else None
        if used is None:
            yield bench.check(f"rank {rank.rank}: NVML's used bytes", "n/a", "known", False)
            continue
        rest = next((one.nbytes for one in unattributed_memory(rank) if one.kind == "non_torch"), None)
        limit = used - reserved
        what = f"rank {rank.rank}: not torch's, less the other rank's memory"
        yield bench.check(what, rest, f"n/a, or <= {limit}", rest is None or rest <= 1.05 * limit)


# ---- hangs --------------------------------------------------------------------------------------

FAULTS = {
    "sleep": "a member has not come",
    "exit": "a member is dead",
    "op": "mismatched operations",
    "size": "mismatched sizes",
}
PATIENCE = 45.0
GOES_ON = "no hang: the steps go on"


@row("11", "hangs on a device: the verdict as on gloo", part="2", seconds=260)
def hangs(bench: Bench) -> Iterator[Check]:
    from zeromon.readout.verdict import hang_text

    for fault, expected in FAULTS.items():
        kinds: list[str] = []
        said: list[str] = []
        began = time.monotonic()

        def look(
            run: RunSnapshot,
            _: Any,
            kinds: list[str] = kinds,
            said: list[str] = said,
            asks: bool = fault == "sleep" and not bench.dry,
            wanted: str = expected,
            began: float = began,
        ) -> bool:
            dead = [FAULTS["exit"] for rank in run.ranks if rank.rank == 1 and rank.status.failed]
            kinds[:] = [*(str(one.kind) for one in run.hangs), *dead] or kinds
            if run.ranks and min(rank.steps.watched_steps for rank in run.ranks) > 20:
                kinds[:] = [GOES_ON]
            said[:] = [hang_text(run, one) for one in run.hangs] or said
            known = {wanted, GOES_ON} & {*kinds} and (run.ras is not None or not asks)
            return bool(known) or time.monotonic() - began > PATIENCE

        done = bench.run("hang", 2, fault=fault, seen=look, seconds=PATIENCE + 30, may_fail=True)
        if not kinds:  # the ranks have ended by themselves, not by the suite
            look(done.snapshot, None)
        if kinds == [GOES_ON]:  # what NCCL does with a wrong size is its own affair
            yield bench.figure(f"rank 1: {fault}", GOES_ON)
            continue
        yield bench.check(f"rank 1: {fault}", kinds, expected, expected in kinds, here=True)
        if fault == "sleep":  # NCCL's own view is a part of it
            yield bench.figure("what zeromon reports", *said[:1] or ["nothing"])


@row("11b", "attach to a job whose main thread waits for the device", part="bench", seconds=120)
def attaching(bench: Bench) -> Iterator[Check]:
    from zeromon.attach.loader import attach_ranks, detach_ranks
    from zeromon.attach.rank_processes import ranks_of, running_processes
    from zeromon.base.errors import ZeromonError

    rounds = 50 if not bench.dry else 2
    root = bench.node.folder / "attached"
    root.mkdir(mode=0o700)
    refused: list[str] = []
    made: list[bool] = []
    began = time.monotonic()

    def look(_: Any, running: Sequence[Any]) -> bool:
        if time.monotonic() - began < (25 if not bench.dry else 12):
            return False  # until rank 0 waits for rank 1
        for _ in range(rounds):
            ranks = [one for process in running for one in ranks_of(process.pid, running_processes())]
            try:
                _, joined = attach_ranks(ranks, root)
                refused.extend(
                    one.refused for one in [*joined, *detach_ranks(ranks, root)] if one.refused
                )
            except ZeromonError as error:
                refused.append(str(error))
            made.append(all(process.poll() is None for process in running))
            if not made[-1] or time.monotonic() - began > 110:
                break
        return True

    bench.run("hang", 2, watched=False, fault="sleep", seen=look)
    survived = f"{sum(made)} of {len(made)}"
    yield bench.check(
        "the job survives attach and detach",
        survived,
        f"{rounds} of {rounds}",
        sum(made) == rounds,
        here=True,
    )
    yield bench.check("refused", refused[:2], [], not refused, here=True)


# ---- the device itself --------------------------------------------------------------------------


@row("12", "NVML: identity, activity, energy", part="bench", seconds=90)
def nvml(bench: Bench) -> Iterator[Check]:
    from zeromon.probes.nvml import Nvml

    library, samples = Nvml(), []
    uuids = library.uuids()

    def look(run: RunSnapshot, _: Any) -> bool:
        now = time.monotonic()
        if uuids:
            device = library.read(uuids[0], time.monotonic_ns())
            samples.append((now, device, energy_joules()))
        return bool(run.ranks) and all(rank.status.ended for rank in run.ranks)

    run = bench.run("matmul", pause=12.0 if not bench.dry else 0.5, seen=look).snapshot
    stats = run.ranks[0].machine.device
    yield bench.check(
        "the rank's device, by UUID", getattr(stats, "name", "n/a"), "a name", bool(stats and stats.name)
    )
    known = [(at, device, joules) for at, device, joules in samples if device and device.power_watts]
    if not known:
        raise NotHere("NVML lists no device here")
    yield bench.figure("utilization, at most", max(one.utilization_ratio or 0 for _, one, _ in known))
    yield bench.figure(
        "throttled by", sorted({why for _, one, _ in known for why in one.throttle_reasons})
    )
    spent = sum(
        (later[0] - first[0]) * (later[1].power_watts + first[1].power_watts) / 2
        for first, later in pairwise(known)
    )
    counted = [joules for *_, joules in known if joules is not None]
    truth = counted[-1] - counted[0] if counted else None
    yield bench.near("power over time beside the energy counter", spent, truth, ratio=0.05, unit="J")
    for name in ("tensor_active_ratio", "sm_active_ratio", "dram_active_ratio"):
        values = [value for _, one, _ in known if (value := getattr(one, name, None)) is not None]
        if name.startswith("tensor"):
            most = max(values, default=0.0)
            yield bench.check(f"{name}, at most", f"{most:.2f}", "> 0.6", most > 0.6)
        yield bench.figure(
            name, f"{min(values):.2f} to {max(values):.2f}" if values else "n/a: not read"
        )


def energy_joules() -> float | None:
    """NVML's own counter."""
    import pynvml

    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1e3
    except pynvml.NVMLError:
        return None


@row("13", "names of torch that only a build with CUDA has", part="2", seconds=30)
def names(bench: Bench) -> Iterator[Check]:
    import torch

    wanted = {
        "torch._C": ("_cuda_attach_out_of_memory_observer", "_cuda_getMemoryFraction"),
        "torch._C._distributed_c10d": ("_dump_nccl_trace", "ProcessGroupNCCL"),
        "torch.cuda": (
            "_sleep", "CUDAGraph", "host_memory_stats", "memory_snapshot",
            "memory_stats_as_nested_dict", "get_allocator_backend", "is_current_stream_capturing",
        ),
    }  # fmt: skip
    if torch.version.cuda is None:
        raise NotHere("this torch is built for the CPU")
    for owner, attributes in wanted.items():
        module: Any = torch
        for part in owner.split(".")[1:]:
            module = getattr(module, part)
        lacking = [name for name in attributes if not hasattr(module, name)]
        yield bench.check(owner, lacking or "all", "all", not lacking, here=True)
    yield bench.figure(
        "newer torch and NCCL", "not taken along: larger than 64 MiB; tests/torch_versions.py on a CPU"
    )


@row("14", "what a GPU machine without a network needs is here", part="2", seconds=30)
def taken_along(bench: Bench) -> Iterator[Check]:
    for name in (
        "zeromon",
        "agents/zeromon_agents",
        "tests/gpu/ranks.py",
        "tests/support.py",
        "examples/train_gpt.py",
    ):
        yield bench.check(
            name,
            "there" if (ROOT / name).exists() else "missing",
            "there",
            (ROOT / name).exists(),
            here=True,
        )
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")
    files = [ROOT / name for name in listed if name] + [*ROOT.glob(".gpu-wheels/*")]
    size = sum(file.stat().st_size for file in files if file.is_file())
    told = f"{size / MIB:.1f} MiB of {len(files)} files"
    yield bench.check("what travels", told, f"below {MOST_MIB} MiB", size < MOST_MIB * MIB, here=True)
    from importlib import import_module

    for name in (
        "zeromon.collector.daemon",
        "zeromon.readout.report",
        "zeromon.attach.loader",
        "zeromon_agents.runtime.agent",
    ):
        import_module(name)
        yield bench.check(f"import {name}", "done", "done", True, here=True)
