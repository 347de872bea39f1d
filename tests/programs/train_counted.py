"""examples/train_gpt.py, and beside it an independent count of what it communicated.

Writes --out RANK.json: the losses (exactly), what C++ itself recorded, and the sizes of the
model's parameters, from which the test computes what each strategy must send.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import torch.distributed as dist
from c10d_record import Record
from leave import leave

spec = importlib.util.spec_from_file_location(
    "train_gpt", Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
)
train_gpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_gpt)

SMALL = ["--width", "32", "--layers", "3", "--heads", "2", "--length", "32", "--batch", "2"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    ours, rest = parser.parse_known_args()
    options = train_gpt.parse([*SMALL, *rest])
    facts = {}
    destroy = dist.destroy_process_group

    def dump_then_destroy() -> None:
        facts.update(record.facts, flight=record.entries())
        facts["rank"] = dist.get_rank()
        facts["world"] = dist.get_world_size()
        destroy()

    if options.strategy == "none":
        facts["rank"] = 0
    record = Record()
    dist.destroy_process_group = dump_then_destroy
    model = train_gpt.GPT(options.width, options.layers, options.heads, options.length, False)
    facts["params"] = {name: list(p.shape) for name, p in model.named_parameters()}
    facts["losses"] = [loss.hex() for loss in train_gpt.train(options)]
    facts["watched"] = "zeromon_agents.runtime.agent" in sys.modules
    folder = Path(ours.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{facts['rank']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
    leave()
