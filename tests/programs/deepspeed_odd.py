"""Odd turns of DeepSpeed scripts, on two ranks: `deepspeed_odd.py CASE [CASE ...]`.

Rank 0 prints one JSON object: for each case what DeepSpeed itself says (its engines' steps, in the
order in which they were made), and whether training went on as it must.
"""

import gc
import json
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import __compatible_ops__
from leave import leave
from torch import nn

__compatible_ops__["deepspeed_shm_comm"] = False
get_accelerator().is_fp16_supported = lambda: True
WIDTH = 64


class Net(nn.Module):
    """Three layers; *tied*: the first and the last share their weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.last(torch.relu(x)).float().pow(2).mean()


def build(stage: int, model: nn.Module | None = None, **config):
    torch.manual_seed(0)
    zero = {
        "stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000,
        "stage3_prefetch_bucket_size": config.pop("prefetch", 100_000),
    }  # fmt: skip
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if "fp16" not in config:
        base["bf16"] = {"enabled": True}
    model = model or Net()
    params = config.pop("model_parameters", None) or [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=params, config=base | config)[0]


def inputs(engine, scale: float = 1.0) -> torch.Tensor:
    kind = torch.float16 if engine.fp16_enabled() else torch.bfloat16
    return torch.full((2, WIDTH), 0.1 * scale, dtype=kind)


def steps(engine, count: int, scale: float = 1.0) -> float:
    for _ in range(count):
        loss = engine(inputs(engine, scale))
        engine.backward(loss)
        engine.step()
    return float(loss)


def told(*engines) -> dict:
    return {"steps": [e.global_steps for e in engines], "skipped": [e.skipped_steps for e in engines]}


def rebuilt() -> dict:
    first = build(2)
    steps(first, 2)
    facts = told(first)
    first.destroy()
    del first
    gc.collect()
    second = build(3)
    steps(second, 3)
    return {k: facts[k] + v for k, v in told(second).items()}


def evaluated() -> dict:
    engine = build(3)
    for _ in range(3):
        steps(engine, 1)
        engine.eval()
        with torch.no_grad():
            engine(inputs(engine))
        engine.train()
    return told(engine)


def backward_raises() -> dict:
    engine = build(1)
    steps(engine, 1)
    loss = engine(inputs(engine))
    loss.register_hook(lambda _: (_ for _ in ()).throw(ValueError("injected")))
    raised = False
    try:
        engine.backward(loss)
    except ValueError:
        raised = True
    engine.zero_grad()
    steps(engine, 2)
    return told(engine) | {"raised": raised}


def diverged() -> dict:
    """The loss of rank 1 is no number in its last step."""
    engine = build(3)
    steps(engine, 2)
    loss = engine(inputs(engine))
    engine.backward(loss * float("nan") if dist.get_rank() == 1 else loss)
    engine.step()
    return told(engine)


def direct_backward() -> dict:
    engine = build(2)
    for _ in range(3):
        engine(inputs(engine)).backward()
        engine.step()
    return told(engine)


def frozen() -> dict:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config | {"bf16": {"enabled": True}}):
        model = Net()
    for param in model.first.parameters():
        param.requires_grad = False
    engine = build(3, model)
    steps(engine, 3)
    return told(engine)


def tied() -> dict:
    engine = build(3, Net(tied=True))
    steps(engine, 3)
    return told(engine)


def two_engines() -> dict:
    actor, critic = build(3), build(1)
    for _ in range(3):
        steps(actor, 1)
        steps(critic, 1)
    loss = actor(inputs(actor))
    actor.backward(loss)
    critic.backward(critic(inputs(critic)))
    actor.step()
    critic.step()
    return told(actor, critic)


def teacher() -> dict:
    """A frozen engine without an optimizer, used by its module alone, as many scripts distil."""
    student = build(3)
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    judge, *_ = deepspeed.initialize(model=Net(), config=config)
    for _ in range(4):
        with torch.no_grad():
            judge.module(inputs(student))
        steps(student, 1)
    return told(student, judge)


def compiled() -> dict:
    engine = build(1)
    engine.compile(backend="eager")
    steps(engine, 3)
    return told(engine)


def mixture() -> dict:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            expert = nn.Linear(WIDTH, WIDTH)
            self.moe = MoE(WIDTH, expert, num_experts=2, ep_size=2, min_capacity=0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, _, _ = self.moe(self.inner(x)[None])
            return x.float().pow(2).mean()

    model = Experts()
    group = {"params": list(model.parameters()), "name": "parameters"}
    groups = split_params_into_different_moe_groups_for_optimizer(group)
    engine = build(1, model, model_parameters=groups)
    steps(engine, 3)
    return told(engine)


def storm() -> dict:
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 22, "hysteresis": 1}
    engine = build(2, fp16=fp16)
    steps(engine, 8)
    for _ in range(20):  # from now on every gradient overflows
        engine.backward(engine(inputs(engine)) * 1e30)
        engine.step()
    scaler = engine.optimizer.loss_scaler
    return told(engine) | {"scale": scaler.cur_scale}


def starved() -> dict:
    """The prefetch bucket is smaller than any layer, so nothing is ever asked for ahead."""
    engine = build(3, prefetch=0)
    steps(engine, 30)
    return told(engine)


def never_steps() -> dict:
    engine = build(1, gradient_accumulation_steps=1000)
    for _ in range(80):
        engine.backward(engine(inputs(engine)))
    import time

    time.sleep(2.5)  # the collector looks once more before the end
    return told(engine)


def stopped() -> dict:
    """`stop()` in the middle of ZeRO-3: nothing stays patched, and training goes on."""
    from deepspeed.runtime import engine as module
    from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2

    import zeromon_agents

    classes = (
        module.DeepSpeedEngine,
        partitioned_param_coordinator.PartitionedParameterCoordinator,
        stage3.DeepSpeedZeroOptimizer_Stage3,
        stage_1_and_2.DeepSpeedZeroOptimizer,
        torch._C._distributed_c10d.ProcessGroup,
        torch._C._distributed_c10d.Work,
        __import__("deepspeed.ops.op_builder.builder", fromlist=["x"]).OpBuilder,
    )

    def ours() -> list[str]:
        return [
            f"{owner.__name__}.{name}"
            for owner in classes
            for name, value in vars(owner).items()
            # compiled hooks have a type of their own, the others a code
            if "zeromon" in getattr(getattr(value, "__code__", None), "co_filename", "")
            or "zeromon" in type(value).__module__
        ]

    engine = build(3)
    steps(engine, 3)
    during = ours()
    zeromon_agents.stop()
    after = ours()
    steps(engine, 2)
    return told(engine) | {"during": len(during), "after": after}


if __name__ == "__main__":
    deepspeed.init_distributed()
    facts = {case: globals()[case]() for case in sys.argv[1:]}
    if dist.get_rank() == 0:
        os.write(1, f"\n{json.dumps(facts)}\n".encode())
    leave()
