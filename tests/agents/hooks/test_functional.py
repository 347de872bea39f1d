"""Functional collectives: tensor, context and expert parallel, and what torch.compile makes of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # it tells torch.fx which operators have side effects
import torch.distributed._symmetric_memory
from flight import by_gloo_op, flight_counts, unattributed
from support import Node, Result, train_command
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from virtual_device import VirtualDevice

from zeromon.readout.text import in_graphs
from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Op, Phase, Untimed
from zeromon.ring.events import Done, Issued, decode_record
from zeromon.snapshot import RankSnapshot
from zeromon_agents.hooks import functional as functional_hooks
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.functional import Functional, operators_of, unknown_operators
from zeromon_agents.hooks.process_groups import Group
from zeromon_agents.hooks.symmetric_memory import NAMESPACE, SymmetricMemory, collective_operators
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.observe.stall_detector import WARM_UP_STEPS
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import IDLE, ON, HookContext

SCHEMA = ["input", "reduce_op", "group_name"]

STEPS = 6
"""Of each case of the program."""
BACKWARD_IN_CPP = any(
    line.startswith("Autograd[alias]") and "Functional.cpp" in line
    for line in torch._C._dispatch_dump("_c10d_functional_autograd::all_to_all_single").splitlines()
)
"""Before torch 2.13: the backward of the collectives with autograd is C++, which no hook sees."""
FORWARD_ONLY = {"ep": 2, "cp": 2} if BACKWARD_IN_CPP else {}
"""Cases that use them -> collectives of a backward."""
CASES = [
    (("tp", "tp_aot", "ep", "cp", "odd"), 2),
    pytest.param(("ddp_compiled", "tp", "tp_inductor", "fsdp2_compiled"), 2, marks=pytest.mark.long),
    pytest.param(("fsdp2_tp", "tp", "tp_aot", "ep", "cp"), 4, marks=pytest.mark.long),
    pytest.param(("ddp_compiled", "tp_inductor", "fsdp2_compiled"), 4, marks=pytest.mark.long),
]


@pytest.mark.recorder
@pytest.mark.parametrize(("cases", "ranks"), CASES)
def test_functional_collectives_are_counted_timed_and_left_alone(
    shared_node: Node, cases: tuple[str, ...], ranks: int
) -> None:
    """Counts and bytes are the Flight Recorder's; results and graphs those of a run without."""
    cases = tuple(case for case in cases if case not in FORWARD_ONLY)
    watched, result = ran(shared_node, cases, ranks)
    bare, _ = ran(shared_node, cases, ranks, watched=False)
    assert (watched.pop("watched"), bare.pop("watched")) == (True, False)
    counted_as_the_flight_recorder_says(shared_node, watched, result)
    for rank in result.snapshot.ranks:
        assert rank.agent.errors == 0
        timed_outside_of_control_steps(rank, ddp="ddp_compiled" in cases)
    of_tp = range(2, STEPS + 1) if cases[0] == "tp" else ()
    exposed_as_the_program_says(result.snapshot.ranks[0], watched["spent"], of_tp)
    assert watched["losses"] == bare["losses"]
    assert watched["compiled"] == bare["compiled"]


def ran(
    node: Node, cases: tuple[str, ...], ranks: int, *, watched: bool = True
) -> tuple[dict[str, Any], Result]:
    """What rank 0 of the program wrote, and what the collector saw."""
    folder = node.folder / "-".join(("functional", str(ranks), str(watched), *cases))
    command = train_command(ranks, str(folder), *cases, program="functional.py")
    result = node.run(command, watched=watched, TORCH_FR_BUFFER_SIZE="20000")
    assert result.code == 0, result.output
    return json.loads((folder / "0.json").read_text()), result


def counted_as_the_flight_recorder_says(node: Node, facts: dict[str, Any], result: Result) -> None:
    """Every collective of rank 0, with its bytes, to the unit."""
    calls, nbytes = flight_counts(facts, len(result.snapshot.ranks))
    metrics = node.metrics(result.run)
    ours = by_gloo_op(metrics["zeromon_collectives_total"], "0")
    our_bytes = by_gloo_op(metrics["zeromon_collective_bytes_total"], "0")
    swaps = facts["swaps"]  # gloo's recorder has no sends and receives
    assert [ours.pop(op, 0) for op in ("send", "recv")] == [swaps["calls"]] * 2
    assert [our_bytes.pop(op, 0) for op in ("send", "recv")] == [swaps["bytes"]] * 2
    assert (ours, our_bytes) == (calls, nbytes)
    assert "zeromon_collectives_unattributed_total" not in metrics


def timed_outside_of_control_steps(rank: RankSnapshot, *, ddp: bool) -> None:
    """A collective that was not timed was of a control step, or DDP's reducer issued it."""
    idle = sum(step.collectives for step in rank.steps.recent if step.idle)
    assert idle
    if not ddp:
        assert sum(rank.communication.untimed.values()) == idle
        assert all(step.timed for step in rank.steps.recent if not step.idle)


def exposed_as_the_program_says(rank: RankSnapshot, spent: dict[str, float], steps: Any) -> None:
    """The time in the operators by the program's own clock, in the median of *steps*.

    A busy machine takes the CPU between the two clocks in a step or two, which is neither's fault.
    """
    seen = {step.step: step for step in rank.steps.recent}
    shares = [seen[number].exposed_ns / 1e9 / spent[str(number)] for number in steps]
    if shares:
        assert median(shares) == pytest.approx(1, rel=0.1), shares


@pytest.mark.recorder
@pytest.mark.skipif(not BACKWARD_IN_CPP, reason="here Python issues what a backward communicates")
def test_a_backward_in_cpp_is_counted_and_makes_exposed_time_unknown(shared_node: Node) -> None:
    """Half of the collectives of expert and context parallelism, on torch before 2.13."""
    watched, result = ran(shared_node, tuple(FORWARD_ONLY), 2)
    calls, _ = flight_counts(watched, 2)
    metrics = shared_node.metrics(result.run)
    ours = by_gloo_op(metrics["zeromon_collectives_total"], "0")
    assert sum(ours.values()) + unattributed(metrics, "0") == sum(calls.values())
    for rank in result.snapshot.ranks:
        assert (rank.agent.errors, rank.communication.exposed_ratio) == (0, None)
        assert rank.communication.untimed_in_cpp == STEPS * sum(FORWARD_ONLY.values())
        assert in_graphs(rank) != ""


@pytest.mark.recorder
@pytest.mark.long  # compiles C++ for a quarter of a minute
def test_what_inductor_compiles_to_cpp_is_counted_and_untimed(shared_node: Node) -> None:
    """No hook sees it: exposed time is unknown. Newer torches name the operation and its bytes."""
    watched, result = ran(shared_node, ("tp_cpp",), 2)
    calls, nbytes = flight_counts(watched, 2)
    assert calls == {"all_reduce": 2 * STEPS}
    metrics = shared_node.metrics(result.run)
    named = hasattr(dist.ProcessGroup, "register_pre_hook")
    unknown = unattributed(metrics, "0")
    assert unknown == (0 if named else 2 * (STEPS - WARM_UP_STEPS))
    totals = metrics["zeromon_collectives_total"], metrics["zeromon_collective_bytes_total"]
    ours = [by_gloo_op(series, "0") for series in totals]
    assert ours == ([calls, nbytes] if named else [{"all_reduce": 2 * STEPS - unknown}, ours[1]])
    for rank in result.snapshot.ranks:
        assert rank.agent.errors == 0
        assert rank.communication.exposed_ratio is None
        assert in_graphs(rank).startswith(f"{2 * STEPS} collectives ")
        assert in_graphs(rank).endswith("issued from C++, untimed")
        assert all(step.untimed == step.collectives == 2 for step in rank.steps.recent)


SIMULATED = ("tp", "tp_aot", "cp", "ep", "overlapped")


@pytest.mark.parametrize(
    ("cases", "truth"),
    [
        (SIMULATED, "slept"),
        pytest.param(("tp_inductor",), "slept", marks=pytest.mark.long),
        pytest.param((*SIMULATED, "tp_inductor"), "written", marks=pytest.mark.quiet),
    ],
)
def test_exposed_time_is_what_a_group_of_known_transfer_times_waited(
    shared_node: Node, cases: tuple[str, ...], truth: str
) -> None:
    """Within five percent of what the program was written to wait, or of what a busy machine made of it.

    Held to the best step of each case: other work on the machine interrupts some. The first step of a
    case also compiles; without a wrapper the first step of all begins with its backward.
    """
    cases = tuple(case for case in cases if case not in FORWARD_ONLY)
    path = shared_node.folder / f"delayed-{cases[0]}.json"
    result = shared_node.run(train_command(1, str(path), *cases, program="delayed.py"))
    assert result.code == 0, result.output
    [rank] = result.snapshot.ranks
    steps = [step for step in json.loads(path.read_text()) if step["case"] in cases]
    transfers = [step["transfers"] for step in steps]
    assert [step.collectives for step in rank.steps.recent][1:] == transfers[1:]
    errors: dict[str, list[float]] = {case: [] for case in cases}
    for last, step, seen in zip(steps, steps[1:], rank.steps.recent[1:], strict=False):
        if seen.idle or last["case"] != step["case"]:
            continue
        hidden = (seen.communication_ns - seen.exposed_ns) / 1e9
        assert hidden >= 0.9 * step["computed"]
        known = {"slept": step["slept"], "written": step["transferred"] - step["computed"]}
        errors[step["case"]].append(abs(seen.exposed_ns / 1e9 / known[truth] - 1))
    assert {case: min(found) for case, found in errors.items() if min(found) > 0.05} == {}


ONE_SIDED = {
    "nccl_get", "nccl_get_out", "nccl_put", "nccl_put_signal", "nccl_put_with_signal",
    "nccl_wait_for_signal", "nccl_wait_signal", "nvshmem_get", "nvshmem_get_out", "nvshmem_put",
    "nvshmem_put_with_signal", "nvshmem_wait_for_signal",
}  # fmt: skip
"""Operators of symmetric memory that read or write another rank's memory: no collective of a group."""
LOCAL = {
    "_async_input_mm", "_barrier", "_rendezvous", "get_remote_tensors", "memset32_",
    "memcpy_to_multicast_", "stream_write_value32_",
}  # fmt: skip
"""Those that set memory up, signal within a kernel, or compute."""


def test_every_operator_of_symmetric_memory_is_counted_or_known_not_to_be_a_collective() -> None:
    """A new torch that adds one must not go unseen; the module defines some of them."""
    assert (
        operators_of(NAMESPACE) - {name for name, *_ in collective_operators()} - ONE_SIDED - LOCAL
        == set()
    )


def test_a_collective_of_symmetric_memory_is_counted_with_its_bytes() -> None:
    """Unless it falls back to a collective that another hook has seen."""
    written: list[tuple[Any, ...]] = []
    context: Any = SimpleNamespace(
        mode=ON, phase=Phase.FORWARD, engine=0, guard=Guard(), write=lambda *r: written.append(r)
    )
    group = SimpleNamespace(id=3, size=4, issued=0)
    backend = SymmetricMemory.__new__(SymmetricMemory)
    backend.context = context
    backend.collectives = SimpleNamespace(group_of=lambda _: group)  # type: ignore[assignment]
    pg, shard = object(), torch.zeros(8)

    def product(shard: torch.Tensor, pg: object) -> torch.Tensor:
        return torch.zeros(2)

    def falls_back(shard: torch.Tensor, pg: object) -> torch.Tensor:
        group.issued += 1
        return shard

    for original, op in (
        (product, Op.ALL_GATHER), (product, Op.REDUCE_SCATTER), (product, Op.ALL_REDUCE),
        (falls_back, Op.ALL_GATHER),
    ):  # fmt: skip
        backend.hook(original, op, 1, "A")(shard, pg)
    rows = [(op, nbytes, why) for _, _, op, _, _, _, _, _, nbytes, why, _ in written]
    assert rows == [
        (Op.ALL_GATHER, 128, Untimed.IN_CPP),
        (Op.REDUCE_SCATTER, 32, Untimed.IN_CPP),
        (Op.ALL_REDUCE, 32, Untimed.IN_CPP),
    ]
    assert context.guard.errors == 0


def test_every_operator_is_hooked_or_known_to_issue_nothing() -> None:
    """A new torch that adds a functional collective must not go unseen."""
    assert unknown_operators() == []
    assert {"all_reduce", "wait_tensor"} < operators_of("_c10d_functional")


def test_an_operator_calls_its_attribute() -> None:
    """And takes its hash from it, by which torch finds operators in its tables."""
    operator = torch.ops._c10d_functional.wait_tensor
    for owner in (operator, operator.default):
        assert "_op" in vars(owner)
        assert hash(owner) == hash(vars(owner)["_op"])
        assert owner in torch.fx.node._side_effectful_functions


def test_what_a_graph_captures_has_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not run: a record would be in flight for ever, or have the time of the call."""
    monkeypatch.setattr(functional_hooks, "_PLAIN", {FakeTensor})
    device: Any = VirtualDevice()
    with FakeTensorMode():
        payload = torch.empty(4, device="cuda")
    ring = RingWriter(tmp_path / "ring", rank=0)
    context = HookContext(ring, Guard())
    timer = DeviceTimer(context, device)
    functional = Functional(context, Collectives(context, timer), timer)
    group = functional._names["g"] = Group(1, None, size=2, on_device=True, base=0)
    group.even.add("_c10d_functional.all_reduce")
    issue = functional.issue_hook(lambda *_: payload, "_c10d_functional.all_reduce", SCHEMA)
    wait = functional.wait_hook(lambda tensor: tensor)
    for context.mode in (ON, IDLE):
        with device.graph():
            wait(issue(payload, "sum", "g"))
    assert not context.guard.errors and not functional.pending
    assert group.issued == 2
    assert not functional._collectives.counts
    assert not RingReader(ring.path).read()


def test_a_result_is_known_by_its_memory(tmp_path: Path) -> None:
    """Also a view of it, an empty one, an argument, and each of several results."""
    ring = RingWriter(tmp_path / "ring", rank=0)
    context = HookContext(ring, Guard())
    context.mode = ON
    collectives = Collectives(context, DeviceTimer(context))
    functional = Functional(context, collectives, collectives._device)
    group = functional._names["g"] = Group(1, None, size=2, on_device=False, base=0)
    returned: list[Any] = []

    def issued(name: str, *results: Any) -> None:
        group.even.add(f"_c10d_functional.{name}")
        returned[:] = [list(results) if len(results) > 1 else results[0]]
        hook = functional.issue_hook(lambda *_: returned[0], f"_c10d_functional.{name}", SCHEMA)
        hook(torch.ones(4), "sum", "g")

    wait = functional.wait_hook(lambda tensor: tensor)
    fresh, empties = torch.ones(8), [torch.ones(0), torch.ones(0)]
    for result, waited in (
        (fresh, fresh),
        (fresh, fresh[4:]),
        (fresh[2:], fresh),
        *zip(empties, empties, strict=True),
    ):
        issued("all_reduce_" if result.storage_offset() else "all_reduce", result)
        assert wait(torch.ones(8)) is not None
        assert len(functional.pending) == 1
        wait(waited)
        assert not functional.pending
    for empty in empties:
        issued("all_reduce", empty)
    assert len(functional.pending) == 2
    several = [torch.ones(2), torch.ones(2)]
    issued("all_reduce_coalesced", *several)
    for tensor in several:
        wait(tensor)
    for empty in empties:
        wait(empty)
    assert not functional.pending and not context.guard.errors
    kinds = Counter(type(decode_record(raw)) for raw in RingReader(ring.path).read())
    assert kinds == {Issued: 8, Done: 8}
