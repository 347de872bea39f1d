"""Every private name of DeepSpeed that the agent touches: when a version moves one, these say which."""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from zeromon_agents.hooks.deepspeed import backend as deepspeed
from zeromon_agents.observe import offload, zero_roles

pytest.importorskip("deepspeed")


def source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


@pytest.mark.parametrize(
    ("module", "owner", "names"),
    [
        (deepspeed.ENGINE, "DeepSpeedEngine", "__init__ forward backward step _take_model_step"),
        (deepspeed.ENGINE, "DeepSpeedEngine", "allreduce_bucket zero_optimization_stage"),
        (deepspeed.COORDINATOR, "PartitionedParameterCoordinator", "fetch_sub_module"),
        (deepspeed.COORDINATOR, "PartitionedParameterCoordinator", deepspeed.GATHER),
        (deepspeed.STAGE_1_AND_2, "DeepSpeedZeroOptimizer", "reduce_ipg_grads get_param_id"),
        (
            deepspeed.STAGE_1_AND_2,
            "DeepSpeedZeroOptimizer",
            "async_inplace_copy_grad_to_fp32_buffer_from_gpu async_accumulate_grad_in_cpu_via_gpu",
        ),
        (
            deepspeed.STAGE_3,
            "DeepSpeedZeroOptimizer_Stage3",
            f"{deepspeed.REDUCE_3} _post_step partition_grads "
            "_reassign_or_swap_out_partitioned_parameters",
        ),
        (offload.BUILDERS, "OpBuilder", "load _loaded_ops"),
    ],
)
def test_patched_names_exist_where_they_are_patched(module: str, owner: str, names: str) -> None:
    """Held by the class itself, not inherited: that is where the original is taken from."""
    holder = getattr(importlib.import_module(module), owner)
    assert [name for name in names.split() if name not in vars(holder)] == []


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (deepspeed.ENGINE, "skipped_steps global_steps zero_config optimizer module"),
        (deepspeed.ENGINE, "fp16_enabled bfloat16_enabled communication_data_type"),
        (
            "deepspeed.runtime.config",
            "_param_dict zero_config float16_config bfloat16_config world_size optimizer_name "
            "optimizer_params",
        ),
        ("deepspeed", "model=model optimizer=optimizer config_class=config_class"),
        (
            "deepspeed.runtime.precision_config",
            "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
        ),
        (
            "deepspeed.runtime.zero.config",
            "offload_param offload_optimizer zero_hpz_partition_size zero_quantized_weights "
            "zero_quantized_gradients overlap_comm stage3_prefetch_bucket_size prefetch_bucket_size",
        ),
        (deepspeed.COORDINATOR, "self.__n_available_params @compiler.lazy_disable"),
        ("deepspeed.runtime.zero.offload_config", "nvme_path device pin_memory buffer_count"),
        (
            "deepspeed.runtime.zero.partition_parameters",
            "ds_id ds_status ds_numel ds_tensor ds_secondary_tensor ds_persist AVAILABLE NOT_AVAILABLE",
        ),
        (
            deepspeed.STAGE_1_AND_2,
            "ipg_buckets grad_position master_weights_and_grads_dtype micro_step_id "
            "loss_scaler _global_grad_norm",
        ),
        (
            deepspeed.STAGE_3,
            "ipg_buckets fp16_partitioned_groups_flat grad_partitions_flat_buffer "
            "is_gradient_accumulation_boundary loss_scaler optimizer_swapper _global_grad_norm",
        ),
        ("deepspeed.runtime.fp16.loss_scaler", "cur_scale cur_hysteresis"),
        ("deepspeed.runtime.fp16.fused_optimizer", "loss_scale_config cur_scale"),
        (
            "deepspeed.runtime.swap_tensor.partitioned_param_swapper",
            "buffers partitioned_swap_buffer param_id_to_numel id_to_path swap_element_size",
        ),
        (
            "deepspeed.runtime.swap_tensor.optimizer_utils",
            "swapped_gradients unswapped_gradients num_tensors numel",
        ),
        ("deepspeed.runtime.swap_tensor.utils", "all_buffers"),
        ("deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper", "swap_buffer_manager"),
        ("deepspeed.utils.groups", " ".join(deepspeed.GROUP_LABELS)),
    ],
)
def test_attributes_that_are_read_are_still_set(module: str, names: str) -> None:
    """Names that are read from instances appear in the sources that set them."""
    text = source(module)
    assert [name for name in names.split() if name not in text] == []


def test_the_flat_groups_are_still_kept_under_these_names() -> None:
    """Each role's tensors hang on the wrapping optimizer of some stage."""
    modules = (
        deepspeed.STAGE_1_AND_2, deepspeed.STAGE_3, "deepspeed.runtime.bf16_optimizer",
        "deepspeed.runtime.fp16.fused_optimizer", "deepspeed.runtime.fp16.unfused_optimizer",
    )  # fmt: skip
    text = "".join(map(source, modules))
    assert [name for name, _ in zero_roles.FLAT if f"self.{name}" not in text] == []


def test_the_operators_of_asynchronous_io_are_called_so() -> None:
    """The handle's class is the one point through which everything goes to the disk."""
    for module, builder, name in (
        ("deepspeed.ops.op_builder.async_io", "AsyncIOBuilder", "async_io"),
        ("deepspeed.ops.op_builder.gds", "GDSBuilder", "gds"),
    ):
        assert name == getattr(importlib.import_module(module), builder).NAME
    package = Path(importlib.import_module("deepspeed").__path__[0])
    text = (package / "ops" / "csrc" / "aio" / "py_lib" / "py_ds_aio.cpp").read_text()
    names = ("aio_handle", "async_pread", "async_pwrite", "sync_pread", "sync_pwrite", "wait")
    assert [name for name in names if f'"{name}"' not in text] == []
