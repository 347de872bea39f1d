"""Which micro-batch to launch next, and which fits: peak = fixed + each x micro-batch, measured. Pure.

A launch measures the peak of the host and of the fullest device. Two launches of one stage give the
line. Other stages have the same line, moved by the difference of their states in the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from zeromon.stats.noise import Estimate, half_width

MOST_LAUNCHES = 4
HOST, DEVICE = "host", "device"
RESERVE = {HOST: 0.02, DEVICE: 0.06}
"""Share of a memory that stays free: pages of libraries that the kernel takes back and needs again at
once; on a device what fragmentation takes at a longer run."""

_FIRST_JUMP = 8
"""The second launch is at most so many times larger than the first: one point is no line."""

_CLOSE = 0.8
_FAR, _SHORT, _SHORTER = 2, 0.06, 0.1
"""More than twice the largest measured size is far: that launch leaves so much of the memory free, and
the last does not. After one that was stopped more is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One launch of the user's command."""

    stage: str
    """"" where the command has no ``{stage}``."""
    micro_batch: int
    accumulation: int = 1
    outcome: str = ""
    """"" where it was measured; else why it was stopped."""
    slower: bool = False
    """It was stopped because it loses, with its memory measured."""
    killed: bool = False
    """It ended for lack of memory before it could be stopped."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Pool -> bytes at the peak: of all processes on the host, of one rank on a device."""
    rooms: dict[str, int] = field(default_factory=dict)
    """Pool -> bytes that they may hold."""
    base_bytes: int = 0
    """On the host when the ranks began: what no micro-batch changes."""
    own_bytes: int = 0
    """On the host, of zeromon fit itself: the command alone has them, too."""
    run: str = ""
    seconds: float | None = None
    """Median of a step."""
    seconds_error: float | None = None
    seconds_freedom: float = 0.0
    exposed_seconds: float | None = None
    samples: float | None = None
    """Of a step of all ranks."""
    tokens: float | None = None
    steps: int = 0
    wall_seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether it ran within its memory."""
        return self.slower or not self.outcome

    @property
    def estimate(self) -> Estimate | None:
        """Seconds of a step for each sample of a rank."""
        if self.seconds is None:
            return None
        whole = Estimate(self.seconds, self.seconds_error, self.seconds_freedom)
        return whole.scaled(1 / (self.micro_batch * self.accumulation))


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes of a pool by micro-batch."""

    fixed: float
    each: float

    def at(self, micro_batch: int) -> float:
        """Bytes at *micro_batch*."""
        return self.fixed + self.each * micro_batch


def line(trials: Sequence[Trial], pool: str) -> Line | None:
    """Returns the line of the largest measured trials of one stage; None without two sizes.

    The largest decide: an allocator takes small batches from what it holds already. Sizes that differ
    little count together, because their peaks have noise.
    """
    known = sorted(
        {t.micro_batch: t.peaks[pool] for t in trials if t.fits and pool in t.peaks}.items()
    )
    if len(known) < 2:
        return None
    top = [point for point in known if point[0] >= _CLOSE * known[-1][0]]
    small, low = known[max(0, len(known) - len(top) - 1)]
    large, high = fmean(size for size, _ in top), fmean(peak for _, peak in top)
    each = max(0.0, (high - low) / (large - small))
    return Line(high - each * large, each)


def usable(trials: Sequence[Trial], pool: str) -> float | None:
    """Returns the bytes of *pool* that a trial may take, by the least room that any has seen."""
    rooms = [t.rooms[pool] for t in trials if t.rooms.get(pool, 0) > 0]
    return min(rooms) * (1 - RESERVE[pool]) if rooms else None


def largest(
    trials: Sequence[Trial], sizes: Sequence[int], moved: Mapping[str, float] | None = None
) -> int | None:
    """Returns the largest of *sizes* that fits by the lines of *trials*, 0 for none; None if unknown.

    *moved*: pool -> bytes that another stage takes beyond that of *trials*.
    """
    pools = [pool for pool in (HOST, DEVICE) if any(pool in t.peaks for t in trials)]
    limits = [(pool, line(trials, pool), usable(trials, pool)) for pool in pools]
    if not limits or any(known is None for _, known, _ in limits):
        return None
    fitting = [
        size
        for size in sizes
        if all(
            room is None
            or (known is not None and known.at(size) + (moved or {}).get(pool, 0.0) <= room)
            for pool, known, room in limits
        )
    ]
    return max(fitting, default=0)


def second(first: Trial, sizes: Sequence[int]) -> int | None:
    """Returns the size of the second launch: the largest that surely fits, by the first alone.

    A sample takes at most what the first launch took beyond the bytes of processes without a model.
    """
    bound = min(
        (
            room // peak * first.micro_batch
            if pool == DEVICE
            else first.micro_batch
            + (room - peak) * first.micro_batch // max(1, peak - first.base_bytes)
            for pool, peak in first.peaks.items()
            if (room := round(usable([first], pool) or 0)) and peak
        ),
        default=first.micro_batch * 2,
    )
    most = min(max(bound, first.micro_batch + 1), first.micro_batch * _FIRST_JUMP)
    larger = [size for size in sizes if size > first.micro_batch]
    return max((size for size in larger if size <= most), default=min(larger, default=None))


def best_known(trials: Sequence[Trial]) -> int:
    """Returns the largest micro-batch that ran, 0 for none."""
    return max((t.micro_batch for t in trials if t.fits), default=0)


def next_size(trials: Sequence[Trial], sizes: Sequence[int], left: int) -> int | None:
    """Returns what to launch next of one stage, of *left* launches; None: nothing is to be learnt."""
    if left <= 0 or not sizes:
        return None
    if not trials:
        return sizes[0]
    too_large = min((t.micro_batch for t in trials if not t.fits), default=1 << 60)
    open_sizes = [size for size in sizes if best_known(trials) < size < too_large]
    if not open_sizes or not best_known(trials):
        return None
    measured = [t for t in trials if t.fits]
    if len({t.micro_batch for t in measured}) < 2:
        if too_large < 1 << 60:
            return open_sizes[len(open_sizes) // 2]
        return second(measured[0], sizes)
    goal = largest(measured, sizes)
    if goal is None:
        return None
    if goal in open_sizes:
        if too_large < 1 << 60:
            return _leaving(_SHORTER, measured, open_sizes)
        if left > 1 and goal > _FAR * best_known(trials):  # far beyond what was measured
            return _leaving(_SHORT, measured, open_sizes)
        return goal
    # the line says that more fits than what was stopped
    return _leaving(_SHORTER, measured, open_sizes) if goal >= too_large else None


def _leaving(share: float, trials: Sequence[Trial], sizes: Sequence[int]) -> int:
    """The largest of *sizes* that leaves a *share* of each memory free by the line."""
    free = {pool: share * (usable(trials, pool) or 0.0) for pool in RESERVE}
    return largest(trials, sizes, free) or sizes[0]


def loses(mine: Estimate, best: Estimate) -> bool:
    """Returns whether *mine* seconds a sample exceed *best* by more than the noise of both."""
    noise = half_width(mine, best)
    return noise is not None and mine.value - best.value > noise
