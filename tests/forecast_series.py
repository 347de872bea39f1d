"""A labelled set of per-step memory peaks: healthy runs, and runs that end out of memory.

Made by a seeded generator; each family is a behaviour that training runs show. Bytes of a device of 80
GiB. :func:`evaluate` replays a forecaster over the set, as a collector would see it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

CAPACITY = 80 << 30
HISTORY = 512
STRIDE = 5
"""A collector looks once a second, so it does not see every step."""

Point = tuple[int, int]


@dataclass
class Series:
    """(step, bytes) until the end, or until the step at which memory ran out."""

    family: str
    allocated: list[Point]
    fails: bool = False
    trouble_from: int = 0
    """First step of what ends the run; an alarm before it is a false one."""
    reserved: list[Point] = field(default_factory=list)
    others: list[Point] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.allocated[-1][0]


def made(family: str, shares: list[float], **more: object) -> Series:
    """A series of shares of the capacity; it ends where it passes it."""
    points: list[Point] = []
    for step, share in enumerate(shares, 1):
        points.append((step, round(share * CAPACITY)))
        if share >= 1.0:
            break
    return Series(family, points, fails=points[-1][1] >= CAPACITY, **more)  # type: ignore[arg-type]


def start(rng: random.Random, level: float, step: int) -> float:
    """The first step has no optimizer state yet."""
    return level * (0.7 if step == 1 else 1.0)


# ---- healthy --------------------------------------------------------------------------------------


def steady(rng: random.Random) -> Series:
    level, noise = rng.uniform(0.3, 0.93), rng.choice([0, 0.002, 0.01, 0.02])
    noise = min(noise, (0.96 - level) / 4)
    return made("steady", [start(rng, level, s) + rng.gauss(0, noise) for s in range(1, 2001)])


def warm_up(rng: random.Random) -> Series:
    """Caches, workspaces and longer sequences: it levels off."""
    low, high = rng.uniform(0.2, 0.5), rng.uniform(0.55, 0.9)
    tau, noise = rng.uniform(10, 250), rng.choice([0, 0.003, 0.008])
    return made(
        "warm-up",
        [high - (high - low) * math.exp(-s / tau) + rng.gauss(0, noise) for s in range(1, 2001)],
    )


def evaluation(rng: random.Random) -> Series:
    """Every so often some steps take more, or less."""
    level, every, lasts = rng.uniform(0.4, 0.75), rng.randint(50, 400), rng.randint(1, 30)
    jump, noise = rng.choice([-0.2, 0.1, 0.15, 0.2]), rng.choice([0.001, 0.01])
    return made(
        "evaluation",
        [
            start(rng, level, s) + (jump if s % every < lasts and s > every else 0) + rng.gauss(0, noise)
            for s in range(1, 2001)
        ],
    )


def checkpoints(rng: random.Random) -> Series:
    level, every, jump = rng.uniform(0.4, 0.8), rng.randint(50, 500), rng.uniform(0.03, 0.14)
    return made(
        "checkpoints",
        [
            start(rng, level, s) + (jump if s % every == 0 else 0) + rng.gauss(0, 0.003)
            for s in range(1, 2001)
        ],
    )


def batches(rng: random.Random) -> Series:
    """The batch size, or the sequence length, changes some times."""
    cuts = sorted(rng.sample(range(100, 1900), rng.randint(1, 3)))
    levels = [rng.uniform(0.3, 0.9) for _ in range(len(cuts) + 1)]
    noise = rng.choice([0.001, 0.008])
    return made(
        "batch changes", [levels[sum(s > c for c in cuts)] + rng.gauss(0, noise) for s in range(1, 2001)]
    )


def lengths(rng: random.Random) -> Series:
    """Sequences of many lengths, none longer than the model takes."""
    level, scale = rng.uniform(0.3, 0.5), rng.uniform(0.02, 0.06)
    top = rng.uniform(0.8, 0.95)
    return made(
        "bounded lengths", [min(top, level + scale * rng.lognormvariate(0, 0.7)) for _ in range(2000)]
    )


def wander(rng: random.Random) -> Series:
    """Page cache, fragmentation, pools: it drifts about and comes back."""
    level, value, shares = rng.uniform(0.4, 0.8), 0.0, []
    keep, push = rng.uniform(0.97, 0.995), rng.uniform(0.0005, 0.002)
    for _ in range(2000):
        value = keep * value + rng.gauss(0, push)
        shares.append(min(0.96, level + value))
    return made("wander", shares)


def collected(rng: random.Random) -> Series:
    """Garbage in cycles, collected now and then."""
    level, period, height = rng.uniform(0.4, 0.8), rng.randint(20, 150), rng.uniform(0.005, 0.03)
    return made(
        "garbage cycles",
        [
            start(rng, level, s) + height * (s % period) / period + rng.gauss(0, 0.001)
            for s in range(1, 2001)
        ],
    )


def all_reserved(rng: random.Random) -> Series:
    """The allocator has cached nearly everything, and uses less."""
    series = steady(rng)
    series.family = "all reserved"
    level = rng.uniform(0.95, 0.995)
    series.reserved = [
        (s, max(a, round(CAPACITY * min(level, 0.5 + s / 60)))) for s, a in series.allocated
    ]
    return series


# ---- failing --------------------------------------------------------------------------------------


def leak(rng: random.Random) -> Series:
    """From the start, or from some step on."""
    level, lasts = rng.uniform(0.3, 0.8), math.exp(rng.uniform(math.log(150), math.log(4000)))
    begins = rng.choice([0, 0, rng.randint(50, 800)])
    slope, noise = (1 - level) / lasts, rng.choice([0, 0.002, 0.008])
    return made(
        "leak",
        [
            start(rng, level, s) + slope * max(0, s - begins) + rng.gauss(0, noise)
            for s in range(1, 6000)
        ],
        trouble_from=begins,
    )


def leak_in_evaluation(rng: random.Random) -> Series:
    """With evaluation phases on top."""
    level, lasts = rng.uniform(0.3, 0.6), rng.uniform(400, 3000)
    every, long, jump = rng.randint(60, 300), rng.randint(2, 15), rng.uniform(0.05, 0.15)
    slope = (1 - level) / lasts
    return made(
        "leak with evaluation",
        [
            start(rng, level, s) + slope * s + (jump if s % every < long else 0) + rng.gauss(0, 0.003)
            for s in range(1, 6000)
        ],
    )


def leak_of_segments(rng: random.Random) -> Series:
    """In steps of a segment, as the allocator takes them."""
    level, lasts, segment = rng.uniform(0.3, 0.7), rng.uniform(300, 3000), 20 / 81920
    slope = (1 - level) / lasts
    return made(
        "leak in segments", [level + segment * math.floor(slope * s / segment) for s in range(1, 6000)]
    )


def spikes(rng: random.Random) -> Series:
    """Batches of unbounded length: one day one is too long."""
    level, scale, shape = rng.uniform(0.4, 0.6), rng.uniform(0.02, 0.04), rng.uniform(0.2, 0.4)
    shares = [level + scale * ((1 - rng.random()) ** -shape - 1) / shape for _ in range(6000)]
    return made("spikes", shares)


def fragmentation(rng: random.Random) -> Series:
    """What is reserved grows, what is used does not."""
    level, lasts = rng.uniform(0.4, 0.7), rng.uniform(300, 2500)
    noise = rng.choice([0.001, 0.005])
    allocated, reserved = [], []
    for step in range(1, 6000):
        allocated.append((step, round(CAPACITY * (level + rng.gauss(0, noise)))))
        share = level + 0.05 + (0.95 - level) * step / lasts
        reserved.append((step, round(CAPACITY * min(1.0, share))))
        if share >= 1.0:
            break
    return Series("fragmentation", allocated, fails=True, reserved=reserved)


def others(rng: random.Random) -> Series:
    """Another process, or NCCL, takes more and more of the device."""
    level, lasts = rng.uniform(0.4, 0.7), rng.uniform(300, 2500)
    room = 1 - level - 0.02
    steps = range(1, round(lasts) + 1)
    allocated = [(s, round(CAPACITY * level)) for s in steps]
    return Series(
        "non-torch",
        allocated,
        fails=True,
        reserved=[(s, a + (1 << 30)) for s, a in allocated],
        others=[(s, round(CAPACITY * room * s / lasts)) for s in steps],
    )


def no_margin(rng: random.Random) -> Series:
    """It fits, until it does not."""
    level, noise = rng.uniform(0.98, 0.99), rng.uniform(0.004, 0.006)
    return made("no margin", [start(rng, level, s) + rng.gauss(0, noise) for s in range(1, 6000)])


HEALTHY: tuple[Callable[[random.Random], Series], ...] = (
    steady, warm_up, evaluation, checkpoints, batches, lengths, wander, collected, all_reserved,
)  # fmt: skip
FAILING: tuple[Callable[[random.Random], Series], ...] = (
    leak, leak, leak_in_evaluation, leak_of_segments, spikes, fragmentation, others, no_margin,
)  # fmt: skip


def labelled_set(each: int, seed: int = 1) -> Iterator[Series]:
    """*each* series of every family, the same ones for the same seed."""
    for number in range(each):
        for family in (*HEALTHY, *FAILING):
            yield family(random.Random(f"{seed} {number} {family.__name__}"))


def recorded() -> Iterator[Series]:
    """Resident bytes of real runs (two ranks together): a leak until its kill, and healthy ones.

    Made by `zeromon report --json` of the examples that they are named after. The leak's capacity is
    what it reached; a healthy run's is half as much again as it held. Scaled to :data:`CAPACITY`.
    """
    path = Path(__file__).parent / "data" / "recorded_rss.json"
    for run in json.loads(path.read_text()):
        largest = max(used for _, used in run["points"])
        scale = CAPACITY / (largest if run["fails"] else 1.5 * largest)
        points = [(step, round(used * scale)) for step, used in run["points"]]
        yield Series(f"recorded: {run['family']}", points, fails=run["fails"])


# ---- evaluation -----------------------------------------------------------------------------------

Alarm = Callable[[Series, int], bool]
"""Whether a forecaster sounds at a step of a series, knowing what came before."""


@dataclass
class Score:
    """How a forecaster did on one family."""

    series: int = 0
    steps: int = 0
    failing: int = 0
    caught: int = 0
    false_alarms: int = 0
    healthy_steps: int = 0
    leads: list[int] = field(default_factory=list)

    def add(self, other: Score) -> None:
        for name in ("series", "steps", "failing", "caught", "false_alarms", "healthy_steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.leads += other.leads

    @property
    def recall(self) -> float:
        return self.caught / self.failing if self.failing else math.nan

    @property
    def false_rate(self) -> float:
        """A thousand healthy steps."""
        return 1000 * self.false_alarms / self.healthy_steps if self.healthy_steps else math.nan


def evaluate(series: Series, alarm: Alarm) -> Score:
    """Replays one series. An alarm that goes on is one alarm; the last before the end counts."""
    score = Score(series=1, steps=series.last)
    on_since, was_on = 0, False
    for step in range(STRIDE, series.last, STRIDE):
        on = alarm(series, step)
        healthy = not series.fails or step < series.trouble_from
        score.healthy_steps += STRIDE * healthy
        if on and not was_on:
            on_since = step
            score.false_alarms += healthy
        was_on = on
    if series.fails:
        score.failing = 1
        if was_on:
            score.caught = 1
            score.leads.append(series.last - on_since)
    return score


def window(points: list[Point], step: int) -> list[Point]:
    """What a collector has kept at *step*."""
    return points[max(0, step - HISTORY) : step]
