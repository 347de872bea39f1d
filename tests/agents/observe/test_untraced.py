"""What reads torch's own records of collectives: every backend's Flight Recorder, on every torch."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromon_agents.hooks.c10d import PAYLOADS
from zeromon_agents.observe.process_metadata import unknown_collectives
from zeromon_agents.observe.untraced import read_flight_recorder

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
