"""Predicted against measured memory, beside others: `python tests/bench/bench_prediction.py`.

Real runs on two gloo ranks. Measured: parameters, masters, gradients, optimizer state and buckets at the
optimizer step, by zeromon's census; gathered parameters at their peak. DeepSpeed's estimators
(``estimate_zero{2,3}_model_states_mem_needs``) are asked for the same parameters and ranks, without
their factor for the host; accelerate's (``estimate_training_usage``) knows no sharding.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate.commands.estimate import estimate_training_usage
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from records import keep
from support import ROOT, TORCHRUN, Node

RANKS = 2
SIZE = "--width 256 --layers 4 --batch 2 --length 64 --steps 4".split()
TORCH = ("ddp", "zero1", "fsdp2", "fsdp2-zero2", "fsdp1-full")
DEEPSPEED = ("zero0", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload")


def deepspeeds(stage: int, params: int, largest: int, *, offload: bool) -> int | None:
    """DeepSpeed's own figure for one rank, device and host together; None where it has none."""
    if stage == 3:
        host, device, _ = estimate_zero3_model_states_mem_needs(
            params, largest, RANKS, 1, offload, False, True, 1.0
        )
        return device + (host // RANKS if offload else 0)
    if stage == 2:
        host, device = estimate_zero2_model_states_mem_needs(params, RANKS, 1, offload, 1.0)
        return device + (host // RANKS if offload else 0)
    return None


def accelerates(params: int, *, half: bool) -> int:
    """accelerate's figure: model, gradients and optimizer, no sharding."""
    usage = estimate_training_usage(4 * params, "bfloat16" if half else "float32")
    return int(usage["model"] + usage["gradients"] + usage["optimizer"])


def main() -> None:
    """One line a strategy."""
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    for name in (*TORCH, *(f"deepspeed {config}" for config in DEEPSPEED)):
        is_deepspeed = name.startswith("deepspeed")
        if is_deepspeed:
            config = ROOT / "examples" / "deepspeed" / f"{name.split()[1]}.json"
            program = [str(ROOT / "examples/train_gpt_deepspeed.py"), "--config", str(config),
                       "--no-compile"]  # fmt: skip
        else:
            program = [str(ROOT / "examples/train_gpt.py"), "--strategy", name]
        run = node.run([*TORCHRUN, str(RANKS), *program, *SIZE], timeout=300)
        assert run.code == 0, run.output
        rank = run.snapshot.ranks[0]
        rows = [r for r in rank.memory.expected if r.measured_bytes is not None]
        measured = sum(r.measured_bytes or 0 for r in rows)
        ours = sum(r.predicted_bytes or 0 for r in rows)
        facts = rank.config.models[0]
        params, largest = int(facts["numel"]), max(facts.get("units") or [0])
        theirs = {
            "deepspeed": deepspeeds(
                facts["stage"], params, largest, offload=facts.get("optimizer_on") == "host"
            )
            if is_deepspeed
            else None,
            "accelerate": accelerates(params, half=is_deepspeed),
        }
        keep(name, ours / measured - 1, "of the measured", "zero", noise=0.001)
        off = {k: None if v is None else v / measured - 1 for k, v in theirs.items()}
        shown = "  ".join(f"{k} {'-' if v is None else f'{v:+.1%}'}" for k, v in off.items())
        print(
            f"{name:24} measured {measured / 1e6:7.2f} MB  zeromon {ours / measured - 1:+.2%} "
            f"(target 2 %)  {shown}",
            flush=True,
        )
    node.close()


if __name__ == "__main__":
    main()
