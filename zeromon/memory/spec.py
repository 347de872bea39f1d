"""Describes a model and its sharding; both descriptions validate themselves. Pure.

A :class:`ModelSpec` is a list of units (the parameters that FSDP or ZeRO gathers together) with the
shapes of their parameters; a :class:`ShardPlan` is their distribution over ranks.
:meth:`ModelSpec.sizes` reduces both to the sizes that :mod:`zeromon.memory.predict` uses. Sizes are in
elements; names that end in ``_bytes`` are in bytes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.resources import files
from typing import Any

from zeromon.base.errors import PlanError
from zeromon.ring.model_metadata import factored_numel

FRAMEWORKS = ("deepspeed", "fsdp2", "fsdp1", "ddp")
PLACES = ("device", "host", "nvme")


class ZeroStage(IntEnum):
    """The model states that are partitioned over the ranks (Rajbhandari et al. 2020)."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


ROOT = "(root)"
"""Unit of the parameters outside of other units; FSDP keeps it gathered until backward."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together, *count* times in the model."""

    name: str
    shapes: tuple[Shape, ...]
    count: int = 1
    trainable: bool = True
    quantized: bool = False
    """Its weights are stored as the quantization of the model says."""

    @property
    def numel(self) -> int:
        """Number of elements of one unit."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The linear layers of a layer that have LoRA, by what they read, and that of a frozen model."""

    rank: int
    attention_inputs: int = 0
    attention_outputs: int = 0
    mlp_inputs: int = 0
    mlp_outputs: int = 0
    quantized: bool = False
    """The frozen weights are quantized, and norms and embeddings in fp32 under autocast."""

    @property
    def count(self) -> int:
        """Number of them."""
        return self.attention_inputs + self.attention_outputs + self.mlp_inputs + self.mlp_outputs


@dataclass(frozen=True, slots=True)
class Quantization:
    """Bytes per frozen weight of a linear layer, and of the constants that belong to it."""

    weight_bytes: float
    constant_bytes: float


QUANTIZATIONS: Mapping[str, Quantization] = {
    # NF4: an fp32 constant for 64 weights; double: one of 8 bits, and an fp32 one for 256 of these
    # (Dettmers et al. 2023, arXiv 2305.14314, section 3: 0.5 and 0.127 bits per parameter)
    "4bit": Quantization(0.5, 4 / 64),
    "4bit-double": Quantization(0.5, 1 / 64 + 4 / (64 * 256)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The dimensions of a transformer that its activations depend on."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int
    kv_heads: int = 0
    """Number of heads of keys and values; 0: as many as *heads*."""
    head_dim: int = 0
    """Width of a head; 0: hidden / heads."""
    gated: bool = False
    """The MLP multiplies two projections (SwiGLU and similar)."""
    dropout: bool = False
    """Dropout masks are kept for backward, as in Megatron-LM."""
    fp32_norms: bool = False
    """Norms are computed in fp32 and scaled in the type of the layer (RMSNorm of Llama's family)."""
    fp32_scales: bool = False
    """Such norms are scaled in fp32, too (Gemma, OLMo 2)."""
    input_norms: int = 2
    """Norms before attention and MLP; 1: both read the same one; 0: norms follow alone (OLMo 2)."""
    parallel_norms: bool = False
    """Both of these norms read the same tensor (GPT-NeoX)."""
    output_norms: bool = False
    """Norms follow attention and MLP (Gemma 2 and 3, OLMo 2)."""
    query_norms: bool = False
    """Queries and keys have such a norm, too (Qwen3)."""
    fp32_softmax: bool = False
    """Attention that is not fused computes its softmax in fp32, as most of transformers' models do."""
    capped_scores: bool = False
    """Scores and logits pass a tanh, whose result is kept (Gemma 2)."""
    has_fused_attention: bool = True
    """transformers computes this model's attention by SDPA by default."""
    fused_values: bool = False
    """Values are a view of the projection of queries, keys and values, which is kept whole."""
    copied_output: bool = False
    """The output of fused attention is copied, as the queries of a partial rotary embedding are."""
    attention_readers: int = 3
    """Linear layers that read the input of attention; 1 where one has queries, keys and values."""
    mlp_readers: int = 2
    """Linear layers that read the input of the MLP, the router of experts among them."""
    mlp_copies: int = 2
    """Tensors of the width of the MLP that an ungated one keeps; 1 after ReLU, 5 with ``gelu_new``."""
    experts: int = 0
    """Experts that compute a token; *ffn* is the width of all of them and of *shared_ffn*."""
    shared_ffn: int = 0
    """Width of the experts that compute each token."""
    adapters: Adapters | None = None
    """LoRA; the rest of the model is frozen then."""
    tensor_ranks: int = 1
    """Ranks that share each layer (tensor parallelism)."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "ffn"):
            if getattr(self, name) < 1:
                raise PlanError(f"a transformer needs {name} >= 1, not {getattr(self, name)}")

    @property
    def attention_width(self) -> int:
        """Width of the queries: heads x head_dim."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values: kv_heads x head_dim."""
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model: its units, and its architecture where known."""

    name: str
    units: tuple[Unit, ...]
    architecture: Transformer | None = None
    buffer_bytes: int = 0
    has_units: bool = True
    """True if *units* are gathered one by one; otherwise only their sum is meaningful."""
    notes: tuple[str, ...] = ()
    """Assumptions of the description."""
    quantization: Quantization | None = None
    """How the frozen weights of linear layers are stored."""

    def __post_init__(self) -> None:
        if self.params < 1:
            raise PlanError(f"{self.name} has no parameters")

    @property
    def params(self) -> int:
        """Number of parameters, in elements."""
        return sum(unit.numel * unit.count for unit in self.units)

    @property
    def trainable(self) -> int:
        """Number of parameters with gradients, in elements."""
        return sum(unit.numel * unit.count for unit in self.units if unit.trainable)

    def sizes(self, plan: "ShardPlan") -> "Sizes":
        """Returns the sizes of the model under *plan*, with the padding of the plan's framework."""
        numel = shard = trainable_shard = persistent = kept_numel = 0
        is_fsdp = plan.framework in ("fsdp1", "fsdp2")
        freed = []
        for unit in self.units:
            share = self._stored_share(unit, plan)
            numel += round(unit.numel * share) * unit.count
            if is_fsdp and (unit.name == ROOT or plan.stage < ZeroStage.PARAMETERS):
                kept_numel += round(unit.numel * share) * unit.count
            elif is_fsdp:
                freed += [round(unit.numel * share)] * min(unit.count, 4)
            else:  # DeepSpeed gathers each module by itself
                freed += [round(math.prod(s) * share) for s in unit.shapes] * min(unit.count, 4)
            padded = round(_padded_shard_numel(unit, plan) * share)
            shard += padded * unit.count
            trainable_shard += padded * unit.count * unit.trainable
            if plan.persistence_numel and plan.stage == ZeroStage.PARAMETERS:
                small = (math.prod(s) for s in unit.shapes)
                persistent += unit.count * sum(n for n in small if n <= plan.persistence_numel)
        freed.sort(reverse=True)
        units = self.units if self.has_units else ()
        layers = [unit for unit in units if unit.name != ROOT]
        linear = (math.prod(s) for u in layers for s in u.shapes if len(s) == 2)
        return Sizes(
            numel=numel,
            trainable=self.trainable,
            shard_numel=shard,
            trainable_shard_numel=trainable_shard,
            persistent_numel=persistent,
            unit_numels=tuple(freed[:4]) if self.has_units else (),
            # at stage 2 everything stays gathered, whatever the units
            kept_numel=kept_numel if self.has_units or plan.stage < ZeroStage.PARAMETERS else 0,
            largest_tensor_numel=max((math.prod(s) for u in units for s in u.shapes), default=0),
            linear_numel=max(linear, default=0),
            trained_unit_numel=max((u.numel for u in layers if u.trainable), default=0),
            buffer_bytes=self.buffer_bytes,
            factored_numel=sum(
                factored_numel(shape) * u.count for u in self.units if u.trainable for shape in u.shapes
            ),
            layer_numel=max((u.numel for u in layers), default=0),
            root_numel=sum(u.numel * u.count for u in self.units if u.name == ROOT),
        )

    def _stored_share(self, unit: Unit, plan: "ShardPlan") -> float:
        """Returns the elements that are stored, and gathered, for each parameter of *unit*.

        FSDP and ZeRO-3 shard 4-bit weights as elements of the compute type (``bnb_4bit_quant_storage``).
        Under autocast ``prepare_model_for_kbit_training`` of peft casts the other weights to fp32.
        """
        if self.quantization is None or unit.trainable:
            return 1.0
        itemsize = plan.precision.compute_bytes
        if unit.quantized:
            return self.quantization.weight_bytes / itemsize
        return 4 / itemsize if plan.autocasts else 1.0


def _padded_shard_numel(unit: Unit, plan: "ShardPlan") -> int:
    """Returns the elements of *unit* in the shard of one rank, with padding."""
    ranks = plan.shard_ranks
    if plan.framework == "fsdp2":  # along the first dimension of each parameter
        # A scalar parameter has no first dimension: s[0] would raise
        return sum(math.ceil(s[0] / ranks) * math.prod(s[1:]) if s else 1 for s in unit.shapes)
    if plan.framework == "fsdp1":  # one flat parameter a unit
        return math.ceil(unit.numel / ranks)
    return sum(math.ceil(math.prod(s) / ranks) for s in unit.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that determine memory, in elements per rank; see :meth:`ModelSpec.sizes`."""

    numel: int
    trainable: int
    shard_numel: int
    """One rank's shard of all parameters, with padding."""
    trainable_shard_numel: int
    persistent_numel: int = 0
    """ZeRO-3: parameters that stay gathered because they are small."""
    unit_numels: tuple[int, ...] = ()
    """The largest units that are freed after use, descending; empty where units are unknown."""
    largest_tensor_numel: int = 0
    linear_numel: int = 0
    """The largest weight of a linear layer that no other module shares; 0 where unknown."""
    trained_unit_numel: int = 0
    """The trained parameters of the largest unit; 0: all of it."""
    kept_numel: int = 0
    """FSDP: elements of units that stay gathered from forward to backward (the root, or all)."""
    buffer_bytes: int = 0
    factored_numel: int = 0
    """Adafactor's second moments of all trainable parameters."""
    frozen_grad_numel: int = 0
    """Frozen elements of a rank's shard that have gradients: FSDP1 has those of whole units."""
    layer_numel: int = 0
    """The largest layer, whatever the stage; 0 where layers are unknown."""
    root_numel: int = 0
    """Elements outside of the layers."""
    named_units: tuple[tuple[str, int], ...] = ()
    """FSDP: (name, elements) of each unit, the root first; () where a run has not gathered them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The state that an optimizer keeps for each trainable parameter."""

    name: str
    full_states: int
    """Number of state tensors of the parameter's size."""
    state_bytes: float = 4.0
    """Bytes per element of a state tensor; includes the scales of a quantized state."""
    is_factored: bool = False
    """Adafactor: keeps the second moment by rows and columns."""
    foreach_copies: int = 0
    """Temporaries of its step, each as large as all the tensors that a rank updates."""
    loop_copies: int = 0
    """Temporaries of its step, each as large as the largest of these tensors."""


TABLES: Mapping[str, Any] = json.loads(files(__package__).joinpath("tables.json").read_text())
"""Figures of devices, links, optimizers and families of models, by their names."""

# torch's default, foreach, takes the root of the second moments of all tensors at once. Of 8 bits:
# blockwise quantization with one fp32 scale for 256 elements (Dettmers et al. 2022)
OPTIMIZERS = {row["name"]: Optimizer(**row) for row in TABLES["optimizers"]}
_ALIASES: Mapping[str, str] = TABLES["optimizer_aliases"]


def optim_named(name: str, momentum: float = 0.0, step: str = "") -> Optimizer | None:
    """Returns the optimizer with *name*, from a configuration or its class; None when unknown.

    *step*: how torch's optimizer updates: ``fused``, ``foreach`` or ``for-loop``; "" for its default.
    """
    key = name.lower().replace("_momentum", "-momentum")
    key = _ALIASES.get(key, key)
    if key == "sgd" and momentum:
        key = "sgd-momentum"
    plain_optimizer = OPTIMIZERS.get(key)
    return OPTIMIZERS.get(f"{key}-{step}", plain_optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes per element of parameters, gradients and optimizer states."""

    param_bytes: float = 2
    """Bytes per element of the parameters that are stored between steps."""
    compute_bytes: int = 2
    """Bytes per element of the unsharded parameters and the activations."""
    grad_bytes: float = 2
    """Bytes per element of the gradients that the optimizer reads."""
    has_master: bool = True
    """The optimizer keeps an additional fp32 copy of the parameters."""
    state_bytes: float = 4.0
    """Bytes per element of a full optimizer state, unless the optimizer fixes the size."""
    frozen_bytes: float = 0
    """Bytes per stored element of frozen parameters; 0: as *param_bytes*."""
    reduce_bytes: float = 0
    """Bytes per element of a gradient on the wire; 0: as *grad_bytes*."""

    @property
    def plain_grad_bytes(self) -> float:
        """Bytes per element of gradients in the type of the parameters, as in the ZeRO paper."""
        return min(self.grad_bytes, self.param_bytes)

    @property
    def sent_grad_bytes(self) -> float:
        """Bytes per element of a gradient that is reduced."""
        return self.reduce_bytes or self.grad_bytes

    @classmethod
    def mixed(cls) -> "Precision":
        """Returns bf16 or fp16 with fp32 masters, as in DeepSpeed and Megatron-LM: 2 + 2 + 12 bytes."""
        return cls()

    @classmethod
    def full(cls) -> "Precision":
        """Returns fp32 for all states: 4 + 4 + 8 bytes."""
        return cls(param_bytes=4, compute_bytes=4, grad_bytes=4, has_master=False)

    @classmethod
    def policy(cls) -> "Precision":
        """Returns FSDP's mixed precision: fp32 shards and gradients, bf16 gathering and computation."""
        return cls(param_bytes=4, compute_bytes=2, grad_bytes=4, has_master=False)

    @classmethod
    def pure(cls) -> "Precision":
        """Returns bf16 for all states: 2 + 2 + 4 bytes."""
        return cls(has_master=False, state_bytes=2.0)


PRECISIONS = {
    "mixed": Precision.mixed(), "fp32": Precision.full(), "fsdp-mixed": Precision.policy(),
    "autocast": Precision.policy(), "pure-bf16": Precision.pure(),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The sharding of a model over ranks, with the buffers of its communication."""

    stage: ZeroStage
    ranks: int
    framework: str = "deepspeed"
    shard_ranks: int = 0
    """Number of ranks that share one copy of the model (hybrid sharding); 0: all."""
    precision: Precision = field(default_factory=Precision.mixed)
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    optimizer_on: str = "device"
    params_on: str = "device"
    accumulation: int = 1
    reshards: bool = True
    """Stage 3: frees parameters after forward and gathers them again in backward."""
    prefetch_units: int | None = None
    """FSDP: units that the script has gathered ahead; None: as FSDP does by itself."""
    reduces_each: bool | None = None
    """True if each micro-step reduces its gradients; None: as the framework does by itself."""
    grad_bucket_numel: int = 0
    """Elements of one reduction bucket."""
    grad_buckets: int = 1
    """Number of buckets that exist at once (overlap_comm doubles it)."""
    reduces_whole_buckets: bool = True
    """ZeRO-1 and 2: all ranks get each bucket (use_multi_rank_bucket_allreduce), not just their part."""
    prefetch_numel: int = 0
    live_numel: int = 0
    """ZeRO-3: stage3_max_live_parameters; 0: no bound."""
    persistence_numel: int = 0
    """ZeRO-3: a parameter of at most this number of elements stays gathered."""
    secondary_ranks: int = 0
    """ZeRO++ hpZ: number of ranks that share the second copy; 0: no second copy."""
    quantized_weights: bool = False
    """ZeRO++ qwZ: gathers 8 bits of each parameter (zero_quantized_weights)."""
    quantized_grads: bool = False
    """ZeRO++ qgZ: exchanges 4 bits of each gradient (zero_quantized_gradients), over several hosts."""
    host_ranks: int = 0
    """Ranks of one host, for ZeRO++; 0: all."""
    updates_in_backward: bool = False
    """Hooks of gradients step optimizers within backward, and free each gradient at once."""
    bucket_views: bool = False
    """DDP: gradients are views of the buckets."""
    bucket_cap_bytes: int = 25 << 20
    """DDP: bytes of gradients at which a bucket is closed (``bucket_cap_mb``); 0: no DDP."""
    reuse_numel: int = 0
    """ZeRO-3: stage3_max_reuse_distance; 0: unknown."""
    sub_group_numel: int = 0
    """ZeRO-3: elements of a shard that are updated at once (sub_group_size); 0: all."""
    offload_ratio: float = 1.0
    """Offload++: share of the optimizer's sub-groups that is offloaded."""
    optimizer_buffers: int = 0
    """Buffers of a sub-group between NVMe and the optimizer (buffer_count)."""
    param_buffer_numel: int = 0
    """Elements of all buffers between NVMe and parameters (buffer_count x buffer_size)."""
    max_in_cpu: int = 0
    """Elements of parameters that stay on the host when the rest is on NVMe."""
    pins: bool = False
    """Offloaded states are pinned on the host of a GPU; the CPU accelerator pins nothing."""

    def __post_init__(self) -> None:
        if self.framework not in FRAMEWORKS:
            names = ", ".join(FRAMEWORKS)
            raise PlanError(f"unknown framework {self.framework!r}; known: {names}")
        if self.ranks < 1:
            raise PlanError(f"a plan needs at least one rank, not {self.ranks}")
        if not self.shard_ranks:
            # The dataclass is frozen: an assignment raises
            object.__setattr__(self, "shard_ranks", self.ranks)
        if self.ranks % self.shard_ranks:
            raise PlanError(f"{self.ranks} ranks cannot be split into groups of {self.shard_ranks}")
        if self.framework == "ddp" and self.stage > ZeroStage.OPTIMIZER:
            raise PlanError(
                f"DDP has stages 0 and 1 (ZeroRedundancyOptimizer), not {self.stage}",
                hint="Stages 2 and 3 are --framework fsdp2 or deepspeed.",
            )
        if self.framework in ("fsdp1", "fsdp2") and self.stage < ZeroStage.GRADIENTS:
            raise PlanError(
                f"FSDP is stage 2 (reshard_after_forward=False) or 3, not {self.stage}",
                hint="Stage 0 is --framework ddp; stages 0 to 3 are DeepSpeed's.",
            )
        if self.accumulation < 1:
            raise PlanError(f"there is no accumulation over {self.accumulation} micro-steps")
        for tier in (self.optimizer_on, self.params_on):
            if tier == "nvme" and (self.framework != "deepspeed" or self.stage < ZeroStage.PARAMETERS):
                raise PlanError("only DeepSpeed's stage 3 offloads to NVMe")
            if tier not in PLACES:
                raise PlanError(f"unknown place {tier!r}; known: {', '.join(PLACES)}")
        if self.params_on != "device" and self.stage != ZeroStage.PARAMETERS:
            raise PlanError("parameters are offloaded only at stage 3")
        if self.optimizer_on != "device" and not self.stage:
            raise PlanError("the optimizer is offloaded from stage 1 on")

    @property
    def reduces_each_micro_step(self) -> bool:
        """True if each micro-step reduces its gradients: where they stay partitioned, it must."""
        if self.reduces_each is None:
            return self.stage >= ZeroStage.GRADIENTS
        return self.reduces_each

    @property
    def autocasts(self) -> bool:
        """True if torch.autocast mixes the precision: FSDP and DeepSpeed gather cast parameters."""
        p = self.precision
        return self.framework == "ddp" and p.param_bytes == 4 > p.compute_bytes

    @property
    def label(self) -> str:
        """Name of the plan for users, such as ``ZeRO-3 + optimizer on host``."""
        names = {"deepspeed": f"ZeRO-{self.stage}"}
        names["ddp"] = "DDP" if self.bucket_cap_bytes else "one process"
        names["ddp"] += " + ZeroRedundancyOptimizer" * (self.stage == ZeroStage.OPTIMIZER)
        name = names.get(self.framework) or f"{self.framework.upper()} (ZeRO-{self.stage})"
        moved = {"optimizer": self.optimizer_on, "parameters": self.params_on}
        offloads = [f"{state} on {tier}" for state, tier in moved.items() if tier != "device"]
        return " + ".join([name, *offloads])
