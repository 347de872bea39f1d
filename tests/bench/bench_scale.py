"""What many ranks cost to scrape and to keep: `python tests/bench/bench_scale.py [SECONDS]`.

For 8, 64 and 512 ranks on one collector, and 128 collectors of 8 ranks: a scrape of each collector by
itself (time, bytes, memory that it adds), then all of them under a real Prometheus for SECONDS: series,
samples, its memory and CPU. The collectors are one synthetic fleet, whose snapshots are made when they
are scraped; what that costs is not counted. On the last line: JSON, with what a series costs (least
squares over the four).
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from fleet import Fleet
from prometheus_client.parser import text_string_to_metric_families
from prometheus_server import Prometheus, scrape
from records import keep
from served import Fixed

from zeromon.export.prometheus.metrics import Exposition

SIZES = ((1, 8), (1, 64), (1, 512), (128, 8))
INTERVAL = 10
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
"""What Prometheus asks for."""


def one_collector(ranks: int) -> dict[str, float]:
    """A scrape of one collector whose snapshot stands still, in a process of its own."""
    command = [sys.executable, __file__, "--one", str(ranks)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def measured(ranks: int) -> dict[str, float]:
    """The same in this process."""
    with Fleet(1, ranks) as fleet:
        view = Fixed(*fleet.nodes[0].view)
    exposition, process = Exposition(), psutil.Process()
    before = process.memory_info().rss
    times = []
    for _ in range(7):
        began = time.process_time()
        _, body = exposition.answer(view.view, view.health, OPENMETRICS, "gzip")
        times.append(time.process_time() - began)
    text = gzip.decompress(body)
    return {
        "seconds": statistics.median(times),
        "series": sum(not line.startswith(b"#") for line in text.splitlines()),
        "text_bytes": len(text),
        "gzip_bytes": len(body),
        "added_bytes": process.memory_info().rss - before,
    }


def own_metrics(server: Prometheus) -> dict[str, float]:
    """What Prometheus says of itself."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def kept(nodes: int, ranks: int, seconds: float) -> dict[str, float]:
    """All collectors under a Prometheus for that long."""
    command = [sys.executable, str(Path(__file__).parents[1] / "fleet.py"), str(nodes), str(ranks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        url = serving.stdout.readline().split()[1]
        jobs = [scrape(http_sd_configs=[{"url": url, "refresh_interval": "60s"}])]
        try:
            with Prometheus(jobs, f"{INTERVAL}s") as server:
                server.wait("count(count_over_time(zeromon_rank_up[10m]) >= 2)", nodes * ranks, 120)
                began, first = time.monotonic(), own_metrics(server)
                time.sleep(seconds)
                last, took = own_metrics(server), time.monotonic() - began
                slowest = server.number("max(max_over_time(scrape_duration_seconds[1m]))")
                middle = server.number("quantile(0.5, avg_over_time(scrape_duration_seconds[1m]))")
        finally:
            serving.terminate()
    appended = "prometheus_tsdb_head_samples_appended_total"
    return {
        "series": last["prometheus_tsdb_head_series"],
        "samples_per_second": (last[appended] - first[appended]) / took,
        "prometheus_bytes": last["process_resident_memory_bytes"],
        "prometheus_heap_bytes": last["go_memstats_heap_inuse_bytes"],
        "prometheus_cpu": (last["process_cpu_seconds_total"] - first["process_cpu_seconds_total"])
        / took,
        "scrape_seconds": middle,
        "slowest_scrape_seconds": slowest,
    }


def slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: what one more costs, and what none would."""
    fit = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return fit.slope, fit.intercept


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=60)
    parser.add_argument("--one", type=int, metavar="RANKS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one)))
        return
    found: dict[str, Any] = {}
    for nodes, ranks in SIZES:
        each, all_ = one_collector(ranks), kept(nodes, ranks, options.seconds)
        keep(f"a scrape of {nodes} x {ranks} ranks", each["seconds"], "s")
        found[f"{nodes}x{ranks}"] = {"collector": each, "prometheus": all_}
        print(
            f"{nodes:4} x {ranks:3} ranks: a scrape {each['seconds'] * 1e3:5.1f} ms of CPU, "
            f"{each['series']:6,.0f} series, {each['text_bytes'] / 1e6:5.2f} MB, gzip "
            f"{each['gzip_bytes'] / 1e3:6.1f} kB, adds {each['added_bytes'] / 1e6:5.1f} MB; Prometheus "
            f"{all_['series']:7,.0f} series, {all_['prometheus_bytes'] / 1e6:4.0f} MB, "
            f"{all_['prometheus_cpu']:.1%} of a core at {INTERVAL} s, "
            f"scrapes {all_['scrape_seconds']:.2f} s",
            flush=True,
        )
    rows = [row["prometheus"] for row in found.values()]
    per_series, base = slope([(row["series"], row["prometheus_bytes"]) for row in rows])
    cpu, _ = slope([(row["samples_per_second"], row["prometheus_cpu"]) for row in rows])
    found["a series"] = {"bytes": per_series, "base_bytes": base}
    found["a sample"] = {"cpu_seconds": cpu}
    print(
        f"Prometheus: {per_series / 1e3:.2f} kB a series beside {base / 1e6:.0f} MB, "
        f"{cpu * 1e6:.2f} us of CPU a sample"
    )
    keep("Prometheus, a series", per_series, "bytes")


if __name__ == "__main__":
    main()
