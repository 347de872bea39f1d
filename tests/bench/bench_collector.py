"""What the collector costs: `python tests/bench/bench_collector.py`.

CPU at 8 and 64 synthetic ranks that write 1,000 records/s each, as FSDP2 writes them (a step of 40
collectives); then time and size of a scrape at 8, 64 and 1,024 ranks.
"""

from __future__ import annotations

import gzip
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from records import keep
from synthetic import RECORDS_A_STEP, Synthetic

from zeromon.collector.daemon import Collector
from zeromon.export.prometheus.exposition import Exposition
from zeromon.storage.run_store import Store, encode

SECONDS = 12
STEP_NS = 84_000_000


def cpu(ranks: int, seconds: float) -> dict[str, float]:
    """The collector's CPU, as a share of one core, while *ranks* write 1,000 records/s each.

    The writers run in this process between ticks; only the ticks are measured.
    """
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    (folder / "rings" / "run").mkdir(parents=True)
    writers = [Synthetic(folder / "rings" / "run", n, ranks) for n in range(ranks)]
    collector = Collector(folder / "rings", Store(folder / "store"))
    steps = round(1000 / RECORDS_A_STEP)
    for writer in writers:
        writer.write_step()
    collector.tick()
    spent, ticks = 0.0, round(seconds)
    began_ns = time.monotonic_ns()
    for tick in range(ticks):
        for number, writer in enumerate(writers):
            for step in range(steps):  # ranks come up to a millisecond apart, by turns
                late_ns = (number + step) % ranks * 1_000_000 // ranks
                writer.write_step(began_ns + (tick * steps + step) * STEP_NS + late_ns)
        began = time.process_time()
        collector.tick()
        spent += time.process_time() - began
    dropped = sum(rank.dropped for rank in collector.view[0].ranks)
    records = ticks * ranks * steps * RECORDS_A_STEP
    shutil.rmtree(folder)
    return {"cpu_share": spent / ticks, "us_a_record": spent / records * 1e6, "dropped": dropped}


def scrape(ranks: int) -> dict[str, float]:
    """Time and size of one scrape, and of the snapshot as JSON."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    (folder / "rings" / "run").mkdir(parents=True)
    writers = [Synthetic(folder / "rings" / "run", n, ranks) for n in range(min(ranks, 64))]
    collector = Collector(folder / "rings", Store(folder / "store"))
    for writer in writers:
        for _ in range(20):
            writer.write_step()
    collector.tick()
    (run,) = collector.view
    copies = -(-ranks // len(run.ranks))
    many = tuple(replace(r, rank=n) for n, r in enumerate((run.ranks * copies)[:ranks]))
    collector.view = (replace(run, ranks=many),)
    exposition = Exposition(collector)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        _, text = exposition.answer("", "")
        times.append(time.perf_counter() - began)
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    shutil.rmtree(folder)
    return {
        "seconds": statistics.median(times),
        "series": series,
        "text_bytes": len(text),
        "gzip_bytes": len(gzip.compress(text, 6)),
        "json_bytes": len(encode(collector.view[0])),
    }


def main() -> None:
    """Prints the figures."""
    for ranks in (8, 64):
        row = cpu(ranks, SECONDS)
        print(
            f"collector, {ranks:4} ranks x 1,000 records/s: {row['cpu_share']:.1%} of a core, "
            f"{row['us_a_record']:.2f} us a record, {row['dropped']:.0f} dropped"
        )
        keep(f"{ranks} ranks", row["cpu_share"], "of a core")
        keep(f"{ranks} ranks, dropped", row["dropped"], "records", noise=0)
    for ranks in (8, 64, 1024):
        row = scrape(ranks)
        print(
            f"scrape,    {ranks:4} ranks: {row['seconds'] * 1e3:.0f} ms, {row['series']:,} series, "
            f"{row['text_bytes'] / 1e6:.2f} MB ({row['gzip_bytes'] / 1e6:.2f} MB gzip)"
        )
        keep(f"scrape of {ranks} ranks", row["seconds"], "s")


if __name__ == "__main__":
    main()
