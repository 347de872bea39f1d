"""The programs, a line each: how it is started, and what a report of it must say."""

from __future__ import annotations

from typing import NamedTuple

RANKS = 2
TORCHRUN = f"{{python}} -m torch.distributed.run --standalone --nproc-per-node {RANKS}"
RESTARTS = f"env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {TORCHRUN} --max-restarts 2"
"""Else a rank that starts again may read the addresses of the attempt that failed, and gloo fails."""
ACCELERATE = (
    "env ACCELERATE_USE_CPU=true {python} -m accelerate.commands.launch --multi_gpu --num_machines 1 "
    f"--num_processes {RANKS} --mixed_precision no --dynamo_backend no --main_process_port {{port}}"
)
AGAIN = ("ZM014", "ZM301", "ZM605")
FSDP1 = "torch's FSDP1 wants an accelerator unless it is given a device"
MEMORY = "its recipes read a device's memory statistics"
REFUSED = "Lightning refuses it"
SCRIPTS = "accelerate.test_utils.scripts"


class Program(NamedTuple):
    """A program of others. `{here}` is this folder, `{port}` a free port."""

    name: str
    command: str
    strategy: str
    """As the report must tell it."""
    steps: int
    """Optimizer steps of a rank in the last attempt."""
    attempts: int = 1
    judged: tuple[str, ...] = ("ZM301", "ZM605")
    """Codes of findings that a person has read on this program and found true: gloo on two cores."""
    fails: str = ""
    """Why it does not run on a CPU, with zeromon or without: its exit codes must be equal, and not 0."""


PROGRAMS = (
    Program("nanogpt", f"{TORCHRUN} {{here}}/nanogpt.py", "ddp", 20),
    Program("mp-spawn", "{python} {here}/nanogpt.py --spawn {port}", "ddp", 20),
    Program("elastic", f"{RESTARTS} {{here}}/elastic.py", "ddp", 12, 2, AGAIN),
    Program("checkpoint", f"{TORCHRUN} {{here}}/checkpoint.py", "fsdp2", 12),
    Program("hf-ddp", f"{TORCHRUN} {{here}}/hf_trainer.py ddp", "ddp", 10),
    Program("hf-fsdp2", f"{TORCHRUN} {{here}}/hf_trainer.py fsdp2", "ddp", 10),
    Program("hf-zero2", f"{TORCHRUN} {{here}}/hf_trainer.py zero2", "deepspeed-zero2", 10),
    Program("hf-zero3", f"{TORCHRUN} {{here}}/hf_trainer.py zero3", "deepspeed-zero3", 10),
    Program("accelerate-sync", f"{ACCELERATE} -m {SCRIPTS}.test_sync", "ddp", 5),
    Program("accelerate-loop", f"{ACCELERATE} {{here}}/accelerated.py", "ddp", 12),
    Program("trl-sft", f"{TORCHRUN} {{here}}/trl_sft.py", "ddp", 8),
    Program("lightning-ddp", "{python} {here}/lightning_trainer.py ddp", "ddp", 12),
    Program("lightning-fsdp1", "{python} {here}/lightning_trainer.py fsdp1", "", 0, fails=FSDP1),
    Program("lightning-fsdp2", "{python} {here}/lightning_trainer.py fsdp2", "fsdp2", 12),
    Program("lightning-fsdp", "{python} {here}/lightning_trainer.py fsdp", "", 0, fails=REFUSED),
    Program("torchtune", "{python} {here}/tuned.py full_finetune_distributed", "", 0, fails=MEMORY),
    Program("torchtitan", f"{TORCHRUN} -m torchtitan.train", "", 0, fails="it imports triton"),
)  # fmt: skip
