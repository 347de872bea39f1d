"""ZeRO-3 training of a decoder with a periodic export of the embedding table for the retrieval team."""
import argparse
import os

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM


def cli():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--config", default="EleutherAI/gpt-neox-20b")
    p.add_argument("--bin", default="/mnt/corpus/train.u16")
    p.add_argument("--seq-len", type=int, default=2048)
    p.add_argument("--export-every", type=int, default=500)
    p.add_argument("--max-steps", type=int, default=20000)
    p.add_argument("--out", default="/mnt/out/neox20b")
    p.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    return deepspeed.add_config_arguments(p).parse_args()


class Blocks(Dataset):
    def __init__(self, path, n):
        self.mm, self.n = np.memmap(path, np.uint16, "r"), n

    def __len__(self):
        return self.mm.size // self.n

    def __getitem__(self, i):
        return torch.as_tensor(self.mm[i * self.n:(i + 1) * self.n].astype(np.int64))


def export_embeddings(engine, path):
    """All ranks enter; the table is partitioned so it is put together for the time of the copy."""
    emb = engine.module.get_input_embeddings()
    with deepspeed.zero.gather_distributed_parameters([emb.weight]):
        if dist.get_rank() == 0:
            np.save(path, emb.weight.detach().float().cpu().numpy())
    dist.barrier()


def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    args = cli()
    deepspeed.init_distributed()
    torch.cuda.set_device(args.local_rank)
    torch.manual_seed(2024)
    os.makedirs(args.out, exist_ok=True)

    hf = AutoConfig.from_pretrained(args.config)
    hf.use_cache = False
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = AutoModelForCausalLM.from_config(hf)
    model.gradient_checkpointing_enable()

    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    gas = engine.gradient_accumulation_steps()

    ds = Blocks(args.bin, args.seq_len)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler,
                        num_workers=2, pin_memory=True, drop_last=True)

    batches = forever(loader, sampler)
    for step in range(1, args.max_steps + 1):
        for _ in range(gas):
            ids = next(batches).to(engine.device, non_blocking=True)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(step, round(loss.item(), 4), flush=True)
        if step % args.export_every == 0:
            export_embeddings(engine, f"{args.out}/emb_{step}.npy")
            engine.save_checkpoint(args.out, tag=f"s{step}")


if __name__ == "__main__":
    main()
