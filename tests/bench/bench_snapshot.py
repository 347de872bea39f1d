"""`zeromon trace memory` on a snapshot of a gigabyte: `python tests/bench/bench_snapshot.py [GB]`.

A whole process: seconds and the largest resident set, and beside it Python's own unpickler, which makes
all objects (without cyclic garbage collection, and without an analysis). Writing the file takes minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from records import keep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_traces import measured
from memory_snapshots import Training, write

OTHER = """
import gc, pickle, sys
gc.disable()
class Plain(pickle.Unpickler):
    def find_class(self, *_): raise ValueError
    persistent_load = find_class
Plain(open(sys.argv[1], "rb")).load()
"""


def main(gigabytes: float) -> None:
    """Prints a line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pickle")
        training = write(path, Training(layers=32, steps=round(8000 * gigabytes), deep=80))
        size = path.stat().st_size
        command = [sys.executable, "-m", "zeromon", "trace", "memory", str(path), "--json"]
        spent, _, peak, text = measured(command)
        (device,) = json.loads(text)["files"][0]["devices"]
        assert device["roles"]["peak"] == dict(
            sorted(training.peak.items(), key=lambda item: -item[1])
        ), device["roles"]
        theirs, _, their_peak, _ = measured([sys.executable, "-c", OTHER, str(path)])
    print(
        f"{training.events:,} events, {size / 1e6:.0f} MB: {spent:.1f} s (target 60), "
        f"{peak / 1e6:.0f} MB (target 1000); pickle.Unpickler {theirs:.1f} s, {their_peak / 1e6:.0f} MB"
    )
    keep(f"{gigabytes:g} GB", spent, "s")
    keep(f"{gigabytes:g} GB, memory", peak / 1e6, "MB")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
