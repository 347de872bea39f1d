"""Runs the command `zeromon`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from zeromon.cli import main


def environment(home: Path) -> dict[str, str]:
    """This process's environment, with the folders of zeromon in *home*."""
    others = {k: v for k, v in os.environ.items() if not k.startswith("ZEROMON")}
    return others | {"ZEROMON_DIR": str(home / "rings"), "ZEROMON_STORE": str(home / "store")}


def zeromon(
    home: Path, *words: str, cwd: str | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zeromon", *words],
        env=environment(home) | extra,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
    )


def zeromon_here(home: Path, *words: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    """As :func:`zeromon`, within this process, which has imported everything: half a second less."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        for name in os.environ.keys() - (known := environment(home)).keys():
            patch.delenv(name)
        for name, value in known.items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        try:
            code = main(words)
        except SystemExit as left:
            code = int(left.code or 0)
    for stream in (output, errors):
        stream.seek(0)
    return subprocess.CompletedProcess(words, code, output.read(), errors.read())
