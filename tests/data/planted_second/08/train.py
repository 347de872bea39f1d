import argparse
import os

import deepspeed
import torch
from datasets import load_from_disk
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, default_data_collator


class Run:
    def __init__(self, a):
        self.a = a
        model = AutoModelForCausalLM.from_pretrained(a.model, torch_dtype=torch.bfloat16, use_cache=False)
        model.gradient_checkpointing_enable()
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                               config=a.ds_config)
        data = load_from_disk(a.data)
        self.sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, batch_size=self.engine.train_micro_batch_size_per_gpu(),
                                 sampler=self.sampler, num_workers=4, pin_memory=True, drop_last=True,
                                 collate_fn=default_data_collator)

    def fit(self):
        self.engine.train()
        for epoch in range(self.a.epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                batch = {k: v.to(self.engine.device, non_blocking=True) for k, v in batch.items()}
                loss = self.engine(**batch).loss
                self.engine.backward(loss)
                self.engine.step()
            self.engine.save_checkpoint(self.a.out, tag=f"epoch{epoch}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    p.add_argument("--ds_config", default="ds.json")
    p.add_argument("--model", default="mistralai/Mistral-7B-v0.1")
    p.add_argument("--data", default="data/packed")
    p.add_argument("--out", default="ckpt")
    p.add_argument("--epochs", type=int, default=1)
    args = p.parse_args()
    deepspeed.init_distributed()
    torch.cuda.set_device(args.local_rank)
    Run(args).fit()
