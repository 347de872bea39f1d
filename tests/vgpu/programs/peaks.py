"""Trains a Hugging Face model by any strategy; rank 0 prints the allocator's peak of each phase.

``peaks.py STRATEGY [--family llama] [--optimizer foreach] ...``; a line ``peaks {...}`` has bytes, of
the last step: what stands between steps, the peaks of forward, of the loss's own gradients, of the
layers' backward and of the optimizer step. ``numel`` is how many parameters the model has.
``--config FILE`` writes the model's configuration there. Without a CUDA
device the ranks are on the CPU, and torch's profiler reports each allocation of the CPU allocator.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import transformers.masking_utils
from torch import nn

# Whether a batch has packed sequences is read from values, which the virtual device does not compute
transformers.masking_utils.find_packed_sequence_indices = lambda *_, **__: None

Step = Callable[[], None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARK = "peaks: "
"""Prefix of the ranges that mark a phase on the CPU."""
peaks: dict[str, int] = {}


def begin(phase: str, before: str = "") -> None:
    """Ends *before* and begins *phase*."""
    if DEVICE == "cpu":
        with torch.profiler.record_function(MARK + phase):
            return
    if before:
        peaks[before] = max(peaks.get(before, 0), torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    if phase == "forward":
        peaks["standing"] = torch.cuda.memory_allocated()


def count_on_all_threads() -> None:
    """Lets the CPU allocator count what gloo's threads free, too: c10/core/CPUAllocator.cpp."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def read_peaks(profile: torch.profiler.profile, first_step: int) -> dict[str, int]:
    """Phase -> peak bytes of the CPU allocator, by the profiler's record of allocations and frees.

    Of the steps from *first_step* on, where ``standing`` must be the same in each.
    """
    events, waiting = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        events.append(event)
        waiting += event.children
    found: dict[str, int] = {}
    phase, step, allocated, standing = "", 0, 0, set()
    for event in sorted(events, key=lambda one: one.start_time_ns):
        if event.name.startswith(MARK):
            phase = event.name.removeprefix(MARK)
            step += phase == "forward"
            if step >= first_step:
                if phase == "forward":
                    standing.add(allocated)
                found[phase] = max(found.get(phase, 0), allocated)
        elif event.name == "[memory]":
            allocated = event.extra_fields.total_allocated
            if step >= first_step:
                found[phase] = max(found[phase], allocated)
    assert len(standing) == 1, f"bytes that no thread has freed: {standing}"
    return found | {"standing": max(standing)}


def configuration(options: argparse.Namespace) -> transformers.PretrainedConfig:
    h, layers, vocabulary, heads = options.hidden, options.layers, options.vocabulary, options.heads
    if options.family == "gpt2":
        return transformers.GPT2Config(
            n_embd=h, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=options.length,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation=options.attention,
        )  # fmt: skip
    families = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
    return families[options.family](
        hidden_size=h, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=options.kv_heads or heads, vocab_size=vocabulary,
        intermediate_size=options.ffn or 8 * h // 3, attn_implementation=options.attention,
        max_position_embeddings=options.length, tie_word_embeddings=False,
    )  # fmt: skip


def optimizer_of(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    ways = {"foreach": {"foreach": True}, "single": {"foreach": False}, "fused": {"fused": True}}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, **ways[options.optimizer])


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(part for part in model.modules() if isinstance(part, nn.ModuleList))


def mark_layers(_module: nn.Module, _inputs: Any, output: Any) -> None:
    """Ends the phase of the loss where the gradient of the last layer's output is known."""
    hidden = output[0] if isinstance(output, tuple) else output
    hidden.register_hook(lambda _: begin("backward", "loss"))


def plain(options: argparse.Namespace, model: nn.Module) -> Step:
    optimizer = optimizer_of(options, model)

    def step() -> None:
        begin("forward")
        loss = loss_of(options, model)
        begin("loss", "forward")
        loss.backward()
        del loss
        begin("step", "backward")
        optimizer.step()
        begin("other", "step")
        optimizer.zero_grad(set_to_none=True)

    return step


def loss_of(options: argparse.Namespace, model: nn.Module) -> torch.Tensor:
    tokens = torch.zeros((options.batch, options.length), dtype=torch.long, device=DEVICE)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def ddp(options: argparse.Namespace, model: nn.Module) -> Step:
    return plain(options, nn.parallel.DistributedDataParallel(model.to(DEVICE)))


def fsdp1(options: argparse.Namespace, model: nn.Module) -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({type(layers_of(model)[0])}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        use_orig_params=options.original, device_id=torch.device(DEVICE),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if options.keep else None,
    )  # fmt: skip
    return plain(options, wrapped)


def fsdp2(options: argparse.Namespace, model: nn.Module) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings: dict[str, Any] = {
        "mesh": init_device_mesh(DEVICE, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": not options.keep,
    }
    for layer in layers_of(model):
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return plain(options, model.to(DEVICE))


def zero(options: argparse.Namespace, model: nn.Module) -> Step:
    import deepspeed

    stage = int(options.strategy.removeprefix("zero"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {
            "stage": stage, "overlap_comm": options.overlap, "contiguous_gradients": True,
            "reduce_bucket_size": options.bucket, "allgather_bucket_size": options.bucket,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }  # fmt: skip
    if options.grad_dtype:
        config["data_types"] = {"grad_accum_dtype": options.grad_dtype}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(options, model), config=config)

    def step() -> None:
        begin("forward")
        loss = loss_of(options, engine)
        begin("loss", "forward")
        engine.backward(loss)
        del loss
        begin("step", "backward")
        engine.step()
        begin("other", "step")

    return step


STRATEGIES: dict[str, Callable[[argparse.Namespace, nn.Module], Step]] = {
    "ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "zero0": zero, "zero1": zero, "zero2": zero,
    "zero3": zero,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--family", choices=("llama", "gpt2", "qwen2"), default="llama")
    for name, default in (
        ("layers", 8), ("hidden", 1024), ("heads", 16), ("kv-heads", 0), ("ffn", 0),
        ("vocabulary", 8192), ("batch", 1), ("length", 512), ("steps", 5), ("bucket", 20_000_000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--optimizer", choices=("foreach", "single", "fused"), default="foreach")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--grad-dtype", default="")
    parser.add_argument("--config", default="")
    for flag in ("checkpointing", "original", "keep", "overlap"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()

    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if options.strategy.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed()
    else:
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    torch.manual_seed(0)
    if options.config and not dist.get_rank():
        configuration(options).to_json_file(options.config, use_diff=False)
    if DEVICE == "cpu":
        count_on_all_threads()
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with profile if DEVICE == "cpu" else contextlib.nullcontext():
        numel = train(options)
    if DEVICE == "cpu":
        peaks.update(read_peaks(profile, options.steps - 1))
    if dist.get_rank() == 0:
        print("peaks", json.dumps(peaks | {"numel": numel}), flush=True)
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> int:
    """Trains, and returns the number of parameters."""
    model = transformers.AutoModelForCausalLM.from_config(configuration(options))
    model.train()
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers_of(model)[-1].register_forward_hook(mark_layers)
    numel = sum(parameter.numel() for parameter in model.parameters())
    step = STRATEGIES[options.strategy](options, model)
    for _ in range(options.steps):
        peaks.clear()
        step()
    return numel


if __name__ == "__main__":
    main()
