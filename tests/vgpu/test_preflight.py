"""`zeromon preflight`: a user's command on virtual GPUs, what it finds, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vgpu.environment import Environment
from zeromon.cli.virtual_machine import machine_values, placed_launch
from zeromon.readout.figures import STEP
from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import Store
from zeromon_vgpu.machine import write_machine

pytestmark = pytest.mark.vgpu

USER = Path(__file__).resolve().parent / "programs" / "user.py"


@dataclass
class Answer:
    """What the command printed, and how it ended."""

    code: int
    preflight: dict[str, Any]
    run: dict[str, Any]
    printed: list[tuple[int, ...]]
    """Of each step of each rank: rank, ranks, local rank, the most bytes that torch has allocated."""


@pytest.fixture
def preflight(virtual_cuda: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``zeromon preflight OPTIONS -- torchrun ... user.py ARGUMENTS``."""
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))

    def run(
        *arguments: str, options: tuple[str, ...] = (), ranks: int = 2, program: Path = USER
    ) -> Answer:
        launch = [
            str(virtual_cuda.python),
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
        ]
        command = [sys.executable, "-m", "zeromon", "preflight", "--json", *options, "--", *launch]
        output = tmp_path / "output"
        command[4:4] = ["--output", str(output)]
        done = subprocess.run(
            [*command, str(program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.stdout, done.stderr
        content = json.loads(done.stdout)
        rows = re.findall(r"^(\d+) (\d+) (\d+) (\d+)$", output.read_text(), re.MULTILINE)
        printed = [tuple(map(int, row)) for row in rows]
        return Answer(done.returncode, content["preflight"], content["run"], printed)

    return run


@pytest.mark.short
def test_a_script_that_fits(preflight: Any) -> None:
    answer = preflight()
    found = answer.preflight
    assert (answer.code, found["fits"], found["outcome"], found["findings"]) == (0, True, "", [])
    assert found["device"] == "NVIDIA H100 80GB HBM3 (virtual)" and found["steps"] >= 6
    low, high = found["step_seconds"]
    assert 0 < low <= high < found["host_seconds"]
    assert found["peak_bytes"] == max(most for *_, most in answer.printed)
    assert (found["growth_bytes"], found["host_bytes"]) == (0, 0)


def test_what_does_not_fit_is_told_with_its_phase(preflight: Any) -> None:
    """Parameters and gradients fit, the optimizer's state and its temporaries do not."""
    answer = preflight("--width", "2048", options=("--gpu", "1750MiB"))
    found = answer.preflight
    assert (answer.code, found["fits"]) == (1, False)
    assert found["outcome"] == "out of memory" and found["asked_bytes"] > 0
    assert (found["peak_phase"], found["peak_step"]) == ("optimizer", 1)


def test_a_leak_is_told_with_the_step_in_which_memory_runs_out(preflight: Any) -> None:
    found = preflight("--fault", "leak", options=("--gpu", "6GiB")).preflight
    assert found["growth_bytes"] == 120 << 20 and found["growth_steps"] >= 4, found
    died = preflight("--fault", "leak", options=("--gpu", "6GiB", "--steps", "1000")).preflight
    assert died["outcome"] == "out of memory" and died["growth_bytes"] == 120 << 20
    assert abs(found["full_step"] - died["peak_step"]) <= 3, (found, died)


def test_batches_of_other_lengths_are_no_leak(preflight: Any) -> None:
    answer = preflight("--fault", "lengths")
    assert (answer.code, answer.preflight["growth_bytes"]) == (0, 0), answer.preflight
    rises = [most for rank, *_, most in answer.printed if rank == 0][2:]
    assert len(set(rises)) > 1, "no batch was longer than all before: the test says nothing"


def test_offloaded_states_are_counted_for_a_node(preflight: Any) -> None:
    """ZeRO-2: master parameters, gradients and two moments, 16 bytes of each element of a partition."""
    options = ("--nodes", "2")
    program = USER.with_name("train.py")
    found = preflight(
        "zero2", "--offload", "--steps", "20", "--hidden", "512", options=options, program=program
    ).preflight
    elements = 4 * (512 * 2048 * 2 + 2048 + 512 + 2 * 512)
    buckets = 2 * 2 * 20_000_000  # what passes through reduce_bucket_size elements of 16 bits on a rank
    states = 16 * elements / 4 * 2
    assert found["ranks_per_node"] == 2
    assert states <= found["host_bytes"] <= states + buckets, (states, found)
    assert 0.4 * states < found["pinned_bytes"]


def test_mfu_is_that_of_the_formula(preflight: Any) -> None:
    """6 N D / (t peak), and the attention: of a Llama of which N counts the matrices that multiply."""
    found = preflight("zero2", program=USER.with_name("user_trainer.py")).preflight
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024
    tokens, attention = 2 * 2 * 2 * 128, 12 * 4 * 256 * 128
    flops = tokens * (6 * (4 * layer + 32000 * 256) + attention)
    expected = [flops / (seconds * 2 * 989e12) for seconds in reversed(found["step_seconds"])]
    assert found["mfu"] == pytest.approx(expected, rel=0.02) and expected[0] <= expected[1]


@pytest.fixture
def record(
    virtual_cuda: Environment, tmp_path: Path, preflight: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Records user.py on two virtual RTX 4090s, as on real ones; later commands find the run."""
    options = argparse.Namespace(gpu="rtx4090", link=None, network=4e11)

    def run(name: str, *arguments: str, slow: float = 1.0, slow_links: float = 1.0) -> RunSnapshot:
        values = machine_values(options)
        links = {link: float(values[link]) / slow_links for link in ("node_speed", "pcie_speed")}
        write_machine(tmp_path / name, changes={**values, **links, "slow": slow})
        variables = {**os.environ, **virtual_cuda.variables(tmp_path / name)}
        variables["ZEROMON_DIR"] = str(tmp_path / name / "live")
        command = [sys.executable, "-m", "zeromon", "run", "--quiet", "--name", name, "--"]
        command += [str(virtual_cuda.python), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        done = subprocess.run([*command, str(USER), *arguments], env=variables, capture_output=True)
        assert done.returncode == 0, done.stderr
        return Store().load(name)

    return run


def test_a_run_of_another_machine_calibrates(preflight: Any, record: Any) -> None:
    """One whose kernels are 1.5 times and whose links are 3 times as slow; the batch is another one."""
    arguments, slower = ("--width", "2048", "--batch"), {"slow": 1.5, "slow_links": 3}
    record("calibrating", *arguments, "16384", "--steps", "14", **slower)
    truth = record("truth", *arguments, "8192", "--steps", "14", **slower)
    expected = STEP.of_rank(truth.ranks[0])
    options = ("--gpu", "rtx4090", "--calibrate", "calibrating")
    found = preflight(*arguments, "8192", options=options).preflight
    assert "calibrated by calibrating: kernels take 1." in found["device"]
    assert found["step_seconds"][0] == pytest.approx(expected, rel=0.1), found["device"]
    plain = preflight(*arguments, "8192", options=options[:2]).preflight
    assert plain["step_seconds"][0] < 0.8 * expected
    # The device is behind its host, and a step is still what it takes on the device
    assert plain["step_seconds"][0] == pytest.approx(plain["host_seconds"], rel=0.1)


def test_a_run_of_another_device_does_not_calibrate(preflight: Any, record: Any) -> None:
    record("other", "--steps", "4")
    with pytest.raises(AssertionError, match="other ran on NVIDIA GeForce RTX 4090"):
        preflight(options=("--gpu", "a100", "--calibrate", "other"))


def test_a_deadlock_is_named_with_its_line(preflight: Any) -> None:
    answer = preflight("--fault", "deadlock")
    assert answer.code == 1 and answer.preflight["steps"] == 3
    assert "user.py" in answer.preflight["outcome"], answer.preflight["outcome"]


def test_values_do_not_end_a_run(preflight: Any) -> None:
    assert preflight("--fault", "nan").code == 0


def test_ranks_of_two_nodes_talk_over_the_network(preflight: Any) -> None:
    answer = preflight(options=("--nodes", "2", "--network", "10GB/s"))
    assert {place[:3] for place in answer.printed} >= {(0, 4, 0), (3, 4, 1)}
    one = preflight(ranks=4)
    exposed = [a.preflight["exposed_seconds"][0] for a in (answer, one)]
    assert exposed[0] > 5 * exposed[1]


def test_fit_launches_on_virtual_devices(
    virtual_cuda: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    launch = [
        str(virtual_cuda.python),
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(USER),
    ]
    options = ["--gpu", "2GiB", "--multiple", "512", "--max", "16384", "--steps", "4", "--json"]
    command = [sys.executable, "-m", "zeromon", "fit", *options, "-o", str(tmp_path / "fit"), "--"]
    done = subprocess.run(
        [*command, *launch, "--batch", "{micro_batch}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    largest = found["recommended"]["micro_batch"]
    ran = [t for t in found["launches"] if not t["outcome"]]
    assert largest in {t["micro_batch"] for t in ran}
    # 16 bytes of each of four outputs of 4 x width, and more: the limit is the device's
    (best,) = (t for t in ran if t["micro_batch"] == largest)
    assert 0.7 * best["rooms"]["device"] < best["peaks"]["device"] < best["rooms"]["device"]
    assert 0 < best["seconds"] < 0.1


@pytest.mark.short
def test_a_build_for_cpus_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zeromon", "preflight", "--", sys.executable, str(USER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "is a build for CPUs" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("command", "nodes", "starts", "places"),
    [
        ("torchrun --nproc-per-node 2 t.py", None, "torchrun --nproc-per-node 2 t.py", None),
        ("torchrun --nnodes 2 --node-rank=0 --nproc_per_node 2 t.py --nnodes 9", None,
         "torchrun --standalone --nproc-per-node=4 t.py --nnodes 9", "2 4 0 1 2 3"),
        ("accelerate launch --num_processes 4 --use_fsdp --num_machines 2 t.py", None,
         "accelerate launch --num_machines=1 --num_processes=4 --use_fsdp t.py", "2 4 0 1 2 3"),
        ("deepspeed --num_gpus 1 --hostfile hosts t.py", 2, "deepspeed --num_gpus=2 t.py", "1 2 0 1"),
    ],
)  # fmt: skip
def test_the_ranks_of_all_nodes_start_here(
    command: str, nodes: int | None, starts: str, places: str | None
) -> None:
    expected = {} if places is None else {"VGPU_PLACES": places}
    launch = placed_launch(command.split(), nodes, 16, {})
    assert (launch.command, launch.environment, launch.ranks) == (starts.split(), expected, ())


def test_a_few_ranks_stand_for_a_thousand(preflight: Any) -> None:
    answer = preflight(options=("--nodes", "128", "--processes", "4"), ranks=8)
    found = answer.preflight
    assert (found["world_size"], found["representatives"]) == (1024, [0, 1, 8, 1016])
    assert {place[:3] for place in answer.printed} == {
        (0, 1024, 0), (1, 1024, 1), (8, 1024, 0), (1016, 1024, 0)
    }  # fmt: skip
    few = preflight(ranks=8).preflight
    assert found["peak_bytes"] < few["peak_bytes"]
