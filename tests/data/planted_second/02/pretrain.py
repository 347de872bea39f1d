import argparse

import deepspeed
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class TokenFile(Dataset):
    def __init__(self, path, seq_len):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.seq_len = seq_len

    def __len__(self):
        return len(self.tokens) // self.seq_len

    def __getitem__(self, i):
        a = i * self.seq_len
        return torch.from_numpy(self.tokens[a:a + self.seq_len].astype(np.int64))


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--data", default="tokens.bin")
    p.add_argument("--epochs", type=int, default=1)
    p.add_argument("--save_dir", default="ckpt")
    return deepspeed.add_config_arguments(p).parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    model = GPT2LMHeadModel(GPT2Config(n_layer=24, n_embd=1024, n_head=16, use_cache=False))
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(),
        training_data=TokenFile(args.data, 1024))
    for epoch in range(args.epochs):
        loader.data_sampler.set_epoch(epoch)
        for ids in loader:
            ids = ids.to(engine.device, non_blocking=True)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(args.save_dir, tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
