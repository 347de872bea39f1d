"""What importing costs, and which way the imports point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = Path(__file__).resolve().parents[1] / "tools" / "compiled.py"
HEAVY = {"torch", "textual", "dash", "plotly", "prometheus_client", "msgspec", "numpy", "rich"}


def loaded_by(statement: str, *, on_top_of: str = "") -> set[str]:
    """The packages that are loaded after *statement*, less those of *on_top_of*."""
    names = "{m.partition('.')[0] for m in sys.modules}"
    known = f"{on_top_of}; known = {names}" if on_top_of else "known = set()"
    code = f"import sys; {known}; {statement}; print(' '.join({names} - known))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import zeromon; zeromon.load, zeromon.compare", set()),
        ("import zeromon.cli.notebook", {"msgspec", "prometheus_client", "rich"}),
        ("import zeromon_agents", set()),
        ("import zeromon.ring.buffer, zeromon.ring.paths", set()),
        ("import zeromon.fold.state, zeromon.memory.forecast, zeromon.diagnosis.engine", set()),
        ("import zeromon.collector.daemon", {"msgspec"}),
        ("import zeromon.collector.http", {"msgspec", "prometheus_client"}),
        ("import zeromon.tui.app", {"msgspec", "textual", "rich"}),
        # what tools/build_hook.py needs of a build
        ("from zeromon.cli import build_parser; build_parser()", {"msgspec", "rich"}),
    ],
)
def test_a_module_loads_no_more_than_it_needs(statement: str, allowed: set[str]) -> None:
    """torch never; a library only where it is used."""
    assert loaded_by(statement) & HEAVY <= allowed


def test_the_agent_brings_nothing_into_the_training_process() -> None:
    """On top of torch: our own modules and the standard library."""
    agent = "import zeromon_agents.runtime.agent"
    loaded = loaded_by(agent, on_top_of="import torch, torch.distributed")
    new = {name for name in loaded if not name.startswith("_")}
    assert new - set(sys.stdlib_module_names) == {"zeromon", "zeromon_agents"}


def test_the_help_loads_no_view() -> None:
    """It is the first thing that a user sees: 50 ms, and 160 with the snapshot and its tables."""
    code = (
        "import sys, zeromon.cli\n"
        "try: zeromon.cli.main(['--help'])\n"
        "finally: sys.exit(' '.join({'zeromon.snapshot', 'zeromon.fold'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Watch" in done.stdout
    assert done.stderr.strip() == ""


def test_the_modules_that_may_be_compiled_are_there_once() -> None:
    listed = [line for line in COMPILED.read_text().splitlines() if line.startswith('    "zeromon/')]
    names = [line.strip(' ",') for line in listed]
    assert len(names) == len(set(names)) > 5
    assert all((COMPILED.parents[1] / name).is_file() for name in names)
