"""A real Slurm on this machine, of one node. Needs root, slurmctld, slurmd and munge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import PROGRAMS, ROOT, clean_environment, free_port, wait_for

from zeromon.readout.text import run_state
from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import Store

NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]
TASK = """\
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
exec {python} -m zeromon run -- {python} {program}
"""
CONFIG = """\
ClusterName=zeromon
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of its commands."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    file = folder / "slurm.conf"
    file.write_text(CONFIG.format(folder=folder, host=host, port=free_port(), node_port=free_port()))
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge")
    environment = clean_environment() | {"SLURM_CONF": str(file)}
    environment["PATH"] += ":/usr/sbin"
    if not shutil.which("pgrep") or subprocess.run(["pgrep", "-x", "munged"], check=False).returncode:
        subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=True)
    subprocess.run(["slurmctld"], env=environment, check=True)
    subprocess.run(["slurmd"], env=environment, check=True)
    idle = ["sinfo", "-h", "-o", "%T"]

    def state() -> str:
        told = subprocess.run(idle, env=environment, check=False, capture_output=True, text=True)
        return told.stdout.strip()

    wait_for(lambda: state() == "idle", 30)
    yield environment
    for name in ("slurmd", "slurmctld"):
        os.kill(int((folder / f"{name}.pid").read_text()), 15)


def launched(slurm: dict[str, str], folder: Path, command: list[str], **extra: str) -> str:
    """What *command* prints, with stores and rings in *folder*."""
    environment = slurm | extra | {
        "ZEROMON_DIR": str(folder / "rings"), "ZEROMON_STORE": str(folder / "store"),
        "ZEROMON_PORT": str(free_port()),
    }  # fmt: skip
    made = subprocess.run(
        command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def record(folder: Path, name: str) -> RunSnapshot:
    store = Store(folder / "store")
    wait_for(lambda: any(one.run == name and one.ended for one in store.list_manifests()), 60)
    return store.load(name)


def script(folder: Path, text: str) -> str:
    file = folder / "task.sh"
    facts = {"port": free_port(), "python": sys.executable, "program": PROGRAMS / "tiny.py"}
    file.write_text("#!/bin/bash\n" + text.format(**facts))
    return str(file)


def test_tasks_of_a_step_are_one_run_named_by_job_and_step(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    command = ["srun", "-n2", "bash", "-c", f"echo $SLURM_JOB_ID; . {script(tmp_path, TASK)}"]
    job = launched(slurm, tmp_path, command).split()[0]
    run = record(tmp_path, f"{job}.0-tiny")
    assert [(rank.rank, rank.world_size, rank.steps.watched_steps) for rank in run.ranks] == [
        (0, 2, 5),
        (1, 2, 5),
    ]
    assert job in run.job


def test_a_batch_job_that_is_cancelled_says_so(slurm: dict[str, str], tmp_path: Path) -> None:
    file = script(tmp_path, "{python} -m zeromon run -- {python} {program}\n")
    command = ["sbatch", "--parsable", "-n2", "-o", str(tmp_path / "out"), file]
    job = launched(slurm, tmp_path, command, STEPS="100000", PAUSE="0.05").strip()
    store = Store(tmp_path / "store")
    wait_for(lambda: any(one.steps >= 20 for one in store.list_manifests()), 90)
    subprocess.run(["scancel", job], env=slurm, check=True)
    run = record(tmp_path, f"{job}-tiny")
    assert "stopped by SIGTERM after step" in run_state(run), run_state(run)
