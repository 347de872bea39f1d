import json
import os

import deepspeed
import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, default_data_collator
from transformers.integrations import HfDeepSpeedConfig


class Checkpointer:
    def __init__(self, engine, folder, every):
        self.engine, self.folder, self.every = engine, folder, every
        self.main = engine.global_rank == 0

    def maybe_save(self, step, epoch):
        if step == 0 or step % self.every:
            return
        if self.main:
            os.makedirs(self.folder, exist_ok=True)
            print(f"saving at step {step}", flush=True)
            self.engine.save_checkpoint(self.folder, tag=f"step{step}", client_state={"epoch": epoch})


def main():
    with open("ds_z3.json") as f:
        cfg = json.load(f)
    deepspeed.init_distributed()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    hf_ds = HfDeepSpeedConfig(cfg)  # kept alive: from_pretrained shards at load
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", torch_dtype=torch.bfloat16,
                                                 use_cache=False)
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=cfg)
    data = load_from_disk("data/packed_4k")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, cfg["train_micro_batch_size_per_gpu"], sampler=sampler, num_workers=4,
                        pin_memory=True, drop_last=True, collate_fn=default_data_collator)
    ckpt = Checkpointer(engine, "ckpt", every=2000)
    step = 0
    engine.train()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.to(engine.device, non_blocking=True) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            ckpt.maybe_save(step, epoch)
            step += 1
    engine.save_16bit_model("final")
    del hf_ds
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
