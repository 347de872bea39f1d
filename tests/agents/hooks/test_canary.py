"""Every private name of torch that the agent touches: when a version moves one, these say which."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from zeromon_agents.hooks.dimensions import MESH, STAGE as PIPELINE_STAGE
from zeromon_agents.hooks.fsdp1 import RUNTIME, WRAPPER
from zeromon_agents.hooks.fsdp2 import PARAM_GROUP, STATE
from zeromon_agents.hooks.pipelining import ENGINE as PIPELINE_ENGINE, MESSAGES, SCHEDULES
from zeromon_agents.hooks.process_groups import PAYLOADS
from zeromon_agents.runtime.bootstrap import missing_parts, start_in_run

IGNORED = frozenset(
    "rank size name get_group_store split_group merge_remote_group abort shutdown _id _backend_id"
    " _set_sequence_number_for_group _get_sequence_number_for_group set_timeout _device_types"
    " _get_backend_name _start_coalescing _end_coalescing _register_backend _get_backend"
    " _set_default_backend _register_on_completion_hook _wait_for_pending_works _has_hooks"
    " _enable_collectives_timing _set_group_name group_name _set_group_desc group_desc"
    " bound_device_id use_pg_for_symm_mem_rendezvous boxed unbox _pybind11_conduit_v1_"
    " BackendType UNDEFINED GLOO NCCL XCCL UCC MPI CUSTOM"
    # of newer versions; a window's puts and signals are calls of its own class
    " _add_ephemeral_timeout get_backend get_reconfigure_handle new_window reconfigure"
    " register_abort_hook register_post_hook register_pre_hook unregister_abort_hook"
    " unregister_post_hook unregister_pre_hook supports_abort_hooks supports_completion_hooks"
    " supports_reconfigure supports_window"
    # of older versions
    " _set_backend _get_backends _supports_splitting _is_ucc_available eager_connect_single_device"
    " perform_nocolor_split comm_split_count _set_timeout get_timeout".split()
)
"""The other attributes of ProcessGroup: none of them communicates by itself."""


def test_every_process_group_method_is_wrapped_or_known_to_be_harmless() -> None:
    """A new torch that adds a collective must not go unseen."""
    names = {name for name in vars(ProcessGroup) if not name.startswith("__")}
    assert names - set(PAYLOADS) - IGNORED == set()


def test_the_methods_that_fsdp_calls_are_there() -> None:
    """At least one spelling of each collective exists."""
    assert {"allreduce", "broadcast", "allgather", "send", "recv", "barrier"} <= set(vars(ProcessGroup))
    assert {"all_gather_single", "_allgather_base"} & set(vars(ProcessGroup))
    assert {"reduce_scatter_single", "_reduce_scatter_base"} & set(vars(ProcessGroup))
    assert "wait" in vars(Work)
    assert hasattr(Work, "get_future")
    assert hasattr(ProcessGroup, "_get_sequence_number_for_group")


@pytest.mark.parametrize(
    ("module", "owner", "names"),
    [
        (PARAM_GROUP, "FSDPParamGroup", "unshard wait_for_unshard reshard post_backward"),
        (PARAM_GROUP, "FSDPParamGroup", "finalize_backward post_forward"),
        (STATE, "FSDPState", "_root_pre_forward"),
        (PIPELINE_STAGE, "_PipelineStageBase", " ".join(MESSAGES)),
        (PIPELINE_STAGE, "_PipelineStageBase", "forward_one_chunk backward_one_chunk"),
        (PIPELINE_STAGE, "_PipelineStageBase", "backward_weight_one_chunk has_backward is_last"),
        (SCHEDULES, "PipelineScheduleSingle", "step"),
        (SCHEDULES, "PipelineScheduleMulti", "step"),
        (SCHEDULES, "_PipelineSchedule", "_maybe_compute_loss"),
        (PIPELINE_ENGINE, "PipelineEngine", "train_batch _INSTRUCTION_MAP is_first_stage is_last_stage"),
        (RUNTIME, "", "_unshard _reshard _reduce_grad"),
        (WRAPPER, "FullyShardedDataParallel", "__init__ forward"),
        (MESH, "DeviceMesh", "__init__ get_group"),
        (PIPELINE_STAGE, "_PipelineStageBase", "__init__"),
        ("torch.nn.parallel.distributed", "DistributedDataParallel", "__init__ forward"),
        (PARAM_GROUP, "FSDPParamGroup", "__init__"),
        ("torch.nn.parallel.distributed", "DistributedDataParallel", "_get_ddp_logging_data"),
        ("torch.nn.parallel.distributed", "DistributedDataParallel", "_build_params_for_reducer"),
        ("torch.nn.parallel.distributed", "", "_verify_param_shape_across_processes"),
        ("torch.distributed", "", "_broadcast_coalesced"),
        ("torch._C._distributed_c10d", "Reducer", "get_backward_stats"),
        ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "__next__"),
        ("torch.utils.data._utils.fetch", "_MapDatasetFetcher", "fetch"),
        ("torch.utils.data._utils.fetch", "_IterableDatasetFetcher", "fetch"),
        ("torch.autograd", "", "_engine_run_backward"),
        ("torch.autograd", "", "_profiler_enabled"),
        ("torch.autograd.profiler", "profile", "_prepare_trace _start_trace __exit__"),
        ("torch.distributed.distributed_c10d", "", "init_process_group _world"),
        ("torch.optim.optimizer", "", "register_optimizer_step_pre_hook"),
        ("torch.optim.optimizer", "", "register_optimizer_step_post_hook"),
    ],
)
def test_patched_names_exist_where_they_are_patched(module: str, owner: str, names: str) -> None:
    """Held by the object itself, not inherited: that is where the original is taken from."""
    holder = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    assert [name for name in names.split() if name not in vars(holder)] == []


def test_attributes_read_from_fsdp_are_still_set() -> None:
    """Names that the hooks read from instances appear in the sources that set them."""
    assert "mesh_dim_names" in inspect.getsource(importlib.import_module(MESH))
    group = inspect.getsource(importlib.import_module(PARAM_GROUP))
    for name in ("_all_gather_result", "_module_fqn", "fsdp_params", "all_gather_event"):
        assert name in group
    state = inspect.getsource(importlib.import_module(STATE))
    for name in ("iter_forward_root", "_state_ctx", "all_states"):
        assert name in state
    assert "_auto_reshard_after_forward" in state or "post_forward_mesh_info" in group
    schedules = inspect.getsource(importlib.import_module(SCHEDULES))
    for name in ("_has_backward", "_n_microbatches", "_num_stages", "_stages", "_stage", "_loss_fn"):
        assert f"self.{name} = " in schedules or f"self.{name}: " in schedules
    stage = inspect.getsource(importlib.import_module(PIPELINE_STAGE))
    for name in ("stage_index_to_group_rank", "stage_index", "group", "device"):
        assert f"self.{name} = " in stage or f"self.{name}: " in stage
    wrapper = inspect.getsource(importlib.import_module(WRAPPER))
    assert "_handle" in wrapper


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "torch.distributed.fsdp._fully_shard._fsdp_param",
            "_orig_size _sharded_param_data all_gather_outputs _unsharded_param sharded_param "
            "unsharded_accumulated_grad _sharded_post_forward_param_data param_dtype orig_dtype "
            "offload_to_cpu",
        ),
        (
            PARAM_GROUP,
            "comm_ctx all_gather_state reduce_scatter_state mesh_info post_forward_mesh_info "
            "_training_state _sharded_state _reshard_after_forward reduce_scatter_input",
        ),
        ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "all_gather_output"),
        (
            "torch.distributed.fsdp._flat_param",
            "_full_param_padded _full_prec_full_param_padded _local_shard _mp_shard _cpu_grad "
            "_saved_grad_shard _unpadded_unsharded_size _fwd_bwd_param_dtype _sharding_strategy "
            "uses_sharded_strategy needs_unshard _offload_params",
        ),
        ("torch.distributed.fsdp.fully_sharded_data_parallel", "_handle"),
        ("torch.nn.parallel.distributed", "gradient_as_bucket_view process_group"),
        ("torch.distributed.optim.zero_redundancy_optimizer", "self.optim"),
    ],
)
def test_names_that_the_census_reads_are_still_set(module: str, names: str) -> None:
    """Of parameters, flat parameters and what is in flight."""
    text = inspect.getsource(importlib.import_module(module))
    assert [name for name in names.split() if name not in text] == []


def test_callbacks_of_a_backward_run_at_its_end_in_their_order() -> None:
    """One that a callback queues comes last: between the two lies what DDP's reducer waits for."""
    queue, called = torch.autograd.Variable._execution_engine, []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: queue.queue_callback(lambda: called.append("the reducer's")))

    def first(*_: Any) -> None:
        handle.remove()
        queue.queue_callback(computed)

    def computed() -> None:
        called.append("before")
        queue.queue_callback(lambda: called.append("after"))

    loss = (x * x).sum()
    assert loss.grad_fn is not None
    handle = loss.grad_fn.register_prehook(first)
    loss.backward()
    assert called == ["before", "the reducer's", "after"]


def test_allocator_and_flight_recorder_entries_exist() -> None:
    """Probed names: at least one of each pair is there on this torch."""
    distributed = torch._C._distributed_c10d
    assert hasattr(distributed, "_dump_fr_trace") or hasattr(distributed, "_dump_nccl_trace")
    assert hasattr(torch.distributed.distributed_c10d._world, "pg_map")
    assert hasattr(torch.distributed.distributed_c10d._world, "pg_group_ranks")


def test_nothing_is_missing_on_this_torch() -> None:
    """The check that a rank makes before it starts finds all parts."""
    assert missing_parts() == []


def test_a_torch_without_the_needed_parts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too old a torch is told by what it lacks, not by its version."""
    optimizer = importlib.import_module("torch.optim.optimizer")
    monkeypatch.delattr(optimizer, "register_optimizer_step_post_hook")
    assert missing_parts() == ["register_optimizer_step_post_hook"]
    # What the agent imports may need the very part, so its import is too late for the message
    monkeypatch.setitem(sys.modules, "zeromon_agents.runtime.agent", None)
    monkeypatch.delitem(sys.modules, "zeromon_agents.runtime.attached", raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    attached = importlib.import_module("zeromon_agents.runtime.attached")
    for start in (start_in_run, lambda: attached.attach("run", 1, {}, ipc=0, any_process=True)):
        with pytest.raises(RuntimeError, match="has no register_optimizer_step_post_hook; use torch"):
            start()
