"""Trains examples/train_gpt.py on two processes under zeromon, as `make demo` does.

In a terminal the live view opens (q closes it and ends the training); elsewhere the training runs to
its end. The report of the run is printed last.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zeromon.base.errors import ZeromonError
from zeromon.sources.live import find_live_runs

STEPS = 200
HERE = Path(__file__).resolve().parent
TRAIN = (
    "torchrun", "--standalone", "--nproc-per-node", "2", str(HERE / "train_gpt.py"),
    "--strategy", "fsdp2", "--steps", str(STEPS), "--width", "192", "--batch", "4",
)  # fmt: skip


def zeromon(*words: str) -> list[str]:
    """The command line of the zeromon that runs this script."""
    return [sys.executable, "-m", "zeromon", *words]


def main() -> int:
    """Trains, shows the live view, prints the report; returns the exit code of the training."""
    run = f"demo-{time.strftime('%H%M%S')}"
    print(f"training a small GPT with FSDP2 on 2 processes, {STEPS} steps, about a minute")
    command = zeromon("run", "--name", run, "--", *TRAIN)
    if sys.stdout.isatty() and sys.stdin.isatty():
        code = train_in_background(command, run)
    else:
        code = subprocess.run(command, check=False).returncode
    subprocess.run(zeromon("report", run, "--wait", "15"), check=False)
    return code


def train_in_background(command: list[str], run: str) -> int:
    """Trains into a log file while the live view has the terminal."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
        training = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        print(f"training output: {log.name}; opening the live view ...")
        if wait_for_ranks(run, training):
            subprocess.run(zeromon("attach", run), check=False)
        if training.poll() is None:
            print("ending the training ...")
            training.terminate()
            training.wait()
            return 0
        return training.returncode


def wait_for_ranks(run: str, training: subprocess.Popen) -> bool:
    """Whether a rank reported before the training ended."""
    while training.poll() is None:
        try:
            if find_live_runs(run)[0].open().latest().ranks:
                return True
        except ZeromonError:
            pass  # not yet
        time.sleep(0.2)
    return False


if __name__ == "__main__":
    sys.exit(main())
