"""Kineto traces: exact figures, whatever the file looks like."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kineto_traces import NCCL, analyzed, event, events_of, host, parts, real, write

from zeromon.base.errors import TraceError
from zeromon.cli import main
from zeromon.ring.codes import Op
from zeromon.traces import kineto as stream
from zeromon.traces.analysis import analyze_trace, collective_durations, kernel_operation, rank_waits
from zeromon.traces.events import DeviceEvent, Kind, classify_event
from zeromon.traces.kineto import read_trace, to_nanoseconds

REAL = ("eight_rank_dlrm_rank3.json.gz", "two_rank_ddp_rank1.json.gz")


def by_sweep(events: list[dict[str, Any]]) -> list[int]:
    """The same parts, counted another way: one sweep over all starts and ends, by json and integers."""
    kinds = {"kernel": 0, "gpu_memcpy": 2, "gpu_memset": 2}
    edges: list[tuple[int, int, int]] = []
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in kinds:
            kind = 1 if e["cat"] == "kernel" and "nccl" in e["name"] else kinds[e["cat"]]
            start = round(e["ts"] * 1000)
            edges += [(start, kind, 1), (start + round(e["dur"] * 1000), kind, -1)]
    edges.sort()
    active, found, before = [0, 0, 0], [0] * 6, edges[0][0]
    for at, kind, change in edges:
        spent = at - before
        found[0] += spent
        compute, communication, copy = (n > 0 for n in active)
        found[1] += spent * compute
        found[2] += spent * (communication and not compute)
        found[3] += spent * (copy and not compute and not communication)
        found[4] += spent * (not (compute or communication or copy))
        found[5] += spent * communication
        active[kind] += change
        before = at
    return found


def random_events(seed: int, count: int) -> list[dict[str, Any]]:
    chooser = random.Random(seed)
    found: list[dict[str, Any]] = []
    for _ in range(count):
        start, long = chooser.randrange(10**6) / 1000, chooser.randrange(1, 30_000) / 1000
        name, category = chooser.choice(
            [("gemm", "kernel"), (NCCL, "kernel"), ("Memcpy HtoD", "gpu_memcpy"), ("x", "gpu_memset")]
        )
        found.append(event(name, start, long, chooser.randrange(4), cat=category))
    return found


def test_a_trace_that_can_be_counted_by_hand(tmp_path: Path) -> None:
    """Compute 0-10, communication 5-20, a copy 18-30, then nothing until a kernel at 40-50 us."""
    path = write(tmp_path, [
        event("gemm", 0, 10), event(NCCL, 5, 15, 8), event("Memcpy", 18, 12, 9, cat="gpu_memcpy"),
        event("gemm", 40, 10),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 999},
        {"ph": "i", "cat": "x", "name": "mark", "ts": 3, "s": "g"},
    ])  # fmt: skip
    found = analyzed(path)
    assert parts(found) == [50_000, 20_000, 10_000, 10_000, 10_000, 15_000]
    assert found.overlap_ratio == pytest.approx(1 / 3)
    assert [k.name for k in found.kernels][:2] == ["gemm", NCCL]


@pytest.mark.parametrize("seed", range(6))
def test_the_parts_are_those_of_a_sweep_and_add_up(tmp_path: Path, seed: int) -> None:
    """Random kernels on four streams, to the nanosecond."""
    events = random_events(seed, 400)
    found = parts(analyzed(write(tmp_path, events)))
    assert found == by_sweep(events)
    assert found[0] == sum(part or 0 for part in found[1:5])


@pytest.mark.parametrize("name", REAL)
def test_real_traces_by_others_to_the_nanosecond(name: str) -> None:
    """Against the same file read whole by json and counted by a sweep."""
    path = real(name)
    events = events_of(path)
    found = analyzed(path)
    assert parts(found) == by_sweep(events)
    assert found.events == len(events)
    assert found.notes == ()


@pytest.mark.parametrize("chunk", [200, 1000, 5000])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_it_does_not_matter_where_the_pieces_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, name: str
) -> None:
    """Pieces of a few hundred bytes, in the middle of names and numbers."""
    events = random_events(3, 150)
    events[10]["name"] = 'a "quoted" }, {"ph": "X" name'
    events[11]["args"]["nested"] = [{"ph": "X"}, {"name": "y"}]
    path = write(tmp_path, events, name)
    whole = analyzed(path)
    monkeypatch.setattr(stream, "_CHUNK", chunk)
    assert analyzed(path) == whole
    assert whole.events == 150 and parts(whole) == by_sweep(events)


def test_a_file_that_is_cut_short_gives_what_is_whole(tmp_path: Path) -> None:
    """At every tenth of its length; plain and packed."""
    events = random_events(5, 300)
    whole = write(tmp_path, events).read_bytes()
    packed = gzip.compress(whole)
    for tenth in range(2, 10):
        for name, content in (("a.json", whole), ("a.json.gz", packed)):
            path = tmp_path / name
            path.write_bytes(content[: len(content) * tenth // 10])
            data = read_trace(path)
            assert any("truncated" in note for note in data.notes)
            assert 0 < data.events_seen < 300
            count = len(data.device)
            assert parts(analyze_trace(data, 0)) == by_sweep(events[:count])


def test_damage_in_the_middle_costs_only_what_is_damaged(tmp_path: Path) -> None:
    events = random_events(6, 50)
    text = write(tmp_path, events).read_text()
    broken = text.replace('"dur"', '"dur', 1).replace(f'"ts": {events[30]["ts"]}', '"ts": "soon"')
    (tmp_path / "broken.json").write_text(broken)
    found = analyzed(tmp_path / "broken.json")
    assert any("could not be read" in note for note in found.notes)
    assert found.events >= 48


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no trace events"),
        (b"not json", "holds no trace events"),
        (b'{"a": 1}', "holds no trace events"),
        (b'{"traceEvents": []}', "holds no trace events"),
        (b"\x1f\x8b\x08\x00damaged", "holds no trace events"),
        (b"\x80\x04\x95pickle", "holds no trace events"),
        (b'[{"a": 1}, {"b": 2}]', "holds no trace events"),
        (b'{"traceEvents": [1, "x", null, {"name": "x"}]}', "holds no trace events"),
        (b"[" * 100_000 + b"]" * 100_000, "holds no trace events"),
        (b'{"traceEvents": ' + b"[" * 100_000, "holds no trace events"),
    ],
)
def test_what_is_no_trace_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert main(["trace", "analyze", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "none.json")


def test_the_older_form_is_nothing_but_the_list(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([event("gemm", 0, 5), event(NCCL, 5, 5)]))
    assert parts(analyzed(path))[:3] == [10_000, 5000, 5000]


def test_no_device_events_is_an_answer_too(tmp_path: Path) -> None:
    """A trace of CPUs: nothing is divided by zero, and it says why."""
    cpu = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    found = analyzed(write(tmp_path, [cpu]))
    assert parts(found) == [None] * 6 and found.overlap_ratio is None
    assert "ProfilerActivity.CUDA" in found.notes[0]


@pytest.mark.parametrize(
    ("written", "ns"),
    [
        (b"1700000000123456.789", 1_700_000_000_123_456_789),  # a double would lose the last digits
        (b"5", 5000),
        (b"0.0005", 1),
        (b"-1.5", -1500),
        (b"1e3", 1_000_000),
        (b'"12.25"', 12_250),
        (b'"soon"', None),
        (b"null", None),
        (b"Infinity", None),
        (b"", None),
    ],
)
def test_times_are_read_exactly(written: bytes, ns: int | None) -> None:
    assert to_nanoseconds(msgspec.Raw(written)) == ns


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("kernel", NCCL, Kind.COMMUNICATION),
        ("kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Kind.COMMUNICATION),
        ("kernel", "rccl::ncclDevKernel_Generic(ncclDevKernelArgsStorage)", Kind.COMMUNICATION),
        ("kernel", "mscclKernel_Sum_float", Kind.COMMUNICATION),
        ("kernel", "void at::native::vectorized_elementwise_kernel<4>", Kind.COMPUTE),
        ("gpu_memset", "Memset (Device)", Kind.COPY),
        ("mtia_ccp_events", "dma_in", Kind.COPY),
        ("mtia_ccp_events", "fba_fc_relu", Kind.COMPUTE),
        ("kernel", "dma_free_softmax", Kind.COMPUTE),
    ],
)
def test_kernels_of_several_vendors(category: str, name: str, kind: Kind) -> None:
    assert classify_event(category, name) is kind


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>", Op.ALL_REDUCE),
        ("void (anonymous namespace)::multimem_one_shot_reduce_kernel<float, 16>(float*)", Op.REDUCE),
        ("void multimem_all_gather_kernel<16>(char*, char*, unsigned long)", Op.ALL_GATHER),
        ("one_shot_all_reduce_kernel", Op.ALL_REDUCE),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int)", Op.BARRIER),
        ("c10d::nvshmem_extension::allToAllV(void*, void*, long*, unsigned long)", Op.ALL_TO_ALL),
        ("void vllm::cross_device_reduce_1stage<c10::Half, 8>(vllm::RankData*)", Op.ALL_REDUCE),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", Op.NONE),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", Op.NONE),
    ],
)  # fmt: skip
def test_kernels_of_symmetric_memory_are_communication(name: str, op: Op) -> None:
    """They read the memory of other ranks, and have neither NCCL's names nor its arguments."""
    assert classify_event("kernel", name) is Kind.COMMUNICATION
    assert kernel_operation(DeviceEvent(Kind.COMMUNICATION, 0, 1, name, None)) is op


def test_operations_groups_and_bus_bandwidth(tmp_path: Path) -> None:
    """An all-gather of 1 GB on 8 ranks in 10 ms: 100 GB/s, of which 7/8 are on the bus."""
    facts = {
        "Collective name": "_allgather_base", "In msg nelems": 31_250_000,
        "Out msg nelems": 250_000_000, "dtype": "Float", "Group size": 8, "Process Group Name": "fsdp",
    }  # fmt: skip
    found = analyzed(write(tmp_path, [
        event(NCCL, 0, 10_000, **facts), event("gemm", 0, 4000, 3),
        event("ncclDevKernel_SendRecv(x)", 20_000, 100),
        event(NCCL, 30_000, 5, **{"Collective name": 3, "dtype": [1], "Group size": "x"}),
    ]))  # fmt: skip
    first = found.ops[0]
    assert (first.op, first.group, first.count, first.nbytes) == ("all_gather", "fsdp", 1, 10**9)
    assert first.exposed_seconds == pytest.approx(0.006)
    assert first.busbw_bytes_per_second == pytest.approx(100e9 * 7 / 8)
    assert {op.op for op in found.ops} == {"all_gather", "unknown"}


def launched(call: str, name: str, at: float, **facts: Any) -> list[dict[str, Any]]:
    """A kernel, its launch, and the call of the host around the launch."""
    number = round(at)
    return [
        event(name, at + 100, 20, correlation=number),
        {**host("cudaLaunchKernel", at + 2, 1, 4, "cuda_runtime"), "args": {"correlation": number}},
        host(call, at + 1, 3, 4, "user_annotation"),
        {**host("record_param_comms", at, 9, 4), "args": facts},
    ]


def test_a_kernel_without_a_name_is_named_by_the_call_that_launched_it(tmp_path: Path) -> None:
    """NCCL's SendRecv and RCCL's Generic serve several operations; one launch is not in the trace."""
    sent, generic = "ncclDevKernel_SendRecv(x)", "ncclDevKernel_Generic_4(x)"
    facts = {
        "Collective name": "reduce_scatter_tensor_coalesced", "In msg nelems": 100,
        "Out msg nelems": 25, "dtype": "Float", "Group size": 4, "Process Group Name": "fsdp",
    }  # fmt: skip
    found = analyzed(write(tmp_path, [
        *launched("nccl:all_to_all", sent, 0), *launched("nccl:coalesced", generic, 1000, **facts),
        *launched("nccl:recv 0<-1", sent, 2000), event(generic, 5000, 1, correlation=77),
    ]))  # fmt: skip
    rows = sorted((op.op, op.group, op.count, op.nbytes) for op in found.ops)
    assert rows == [
        ("all_to_all", "", 1, 0), ("recv", "", 1, 0), ("reduce_scatter", "fsdp", 1, 400),
        ("unknown", "", 1, 0),
    ]  # fmt: skip


def test_the_all_to_alls_of_a_real_trace_are_named() -> None:
    """Its 42 SendRecv kernels are as many calls of nccl:all_to_all on the host."""
    path = real(REAL[0])
    calls = [e for e in events_of(path) if e.get("name") == "nccl:all_to_all"]
    assert {(op.op, op.count) for op in analyzed(path).ops} == {
        ("all_to_all", len(calls)),
        ("all_reduce", 18),
    }


BROKEN: dict[str, tuple[bytes, bytes]] = {
    "NaN": (b'"device": 0', b'"device": NaN'),
    "infinity": (b'"device": 0', b'"device": [-inf, Infinity, nan]'),
    "a byte of latin-1": (b'"name": "gemm"', b'"name": "gemm \xe9"'),
    "a control character": (b'"name": "gemm"', b'"name": "ge\tmm"'),
    "deep nesting": (b'"device": 0', b'"device": ' + b"[" * 5000 + b"]" * 5000),
    "null as an event": (b"{", b"null, 7, {"),
    "a name that is no text": (b'"name": "gemm"', b'"name": 5'),
}


MENDED = ("NaN", "infinity", "a byte of latin-1", "a control character")


@pytest.mark.parametrize("where", [0, 7, 19])
@pytest.mark.parametrize("what", BROKEN)
def test_one_strange_event_costs_no_other(tmp_path: Path, what: str, where: int) -> None:
    """At the begin, in the middle and as the last of 20 events; the strange event may be lost itself."""
    lines = [json.dumps(event("gemm", 10 * number, 5)).encode() for number in range(20)]
    lines[where] = lines[where].replace(*BROKEN[what], 1)
    path = tmp_path / "strange.json"
    path.write_bytes(b'{"traceEvents": [' + b", ".join(lines) + b'], "traceName": "x"}')
    data = read_trace(path)
    starts = {e.start_ns for e in data.device}
    assert starts >= {10_000 * number for number in range(20) if number != where}
    lost = 0 if what in MENDED else 1
    assert len(starts) >= 20 - lost
    assert len(starts) == 20 or data.skipped or data.notes
    if (what, where) != ("deep nesting", 19):
        assert not data.notes


def test_a_trace_of_an_mtia_accelerator(tmp_path: Path) -> None:
    """Its kernels and its direct memory access have a category of their own."""
    found = analyzed(write(tmp_path, [
        event("fba_fc", 0, 30, cat="mtia_ccp_events"), event("dma_out", 20, 30, cat="mtia_ccp_events"),
        host("runFunction", 0, 90, 1, "mtia_runtime"),
    ]))  # fmt: skip
    assert parts(found) == [50_000, 30_000, 0, 20_000, 0, 0]


def test_what_cannot_be_known_is_not_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace without device events: the table has n/a, the JSON null, and the note says why."""
    path = write(tmp_path, [host("aten::mm", 1, 2, 1)])
    assert main(["trace", "analyze", str(path)]) == 0
    text = capsys.readouterr().out
    assert "n/a" in text and "0 us" not in text and "ProfilerActivity.CUDA" in text
    assert main(["trace", "analyze", str(path), "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["span_seconds"] is None and rank["exposed_seconds"] is None


def test_units_come_from_the_annotations_of_fsdp(tmp_path: Path) -> None:
    """Two units gathered; half of the second is hidden."""
    mark = {"ph": "X", "cat": "gpu_user_annotation", "pid": 0, "tid": 8}
    found = analyzed(write(tmp_path, [
        event(NCCL, 0, 10, 8), event(NCCL, 20, 10, 8), event("gemm", 25, 50),
        {**mark, "name": "FSDP::all_gather (layers.0)", "ts": 0, "dur": 10},
        {**mark, "name": "FSDP::all_gather (layers.1)", "ts": 20, "dur": 10},
        {**mark, "name": "FSDP::all_gather (layers.1)", "cat": "user_annotation", "ts": 0, "dur": 99},
    ]))  # fmt: skip
    assert [(u.unit, round(u.exposed_seconds * 1e6)) for u in found.units] == [
        ("layers.0", 10), ("layers.1", 5),
    ]  # fmt: skip


def test_who_waits_is_told_without_a_common_clock(tmp_path: Path) -> None:
    """Rank 1 arrives last, twice: its kernels are short, the others' long. Clocks are far apart."""
    first = read_trace(write(tmp_path, [event(NCCL, 0, 50), event(NCCL, 100, 30)], "rank0.json"))
    second = read_trace(write(tmp_path, [event(NCCL, 1e9, 10), event(NCCL, 1e9 + 90, 10)], "rank1.json"))
    assert rank_waits([collective_durations(data) for data in (first, second)]) == [60_000, 0]
    assert rank_waits([collective_durations(data) for data in (first,)]) is None
    third = read_trace(write(tmp_path, [event(NCCL, 0, 50)], "rank2.json"))
    assert rank_waits([collective_durations(data) for data in (first, third)]) is None
    assert kernel_operation(first.device[0]).label == "all_gather"


def test_ranks_by_what_the_trace_says_by_its_name_or_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two files of one rank are both kept, and it is said."""
    events = [event("gemm", 0, 5), event(NCCL, 5, 5)]
    paths = [
        write(tmp_path, events, "a.json", distributedInfo={"backend": "nccl", "rank": 5}),
        write(tmp_path, events, "trace_rank-3.json.gz"),
        write(tmp_path, events, "b_rank3.json"),
    ]
    assert main(["trace", "analyze", *map(str, paths), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [r["rank"] for r in ranks] == [3, 3, 5]
    assert "another file is of rank 3, too" in ranks[1]["notes"]
    wanted = {
        "span_seconds", "compute_seconds", "communication_seconds", "exposed_seconds",
        "exposed_copy_seconds", "idle_seconds", "overlap_ratio",
    }  # fmt: skip
    assert wanted <= set(ranks[0])
    assert ranks[0]["wait_seconds"] == 0


def test_the_text_has_the_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, random_events(8, 60))
    assert main(["trace", "analyze", str(path)]) == 0
    text = capsys.readouterr().out
    for part in (
        "Where the time of the device went",
        "Communication of rank 0",
        "Kernels of rank 0 by family",
    ):
        assert part in text


def test_clock_jumps_and_negative_durations_are_noted(tmp_path: Path) -> None:
    """What cannot be is left out, and counted."""
    found = analyzed(write(tmp_path, [event("gemm", 0, 5), event("gemm", 10, -3)]))
    assert parts(found)[0] == 5000
    assert found.notes == ("1 events could not be read",)


# ---- traces of a CPU, and steps -------------------------------------------------------------------


def test_a_trace_of_a_cpu_says_what_its_operators_hide(tmp_path: Path) -> None:
    """gloo reports 100 us on a thread of its own; 30 of them lie under operators, nested ones once."""
    events = [
        host("ProfilerStep#4", 0, 200, 1, "user_annotation"),
        host("FSDP::pre_forward (0)", 0, 190, 1, "user_annotation"),
        host("autograd::engine::evaluate_function: X", 0, 150, 1),  # encloses hooks that wait
        host("c10d::_allgather_base_", 9, 2, 1),
        host("aten::linear", 20, 30, 1),
        host("aten::addmm", 25, 20, 1),
        host("AddmmBackward0", 18, 100, 1),
        host("aten::relu", 160, 20, 1),
        host("gloo:all_gather", 10, 100, 9, "user_annotation"),
        host("aten::copy_", 90, 15, 9),  # gloo's own thread: no compute
    ]
    found = analyzed(write(tmp_path, events))
    assert parts(found) == [170_000, 50_000, 70_000, 0, 50_000, 100_000]
    assert found.overlap_ratio == pytest.approx(0.3)
    assert [(op.op, op.count) for op in found.ops] == [("all_gather", 1)]
    assert {kernel.name for kernel in found.kernels} == {"aten::linear", "aten::relu", "gloo:all_gather"}
    (step,) = found.steps
    assert (step.step, round(step.exposed_seconds * 1e9)) == (4, 70_000)
    assert any("gloo's collectives" in note for note in found.notes)


def test_an_operator_that_waits_for_its_argument_hides_nothing(tmp_path: Path) -> None:
    """A DTensor's add waits 60 us for its all-reduce, then adds for 5: gloo's 50 us are exposed."""
    events = [
        host("aten::add", 10, 80, 1),
        host("_c10d_functional::wait_tensor", 15, 60, 1),
        host("aten::add", 80, 5, 1),
        host("gloo:all_reduce", 20, 50, 9, "user_annotation"),
    ]
    found = analyzed(write(tmp_path, events))
    assert parts(found)[1:4] == [5_000, 50_000, 0]
    assert [(op.name, op.count) for op in found.kernels if op.kind == "compute"] == [("aten::add", 1)]


def test_steps_go_by_the_device_where_it_has_marks(tmp_path: Path) -> None:
    """A kernel runs after its call: step 1's all-gather lies beyond the host's mark of it."""
    events = [
        host("ProfilerStep#1", 0, 50, 1, "user_annotation"),
        host("ProfilerStep#2", 50, 50, 1, "user_annotation"),
        event("ProfilerStep#1", 20, 60, cat="gpu_user_annotation"),
        event("ProfilerStep#2", 80, 60, cat="gpu_user_annotation"),
        event("gemm", 20, 30),
        event(NCCL, 40, 35, stream=9),
        event("gemm", 80, 50),
        event(NCCL, 125, 15, stream=9),
    ]
    found = analyzed(write(tmp_path, events)).steps
    rows = [
        (s.step, round(s.communication_seconds * 1e6), round(s.exposed_seconds * 1e6)) for s in found
    ]
    assert rows == [(1, 35, 25), (2, 15, 10)]
    assert [round(s.compute_seconds * 1e6) for s in found] == [30, 50]


def test_steps_go_by_their_launches_where_the_device_has_one_mark_for_all(tmp_path: Path) -> None:
    """As Kineto writes it on a GPU where a step ends within ``Optimizer.step``, which has a mark."""
    marks = [host(f"ProfilerStep#{n}", n * 100, 100, 1, "user_annotation") for n in (1, 2)]
    marks.append(event("ProfilerStep#1", 110, 400, cat="gpu_user_annotation"))
    kernels = [("gemm", 110, 150, 90), ("gemm", 160, 260, 90), ("gemm", 220, 400, 50)]
    events = [event(NCCL, 230, 130, stream=9)]
    for number, (name, launched, start, duration) in enumerate(kernels, 1):
        launch = host("cudaLaunchKernel", launched, 2, 1, "cuda_runtime")
        events += [{**launch, "args": {"correlation": number}}]
        events += [event(name, start, duration, correlation=number)]
    found = analyzed(write(tmp_path, [*marks, *events])).steps
    rows = [(s.step, round(s.span_seconds * 1e6), round(s.communication_seconds * 1e6)) for s in found]
    assert rows == [(1, 250, 120), (2, 100, 10)]
    # the device still runs a step from before the trace: it is no part of the first
    earlier = [event("gemm", 90, 40), event(NCCL, 100, 25, stream=9)]
    rows = [
        (s.step, round(s.span_seconds * 1e6), round(s.communication_seconds * 1e6))
        for s in analyzed(write(tmp_path, [*marks, *events, *earlier])).steps
    ]
    assert rows == [(1, 220, 120), (2, 100, 10)]


def test_the_steps_of_a_real_trace_add_up(tmp_path: Path) -> None:
    """Of random events in adjoining steps: what they have is what the whole has."""
    chooser = random.Random(5)
    events = [
        event(NCCL if chooser.random() < 0.4 else "gemm", chooser.randrange(9000), chooser.randrange(90))
        for _ in range(500)
    ]  # fmt: skip
    events += [event(f"ProfilerStep#{n}", n * 1000, 1000, cat="gpu_user_annotation") for n in range(10)]
    found = analyzed(write(tmp_path, events))
    assert sum(s.exposed_seconds for s in found.steps) == pytest.approx(found.exposed_seconds)
    assert sum(s.compute_seconds for s in found.steps) == pytest.approx(found.compute_seconds)
