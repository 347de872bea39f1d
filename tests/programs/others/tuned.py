"""`tune run full_finetune_distributed`, torchtune's own recipe and launcher, on a model made here.

torchtune.yaml names what is defined here: rows of chance, and a tokenizer that the rows do not need.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Tokens:
    """A tokenizer's part that the recipe asks for."""

    pad_id = 0


class Rows:
    def __init__(self, tokenizer, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import torch

        row = torch.randint(1, 64, (24,), generator=torch.Generator().manual_seed(index)).tolist()
        return {"tokens": row, "labels": row}


def main():
    import torch
    from omegaconf import OmegaConf
    from torchtune import config

    torch.manual_seed(0)
    written = OmegaConf.load(HERE / "torchtune.yaml")
    Path("base").mkdir()
    torch.save(config.instantiate(written.model).state_dict(), "base/model.pt")
    tune = [sys.executable, "-m", "torchtune._cli.tune", "run", "--nnodes", "1", "--nproc_per_node", "2"]
    recipe = [sys.argv[1], "--config", str(HERE / "torchtune.yaml"), *sys.argv[2:]]
    return subprocess.run([*tune, *recipe], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
