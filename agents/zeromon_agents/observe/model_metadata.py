"""Describes models for the prediction of their memory: sizes, ranks, dtypes, optimizer.

Only shapes and settings are read. The keys and their units are declared in
:mod:`zeromon.ring.model_metadata`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from zeromon.ring.model_metadata import ModelMetadata, factored_numel
from zeromon_agents.observe.census import LARGE
from zeromon_agents.observe.torch_roles import local_of, param_groups, unwrapped_optimizer

_MAX_UNITS = 4


def of_fsdp2(module: Any, groups: list[Any], optimizers: list[Any]) -> ModelMetadata | None:
    """Returns the metadata of a ``fully_shard`` root with the FSDPParamGroups *groups*."""
    sizes = _fsdp2_sizes(groups, param_groups(module._get_fsdp_state()))
    states = (child._get_fsdp_state() for child in module.modules() if hasattr(child, "_get_fsdp_state"))
    sizes["forward_prefetch"] = any(
        bool(getattr(state, "_states_to_forward_prefetch", ())) for state in states
    )
    return _complete_sizes(sizes, module, optimizers)


def of_fsdp1(module: Any, handles: list[Any], optimizers: list[Any]) -> ModelMetadata | None:
    """Returns the metadata of an FSDP1 root with the flat parameters of *handles*."""
    flats = [handle.flat_param for handle in handles]
    numels = [math.prod(getattr(f, "_unpadded_unsharded_size", f.shape)) for f in flats]
    shard_numels = [getattr(f, "_local_shard", f).numel() for f in flats]
    trained = [_trained_numels(f, n, s) for f, n, s in zip(flats, numels, shard_numels, strict=True)]
    trainable_shard = sum(shard for _, shard in trained)
    handle_0 = handles[0]
    name = getattr(getattr(handle_0, "_sharding_strategy", None), "name", "FULL_SHARD")
    stored = getattr(flats[0], "_local_shard", flats[0]).dtype
    compute = getattr(handle_0, "_fwd_bwd_param_dtype", None) or stored
    hybrid = "HYBRID" in name
    stage = 0 if name == "NO_SHARD" else 2 if name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") else 3
    world = torch.distributed.get_world_size()
    roots = [getattr(module, "_handle", None) is handle for handle in handles]
    # FSDP1 does not free its root unit after forward, because backward begins with it
    kept_numel = sum(n for n, root in zip(numels, roots, strict=True) if root or stage == 2)
    freed = [n for n, root in zip(numels, roots, strict=True) if not root and stage == 3]
    sizes: ModelMetadata = {
        "framework": "fsdp1" if stage else "ddp",
        "bucket_views": True,  # nothing is copied into buckets
        "forward_prefetch": bool(getattr(module, "forward_prefetch", False)),
        "backward_prefetch": str(getattr(getattr(module, "backward_prefetch", None), "name", "")),
        "stage": stage,
        "ranks": world,
        "shard_ranks": handle_0.world_size if hybrid or stage else world,
        "numel": sum(numels),
        "trainable": sum(n for n, _ in trained),
        "shard_numel": sum(shard_numels),
        "trainable_shard_numel": trainable_shard,
        "frozen_grad_numel": sum(n for f, n in zip(flats, shard_numels, strict=True) if f.requires_grad)
        - trainable_shard,
        "factored_numel": sum(n for n, _ in trained),  # Adafactor factors no flat tensor
        "kept_numel": kept_numel,
        "largest_unit_numel": max(numels),
        "units": _largest_units(freed),
        "param_bytes": stored.itemsize,
        "compute_bytes": compute.itemsize,
        "compute_dtype": name_of(compute),
        "grad_bytes": (
            compute if getattr(handle_0, "_keep_low_precision_grads", False) else stored
        ).itemsize,
        "reduce_bytes": getattr(handle_0, "_reduce_dtype", stored).itemsize,
        **(_offload_on(bool(getattr(handle_0, "_offload_params", False)), stage) if stage else {}),
    }
    return _complete_sizes(sizes, module, optimizers, handles)


def _trained_numels(flat: Any, numel: int, shard_numel: int) -> tuple[int, int]:
    """Returns the trainable elements of a flat parameter, and of those this rank's.

    ``use_orig_params=True`` lets it hold frozen parameters, too: its gradient is whole all the same,
    but ``_use_sharded_grad_views`` of torch's ``_flat_param.py`` gives them no part of it.
    """
    params = getattr(flat, "_params", None) or ()
    if not flat.requires_grad:
        return 0, 0
    if all(param.requires_grad for param in params):
        return numel, shard_numel
    trained_numels = [
        (size, shard.numel_in_shard or 0)
        for param, size, shard in zip(params, flat._numels, flat._shard_param_infos, strict=True)
        if param.requires_grad
    ]
    return sum(size for size, _ in trained_numels), sum(shard for _, shard in trained_numels)


def of_replicated(module: Any, optimizers: list[Any]) -> ModelMetadata | None:
    """Returns the metadata of a model that every rank holds whole; under DDP, or on its own.

    A rank has everything that tensor parallelism leaves to it.
    """
    params = [p for p in module.parameters() if p.device.type != "meta"]
    whole_numel = sum(map(_whole_numel, params))
    requires = [p.requires_grad for p in params]
    params = [local_of(p) for p in params]
    numel = sum(p.numel() for p in params)
    trainable = [p for p, does in zip(params, requires, strict=True) if does]
    element_bytes = max((p.element_size() for p in params), default=4)
    widest = next((p.dtype for p in params if p.element_size() == element_bytes), torch.float32)
    # the arithmetic uses the mean of the dtypes
    stored = sum(p.nbytes for p in params) / numel if numel else element_bytes
    stored = int(stored) if stored == int(stored) else stored
    group, cap = getattr(module, "process_group", None), getattr(module, "bucket_bytes_cap", None)
    sizes: ModelMetadata = {
        "framework": "ddp",
        "stage": 0,
        "ranks": group.size() if group is not None else 1,
        "numel": numel,
        "whole_numel": whole_numel,
        "trainable": sum(p.numel() for p in trainable),
        "shard_numel": numel,
        "trainable_shard_numel": sum(p.numel() for p in trainable),
        "factored_numel": sum(factored_numel(p.shape) for p in trainable),
        "param_bytes": stored,
        "compute_bytes": element_bytes,
        "compute_dtype": name_of(widest),
        "grad_bytes": stored,
        "bucket_views": bool(getattr(module, "gradient_as_bucket_view", group is None)),
        **({"bucket_cap_bytes": cap} if isinstance(cap, int) else {}),
    }
    return _complete_sizes(sizes, module, optimizers)


def _complete_sizes(
    sizes: ModelMetadata, module: Any, optimizers: list[Any], handles: Sequence[Any] = ()
) -> ModelMetadata | None:
    """Adds layers, buffers and optimizer to *sizes*; None where the model has no parameters."""
    if not sizes["numel"]:
        return None
    sizes["blocks"] = longest_blocks(module, handles)
    sizes.update(matrix_facts(module, handles, sizes["blocks"][0]))
    sizes["buffer_bytes"] = sum(map(_buffer_nbytes, module.buffers()))
    # torch's wrapper for activation checkpointing, or transformers' switch
    sizes["recomputes"] = any(
        type(child).__name__ == "CheckpointWrapper"
        or getattr(child, "gradient_checkpointing", False) is True
        for child in module.modules()
    )
    mine = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        groups_of = getattr(optimizer, "param_groups", ())
        if any(id(p) in mine for group in groups_of for p in group["params"]):
            sizes.update(of_optimizer(optimizer))
            break
    return sizes


def longest_blocks(module: Any, handles: Sequence[Any] = ()) -> list[int]:
    """[layers, elements of the largest] of the longest list of layers in *module*; [0, 0] without one.

    Sharded parameters count as whole ones; those of FSDP1 by the flat parameters of its *handles*.
    """
    flat: Counter[int] = Counter()
    for owner, _, shape in flat_parameters(handles):
        flat[id(owner)] += math.prod(shape)

    def layer_numel(layer: Any) -> int:
        if flat:
            return sum(flat[id(child)] for child in layer.modules())
        return sum(_whole_numel(p) for p in layer.parameters())

    lists = [m for m in module.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]
    longest = max(lists, key=len, default=None)
    if longest is None or len(longest) < 2:
        return [0, 0]
    return [len(longest), max(map(layer_numel, longest))]


def _whole_numel(param: Any) -> int:
    """Elements of the whole parameter: a DTensor has the global shape."""
    return math.prod(param.shape)


def of_optimizer(optimizer: Any) -> ModelMetadata:
    """The metadata of an optimizer: its class, and whether its state is partitioned."""
    inner_optimizer = unwrapped_optimizer(optimizer)
    defaults = getattr(inner_optimizer, "defaults", {})
    momentum = defaults.get("momentum")
    facts: ModelMetadata = {
        "optimizer": type(inner_optimizer).__name__,
        "momentum": float(momentum) if isinstance(momentum, (int, float)) else 0.0,
        "optimizer_step": _step_of(inner_optimizer, defaults),
    }
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        facts["stage"] = 1
        own_params = [p for group in inner_optimizer.param_groups for p in group["params"]]
        facts["optimizer_numel"] = sum(p.numel() for p in own_params)
    return facts


def _step_of(optimizer: Any, defaults: dict[str, Any]) -> str:
    """Returns ``fused``, ``foreach`` or ``for-loop``; "" for an optimizer that has no such choice."""
    if "foreach" not in defaults:
        return ""
    if defaults.get("fused"):
        return "fused"
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_foreach = defaults["foreach"]
    if is_foreach is None:  # torch chooses it for tensors on a device
        is_foreach = bool(params) and params[0].device.type != "cpu"
    return "foreach" if is_foreach else "for-loop"


def _largest_units(units: Iterable[int]) -> list[int]:
    return sorted(units, reverse=True)[:_MAX_UNITS]


def _fsdp2_sizes(groups: list[Any], of_root: list[Any]) -> ModelMetadata:
    numel = trainable = shard = trainable_shard = factored = kept_numel = of_all = largest = 0
    units = []
    for group in groups:
        unit = 0
        for param in group.fsdp_params:
            whole_size, shard_size = math.prod(param._orig_size), param._sharded_param_data.numel()
            unit, numel, shard = unit + whole_size, numel + whole_size, shard + shard_size
            of_all += _whole_numel(param.sharded_param)
            if param.sharded_param.requires_grad:
                trainable, trainable_shard = trainable + whole_size, trainable_shard + shard_size
                factored += factored_numel(param._orig_size)
        largest = max(largest, unit)
        is_root = any(group is root_group for root_group in of_root)
        if is_root or getattr(group, "post_forward_mesh_info", None) is None:
            kept_numel += unit  # gathered while others compute
        else:
            units.append(unit)
    first_param = groups[0].fsdp_params[0]
    offloads = bool(getattr(first_param, "offload_to_cpu", False))
    mesh = groups[0].mesh_info
    ranks = int(getattr(mesh, "shard_mesh_size", 1))
    compute = getattr(first_param, "param_dtype", None) or first_param.orig_dtype
    return {
        "framework": "fsdp2",
        "stage": 3 if units else 2,
        "kept_numel": kept_numel,
        "largest_unit_numel": largest,
        "ranks": ranks * int(getattr(mesh, "replicate_mesh_size", 1)),
        "shard_ranks": ranks,
        "numel": numel,
        "whole_numel": of_all,
        "trainable": trainable,
        "shard_numel": shard,
        "trainable_shard_numel": trainable_shard,
        "factored_numel": factored,
        "units": _largest_units(units),
        "param_bytes": first_param.orig_dtype.itemsize,
        "compute_bytes": compute.itemsize,
        "compute_dtype": name_of(compute),
        "grad_bytes": first_param.orig_dtype.itemsize,
        "reduce_bytes": (getattr(groups[0], "_reduce_dtype", None) or compute).itemsize,
        **_offload_on(offloads, 3 if units else 2),
    }


def _offload_on(offloads: bool, stage: int) -> ModelMetadata:
    """Where FSDP keeps shards and optimizer state; at stage 2 parameters stay whole on the device."""
    location = "host" if offloads else "device"
    return {"optimizer_on": location, "params_on": location if stage == 3 else "device"}


def name_of(dtype: Any) -> str:
    """The name of a dtype without its module, ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def of_deepspeed(
    module: Any,
    zero: Any,
    *,
    ranks: int,
    is_half: bool,
    grad_bytes: int,
    reduce_bytes: int,
    optimizer_on: str,
    params_on: str,
) -> ModelMetadata:
    """The metadata of the model of a DeepSpeed engine, made or planned; *zero*: its ZeRO settings.

    *grad_bytes*, *reduce_bytes*: of an element as gradients accumulate and are sent; 0: as parameters.
    """
    stage = int(zero.stage)
    params = list(module.parameters())
    # ZeRO-3 leaves an empty tensor in place of a parameter, so numel() is 0
    numel_of = {id(p): int(getattr(p, "ds_numel", 0) or p.numel()) for p in params}
    shard_of = {id(p): -(-n // ranks) for p in params if (n := numel_of[id(p)])}
    trainable = [p for p in params if p.requires_grad]
    persistent = sum(numel_of[id(p)] for p in params if getattr(p, "ds_persist", False))
    size = 2 if is_half else 4
    bucket = int(zero.reduce_bucket_size)
    if bucket * size >= LARGE and all(p.device.type == "cpu" for p in params):
        bucket = min(bucket, sum(numel_of.values()))  # pages beyond that are never touched
    hpz = int(getattr(zero, "zero_hpz_partition_size", 1))
    return {
        "framework": "deepspeed",
        "stage": stage,
        "ranks": ranks,
        "numel": sum(numel_of.values()),
        "trainable": sum(numel_of[id(p)] for p in trainable),
        "shard_numel": sum(shard_of.values()),
        "trainable_shard_numel": sum(shard_of[id(p)] for p in trainable if id(p) in shard_of),
        "factored_numel": sum(factored_numel(getattr(p, "ds_shape", p.shape)) for p in trainable),
        "persistent_numel": persistent,
        "largest_tensor_numel": max(numel_of.values(), default=0),
        "linear_numel": _largest_linear(module, numel_of),
        "persistence_numel": int(getattr(zero, "param_persistence_threshold", 0)) if stage == 3 else 0,
        "units": _largest_units(_zero3_units(module, numel_of) if stage == 3 else ()),
        "param_bytes": size,
        "compute_bytes": size,
        "grad_bytes": grad_bytes or size,
        "reduce_bytes": reduce_bytes or size,
        # in fp32 the flat partition is a copy of the parameters all the same
        "has_master": is_half or stage > 0,
        "optimizer_on": optimizer_on,
        "params_on": params_on,
        "grad_bucket_numel": bucket if stage else 0,
        # With both, DeepSpeed fills a second buffer while it reduces the first
        "grad_buckets": 2 if stage in (1, 2) and zero.overlap_comm and zero.contiguous_gradients else 1,
        "prefetch_numel": int(getattr(zero, "prefetch_bucket_size", 0)) if stage == 3 else 0,
        "live_numel": int(getattr(zero, "max_live_parameters", 0)) if stage == 3 else 0,
        "reuse_numel": int(getattr(zero, "max_reuse_distance", 0)) if stage == 3 else 0,
        "sub_group_numel": int(getattr(zero, "sub_group_size", 0)) if stage == 3 else 0,
        "secondary_ranks": hpz if stage == 3 and hpz > 1 else 0,
        "reduces_whole_buckets": bool(getattr(zero, "use_multi_rank_bucket_allreduce", True)),
        "quantized_weights": bool(getattr(zero, "zero_quantized_weights", False)),
        "quantized_grads": bool(getattr(zero, "zero_quantized_gradients", False)),
        "buffer_bytes": sum(map(_buffer_nbytes, module.buffers())),
        **matrix_facts(module, (), longest_blocks(module)[0]),
    }


def _zero3_units(module: Any, numel_of: dict[int, int]) -> Iterator[int]:
    """Yields the elements that ZeRO-3 gathers with each module; of a parameter of two, once."""
    unseen = dict(numel_of)
    for child in module.modules():
        params = child.parameters(recurse=getattr(child, "_z3_leaf", False))
        yield sum(unseen.pop(id(param), 0) for param in params)


def _largest_linear(module: Any, numel_of: dict[int, int]) -> int:
    """Elements of the largest weight of a linear layer that no other module holds."""
    holders = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    weights = (id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Linear))
    return max((numel_of.get(weight, 0) for weight in weights if holders[weight] == 1), default=0)


def _buffer_nbytes(tensor: Any) -> int:
    """Bytes of a buffer; 0 of a sparse one."""
    is_plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return int(tensor.numel() * tensor.element_size()) if is_plain else 0


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def matrix_facts(module: Any, handles: Sequence[Any], layers: int) -> ModelMetadata:
    """Returns the matrices and the attention of *module*; empty where its experts are not described.

    *handles*: those of FSDP1, whose flat parameters know the shapes. *layers*: of its longest list.
    """
    config = getattr(_inner_model(module), "config", None)
    numel, widest, of_expert = 0.0, 0, _expert_share(config)
    for owner, name, shape in flat_parameters(handles) if handles else _owned_parameters(module):
        # Every token passes the shared experts, so none of their elements is left out
        is_expert = "experts" in name and "shared" not in name
        share = of_expert if is_expert else 1.0
        if share is None:
            return {}
        if isinstance(owner, torch.nn.Embedding):
            widest = max(widest, int(shape[-1]))
        elif len(shape) >= 2:
            numel += math.prod(shape) * share
    return {"matrix_numel": round(numel), "attention": _attention_width(config, layers, widest)}


def _owned_parameters(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yields owner, name and whole shape of each parameter; a shared one is a linear layer's."""
    by_id: dict[int, tuple[Any, str, Any]] = {}
    for name, owner in module.named_modules():
        for param in owner.parameters(recurse=False):
            earlier = by_id.get(id(param))
            if earlier is None or isinstance(earlier[0], torch.nn.Embedding):
                by_id[id(param)] = owner, name, getattr(param, "ds_shape", None) or param.shape
    yield from by_id.values()


def flat_parameters(handles: Iterable[Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yields owner, name and shape of each parameter in the flat parameters of FSDP1's *handles*."""
    for handle in handles:
        flat = handle.flat_param
        sharing = {id(info.prim_module): info.module for info in flat._shared_param_infos}
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
            owner = info.module
            if isinstance(owner, torch.nn.Embedding):
                owner = sharing.get(id(owner), owner)
            yield owner, info.module_name, shape


def _inner_model(module: Any) -> Any:
    while hasattr(module, "module") and not hasattr(module, "config"):
        module = module.module
    return module


def _expert_share(config: Any) -> float | None:
    """Returns the share of the experts that a token uses; None where the model does not say."""
    used = getattr(config, "num_experts_per_tok", None)
    count = next((n for key in _EXPERTS if (n := getattr(config, key, None))), None)
    return used / count if isinstance(used, int) and isinstance(count, int) else None


def _attention_width(config: Any, layers: int, widest: int) -> int:
    """Returns layers times the width of the queries; by the *widest* table without a configuration."""
    depth = getattr(config, "num_hidden_layers", None)
    width = getattr(config, "hidden_size", None)
    heads, head_dim = (getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None))
    # Gemma 7B and Qwen3 0.6B have queries wider than hidden_size
    if isinstance(heads, int) and isinstance(head_dim, int):
        width = heads * head_dim
    return depth * width if isinstance(depth, int) and isinstance(width, int) else layers * widest
