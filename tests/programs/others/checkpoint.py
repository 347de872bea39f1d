"""FSDP2 with activation checkpointing, accumulation, workers, and `torch.distributed.checkpoint`.

Saves in the middle (synchronously, then asynchronously), loads at the end, and prints what it loaded.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WIDTH, STEPS, ACCUMULATED, EVALUATE_EVERY = 64, 12, 2, 5


class Rows(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.randint(0, 128, (16,), generator=torch.Generator().manual_seed(index))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + checkpoint(self.mlp, x, use_reentrant=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, rows):
        x = self.embedding(rows)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), rows.flatten())


def state(model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def main():
    dist.init_process_group("cpu:gloo")
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Rows()
    loader = iter(DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=2))
    saving, savers = None, dist.new_group(backend="gloo")
    for step in range(1, STEPS + 1):
        for micro in range(ACCUMULATED):
            model.set_requires_gradient_sync(micro == ACCUMULATED - 1)
            loss = model(next(loader))
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} step {step} {loss.item().hex()} {norm.item().hex()}")
        if step == 4:
            dcp.save(state(model, optimizer), checkpoint_id="sync")
        if step == 8:
            found = state(model, optimizer)
            saving = dcp.async_save(found, checkpoint_id="async", process_group=savers)
        if step % EVALUATE_EVERY == 0:
            model.eval()
            with torch.no_grad():
                print(f"evaluated {model(next(loader)).item().hex()}")
            model.train()
    saving.result()
    loaded = state(model, optimizer)
    dcp.load(loaded, checkpoint_id="async")
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    total = sum(param.to_local().double().sum().item() for param in model.parameters())
    print(f"rank {dist.get_rank()} loaded {total.hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
