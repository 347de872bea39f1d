"""A collector and a dashboard that are killed while they work: what was on disk is on disk, whole.

``ZEROMON_TEST_ROUNDS`` says how often; a few times by default, fifty for the record.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from support import ROOT, clean_environment, load_all_rows
from synthetic import Synthetic

from zeromon.storage import snapshot_log
from zeromon.storage.snapshot_log import Past

ROUNDS = int(os.environ.get("ZEROMON_TEST_ROUNDS", "3"))


def keys(history: Path) -> set[tuple[int, int]]:
    """(rank, step) of all rows; each is there once, and every segment can be read."""
    whole, broken = load_all_rows(history)
    assert broken == ()
    found = whole.select("rank", "step").rows()
    assert len(found) == len(set(found))
    return set(found)


def size(folder: Path) -> int:
    """Bytes of its history and its moments."""
    return sum(path.stat().st_size for path in folder.glob("*/*") if path.is_file())


def test_nothing_that_was_kept_is_lost_however_often_they_are_killed(tmp_path: Path) -> None:
    """Two ranks train on; a new collector reads the rings anew, and writes on where the last ended."""
    chooser = random.Random(7)
    rings, store = tmp_path / "rings", tmp_path / "store"
    run = rings / "run"
    run.mkdir(mode=0o700, parents=True)
    (run / "run.json").write_text(json.dumps({"started": time.time(), "command": ["train"]}))
    ranks = [Synthetic(run, number, 2) for number in range(2)]
    environment = clean_environment() | {
        "ZEROMON_DIR": str(rings),
        "ZEROMON_STORE": str(store),
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "dashboard")),
    }
    kept: set[tuple[int, int]] = set()
    seen = 0
    folder = store / "runs" / "run"
    for _ in range(ROUNDS):
        watching = [
            subprocess.Popen([sys.executable, "-m", *words], env=environment, stderr=subprocess.PIPE)
            for words in (("zeromon.collector",), ("zeromon", "dash", "--no-browser"))
        ]
        try:
            patience, until, before = time.monotonic() + 30, None, size(folder)
            while until is None or time.monotonic() < until:
                assert time.monotonic() < patience, "the collector wrote nothing"
                for rank in ranks:
                    rank.write_step()
                time.sleep(0.1)  # a step of it is 80 ms long
                # the first comes to the first moment that it keeps, the others to any write
                is_at_work = size(folder) > before and (seen or Past(folder).snapshot_times())
                if until is None and is_at_work:
                    until = time.monotonic() + chooser.uniform(0.0, 1.5)
        finally:
            for process in watching:
                process.send_signal(signal.SIGKILL)
                process.communicate()
        now = keys(folder / "history")
        assert kept <= now, "rows were lost"
        walls = Past(folder).snapshot_times()
        assert len(walls) >= seen and walls == sorted(walls), "snapshots were lost"
        assert all(
            snapshot_log.read_logged(one) for one in snapshot_log.logged_snapshots(folder / "moments")
        )
        kept, seen = now, len(walls)
    assert kept and seen
    for number in range(2):  # the last kill may have come between the rows of two ranks
        steps = sorted(step for rank, step in kept if rank == number)
        assert steps == list(range(steps[0], steps[-1] + 1)), "there is a gap"
