"""Measures properties of a CUDA device, to set those of the virtual one by: ``calibration.py OUT``.

``calibration.py --publish REAL VIRTUAL [COMMIT]`` stores both files beside one another for
docs/evidence/virtual-device.md. All times are those of CUDA events, medians of several rounds, except
where a property names the host.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import cuda

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from evidence_pages import Entry, commit_here, publish, today

GIB, MIB = 1 << 30, 1 << 20
ROUNDS = 7

Property = tuple[str, float | None, str]
"""What it is, the figure, its unit; None: this device does not tell."""


def on_device(work: Callable[[], object], times: int = 1) -> float:
    """Seconds of the device for one call of *work*, of which so many are enqueued behind a kernel."""
    spent = []
    for _ in range(ROUNDS + 2):
        began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(4_000_000)  # the host enqueues all of it meanwhile
        began.record()
        for _ in range(times):
            work()
        ended.record()
        cuda.synchronize()
        spent.append(began.elapsed_time(ended) / 1e3 / times)
    return statistics.median(spent[2:])


def on_host(work: Callable[[], object], times: int = 200) -> float:
    """Seconds of the host for one call of *work*, behind an empty device."""
    spent = []
    for _ in range(ROUNDS):
        cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            work()
        spent.append((time.perf_counter() - began) / times)
    cuda.synchronize()
    return statistics.median(spent)


def matrices(dtype: torch.dtype, size: int) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def products() -> Iterator[Property]:
    for name, dtype, tf32 in (
        ("float32", torch.float32, False),
        ("tf32", torch.float32, True),
        ("bfloat16", torch.bfloat16, False),
        ("float64", torch.float64, False),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for size in (512, 2048, 8192) if name != "float64" else (4096,):
            seconds = on_device(matrices(dtype, size), 3)
            yield f"{name} product of {size} x {size}", 2 * size**3 / seconds / 1e12, "TFLOP/s"
    torch.backends.cuda.matmul.allow_tf32 = False


def memory_speeds() -> Iterator[Property]:
    for name, numel in (("1 GiB", GIB // 4), ("64 MiB", 16 * MIB), ("1 MiB", MIB // 4)):
        x, y = torch.randn(numel, device="cuda"), torch.empty(numel, device="cuda")
        for kernel, work, traffic in (
            ("add, read and written", lambda x=x, y=y: torch.add(x, 1, out=y), 2),
            ("copy on the device, read and written", lambda x=x, y=y: y.copy_(x), 2),
            ("fill", lambda y=y: y.zero_(), 1),
        ):
            speed = traffic * 4 * numel / on_device(work, 5)
            yield f"{kernel}, {name}", speed / 1e12, "TB/s"
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    norm = on_device(lambda: torch.nn.functional.layer_norm(x, (4096,), weight), 5)
    yield "layer norm of 64 MiB, read and written", 2 * x.nbytes / norm / 1e12, "TB/s"
    soft = on_device(lambda: torch.softmax(x, -1), 5)
    yield "softmax of 64 MiB, read and written", 2 * x.nbytes / soft / 1e12, "TB/s"
    yield "sum of 64 MiB", x.nbytes / on_device(lambda: x.sum(), 5) / 1e12, "TB/s"
    parameters = [torch.nn.Parameter(torch.randn(2 * MIB, device="cuda")) for _ in range(16)]
    for one in parameters:
        one.grad = torch.randn_like(one)
    for kind in ("foreach", "fused"):
        optimizer = torch.optim.AdamW(parameters, **{kind: True})
        seconds = on_device(optimizer.step)
        yield f"AdamW ({kind}) of 32 Mi parameters in 16 tensors", seconds * 1e6, "us"
        del optimizer


def copies() -> Iterator[Property]:
    for name, pinned in (("pinned", True), ("pageable", False)):
        for size in (256 * MIB, MIB):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            host.fill_(1)
            device = torch.empty(size, dtype=torch.uint8, device="cuda")
            told = f"{size // MIB} MiB, {name}"
            blocking = not pinned
            yield f"copy to the device, {told}", rate(device, host, blocking), "GB/s"
            yield f"copy to the host, {told}", rate(host, device, blocking), "GB/s"
    host = torch.empty(1, pin_memory=True)
    device = torch.empty(1, device="cuda")
    seconds = on_device(lambda: device.copy_(host, non_blocking=True), 50)
    yield "copy of 4 bytes to the device, pinned", seconds * 1e6, "us"


def rate(to: torch.Tensor, source: torch.Tensor, blocking: bool) -> float:
    """GB/s; by the host's clock where the copy blocks it."""
    if blocking:
        return source.nbytes / on_host(lambda: to.copy_(source), 3) / 1e9
    return source.nbytes / on_device(lambda: to.copy_(source, non_blocking=True), 3) / 1e9


def times_of_a_launch() -> Iterator[Property]:
    x = torch.zeros(1, device="cuda")
    y = torch.zeros(1, device="cuda")
    yield "a small kernel behind another one", on_device(lambda: x.add_(1), 300) * 1e6, "us"
    yield "host: one operator with one kernel", on_host(lambda: x.add_(1)) * 1e6, "us"
    yield "host: a kernel without an operator", on_host(lambda: cuda._sleep(1)) * 1e6, "us"
    yield "`_sleep` of a million cycles", on_device(lambda: cuda._sleep(1_000_000)) * 1e6, "us"
    event = cuda.Event(enable_timing=True)
    yield "host: an event is recorded", on_host(event.record) * 1e6, "us"
    cuda.synchronize()
    yield "host: an event is queried", on_host(event.query) * 1e6, "us"
    begin, last = (cuda.Event(enable_timing=True) for _ in range(2))

    def two_events() -> float:
        cuda._sleep(100_000)
        begin.record()
        last.record()
        cuda.synchronize()
        return begin.elapsed_time(last) * 1e3

    yield "two events one behind the other", statistics.median(two_events() for _ in range(9)), "us"

    def round_trip() -> None:
        x.add_(1)
        cuda.synchronize()

    yield "host: a kernel, and until it has ended", on_host(round_trip, 50) * 1e6, "us"
    side = cuda.Stream()

    def across() -> None:
        main = cuda.current_stream()
        x.add_(1)
        side.wait_stream(main)
        with cuda.stream(side):
            y.add_(1)
        main.wait_stream(side)

    yield "two kernels on two streams that wait for each other", on_device(across, 50) * 1e6, "us"
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for _ in range(100):
            x.add_(1)
    yield "host: a graph of 100 kernels", on_host(graph.replay, 20) * 1e6, "us"
    yield "a kernel of a graph", on_device(graph.replay) * 1e4, "us"


def queue() -> Iterator[Property]:
    """How many kernels may wait in a stream before the host does."""
    x = torch.zeros(1, device="cuda")
    x.add_(1)
    cuda.synchronize()
    cuda._sleep(400_000_000)
    launched = 0
    while launched < 20_000:
        began = time.perf_counter()
        x.add_(1)
        launched += 1
        if time.perf_counter() - began > 2e-3:
            break
    cuda.synchronize()
    yield "kernels that may wait in a stream", launched if launched < 20_000 else None, ""


def side_by_side(one: Callable[[], object], other: Callable[[], object], low: int = 0) -> float:
    """How many times as long both take on two streams, of the time of the longer one alone."""
    alone = max(on_device(one), on_device(other))
    side = cuda.Stream(priority=low)

    def both() -> None:
        main = cuda.current_stream()
        side.wait_stream(main)
        one()
        with cuda.stream(side):
            other()
        main.wait_stream(side)

    return on_device(both) / alone


def contention() -> Iterator[Property]:
    x, y, u, v = (torch.empty(GIB // 4, device="cuda") for _ in range(4))
    copy, other = (lambda: y.copy_(x)), (lambda: v.copy_(u))
    wide, next_one = matrices(torch.bfloat16, 8192), matrices(torch.bfloat16, 8192)
    yield "two copies of 1 GiB on two streams", side_by_side(copy, other), "x"
    yield "two products on two streams", side_by_side(wide, next_one), "x"
    yield "a product and a copy on two streams", side_by_side(wide, copy), "x"
    small, another = matrices(torch.bfloat16, 512), matrices(torch.bfloat16, 512)
    for name, pair in (
        ("two streams of 50 small products", (small, another)),
        (
            "two streams of 50 spinning kernels",
            (lambda: cuda._sleep(20_000), lambda: cuda._sleep(20_000)),
        ),
    ):
        first, second = (lambda work=work: [work() for _ in range(50)] for work in pair)
        yield name, side_by_side(first, second), "x"


def memory() -> Iterator[Property]:
    free, total = cuda.mem_get_info()
    yield "memory of the device", total / GIB, "GiB"
    cuda.empty_cache()
    free, _ = cuda.mem_get_info()
    yield "memory of a context, with cuBLAS", (total - free - cuda.memory_reserved()) / MIB, "MiB"

    def allocate() -> None:
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        cuda.empty_cache()

    yield "host: cudaMalloc and cudaFree of 64 MiB", on_host(allocate, 20) * 1e6, "us"
    yield (
        "host: 64 MiB from the caching allocator",
        on_host(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")) * 1e6,
        "us",
    )
    yield (
        "host: 64 MiB pinned, then freed",
        on_host(lambda: torch.empty(64 * MIB, dtype=torch.uint8).pin_memory(), 3) * 1e6,
        "us",
    )


def measure() -> list[Property]:
    cuda.init()
    before = cuda.mem_get_info()[0]
    torch.zeros(1, device="cuda")
    found: list[Property] = [
        ("memory that the first tensor takes", (before - cuda.mem_get_info()[0]) / MIB, "MiB")
    ]
    for part in (times_of_a_launch, queue, products, memory_speeds, copies, contention, memory):
        try:
            found += part()
        except (RuntimeError, AttributeError) as error:
            found.append((part.__name__, None, str(error).partition("\n")[0][:200]))
    return found


def entry_of(real: Mapping[str, Any], virtual: Mapping[str, Any], commit: str = "") -> Entry:
    """Both devices' figures beside one another; *commit* where a tree without git measured the first."""
    figures = {name: value for name, value, _ in virtual["properties"]}
    rows = [
        [
            name,
            unit,
            *(
                "n/a (not measured)" if figure is None else f"{figure:.4g}"
                for figure in (value, figures.get(name))
            ),
        ]
        for name, value, unit in real["properties"]
    ]
    hosts = [f"{device}, torch {facts['torch']}, {facts['cores']} cores"
             for device, facts in ((real["device"], real), ("virtual H200", virtual))]  # fmt: skip
    return {
        "tool": "tests/gpu/calibration.py", "date": real["date"], "commit": real["commit"] or commit,
        "machine": "; ".join(hosts), "head": ["property", "unit", real["device"], "virtual H200"],
        "rows": rows,
    }  # fmt: skip


def main(words: list[str]) -> None:
    if words[0] == "--publish":
        contents = [json.loads(Path(name).read_text()) for name in words[1:3]]
        publish("virtual-device", {"calibration": entry_of(*contents, *words[3:])})
        return
    name = cuda.get_device_name(0)
    facts = {"device": name, "torch": torch.__version__, "cores": os.cpu_count()}
    facts |= {"date": today(), "commit": commit_here()}
    properties = measure()
    Path(words[0]).write_text(json.dumps(facts | {"properties": properties}, indent=1))
    for what, value, unit in properties:
        print(f"{what}: {'n/a' if value is None else format(value, '.4g')} {unit}")


if __name__ == "__main__":
    main(sys.argv[1:])
