"""A rank that only writes: for what the collector costs, and for what is left when it is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from zeromon.ring.buffer import NameKind, RingWriter
from zeromon.ring.codes import Dtype, Flag, Kind, Op, Phase
from zeromon.ring.events import pack_head, pack_place

COLLECTIVES_A_STEP = 40
RECORDS_A_STEP = 2 * COLLECTIVES_A_STEP + 5


class Synthetic:
    """A rank that writes what FSDP2 writes."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        name = folder / f"rank{rank}.{os.getpid()}.ring"
        self.ring = RingWriter(name, rank=rank)
        facts = {"rank": rank, "local_rank": rank, "world_size": world, "strategy": "fsdp2"}
        self.ring.name(NameKind.META, facts)
        ranks = list(range(world))
        self.group = self.ring.name(NameKind.GROUP, {"label": "world", "size": world, "ranks": ranks})
        self.units = [self.ring.name(NameKind.UNIT, {"fqn": f"layers.{n}"}) for n in range(10)]
        self.step = self.sequence = 0

    def write_step(self, end_ns: int = 0, collectives: int = COLLECTIVES_A_STEP) -> None:
        """One step with so many collectives that ends at *end_ns* of CLOCK_MONOTONIC; 0: now.

        With all of them it has RECORDS_A_STEP records.
        """
        write, now = self.ring.write, end_ns or time.monotonic_ns()
        start = now - 80_000_000
        self.step += 1
        for n in range(collectives):
            self.sequence += 1
            op = Op.ALL_GATHER if n % 3 else Op.REDUCE_SCATTER
            at, begin = pack_place(self.group, self.units[n % 10]), start + n * 2_000_000
            issued = pack_head(Kind.ISSUED, op, Phase.FORWARD)
            done = pack_head(Kind.DONE, op, Phase.FORWARD, Flag.SPAN_KNOWN)
            write(begin, issued, at, 1 << 20, self.sequence, Dtype.BFLOAT16, 0)
            write(begin + 1_500_000, done, at, 1 << 20, begin, 300_000, self.sequence)
        for n, phase in enumerate((Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)):
            write(start + (n + 1) * 25_000_000, pack_head(Kind.PHASE, 0, phase), 0, start, 0, 0, 0)
        write(now, pack_head(Kind.HOST), 0, 1 << 32, -1, 1 << 36, -1)
        write(now, pack_head(Kind.STEP), 0, self.step, start, 1, 0)
