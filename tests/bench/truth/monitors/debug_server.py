"""torch's debug server: a page with the stacks of all ranks."""

from __future__ import annotations

import os
import re
import urllib.request
from contextlib import suppress
from typing import Any

import monitor
from monitor import Monitor, Run, Shown

PORT = 25123


class Lines(monitor.Lines):
    """The server of each rank."""

    def begin(self) -> None:
        from torch.distributed.debug import start_debug_server

        start_debug_server(port=int(os.environ["DEBUG_PORT"]))


def _live(run: Run) -> dict[str, Any]:
    """The page with the stacks of all ranks."""
    if not run.must_name:
        return {}
    with suppress(OSError):
        answer = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/stacks", timeout=10)
        stacks = re.split(r"Rank \d+:", answer.read().decode())[1:]
        stuck = [rank for rank, stack in enumerate(stacks) if "stand_still" in stack]
        if stuck:
            return {"cause": Shown("hang"), "rank": Shown(stuck[0]), "stuck in": Shown("stand_still")}
    return {}


MONITOR = Monitor(
    "debug server", "torch", lines=2, answers={"gloo": ["hang"], "virtual": ["hang-ddp", "hang-fsdp2"]},
    environment={"DEBUG_PORT": str(PORT)}, live=_live,
)  # fmt: skip
