"""The survey of a machine: on this one for real, and on small /proc trees."""

from __future__ import annotations

import importlib.metadata
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from builders import rank, run
from command_line import zeromon_here

from zeromon.attach.inject.refusal import right_to_trace
from zeromon.cli import doctor, main
from zeromon.cli.doctor import Fact, ask_torch, facts_as_text, survey_machine, torch_facts
from zeromon.snapshot.run import RankProcess
from zeromon.storage.run_store import Store


def by_name(facts: list[Fact]) -> dict[str, Fact]:
    return {fact.name: fact for fact in facts}


def test_this_machine_is_described() -> None:
    """What a user looks for first is there, and right."""
    found = by_name(survey_machine())
    version = importlib.metadata.version("torch")
    assert found["torch"].value.startswith(version)
    assert found["agent"].severity == "fine"
    assert f"deepspeed {importlib.metadata.version('deepspeed')}" in found["frameworks"].value
    assert os.uname().release in found["kernel"].value
    for name in ("/dev/shm", "host memory", "records", "open files", "ptrace", "network", "device"):
        assert found[name].value


def python(folder: Path, text: str) -> str:
    """An executable that answers as that text says."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("text", ["exit 1", "echo nothing", "echo 'FOUND [1]'", "echo 'FOUND {'"])
def test_a_python_without_torch_is_no_error(tmp_path: Path, text: str) -> None:
    (fact,) = torch_facts(python(tmp_path, text))
    assert (fact.name, fact.severity) == ("torch", "note")
    assert ask_torch(str(tmp_path / "absent")) == {}


def test_an_old_torch_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    answer = json.dumps({"version": "1.9", "devices": 2, "built": "CUDA 11.1", "missing": ["Work"]})
    torch, agent = torch_facts(python(tmp_path, f"echo 'FOUND {answer}'"))
    assert torch.value == "1.9, CUDA 11.1, 2 devices"
    assert agent.severity == "warning" and "lacks Work" in agent.value


@pytest.mark.parametrize(
    ("told", "value"),
    [
        ({"built": "ROCm 6.4", "type": "cuda", "devices": 8}, "2.13, ROCm 6.4, 8 devices"),
        ({"type": "npu", "devices": 16}, "2.13, npu, 16 devices"),  # a backend of its own
        ({"type": "", "devices": 0}, "2.13, CPU only, 0 devices"),
    ],
)
def test_what_torch_was_built_for(tmp_path: Path, told: dict[str, Any], value: str) -> None:
    answer = json.dumps({"version": "2.13", "missing": []} | told)
    torch, *_ = torch_facts(python(tmp_path, f"echo 'FOUND {answer}'"))
    assert torch.value == value


@pytest.mark.parametrize(
    ("scope", "capabilities", "allowed"),
    [
        ("0", "0", True),
        ("1", "0", False),
        ("1", f"{1 << 19:x}", True),
        (None, "0", True),
        ("3", f"{1 << 19:x}", False),
    ],
)
def test_who_may_look_into_processes(
    tmp_path: Path, scope: str | None, capabilities: str, allowed: bool
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    if scope is not None:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    assert right_to_trace(tmp_path)[0] is allowed


def test_one_look_that_fails_takes_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Fact]:
        raise OSError("no /proc here")

    looks = (broken, doctor.limit_facts)
    monkeypatch.setattr(doctor, "LOOKS", looks)
    assert [fact.name for fact in survey_machine()] == ["open files"]


def test_the_cpus_are_stated_with_their_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load above the usable CPUs is a note: ranks would wait for them."""
    usable = len(os.sched_getaffinity(0))
    for load, severity in ((usable - 0.5, "fine"), (usable + 1.0, "note")):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        (fact,) = doctor.cpu_facts()
        assert fact.severity == severity and f"load {load:.1f}" in fact.value
        assert f" of {os.cpu_count()} usable" in fact.value


@pytest.mark.parametrize(
    ("kind", "limit", "shown"),
    [("2 InfiniBand ports", 8 << 20, ["8.0 MiB"]), ("InfiniBand", -1, []), ("Ethernet", 8 << 20, [])],
)
def test_locked_memory_is_advice_beside_infiniband_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str, limit: int, shown: list[str]
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(doctor, "network_peak_bandwidth", lambda: (5e10, kind))
    named = [fact for fact in doctor.device_facts() if fact.name == "locked memory"]
    assert [fact.value for fact in named] == shown


def test_doctor_without_a_run_shows_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path))
    facts = [Fact(name="a", value="1"), Fact(name="bb", value="2", severity="warning", hint="do")]
    monkeypatch.setattr("zeromon.cli.doctor.survey_machine", lambda: facts)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == "  a   1\n! bb  2\n      -> do\n"
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["facts"][1]["hint"] == "do"
    monkeypatch.setattr("zeromon.cli.doctor.survey_machine", lambda: facts[:1])
    assert main(["doctor"]) == 0


def test_each_process_that_has_not_reported_has_its_own_stack(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launcher that gives no rank to its processes, and two attempts of one rank."""
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path))
    ranks = {11: None, 12: None, 13: 1, 14: 1}
    starting = tuple(RankProcess(pid=pid, rank=number, attempt=1) for pid, number in ranks.items())
    monkeypatch.setattr(doctor, "newest_snapshot", lambda target: run(starting=starting))
    monkeypatch.setattr(doctor.processes, "python_stack_text", "main at line {}".format)
    assert main(["doctor", "one"]) == 0
    shown = capsys.readouterr().out
    for pid, number in ranks.items():
        named = f"rank {'n/a' if number is None else number} (pid {pid})"
        assert f"  {named}: has not reported yet\n" in shown
        assert f"Python stack of {named}\n  main at line {pid}\n" in shown
    assert main(["doctor", "one", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["stacks"]) == 4


def test_every_line_fits_a_terminal() -> None:
    """Of 80 columns, but for paths and names of devices."""
    lines = [line for line in facts_as_text(survey_machine()).splitlines() if "/" not in line]
    assert all(len(line) <= 100 for line in lines), max(lines, key=len)


def test_a_run_that_has_ended_is_examined_from_its_record(tmp_path: Path) -> None:
    """Its collector is gone; a name that no record has is an error as ever."""
    ranks = [rank(n, alive=False, failed=n == 1, ended="SIGKILL" if n else "") for n in (0, 1)]
    Store(tmp_path / "store").save(run(*ranks, run="one", ended=True))
    done = zeromon_here(tmp_path, "doctor", "one")
    assert "run one: died: rank 1, SIGKILL" in done.stdout
    assert "it has ended: zeromon report one" in done.stdout
    lost = zeromon_here(tmp_path, "doctor", "two")
    assert (lost.returncode, lost.stdout) == (2, "") and "no run named two" in lost.stderr
