"""The calls of the injected payload, in a thread of its own: attach to this process, and detach."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zeromon_agents.observe.accelerator import leave_captures_alone
from zeromon_agents.runtime.bootstrap import BOOTSTRAP, check_torch

if TYPE_CHECKING:
    from zeromon_agents.runtime.agent import Agent


def attach(
    run_dir: str, pid: int, settings: dict[str, str], *, ipc: int, any_process: bool
) -> dict[str, Any]:
    """Starts the agent and returns which rank this is. Raises what keeps the agent from starting.

    *ipc*: the IPC namespace of the command that attaches.
    *any_process*: also attaches to a process without a process group, which may be no rank.
    """
    # First: in the default capture mode, a query of this thread would end a capture in another
    leave_captures_alone()
    distributed = torch.distributed
    grouped = distributed.is_available() and distributed.is_initialized()
    if not grouped and not any_process:
        return {"refused": "it has no process group", "hint": "It is a launcher or a data worker."}
    if BOOTSTRAP.agent is not None:
        return {"watched": BOOTSTRAP.agent.run_dir.name, **_rank_identity(BOOTSTRAP.agent)}
    check_torch()
    from zeromon_agents.runtime.agent import Attachment

    return _rank_identity(BOOTSTRAP.attach(Path(run_dir), Attachment(pid, settings, ipc)))


def detach() -> dict[str, Any]:
    """Removes every hook and returns the names that another tool has patched since."""
    leave_captures_alone()
    agent = BOOTSTRAP.agent
    if agent is None:
        return {"refused": "it is not watched", "hint": "zeromon attach shows what is."}
    if agent.capture.recording:
        return {"refused": "a trace is being recorded", "hint": "Try again when it is saved."}
    return {"kept": BOOTSTRAP.stop(), **_rank_identity(agent)}


def _rank_identity(agent: Agent) -> dict[str, Any]:
    return {
        "rank": agent.rank_info.rank,
        "world_size": agent.rank_info.world_size,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
