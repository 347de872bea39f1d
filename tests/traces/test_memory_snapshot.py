"""Snapshots of torch's allocator: who holds the memory, and who held it at the peak."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import resource
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from memory_snapshots import MIB, Training, Writer, frames, snapshot, write
from support import PROGRAMS

from zeromon.base.errors import TraceError
from zeromon.cli import main
from zeromon.traces import plain_pickle
from zeromon.traces.allocations import (
    NO_STACK,
    UNKNOWN,
    DeviceMemory,
    allocation_role,
    bytes_by_role,
    kind_of,
    memory_by_device,
    read_snapshot,
    stack_origin,
)


def content(training: Training) -> dict[str, Any]:
    """The snapshot of *training*, which runs here."""
    events = list(training.run())
    return snapshot(training, events)


def device(path: Path, what: dict[str, Any]) -> DeviceMemory:
    """What zeromon says of a snapshot with one device."""
    path.write_bytes(pickle.dumps(what))
    (found,) = memory_by_device(read_snapshot(path))
    return found


def test_the_written_file_is_what_pickle_writes() -> None:
    for training in (Training(), Training(layers=8, deep=40)):
        what = content(training)
        written = io.BytesIO()
        Writer(written).dump(what)
        if len(written.getvalue()) < 64 << 10:  # beyond, it divides into frames elsewhere
            assert written.getvalue() == pickle.dumps(what, 4)
        assert pickle.loads(written.getvalue()) == what


def test_torch_reads_the_made_up_snapshot_alike(tmp_path: Path) -> None:
    """torch's own viewer: its flame graph of blocks has a line a stack, with its bytes."""
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    what = content(Training())
    lines = viewer.memory(what, format_flamegraph=str).splitlines()
    theirs = [int(line.rpartition(" ")[2]) for line in lines if "_init_group" in line]
    held = device(tmp_path / "s", what).held
    assert [(h.count, h.nbytes) for h in held if "_init_group" in h.stack[0]] == [(4, sum(theirs))]
    assert sum(theirs) == 16 * MIB - 6
    assert "allocated" in viewer.segsum(what)


@pytest.mark.parametrize("deep", [0, 70])
def test_the_peak_and_its_roles_are_those_of_the_training(tmp_path: Path, deep: int) -> None:
    training = write(tmp_path / "s.pickle", Training(layers=5, deep=deep))
    (found,) = memory_by_device(read_snapshot(tmp_path / "s.pickle"))
    assert found.peak is not None
    assert bytes_by_role(found.peak.held) == training.peak
    assert (found.peak.nbytes, found.peak.untold_bytes) == (sum(training.peak.values()), 0)
    assert set(bytes_by_role(found.held)) == {"parameters", "optimizer state"}
    rows = found.segments
    assert found.reserved_bytes == sum(size for _, size in training.segments)
    assert found.reserved_bytes == rows[0].allocated_bytes + rows[0].inactive_bytes


def test_frees_without_stacks_of_their_own_are_told_by_what_is_allocated_then(tmp_path: Path) -> None:
    """As recorded with context="alloc": torch repeats the stack of the allocation."""
    training = Training(layers=5)
    what = content(training)
    made: dict[int, Any] = {}
    for event in what["device_traces"][0]:
        if event["action"] == "alloc":
            made[event["addr"]] = event["frames"]
        elif event["action"].startswith("free"):
            event["frames"] = made[event["addr"]]
    found = device(tmp_path / "s", what)
    assert found.peak is not None
    assert bytes_by_role(found.peak.held) == training.peak


def test_a_trace_that_has_lost_its_beginning_has_the_same_totals(tmp_path: Path) -> None:
    training = Training()
    what = content(training)
    events = what["device_traces"][0]
    whole = device(tmp_path / "s", what).peak
    at = next(n for n, event in enumerate(events) if "_init_group" in str(event["frames"]))
    part = device(tmp_path / "s", {**what, "device_traces": [events[at + 60 :]]}).peak
    assert whole is not None
    assert part is not None
    assert (part.nbytes, part.reserved_bytes, part.untold_bytes) == (
        whole.nbytes, whole.reserved_bytes, 0,
    )  # fmt: skip
    # what lives to the end keeps its stack in the blocks; what ends is known without one
    old, new = bytes_by_role(whole.held), bytes_by_role(part.held)
    assert new["optimizer state"] == old["optimizer state"]
    assert new["parameters"] == old["parameters"]
    assert sum(new.values()) == whole.nbytes


def test_without_a_history_the_blocks_alone_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = content(Training())
    for segment in what["segments"]:
        for block in segment["blocks"]:
            del block["frames"]
    what["device_traces"] = [[]]
    found = device(tmp_path / "s", what)
    assert found.peak is None
    assert bytes_by_role(found.held) == {UNKNOWN: 24 * MIB - 12}
    assert main(["trace", "memory", str(tmp_path / "s")]) == 0
    text = capsys.readouterr().out
    assert "The peak is n/a: the file has no history of allocations" in text
    assert NO_STACK in text


@pytest.mark.parametrize(("hidden", "shown"), [("_init_group", "n/a"), ("nothing", "0 B")])
def test_a_role_whose_bytes_may_be_among_the_unknown_ones_is_not_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hidden: str, shown: str
) -> None:
    """The peak is in the first step's forward, and the optimizer's state is made after it."""
    what = content(Training())
    events = what["device_traces"][0]
    made = {e["addr"] for e in events if hidden in str(e["frames"])}
    for segment in what["segments"]:
        for block in segment["blocks"]:
            if block["address"] in made:
                del block["frames"]
    for event in events:
        if event["addr"] in made:
            event["frames"] = []
    found = device(tmp_path / "s", what)
    roles = found.roles["now"]
    assert ("temporary" in roles, UNKNOWN in roles) == (False, hidden != "nothing")
    assert main(["trace", "memory", str(tmp_path / "s"), "-o", str(tmp_path / "p.html")]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("  temporary "))
    assert row.endswith(f" {shown}")
    assert ("n/a: its bytes may be among the unknown ones" in text) is (shown == "n/a")
    assert row in (tmp_path / "p.html").read_text()
    assert main(["trace", "memory", str(tmp_path / "s"), "--json"]) == 0
    assert (
        "temporary" not in json.loads(capsys.readouterr().out)["files"][0]["devices"][0]["roles"]["now"]
    )


def test_failed_allocations_and_memory_in_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training()
    what = content(training)
    events = what["device_traces"][0]
    stack = frames("torch/nn/modules/linear.py:134:forward", "model.py:41:forward")
    events.insert(100, {**events[99], "action": "oom", "device_free": 7 * MIB, "size": 1 << 33,
                        "addr": None, "frames": stack})  # fmt: skip
    del events[100]["addr"]
    first = what["segments"][0]
    first["blocks"][0]["size"] = MIB
    first["blocks"].append({"address": first["address"] + MIB, "size": MIB, "state": "inactive"})
    found = device(tmp_path / "s", what)
    (oom,) = found.ooms
    assert (oom.nbytes, oom.device_free_bytes) == (1 << 33, 7 * MIB)
    held: dict[int, int] = {}
    for event in islice(training_events := iter(events), 100):
        if event["action"] == "alloc":
            held[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            del held[event["addr"]]
    assert next(training_events)["action"] == "oom"
    assert oom.allocated_bytes == sum(held.values())
    assert stack_origin(oom.stack) == "linear.py:134 forward from model.py:41 forward"
    assert found.stranded_bytes == MIB
    assert main(["trace", "memory", str(tmp_path / "s")]) == 0
    text = capsys.readouterr().out
    assert "8.0 GiB" in text
    assert "1.0 MiB" in text.partition("fragmentation: ")[2].partition(" (")[0]


def test_two_snapshots_show_what_grew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", Training(layers=4))
    write(tmp_path / "b", Training(layers=6, deep=9))  # other frames of C++ are the same place
    assert main(["trace", "memory", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["grown"]["0"]
    assert [(r["role"], r["count"], r["after_bytes"] - r["before_bytes"]) for r in rows] == [
        ("optimizer state", 2, 8 * MIB - 9), ("parameters", 2, 4 * MIB - 9),
    ]  # fmt: skip
    assert main(["trace", "memory", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    told = capsys.readouterr().out
    assert max(len(line) for line in told.splitlines() if str(tmp_path) not in line) <= 80
    assert "train.py:120 main   optimizer     +2  24.0 MiB  +8.0 MiB" in told
    assert main(["trace", "memory", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "every stack holds as much in both" in capsys.readouterr().out


def test_the_page_has_a_flame_graph_of_the_peak_and_of_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = pytest.importorskip("zeromon_dashboard.plotly_figures")
    training = write(tmp_path / "s", Training())
    (found,) = memory_by_device(read_snapshot(tmp_path / "s"))
    assert found.peak is not None
    nasty = replace(found.peak.held[0], stack=("x.py:1:<script>alert()</script>",))
    (icicle,) = figures.flame_graph("t", [*found.peak.held, nasty])["data"]
    values = dict(zip(icicle["labels"], icicle["values"], strict=True))
    assert values["all"] == sum(training.peak.values()) + nasty.nbytes
    assert values["optimizer state"] == training.peak["optimizer state"]
    assert not any("<script" in label for label in icicle["labels"])
    page = tmp_path / "page.html"
    assert main(["trace", "memory", str(tmp_path / "s"), "-o", str(page)]) == 0
    assert "Device 0 at the peak" in page.read_text()


@pytest.mark.long
def test_roles_are_those_that_torch_finds_from_the_flow_of_data(tmp_path: Path) -> None:
    """A real training under torch.profiler; what torch calls autograd's detail is temporary."""
    path = tmp_path / "s.pickle"
    program = [sys.executable, str(PROGRAMS / "allocations.py"), str(path)]
    subprocess.run(program, check=True, capture_output=True)
    found = next(one for one in memory_by_device(read_snapshot(path)) if one.peak)
    assert found.peak is not None
    theirs = json.loads(path.with_suffix(".json").read_text())[str(found.peak.event)]
    ours = bytes_by_role(found.peak.held)
    assert ours["parameters"] == theirs["parameter"]
    assert ours["optimizer state"] == theirs["optimizer_state"]
    assert ours["gradients"] == theirs["gradient"]
    # the loss is made outside of every module: 4 bytes, and 4 of its gradient
    assert ours["activations"] == pytest.approx(theirs["activation"], abs=8)
    assert ours["temporary"] == pytest.approx(theirs["autograd_detail"], abs=8)
    assert ours["unknown"] == pytest.approx(theirs["input"], abs=8)


FSDP = "/v/site-packages/torch/distributed/fsdp/_fully_shard/"
DEEPSPEED = "/v/site-packages/deepspeed/runtime/zero/"
NN = "/v/site-packages/torch/nn/modules/module.py:1787:_call_impl"


@pytest.mark.parametrize(
    ("made", "freed", "expected"),
    [
        (["/v/torch/nn/modules/linear.py:134:forward", NN], ["model.py:9:forward", NN], "temporary"),
        (["/v/torch/nn/modules/linear.py:134:forward", NN], ["??:0:torch::autograd::Engine::run"],
         "activations"),
        (["/v/torch/nn/modules/linear.py:134:forward", NN], None, "activations"),
        (["??:0:MmBackward0::apply", "??:0:torch::autograd::Engine::thread_main"], None, "gradients"),
        (["??:0:MmBackward0::apply", "??:0:torch::autograd::Engine::thread_main"],
         ["??:0:torch::autograd::Engine::thread_main"], "temporary"),
        (["??:0:torch::autograd::Engine::thread_main"], ["train.py:3:step"], "gradients"),
        ([FSDP + "_fsdp_collectives.py:300:foreach_reduce", NN], [NN], "communication buffers"),
        ([FSDP + "_fsdp_collectives.py:300:foreach_reduce", NN],
         ["/v/torch/optim/optimizer.py:1:zero_grad"], "gradients"),
        (["/v/torch/nn/parallel/distributed.py:1744:_pre_forward", NN], None, "communication buffers"),
        ([FSDP + "_fsdp_param.py:260:_init_sharded_param"], None, "parameters"),
        (["/v/torch/distributed/fsdp/_flat_param.py:9:_alloc_padded_unsharded_flat_param", NN], [NN],
         "communication buffers"),
        ([DEEPSPEED + "partition_parameters.py:900:all_gather_coalesced", NN], [NN],
         "communication buffers"),
        ([DEEPSPEED + "partition_parameters.py:700:_partition_param"], None, "parameters"),
        ([DEEPSPEED + "stage_1_and_2.py:700:initialize_optimizer_states"], None, "unknown"),
        (["/v/deepspeed/ops/adam/fused_adam.py:150:step"], None, "optimizer state"),
        (["/v/deepspeed/ops/adam/fused_adam.py:150:step"], ["train.py:3:main"], "temporary"),
        (["/v/torch/optim/adamw.py:185:_init_group"], ["train.py:3:main"], "optimizer state"),
        (["train.py:3:main"], None, "unknown"), ([], None, "unknown"),
    ],
)  # fmt: skip
def test_the_innermost_frame_that_tells_gives_the_role(
    made: list[str], freed: list[str] | None, expected: str
) -> None:
    assert allocation_role(kind_of(made), None if freed is None else kind_of(freed)) == expected


# ---- what is no snapshot -----------------------------------------------------------------------------


class Evil:
    """What unpickles as a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def refused(path: Path, data: bytes) -> str:
    """What zeromon says of *data*, which it must not read."""
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        read_snapshot(path)
    return str(caught.value)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_call_in_a_pickle_is_refused_and_not_made(tmp_path: Path, protocol: int) -> None:
    ran = tmp_path / "ran"
    bad = pickle.dumps({**content(Training()), "external_annotations": [Evil(ran)]}, protocol)
    assert "GLOBAL, which no plain data need" in refused(tmp_path / "s", bad)
    assert not ran.exists()
    pickle.loads(bad)
    assert ran.exists()


PLAIN = (
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 MARK APPEND APPENDS SETITEM SETITEMS "
    "BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE NEWFALSE BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE PROTO "
    "FRAME STOP"
)


@pytest.mark.parametrize("name", [o.name for o in pickletools.opcodes if o.name not in PLAIN.split()])
def test_every_other_instruction_is_refused(tmp_path: Path, name: str) -> None:
    code = next(o.code for o in pickletools.opcodes if o.name == name).encode("latin-1")
    data = b"\x80\x04]\x94(\x8c\x02os\x8c\x06system" + code + b"posix\nsystem\n" * 9 + b"e."
    assert f"has {name}, which no plain data need" in refused(tmp_path / "s", data)


def test_a_file_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(content(Training(layers=1, steps=1)))
    for end in range(0, len(whole), 23):
        refused(tmp_path / "s", whole[:end])


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("empty", b""), ("text", b'{"segments": []}'), ("archive", b"PK\x03\x04" * 100),
        ("another pickle", pickle.dumps({"entries": []})), ("a number", pickle.dumps(7)),
        ("rows of another kind", pickle.dumps({"segments": [{"address": "x"}]})),
        ("events of another kind", pickle.dumps({"segments": [], "device_traces": [
            [{"action": "alloc", "addr": -1, "size": "y"}] * 2]})),
        ("keys that are no text", pickle.dumps({"segments": [], 1: 2, 3: 4})),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, what: str, data: bytes) -> None:
    refused(tmp_path / "s", data)


BOMBS = {
    "a length of 2**40": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x",
    "a length of 4 GiB": b"\x80\x04X\xff\xff\xff\xff" + b"x" * 1000,
    "nesting": b"\x80\x04" + b"]" * 20_000_000,
    "nested lists": b"\x80\x04" + b"](" * 5_000_000 + b"e" * 5_000_000 + b".",
    "much text": b"\x80\x04(" + b"X\x00\x00\x00\x02" * 1 + b"x" * (1 << 25),
    "references": b"\x80\x04]" + b"\x94" * 70_000_000,
    "a list that doubles": b"\x80\x04]\x94(" + b"h\x00" * 20_000_000 + b"e.",
}


SLOW = ("nesting", "nested lists", "references")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.long] * (k in SLOW)) for k in BOMBS]
)
def test_a_bomb_takes_bounded_memory(tmp_path: Path, kind: str) -> None:
    (tmp_path / "s").write_bytes(BOMBS[kind])
    code = f"""
import sys; from pathlib import Path; from zeromon.base.errors import TraceError
from zeromon.traces.allocations import read_snapshot
try: read_snapshot(Path(r"{tmp_path / "s"}"))
except TraceError: sys.exit(7)
"""
    room = 1 << 30

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (room, room))

    done = subprocess.run([sys.executable, "-c", code], preexec_fn=bounded, capture_output=True)
    assert done.returncode == 7, done.stderr.decode()[-500:]


def test_a_name_that_comes_in_every_stack_is_kept_once_and_short(tmp_path: Path) -> None:
    long = {"filename": "f" * 100_000, "line": 1, "name": "n" * 100_000}
    what = content(Training(layers=1, steps=1))
    for event in what["device_traces"][0]:
        event["frames"] = [long] * 3
    (tmp_path / "s").write_bytes(pickle.dumps(what))
    assert max(map(len, read_snapshot(tmp_path / "s").stacks[-1])) < 700


def test_what_is_handed_over_is_forgotten() -> None:
    rows = [{"action": str(n), "size": n} for n in range(5000)]
    seen: list[Any] = []

    def taken(_: list[Any], items: list[Any]) -> bool:
        seen.extend(items)
        return True

    machine = plain_pickle._Machine(io.BytesIO(pickle.dumps(rows)).read, taken)
    assert machine.run() == []
    assert seen == rows
    assert not any(isinstance(kept, dict) for kept in machine._memo)
