"""Swin-L fine-grained classification with accelerate (multi-node data parallel)."""
import argparse

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from torchvision import transforms as T
from transformers import AutoModelForImageClassification, get_cosine_schedule_with_warmup


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data_dir", default="/fsx/inat2021")
    p.add_argument("--model", default="microsoft/swin-large-patch4-window7-224-in22k")
    p.add_argument("--num_labels", type=int, default=10000)
    p.add_argument("--batch_size", type=int, default=64)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--output", default="/fsx/runs/swin-inat")
    return p.parse_args()


def pipelines():
    norm = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    train = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm])
    val = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm])
    return train, val


def with_tf(ds, tf):
    def apply(ex):
        ex["pixel_values"] = [tf(im.convert("RGB")) for im in ex["image"]]
        return ex

    return ds.with_transform(apply)


def collate(rows):
    return {"pixel_values": torch.stack([r["pixel_values"] for r in rows]),
            "labels": torch.tensor([r["label"] for r in rows])}


def main():
    args = parse_args()
    acc = Accelerator(
        gradient_accumulation_steps=args.accum,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=args.output, automatic_checkpoint_naming=True, total_limit=3),
    )
    set_seed(31)
    acc.init_trackers("swin")

    with acc.main_process_first():
        raw = load_dataset("imagefolder", data_dir=args.data_dir)
    ttf, vtf = pipelines()
    kw = dict(batch_size=args.batch_size, collate_fn=collate, num_workers=8, pin_memory=True)
    train_dl = DataLoader(with_tf(raw["train"], ttf), shuffle=True, drop_last=True, **kw)
    val_dl = DataLoader(with_tf(raw["validation"], vtf), **kw)

    model = AutoModelForImageClassification.from_pretrained(
        args.model, num_labels=args.num_labels, ignore_mismatched_sizes=True
    )
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    total = args.epochs * len(train_dl) // args.accum
    sched = get_cosine_schedule_with_warmup(opt, total // 20, total)
    model, opt, train_dl, val_dl, sched = acc.prepare(model, opt, train_dl, val_dl, sched)
    metric = evaluate.load("accuracy")

    updates = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            with acc.accumulate(model):
                loss = model(**batch).loss
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 5.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            if acc.sync_gradients:
                updates += 1
                if updates % 50 == 0:
                    acc.log({"loss": loss.item(), "lr": sched.get_last_lr()[0]}, step=updates)
        model.eval()
        for batch in val_dl:
            with torch.no_grad():
                pred = model(pixel_values=batch["pixel_values"]).logits.argmax(-1)
            pred, gold = acc.gather_for_metrics((pred, batch["labels"]))
            metric.add_batch(predictions=pred, references=gold)
        acc.print(f"epoch {epoch}", metric.compute())
        acc.save_state()
    acc.wait_for_everyone()
    acc.unwrap_model(model).save_pretrained(
        args.output, is_main_process=acc.is_main_process, save_function=acc.save
    )
    acc.end_training()


if __name__ == "__main__":
    main()
