"""The compiled fold, which a wheel may have, does what the modules do as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from compiled import MODULES, compile_into

pytestmark = pytest.mark.long
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the compiled copy."""
    folder = tmp_path_factory.mktemp("compiled")
    assert len(compile_into(folder)) == len(MODULES) + 2  # mypyc's own, and the hooks
    return folder


def run(folder: Path, *words: str | Path) -> str:
    """What Python prints with the package in *folder*."""
    path = os.pathsep.join(map(str, (folder, ROOT / "agents", ROOT / "dashboard", ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_all_recordings_are_folded_alike_to_the_bit(compiled: Path) -> None:
    """Whole and damaged, in many polls: states, totals, waits and snapshots."""
    first, *plain = run(ROOT, HERE / "folded_states.py").splitlines()
    second, *fast = run(compiled, HERE / "folded_states.py").splitlines()
    assert first.endswith(".py") and second.endswith(".so")
    assert len(plain) > 300 and len(set(plain)) > 100
    assert fast == plain


def test_the_same_tests_pass(compiled: Path) -> None:
    shown = run(
        compiled, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE,
        ROOT / "tests/diagnosis/test_stragglers.py", ROOT / "tests/snapshot",
        ROOT / "tests/storage/test_run_store.py", "-m", "not long",
    )  # fmt: skip
    assert "[100%]" in shown
