"""The speeds of a machine: by its data sheet, or as a run has measured them. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, median
from typing import Any

from zeromon.base.errors import PlanError
from zeromon.base.units import human_count, human_rate
from zeromon.memory.predict import Batch
from zeromon.memory.seconds import Hides, Speeds, copied_bytes, forward_pass_flops, update_bytes
from zeromon.memory.spec import TABLES, ModelSpec, ShardPlan, Sizes, ZeroStage
from zeromon.ring.codes import Op, Phase
from zeromon.snapshot import RankSnapshot, StepSummary
from zeromon.snapshot.communication import BUS_FACTOR
from zeromon.snapshot.step import settled_steps

# ---- devices and links by their data sheets ------------------------------------------------------

# Peaks are those of the vendors' data sheets: dense FLOP/s, and bytes/s in one direction. fp32 is
# without TF32, which torch leaves off by default. What is reached is a share, with the least and the
# most of it:
#
# - compute: 44 to 52 % of an A100's peak (Narayanan et al. 2021, arXiv 2104.04473, table 1), 38 to 43 %
#   of an H100's (Llama Team 2024, arXiv 2407.21783, table 4), with communication; small models less.
# - memory: what torch reports as the total of a device (``total_memory``, and "GiB total capacity" of an
#   out-of-memory error), which is less than what is sold: the driver and ECC keep the rest.
# - links: busbw of large messages is 75 to 95 % of the peak (nccl-tests, doc/PERFORMANCE.md).
# - host: CPU-Adam updates 10^10 parameters in 2.57 s (Ren et al. 2021, arXiv 2101.06840, table 4).


@dataclass(frozen=True, slots=True)
class Device:
    """The peaks of one kind of device."""

    nbytes: int
    half_flops: float
    """FLOP/s in bf16 and fp16; of v100 and t4 in fp16 alone."""
    single_flops: float
    memory: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s to the other devices of a host: NVLink, Infinity Fabric or PCIe."""
    host: float
    """Bytes/s to its host: PCIe."""

    def flops(self, compute_bytes: int) -> float:
        """Returns the FLOP/s for elements of so many bytes."""
        return self.half_flops if compute_bytes < 4 else self.single_flops


_GIB, _TERA, _GIGA = 1 << 30, 1e12, 1e9


# Cached: two names of one device are one object
@cache
def _device_peaks(gib: float, half_tflops: float, single_tflops: float, *gigabytes: float) -> Device:
    memory, link, host = (rate * _GIGA for rate in gigabytes)
    return Device(round(gib * _GIB), half_tflops * _TERA, single_tflops * _TERA, memory, link, host)


DEVICES = {name: _device_peaks(*row) for name, row in TABLES["devices"].items()}
"""Name -> peaks; of the SXM version where there are several."""

_VARIANTS: Mapping[str, str] = TABLES["device_variants"]
"""Another name, of NVML or of people -> the device whose peaks are nearest."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The part of a peak that is reached: likely, at least, at most."""

    likely: float
    least: float
    most: float


COMPUTE = Reached(0.45, 0.3, 0.6)
"""Share of the peak FLOP/s."""
LINK = Reached(0.8, 0.6, 0.95)
"""Share of the peak of a link, NVLink, network or PCIe."""
MEMORY = Reached(0.8, 0.6, 0.95)
"""Share of the bandwidth of a device's memory."""
HOST = Reached(109e9, 60e9, 200e9)
"""Bytes/s that the optimizer reads and writes on one host, all ranks together."""
LATENCY = Reached(20e-6, 50e-6, 10e-6)
"""Seconds of a collective besides its bytes: a NCCL kernel, and Python between two of them."""

LINKS: Mapping[str, float] = {name: rate * _GIGA for name, rate in TABLES["links"].items()}
"""Name of a link -> peak, bytes/s in one direction."""

_SPEED = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(gb|mb|g)(?:/s|ps)?")


def parse_link_peak(speed: str) -> float:
    """Returns the bytes/s of ``ib-ndr``, ``8x400Gb`` (bits), ``25GB/s``; raises :class:`PlanError`."""
    trimmed = speed.strip()
    count, _, name = trimmed.lower().rpartition("x")
    # isdigit() also accepts "²", for which int() raises
    if name in LINKS and (count.isdecimal() or not count):
        return LINKS[name] * int(count or 1)
    match = _SPEED.fullmatch(trimmed.lower())
    if match is None or not float(match[2]):
        names = ", ".join(LINKS)
        raise PlanError(
            f"{speed!r} is not the speed of a link",
            hint=f"Like 25GB/s, 8x400Gb (bits), or one of {names}.",
        )
    scale = {"g": 1e9, "m": 1e6}[match[3][0]] / (1 if "B" in trimmed else 8)
    return int(match[1] or 1) * float(match[2]) * scale


def find_named_device(label: str) -> Device | None:
    """Returns the device that *label* names: a key of :data:`DEVICES`, or what NVML calls it."""
    lowered = label.strip().lower()
    if lowered in DEVICES:
        return DEVICES[lowered]
    # By whole words: the names of the RTX A1000 and the L40 contain those of the A100 and the L4
    label_words = re.findall(r"[a-z0-9]+", lowered.replace("rtx ", "rtx"))
    names = (_VARIANTS.get(word, word) for word in label_words)
    name = next((name for name in names if name in DEVICES), "")
    gigabytes = next((word.removesuffix("gb") for word in label_words if word.endswith("gb")), "")
    return DEVICES.get(f"{name}-{gigabytes}") or DEVICES.get(name)


_HALVES = ("bfloat16", "float16")
_BEFORE_AMPERE = (DEVICES["v100"], DEVICES["v100-16"], DEVICES["t4"])


def peak_flops(device: str, dtype: str) -> float | str:
    """Returns the dense peak of *device* for matrices of *dtype*, FLOP/s, or why it is unknown."""
    peaks = find_named_device(device) if device else None
    if peaks is None:
        return f"peak FLOP/s of {device or 'the device'} unknown"
    if dtype in ("bfloat16", "tf32") and peaks in _BEFORE_AMPERE:
        return f"{device} has no {dtype.replace('bfloat', 'bf')}"
    if dtype == "tf32":  # by the data sheets of all of these
        return peaks.half_flops / 2
    if dtype not in (*_HALVES, "float32"):
        return f"peak FLOP/s of {device} unknown for {dtype or 'the unknown dtype of the model'}"
    return peaks.half_flops if dtype in _HALVES else peaks.single_flops


# ---- the speeds of a machine ---------------------------------------------------------------------

Three = tuple[Speeds, Speeds, Speeds]
"""Likely, least and most."""

_CORE = 5e9
"""Bytes/s that a core of a host reads and writes at least; a slower optimizer waits for its calls."""

_LAST_STEPS = 128
"""A rank is judged by so many of its last steps: a run may have thousands of ranks."""

_SMALL_BYTES = 1 << 16
"""A collective of fewer bytes shows a latency, not a bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices and links, as far as known; peaks in bytes/s, None where unknown."""

    device: Device | None = None
    efficiency: float | None = None
    """Share of the peak FLOP/s; None: :data:`~zeromon.memory.speeds.COMPUTE`."""
    link: float | None = None
    """Between ranks: the slowest link on the way, all adapters of a host together."""
    within: float | None = None
    """Within a host, where *link* is that between hosts."""
    pcie: float | None = None
    host: float | None = None
    """By which the optimizer reads and writes on one host."""
    nvme: float | None = None
    """Peak of the drives of one host."""
    ranks_per_host: int = 1
    link_times: float = 1.0
    """So many times the speed of the links between ranks."""
    late_ranks: bool = True
    """False: the slowest rank computes as fast as the median one."""

    @property
    def compute(self) -> Reached:
        """The share of the peak FLOP/s that kernels reach."""
        return COMPUTE if self.efficiency is None else Reached(*(self.efficiency,) * 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpeeds:
    """The speeds of a run."""

    run: str
    speeds: Speeds
    slow: float
    """The slowest tenth of its steps took so many times the median."""
    fast: float
    hosts: int = 1
    late_seconds: float = 0.0
    """Seconds of a step: how much longer the slowest rank computes than the median one."""
    kind: tuple[str, bool] = ("", False)
    """The framework, and whether it is ZeRO-3: on a CPU, DTensor's and ZeRO-3's own calls take longer
    than their bytes."""


def speeds_of_machine(m: Machine, model: ModelSpec, batch: Batch | None, plan: ShardPlan) -> Three:
    """Returns the speeds of *m* for a model under *plan*."""
    speeds = []
    flops = forward_pass_flops(model, batch) if batch is not None else None
    frozen = 1 - model.trainable / model.params
    for at in ("likely", "least", "most"):

        def speed_of(share: Reached, peak: float | None, at: str = at) -> float | None:
            return None if peak is None else peak * float(getattr(share, at))

        device, forward, recompute = m.device, None, 0.0
        if device is not None and flops is not None:
            rate = device.flops(plan.precision.compute_bytes) * getattr(m.compute, at)
            forward, recompute = (flop_count / rate for flop_count in flops)
        link = _scale_rate(speed_of(LINK, m.link), m.link_times)
        host = m.host or getattr(HOST, at)
        hybrid = plan.shard_ranks < plan.ranks and plan.shard_ranks <= m.ranks_per_host
        within = _scale_rate(speed_of(LINK, m.within), m.link_times)
        inner = within if hybrid and within else link
        speeds.append(
            Speeds(
                forward_seconds=forward,
                # no gradients of frozen weights
                backward_seconds=None if forward is None else forward * (2 - frozen),
                recompute_seconds=recompute if batch is not None and batch.checkpointing else 0.0,
                gather=inner,
                reduce=inner,
                between=link,
                within=within,
                latency=getattr(LATENCY, at),
                update=speed_of(MEMORY, device.memory) if device is not None else None,
                host_update=host / m.ranks_per_host,
                pcie=speed_of(LINK, m.pcie or (device.host if device is not None else None)),
                nvme=None if m.nvme is None else m.nvme / m.ranks_per_host,
                hides=Hides.NOTHING if at == "least" else Hides.STREAMS,
            )
        )
    return speeds[0], speeds[1], speeds[2]


def speeds_of_run(measured: RunSpeeds, m: Machine, plan: ShardPlan) -> Three:
    """Returns the speeds of a run for *plan*; what it has not measured is that of *m*."""
    s = measured.speeds
    # On a CPU the measured rate contains calls of DTensor or ZeRO-3, which the other plan does not make
    if s.hides == Hides.THREADS and s.update and measured.kind != _kind_of_plan(plan):
        s = replace(s, update=max(s.update, _CORE), host_update=max(s.host_update or 0.0, _CORE))
    if m.link:
        # The all-reduce that the run measured would overrule the link that the user gives
        s = replace(s, gather=m.link, reduce=m.link, all_reduce=None)
    links: dict[str, Any] = {name: _scale_rate(getattr(s, name), m.link_times) for name in _LINKS}
    merged = replace(
        s,
        **links,
        waiting_seconds=s.waiting_seconds
        if m.late_ranks
        else max(0.0, s.waiting_seconds - measured.late_seconds),
        pcie=m.pcie or s.pcie,
        host_update=m.host / m.ranks_per_host if m.host else s.host_update,
        nvme=m.nvme / m.ranks_per_host if m.nvme else s.nvme,
    )
    return merged, _slower_speeds(merged, measured.slow), _slower_speeds(merged, measured.fast)


def with_larger_batch(s: Speeds, factor: float) -> Speeds:
    """Returns *s* for a micro-batch that is so many times larger."""
    forward, backward = (s.forward_seconds or 0.0) * factor, (s.backward_seconds or 0.0) * factor
    repeat = s.recompute_seconds * factor
    return replace(s, forward_seconds=forward, backward_seconds=backward, recompute_seconds=repeat)


def _scale_rate(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate * factor


def _slower_speeds(s: Speeds, factor: float) -> Speeds:
    """Returns *s*, so many times slower."""
    slower: dict[str, Any] = {
        name: _scale_rate(getattr(s, name), 1 / factor)
        for name in (*_LINKS, "update", "host_update", "pcie", "nvme")
    }
    return replace(
        with_larger_batch(s, factor),
        other_seconds=s.other_seconds * factor,
        waiting_seconds=s.waiting_seconds * factor,
        **slower,
    )


# ---- a run ----------------------------------------------------------------------------------------


def measured_of(
    run: str, ranks: Sequence[RankSnapshot], sizes: Sizes, plan: ShardPlan, hosts: int = 1
) -> RunSpeeds | None:
    """Returns the speeds that the median of *ranks* has measured; None without a timed step.

    Compute is forward and backward less their exposed communication and the copies of
    :func:`~zeromon.memory.seconds.copied_bytes`, the optimizer's speed its bytes over its time. On a CPU
    there are no streams: all but DDP's reducer wait for each collective at once, so nothing is hidden;
    What the slowest rank computes longer than the median one is a wait of its own.
    """
    busy = sorted((seconds, n) for n, rank in enumerate(ranks) if (seconds := _busy_time(rank)) > 0)
    if not busy:
        return None
    busy_time, number = busy[(len(busy) - 1) // 2]
    rank = ranks[number]
    timed = _last_timed_steps(rank)
    steps = _steps_near_median(timed)
    on_cpu = rank.memory.device is None
    phases = {phase: _mean_phase_seconds(steps, phase) for phase in Phase}
    if not phases[Phase.FORWARD] or not phases[Phase.BACKWARD]:
        return None
    copied = copied_bytes(sizes, plan)
    updated_bytes = sizes.trainable / (plan.shard_ranks if plan.stage else 1) * update_bytes(plan)
    # Less its exposed communication, the optimizer's phase may be 0 seconds, which would divide by zero
    rate = updated_bytes / ((phases[Phase.OPTIMIZER] + phases[Phase.CPU_OPTIMIZER]) or 1e-9)
    is_off = plan.optimizer_on != "device"
    device = find_named_device(rank.machine.device.name) if rank.machine.device is not None else None
    paths = {t.path: t.bytes_per_second for t in rank.memory.transfers if t.bytes_per_second}
    disk = [paths[path] for path in ("disk_read", "disk_write") if path in paths]
    sheet = MEMORY.likely * device.memory if device is not None else None
    lengths = sorted(step.seconds for step in timed)
    median_seconds = median(lengths)
    # A rank waits for late ranks within its exposed time: without min(), the parts exceed the step
    late = min(busy[-1][0] - busy_time, fmean(map(_exposed_step_seconds, steps)))
    speeds = Speeds(
        waiting_seconds=late,
        forward_seconds=max(0.0, phases[Phase.FORWARD] - copied[0] / rate) / plan.accumulation,
        backward_seconds=max(0.0, phases[Phase.BACKWARD] - copied[1] / rate) / plan.accumulation,
        other_seconds=phases[Phase.DATA_WAIT] + phases[Phase.OTHER],
        **_measured_link_bandwidths(ranks, on_cpu=on_cpu),
        update=rate if on_cpu or not is_off else sheet,
        host_update=rate if on_cpu or is_off else None,
        pcie=rate if on_cpu else paths.get("device_to_host"),
        nvme=min(disk) if disk else None,
        hides=Hides.THREADS if on_cpu else Hides.STREAMS,
    )
    return RunSpeeds(
        run=run,
        speeds=speeds,
        slow=lengths[int(0.9 * (len(lengths) - 1))] / median_seconds,
        fast=lengths[int(0.1 * (len(lengths) - 1))] / median_seconds,
        hosts=hosts,
        late_seconds=late,
        kind=_kind_of_plan(plan),
    )


def _kind_of_plan(plan: ShardPlan) -> tuple[str, bool]:
    return plan.framework, plan.framework == "deepspeed" and plan.stage == ZeroStage.PARAMETERS


def _last_timed_steps(rank: RankSnapshot) -> list[StepSummary]:
    recent = rank.steps.recent[-_LAST_STEPS:]
    return [step for step in settled_steps(recent) if step.timed and step.phase_exposed_ns]


def _busy_time(rank: RankSnapshot) -> float:
    """Returns the mean seconds of a step that *rank* does not wait for communication; 0 if unknown."""
    steps = _steps_near_median(_last_timed_steps(rank))
    return fmean(step.seconds - _exposed_step_seconds(step) for step in steps) if steps else 0.0


def _exposed_step_seconds(step: StepSummary) -> float:
    return sum(step.phase_exposed_ns) / 1e9


_LINKS = ("gather", "reduce", "all_reduce", "between", "within")


def _steps_near_median(steps: Sequence[StepSummary]) -> list[StepSummary]:
    """Returns the half of *steps* whose length is nearest the median.

    The means of their phases add up to a step; the medians of all phases fall short of one.
    """
    ordered = sorted(steps, key=lambda step: step.seconds)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def _mean_phase_seconds(steps: Sequence[StepSummary], phase: Phase) -> float:
    """Returns the mean seconds of *phase* in a step, without exposed communication."""
    # Records of an earlier version lack the later phases
    seconds = [
        max(0, step.phase_ns[phase] - step.phase_exposed_ns[phase]) / 1e9
        for step in steps
        if min(len(step.phase_ns), len(step.phase_exposed_ns)) > phase
    ]
    return fmean(seconds) if seconds else 0.0


def _measured_link_bandwidths(ranks: Sequence[RankSnapshot], *, on_cpu: bool) -> dict[str, Any]:
    """Returns the bus bandwidth of gathers, reduce-scatters and all-reduces.

    gloo, which a CPU has, reduces and scatters by an all-reduce (``ProcessGroupGloo.cpp``).
    """
    gather, reduce, summed = (  # on the rank that waits least
        max(filter(None, (_bandwidth_of_op(rank, op) for rank in ranks)), default=None)
        for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)
    )
    if on_cpu:
        summed = summed or (2 * reduce if reduce else gather)
        return {"gather": gather or summed, "reduce": summed and summed / 2, "all_reduce": summed}
    if reduce is None and summed is not None:  # an all-reduce is a reduce-scatter and an all-gather
        split = 2 / summed - 1 / gather if gather else 0.0
        reduce = 1 / split if split > 0 else summed
    return {"gather": gather or summed, "reduce": reduce or gather}


def _bandwidth_of_op(rank: RankSnapshot, op: Op) -> float | None:
    """Returns the bus bandwidth of *op* in bytes/s; None if unknown."""
    nbytes = seconds = 0.0
    for row in rank.communication.traffic:
        if op.name.lower() != row.op or row.group_size < 2 or not row.calls:
            continue
        rate = row.busbw_bytes_per_second
        if not rate or row.nbytes / row.calls < _SMALL_BYTES:
            continue
        moved = row.nbytes * BUS_FACTOR[op](row.group_size)
        nbytes += moved
        seconds += moved / rate
    return nbytes / seconds if seconds > 0 else None


# ---- words ----------------------------------------------------------------------------------------


def speed_sources(m: Machine, measured: RunSpeeds | None, plan: ShardPlan) -> list[str]:
    """Returns where the speeds come from, one sentence each."""
    if measured is not None:
        return [f"compute, links and optimizer as run {measured.run} measured them"]
    phrases: list[str] = []
    if m.device is not None:
        peak = m.device.flops(plan.precision.compute_bytes)
        phrases.append(f"compute: {_share_text(m.compute)} of {human_count(peak / 1e12)} TFLOP/s")
    if m.link is not None and plan.ranks > 1:
        phrases.append(f"links: {_share_text(LINK)} of {human_rate(m.link)}")
    host = human_rate(m.host or HOST.likely)
    phrases.append(f"optimizer on the host: {host} of memory a host")
    return phrases


def _share_text(reached: Reached) -> str:
    """``45 % (30 to 60 %)``; ``45 %`` where it is given."""
    likely, lowest, highest = (
        f"{100 * ratio:.0f}" for ratio in (reached.likely, reached.least, reached.most)
    )
    return f"{likely} %" + ("" if lowest == highest else f" ({lowest} to {highest} %)")
