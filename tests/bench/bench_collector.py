"""What the collector costs: `python tests/bench/bench_collector.py`.

CPU at 8 and 64 synthetic ranks that write 1,000 records/s each, as FSDP2 writes them (a step of 40
collectives); then time and size of a scrape at 8, 64 and 1,024 ranks.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeromon.collector import Collector
from zeromon.events import Dtype, Flag, Kind, Op, Phase, head, place
from zeromon.exposition import Exposition
from zeromon.ring import NameKind, RingWriter
from zeromon.store import Store, encode

COLLECTIVES_A_STEP = 40
RECORDS_A_STEP = 2 * COLLECTIVES_A_STEP + 5
SECONDS = 12


class Synthetic:
    """A rank that writes what FSDP2 writes."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        name = folder / f"rank{rank}.{os.getpid()}.ring"
        self.ring = RingWriter(name, rank=rank, capacity=1 << 14)
        facts = {"rank": rank, "local_rank": rank, "world_size": world, "strategy": "fsdp2"}
        self.ring.name(NameKind.META, facts)
        ranks = list(range(world))
        self.group = self.ring.name(
            NameKind.GROUP, {"label": "world", "size": world, "ranks": ranks}
        )
        self.units = [self.ring.name(NameKind.UNIT, {"fqn": f"layers.{n}"}) for n in range(10)]
        self.step = self.sequence = 0

    def write_step(self) -> None:
        """RECORDS_A_STEP records of one step that ends now."""
        write, now = self.ring.write, time.monotonic_ns()
        start = now - 80_000_000
        self.step += 1
        for n in range(COLLECTIVES_A_STEP):
            self.sequence += 1
            op = Op.ALL_GATHER if n % 3 else Op.REDUCE_SCATTER
            at, begin = place(self.group, self.units[n % 10]), start + n * 2_000_000
            issued = head(Kind.ISSUED, op, Phase.FORWARD)
            done = head(Kind.DONE, op, Phase.FORWARD, Flag.END_KNOWN)
            write(begin, issued, at, 1 << 20, self.sequence, Dtype.BFLOAT16, 0)
            write(begin + 1_500_000, done, at, 1 << 20, begin, 300_000, self.sequence)
        for n, phase in enumerate((Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)):
            write(start + (n + 1) * 25_000_000, head(Kind.PHASE, 0, phase), 0, start, 0, 0, 0)
        write(now, head(Kind.HOST), 0, 1 << 32, -1, 1 << 36, -1)
        write(now, head(Kind.STEP), 0, self.step, start, 1, 0)


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
    for _ in range(ticks):
        for writer in writers:
            for _ in range(steps):
                writer.write_step()
        began = time.process_time()
        collector.tick()
        spent += time.process_time() - began
    dropped = sum(rank.dropped for rank in collector.view[0].ranks)
    records = ticks * ranks * steps * RECORDS_A_STEP
    shutil.rmtree(folder)
    return {"cpu_share": spent / ticks, "us_a_record": spent / records * 1e6, "dropped": dropped}


def scrape(ranks: int) -> dict[str, float]:
    """Time and size of one scrape, and of the picture as JSON."""
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
    """Prints the figures, and JSON on the last line."""
    found: dict[str, dict[str, float]] = {}
    for ranks in (8, 64):
        row = found[f"cpu {ranks}"] = cpu(ranks, SECONDS)
        print(
            f"collector, {ranks:4} ranks x 1,000 records/s: {row['cpu_share']:.1%} of a core, "
            f"{row['us_a_record']:.2f} us a record, {row['dropped']:.0f} dropped"
        )
    for ranks in (8, 64, 1024):
        row = found[f"scrape {ranks}"] = scrape(ranks)
        print(
            f"scrape,    {ranks:4} ranks: {row['seconds'] * 1e3:.0f} ms, {row['series']:,} series, "
            f"{row['text_bytes'] / 1e6:.2f} MB ({row['gzip_bytes'] / 1e6:.2f} MB gzip)"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
