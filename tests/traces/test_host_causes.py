"""What the host does while its device is idle, in traces of today's shape and of the older one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kineto_traces import event, host, launched_by, write

from zeromon.cli import main
from zeromon.traces.diff import diff_samples, samples_of
from zeromon.traces.kineto import read_trace

OLD = {
    "kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime", "cpu_op": "Operator",
    "user_annotation": "Operator",
}  # fmt: skip
"""Category -> what older profilers write for it."""
LOADER = "enumerate(DataLoader)#_{}DataLoaderIter.__next__"


def training(loader: int, iterator: str = "SingleProcess", steps: int = 6) -> list[dict[str, Any]]:
    """Steps whose loader takes *loader* us, then 30 kernels of 800 us and an optimizer of 2 ms."""
    events, at = [], 1000
    for step in range(steps):
        start, number = at, 40 * step
        events.append(host(LOADER.format(iterator), at, loader, 1, "user_annotation"))
        events.append(host("aten::stack", at + 5, loader // 2, 1))
        at += loader
        free = at + 20
        for kernel in range(30):
            events.append(host("aten::conv2d", at, 40, 1))
            events += launched_by(at + 10, event("gemm", free, 800, correlation=number + kernel), 5)
            at, free = at + 50, free + 800
        end = free + 100
        events.append(host("cudaDeviceSynchronize", at, free - at + 10, 1, "cuda_runtime"))
        events.append(host("Optimizer.step#SGD.step", free + 20, 2000, 1, "user_annotation"))
        events += launched_by(free + 1900, event("sgd", free + 1910, 90, correlation=number + 31))
        at = end + 2000
        events.append(host(f"ProfilerStep#{step}", start, at - start, 1, "user_annotation"))
    return events


def as_old(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same events as older profilers write them."""
    return [{**e, "cat": OLD[e["cat"]], "tid": str(e["tid"])} for e in events]


def analysis(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["trace", "analyze", str(path), "--json", *options]) == 0
    rank: dict[str, Any] = json.loads(capsys.readouterr().out)["ranks"][0]
    return rank


def test_an_old_trace_has_the_analysis_of_a_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [*training(9000), host("MmBackward", 1, 900, 2), host("aten::mm", 2, 800, 2)]
    new = analysis(write(tmp_path, events, "a.json"), capsys, "--critical-path")
    old = analysis(write(tmp_path, as_old(events), "b.json"), capsys, "--critical-path")
    assert {**old, "file": ""} == {**new, "file": ""}
    assert [step["step"] for step in new["steps"]] == list(range(6))
    assert len(samples_of(read_trace(tmp_path / "b.json"))) == 6


@pytest.mark.parametrize("shape", [list, as_old])
def test_the_loader_is_the_cause_of_idle_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: Any
) -> None:
    slow = write(tmp_path, shape(training(9000)), "slow.json")
    fast = write(tmp_path, shape(training(200, "MultiProcessing")), "fast.json")
    rank = analysis(slow, capsys)
    calls = {name: round(seconds * 1e6) for name, seconds in rank["host_calls"].items()}
    # The first batch comes before the first kernel; the sum stays within the time until launches
    assert list(calls)[:2] == ["enumerate(DataLoader)", "Optimizer.step"]
    assert calls == {
        "enumerate(DataLoader)": 5 * 9000, "Optimizer.step": 6 * 1880 + 5 * 20,
        "cudaDeviceSynchronize": 60,
    }  # fmt: skip
    assert sum(calls.values()) <= round(rank["idle"]["host"] * 1e6)
    assert main(["trace", "analyze", str(slow)]) == 0
    text = capsys.readouterr().out
    assert "\n  the host meanwhile: 78.9 % in enumerate(DataLoader), 19.9 % in Optimizer.step\n" in text
    assert main(["trace", "diff", str(slow), str(fast)]) == 1
    rows = capsys.readouterr().out.split("what differs, a step")[1].splitlines()
    assert rows[1].split()[:4] == ["enumerate(DataLoader)", "host", "call", "shorter"]
    assert "  9.0 ms  200 us " in rows[1] and "Optimizer" not in "".join(rows)


def test_calls_of_the_host_are_no_difference_while_the_device_is_as_busy(tmp_path: Path) -> None:
    """The queue of the device is long: what the host does there delays nothing."""
    ahead = [host(LOADER.format("SingleProcess"), 21_000, 900, 1, "user_annotation")]
    samples = [
        samples_of(read_trace(write(tmp_path, [*training(200), *more], f"{len(more)}.json")))
        for more in ([], ahead)
    ]
    assert diff_samples(*samples).changed == ()


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        # A mark of the user encloses the step: what is in it says more
        ([("train", 0, 900, "user_annotation"), ("aten::copy_", 200, 500, "cpu_op"),
          ("aten::to", 190, 520, "cpu_op")], {"train": 360, "aten::to": 520}),
        ([("aten::empty", 100, 700, "cpu_op"), ("cudaMalloc", 110, 600, "cuda_runtime")],
         {"aten::empty": 100, "cudaMalloc": 600}),
        ([("Optimizer.step#AdamW.step", 100, 700, "user_annotation"),
          ("aten::mul", 110, 200, "cpu_op"), ("cudaStreamSynchronize", 400, 300, "cuda_runtime")],
         {"Optimizer.step": 400, "cudaStreamSynchronize": 300}),
        ([("## forward ##", 100, 700, "user_annotation")], {"## forward ##": 700}),
        ([("autograd::engine::evaluate_function: MulBackward0", 100, 700, "cpu_op"),
          ("MulBackward0", 101, 600, "cpu_op")], {"MulBackward0": 700}),
        ([("aten::mul", 100, 60, "cpu_op"), ("aten::add", 200, 90, "cpu_op")], {}),
    ],
)  # fmt: skip
def test_a_gap_has_the_name_of_what_says_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: list[Any], named: dict[str, int]
) -> None:
    """The device is idle from 20 to 920 us; another thread, which launches nothing, says nothing."""
    events = [
        *launched_by(0, event("a", 10, 10, correlation=1)),
        *launched_by(900, event("b", 920, 10, correlation=2)),
        host("pin_memory", 30, 850, 2, "user_annotation"),
        *(host(name, start, lasts, 1, cat) for name, start, lasts, cat in calls),
    ]
    found = analysis(write(tmp_path, events), capsys)["host_calls"]
    assert {name: round(seconds * 1e6) for name, seconds in found.items()} == named


def test_an_old_trace_of_a_host_has_its_operators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        host("ProfilerStep#1", 0, 80, 1, "user_annotation"), host("aten::mm", 0, 30, 1),
        host("gloo:all_reduce", 20, 30, 9, "user_annotation"),
    ]  # fmt: skip
    rank = analysis(write(tmp_path, as_old(events)), capsys)
    assert (rank["compute_seconds"], rank["communication_seconds"]) == (30e-6, 30e-6)
    assert [step["step"] for step in rank["steps"]] == [1]


def test_a_file_may_follow_the_option_of_the_critical_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (str(write(tmp_path, training(900), f"rank{n}.json")) for n in range(2))
    expected = analysis(Path(first), capsys, "--critical-path")
    for typed in (["--critical-path", first], ["--critical-path", "--", first]):
        assert main(["trace", "analyze", "--json", *typed]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"] == [expected]
    assert main(["trace", "analyze", "--critical-path", first, second, "--json"]) == 0
    assert [r["rank"] for r in json.loads(capsys.readouterr().out)["ranks"]] == [0, 1]
    assert main(["trace", "analyze", "--critical-path", "2", first, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["critical_path"]["step"] == 2
    with pytest.raises(SystemExit):
        main(["trace", "analyze", first, "--critical-path", "five"])
    assert "'five' is neither a step nor a file" in capsys.readouterr().err
    for typed in ([], ["--critical-path"]):
        assert main(["trace", "analyze", *typed]) == 2
        assert "no files given" in capsys.readouterr().err
