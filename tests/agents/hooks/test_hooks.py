"""What the hooks record, what they leave alone, and that they can be taken out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import LAUNCH, PROGRAMS, Node, Result, free_port

from zeromon.fold.fold import fold_records
from zeromon.fold.state import RankState
from zeromon.ring.buffer import RingWriter
from zeromon_agents.hooks.c10d import Collectives, Completions
from zeromon_agents.hooks.process_groups import PAYLOADS
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import END, ON, Entry, HookContext

PROGRAM = str(PROGRAMS / "hooks.py")


FRESH = ("restored", "early_import")
"""Cases about what is imported when: their interpreter has not imported torch before."""


def case(node: Node, *words: str) -> tuple[dict[str, Any], Result]:
    """Runs one case of the program; its JSON, and what the collector saw."""
    interpreter = [sys.executable] if words[0] in FRESH else [*LAUNCH, "0"]
    result = node.run([*interpreter, PROGRAM, *words], watched=True, ZEROMON_SHIM="0")
    assert result.code == 0, result.output
    line = next(x for x in result.output.splitlines() if x.startswith("{"))
    return json.loads(line), result


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROMON_RUN_DIR", raising=False)


def test_after_stop_nothing_of_torch_is_patched(shared_node: Node) -> None:
    """Classes, modules, hooks, excepthook and import finders are the very same objects."""
    facts, _ = case(shared_node, "restored")
    assert facts["during"] > 25
    assert facts["after"] == []
    assert facts["kept"] == []


def test_a_patch_on_top_of_ours_survives_stop(shared_node: Node) -> None:
    """Somebody else's wrapper stays and works; stop says so."""
    facts, _ = case(shared_node, "patched_over")
    assert facts == {"kept": ["ProcessGroup.allreduce"], "calls": 2, "still_theirs": True}


def test_an_exception_in_a_hook_is_counted_and_told_once(shared_node: Node) -> None:
    """Training goes on with the right values."""
    facts, result = case(shared_node, "hook_fails")
    assert facts == {"errors": 3, "value": [1.0] * 4}
    assert result.output.count("a hook failed and training goes on") == 1
    assert "injected" in result.output
    assert result.snapshot.ranks[0].agent.errors == 3


def test_an_error_of_the_hook_is_no_cause_of_the_error_of_the_call(tmp_path: Path) -> None:
    """The traceback of the script shows its own error alone."""
    context = HookContext(RingWriter(tmp_path / "rank0.1.ring", rank=0), Guard())
    context.mode = ON
    collectives = Collectives(context, DeviceTimer(context))

    def allreduce(*_: Any) -> None:
        raise KeyError("no such rank")

    no_group = object()
    with pytest.raises(KeyError) as raised:
        collectives._issue_hook(allreduce, "allreduce", PAYLOADS["allreduce"])(no_group, [], None)
    assert context.guard.errors == 1
    assert raised.value.__context__ is None


def test_a_rank_that_stands_still_writes_no_progress(shared_node: Node) -> None:
    """The heartbeat goes on; also where batches come from a DataLoader."""
    facts, _ = case(shared_node, "stands_still")
    state = RankState()
    fold_records(state, [tuple(record) for record in facts["records"]])
    assert state.beats and state.loading and state.loading_read and state.host
    assert state.last_event_ns and not state.progress_ns


@pytest.mark.fsdp2
def test_an_exception_in_a_units_hook_does_not_reach_fsdp(shared_node: Node) -> None:
    """unshard, wait and reshard go on; steps are still counted."""
    facts, _ = case(shared_node, "unit_hook_fails")
    assert facts == {"errors": True, "steps": 3}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optimizer_raises", {"steps": 5, "errors": 0}),
        ("sample_fails", {"steps": 3, "errors": 3, "others": [0, 1, 2]}),
        ("end_without_options", {"end_known_before_wait": True, "errors": 0}),
        ("coalescing_fails", {"issued": 3, "failed": [False, True, False], "errors": 0}),
        ("early_import", {"started": True}),
        ("subclass", {"calls": ["theirs"], "errors": 0}),
    ],
)
def test_odd_turns_are_survived(shared_node: Node, name: str, expected: dict[str, Any]) -> None:
    """Each as its function in the program says."""
    facts, _ = case(shared_node, name)
    assert facts == expected


def test_the_loader_that_is_trained_on_is_told(shared_node: Node) -> None:
    """Once; not that of an evaluation; no length where batches differ; and not without end."""
    facts, _ = case(shared_node, "loader_facts")
    of_training = {"num_workers": 0, "pin_memory": False, "batch_size": 4, "length": 16,
                   "sampler": "SequentialSampler", "persistent_workers": False}  # fmt: skip
    assert facts["first"] == of_training
    assert facts["after_evaluation"] == 1
    assert facts["varied"] == of_training | {"length": 0}
    assert (facts["told"], facts["errors"]) == (32, 0)


def test_a_device_mesh_starts_the_agent(shared_node: Node) -> None:
    """The usual way of an FSDP2 script."""
    command = [*LAUNCH, "0", PROGRAM, "mesh"]
    result = shared_node.run(command, ZEROMON_SHIM="0", PORT=str(free_port()))
    assert '{"started": true}' in result.output, result.output


def test_hooks_that_fail_all_the_time_are_switched_off(shared_node: Node) -> None:
    """After a thousand errors the agent is quiet."""
    facts, _ = case(shared_node, "hook_fails_often")
    assert facts == {"errors": 1000, "mode": 0}


def test_a_forked_child_is_mute(shared_node: Node) -> None:
    """It writes nothing into its parent's record, which stays whole."""
    facts, _ = case(shared_node, "forked")
    assert facts == {"child_mode": 0, "in_order": True, "issued": 2}


def test_nothing_is_kept_alive(shared_node: Node) -> None:
    """Tensors, storages and Works die when they do without the agent."""
    watched, _ = case(shared_node, "lifetimes", "watch")
    bare, _ = case(shared_node, "lifetimes")
    assert watched == bare
    assert not any(watched["waited=True"] + watched["waited=False"])


def test_peak_memory_is_the_same(shared_node: Node) -> None:
    """80 more collectives of 16 MiB raise the peak no more than without the agent.

    gloo alone has up to eight tensors' worth more on a busy machine; 16 are a fifth of what an agent
    that keeps each tensor would add.
    """
    watched, _ = case(shared_node, "peak", "watch")
    bare, _ = case(shared_node, "peak")
    slack, own_kib = 16, 24 * 1024  # our own: the ring and our modules
    assert watched["grown_tensors"] <= slack
    assert watched["peak_kib"] - bare["peak_kib"] < own_kib + slack * 16 * 1024


def test_no_graph_break_and_no_recompile(shared_node: Node) -> None:
    """torch.compile makes as many graphs with the agent as without."""
    watched, _ = case(shared_node, "graph_breaks", "watch")
    bare, _ = case(shared_node, "graph_breaks")
    assert watched.pop("steps") == 20
    assert bare.pop("steps") == 0
    assert watched == bare


def test_a_work_without_a_future_ends_when_it_is_waited_for() -> None:
    """As of a reduce-scatter on gloo of torch 2.6; no hook fails, and an exit does not wait."""

    class Work:
        def get_future(self) -> None:
            raise RuntimeError("Work::getFuture not implemented.")

    completions = Completions()
    entry: Entry = [0] * 8
    completions.call_back(Work(), entry)
    assert not entry[END]
    assert completions._last is None


def test_small_collectives_of_a_burst_are_not_called_back(shared_node: Node) -> None:
    """Once their works are known to be waited for; their end is then an upper bound, and says so."""
    facts, _ = case(shared_node, "bursts")
    known, unknown = facts.pop("again")
    assert known + unknown == 8 and unknown >= 5  # a wait that was interrupted counts as blocked
    assert facts == {
        "first": [8, 0],
        "large": [8, 0],
        "large again": [8, 0],
        "futures": [0, 0],  # nobody saw their ends: this step is not timed
        "futures again": [8, 0],
    }


def test_the_end_of_a_work_is_recorded_whose_id_is_used_again(shared_node: Node) -> None:
    """As under a communication hook of DDP, which keeps the future only."""
    facts, _ = case(shared_node, "works_dropped")
    assert facts == {"issued": 5, "done": 5}


def test_every_operation_is_recorded_under_its_name(shared_node: Node) -> None:
    """Each public function, with the payload that the definition of S gives it."""
    has, result = case(shared_node, "every_op")
    rows = {c.op: (c.count, c.nbytes) for c in result.snapshot.ranks[0].communication.collectives}
    object_bytes = rows["all_gather"][1] - 2 * 16
    assert object_bytes > 8  # a size of 8 bytes and the pickled object
    assert rows == {
        "all_reduce": (2, 16 + 32),
        "broadcast": (1, 16),
        "reduce": (1, 16),
        "all_gather": (4, 32 + object_bytes),
        "reduce_scatter": (2, 32) if has["reduce_scatter"] else (1, 16),
        "gather": (2, 32) if has["gather_single"] else (1, 16),
        "scatter": (1, 16),
        "all_to_all": (1, 16),
        "barrier": (1, 0),
    }
    assert result.snapshot.ranks[0].communication.in_flight == ()
    assert result.snapshot.ranks[0].communication.unattributed == {}


def test_every_collective_is_counted_in_its_step_and_to_the_end(shared_node: Node) -> None:
    """Also in control steps, under torch's own profiler, after a fork, and after the last step."""
    facts, result = case(shared_node, "counts_to_the_end")
    rank = result.snapshot.ranks[0]
    assert rank.steps.watched_steps == 16
    assert [s.step for s in rank.steps.recent if s.idle] == [16]
    # DDP's bucket; in the second step DDP also agrees on new buckets, by broadcasts that are not timed
    assert [s.collectives for s in rank.steps.recent] == [1, 3, *[1] * 14]
    assert [s.step for s in rank.steps.recent if not s.timed] == [2, 16]
    known = sum(row.count for row in rank.communication.collectives)
    assert known + sum(rank.communication.unattributed.values()) == facts["issued"]
    assert rank.communication.unattributed == {}
    counts = {row.op: row.count for row in rank.communication.collectives}
    assert (counts["all_reduce"], counts["all_gather"]) == (66, 101)  # DDP compares shapes


def test_what_ddp_sends_beside_its_buckets_is_known(shared_node: Node) -> None:
    """Buffers before a forward, the map of used parameters, what the ranks agree on; of a late model."""
    facts, result = case(shared_node, "buffers_and_unused")
    rank = result.snapshot.ranks[0]
    counts = {row.op: row.count for row in rank.communication.collectives}
    assert sum(counts.values()) == facts["issued"] and not rank.communication.unattributed
    assert rank.agent.errors == 0 and counts["all_reduce"] == 2 * 14 + 4
    assert counts["all_gather"] == 2  # numbers of parameters
    buffers = 2 * 14  # floats and integers apart
    assert counts["broadcast"] >= buffers
    assert not any(step.untimed for step in rank.steps.recent if step.step < 14 and not step.idle)
    assert rank.communication.exposed_ratio is not None


def test_two_optimizers_after_one_backward_are_one_step(shared_node: Node) -> None:
    """Three loops of two micro-steps and two optimizers: three steps."""
    _, result = case(shared_node, "two_optimizers")
    rank = result.snapshot.ranks[0]
    assert rank.steps.watched_steps == 3
    assert [s.micro_steps for s in rank.steps.recent] == [2, 2, 2]


def test_an_agent_can_be_started_again(shared_node: Node) -> None:
    """Stop is not the end of it: the newest ring of the rank is the one that is shown."""
    _, result = case(shared_node, "stopped_and_started_again")
    assert len(result.snapshot.ranks) == 1
    assert result.snapshot.ranks[0].communication.collectives[0].count == 1
