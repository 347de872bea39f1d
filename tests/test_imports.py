"""What importing costs, and which way the imports point."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
        ("import zeromon", set()),
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
