"""Builds the model of `zeromon plan`, a module:factory or a config.json, and prints its units as JSON.

It runs in a process of its own, because the core imports neither torch nor a user's code. It calls the
factory under the meta device, so the model takes no memory. With --trace, one step runs under fake
tensors and fake ranks, and torch's FSDPMemTracker counts the bytes of its activations.

The factory returns a Module, or (Module, tuple of example inputs) where the input is not token ids. The
model of a config.json is the one that transformers makes: nothing is downloaded, and no code of the
model's repository runs.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

_MIN_BLOCKS = 2


def build_model(entry: str, *, fused_attention: bool = True) -> tuple[Any, tuple[Any, ...] | None]:
    """Returns the module that *entry* (module:factory) makes, and its example inputs or None.

    Raises TypeError where the factory returns something else.
    """
    if is_config(entry):
        return hub_model(entry, fused_attention=fused_attention)[0], None
    name, _, attribute = entry.partition(":")
    built = getattr(importlib.import_module(name), attribute)()
    inputs = None
    if isinstance(built, tuple):
        built, inputs = built
    if not isinstance(built, nn.Module):
        raise TypeError(f"{entry} returned {type(built).__name__}, not a torch.nn.Module")
    return built, inputs


def is_config(entry: str) -> bool:
    """Returns whether *entry* is a configuration of transformers."""
    return Path(entry).is_file()


_SEQ_TO_SEQ = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
)  # fmt: skip
_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_MAPPING",
)  # fmt: skip
"""transformers' tables of classes, for a configuration that names none."""


def hub_model(path: str, *, fused_attention: bool = True) -> tuple[Any, dict[str, Any]]:
    """Returns the model of a config.json, and what `zeromon plan` needs of its configuration.

    Raises ValueError for a model that transformers does not have.
    """
    # Before the import: transformers and huggingface_hub read both variables at theirs
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    transformers = importlib.import_module("transformers")
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    # the kernel of the attention may not be installed here; it has no parameters
    content = {k: v for k, v in content.items() if "attn_implementation" not in k}
    kind, named = content.get("model_type"), content.get("architectures") or []
    version = f"transformers {transformers.__version__}"
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{version} has no model type {kind!r}")
    config = transformers.CONFIG_MAPPING[kind].from_dict(content)
    cls = getattr(transformers, str(named[0]), None) if named else None
    if named and not isinstance(cls, type):
        raise ValueError(f"{version} has no {named[0]}, and code of a model's repository never runs")
    heads = _SEQ_TO_SEQ + _HEADS if config.is_encoder_decoder else _HEADS
    tables = (getattr(transformers, name, {}) for name in heads)
    cls = cls or next((table[type(config)] for table in tables if type(config) in table), None)
    if cls is None:
        raise ValueError(f"{version} has no model for the model type {kind!r}")
    if not fused_attention:
        config._attn_implementation = "eager"
    model = cls(config)
    model.tie_weights()
    notes = [f"counted on the {cls.__name__} of {version}"]
    if content.get("quantization_config"):
        notes.append("quantization_config is not applied: all parameters have the plan's precision")
    text_cfg = config.get_text_config()
    sizes = text_cfg.to_dict() | {key: getattr(text_cfg, key, None) for key in text_cfg.attribute_map}
    plain = {name: value for name, value in sizes.items() if isinstance(value, (int, float, str))}
    plain["has_sdpa"] = bool(getattr(cls, "_supports_sdpa", True))
    return model, {"config": plain, "notes": notes}


def repeated_layers(model: Any) -> list[tuple[str, Any]]:
    """Returns (name, module) of the repeated layers, to which FSDP is usually applied."""
    layers: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        inside = any(name.startswith(f"{outer}.") for outer, _ in layers)
        if is_list and len(module) >= _MIN_BLOCKS and not inside:
            kinds = {type(child) for child in module}
            # A list of activations or dropouts has no parameters that FSDP could shard
            if len(kinds) == 1 and next(module[0].parameters(), None) is not None:
                layers += [(f"{name}.{i}", child) for i, child in enumerate(module)]
    return layers


_ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")


def add_adapters(model: Any, rank: int, targets: str) -> tuple[dict[str, int], set[int]]:
    """Freezes *model* and adds LoRA to its linear layers, as peft's ``LoraConfig`` does.

    *targets*: ``all-linear``, ``attention``, or names as in ``target_modules``. Returns how many layers
    of each location have an adapter, and the ids of the weights that bitsandbytes quantizes: those of
    all linear layers but the output (``get_keys_to_not_convert`` of transformers). Raises ValueError
    where no layer has such a name.
    """
    model.requires_grad_(requires_grad=False)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    linear = {
        name: module for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not output
    }  # fmt: skip
    names = [target.strip() for target in targets.split(",")]
    counts: dict[str, int] = {}
    for name, module in linear.items():
        is_attention = any("att" in part.lower() for part in name.split(".")[:-1])
        by_name = any(f".{name}".endswith(f".{target}") for target in names)
        if not (names == ["all-linear"] or by_name or (names == ["attention"] and is_attention)):
            continue
        output_width, input_width = module.weight.shape
        if type(module).__name__ == "Conv1D":
            output_width, input_width = input_width, output_width
        module.lora_A = nn.Parameter(torch.empty(rank, input_width, device="meta"))
        module.lora_B = nn.Parameter(torch.empty(output_width, rank, device="meta"))
        is_output = name.endswith(_ATTENTION_OUTPUTS) if is_attention else input_width > output_width
        location = ("attention_outputs" if is_output else "attention_inputs") if is_attention else (
            "mlp_outputs" if is_output else "mlp_inputs"
        )  # fmt: skip
        counts[location] = counts.get(location, 0) + 1
    if not counts:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ValueError(f"no linear layer is named {targets}; there are {known}")
    return counts, {id(module.weight) for module in linear.values()}


def unit_rows(model: Any, quantized: Collection[int] = ()) -> Iterator[dict[str, Any]]:
    """Yields the layers, equal ones as one row, and then the rest as the root; tied weights once.

    *quantized*: ids of the weights that make rows of their own.
    """
    ids: set[int] = set()
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, block in [*repeated_layers(model), ("(root)", model)]:
        for trainable, is_quantized in ((True, False), (False, True), (False, False)):
            own_params = [
                p for p in block.parameters()
                if id(p) not in ids and p.requires_grad == trainable
                and (id(p) in quantized) == is_quantized
            ]  # fmt: skip
            ids.update(map(id, own_params))
            if not own_params:
                continue
            shapes = tuple(tuple(p.shape) for p in own_params)
            # Without the name, a root with the shapes of a layer would count as one more layer
            key = (name == "(root)", shapes, trainable, is_quantized)
            row: dict[str, Any] = {"name": name, "shapes": shapes, "count": 0, "trainable": trainable}
            row = rows.setdefault(key, row | ({"quantized": True} if is_quantized else {}))
            row["count"] += 1
    yield from rows.values()


def trace_step(entry: str, options: argparse.Namespace) -> int:
    """Returns the most bytes of activations in a step: FSDP2 over fake ranks, fp32, fake tensors.

    The peak of all roles is no measure of them: small activations are gone where it is.
    """
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import fully_shard
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Tracker(FSDPMemTracker):  # type: ignore[misc]
        activation_bytes = 0

        def _update_peak_stats(self, peak_state: Any) -> None:
            super()._update_peak_stats(peak_state)
            for roles in self._curr_mem_snap.values():
                named = {str(getattr(role, "value", role)): nbytes for role, nbytes in roles.items()}
                nbytes = named.get("Activation", 0) + named.get("Temp", 0)
                self.activation_bytes = max(self.activation_bytes, int(nbytes))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (options.ranks,))
    # The kernel that writes the scores of attention to memory
    unfused = sdpa_kernel(SDPBackend.MATH) if options.no_fused_attention else contextlib.nullcontext()
    with FakeTensorMode(), unfused:
        model, inputs = build_model(entry, fused_attention=not options.no_fused_attention)
        if inputs is None:
            inputs = (torch.zeros((options.micro_batch, options.length), dtype=torch.long),)
        for _, block in repeated_layers(model):
            if options.checkpointing:
                from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                    apply_activation_checkpointing,
                )

                apply_activation_checkpointing(model, check_fn=lambda m, b=block: m is b)
        # Listed again: checkpointing has put a CheckpointWrapper in the place of each block
        for _, block in repeated_layers(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        tracker = Tracker(model)
        tracker.track_inputs(inputs)
        with tracker:
            scalar_loss(model(*inputs)).backward()
    return tracker.activation_bytes


def scalar_loss(output: Any) -> Any:
    """Returns a scalar of the model's output."""
    # Outputs of transformers have a loss of None where the inputs have no labels
    if hasattr(output, "loss") and output.loss is not None:
        return output.loss
    output = getattr(output, "logits", output)
    if isinstance(output, (tuple, list)):
        output = output[0]
    return output.float().pow(2).mean()


def main() -> None:
    """Prints one line of JSON to stdout, and the factory's own output to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entry")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--no-fused-attention", action="store_true")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--lora-targets", default="")
    parser.add_argument("--quantized", action="store_true")
    options = parser.parse_args()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        described: dict[str, Any] = {}
        with torch.device("meta"):
            if is_config(options.entry):
                model, described = hub_model(options.entry)
            else:
                model, _ = build_model(options.entry)
        weights: set[int] = set()
        if options.lora_rank:
            adapter_counts, weights = add_adapters(model, options.lora_rank, options.lora_targets)
            described["lora"] = adapter_counts | {"rank": options.lora_rank}
        described["units"] = list(unit_rows(model, weights if options.quantized else ()))
        described["buffer_bytes"] = sum(b.nbytes for b in model.buffers())
        if options.trace:
            described["activation_bytes"] = trace_step(options.entry, options)
    sys.stderr.write(printed.getvalue())
    # C code of the model prints past `redirect_stdout`. Without the line break, the mark that
    # `zeromon plan` looks for could stand in the middle of its line.
    sys.stdout.write(f"\nzeromon: {json.dumps(described)}\n")


if __name__ == "__main__":
    main()
