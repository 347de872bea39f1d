r"""Trains the GPT of train_gpt.py with Hugging Face accelerate and DeepSpeed ZeRO-3.

    zeromon run -- accelerate launch --config_file examples/deepspeed/accelerate.yaml \
        examples/train_gpt_accelerate.py --steps 50

The YAML file names the DeepSpeed file; accelerate fills in its "auto" values. On CPUs accelerate treats
every rank as a separate job, so there the data is not divided among the ranks. The script contains
nothing of zeromon.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from train_gpt import GPT, Bytes, read_text


def train(options: argparse.Namespace) -> list[float]:
    """The training loop; returns the loss of every optimizer step."""
    if not torch.cuda.is_available():  # no compiler needed there
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = Accelerator()
    torch.manual_seed(options.seed)
    model = GPT(options.width, options.layers, options.heads, options.length, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = DataLoader(
        Bytes(read_text(options), options.length), options.batch, shuffle=True, drop_last=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for step, (tokens, targets) in zip(range(1, options.steps + 1), loader, strict=False):
        logits = model(tokens.to(accelerator.device))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.to(accelerator.device).flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % options.log_every == 0 or step == options.steps:
            accelerator.print(f"step {step:5d}  loss {losses[-1]:.4f}", flush=True)
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return losses


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="any file; default: the standard library's sources")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
