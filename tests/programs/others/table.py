"""The programs, a line each: how it is started, and what a report of it must say."""

from __future__ import annotations

from typing import NamedTuple

RANKS = 2
TORCHRUN = f"{{python}} -m torch.distributed.run --standalone --nproc-per-node {RANKS}"
OWN_STORE = "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Else a rank that starts again may read the addresses of the attempt that failed, and gloo fails."""


class Program(NamedTuple):
    """A program of others. `{here}` is this folder, `{port}` a free port."""

    name: str
    command: str
    strategy: str
    """As the report must tell it."""
    steps: int
    """Optimizer steps of a rank in the last attempt."""
    attempts: int = 1
    judged: tuple[str, ...] = ()
    """Codes of findings that a person has read on this program and found true."""
    fails: str = ""
    """Why it does not run on a CPU, with zeromon or without: its exit codes must be equal, and not 0."""


PROGRAMS = (
    Program("nanogpt", f"{TORCHRUN} {{here}}/nanogpt.py", "ddp", 20),
    Program("mp-spawn", "{python} {here}/nanogpt.py --spawn {port}", "ddp", 20),
    Program("elastic", f"{OWN_STORE} {TORCHRUN} --max-restarts 2 {{here}}/elastic.py", "ddp", 12, 2),
    Program("checkpoint", f"{TORCHRUN} {{here}}/checkpoint.py", "fsdp2", 12),
)  # fmt: skip
