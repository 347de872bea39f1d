"""Flan-T5-XL instruction tuning with FSDP (full shard, bf16)."""
import os
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block


@dataclass
class Cfg:
    model: str = "google/flan-t5-xl"
    data: str = "/data/flan_tokenized"
    bs: int = 8
    accum: int = 2
    epochs: int = 2
    lr: float = 5e-5
    max_norm: float = 1.0
    seed: int = 99


class Runner:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
        self.tok = AutoTokenizer.from_pretrained(cfg.model)
        base = T5ForConditionalGeneration.from_pretrained(cfg.model)
        self.model = FullyShardedDataParallel(
            base,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16,
                                           buffer_dtype=torch.bfloat16),
            device_id=torch.cuda.current_device(),
            use_orig_params=True,
        )
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        ds = load_from_disk(cfg.data)["train"]
        self.sampler = DistributedSampler(ds, seed=cfg.seed, drop_last=True)
        self.loader = DataLoader(ds, batch_size=cfg.bs, sampler=self.sampler, pin_memory=True, num_workers=4,
                                 collate_fn=DataCollatorForSeq2Seq(self.tok, label_pad_token_id=-100))
        self.step = 0

    def update(self):
        clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.step += 1

    def forward_backward(self, batch):
        batch = {k: v.to(self.local, non_blocking=True) for k, v in batch.items()}
        loss = self.model(**batch).loss / self.cfg.accum
        loss.backward()
        return loss.detach()

    def epoch(self, n):
        self.sampler.set_epoch(n)
        self.model.train()
        whole = len(self.loader) // self.cfg.accum * self.cfg.accum
        for i, batch in enumerate(islice(self.loader, whole), 1):
            if i % self.cfg.accum:
                with self.model.no_sync():
                    self.forward_backward(batch)
                continue
            loss = self.forward_backward(batch)
            self.update()
            if self.step % 20 == 0 and self.rank == 0:
                print(f"{n}/{self.step}: {loss.item() * self.cfg.accum:.4f}", flush=True)

    def save(self, path):
        FSDP = FullyShardedDataParallel
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT,
                                  FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            weights = self.model.state_dict()
        if self.rank == 0:
            torch.save(weights, path)


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    cfg = Cfg()
    torch.manual_seed(cfg.seed)
    runner = Runner(cfg)
    for n in range(cfg.epochs):
        runner.epoch(n)
        runner.save(f"flan_xl_{n}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
