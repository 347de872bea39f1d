"""Trains in turns with other programs, so that a busy machine slows all of them alike.

Run by bench_seconds.py. ``TURNS`` is a folder, ``PLACE`` says which program this is, ``PLACES`` of how
many. A program trains :data:`STEPS` steps, then it is the next one's turn.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import step_program

STEPS = 5
FOLDER, PLACE = Path(os.environ["TURNS"]), int(os.environ["PLACE"])
PLACES, RANK = int(os.environ["PLACES"]), int(os.environ["RANK"])
state = {"count": 0}


def turn() -> int:
    """The number of the turn, -1 until all programs have trained a step."""
    if len(list(FOLDER.glob("ready*"))) < 2 * PLACES:
        return -1
    return len(list(FOLDER.glob("done*")))


def after_step(*_) -> None:
    """Called when a step has ended: waits for the program's turn."""
    count = state["count"]
    state["count"] += 1
    if count % STEPS:
        return
    if not count:
        (FOLDER / f"ready{PLACE}-{RANK}").touch()
    elif RANK == 0:
        (FOLDER / f"done{PLACE}-{count}").touch()
    while turn() != PLACES * (count // STEPS) + PLACE:
        time.sleep(0.01)


if __name__ == "__main__":
    step_program.after_step = after_step
    if "--config" in sys.argv:
        step_program.train_deepspeed()
    else:
        step_program.train_torch()
