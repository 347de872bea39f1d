"""`zeromon preflight`: a user's command on virtual GPUs, what it finds, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import free_port

from vgpu.environment import CACHE, Environment
from zeromon.base.errors import LaunchError
from zeromon.cli import virtual_machine as virtual_machine_module
from zeromon.cli.measured_launch import find_failure
from zeromon.cli.virtual_machine import machine_values, placed_launch, python_of, virtual_machine
from zeromon.readout.figures import STEP
from zeromon.readout.verdict import judge_run
from zeromon.ring import paths
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.rank import VIRTUAL
from zeromon.storage.run_store import Store
from zeromon.storage.snapshot_log import Past
from zeromon_vgpu.machine import write_machine

pytestmark = pytest.mark.vgpu

PROGRAMS = Path(__file__).resolve().parent / "programs"
EXAMPLES = PROGRAMS.parents[2] / "examples"
USER, WRONG, SPAWN = (PROGRAMS / name for name in ("user.py", "wrong.py", "user_spawn.py"))


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))

    def run(
        *arguments: str, options: tuple[str, ...] = (), ranks: int = 2, program: Path = USER,
        launch: tuple[str, ...] = (),
    ) -> Answer:  # fmt: skip
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
        launch = launch or (str(virtual_cuda.python), *torchrun, str(program))
        output = tmp_path / "output"
        command = [sys.executable, "-m", "zeromon", "preflight", "--json", "--output", str(output)]
        done = subprocess.run(
            [*command, *options, "--", *launch, *arguments],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.stdout, done.stderr
        content = json.loads(done.stdout)
        assert done.returncode < 2, done.stderr
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
    # what is a figure of this host alone, or of no device at all, is not shown as one of the run
    assert {rank["device"] for rank in answer.run["ranks"]} == {"cuda:0 (virtual)", "cuda:1 (virtual)"}
    assert answer.run["energy"]["device_joules"] is None
    assert not {"launch_bound", "straggler", "not_finite"} & {f["rule"] for f in answer.run["findings"]}
    # the record has the times of the devices, step by step, and what it says first is the answer
    record = Store().load()
    for rank in record.ranks:
        assert all(step.seconds == pytest.approx(high, rel=0.02) for step in rank.steps.recent)
        assert all(sum(step.phase_ns) == step.end_ns - step.start_ns for step in rank.steps.recent)
        waited = [step.exposed_ns / 1e9 for step in rank.steps.recent]
        assert all(seconds == pytest.approx(found["exposed_seconds"][1], rel=0.05) for seconds in waited)
    kept = Past(Store().folder(record.run)).series()
    assert len(kept["step"]) == sum(len(rank.steps.recent) for rank in record.ranks)
    assert judge_run(record).cause.startswith("fits, with a peak of 448.2 MiB of 79.1 GiB; no problem")


def test_what_a_killed_preflight_has_left_goes_with_the_next(virtual_cuda: Environment) -> None:
    root = paths.choose_ring_root().parent
    options = argparse.Namespace(gpu="h100", link=None, network=4e11, arithmetic=False)
    command = [str(virtual_cuda.python), "train.py"]
    left = paths.make_private_folder(root / "zeromon-killed")
    (left / "preflight.lock").touch()
    with virtual_machine(command, options, "first") as machine:
        assert not left.exists()
        with virtual_machine(command, options, "second"):
            assert (machine.folder / "machine").exists(), "this one still runs"
    assert not machine.folder.exists()


def test_each_unit_has_its_waits(preflight: Any) -> None:
    """By name, with its bytes; over a slow link, each waits as long as its bytes take."""
    found = preflight("--width", "512", options=("--link", "4GB/s")).preflight
    rows = found["waits"]
    calls = {(row["unit"], row["op"], row["phase"]): row["calls"] for row in rows}
    forward = {(unit, "all_gather", "forward"): 1 for unit in "0123"}
    backward = {(unit, "all_gather", "backward"): 1 for unit in "0123"}
    reduced = {(unit, "reduce_scatter", "backward"): 1 for unit in "0123"}
    assert calls == forward | backward | reduced
    unit_bytes = 4 * (2 * 512 * 2048 + 2048 + 512)
    assert {row["nbytes"] for row in rows} == {unit_bytes}
    # half of a unit travels, over a link that reaches 0.8 of its peak
    seconds = unit_bytes / 2 / (0.8 * 4e9)
    assert all(row["seconds"] == pytest.approx(seconds, rel=0.1) for row in rows)
    total, low = sum(row["exposed_seconds"] for row in rows), found["exposed_seconds"][1]
    assert low <= total * 1.01 and total < 12 * seconds * 1.1
    # findings and every view have the same times
    record = Store().load()
    (finding,) = [f for f in record.findings if f.rule == "exposed_communication"]
    assert finding.share == pytest.approx(
        found["exposed_seconds"][1] / found["step_seconds"][1], rel=0.05
    )
    waiting = next(rank for rank in record.ranks if rank.rank == found["wait_rank"])
    shown = {(row.unit, row.op, row.phase): row.exposed_seconds for row in waiting.communication.traffic}
    assert shown == {(row["unit"], row["op"], row["phase"]): row["exposed_seconds"] for row in rows}


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


@pytest.mark.parametrize("mode", ["zero2", "ddp"])
def test_mfu_is_that_of_the_formula(preflight: Any, mode: str) -> None:
    """6 N D / (t peak), and the attention: of a Llama of which N counts the matrices that multiply.

    With DDP, accelerate opens autocast within the model: the peak is that of 16 bits all the same.
    """
    found = preflight(mode, program=USER.with_name("user_trainer.py")).preflight
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
    options = argparse.Namespace(gpu="rtx4090", link=None, network=4e11, arithmetic=False)

    def run(name: str, *arguments: str, slow: float = 1.0, slow_links: float = 1.0) -> RunSnapshot:
        values = machine_values(options)
        links = {link: float(values[link]) / slow_links for link in ("node_speed", "pcie_speed")}
        label = str(values["name"]).removesuffix(VIRTUAL)
        write_machine(tmp_path / name, changes={**values, **links, "slow": slow, "name": label})
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


@pytest.mark.parametrize(
    ("fault", "steps", "names"),
    [
        ("file", 0, ["FileNotFoundError at wrong.py:17: ", "/no/such/corpus.txt"]),
        ("exit", 0, ["no data in /no/such/folder"]),
        ("batch", 0, ["AssertionError at wrong.py:28: ", "micro_batch_per_gpu", "7 != 2 * 1"]),
        ("mesh", 0, ["RuntimeError at wrong.py:33: ", "world size 2, but found 4 ranks"]),
        ("skip", 2, ["rank 0 called all_gather", "rank 1 called all_reduce", "wrong.py:"]),
        ("uneven", 3, ["rank 0 has left after step 3 (exit code 0); rank 1 waits"]),
        ("logarithm", 0, ["ValueError at wrong.py:", "math domain error", "--arithmetic"]),
        ("sleep", 0, ["no two steps in 40 seconds (--seconds allows more)", "rank 1 is", "wrong.py:35"]),
    ],
)
def test_a_mistake_is_named_before_a_gpu_hour(
    preflight: Any, fault: str, steps: int, names: list[str]
) -> None:
    limit = ("--seconds", "40") if fault == "sleep" else ()
    answer = preflight(fault, program=WRONG, options=limit)
    outcome = answer.preflight["outcome"]
    assert answer.code == 1 and answer.preflight["steps"] >= steps, outcome
    assert [name for name in names if name not in outcome] == [], outcome


def test_a_long_construction_is_no_hang(preflight: Any) -> None:
    """Rank 1 computes in C++ with the GIL for 22 s, while rank 0 waits in its next broadcast."""
    answer = preflight("construct", program=WRONG)
    assert (answer.code, answer.preflight["outcome"]) == (0, ""), answer.preflight["outcome"]


def test_a_kernel_of_triton_runs(virtual_cuda: Environment, preflight: Any) -> None:
    """As those of torch.compile and Liger do."""
    if not virtual_cuda.has_triton:
        pytest.skip("no Triton for the virtual device: make vgpu")
    answer = preflight("triton", program=WRONG)
    assert (answer.code, answer.preflight["outcome"]) == (0, ""), answer.preflight["outcome"]


def test_a_plain_python_takes_the_devices_that_it_may_see(
    virtual_cuda: Environment, preflight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit it runs DataParallel on all, which the answer says, with the way out."""
    launch = (str(virtual_cuda.python), str(PROGRAMS / "user_parallel.py"))
    refused = preflight(launch=launch).preflight
    assert refused["outcome"].endswith("use CUDA_VISIBLE_DEVICES=0, or torchrun"), refused
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    answer = preflight(launch=launch)
    assert (answer.code, answer.preflight["fits"], answer.preflight["world_size"]) == (0, True, 1)
    assert {rank["strategy"] for rank in answer.run["ranks"]} == {"one process"}


def test_devices_are_numbered_as_cuda_numbers_them(
    virtual_cuda: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that see one device each use the memory of two; a list ends at an unknown one."""
    write_machine(tmp_path, "h100")
    code = (
        "import torch; torch.empty(1 << 30, device='cuda', dtype=torch.uint8);"
        "print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).pci_bus_id - 16,"
        " (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) >> 30, flush=True); input()"
    )
    variables, printed, running = {**os.environ, **virtual_cuda.variables(tmp_path)}, [], []
    for visible in ("2", "0", "6,1,99,3"):
        running.append(
            subprocess.Popen(
                [virtual_cuda.python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env={**variables, "CUDA_VISIBLE_DEVICES": visible},
            )
        )  # fmt: skip
        assert running[-1].stdout is not None
        printed.append(running[-1].stdout.readline().split())
    for process in running:
        process.communicate("\n", timeout=60)
    assert printed == [["1", "2", "1"], ["1", "0", "1"], ["2", "6", "1"]]


def test_arithmetic_gives_real_losses(preflight: Any) -> None:
    assert preflight("logarithm", program=WRONG, options=("--arithmetic",)).code == 0


@pytest.fixture
def launchers(virtual_cuda: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on the path, with the console scripts of that environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    modules = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli",
               "deepspeed": "deepspeed.launcher.runner"}  # fmt: skip
    for name, module in modules.items():
        script = folder / name
        script.write_text(f"#!{virtual_cuda.python}\nfrom {module} import main\nmain()\n")
        script.chmod(0o755)
    paths = (str(folder), str(virtual_cuda.python.parent), os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(paths))
    return folder


ACCELERATE = """distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP,
              fsdp_transformer_layer_cls_to_wrap: Block}
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
num_machines: 2
num_processes: 4
"""


@pytest.mark.parametrize(
    ("launch", "ranks", "strategy"),
    [
        ("bash {folder}/run.sh", 2, "fsdp2"),
        ("env OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 {user}", 2, "fsdp2"),
        ("accelerate launch --config_file {folder}/accelerate.yaml {examples}/train_gpt_accelerate.py",
         4, "fsdp2"),
        ("deepspeed --num_gpus 2 --hostfile hosts {examples}/train_gpt_deepspeed.py "
         "--config {examples}/deepspeed/zero2.json", 2, "deepspeed-zero2"),
        ("python {spawn} {port}", 2, "ddp"),
    ],
    ids=["script", "torchrun", "accelerate", "deepspeed", "spawn"],
)  # fmt: skip
def test_launchers_as_users_type_them(
    preflight: Any, launchers: Path, launch: str, ranks: int, strategy: str
) -> None:
    (launchers / "run.sh").write_text(f"torchrun --standalone --nproc-per-node 2 {USER}\n")
    (launchers / "accelerate.yaml").write_text(ACCELERATE)
    command = launch.format(
        folder=launchers, user=USER, spawn=SPAWN, examples=EXAMPLES, port=free_port()
    ).split()
    answer = preflight(launch=tuple(command))
    assert answer.preflight["outcome"] == "" and answer.preflight["fits"], answer.preflight
    assert answer.preflight["world_size"] == ranks
    assert {rank["strategy"] for rank in answer.run["ranks"]} == {strategy}


@pytest.mark.short
def test_the_python_of_a_command(launchers: Path) -> None:
    python = (launchers / "torchrun").read_text().splitlines()[0].removeprefix("#!")
    first = str(Path(python).parent / "python")
    (launchers / "run.sh").write_text("#!/bin/bash\n")
    (launchers / "run.sh").chmod(0o755)
    assert python_of(["torchrun", "train.py"]) == [python]
    assert python_of([python, "-m", "torch.distributed.run"]) == [python]
    assert python_of(["env", "A=1", "torchrun", "t.py"]) == ["env", "A=1", "python"]
    assert python_of(["env", str(launchers / "torchrun"), "t.py"]) == [python]
    # a script of the shell must not run for this
    assert python_of(["run.sh", "train.py"]) == python_of(["bash", "run.sh", "train.py"]) == [first]
    with pytest.raises(LaunchError, match="other machines"):
        python_of(["srun", "torchrun", "train.py"])


@pytest.mark.short
def test_hosts_of_deepspeed_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of the command nor those of the file that it reads by default."""
    with pytest.raises(LaunchError, match="how many processes"):
        placed_launch("deepspeed --hostfile hosts train.py".split(), None, 16, {})
    (tmp_path / "hostfile").write_text("node-a slots=8\nnode-b slots=8\n")
    monkeypatch.setattr(virtual_machine_module, "_DEFAULT_HOSTFILE", tmp_path / "hostfile")
    launch = placed_launch("deepspeed --num_gpus 2 train.py".split(), None, 16, {})
    assert launch.command == "deepspeed --hostfile= --num_gpus=2 train.py".split()


@pytest.mark.short
def test_the_exception_before_what_launchers_say() -> None:
    rows = """Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
  File "/env/lib/python3.11/site-packages/lib.py", line 9, in load
lib.NoFileError: no tokens
E1128 4356 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    assert find_failure(rows) == "NoFileError at train.py:3: no tokens"
    assert find_failure("usage: t.py\nt.py: error: no --lr\n=====\n") == "t.py: error: no --lr"
    assert find_failure("") == ""


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
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


def test_fit_finds_the_cheapest_stage_on_the_fewest_devices(
    virtual_cuda: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch has the verdict and the peak of a preflight of the same command."""
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    script = [str(EXAMPLES / "train_gpt.py"), "--width", "512", "--layers", "12", "--length", "256"]
    script += ["--batch", "2", "--strategy", "{stage}"]
    torchrun = [str(virtual_cuda.python), "-m", "torch.distributed.run", "--nproc-per-node", "{devices}"]

    def run(*words: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "zeromon", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode in (0, 1), done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    machine = ["--json", "--steps", "3", "--gpu", "1140MiB"]
    values = ["--stages", "ddp,fsdp2", "--devices", "1,2", "-o", str(tmp_path / "fit")]
    answer = run("fit", *machine, *values, "--", *torchrun, *script)
    launched = [(t["stage"], t["devices"], t["fits"]) for t in answer["launches"]]
    assert launched == [("fsdp2", 1, False), ("fsdp2", 2, True), ("ddp", 2, False)], answer
    assert answer["recommended"] == {"stage": "fsdp2", "micro_batch": None, "devices": 2}
    for trial in answer["launches"]:
        of_trial = {"{stage}": trial["stage"], "{devices}": str(trial["devices"])}
        command = [of_trial.get(word, word) for word in [*torchrun, *script]]
        found = run("preflight", *machine, "--", *command)["preflight"]
        assert found["fits"] == trial["fits"], (trial, found)
        if trial["fits"]:
            assert found["peak_bytes"] == trial["peaks"]["device"]
            assert found["step_seconds"][1] == pytest.approx(trial["seconds"], rel=0.1)
            assert shlex.split(Path(answer["files"]["fsdp2"]).read_text()) == command


@pytest.mark.short
def test_an_older_device_runs_what_it_has_kernels_for(
    virtual_cuda: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUB sorts the tokens of an embedding by kernels of the device's own architecture."""
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))

    def run(gpu: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "zeromon", "preflight", "--gpu", gpu, "--steps", "3", "--"]
        launch = [str(virtual_cuda.python), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        program = [str(USER.parents[3] / "examples" / "train_gpt.py"), "--width", "64", "--layers", "1"]
        return subprocess.run(
            [*command, *launch, *program, "--heads", "2", "--length", "1024", "--batch", "4"],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    turing, volta = run("t4"), run("v100")
    assert "  memory    fits" in turing.stdout, turing.stdout + turing.stderr
    assert (volta.returncode, "has no kernels for Tesla V100" in volta.stderr) == (2, True), volta.stderr


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
        ("deepspeed --num_gpus 1 --hostfile hosts t.py", 2,
         "deepspeed --hostfile= --num_gpus=2 t.py", "1 2 0 1"),
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
