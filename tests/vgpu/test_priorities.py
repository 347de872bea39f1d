"""Products on streams of several priorities: each time equals that of an independent simulation."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from vgpu.conftest import CudaRunner

pytestmark = pytest.mark.vgpu

MULTIPROCESSORS, TILE = 132, 128


def occupancy(size: int) -> float:
    """The share of the device that the tiles of a square product fill."""
    return min(1.0, (size / TILE) ** 2 / MULTIPROCESSORS)


def simulate(
    queues: dict[int, list[int]], priorities: list[int], alone: list[float], shares: list[float]
) -> dict[int, list[tuple[float, float]]]:
    """Returns the span of each product by stream, in ns from the first start.

    Between two events, the streams of the highest priority get what they ask for, as far as there is
    room; those of one priority are slowed down alike.
    """
    time, spans = 0.0, defaultdict(list)
    left = {stream: alone[sizes[0]] for stream, sizes in queues.items()}
    started = dict.fromkeys(queues, 0.0)
    while left:
        rates, room = {}, 1.0
        for priority in sorted({priorities[stream] for stream in left}):
            group = [stream for stream in left if priorities[stream] == priority]
            asked = sum(shares[queues[stream][len(spans[stream])]] for stream in group)
            rates.update(dict.fromkeys(group, min(1.0, room / asked)))
            room = max(0.0, room - asked)
        step = min(left[stream] / rate for stream, rate in rates.items() if rate > 0)
        time += step
        for stream, rate in rates.items():
            left[stream] -= step * rate
            if left[stream] > 1e-6:
                continue
            spans[stream].append((started[stream], time))
            del left[stream]
            if len(spans[stream]) < len(queues[stream]):
                left[stream] = alone[queues[stream][len(spans[stream])]]
                started[stream] = time
    return spans


def test_a_higher_priority_keeps_its_speed(cuda_run: CudaRunner) -> None:
    count = 40
    run = cuda_run("priorities.py", str(count), "3", ranks=1)
    facts = json.loads((run.folder / "priorities.json").read_text())
    assert facts["priorities"] == [0, 0, -1, -3]
    products = [one for one in run.truth(0).of("kernel") if "spin" not in one.name]
    products.sort(key=lambda one: one.enqueued)
    shares = [occupancy(size) for size in facts["sizes"]]
    alone = [float(one.end - one.start) for one in products[: len(shares)]]
    place, stopped = len(shares), 0
    for program in facts["programs"]:
        found = products[place : place + len(program)]
        place += len(program)
        queues, measured = defaultdict(list), defaultdict(list)
        begun = min(one.start for one in found)
        for (stream, size), one in zip(program, found, strict=True):
            queues[stream].append(size)
            measured[stream].append((one.start - begun, one.end - begun))
            stopped += one.end - one.start > 2.5 * alone[size]
        for stream, spans in simulate(queues, facts["priorities"], alone, shares).items():
            for span, wanted in zip(measured[stream], spans, strict=True):
                assert span == pytest.approx(wanted, abs=len(program) * 2)  # rounded up to ns
    assert place == len(products) and stopped
