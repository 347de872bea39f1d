"""What the injected code calls, in a thread of its own: to join a run, and to leave it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from zeromon_agents.agent import Joined
from zeromon_agents.bootstrap import BOOTSTRAP


def join(run_dir: str, pid: int, settings: dict[str, str], *, any_process: bool) -> dict[str, Any]:
    """Starts the agent; returns who this is. Raises what keeps it from starting.

    *any_process*: also one without a process group, which may be no rank at all.
    """
    distributed = torch.distributed
    grouped = distributed.is_available() and distributed.is_initialized()
    if not grouped and not any_process:
        return {"refused": "it has no process group", "hint": "It is a launcher or a data worker."}
    if BOOTSTRAP.agent is not None:
        return {"watched": BOOTSTRAP.agent.run_dir.name, **_who()}
    BOOTSTRAP.join(Path(run_dir), Joined(pid, settings))
    return _who()


def leave() -> dict[str, Any]:
    """Takes every hook out; returns what somebody else has patched over."""
    agent = BOOTSTRAP.agent
    if agent is None:
        return {"refused": "it is not watched", "hint": "zeromon attach shows what is."}
    if agent.capture.recording:
        return {"refused": "a trace is being recorded", "hint": "Try again when it is saved."}
    who = _who()
    return {"kept": BOOTSTRAP.stop(), **who}


def _who() -> dict[str, Any]:
    agent = BOOTSTRAP.agent
    place = agent.place if agent is not None else None
    return {
        "rank": place.rank if place else 0,
        "world_size": place.world_size if place else 1,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
