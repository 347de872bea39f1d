"""Every way to start ranks, with nothing changed in the script; and what is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import (
    ENDED_WELL,
    LAUNCH,
    PROGRAMS,
    ROOT,
    Node,
    clean_environment,
    free_port,
    train_command,
    wait_for,
    without_zeromon,
)

from zeromon.base.errors import RingError
from zeromon.ring import paths
from zeromon.snapshot import RunSnapshot
from zeromon_agents.runtime import bootstrap

TINY = str(PROGRAMS / "tiny.py")
PYTHON = sys.executable
BIN = Path(sys.executable).parent
RUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def zeromon_run(node: Node, command: list[str], **extra: str) -> subprocess.CompletedProcess[str]:
    """The real `zeromon run`, collector and all, on this node's folders."""
    environment = clean_environment() | {
        "ZEROMON_DIR": str(node.root),
        "ZEROMON_STORE": str(node.folder / "store"),
        "ZEROMON_PORT": str(free_port()),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        **extra,
    }
    return subprocess.run(
        [PYTHON, "-m", "zeromon", "run", "--name", "r", "--", *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*RUN, TINY], marks=pytest.mark.long),
        pytest.param([*RUN, "--no-python", PYTHON, TINY], marks=pytest.mark.long),
        ["bash", "-c", f"{' '.join(RUN)} -m tests.programs.tiny"],
        pytest.param(
            [
                PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes",
                "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", TINY,
            ],
            marks=pytest.mark.long,  # test_deepspeed.py starts ranks by accelerate, too
        ),
    ],
    ids=["torchrun", "no-python", "bash-m", "accelerate"],
)  # fmt: skip
def test_launchers_start_watched_ranks(node: Node, command: list[str]) -> None:
    """Two ranks, five steps each, exit 0."""
    result = node.run(command, MAIN_PORT=str(free_port()))
    assert result.code == 0, result.output
    ranks = result.snapshot.ranks
    assert [(r.rank, r.steps.watched_steps) for r in ranks] == [(0, 5), (1, 5)], result.output
    assert all(r.status.ended in ENDED_WELL for r in ranks)
    assert all({"launch", "imports", "process groups"} <= set(r.ledger.startup_parts) for r in ranks)
    assert "zeromon" not in result.output


@pytest.mark.long  # `make test-programs` has mp.spawn, with counts and parameters
def test_spawned_workers_are_watched(node: Node) -> None:
    """torch.multiprocessing.spawn: no RANK in the environment."""
    result = node.run([PYTHON, TINY], FAULT="spawn", PORT=str(free_port()))
    assert result.code == 0, result.output
    assert [(r.rank, r.world_size, r.steps.watched_steps) for r in result.snapshot.ranks] == [
        (0, 2, 5),
        (1, 2, 5),
    ]


def test_plain_python_is_watched_from_its_first_optimizer_step(node: Node) -> None:
    """No process group; forward is what lies between the data and the backward."""
    result = node.run([PYTHON, TINY])
    assert result.code == 0, result.output
    (rank,) = result.snapshot.ranks
    assert (rank.rank, rank.world_size, rank.communication.collectives) == (0, 1, ())
    assert rank.steps.watched_steps == 5
    assert rank.steps.phase_seconds["forward"] > 0
    assert rank.steps.phase_seconds["data_wait"] > 0


def test_tasks_of_srun_find_one_another(node: Node) -> None:
    """One `zeromon run` a rank, RANK and MASTER_PORT in the environment, as srun gives them."""
    port = str(free_port())
    environment = clean_environment() | {
        "ZEROMON_DIR": str(node.root),
        "ZEROMON_STORE": str(node.folder / "store"),
        "ZEROMON_PORT": str(free_port()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "SLURM_JOB_ID": "42",
        "SLURM_STEP_ID": "0",
    }
    tasks = [
        subprocess.Popen(
            [PYTHON, "-m", "zeromon", "run", "--", PYTHON, TINY],
            env=environment | {"RANK": str(r), "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)},
            cwd=ROOT,
        )
        for r in range(2)
    ]
    assert [task.wait(timeout=120) for task in tasks] == [0, 0]
    snapshot = wait_for_record(node, "42.0-tiny")
    assert [(r.rank, r.local_rank, r.steps.watched_steps) for r in snapshot.ranks] == [
        (0, 0, 5),
        (1, 1, 5),
    ]


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector removes that of an ended run of the same name while a late rank starts."""
    monkeypatch.setenv("ZEROMON_RUN_DIR", str(tmp_path / "run"))
    asked: list[Path] = []

    def start_agent(folder: Path) -> Path:
        asked.append(folder)
        if len(asked) == 1:
            shutil.rmtree(folder)
            raise RingError("cannot create the ring: No such file or directory")
        return folder

    monkeypatch.setattr(bootstrap, "start_agent", start_agent)
    assert bootstrap.start_in_run() == tmp_path / "run"  # type: ignore[comparison-overlap]
    assert len(asked) == 2
    assert (tmp_path / "run" / "run.json").exists()


def wait_for_record(node: Node, name: str) -> RunSnapshot:
    def ended() -> RunSnapshot | None:
        snapshot = node.store.load(name) if node.store.names() else None
        return snapshot if snapshot is not None and snapshot.ended else None

    return wait_for(ended, 30)


def test_a_thread_of_the_agent_inside_torch_does_not_abort_the_end(node: Node) -> None:
    """The interpreter ends a thread that comes back from C++ then, and C++ calls that an abort."""
    result = node.run(train_command(2, program="busy_heart.py"))
    assert result.code == 0, result.output
    assert "terminate called" not in result.output
    assert [rank.steps.watched_steps for rank in result.snapshot.ranks] == [3, 3]


def test_zeromon_run_keeps_exit_code_and_output(node: Node) -> None:
    """stdout is the command's own; narration goes to stderr."""
    done = zeromon_run(node, ["bash", "-c", "echo out; echo err >&2; exit 7"])
    assert done.returncode == 7
    assert done.stdout == "out\n"
    assert "watching run r (http://127.0.0.1:" in done.stderr
    missing = zeromon_run(node, ["no-such-command"])
    assert missing.returncode == 127
    assert "cannot run no-such-command" in missing.stderr
    killed = zeromon_run(node, ["bash", "-c", "kill -9 $$"])
    assert killed.returncode == -9


@pytest.mark.long
def test_a_script_can_start_the_agent_itself(node: Node) -> None:
    """`import zeromon_agents; zeromon_agents.start()`, without `zeromon run`: one run, two ranks."""
    script = node.folder / "own.py"
    script.write_text(
        "import zeromon_agents\nzeromon_agents.start()\n"
        f"import runpy\nrunpy.run_path({TINY!r}, run_name='__main__')\n"
    )
    environment = clean_environment() | {
        "ZEROMON_DIR": str(node.root),
        "ZEROMON_STORE": str(node.folder / "store"),
        "ZEROMON_PORT": str(free_port()),
    }
    subprocess.run([*LAUNCH, "2", str(script)], env=environment, check=True, timeout=120)
    snapshot = wait_for_record(node, "tiny-")  # runpy sets argv
    assert [(r.rank, r.steps.watched_steps) for r in snapshot.ranks] == [(0, 5), (1, 5)]
    assert all(r.status.ended in ENDED_WELL for r in snapshot.ranks)


# ---- neighbours ---------------------------------------------------------------------------------


def shim(node: Node, code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """A Python child of `zeromon run` that executes *code*."""
    return subprocess.run(
        [PYTHON, "-c", code],
        env=node.environment("r", **extra),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_torch_is_never_loaded_into_a_child_that_does_not_load_it(node: Node) -> None:
    """Nor anything of ours but the shim; and the shim's folder is gone from sys.path."""
    done = shim(
        node,
        "import sys; print([m for m in sys.modules if 'torch' in m or 'zeromon' in m],"
        " [p for p in sys.path if 'payload' in p])",
    )
    assert done.stdout == "[] []\n", done.stderr


def test_an_existing_sitecustomize_still_runs(node: Node) -> None:
    """And its errors show as they would without us."""
    folder = node.folder / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys; sys.THEIRS = 1\n")
    environment = node.environment("r")
    environment["PYTHONPATH"] += os.pathsep + str(folder)
    code = "import sys, sitecustomize; print(sys.THEIRS, 'site/site' in sitecustomize.__file__)"
    command = [PYTHON, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "1 True\n", done.stderr
    (folder / "sitecustomize.py").write_text("raise ValueError('an error of theirs')\n")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "ValueError: an error of theirs" in done.stderr


def test_a_sitecustomize_that_puts_itself_first_does_not_keep_us_out_of_children(node: Node) -> None:
    """As OpenTelemetry's does, so that the ranks of a launcher would have it instead of the shim."""
    folder = node.folder / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os\nold = os.environ['PYTHONPATH'].split(os.pathsep)\n"
        f"os.environ['PYTHONPATH'] = os.pathsep.join([{str(folder)!r}, *old])\n"
    )
    environment = node.environment("r")
    environment["PYTHONPATH"] += os.pathsep + str(folder)
    code = "import os; print(os.environ['PYTHONPATH'])"
    done = subprocess.run(
        [PYTHON, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split(os.pathsep)[:2] == [str(paths.SHIM), str(folder)]


@pytest.mark.long
def test_an_environment_without_zeromon_is_watched_too(node: Node) -> None:
    """A virtual environment that has torch but not zeromon: the agent comes from ours."""
    python = without_zeromon(node.folder / "venv")
    absent = [python, "-c", "from importlib.util import find_spec; print(find_spec('zeromon'))"]
    cwd = node.folder
    probe = subprocess.run(
        absent, env=clean_environment(), cwd=cwd, capture_output=True, text=True, check=True
    )
    assert probe.stdout == "None\n"
    result = node.run([*LAUNCH, "2", "--no-python", python, TINY], cwd=cwd)
    assert result.code == 0, result.output
    assert [r.steps.watched_steps for r in result.snapshot.ranks] == [5, 5]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_data_workers_do_not_become_ranks(node: Node, context: str) -> None:
    """Forked or spawned, they write no ring of their own and none of their parent's."""
    result = node.run([PYTHON, TINY], WORKERS="2", CONTEXT=context)
    assert result.code == 0, result.output
    (rank,) = result.snapshot.ranks
    assert (rank.steps.watched_steps, rank.agent.dropped) == (5, 0)
    assert rank.status.ended in ENDED_WELL


def test_opentelemetry_is_named_as_what_keeps_us_out(node: Node) -> None:
    """It replaces sitecustomize and never chains: said before, not found out after."""
    fake = node.folder / "opentelemetry-instrument"
    fake.write_text('#!/bin/sh\nexec "$@"\n')
    fake.chmod(0o755)
    done = zeromon_run(node, [str(fake), "true"])
    assert done.returncode == 0
    assert "put it first: opentelemetry-instrument zeromon run" in done.stderr
    isolated = zeromon_run(node, [PYTHON, "-I", "-c", "pass"])
    assert "not watched" in isolated.stderr
