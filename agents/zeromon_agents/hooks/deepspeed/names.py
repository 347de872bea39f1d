"""Modules and methods of DeepSpeed that the hooks patch, and DeepSpeed's names of process groups."""

import sys
from typing import Any

ENGINE = "deepspeed.runtime.engine"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
STAGE_3 = "deepspeed.runtime.zero.stage3"
GATHER = "_PartitionedParameterCoordinator__all_gather_params_"
REDUCE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"

_GROUPS = "deepspeed.utils.groups"
GROUP_LABELS = {
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "zero_hpz",
    "_WORLD_GROUP": "zero",
    "_EXPERT_PARALLEL_GROUP": "expert_parallel",
    "_EXPERT_DATA_PARALLEL_GROUP": "expert_data_parallel",
    "_ALL_TO_ALL_GROUP": "all_to_all",
    "_TENSOR_MODEL_PARALLEL_GROUP": "tensor_parallel",
    "_MODEL_PARALLEL_GROUP": "model_parallel",
    "_DATA_PARALLEL_GROUP": "data_parallel",
}
"""Variables of ``deepspeed.utils.groups``, and the labels of the groups that they hold."""


def group_label(pg: Any) -> str:
    """Returns the label of one of DeepSpeed's process groups; "" for any other group."""
    module = sys.modules.get(_GROUPS)
    if module is None:
        return ""
    for name, label in GROUP_LABELS.items():
        held = getattr(module, name, None)
        if held is pg:
            return label
        if isinstance(held, dict):
            for key, group in held.items():
                if group is pg:
                    return f"{label}:{key}"
    return ""
