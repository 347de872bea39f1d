"""One step as a schedule: compute on one stream, collectives on a link, and what waits for what. Pure.

The engine behind every predicted step. Each framework issues its collectives at other moments, and these
moments decide what compute hides:

- FSDP2 gathers a unit ahead (``_fsdp_param_group.py``: the next gather starts when this one
  has ended), gathers again in backward, and lets a reduction wait for the one before it.
- DeepSpeed's stage 3 gathers ``stage3_prefetch_bucket_size`` elements ahead, and reduces by buckets.
- DDP and DeepSpeed's stages 0 to 2 reduce buckets of gradients, from the last layer to the first; stages
  1 and 2 do so beside backward with ``overlap_comm`` alone, and gather the parameters after the step.

A link carries one collective at a time, in the order of issue. Micro-steps do not overlap, because each
framework waits for its reductions at the end of a backward.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from zeromon.memory.spec import ROOT, ShardPlan, Sizes, ZeroStage

UNITS = 32
"""Assumed number of units of a model whose layers are unknown: those of a model of 7 B."""

_MOST_BUCKETS = 256
"""Of more, several are taken as one, with the latency of each."""

_FIRST_BUCKET_BYTES = 1 << 20
"""Of DDP (``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``)."""


class Hides(IntEnum):
    """What communicates beside compute."""

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

    def send(self, seconds: float) -> float:
        """Issues a collective, and returns when it will have ended."""
        self.link = max(self.now, self.link) + seconds
        return self.link

    def wait(self, end: float, name: str) -> None:
        """Compute waits for a collective that ends at *end*."""
        if end > self.now:
            self.exposed[name] += end - self.now
            self.now = end


def pieces(sizes: Sizes, plan: ShardPlan) -> tuple[Piece, ...]:
    """Returns what is gathered together, in the order of forward; the root first."""
    if sizes.named_units and plan.framework.startswith("fsdp"):
        whole = sum(numel for _, numel in sizes.named_units)
        return tuple(Piece(name, numel, numel / whole) for name, numel in sizes.named_units)
    each = sizes.layer_numel or next(iter(sizes.unit_numels), 0) or sizes.numel / UNITS
    root = min(sizes.root_numel, sizes.numel) if plan.framework.startswith("fsdp") else 0
    rest = sizes.numel - root
    count = max(1, math.ceil(rest / max(1, each))) if rest else 0
    found = [Piece(ROOT, root, root / sizes.numel)] if root else []
    sized = rest / max(1, count)
    found += [Piece(f"unit {n}", sized, sized / sizes.numel) for n in range(count)]
    return tuple(found)


def exposed(sizes: Sizes, plan: ShardPlan, r: Rates) -> dict[str, float]:
    """Returns the seconds of a step in which compute waits for communication, by unit or bucket."""
    found: dict[str, float] = defaultdict(float)
    if plan.ranks == 1:
        return found
    last = _micro_step(sizes, plan, r, reduces=True)
    others = plan.accumulation - 1
    if others and not plan.reduces_each_micro_step:
        other = _micro_step(sizes, plan, r, reduces=False)
    else:
        other = last
    for times, of in ((1, last), (others, other)):
        for name, seconds in of.items():
            found[name] += times * seconds
    after = _gathered_after(sizes, plan)
    if after:
        found[AFTER] += after / r.gather + r.latency
    return {name: seconds for name, seconds in found.items() if seconds > 0}


AFTER = "(after the step)"
"""The updated parameters, which stages 1 and 2 gather when the optimizer has ended."""


def _micro_step(sizes: Sizes, plan: ShardPlan, r: Rates, *, reduces: bool) -> dict[str, float]:
    t = Timeline()
    units = pieces(sizes, plan)
    gathers = plan.stage == ZeroStage.PARAMETERS or plan.framework.startswith("fsdp")
    if gathers:
        _gathered_forward(t, units, sizes, plan, r)
    else:
        t.now = r.forward
    reducer = _Reducer(t, sizes, plan, r) if reduces else None
    again = gathers and plan.reshards and plan.stage == ZeroStage.PARAMETERS
    _backward(t, units, sizes, plan, r, reducer, again=again)
    if reducer is not None:
        reducer.end()
    return t.exposed


# ---- gathers --------------------------------------------------------------------------------------


def _gather_seconds(piece: Piece, sizes: Sizes, plan: ShardPlan, r: Rates) -> float:
    n = plan.shard_ranks
    nbytes = piece.numel * (1 - sizes.persistent_numel / sizes.numel) * plan.precision.compute_bytes
    return nbytes * (n - 1) / n / r.gather + r.latency


def _ahead(units: tuple[Piece, ...], plan: ShardPlan, r: Rates) -> int:
    """Returns how many units are gathered while another computes."""
    if r.hides == Hides.NOTHING:
        return 0
    if plan.framework == "deepspeed" and r.hides == Hides.THREADS:
        return 0
    if plan.framework == "deepspeed":
        each = max(piece.numel for piece in units)
        return math.ceil(plan.prefetch_numel / each)
    if plan.prefetch_units is not None:
        return plan.prefetch_units
    return 1 if r.hides == Hides.STREAMS else 0


class _Gathers:
    """The gathers of a pass over the units."""

    def __init__(
        self, t: Timeline, order: tuple[Piece, ...], sizes: Sizes, plan: ShardPlan, r: Rates
    ) -> None:
        self._t, self._order = t, order
        self._seconds = [_gather_seconds(piece, sizes, plan, r) for piece in order]
        self._ahead = _ahead(order, plan, r) if order else 0
        self._ends: list[float] = []

    def take(self, index: int) -> None:
        """Waits for the unit *index*, and asks for those after it."""
        self._ask(index)
        self._t.wait(self._ends[index], self._order[index].name)
        self._ask(min(index + self._ahead, len(self._order) - 1))

    def ask_ahead(self) -> None:
        """Asks for what is gathered while something before the first unit computes."""
        self._ask(min(self._ahead, len(self._order)) - 1)

    def _ask(self, last: int) -> None:
        while len(self._ends) <= last:
            self._ends.append(self._t.send(self._seconds[len(self._ends)]))


def _gathered_forward(
    t: Timeline, units: tuple[Piece, ...], sizes: Sizes, plan: ShardPlan, r: Rates
) -> None:
    """The root is gathered first, and computes its output layer last."""
    gathers = _Gathers(t, units, sizes, plan, r)
    for index, piece in enumerate(units):
        gathers.take(index)
        t.now += 0.0 if piece.name == ROOT else piece.weight * r.forward
    t.now += sum(piece.weight for piece in units if piece.name == ROOT) * r.forward


def _backward(
    t: Timeline,
    units: tuple[Piece, ...],
    sizes: Sizes,
    plan: ShardPlan,
    r: Rates,
    reducer: _Reducer | None,
    *,
    again: bool,
) -> None:
    """From the last unit to the first; the root is still gathered, and its gradients end last."""
    layers = tuple(piece for piece in reversed(units) if piece.name != ROOT)
    roots = [piece for piece in units if piece.name == ROOT]
    gathers = _Gathers(t, layers, sizes, plan, r) if again else None
    if gathers is not None and roots:
        gathers.ask_ahead()
    t.now += sum(piece.weight for piece in roots) * r.backward
    for index, piece in enumerate(layers):
        if gathers is not None:
            gathers.take(index)
        if reducer is None:
            t.now += piece.weight * r.backward
        else:
            reducer.compute(piece, piece.weight * r.backward)
    for piece in roots:
        if reducer is not None:
            reducer.compute(piece, 0.0)


# ---- reductions -----------------------------------------------------------------------------------


class _Reducer:
    """The gradients of a backward, reduced by units or by buckets as they are complete."""

    def __init__(self, t: Timeline, sizes: Sizes, plan: ShardPlan, r: Rates) -> None:
        self._t, self._plan, self._r = t, plan, r
        self._trained = sizes.trainable / sizes.numel
        self._by_units = plan.framework.startswith("fsdp")
        self._least = sizes.trainable / _MOST_BUCKETS
        self._calls = 1.0
        """Buckets that are taken as one, because there are very many."""
        if not self._by_units:
            own = plan.grad_bucket_numel or sizes.trainable
            if plan.framework == "ddp":
                own = round(plan.bucket_cap_bytes / plan.precision.sent_grad_bytes)
            self._calls = max(1.0, self._least / max(1, own))
        self._buckets = self._sizes(sizes)
        self._left = next(self._buckets)
        self._filled = 0.0
        self._number = 0
        self._ends: list[float] = []
        self._last = ""
        is_ddp = plan.framework == "ddp"
        self._waits = not _reduces_beside(plan, r.hides)
        self._at_once = None if is_ddp else 1

    def _sizes(self, sizes: Sizes) -> Iterator[float]:
        """Yields the elements of each bucket."""
        plan = self._plan
        if plan.framework == "ddp":
            each = plan.precision.sent_grad_bytes
            yield min(_FIRST_BUCKET_BYTES, plan.bucket_cap_bytes) / each
            while True:
                yield max(plan.bucket_cap_bytes / each, self._least)
        while True:
            yield max(float(plan.grad_bucket_numel or sizes.trainable), self._least)

    def compute(self, piece: Piece, seconds: float) -> None:
        """Computes the gradients of a unit, and reduces the buckets that they fill."""
        numel = piece.numel * self._trained
        if self._by_units:
            self._t.now += seconds
            self._send(numel, piece.name)
            return
        done = 0.0
        while numel - done >= self._left > 0:
            self._t.now += seconds * self._left / max(numel, 1)
            done += self._left
            self._send(self._filled + self._left, f"bucket {self._number}")
            self._filled, self._left = 0.0, next(self._buckets)
        self._t.now += seconds * (numel - done) / max(numel, 1) if numel else seconds
        self._filled += numel - done
        self._left -= numel - done

    def end(self) -> None:
        """Reduces the last bucket, and waits for all."""
        if self._filled > 0.5 and not self._by_units:
            self._send(self._filled, f"bucket {self._number}")
        if self._ends:
            self._t.wait(self._ends[-1], self._last)

    def _send(self, numel: float, name: str) -> None:
        """Reduces *numel* gradients; a second reduction waits for the one before the last."""
        if self._at_once and len(self._ends) >= self._at_once:
            self._t.wait(self._ends[-self._at_once], self._last)
        seconds = _reduce_seconds(numel, self._plan, self._r)
        seconds += (self._calls - 1) * self._r.latency
        self._ends.append(self._t.send(seconds))
        self._last = name
        self._number += 1
        if self._waits:
            self._t.wait(self._ends[-1], name)


def _reduces_beside(plan: ShardPlan, hides: Hides) -> bool:
    if plan.framework == "ddp":
        return hides >= Hides.THREADS
    if (
        plan.framework == "deepspeed"
        and plan.stage < ZeroStage.PARAMETERS
        and plan.grad_buckets < 2
    ):
        return False  # overlap_comm is off
    return hides == Hides.STREAMS


def _reduce_seconds(numel: float, plan: ShardPlan, r: Rates) -> float:
    """Returns the seconds of the reduction of *numel* gradients, between copies of the model, too.

    DeepSpeed's stages 1 and 2 reduce whole buckets (``use_multi_rank_bucket_allreduce``): an all-reduce,
    which is a reduce-scatter and an all-gather, where the paper has a reduce-scatter.
    """
    n = plan.shard_ranks if plan.stage else plan.ranks
    nbytes = numel * plan.precision.sent_grad_bytes
    whole = plan.stage < ZeroStage.PARAMETERS and plan.framework in ("deepspeed", "ddp")
    rate = 1 / r.reduce
    if whole:
        rate = 2 / r.all_reduce if r.all_reduce else rate + 1 / r.gather
    seconds = nbytes * (n - 1) / n * rate + r.latency
    copies = plan.ranks // n
    if copies > 1:
        seconds += 2 * nbytes / n * (copies - 1) / copies / r.between + r.latency
    return seconds


def _gathered_after(sizes: Sizes, plan: ShardPlan) -> float:
    """Returns the bytes that a rank gets of updated parameters, after the step."""
    if plan.framework != "deepspeed" or plan.stage == ZeroStage.NONE:
        return 0.0
    share = (plan.shard_ranks - 1) / plan.shard_ranks * plan.precision.compute_bytes
    is_3 = plan.stage == ZeroStage.PARAMETERS
    return (sizes.persistent_numel if is_3 else sizes.trainable) * share
