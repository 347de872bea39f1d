"""Metadata of a model, a DataLoader, a process: the keys that an agent writes and the core reads.

Sizes are elements (``numel``) of one model, summed over its parameters: of the part that tensor and
pipeline parallelism leave to a rank. ``shard`` marks what one rank keeps of that. Bytes are bytes an
element, but for ``buffer_bytes``.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast, get_args

T = TypeVar("T")


class ModelMetadata(TypedDict, total=False):
    """One model of a rank. A key that an agent does not know is absent."""

    framework: str
    """``ddp``, ``fsdp1``, ``fsdp2`` or ``deepspeed``; FSDP1 with ``NO_SHARD`` counts as ``ddp``."""
    stage: int
    """The ZeRO stage, 0..3; 1 with ``ZeroRedundancyOptimizer``."""
    ranks: int
    """Data-parallel ranks."""
    shard_ranks: int
    """Ranks that share one copy of the model (HSDP); 0: all ranks."""
    secondary_ranks: int
    """Ranks that share ZeRO++'s second copy of the parameters (hpZ); 0 without one."""
    numel: int
    whole_numel: int
    """With what tensor parallelism (DTensor) leaves to other ranks; absent where that is unknown."""
    trainable: int
    """Elements that require gradients."""
    matrix_numel: int
    """Elements of the matrices that a token is multiplied with, of all tensor-parallel ranks: no lookup
    tables, norms or biases; of experts as many as a token uses. Absent where unknown."""
    attention: int
    """Layers times the width of their queries; 0 where unknown."""
    shard_numel: int
    """Elements that one rank keeps, padding included."""
    trainable_shard_numel: int
    frozen_grad_numel: int
    """Frozen elements of one rank's shard with gradients: FSDP1 has those of whole units."""
    factored_numel: int
    """Elements of Adafactor's second moment."""
    optimizer_numel: int
    """Elements whose state this rank keeps, where an optimizer splits them by whole parameters."""
    persistent_numel: int
    """Elements that ZeRO-3 never partitions."""
    persistence_numel: int
    """The largest parameter that ZeRO-3 never partitions (``param_persistence_threshold``)."""
    largest_tensor_numel: int
    linear_numel: int
    """Elements of the largest weight of a linear layer that no other module shares."""
    kept_numel: int
    """Elements that stay gathered while other units compute: the root unit, or all at stage 2."""
    largest_unit_numel: int
    """Elements of FSDP's largest unit, which may be the root's own parameters."""
    units: list[int]
    """Elements of the largest units that are freed after use, the largest first."""
    blocks: list[int]
    """[layers, elements of the largest] of the longest list of layers; [0, 0] without one."""
    buffer_bytes: int
    """Bytes of all buffers."""
    param_bytes: int | float
    """Bytes an element of stored parameters; the mean where dtypes differ."""
    compute_bytes: int
    """Bytes an element of gathered parameters."""
    compute_dtype: str
    """The dtype of gathered parameters, ``bfloat16``; autocast is a part of the process."""
    built_bytes: int
    """Bytes that each rank built before ZeRO-3 divided them; 0 under ``deepspeed.zero.Init``."""
    grad_bytes: int | float
    """Bytes an element of gradients as they accumulate."""
    reduce_bytes: int
    """Bytes an element of gradients as they are reduced; absent where they are sent as they are."""
    has_master: bool
    """The optimizer keeps fp32 copies of the parameters."""
    optimizer: str
    """The name of the optimizer's class."""
    optimizer_step: str
    """How torch's optimizer updates: ``fused``, ``foreach`` or ``for-loop``; "" without a choice."""
    momentum: int | float
    """SGD's; 0 without it, and then there is no state."""
    optimizer_on: str
    """``device``, ``host`` or ``nvme``: where the optimizer's state is."""
    params_on: str
    """``device``, ``host`` or ``nvme``: where parameters are while they are not in use."""
    updates_in_backward: bool
    """Hooks of gradients step optimizers within backward, and free each gradient at once."""
    accumulation: int
    """Micro-steps a step."""
    micro_batch: int
    """Samples of one rank's forward."""
    grad_bucket_numel: int
    grad_buckets: int
    """Buckets of gradients that exist at once."""
    prefetch_numel: int
    """The most elements that ZeRO-3 gathers ahead."""
    live_numel: int
    """The most elements that ZeRO-3 keeps gathered (``max_live_parameters``)."""
    reuse_numel: int
    """ZeRO-3 keeps what is used again within so many elements (``max_reuse_distance``)."""
    sub_group_numel: int
    """Elements that ZeRO-3 updates at once (``sub_group_size``)."""
    reduces_whole_buckets: bool
    """All ranks get each bucket of gradients (``use_multi_rank_bucket_allreduce``)."""
    quantized_weights: bool
    """ZeRO++ gathers 8 bits of each parameter."""
    quantized_grads: bool
    """ZeRO++ exchanges 4 bits of each gradient."""
    bucket_views: bool
    """Gradients are views of DDP's buckets, or nothing is copied into buckets."""
    bucket_cap_bytes: int
    """The size from which DDP closes a bucket (``bucket_cap_mb``)."""
    forward_prefetch: bool
    """The script has FSDP gather units ahead in forward."""
    backward_prefetch: str
    """FSDP1's ``BackwardPrefetch``: ``BACKWARD_PRE``, ``BACKWARD_POST``, or "" for none."""
    recomputes: bool
    """A module has activation checkpointing on; direct calls of ``checkpoint`` are not seen."""


class LoaderMetadata(TypedDict, total=False):
    """The DataLoader that a rank trains on."""

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    """True if the workers live on from one epoch to the next."""
    batch_size: int
    """Samples of a batch; 0 where the loader does not say."""
    length: int
    """Tokens of a sequence; 0 where batches hold none, or sequences of several lengths."""
    sampler: str
    """The name of the sampler's class; "" without one."""


class GoalMetadata(TypedDict, total=False):
    """How long a rank trains; empty where nothing says so."""

    steps: int
    """In all; of a trainer."""
    batches: int
    """Batches of the epoch, where only a DataLoader is known."""
    before: int
    """Steps to add to the agent's step number: those before it; negative: those of earlier epochs."""
    by: str
    """``Trainer``, ``Lightning``, ``DataLoader``."""


class CompiledMetadata(TypedDict, total=False):
    """Counts and reasons from torch.compile in a rank's process; empty where nothing was compiled."""

    frames: int
    """Functions and parts of functions that dynamo has compiled, each time counted."""
    graph_breaks: int
    recompiles: int
    """Compilations of functions that were compiled before; 0 on a torch that does not report them."""
    break_reasons: list[str]
    """The most frequent: ``3 x REASON``."""
    recompile_reasons: list[str]
    """The most frequent guards that failed: ``3 x REASON``."""


class TrackersMetadata(TypedDict, total=False):
    """The runs of experiment trackers that a rank has open; none of the values is a secret."""

    wandb: dict[str, str]
    """``id``, ``project``, ``entity``, ``base_url``, ``mode``, ``folder``, ``name``, ``group``."""
    mlflow: dict[str, str]
    """``run_id``, ``tracking_uri``."""
    tensorboard: dict[str, str]
    """``folder`` of the first SummaryWriter that got a scalar."""


def url_without_secrets(url: str) -> str:
    """*url* without user, password, query and fragment; also of a database."""
    scheme, mark, address = url.partition("://")
    return scheme + mark + re.split("[?#]", _LOGIN.sub("", address, count=1))[0] if mark else url


_LOGIN = re.compile(r"^(?:[^/?#]*@|[^/?#@:[]*:(?!\d+[/?#])[^@]*@)")
"""User and password; a driver of a database takes also a password with a slash or a question mark."""


class ProcessMetadata(TypedDict, total=False):
    """Settings of a rank's process. A key that an agent does not know is absent."""

    local_world_size: int
    """The number of ranks on its node, as the launcher says; absent where the agent was attached."""
    variables: dict[str, str]
    """Environment variables that a remedy may set (:data:`VARIABLES`), "" for one that is not set, and
    those set that change how torch and its libraries run (:data:`VARIABLE_FAMILIES`)."""
    packages: dict[str, str]
    """Packages that the process has loaded (:data:`PACKAGES`), Python, CUDA, NCCL: their versions."""
    folder: str
    """The folder of the script, or the process's own where no script is known."""
    threads: int
    """Threads of an operator on the CPU (``torch.get_num_threads``)."""
    autocast: str
    """The dtype of ``torch.autocast`` on the device in forward; "" without it."""
    allocator: str
    """Allocator of device memory: ``native``, ``cudaMallocAsync``, ``uncached``, ...; "" on a CPU."""
    unknown_collectives: list[str]
    """Methods of torch's process groups that communicate and that no hook knows."""
    ddp_backend: str
    """The backend of the first DDP model on a device (``nccl``); absent without one."""
    clip_norm: int | float
    """The first limit of the gradient norm in the script (``clip_grad_norm_``); absent without one."""
    params_mark: int
    """A checksum of some initial parameters; absent on a device, of shards and after an attach."""
    params_bytes: int
    """Bytes of the parameters that :attr:`params_mark` was drawn from."""


PERSISTENT = "(persistent parameters)"
"""The unit of the parameters that ZeRO-3 never partitions, when they are gathered after a step."""

BACKGROUND = "(background thread)"
"""The unit of collectives that a thread beside that of training issues: they are no part of a step."""

INSTALLED = (
    "/zeromon_agents/", "/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>",
)  # fmt: skip
"""Parts of the names of files that are not the script's own code."""

VARIABLES = (
    "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
)  # fmt: skip


VARIABLE_FAMILIES = (
    "NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "GLOO_", "CUDA_", "CUBLAS_", "CUDNN_", "HIP_", "HSA_",
    "ROCR_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_", "NVTE_", "TRITON_", "DS_", "DEEPSPEED_",
    "ACCELERATE_", "FSDP_", "PJRT_", "ZE_", "ASCEND_", "HCCL_",
)  # fmt: skip
"""Beginnings of the names of environment variables that change how torch and its libraries run."""

PACKAGES = (
    "torch", "deepspeed", "transformers", "accelerate", "lightning", "pytorch_lightning", "trl", "peft",
    "torchtune", "torchtitan", "megatron", "flash_attn", "xformers", "transformer_engine", "apex",
    "bitsandbytes", "torchao", "triton", "datasets", "tokenizers", "safetensors", "numpy",
)  # fmt: skip
"""Packages whose version may change what a run does or how fast it is."""


def declared_keys(kind: type[T], raw: Any) -> T:
    """The keys of *raw* that *kind* declares, with values of the declared types; empty otherwise."""
    if not isinstance(raw, Mapping):
        return kind()
    keys = kind.__annotations__.items()
    return cast(T, {key: raw[key] for key, type_ in keys if key in raw and _is_of_kind(raw[key], type_)})


def _is_of_kind(value: Any, kind: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    if kind in (list[int], list[str]):
        item_kind = get_args(kind)[0]
        return isinstance(value, list) and all(_is_of_kind(item, item_kind) for item in value)
    if kind == dict[str, str]:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    # A bool is an int, too
    return isinstance(value, kind) and not isinstance(value, bool)


def factored_numel(shape: Sequence[int]) -> int:
    """Returns the elements of Adafactor's second moment for *shape* (Shazeer & Stern 2018)."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1]))
