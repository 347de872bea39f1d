"""What reads torch's own records of collectives: every backend's Flight Recorder, on every torch."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Op, Phase
from zeromon.ring.events import GroupSequence, decode_record
from zeromon_agents.hooks import ddp
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.process_groups import PAYLOADS, Group, describe_group, sequence_number, text_of
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.observe.process_metadata import own_collectives, unknown_collectives
from zeromon_agents.observe.stall_detector import (
    Dispatched,
    StallDetector,
    UntracedCollectives,
    read_flight_recorder,
)
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, ON, HookContext

MODULE = torch._C._distributed_c10d


def recorder(**entries: list[str]) -> Any:
    """A dump function as of torch 2.15: a recorder per backend, of which gloo's is the default."""

    def dump(
        includeCollectives: bool, includeStackTraces: bool, onlyActive: bool, backend: str = "gloo"
    ) -> bytes:
        found = entries.get(backend, [])
        return pickle.dumps({"entries": [{"profiling_name": one} for one in found]})

    dump.__doc__ = "_dump_fr_trace(onlyActive: bool | None = None, backend: str = 'gloo') -> bytes"
    return dump


def group(**backends: str) -> Any:
    """A process group with a backend per device."""
    return SimpleNamespace(
        _device_types=list(backends),
        _get_backend=lambda device: SimpleNamespace(name=lambda: backends[device]),
    )


def names(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["profiling_name"] for entry in entries]


def test_each_backend_of_the_groups_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch 2.15 `nccl` is nccl2, whose entries are in a recorder of that name."""
    found = recorder(gloo=["gloo:all_reduce"], nccl2=["nccl2:all_gather"], xccl=["xccl:send"])
    world = SimpleNamespace(pg_map=[group(cpu="gloo", cuda="nccl2"), SimpleNamespace()])
    monkeypatch.setattr(MODULE, "_dump_fr_trace", found, raising=False)
    monkeypatch.setattr(MODULE, "_dump_nccl_trace", lambda **_: pickle.dumps({}), raising=False)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", world)
    assert names(read_flight_recorder()) == ["gloo:all_reduce", "nccl2:all_gather"]


def test_the_first_nccl_and_gloo_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an older torch a dump function has no backend; entries of one do not hide the other's."""
    gloo = pickle.dumps({"entries": [{"profiling_name": "gloo:all_reduce"}]})
    nccl = pickle.dumps({"entries": [{"profiling_name": "nccl:all_gather"}]})

    def dump(includeCollectives: bool, includeStackTraces: bool, onlyActive: bool) -> bytes:
        return gloo

    monkeypatch.setattr(MODULE, "_dump_fr_trace", dump, raising=False)
    monkeypatch.setattr(MODULE, "_dump_nccl_trace", lambda **_: nccl, raising=False)
    assert names(read_flight_recorder()) == ["nccl:all_gather", "gloo:all_reduce"]


def test_a_torch_without_a_recorder_has_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        monkeypatch.delattr(MODULE, name, raising=False)
    assert read_flight_recorder() == []


class HookedGroup:
    """A process group of torch 2.14, whose dispatcher calls hooks."""

    def __init__(self) -> None:
        self.hooks: dict[int, Any] = {}

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        self.hooks[hook_id] = hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        del self.hooks[hook_id]

    def issue(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        """What C++ does at each collective."""
        args = SimpleNamespace(
            name=SimpleNamespace(name=name), input_tensors=inputs, output_tensors=outputs
        )
        for hook in self.hooks.values():
            hook(args)


def test_a_hook_of_the_dispatcher_names_what_no_other_hook_saw() -> None:
    """With its bytes and phase; what Python issued passes there, too, and does not count twice."""
    context: Any = SimpleNamespace(mode=ON, phase=Phase.BACKWARD, guard=Guard())
    pg = HookedGroup()
    group = Group(1, lambda: pg, size=2, on_device=False, base=0)
    dispatched = Dispatched(context)
    for _ in range(2):
        dispatched.watch(group, pg)
    part, whole = torch.zeros(4), torch.zeros(8)
    pg.issue("ALLREDUCE", [part], [])
    group.issued += 1
    pg.issue("BROADCAST", [part], [])
    pg.issue("ALLGATHER_INTO_TENSOR_COALESCED", [part], [whole])
    pg.issue("REDUCE_SCATTER_BASE", [whole], [part])
    pg.issue("GATHER", [part], [])
    context.phase = Phase.FORWARD
    pg.issue("BROADCAST", [part], [])
    assert dispatched.take(group) == {
        (Op.ALL_REDUCE, Phase.BACKWARD): (1, 16),
        (Op.ALL_GATHER, Phase.BACKWARD): (1, 32),
        (Op.REDUCE_SCATTER, Phase.BACKWARD): (1, 32),
        (Op.GATHER, Phase.BACKWARD): (1, 32),
        (Op.BROADCAST, Phase.FORWARD): (1, 16),
    }
    assert dispatched.take(group) == {}
    pg.issue("ALLREDUCE", [object()], [])  # nothing reaches the training loop
    context.mode = OFF
    pg.issue("ALLREDUCE", [part], [])
    assert dispatched.take(group) == {(Op.ALL_REDUCE, Phase.FORWARD): (1, 0)}
    assert context.guard.errors == 1
    dispatched.stop()
    assert pg.hooks == {}
    dispatched.watch(group, SimpleNamespace())  # an older torch
    assert dispatched.take(group) == {}


def test_buckets_of_several_models_are_told_apart_or_left_unknown() -> None:
    """Three buckets of 10 B and one of 7 B: four calls are one round of each."""
    models, once = ((10, 10, 10), (7,)), (1, 1)
    assert ddp._possible_sums(models, once, 4) == {37}
    assert ddp._possible_sums(models, once, 3) == {30}
    assert ddp._possible_sums(models, once, 2) == set()
    assert ddp._possible_sums(models, (1, 3), 3) == {30, 21}
    assert ddp._possible_sums(((7,),), (4,), 3) == {21}
    assert ddp._possible_sums(models, (100, 100), 3) == set()
    assert "self._has_rebuilt_buckets = True" in inspect.getsource(DistributedDataParallel)


def test_collectives_of_a_newer_torch_are_named() -> None:
    """A method that returns a Work communicates; those of this torch are known."""

    class Newer:
        def shuffle(self) -> None:
            """shuffle(self: ProcessGroup, tensor: torch.Tensor) -> c10d::Work

            Shuffles."""

        def sift(self) -> None:
            """sift(*args, **kwargs)
            1. sift(self: ProcessGroup) -> torch._C._distributed_c10d.Work"""

        def new_worker(self) -> None:
            """new_worker(self: ProcessGroup, hook: Callable[[Work], None]) -> None"""

        plain = 3

    assert unknown_collectives(Newer) == ["shuffle", "sift"]
    assert unknown_collectives(MODULE.ProcessGroup) == []
    methods = vars(MODULE.ProcessGroup)
    assert "allreduce" in PAYLOADS
    hidden = type("Hidden", (), {"all_reduce_new": methods["allreduce"]})
    assert unknown_collectives(hidden) == ["all_reduce_new"]


def test_a_process_group_written_in_python_is_told() -> None:
    """Its own methods pass no hook; without a name it is watched none the less."""

    class Mine(MODULE.ProcessGroup):
        def allreduce(self, tensors: Any, options: Any) -> None: ...

        def helper(self) -> None: ...

    class Inherits(Mine): ...

    pg = Mine(0, 1)
    assert own_collectives([type(pg), Inherits, MODULE.ProcessGroup, object]) == ["Mine.allreduce"]
    with pytest.raises(RuntimeError):
        _ = pg.group_name
    assert text_of(pg, "group_name") == "" and text_of(object(), "group_name") is None
    described = describe_group(pg)
    assert described["name"] == "" and described["in_python"]
    assert not describe_group(MODULE.ProcessGroup(0, 1))["in_python"]
    assert sequence_number(pg) == -1


@pytest.mark.parametrize("existed", [True, False])
def test_a_group_without_sequence_numbers_has_no_count_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    """As of MPI, made before the agent or after: what its hooks have counted is all that is known."""
    pg = MODULE.ProcessGroup(0, 1)
    world = SimpleNamespace(pg_map={pg: ("mpi",)}, pg_group_ranks={})
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", world)
    ring = RingWriter(tmp_path / "rank0.1.ring", rank=0)
    context = HookContext(ring, Guard())
    context.mode = ON
    collectives = Collectives(context, DeviceTimer(context))
    collectives.register_groups(existed=existed)
    collectives.group_of(pg).issued = 3
    UntracedCollectives(context, collectives, lambda *_: None).account(1)
    detector = StallDetector(context, collectives, attached=False)
    assert [detector.check() for _ in range(9)][-1]
    events = [decode_record(raw) for raw in RingReader(ring.path).read(final=True)]
    assert not [event for event in events if isinstance(event, GroupSequence)]
