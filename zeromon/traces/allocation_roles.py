"""What an allocation is for, by the frames that made it and those that freed it. Pure.

The innermost frame that tells decides. A stack does not tell everything: what a backward pass makes is a
gradient or scratch, so the moment of its end decides; without any such frame it stays unknown.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

PARAMETER, GRADIENT, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
ACTIVATION, TEMPORARY, COMMUNICATION = "activations", "temporary", "communication buffers"
UNKNOWN = "unknown"
ROLES = PARAMETER, GRADIENT, OPTIMIZER_STATE, ACTIVATION, TEMPORARY, COMMUNICATION, UNKNOWN

_FORWARD = "forward"
_BACKWARD = "backward"
_OPTIMIZER = "optimizer"
_ZERO_GRAD = "zero_grad"

_OPTIM = r"(?:/optim/|/optimizers?/|deepspeed/ops/(?:adam|lamb|lion|adagrad|muon)/)[^:]*:\d+:"
_MODULES = r"nn/modules/\w+\.py:\d+:"
_RULES = (
    (_ZERO_GRAD, r":zero_grad$"),
    (OPTIMIZER_STATE, _OPTIM + r"\w*(?:init_group|init_state|initialize_optimizer_states?)$"),
    (_OPTIMIZER, _OPTIM),
    (GRADIENT, r"AccumulateGrad|_fsdp_param\.py:\d+:\w*accumulate\w*grad|zero/.*:\w*grad_partition"),
    (COMMUNICATION, r"nn/parallel/distributed\.py:\d+:_(?!run_ddp)|_fsdp_collectives\.py"
                    r"|distributed_c10d\.py|_functional_collectives\.py|c10d::"
                    r"|:\w*(?:all_?gather|reduce_scatter|allreduce|unsharded|ipg_buffer|bucket)\w*$"
                    r"|ProcessGroup(?:NCCL|Gloo|UCC|XCCL)|deepspeed/comm/|ncclMemAlloc"),
    (PARAMETER, _MODULES + r"(?:__init__|reset_parameters|_apply|convert|to|cuda|to_empty"
                r"|load_state_dict|_load_from_state_dict)$|nn/init\.py:|nn/parameter\.py:|:from_pretrained$"
                r"|_fsdp_param\.py:\d+:_init_sharded_param|_flat_param\.py:\d+:\w*(?:init|flatten)\w*$"
                r"|zero/partition_parameters\.py:"),
    (_BACKWARD, r"autograd::Engine|_engine_run_backward|torch/_tensor\.py:\d+:backward"
                r"|autograd/__init__\.py:\d+:backward"),
    (_FORWARD, _MODULES + r"(?:_\w*call_impl|\w*forward)$|:forward$|nn/functional\.py:"
               r"|utils/checkpoint\.py:"),
)  # fmt: skip
_KINDS = tuple((kind, re.compile(rule)) for kind, rule in _RULES)


@lru_cache(maxsize=1 << 16)
def _kind_of_frame(frame: str) -> str:
    return next((kind for kind, rule in _KINDS if rule.search(frame)), "")


def kind_of(stack: Sequence[str]) -> str:
    """What the innermost frame says that says anything; "" where none does."""
    return next((kind for frame in stack if (kind := _kind_of_frame(frame))), "")


def role(made: str, freed: str | None) -> str:
    """The role of an allocation by the kinds of its two stacks; *freed*: None for one that lives on."""
    if made in (_BACKWARD, COMMUNICATION) and freed == _ZERO_GRAD:
        return GRADIENT
    if made == _BACKWARD:
        return TEMPORARY if freed == _BACKWARD else GRADIENT
    if made == _OPTIMIZER:
        return OPTIMIZER_STATE if freed is None else TEMPORARY
    if made == _FORWARD:
        return TEMPORARY if freed == _FORWARD else ACTIVATION
    return UNKNOWN if made in ("", _ZERO_GRAD) else made
