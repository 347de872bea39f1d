"""Trains with DeepSpeed's PipelineEngine: two stages on two ranks, the second of which takes longer.

Sleeping takes time and no CPU, so the ranks compute at once however few cores there are. `--out` gets
the exact loss of each batch.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from deepspeed.pipe import LayerSpec, PipelineModule
from leave import leave
from torch import nn

__compatible_ops__["deepspeed_shm_comm"] = False
MICRO_BATCHES, SIZE, WIDTH = 4, 4, 8


class Layer(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return torch.tanh(self.linear(x))


def batches():
    while True:
        yield torch.randn(SIZE, WIDTH), torch.randn(SIZE, WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out")
    options = parser.parse_args()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    model = PipelineModule(
        [LayerSpec(Layer, 0.004), LayerSpec(Layer, 0.012)],
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_batch_size": MICRO_BATCHES * SIZE,
        "train_micro_batch_size_per_gpu": SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    data = batches()
    losses = []
    for step in range(options.steps):
        losses.append(engine.train_batch(data_iter=data).item().hex())
        if step % 5 == 4:  # an evaluation runs forwards of no batch of training
            engine.eval_batch(data_iter=data)
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
