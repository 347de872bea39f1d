"""The critical path: of programs that are simulated forwards, made by hand, and recorded on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kineto_traces import NCCL, Program, event, host, launched_by, real, write

from zeromon.base.errors import TraceError
from zeromon.cli import main
from zeromon.traces.critical import CriticalPath, critical_path
from zeromon.traces.kineto import read_host_step, read_trace


def path_of(file: Path, step: int | None = None) -> CriticalPath:
    data = read_trace(file)
    return critical_path(data, read_host_step(file, data, lambda _: None, step))


def microseconds(found: CriticalPath) -> dict[tuple[str, str], int]:
    return {(part.kind, part.name): round(part.seconds * 1e6) for part in found.parts}


@pytest.mark.parametrize("seed", range(12))
def test_the_path_backwards_is_the_path_forwards(tmp_path: Path, seed: int) -> None:
    """To the microsecond, by kind and name, and by what released each kernel and each wait."""
    program = Program(seed)
    end, path = program.run()
    found = path_of(write(tmp_path, program.events))
    assert microseconds(found) == {key: ns for key, ns in path.items() if ns}
    assert round(found.seconds * 1e6) == end == sum(path.values())
    assert found.inferred == 0


def test_without_records_of_synchronization_a_long_wait_is_for_another_stream(tmp_path: Path) -> None:
    """A kernel that was launched at 8 us begins at 101 us, when communication has ended at 100 us."""
    path = write(tmp_path, [
        host("ProfilerStep#1", 0, 20, 1, "user_annotation"),
        *launched_by(2, event(NCCL, 10, 90, 9, correlation=1)),
        *launched_by(8, event("gemm", 101, 10, 7, correlation=2)),
    ])  # fmt: skip
    found = path_of(path)
    assert (found.inferred, round(found.seconds * 1e6)) == (1, 111)
    assert {kind: round(s * 1e6) for kind, s in found.kinds.items()} == {
        "communication": 90, "compute": 10, "launch": 8, "between operators": 2,
        "kernel to kernel": 1,
    }  # fmt: skip


def test_the_script_waits_for_the_thread_of_autograd(tmp_path: Path) -> None:
    """The forward ends at 10, autograd works from 14 to 60, the optimizer from 65 on."""
    path = write(tmp_path, [
        host("ProfilerStep#1", 0, 80, 1, "user_annotation"),
        host("backward", 9, 53, 1, "user_annotation"),
        host("aten::forward", 0, 10, 1), host("aten::backward", 14, 46, 2),
        host("aten::mm", 20, 30, 2), host("aten::adam", 65, 15, 1),
        event("gemm", 1, 5),
    ])  # fmt: skip
    assert microseconds(path_of(path)) == {
        ("host", "aten::forward"): 10, ("host", "aten::backward"): 16, ("host", "aten::mm"): 30,
        ("host", "aten::adam"): 15, ("between operators", "(no operator)"): 3 + 4,
        ("between operators", "backward"): 2,
    }  # fmt: skip


def test_a_trace_of_a_cpu_has_the_path_of_its_operators(tmp_path: Path) -> None:
    found = path_of(write(tmp_path, [
        host("ProfilerStep#1", 0, 80, 1, "user_annotation"),
        host("aten::mm", 0, 30, 1), host("c10d::allreduce_", 40, 40, 1),
        host("gloo:all_reduce", 41, 30, 9, "user_annotation"),
    ]))  # fmt: skip
    assert microseconds(found) == {
        ("host", "aten::mm"): 30, ("host", "c10d::allreduce_"): 40,
        ("between operators", "(no operator)"): 10,
    }  # fmt: skip


def test_a_copy_that_ends_in_its_call_is_waited_for(tmp_path: Path) -> None:
    """The host waits in cudaMemcpyAsync from 10 to 60 for a copy, which waits for a kernel."""
    call = host("cudaMemcpyAsync", 10, 50, 1, "cuda_runtime")
    found = path_of(write(tmp_path, [
        host("ProfilerStep#1", 0, 70, 1, "user_annotation"),
        *launched_by(0, event("gemm", 5, 40, correlation=1)),
        {**call, "args": {"correlation": 2}},
        event("Memcpy DtoH", 47, 10, cat="gpu_memcpy", correlation=2),
    ]))  # fmt: skip
    assert {kind: round(s * 1e6) for kind, s in found.kinds.items()} == {
        "compute": 40, "copy": 10, "between operators": 10, "launch": 5, "host": 3,
        "kernel to kernel": 2,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["two_rank_ddp_rank1.json.gz", "eight_rank_dlrm_rank3.json.gz"])
def test_each_step_of_a_real_trace_adds_up(name: str) -> None:
    file = real(name)
    data = read_trace(file)
    for mark in data.marks[-2:]:
        step = int(mark.name.partition("#")[2])
        found = critical_path(data, read_host_step(file, data, lambda _: None, step))
        assert sum(found.kinds.values()) == pytest.approx(found.seconds)
        assert found.seconds >= (mark.end_ns - mark.start_ns) / 1e9
        assert "unknown" not in found.kinds


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program(1)
    end, _ = program.run()
    name = str(write(tmp_path, program.events))
    assert main(["trace", "analyze", name, "--critical-path", "3"]) == 0
    text = capsys.readouterr().out
    assert f"Critical path of step 3 of rank 0, {end / 1000:.1f} ms" in text
    assert main(["trace", "analyze", name, "--critical-path", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ranks"][0]["critical_path"]
    assert sum(found["kinds"].values()) == pytest.approx(found["seconds"])
    assert main(["trace", "analyze", name, "--critical-path", "99"]) == 2
    said = capsys.readouterr().err
    assert "no profiler step 99\n  It has step 3." in said
    with pytest.raises(TraceError, match=r"(?m)no profiler step$"):
        path_of(write(tmp_path, [event("gemm", 0, 5)]))
