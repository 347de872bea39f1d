# Full-parameter fine-tune of a 70B model with accelerate + DeepSpeed ZeRO-3.
import argparse
import json
import pathlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup


class ChatRows(Dataset):
    def __init__(self, path, tok, max_len):
        self.rows = [json.loads(x) for x in pathlib.Path(path).read_text().splitlines()]
        self.tok, self.max_len = tok, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text = self.tok.apply_chat_template(self.rows[i]["messages"], tokenize=False)
        return self.tok(text, truncation=True, max_length=self.max_len, add_special_tokens=False)


def collator(tok):
    def fn(rows):
        batch = tok.pad(rows, padding=True, return_tensors="pt")
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    return fn


def save(accelerator, model, tok, out):
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)  # every process takes part
    accelerator.unwrap_model(model).save_pretrained(
        out,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    if accelerator.is_main_process:
        tok.save_pretrained(out)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="meta-llama/Llama-3.1-70B-Instruct")
    p.add_argument("--train", default="/lustre/chat/train.jsonl")
    p.add_argument("--out", default="/lustre/runs/l70b-chat")
    p.add_argument("--max-len", type=int, default=4096)
    p.add_argument("--bs", type=int, default=1)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=5e-6)
    args = p.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2, log_with="tensorboard", project_dir=args.out)
    set_seed(3407)
    accelerator.init_trackers("l70b")

    tok = AutoTokenizer.from_pretrained(args.model)
    tok.pad_token = tok.pad_token or tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        args.model, torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2"
    )
    model.gradient_checkpointing_enable()
    model.config.use_cache = False

    loader = DataLoader(ChatRows(args.train, tok, args.max_len), batch_size=args.bs, shuffle=True,
                        collate_fn=collator(tok), num_workers=4, pin_memory=True)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    steps = args.epochs * len(loader) // accelerator.gradient_accumulation_steps
    sched = get_cosine_schedule_with_warmup(optim, int(0.03 * steps), steps)
    model, optim, loader, sched = accelerator.prepare(model, optim, loader, sched)

    done = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optim.step()
                sched.step()
                optim.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done % 10 == 0:
                    accelerator.log({"loss": accelerator.gather(loss.detach()).mean().item()}, step=done)
        save(accelerator, model, tok, f"{args.out}/epoch{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
