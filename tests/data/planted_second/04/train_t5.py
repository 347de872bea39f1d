import argparse
import json

import deepspeed
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration


class Pairs(torch.utils.data.Dataset):
    def __init__(self, path):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]["src"], self.rows[i]["tgt"]


class Collate:
    def __init__(self, tok):
        self.tok = tok

    def __call__(self, rows):
        src, tgt = zip(*rows)
        x = self.tok(list(src), padding=True, truncation=True, max_length=512, return_tensors="pt")
        y = self.tok(list(tgt), padding=True, truncation=True, max_length=128, return_tensors="pt").input_ids
        x["labels"] = y.masked_fill(y == self.tok.pad_token_id, -100)
        return x


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--train", default="pairs.jsonl")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed("nccl")
    tok = AutoTokenizer.from_pretrained("google/t5-v1_1-large")
    model = T5ForConditionalGeneration(T5Config.from_pretrained("google/t5-v1_1-large"))
    engine, opt, loader, sched = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(),
        training_data=Pairs(args.train), collate_fn=Collate(tok))
    for epoch in range(4):
        loader.data_sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint("ckpt_t5", tag=f"e{epoch}")
