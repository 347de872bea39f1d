"""What the collector costs: `python tests/bench/bench_collector.py`.

CPU at 8 and 64 synthetic ranks that write 1,000 records/s each, as FSDP2 writes them (a step of 40
collectives), as it is and with the fold compiled (`tools/compiled.py`), in turns; then time and size of
a scrape at 8, 64 and 1,024 ranks.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from compiled import compile_into
from records import keep
from support import ROOT
from synthetic import RECORDS_A_STEP, Synthetic

from zeromon.collector.daemon import Collector
from zeromon.export.prometheus.metrics import Exposition
from zeromon.storage.run_store import Store, encode_snapshot

SECONDS = 12
ROUNDS = 3
STEP_NS = 84_000_000


def cpu(ranks: int, seconds: float) -> dict[str, float]:
    """The collector's CPU, as a share of one core, while *ranks* write 1,000 records/s each.

    The writers run in this process between ticks; only the ticks are measured, with the collection of
    garbage that falls due after each.
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
        gc.collect(0)
        spent += time.process_time() - began
    dropped = sum(rank.agent.dropped for rank in collector.view[0].ranks)
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
    exposition = Exposition()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        _, text = exposition.answer(collector.view, collector.health, "", "")
        times.append(time.perf_counter() - began)
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    shutil.rmtree(folder)
    return {
        "seconds": statistics.median(times),
        "series": series,
        "text_bytes": len(text),
        "gzip_bytes": len(gzip.compress(text, 6)),
        "json_bytes": len(encode_snapshot(collector.view[0])),
    }


def in_turns(ranks: int, code: dict[str, Path]) -> dict[str, list[dict[str, float]]]:
    """What :func:`cpu` measures in processes of their own; *code*: name -> folder with the package."""
    found = defaultdict(list)
    for _ in range(ROUNDS):
        for name, folder in code.items():
            command = [sys.executable, __file__, str(ranks)]
            environment = os.environ | {"PYTHONPATH": str(folder)}
            found[name].append(json.loads(subprocess.check_output(command, env=environment)))
    return found


def main() -> None:
    """Prints the figures; with a number as argument those of :func:`cpu` alone, as JSON."""
    if len(sys.argv) > 1:
        print(json.dumps(cpu(int(sys.argv[1]), SECONDS)))
        return
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        code = {"": ROOT, ", compiled": Path(folder)}
        measured = {ranks: in_turns(ranks, code) for ranks in (8, 64)}
    for ranks, rows in measured.items():
        for name, rounds in rows.items():
            shares = [row["cpu_share"] for row in rounds]
            costs = ", ".join(f"{row['us_a_record']:.2f}" for row in rounds)
            dropped = sum(row["dropped"] for row in rounds)
            share = statistics.median(shares)
            print(
                f"collector, {ranks:4} ranks x 1,000 records/s{name}: {share:.1%} of a core; "
                f"{costs} us a record, {dropped:.0f} dropped"
            )
            keep(f"{ranks} ranks{name}", share, "of a core", noise=max(shares) - min(shares))
            keep(f"{ranks} ranks{name}, dropped", dropped, "records", noise=0)
    for ranks in (8, 64, 1024):
        row = scrape(ranks)
        print(
            f"scrape,    {ranks:4} ranks: {row['seconds'] * 1e3:.0f} ms, {row['series']:,} series, "
            f"{row['text_bytes'] / 1e6:.2f} MB ({row['gzip_bytes'] / 1e6:.2f} MB gzip)"
        )
        keep(f"scrape of {ranks} ranks", row["seconds"], "s")


if __name__ == "__main__":
    main()
