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
TURNS = (int(sys.argv[sys.argv.index("--steps") + 1]) - 1) // STEPS
state = {"count": 0}


def counted(name: str) -> int:
    """How often a program has said *name*: a byte of a file for each."""
    path = FOLDER / name
    return path.stat().st_size if path.exists() else 0


def say(name: str) -> None:
    """Says *name* once."""
    with (FOLDER / name).open("ab") as file:
        file.write(b".")


def turn() -> int:
    """The number of the turn, -1 until all ranks have trained a step."""
    return -1 if counted("ready") < 2 * PLACES else counted("done")


def after_step(*_) -> None:
    """Called when a step has ended: waits for the program's turn."""
    count = state["count"]
    state["count"] += 1
    if count % STEPS:
        return
    if not count:
        say("ready")
    elif RANK == 0:
        say("done")
    mine = PLACES * (count // STEPS) + PLACE
    while turn() < min(mine, PLACES * TURNS):  # no turn comes after the last
        time.sleep(0.02)


if __name__ == "__main__":
    step_program.after_step = after_step
    if "--config" in sys.argv:
        step_program.train_deepspeed()
    else:
        step_program.train_torch()
