"""HF Trainer + ZeRO-3 with NVMe offload of optimizer states and parameters."""
import sys
from dataclasses import dataclass, field

import torch
from datasets import load_from_disk
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


@dataclass
class Extra:
    model_name: str = field(default="Qwen/Qwen2.5-32B")
    dataset: str = field(default="/data/packed_4k")
    probe_every: int = field(default=200)


class MemoryProbe(TrainerCallback):
    """Prints peak memory of the main process now and then."""

    def __init__(self, every):
        self.every = every

    def on_step_end(self, args, state, control, **kw):
        if state.global_step % self.every == 0 and state.is_world_process_zero:
            print(f"[mem] step {state.global_step}: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
            torch.cuda.reset_peak_memory_stats()


def parse():
    parser = HfArgumentParser((Extra, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        return parser.parse_json_file(sys.argv[1])
    return parser.parse_args_into_dataclasses()


def main():
    extra, targs = parse()  # TrainingArguments exist before the weights are read: zero.Init is active below
    set_seed(targs.seed)
    tok = AutoTokenizer.from_pretrained(extra.model_name)
    if tok.pad_token is None:
        tok.pad_token = tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(extra.model_name, torch_dtype=torch.bfloat16)
    model.config.use_cache = False

    data = load_from_disk(extra.dataset)
    trainer = Trainer(
        model=model,
        args=targs,
        train_dataset=data["train"],
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
        callbacks=[MemoryProbe(extra.probe_every)],
    )
    trainer.train(resume_from_checkpoint=targs.resume_from_checkpoint)
    trainer.save_model()  # every rank: the 16-bit weights are gathered
    if trainer.is_world_process_zero():
        tok.save_pretrained(targs.output_dir)


if __name__ == "__main__":
    main()
