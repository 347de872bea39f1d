"""Reads the Python stacks of another process with py-spy, where that is installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

_PATIENCE_SECONDS = 10.0
_FRAME = re.compile(r"^    (.+) \((.+):(\d+)\)$", re.MULTILINE)


def py_spy() -> str | None:
    """The path of py-spy: on PATH, or beside the Python that runs zeromon."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def stack_of(pid: int, *options: str) -> str:
    """The Python stacks of a process, or why they are unavailable."""
    spy = py_spy()
    if spy is None:
        return "py-spy is not installed: pip install py-spy"
    try:
        done = subprocess.run(
            [spy, "dump", "--pid", str(pid), *options],
            capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer in {_PATIENCE_SECONDS:.0f} s"
    except OSError as error:
        return f"py-spy cannot be started: {error.strerror}"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"py-spy: {reason} (same user, or CAP_SYS_PTRACE, is needed)"
    return done.stdout.strip()


def main_frames(pid: int) -> tuple[str, ...]:
    """``train.py:21 in main``: the frames of a process's main thread, the innermost last.

    The process is not stopped meanwhile. () where the stack cannot be read.
    """
    _, found, text = stack_of(pid, "--nonblocking", "--full-filenames").partition('"MainThread"')
    frames = _FRAME.findall(text.partition("\nThread ")[0]) if found else []
    return tuple(f"{file}:{line} in {function}" for function, file, line in reversed(frames))
