"""Runs the command `zeromon`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def zeromon(
    home: Path, *words: str, cwd: str | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ZEROMON")}
    environment |= {"ZEROMON_DIR": str(home / "rings"), "ZEROMON_STORE": str(home / "store")}
    return subprocess.run(
        [sys.executable, "-m", "zeromon", *words],
        env=environment | extra,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
    )
