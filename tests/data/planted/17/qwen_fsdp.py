import argparse
import contextlib
import functools
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import FullStateDictConfig
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoTokenizer, Qwen2ForCausalLM, get_cosine_schedule_with_warmup
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer


def is_main():
    return dist.get_rank() == 0


@contextlib.contextmanager
def distributed():
    dist.init_process_group(backend="nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        yield int(os.environ["LOCAL_RANK"])
    finally:
        dist.destroy_process_group()


def get_model(name, local):
    net = Qwen2ForCausalLM.from_pretrained(name, torch_dtype=torch.float32)
    net.config.use_cache = False
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return FSDP(
        net,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy,
            transformer_layer_cls={Qwen2DecoderLayer},
        ),
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.bfloat16,
        ),
        device_id=local,
        use_orig_params=True,
    )


def get_data(path, tok, bs):
    ds = load_from_disk(path)

    def collate(rows):
        b = tok.pad([{"input_ids": r["input_ids"]} for r in rows], return_tensors="pt")
        b["labels"] = b["input_ids"].masked_fill(b["attention_mask"] == 0, -100)
        return b

    sampler = DistributedSampler(ds, num_replicas=dist.get_world_size(), rank=dist.get_rank(),
                                 shuffle=True, seed=1, drop_last=True)
    return DataLoader(ds, batch_size=bs, sampler=sampler, collate_fn=collate, num_workers=4, pin_memory=True)


def write(model, tok, out):
    conf = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, conf):
        sd = model.state_dict()
    if is_main():
        model.module.save_pretrained(out, state_dict=sd)
        tok.save_pretrained(out)


def main(a):
    with distributed() as local:
        torch.manual_seed(1)
        tok = AutoTokenizer.from_pretrained(a.model)
        model = get_model(a.model, local)
        loader = get_data(a.data, tok, a.bs)
        opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), fused=True)
        sched = get_cosine_schedule_with_warmup(opt, 100, a.epochs * len(loader))
        step = 0
        for epoch in range(a.epochs):
            model.train()
            for batch in loader:
                loss = model(**{k: v.to(local, non_blocking=True) for k, v in batch.items()}).loss
                loss.backward()
                model.clip_grad_norm_(a.clip)
                opt.step()
                sched.step()
                opt.zero_grad(set_to_none=True)
                step += 1
                if step % 25 == 0 and is_main():
                    print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            write(model, tok, os.path.join(a.out, f"epoch-{epoch}"))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="Qwen/Qwen2.5-7B")
    ap.add_argument("--data", default="/data/qwen_math")
    ap.add_argument("--out", default="/ckpt/qwen_math")
    ap.add_argument("--bs", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-5)
    ap.add_argument("--clip", type=float, default=1.0)
    main(ap.parse_args())
