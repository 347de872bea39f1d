"""examples/train_gpt_deepspeed.py, once for each of --cases CONFIG:ACCUMULATE, in one process.

Writes --out RANK.json: for each case the losses (exactly) and DeepSpeed's own step counters, and for
all of them what C++ itself recorded and the sizes of the model's parameters.
QUANTIZER=1 puts a test double in the place of ZeRO++'s CUDA kernels (see quantizer.py).
"""

import argparse
import gc
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from c10d_record import Record
from leave import leave

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
spec = importlib.util.spec_from_file_location("example", EXAMPLES / "train_gpt_deepspeed.py")
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

SMALL = "--width 32 --layers 3 --heads 2 --length 32 --batch 2 --no-compile".split()


def main() -> None:
    import deepspeed

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--cases", required=True)
    ours, rest = parser.parse_known_args()
    if os.environ.get("QUANTIZER"):
        import quantizer

        quantizer.install()
    engines = []
    initialize, destroy = deepspeed.initialize, dist.destroy_process_group

    def remember(*args, **kwargs):
        result = initialize(*args, **kwargs)
        engines.append(result[0])
        return result

    deepspeed.initialize = remember
    dist.destroy_process_group = lambda: None  # the next case needs it
    facts: dict = {"cases": {}}
    record = Record()
    for case in ours.cases.split(","):
        config, accumulate = case.split(":")
        path = EXAMPLES / "deepspeed" / f"{config}.json"
        options = example.parse([*SMALL, *rest, "--config", str(path), "--accumulate", accumulate])
        losses = example.train(options)
        engine = engines.pop()
        facts["cases"][case] = {
            "losses": [loss.hex() for loss in losses],
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
        }
        del engine
        gc.collect()
    model = example.GPT(options.width, options.layers, options.heads, options.length, False)
    facts["params"] = [p.numel() for p in model.parameters()]
    facts.update(record.facts, flight=record.entries())
    facts["watched"] = "zeromon_agents.runtime.agent" in sys.modules
    folder = Path(ours.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(facts))
    destroy()


if __name__ == "__main__":
    main()
    leave()
