"""Time of a scrape, by prometheus-client and by hand: `python tests/bench/bench_exposition.py`.

Side by side at about 1,000, 10,000 and 100,000 series, in both formats; then what gzip adds and saves,
and by how much a thread that computes all the time (as the collector's tick does) is slowed meanwhile.
"""

from __future__ import annotations

import gzip
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builders import full_run, run
from by_client import ByClient
from prometheus_client.exposition import choose_encoder
from records import keep
from served import Fixed

from zeromon.export.prometheus.metrics import GZIP_LEVEL, Writer

RANKS = (8, 80, 800)
ROUNDS = 7


def side_by_side(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of each, taken in turns."""
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, times in zip((first, second), took, strict=True):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return statistics.median(took[0]), statistics.median(took[1])


def slowed(scrape: Callable[[], Any]) -> float:
    """How much longer a piece of Python takes while another thread scrapes without a pause."""

    def work() -> float:
        began = time.perf_counter()
        sum(n * n % 7 for n in range(2_000_000))
        return time.perf_counter() - began

    alone = statistics.median(work() for _ in range(3))
    stop = threading.Event()

    def scrape_on() -> None:
        while not stop.is_set():
            scrape()

    thread = threading.Thread(target=scrape_on)
    thread.start()
    beside = statistics.median(work() for _ in range(3))
    stop.set()
    thread.join()
    return beside / alone


def main() -> None:
    """Prints the figures."""
    found: dict[str, dict[str, float]] = {}
    one = full_run().ranks[0]
    for ranks in map(int, sys.argv[1:] or RANKS):
        view = Fixed(run(*(replace(one, rank=n) for n in range(ranks))))
        families, writer = ByClient(view.view, view.health), Writer()
        for name, accept in (("text", ""), ("openmetrics", "application/openmetrics-text")):
            encode, _ = choose_encoder(accept)

            def by_hand(opened: bool = bool(accept), w: Writer = writer, v: Fixed = view) -> bytes:
                return w.write(v.view, v.health, openmetrics=opened)

            def by_client(encode: Any = encode, families: ByClient = families) -> Any:
                return encode(families)

            text = by_hand()
            client, ours = side_by_side(by_client, by_hand)
            series = sum(not line.startswith(b"#") for line in text.splitlines())
            began = time.perf_counter()
            packed = gzip.compress(text, GZIP_LEVEL)
            row = found[f"{name} {ranks}"] = {
                "series": series,
                "client_seconds": client,
                "seconds": ours,
                "text_bytes": len(text),
                "gzip_bytes": len(packed),
                "gzip_seconds": time.perf_counter() - began,
            }
            keep(f"{name}, {series:,} series", ours, "s")
            print(
                f"{name:11} {series:7,} series: client {client * 1e3:6.1f} ms, by hand "
                f"{ours * 1e3:6.1f} ms: {client / ours:4.1f} times; {len(text) / 1e6:5.2f} MB, gzip "
                f"{len(packed) / 1e6:.2f} MB in {row['gzip_seconds'] * 1e3:.0f} ms"
            )
    found["slowed"] = {"times": slowed(by_hand)}
    print(f"another thread meanwhile takes {found['slowed']['times']:.1f} times as long")
    keep("another thread meanwhile", found["slowed"]["times"], "times")


if __name__ == "__main__":
    main()
