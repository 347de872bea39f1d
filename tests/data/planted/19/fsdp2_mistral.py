"""Mistral-7B long-context adaptation with FSDP2; exports HF weights after every epoch."""
import logging
import os
import sys

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, get_constant_schedule_with_warmup

HP = {
    "model": "mistralai/Mistral-7B-v0.3",
    "data": "/data/books_16k",
    "out": "/ckpt/mistral-16k",
    "epochs": 2,
    "lr": 8e-6,
    "clip": 1.0,
    "offload": False,
}
logger = logging.getLogger("mistral16k")


def init():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    logging.basicConfig(stream=sys.stdout, level=logging.INFO if dist.get_rank() == 0 else logging.ERROR)
    torch.manual_seed(2)
    return init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))


def shard(model, mesh, offload):
    kw = dict(
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
    )
    for block in model.model.layers:
        fully_shard(block, **kw)
    fully_shard(model, **kw)
    return model


def export(model, tok, path):
    if dist.get_rank() != 0:
        return
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    os.makedirs(path, exist_ok=True)
    model.config.save_pretrained(path)
    tok.save_pretrained(path)
    torch.save(weights, os.path.join(path, "pytorch_model.bin"))
    logger.info("exported %d tensors to %s", len(weights), path)


def collate(rows):
    return torch.tensor([r["input_ids"] for r in rows], dtype=torch.long)


def train_epoch(model, loader, opt, sched, clip, tag):
    model.train()
    for i, ids in enumerate(loader):
        ids = ids.cuda(non_blocking=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if i % 20 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown, op=dist.ReduceOp.AVG)
            logger.info("%s %d/%d loss %.4f", tag, i, len(loader), shown.item())


def main():
    mesh = init()
    tok = AutoTokenizer.from_pretrained(HP["model"])
    model = AutoModelForCausalLM.from_pretrained(HP["model"], torch_dtype=torch.float32)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = shard(model, mesh, HP["offload"])

    opt = torch.optim.AdamW(model.parameters(), lr=HP["lr"], betas=(0.9, 0.95))
    sched = get_constant_schedule_with_warmup(opt, num_warmup_steps=50)
    ds = load_from_disk(HP["data"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=1, sampler=sampler, collate_fn=collate, num_workers=2, pin_memory=True)

    for epoch in range(HP["epochs"]):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, opt, sched, HP["clip"], f"epoch {epoch}")
        export(model, tok, f"{HP['out']}/epoch{epoch}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
