"""Starts the collector of this node when none runs."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from zeromon.ring import paths


def ensure_collector(root: Path, settings: Mapping[str, str] = MappingProxyType({})) -> None:
    """Starts a collector for *root* when no process holds its lock. Never called by the training thread.

    *settings* are environment variables that this process does not have itself.
    """
    environment = {**os.environ, **settings}
    if environment.get("ZEROMON_COLLECTOR") == "off" or collector_runs(root):
        return
    python = environment.get("ZEROMON_PYTHON") or sys.executable
    inherited = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "LD_PRELOAD")}
    source = str(Path(__file__).resolve().parents[2])
    inherited["PYTHONPATH"] = os.pathsep.join((str(paths.CORE), source))
    inherited["ZEROMON_DIR"] = str(root)
    inherited.pop("ZEROMON_SHIM", None)
    with suppress(OSError, subprocess.SubprocessError):
        # the command puts itself into the background and returns at once
        subprocess.run(
            [python, "-m", "zeromon.collector", "--daemon"],
            cwd="/",
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )


def collector_runs(root: Path) -> bool:
    """Whether a process holds the collector's lock of *root*; also where no lock can be made."""
    try:
        fd = os.open(root / "collector.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return True  # no collector could be started there either
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
