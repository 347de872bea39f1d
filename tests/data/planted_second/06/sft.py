import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, default_data_collator, get_cosine_schedule_with_warmup


def options():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="meta-llama/Llama-2-13b-hf")
    ap.add_argument("--data", default="data/packed_2k")
    ap.add_argument("--steps", type=int, default=4000)
    ap.add_argument("--out", default="out/sft13b")
    return ap.parse_args()


def main():
    o = options()
    set_seed(17)
    acc = Accelerator(gradient_accumulation_steps=4)
    model = AutoModelForCausalLM.from_pretrained(o.model, torch_dtype=torch.bfloat16, use_cache=False)
    model.gradient_checkpointing_enable()
    loader = DataLoader(load_from_disk(o.data), batch_size=2, shuffle=True, drop_last=True,
                        num_workers=4, pin_memory=True, collate_fn=default_data_collator)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
    sched = get_cosine_schedule_with_warmup(opt, 100 * acc.num_processes, o.steps * acc.num_processes)
    model, opt, loader, sched = acc.prepare(model, opt, loader, sched)
    done = 0
    model.train()
    while done < o.steps:
        for batch in loader:
            with acc.accumulate(model):
                loss = model(**batch).loss
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            if acc.sync_gradients:
                done += 1
                if done % 1000 == 0:
                    acc.save_state(f"{o.out}/step{done}")
                if done >= o.steps:
                    break
    acc.wait_for_everyone()
    state = acc.get_state_dict(model)
    acc.unwrap_model(model).save_pretrained(o.out, is_main_process=acc.is_main_process,
                                            save_function=acc.save, state_dict=state)
    acc.end_training()


if __name__ == "__main__":
    main()
