"""Predicts the seconds of a training step: compute, communication, offload, optimizer. Pure.

A step is the sum of its parts; communication counts with what compute does not hide, as the schedule
has it (:func:`exposed_by_unit`). Forward takes 2 FLOPs a parameter and token, and the scores of
attention; backward twice as many (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Checkpointing
repeats forward: a third more (Korthikanti et al. 2022, arXiv 2205.05198, section 5). Bytes on a link are
those of ring collectives (Rajbhandari et al. 2020, arXiv 1910.02054, section 7). Copies into and out of
the buffers of collectives are added at the speed of the optimizer's updates.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum

from zeromon.memory.predict import Batch, kept_for_backward, on_host_share, state_bytes
from zeromon.memory.sent import INT4_BYTES, gathered_itemsize, grad_exchange
from zeromon.memory.spec import ROOT, ModelSpec, ShardPlan, Sizes, ZeroStage

UNITS = 32
"""Assumed number of units of a model whose layers are unknown: those of a model of 7 B."""

_MAX_BUCKETS = 256
"""Max buckets: of more, several are taken as one, with the latency of each."""

_FIRST_BUCKET_BYTES = 1 << 20
"""Size of DDP's first bucket (``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``)."""


class Hides(IntEnum):
    """The mechanism that communicates beside compute."""

    NOTHING = 0
    THREADS = 1
    """On a CPU: DDP's reducer, and the units that a script has FSDP2 gather ahead."""
    STREAMS = 2


@dataclass(frozen=True, slots=True)
class Rates:
    """The seconds of a micro-step's compute, and the speeds of the links, bytes/s."""

    forward: float
    backward: float
    """With what checkpointing computes again."""
    gather: float
    reduce: float
    between: float
    """Between the copies of hybrid sharding."""
    latency: float
    hides: Hides
    within: float = 0.0
    """Between the ranks of a host; 0: as *gather*."""
    all_reduce: float = 0.0
    """0: an all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Parameters that are gathered together."""

    name: str
    numel: float
    weight: float
    """Its share of the compute."""


@dataclass(slots=True)
class Timeline:
    """Compute and link, seconds since the micro-step began."""

    now: float = 0.0
    link: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def issue_collective(self, seconds: float) -> float:
        """Issues a collective, and returns when it will have ended."""
        self.link = max(self.now, self.link) + seconds
        return self.link

    def wait_until(self, end_time: float, name: str) -> None:
        """Compute waits for a collective that ends at *end_time*."""
        if end_time > self.now:
            self.exposed[name] += end_time - self.now
            self.now = end_time


def gather_pieces(sizes: Sizes, plan: ShardPlan) -> tuple[Piece, ...]:
    """Returns what is gathered together, in the order of forward; the root first."""
    if sizes.named_units and plan.framework.startswith("fsdp"):
        total_numel = sum(numel for _, numel in sizes.named_units)
        return tuple(Piece(name, numel, numel / total_numel) for name, numel in sizes.named_units)
    unit_numel = sizes.layer_numel or next(iter(sizes.unit_numels), 0) or sizes.numel / UNITS
    root = min(sizes.root_numel, sizes.numel) if plan.framework.startswith("fsdp") else 0
    layers_numel = sizes.numel - root
    count = max(1, math.ceil(layers_numel / max(1, unit_numel))) if layers_numel else 0
    units = [Piece(ROOT, root, root / sizes.numel)] if root else []
    sized = layers_numel / max(1, count)
    units += [Piece(f"unit {n}", sized, sized / sizes.numel) for n in range(count)]
    return tuple(units)


def exposed_by_unit(sizes: Sizes, plan: ShardPlan, r: Rates) -> dict[str, float]:
    """Returns the seconds of a step in which compute waits for communication, by unit or bucket."""
    waits: dict[str, float] = defaultdict(float)
    if plan.ranks == 1:
        return waits
    final_step = _run_micro_step(sizes, plan, r, reduces=True)
    other_count, other_step = plan.accumulation - 1, final_step
    if other_count and not (plan.reduces_each_micro_step and not plan.secondary_ranks):
        # With hpZ only the first micro-step after an update gathers over all ranks
        other_step = _run_micro_step(sizes, plan, r, reduces=plan.reduces_each_micro_step, again=True)
    for times, of in ((1, final_step), (other_count, other_step)):
        for name, seconds in of.items():
            waits[name] += times * seconds
    after_bytes = _bytes_gathered_after(sizes, plan)
    if after_bytes:
        waits[AFTER] += after_bytes / r.gather + r.latency
    return {name: seconds for name, seconds in waits.items() if seconds > 0}


AFTER = "(after the step)"
"""The updated parameters, which stages 1 and 2 gather when the optimizer has ended."""


def _run_micro_step(
    sizes: Sizes, plan: ShardPlan, r: Rates, *, reduces: bool, again: bool = False
) -> dict[str, float]:
    t = Timeline()
    units = gather_pieces(sizes, plan)
    gathers = plan.stage == ZeroStage.PARAMETERS or plan.framework.startswith("fsdp")
    if gathers:
        _run_gathered_forward(t, units, sizes, plan, r, again=again)
    else:
        t.now = r.forward
    reducer = _Reducer(t, sizes, plan, r) if reduces else None
    regathered: tuple[Piece, ...] = ()
    if gathers and plan.reshards and plan.stage == ZeroStage.PARAMETERS:
        kept_numel: float = kept_for_backward(sizes, plan)
        # Backward gathers again all units but those that are kept: the last of forward
        order = list(units)
        while order and order[-1].numel <= kept_numel:
            kept_numel -= order.pop().numel
        regathered = tuple(order)
    _run_backward(t, units, sizes, plan, r, reducer, regathered)
    if reducer is not None:
        reducer.finish_buckets()
    return t.exposed


# ---- gathers --------------------------------------------------------------------------------------


def _unit_gather_seconds(
    unit: Piece, sizes: Sizes, plan: ShardPlan, r: Rates, *, again: bool = False
) -> float:
    """Returns the seconds of a unit's gather; *again*: from the second copy of hpZ, if there is one."""
    n, rate = plan.shard_ranks, r.gather
    if again and plan.secondary_ranks:
        n, rate = plan.secondary_ranks, r.within or r.gather
    nbytes = unit.numel * (1 - sizes.persistent_numel / sizes.numel) * gathered_itemsize(plan)
    return nbytes * (n - 1) / n / rate + r.latency


def _units_ahead(units: tuple[Piece, ...], plan: ShardPlan, r: Rates) -> int:
    """Returns how many units are gathered while another computes."""
    is_zero = plan.framework == "deepspeed"
    if r.hides == Hides.NOTHING or (is_zero and r.hides == Hides.THREADS):
        return 0
    if is_zero:
        return math.ceil(plan.prefetch_numel / max(unit.numel for unit in units))
    if plan.prefetch_units is not None:
        return plan.prefetch_units
    return 1 if r.hides == Hides.STREAMS else 0


class _Gathers:
    """The gathers of a pass over the units."""

    def __init__(
        self,
        t: Timeline,
        order: tuple[Piece, ...],
        sizes: Sizes,
        plan: ShardPlan,
        r: Rates,
        *,
        again: bool = False,
    ) -> None:
        self._t, self._order = t, order
        self._seconds = [_unit_gather_seconds(unit, sizes, plan, r, again=again) for unit in order]
        self._ahead = _units_ahead(order, plan, r) if order else 0
        self._ends: list[float] = []

    def wait_for_unit(self, index: int) -> None:
        """Waits for the unit *index*, and asks for those after it."""
        self._issue_gathers(index)
        self._t.wait_until(self._ends[index], self._order[index].name)
        self._issue_gathers(min(index + self._ahead, len(self._order) - 1))

    def ask_ahead(self) -> None:
        """Asks for what is gathered while something before the first unit computes."""
        self._issue_gathers(min(self._ahead, len(self._order)) - 1)

    def _issue_gathers(self, index: int) -> None:
        while len(self._ends) <= index:
            self._ends.append(self._t.issue_collective(self._seconds[len(self._ends)]))


def _run_gathered_forward(
    t: Timeline, units: tuple[Piece, ...], sizes: Sizes, plan: ShardPlan, r: Rates, *, again: bool
) -> None:
    """The root is gathered first, and computes its output layer last."""
    gathers = _Gathers(t, units, sizes, plan, r, again=again)
    for index, unit in enumerate(units):
        gathers.wait_for_unit(index)
        t.now += 0.0 if unit.name == ROOT else unit.weight * r.forward
    t.now += sum(unit.weight for unit in units if unit.name == ROOT) * r.forward


def _run_backward(
    t: Timeline,
    units: tuple[Piece, ...],
    sizes: Sizes,
    plan: ShardPlan,
    r: Rates,
    reducer: "_Reducer | None",
    regathered: tuple[Piece, ...],
) -> None:
    """From the last unit to the first; the root is still gathered, and its gradients end last.

    *regathered*: the units that forward has freed; backward gathers them again.
    """
    layers = tuple(unit for unit in reversed(units) if unit.name != ROOT)
    roots = [unit for unit in units if unit.name == ROOT]
    names = {unit.name for unit in regathered}
    freed = {unit.name: unit for unit in layers if unit.name in names}
    gathers = _Gathers(t, tuple(freed.values()), sizes, plan, r, again=True)
    if freed and roots:
        gathers.ask_ahead()
    t.now += sum(unit.weight for unit in roots) * r.backward
    order = {name: index for index, name in enumerate(freed)}
    for unit in layers:
        if unit.name in order:
            gathers.wait_for_unit(order[unit.name])
        if reducer is None:
            t.now += unit.weight * r.backward
        else:
            reducer.compute_unit(unit, unit.weight * r.backward)
    for unit in roots:
        if reducer is not None:
            reducer.compute_unit(unit, 0.0)


# ---- reductions -----------------------------------------------------------------------------------


class _Reducer:
    """The gradients of a backward, reduced by units or by buckets as they are complete."""

    def __init__(self, t: Timeline, sizes: Sizes, plan: ShardPlan, r: Rates) -> None:
        self._t, self._plan, self._r = t, plan, r
        self._trained = sizes.trainable / sizes.numel
        self._by_units = plan.framework.startswith("fsdp")
        self._least = sizes.trainable / _MAX_BUCKETS
        self._calls = 1.0
        """Buckets that are taken as one, because there are very many."""
        if not self._by_units:
            bucket_numel = plan.grad_bucket_numel or sizes.trainable
            if plan.framework == "ddp":
                bucket_numel = round(plan.bucket_cap_bytes / plan.precision.sent_grad_bytes)
            self._calls = max(1.0, self._least / max(1, bucket_numel))
            if plan.framework == "deepspeed" and not plan.reduces_whole_buckets and sizes.trainable:
                # One call for each rank whose part a bucket has
                self._calls += bucket_numel * plan.shard_ranks / sizes.trainable
        self._buckets = self._bucket_sizes(sizes)
        self._left = next(self._buckets)
        self._filled = 0.0
        self._number = 0
        self._ends: list[float] = []
        self._last = ""
        self._waits = not _reduces_beside_compute(plan, r.hides)
        # DDP's reducer queues all buckets; FSDP and DeepSpeed keep one reduction in flight
        self._queues_all = plan.framework == "ddp"

    def _bucket_sizes(self, sizes: Sizes) -> Iterator[float]:
        """Yields the elements of each bucket."""
        plan = self._plan
        if plan.framework == "ddp":
            itemsize = plan.precision.sent_grad_bytes
            yield min(_FIRST_BUCKET_BYTES, plan.bucket_cap_bytes) / itemsize
            while True:
                yield max(plan.bucket_cap_bytes / itemsize, self._least)
        while True:
            yield max(float(plan.grad_bucket_numel or sizes.trainable), self._least)

    def compute_unit(self, unit: Piece, seconds: float) -> None:
        """Computes the gradients of a unit, and reduces the buckets that they fill."""
        numel = unit.numel * self._trained
        if self._by_units:
            self._t.now += seconds
            self._reduce_bucket(numel, unit.name)
            return
        done = 0.0
        # Without > 0, a bucket of no elements is full at once, and the loop has no end
        while numel - done >= self._left > 0:
            self._t.now += seconds * self._left / max(numel, 1)
            done += self._left
            self._reduce_bucket(self._filled + self._left, f"bucket {self._number}")
            self._filled, self._left = 0.0, next(self._buckets)
        self._t.now += seconds * (numel - done) / max(numel, 1) if numel else seconds
        self._filled += numel - done
        self._left -= numel - done

    def finish_buckets(self) -> None:
        """Reduces the last bucket, and waits for all."""
        # Rounding leaves a fraction of an element, which would cost the latency of a bucket
        if self._filled > 0.5 and not self._by_units:
            self._reduce_bucket(self._filled, f"bucket {self._number}")
        if self._ends:
            self._t.wait_until(self._ends[-1], self._last)

    def _reduce_bucket(self, numel: float, name: str) -> None:
        """Reduces *numel* gradients; a second reduction waits for the one before the last."""
        if self._ends and not self._queues_all:
            self._t.wait_until(self._ends[-1], self._last)
        seconds = _reduce_seconds(numel, self._plan, self._r)
        seconds += (self._calls - 1) * self._r.latency
        self._ends.append(self._t.issue_collective(seconds))
        self._last = name
        self._number += 1
        if self._waits:
            self._t.wait_until(self._ends[-1], name)


def _reduces_beside_compute(plan: ShardPlan, hides: Hides) -> bool:
    if plan.framework == "ddp":
        return hides >= Hides.THREADS
    if plan.framework == "deepspeed" and plan.stage < ZeroStage.PARAMETERS and plan.grad_buckets < 2:
        return False  # overlap_comm is off
    return hides == Hides.STREAMS


def _reduce_seconds(numel: float, plan: ShardPlan, r: Rates) -> float:
    """Returns the seconds of the reduction of *numel* gradients, between copies of the model, too.

    An all-reduce is a reduce-scatter and an all-gather; see :func:`sent.sent_step_bytes`.
    """
    n = plan.shard_ranks if plan.stage else plan.ranks
    if (exchange := grad_exchange(plan)) is not None:
        within, between = (numel * INT4_BYTES * share for share in exchange)
        # All ranks of a host send at the same time, over its one network
        between *= plan.host_ranks
        return within / (r.within or r.reduce) + between / r.reduce + 2 * r.latency
    nbytes = numel * plan.precision.sent_grad_bytes
    is_all_reduce = plan.stage == ZeroStage.NONE or (
        plan.stage < ZeroStage.PARAMETERS
        and plan.framework in ("deepspeed", "ddp")
        and plan.reduces_whole_buckets
    )
    rate = 1 / r.reduce
    if is_all_reduce:
        rate = 2 / r.all_reduce if r.all_reduce else rate + 1 / r.gather
    seconds = nbytes * (n - 1) / n * rate + r.latency
    copies = plan.ranks // n
    if copies > 1:
        seconds += 2 * nbytes / n * (copies - 1) / copies / r.between + r.latency
    return seconds


def _bytes_gathered_after(sizes: Sizes, plan: ShardPlan) -> float:
    """Returns the bytes that a rank gets of updated parameters, after the step."""
    if plan.framework not in ("deepspeed", "ddp") or plan.stage == ZeroStage.NONE:
        return 0.0
    share = (plan.shard_ranks - 1) / plan.shard_ranks * plan.precision.compute_bytes
    is_3 = plan.stage == ZeroStage.PARAMETERS
    return (sizes.persistent_numel if is_3 else sizes.trainable) * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How fast a rank does each thing, in seconds of a micro-step or bytes/s; None where unknown."""

    forward_seconds: float | None
    backward_seconds: float | None
    recompute_seconds: float = 0.0
    """Seconds of a micro-step: the second forward of activation checkpointing."""
    other_seconds: float = 0.0
    """Seconds of a step: the wait for data, and what belongs to no phase."""
    gather: float | None = None
    """Bus bandwidth of an all-gather."""
    reduce: float | None = None
    """Bus bandwidth of a reduce-scatter."""
    all_reduce: float | None = None
    """Bus bandwidth of an all-reduce; None: it is both, one after the other."""
    between: float | None = None
    """Bus bandwidth between the copies of hybrid sharding; None: the same."""
    within: float | None = None
    """Bus bandwidth between the ranks of a host; None: the same."""
    latency: float = 0.0
    """Seconds of a collective besides its bytes."""
    update: float | None = None
    """By which the optimizer reads and writes on the device."""
    host_update: float | None = None
    """Bytes/s by which the optimizer reads and writes on the host, the share of one rank."""
    pcie: float | None = None
    nvme: float | None = None
    """The share of one rank."""
    hides: Hides = Hides.STREAMS
    waiting_seconds: float = 0.0
    """Seconds of a step: for late ranks, and what else a run's collectives took beyond their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The seconds of a step by what they are spent on; they add up to the step."""

    compute: float
    recompute: float
    communication: float
    """Exposed: what compute does not hide."""
    copies: float
    """Into and out of the buffers of collectives."""
    offload: float
    """Between device, host and NVMe, exposed."""
    optimizer: float
    other: float
    waiting: float = 0.0
    """For late ranks."""

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step: its likely parts, and the interval of its seconds."""

    parts: Parts
    least: float
    most: float
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Likely seconds of exposed communication by unit or bucket."""

    @property
    def seconds(self) -> float:
        """Seconds of a step, likely."""
        return self.parts.total


def forward_pass_flops(model: ModelSpec, batch: Batch) -> tuple[float, float]:
    """Returns the FLOPs of a forward of a micro-batch: of all, and of what checkpointing repeats.

    2 a weight and token: the matrices of a transformer count once, experts as far as a token uses
    them, an embedding not at all, as it looks up. The scores take 4 s h a token and layer. Where the
    layers are unknown, every parameter is a weight, and all of forward is repeated.
    """
    tokens = batch.sequences * batch.length
    t = model.architecture
    if t is None:
        return (2.0 * model.params * tokens,) * 2
    matrices = t.hidden * (2 * t.attention_width + 2 * t.kv_width + (3 if t.gated else 2) * t.ffn)
    layers = token_flops(t.layers * matrices, t.layers * t.attention_width, batch.length)
    return (layers + 2.0 * t.hidden * t.vocab) * tokens, layers * tokens


def token_flops(weights: float, attention: float, length: float) -> float:
    """Returns the FLOPs of a token's forward: 2 a weight, and 4 s h a layer for the scores.

    *attention*: layers times the width of the queries. The scores count in full, also where a mask
    makes half of them superfluous (Chowdhery et al. 2022, arXiv 2204.02311, appendix B; Kaplan et al.
    2020, arXiv 2001.08361, section 2.1).
    """
    return 2.0 * weights + 4.0 * attention * length


def training_flops(weights: float, trained: float, attention: float, length: float) -> float:
    """Returns the FLOPs that a token's training needs; what checkpointing repeats does not count.

    Backward computes the gradients of what a layer got, and those of its *trained* weights: 6 a
    weight and 12 s h a layer in all where every weight is trained.
    """
    return 3.0 * token_flops(0, attention, length) + 4.0 * weights + 2.0 * trained


def step_time(sizes: Sizes, plan: ShardPlan, speeds: tuple[Speeds, Speeds, Speeds]) -> StepTime | str:
    """Returns the time of a step at the likely, least and most speeds, or what is not known."""
    unknown = missing_speed(plan, speeds[0])
    if unknown:
        return unknown
    waits = [exposed_by_unit(sizes, plan, schedule_rates(speed)) for speed in speeds]
    by_speed = [parts_of_step(sizes, plan, s, wait) for s, wait in zip(speeds, waits, strict=True)]
    totals = [breakdown.total for breakdown in by_speed]
    return StepTime(parts=by_speed[0], least=min(totals), most=max(totals), exposed=waits[0])


def missing_speed(plan: ShardPlan, s: Speeds) -> str:
    """Returns the first speed that *plan* needs and that is unknown, in words; "" for none."""
    sends, moves = plan.ranks > 1, plan.optimizer_on != "device"
    on_nvme = "nvme" in (plan.optimizer_on, plan.params_on)
    compute = "--micro-batch" if s.update else "--micro-batch and a named device (--gpu)"
    needed = (
        (True, s.forward_seconds, compute),
        (sends, s.gather and s.reduce, "the speed of the links: --interconnect"),
        (not moves, s.update, "the bandwidth of the device's memory"),
        (moves, s.host_update, "the speed of the host: --host-bandwidth"),
        (moves or plan.params_on != "device", s.pcie, "the speed between device and host: --pcie"),
        (on_nvme, s.nvme, "the speed of NVMe: --nvme-bandwidth"),
    )
    return next((wording for needs, speed, wording in needed if needs and not speed), "")


def parts_of_step(sizes: Sizes, plan: ShardPlan, s: Speeds, exposed: Mapping[str, float]) -> Parts:
    """Returns the seconds of a step at the speeds *s*, which are known; *exposed*: of the schedule."""
    micro = plan.accumulation
    forward = (s.forward_seconds or 0.0) * micro
    backward = (s.backward_seconds or 0.0) * micro
    moved = _offload_copy_seconds(sizes, plan, s)
    hidden = forward + backward if s.hides == Hides.STREAMS else 0.0
    return Parts(
        compute=forward + backward,
        recompute=s.recompute_seconds * micro,
        communication=sum(exposed.values()),
        copies=sum(copied_bytes(sizes, plan)) / (s.update or s.host_update or math.inf),
        offload=max(0.0, moved[0] - hidden) + moved[1],
        optimizer=_optimizer_update_seconds(sizes, plan, s),
        other=s.other_seconds,
        waiting=s.waiting_seconds if plan.ranks > 1 else 0.0,
    )


def schedule_rates(s: Speeds) -> Rates:
    """Returns what the schedule of a micro-step needs of the speeds *s*."""
    # Only a plan of one rank comes here without links, as missing_speed() refuses the others
    gather, reduce = s.gather or math.inf, s.reduce or math.inf
    return Rates(
        forward=s.forward_seconds or 0.0,
        backward=(s.backward_seconds or 0.0) + s.recompute_seconds,
        gather=gather,
        reduce=reduce,
        between=s.between or min(gather, reduce),
        latency=s.latency,
        hides=s.hides,
        within=s.within or 0.0,
        all_reduce=s.all_reduce or 0.0,
    )


# ---- copies ---------------------------------------------------------------------------------------


def copied_bytes(sizes: Sizes, plan: ShardPlan) -> tuple[float, float]:
    """Returns the bytes that a step reads and writes to fill and empty buffers: forward, backward.

    A copy of N bytes reads N and writes N. Both FSDP2 (``_fsdp_collectives.py``: all_gather_copy_in,
    split_with_sizes_copy, chunk_cat) and DeepSpeed's stage 3 (``partition_parameters.py``: the copy of
    the own partition, torch.cat of all) copy a shard in and all parameters out. Gradients are copied
    once by FSDP2 and stages 1 and 2 (the bucket), twice by stage 3 (also ``reduce_scatter_coalesced``);
    DDP and stage 0 copy them into buckets and back. FSDP1's parameters are views of what is gathered.
    """
    if plan.ranks == 1:
        return 0.0, 0.0
    is_3 = plan.stage == ZeroStage.PARAMETERS
    once = 2 * sizes.trainable * plan.precision.sent_grad_bytes
    if plan.stage == ZeroStage.NONE:
        return 0.0, 0.0 if plan.bucket_views else 2 * once
    reduced = once * plan.accumulation * (2 if is_3 and plan.framework == "deepspeed" else 1)
    if plan.framework == "fsdp1" or (plan.framework == "deepspeed" and not is_3):
        return 0.0, reduced
    full_bytes = (sizes.numel - sizes.persistent_numel) * plan.precision.compute_bytes
    gathered = 2 * full_bytes * (1 + 1 / plan.shard_ranks) * plan.accumulation
    return gathered, reduced + gathered * plan.reshards


# ---- optimizer and offload ------------------------------------------------------------------------


def update_bytes(plan: ShardPlan) -> float:
    """Returns the bytes that the optimizer reads and writes for a parameter: 28 for Adam.

    It reads the gradient, and reads and writes the states and what it updates; a master is written
    into the low-precision parameter, too.
    """
    p = plan.precision
    updated = 4 if p.has_master else p.param_bytes
    copied = p.param_bytes if p.has_master else 0
    return 2 * state_bytes(plan.optimizer, plan) + 2 * updated + p.grad_bytes + copied


def _optimizer_update_seconds(sizes: Sizes, plan: ShardPlan, s: Speeds) -> float:
    """Returns the seconds of the optimizer, on the device and on the host, one after the other."""
    nbytes = sizes.trainable / (plan.shard_ranks if plan.stage else 1) * update_bytes(plan)
    moved = on_host_share(sizes, plan)
    on_host = nbytes * moved / (s.host_update or math.inf)
    return on_host + nbytes * (1 - moved) / (s.update or math.inf)


def _offload_copy_seconds(sizes: Sizes, plan: ShardPlan, s: Speeds) -> tuple[float, float]:
    """Returns the seconds of copies beside forward and backward, and of those around the optimizer.

    Gradients leave the device once a micro-step, updated parameters cross once a step, unless optimizer
    and parameters are in one place. Offloaded parameters come for forward and for backward. NVMe reads
    and writes the states of the optimizer and the fp32 gradients once a step, the parameters as often
    as they are used (Rajbhandari et al. 2021, arXiv 2104.07857, section 5).
    """
    p, micro = plan.precision, plan.accumulation
    shard, share = sizes.trainable / plan.shard_ranks, on_host_share(sizes, plan)
    pcie, nvme = s.pcie or math.inf, s.nvme or math.inf
    overlapped = shard * p.grad_bytes * micro * share / pcie
    moved = share if plan.params_on == "device" else 1 - share
    at_step = shard * p.param_bytes * moved / pcie
    if plan.params_on != "device":
        param_bytes = sizes.numel / plan.shard_ranks * p.compute_bytes * 2 * micro
        overlapped += param_bytes / pcie
        if plan.params_on == "nvme":
            overlapped += param_bytes / nvme
            at_step += shard * p.param_bytes / nvme
    if plan.optimizer_on == "nvme":
        states = state_bytes(plan.optimizer, plan) + 4 * p.has_master
        at_step += shard * share * (2 * states + 2 * 4) / nvme
    return overlapped, at_step
