"""`zeromon fit`: how a micro-batch gets into a command, and how a search ends and continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import changed, rank, run

from zeromon.base.errors import LaunchError
from zeromon.cli import main
from zeromon.cli.fit import Request, make_template
from zeromon.cli.measured_launch import lasting_hang
from zeromon.memory.fit import HOST, Trial
from zeromon.probes.host import HostReader
from zeromon.snapshot import Hang
from zeromon.snapshot.communication import HangKind
from zeromon.snapshot.rank import Halt

COMMAND = ("torchrun", "train.py", "--batch", "{micro_batch}")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Request]:
    """Launches that take 100 MB and 10 MB per sample of 205 MB, without a process."""
    done: list[Request] = []

    def launch(request: Request, tell: Any) -> Trial:
        done.append(request)
        size = request.trial.micro_batch
        return replace(
            request.trial, peaks={HOST: 10**8 + size * 10**7}, rooms={HOST: 205_000_000},
            base_bytes=9 * 10**7, seconds=0.01 * size, samples=2.0 * size, wall_seconds=1.0,
        )  # fmt: skip

    monkeypatch.setattr("zeromon.cli.fit.run_launch", launch)
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    return done


def test_it_ends_with_the_largest_and_continues_from_disk(
    launches: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--json", "--launches", "2", "--", *COMMAND]) == 0
    assert len(launches) == 2
    assert main(["fit", "--json", "--", *COMMAND]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["recommended"] == {"stage": "", "micro_batch": 10}
    assert len(launches) == len(found["launches"]) <= 4
    assert list(launches[-1].command) == ["torchrun", "train.py", "--batch", "10"]
    assert Path(found["files"][""]).read_text() == "torchrun train.py --batch 10\n"
    before = len(launches)
    assert main(["fit", "--", *COMMAND]) == 0
    assert len(launches) == before
    out = capsys.readouterr().out
    assert "Recommended: micro-batch 10" in out and "0 killed" in out
    assert main(["fit", "--again", "--launches", "1", "--", *COMMAND]) == 0
    assert len(launches) == before + 1


def test_without_a_largest_size_a_part_of_the_host_stays_free(
    launches: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    host = HostReader().read(os.getpid())
    assert main(["fit", "--launches", "1", "--", *COMMAND]) == 0
    is_said = "of the host's memory free; --max N lets them take it" in capsys.readouterr().out
    if host.limit_bytes > 0:  # this machine is a container with a limit of its own
        assert launches[0].spare_bytes == 0 and not is_said
    else:
        assert launches[0].spare_bytes == pytest.approx(0.2 * host.headroom_bytes, rel=0.2) and is_said
    assert main(["fit", "--launches", "1", "--max", "1024", "--", *COMMAND]) == 0
    assert launches[1].spare_bytes == 0
    assert "memory free" not in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_done(
    launches: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zeromon.cli import fit

    real = fit.run_launch

    def launch(request: Request, tell: Any) -> Trial:
        if launches:
            raise KeyboardInterrupt
        return real(request, tell)

    monkeypatch.setattr(fit, "run_launch", launch)
    assert main(["fit", "--json", "--", *COMMAND]) == 0
    captured = capsys.readouterr()
    assert "the same command continues" in captured.err
    assert json.loads(captured.out)["recommended"] == {"stage": "", "micro_batch": 1}


def test_with_a_fixed_batch_the_cheapest_stage_is_found(
    launches: list[Request], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a record of a run no cost is known: the stage that partitions least is first."""
    from zeromon.cli import fit

    real = fit.run_launch

    def launch(request: Request, tell: Any) -> Trial:
        fits = request.trial.stage != "ddp"
        return replace(real(request, tell), outcome="" if fits else "out of memory", seconds=None)

    monkeypatch.setattr(fit, "run_launch", launch)
    command = ["--", "torchrun", "train.py", "--batch", "7", "--strategy", "{stage}"]
    stages = ["--stages", "ddp,fsdp2-zero2,fsdp2"]
    assert main(["fit", *stages, "--launches", "2", *command]) == 0
    out = capsys.readouterr().out
    assert "Recommended: stage fsdp2\n" in out and "stage fsdp2-zero2 is next (--launches)" in out
    assert main(["fit", *stages, "--json", *command]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [t.command[-1] for t in launches] == ["fsdp2", "ddp", "fsdp2-zero2"]
    assert [t["fits"] for t in answer["launches"]] == [True, False, True]
    assert answer["recommended"] == {"stage": "fsdp2-zero2", "micro_batch": None}
    (script,) = answer["files"].values()
    assert Path(script).read_text() == "torchrun train.py --batch 7 --strategy fsdp2-zero2\n"
    assert main(["fit", *stages, *command]) == 0
    out = capsys.readouterr().out
    assert "  > 3     fsdp2-zero2   yes" in out and "stage ddp does not fit: out of memory" in out
    assert len(launches) == 3 and max(map(len, out.splitlines())) <= 80


def test_where_no_stage_fits_nothing_is_recommended(
    launches: list[Request], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeromon.cli import fit

    real = fit.run_launch
    full = {"outcome": "out of memory", "killed": True}
    monkeypatch.setattr(fit, "run_launch", lambda *args: replace(real(*args), **full))
    command = [*COMMAND, "--strategy", "{stage}"]
    assert main(["fit", "--stages", "ddp,fsdp2", "--min", "4", "--max", "4", "--", *command]) == 1
    out = capsys.readouterr().out
    assert "Nothing is recommended: no launch fits" in out and "2 killed" in out
    assert [r.trial.micro_batch for r in launches] == [4, 4]


def test_only_sizes_that_divide_the_global_batch(launches: list[Request]) -> None:
    command = [*COMMAND, "--accumulate", "{accumulation}"]
    assert main(["fit", "--global-batch", "48", "--ranks", "2", "--", *command]) == 0
    for request in launches:
        assert request.trial.micro_batch * request.trial.accumulation * 2 == 48
        assert request.command[-1] == str(request.trial.accumulation)


def test_a_deepspeed_file_is_written_anew_beside_the_users(tmp_path: Path) -> None:
    mine = tmp_path / "ds.json"
    text = '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {}}'
    mine.write_text(text)
    made = make_template(["deepspeed", "t.py", f"--deepspeed_config={mine}"], [], str(mine))
    values = {"micro_batch": "6", "stage": "3", "accumulation": "2"}
    command, _, files = made.filled(values, tmp_path / "out")
    ((path, content),) = files.items()
    assert command[-1] == f"--deepspeed_config={path}" and path.parent == tmp_path / "out"
    assert json.loads(content) == {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
    }
    assert mine.read_text() == text


def test_accelerate_names_a_deepspeed_file(tmp_path: Path) -> None:
    inner, outer = tmp_path / "ds.json", tmp_path / "a.yaml"
    inner.write_text('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}')
    outer.write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {inner}\n"
    )
    made = make_template(["accelerate", "launch", "--config_file", str(outer), "t.py"], [], str(outer))
    command, _, files = made.filled({"micro_batch": "6"}, tmp_path / "out")
    copy = tmp_path / "out" / "ds.json"
    assert command[3] == str(tmp_path / "out" / "a.yaml")
    assert json.loads(files[Path(command[3])])["deepspeed_config"] == {
        "deepspeed_config_file": str(copy)
    }
    assert json.loads(files[copy])["train_micro_batch_size_per_gpu"] == 6


def test_a_variable_takes_the_value() -> None:
    made = make_template(["python", "t.py"], ["BATCH={micro_batch}"], None)
    assert made.filled({"micro_batch": "7"}, Path())[1] == {"BATCH": "7"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "torchrun", "train.py"], "where the micro-batch goes"),
        (["--stages", "0,3", "--", *COMMAND], "where the stage goes"),
        (["--", "torchrun", "train.py", "{stage}"], "{stage} has no values"),
        (["--gpu", "h100", "--devices", "2", "--", *COMMAND], "where the number of devices goes"),
        (["--", "torchrun", "--nproc-per-node", "{devices}", "t.py"], "needs virtual devices"),
        (
            ["--gpu", "h100", "--global-batch", "64", "--", "torchrun", "--nproc-per-node", "{devices}"],
            "--global-batch needs one number of devices",
        ),
        (["--global-batch", "7", "--", *COMMAND], "needs --ranks"),
        ([], "no command"),
    ],
)
def test_what_cannot_be_set_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"), [("1,x", "'1,x' is not a number"), ("0,2", "positive number, not 0")]
)
def test_a_number_of_devices_is_a_positive_number(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", "--gpu", "h100", "--devices", typed, "--", *COMMAND])
    assert exit_info.value.code == 2 and said in capsys.readouterr().err


def test_a_config_that_the_command_does_not_name_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "ds.json"
    mine.write_text('{"train_micro_batch_size_per_gpu": 4}')
    with pytest.raises(LaunchError, match="does not name"):
        make_template(["deepspeed", "t.py"], [], str(mine)).filled({"micro_batch": "6"}, tmp_path)


def test_a_launch_ends_when_fit_is_killed(tmp_path: Path) -> None:
    """The ranks went on and held their memory."""
    own = {"ZEROMON_DIR": str(tmp_path / "live"), "ZEROMON_STORE": str(tmp_path / "store")}
    job = f"echo $$ > {tmp_path}/pid; exec sleep 300 # {{micro_batch}}"
    words = ["fit", "--output", str(tmp_path / "out"), "--", "sh", "-c", job]
    fit = subprocess.Popen(
        [sys.executable, "-m", "zeromon", *words],
        env=os.environ | own | {"ZEROMON_COLLECTOR": "off"}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    place, deadline = tmp_path / "pid", time.monotonic() + 60
    while not (place.exists() and place.read_text().strip()):
        assert time.monotonic() < deadline and fit.poll() is None
        time.sleep(0.05)
    pid = int(place.read_text())
    fit.kill()
    fit.wait()
    while Path(f"/proc/{pid}/stat").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


LOSES_COLLECTOR = """
import json, os, pathlib, signal, socket, sys, time

# As where the collector of an earlier launch ends, and another program takes its port
facts = json.loads((pathlib.Path(os.environ["ZEROMON_DIR"]) / "collector.json").read_text())
os.kill(facts["pid"], signal.SIGKILL)
time.sleep(1)
port = socket.socket()
port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
port.bind(("127.0.0.1", facts["port"]))
port.listen()

import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3000):
    model(torch.ones(int(sys.argv[1]), 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
raise SystemExit("nobody has followed the steps")
"""


def test_a_launch_is_followed_when_another_collector_takes_over(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOSES_COLLECTOR)
    own = {"ZEROMON_DIR": str(tmp_path / "live"), "ZEROMON_STORE": str(tmp_path / "store")}
    words = ["fit", "--max", "1", "--steps", "20", "--json", "-o", str(tmp_path / "out"), "--"]
    done = subprocess.run(
        [sys.executable, "-m", "zeromon", *words, sys.executable, str(script), "{micro_batch}"],
        env=os.environ | own, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (launch,) = json.loads(done.stdout)["launches"]
    assert launch["outcome"] == "" and 20 <= launch["steps"] < 3000


@pytest.mark.parametrize(
    ("kind", "is_over"),
    [(HangKind.MISSING_MEMBER, True), (HangKind.MISMATCHED_OPERATIONS, True), (HangKind.DEADLOCK, True),
     (HangKind.ALL_INSIDE, False), (HangKind.UNSEEN_MEMBERS, False)],
)  # fmt: skip
def test_a_launch_ends_at_a_hang_but_not_at_a_slow_collective(kind: HangKind, is_over: bool) -> None:
    """All that report wait in it: a step of 70 B parameters takes longer than any patience."""
    hang = Hang(
        kind=kind, op="all_gather", group="dp", group_id="0", sequence=63, nbytes=4, seconds=16.0,
        waiting=(0, 8), elsewhere=(1, 2), calls=(), missing=(), dead=(),
    )  # fmt: skip
    assert bool(lasting_hang(replace(run(rank(0)), hangs=(hang,)))) is is_over
    assert not lasting_hang(replace(run(rank(0)), hangs=(replace(hang, seconds=14.0),)))


@pytest.mark.parametrize("place", ["waiting", "missing"])
@pytest.mark.parametrize(("halted", "is_over"), [(Halt.UNRESPONSIVE, False), (Halt.SUSPENDED, True)])
def test_a_rank_that_may_compute_in_cpp_does_not_hang(place: str, halted: Halt, is_over: bool) -> None:
    """A call that holds the GIL: the agent is silent, and whether the rank works is unknown."""
    hang = Hang(
        kind=HangKind.HALTED_MEMBER, op="broadcast", group="world", group_id="0", sequence=7, nbytes=4,
        seconds=60.0, calls=(), dead=(), **{"waiting": (0,), "missing": (1,), place: (0, 1)},
    )  # fmt: skip
    ranks = (rank(0), changed(rank(1), alive=True, ended="", halted=halted))
    assert bool(lasting_hang(replace(run(*ranks), hangs=(hang,)))) is is_over
