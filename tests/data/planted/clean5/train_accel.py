"""accelerate + a DeepSpeed JSON, two nodes."""
import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup


def cli():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    ap.add_argument("--data", default="/shared/tok4k")
    ap.add_argument("--out", default="/shared/runs/l8b")
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=1e-5)
    return ap.parse_args()


def stack(rows):
    ids = torch.tensor([r["input_ids"] for r in rows])
    return {"input_ids": ids, "labels": ids.clone()}


class Saver:
    def __init__(self, acc, root):
        self.acc, self.root = acc, root

    def __call__(self, model, name):
        self.acc.wait_for_everyone()
        weights = self.acc.get_state_dict(model)
        self.acc.unwrap_model(model).save_pretrained(
            os.path.join(self.root, name),
            is_main_process=self.acc.is_main_process,
            save_function=self.acc.save,
            state_dict=weights,
        )


def main():
    args = cli()
    acc = Accelerator(gradient_accumulation_steps=args.accum)
    set_seed(12)

    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16)
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    loader = DataLoader(load_from_disk(args.data), batch_size=args.micro, shuffle=True, collate_fn=stack,
                        num_workers=4, pin_memory=True, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    total = args.epochs * len(loader) // args.accum
    sched = get_cosine_schedule_with_warmup(opt, total // 33, total)
    model, opt, loader, sched = acc.prepare(model, opt, loader, sched)
    save = Saver(acc, args.out)

    step = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            with acc.accumulate(model):
                loss = model(**batch).loss
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            if not acc.sync_gradients:
                continue
            step += 1
            if step % 20 == 0:
                mean = acc.reduce(loss.detach(), reduction="mean")
                acc.print(f"epoch {epoch} step {step} loss {mean.item():.4f}")
        save(model, f"epoch{epoch}")
    acc.end_training()


if __name__ == "__main__":
    main()
