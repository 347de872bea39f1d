"""The events of a trace that the analysis needs, what kind each is, and families of kernels. Pure."""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

GAP_NS = 30_000
"""A shorter pause between two kernels is their own cost, and no wait."""
_TILE = re.compile(r"_\d+x\d+.*$")
_NUMBERED = re.compile(r"_\d+(?:d\w*)?$")
_FUNCTOR = re.compile(r"at::native::(\w+)")
_WRAPPERS = ("func_wrapper_t", "gpu_kernel_impl", "gpu_kernel_impl_nocast", "ReduceOp")


def kernel_family(name: str) -> str:
    """Returns the common name of kernels that differ in tile, types and number: ``volta_sgemm``.

    A template of torch is followed by what it applies: ``elementwise_kernel CUDAFunctor_add``.
    """
    plain_name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    base, _, inner = plain_name.partition("<")
    base = base.partition("(")[0]
    short = base.rpartition("::")[2] or base
    if short == "Kernel" and inner:  # of CUTLASS
        short = inner.partition(">")[0]
    elif inner and base.startswith("at::native::"):
        functor = next(
            (candidate for candidate in _FUNCTOR.findall(inner) if candidate not in _WRAPPERS), ""
        )
        short = f"{short} {functor}".strip()
    elif base.startswith("aten::"):
        short = base
    return _NUMBERED.sub("", _TILE.sub("", short)).strip() or name[:40]


class Kind(Enum):
    """The kind of a device event."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"


# libraries, then kernels that read the memory of other ranks: torch's symmetric memory, vLLM, DeepEP
_COMMUNICATION = re.compile(
    r"nccl|rccl|mscclKernel|oneccl|nvshmem|rocshmem|symmetric_memory|(?:one|two)_?shot_?all_?reduce"
    r"|multimem_\w*(?:reduce|gather)|exchangeSplitAndOffset|allToAllV|cross_device_reduce|deep_ep::",
    re.IGNORECASE,
)
_ON_HOST = re.compile(r"(gloo|mpi|ucc):")
_NOT_COMPUTE = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::")
_OPERATOR = re.compile(r"[\w.:]+::\w")
_COPIES = frozenset(("gpu_memcpy", "gpu_memset"))
_MTIA = "mtia_ccp_events"
MIN_CALL_NS = 100_000
"""A shorter call of the host is no cause of idle time that is worth its name."""
UNIT_MARK = re.compile(r"FSDP::(\w+)(?: \((.*)\))?$")
STEP_MARK = re.compile(r"ProfilerStep#(\d+)$")


def classify_event(category: str, name: str) -> Kind:
    """Returns the kind of an event by category and kernel name (NVIDIA, AMD, Intel, MTIA)."""
    if category in _COPIES or (category == _MTIA and name.startswith("dma")):
        return Kind.COPY
    # Names of templates have thousands of characters, and the library stands at the front
    return Kind.COMMUNICATION if _COMMUNICATION.search(name[:200]) else Kind.COMPUTE


def classify_on_host(category: str, name: str) -> Kind | None:
    """Returns the kind of a CPU event: an operator, or communication of a backend; None for others."""
    if category != "cpu_op":
        return Kind.COMMUNICATION if _ON_HOST.match(name) else None
    # an autograd node encloses hooks that wait; the trace has its operators as separate events
    if name.startswith(_NOT_COMPUTE) or not _OPERATOR.match(name):
        return None
    return Kind.COMPUTE


Collective = tuple[str, str, int, int]
"""(operation, group, bytes, group size) of a communication kernel."""

Stream = tuple[int, int]
"""(device, stream)."""


class DeviceEvent(NamedTuple):
    """A kernel or a copy on a device, or an operator of a trace without device events."""

    kind: Kind
    start_ns: int
    end_ns: int
    name: str
    collective: Collective | None
    """None where neither the arguments nor the call that launched the kernel tells it."""
    stream: Stream = (0, 0)
    correlation: int = -1
    """The id of the host's call that launched it: :meth:`Launches.of`; -1 where the trace has none."""


class Call(NamedTuple):
    """A call of the host that launches a collective."""

    start_ns: int
    end_ns: int
    collective: Collective


class Mark(NamedTuple):
    """An annotation of the profiler: an FSDP unit or a step."""

    name: str
    start_ns: int
    end_ns: int
    on_device: bool


Span = tuple[int, int, str]
"""Start, end and name of something on a thread of the host."""


HostCall = tuple[int, int, str, bool]
"""A span, and whether it stands for the calls in it, as operators and marks of torch's own do."""


class FlatSpans:
    """Spans of a thread that nest, as spans in turn: each with the time of its own."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = list(_flatten_spans(sorted(spans, key=lambda span: (span[0], -span[1]))))
        self.ends = [span[1] for span in self.spans]

    def before(self, at_ns: int) -> Span | None:
        """The last span that began before *at_ns*, cut there."""
        at = bisect_left(self.ends, at_ns)
        if at < len(self.spans) and self.spans[at][0] < at_ns:
            start, _, name = self.spans[at]
            return start, at_ns, name
        return self.spans[at - 1] if at else None

    def within(self, begin_ns: int, end_ns: int) -> Iterator[Span]:
        """Yields the parts of spans between *begin_ns* and *end_ns*."""
        at = bisect_right(self.ends, begin_ns)
        while begin_ns < end_ns and at < len(self.spans) and self.spans[at][0] < end_ns:
            span_start_ns, span_end_ns, name = self.spans[at]
            yield max(span_start_ns, begin_ns), min(span_end_ns, end_ns), name
            at += 1


def _flatten_spans(spans: Iterable[Span]) -> Iterator[Span]:
    stack: list[Span] = []
    at = 0
    # A span behind all others closes those that are open; damaged time stamps may pass 64 bits
    for start_ns, end_ns, name in [*spans, (1 << 200, 1 << 200, "")]:
        while stack and stack[-1][1] <= start_ns:
            span = stack.pop()
            if span[1] > at:
                yield at, span[1], span[2]
            at = max(at, span[1])
        if stack and start_ns > at:
            yield at, start_ns, stack[-1][2]
        at = max(at, start_ns)
        # Rounded times let an operator outlast the one around it: uncut, both would count the rest
        stack.append((start_ns, min(end_ns, stack[-1][1]) if stack else end_ns, name))


class Launch(NamedTuple):
    """A call of the host that started work on a device."""

    start_ns: int
    end_ns: int
    thread: int


class Launches:
    """The launches of a trace by correlation; 20 bytes each, besides their place in a dictionary."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._starts, self._lasts, self._threads = array("q"), array("q"), array("i")

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, correlation: int, launch: Launch) -> None:
        """Adds a launch; the first one of a correlation counts."""
        lasts = launch.end_ns - launch.start_ns
        # array("q") raises for what does not fit 64 bits, as in a damaged trace
        if correlation in self._places or max(abs(launch.start_ns), lasts) >= 1 << 63:
            return
        self._places[correlation] = len(self._starts)
        self._starts.append(launch.start_ns)
        self._lasts.append(lasts)
        self._threads.append(launch.thread)

    def start_ns(self, event: DeviceEvent) -> int | None:
        """The start of the launch of a device event; None where the trace does not have it."""
        at = self._places.get(event.correlation)
        return None if at is None else self._starts[at]

    def of(self, event: DeviceEvent) -> Launch | None:
        """The launch of a device event; None where the trace does not have it."""
        at = self._places.get(event.correlation)
        if at is None:
            return None
        start = self._starts[at]
        return Launch(start, start + self._lasts[at], self._threads[at])


class Product(NamedTuple):
    """The computation of a matrix product or an attention of one shape."""

    op: str
    shape: str
    dtype: str
    flops: int | None
    """None where the trace does not have the shapes."""
    nbytes: int


@dataclass(slots=True)
class TraceData:
    """The events of one trace file that the analysis needs."""

    name: str = ""
    rank: int | None = None
    device_name: str = ""
    """With its memory: ``Tesla V100-SXM2-32GB 32GB``; "" where the trace does not tell."""
    device: list[DeviceEvent] = field(default_factory=list)
    is_of_host: bool = False
    """The trace has no device events: those above are operators and collectives of the host."""
    marks: list[Mark] = field(default_factory=list)
    events_seen: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)
    launches: Launches = field(default_factory=Launches)
    host_calls: dict[int, list[HostCall]] = field(default_factory=dict)
    """Thread -> its calls and annotations of :data:`MIN_CALL_NS` or more."""
    products: dict[int, list[tuple[int, int, Product]]] = field(default_factory=dict)
    """Thread -> (start, end, product) of its operators, in nanoseconds."""
    threads: dict[str, int] = field(default_factory=dict)
    """Thread of the host -> its number in the launches and products."""
    kinds: dict[str, tuple[str, Kind]] = field(default_factory=dict)
    """Name of an event -> (shared string of the name, kind): a trace has few names and many events."""
