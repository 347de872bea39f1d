"""`zeromon preflight` of a program of programs/, as its JSON."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from published_figures import GIB, MODELS
from support import ROOT, clean_environment

from vgpu.environment import CACHE, Environment
from zeromon.memory.speeds import DEVICES

PROGRAMS = ROOT / "tests" / "vgpu" / "programs"


def variables(folder: Path) -> dict[str, str]:
    """What `zeromon` needs to keep its runs in *folder*, and DeepSpeed to find ninja."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return clean_environment() | {
        "PYTHONPATH": str(ROOT), "ZEROMON_STORE": str(folder / "store"),
        "XDG_CACHE_HOME": str(CACHE), "PATH": path,
    }  # fmt: skip


def run_zeromon(folder: Path, *arguments: str, seconds: float = 600, **extra: str) -> str:
    """Runs a command of `zeromon` and returns what it prints."""
    command = [sys.executable, "-m", "zeromon", *arguments]
    done = subprocess.run(
        command, env=variables(folder) | extra, cwd=folder, capture_output=True, text=True,
        check=False, timeout=seconds,
    )  # fmt: skip
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    return done.stdout


def launch_words(python: object, ranks: int, program: str, *arguments: str) -> list[str]:
    """The command that starts *ranks* of a program on one node."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [str(python), *words, str(PROGRAMS / program), *arguments]


def run_preflight(
    folder: Path, options: list[str], launch: list[str], seconds: int = 300
) -> dict[str, Any]:
    """Returns the JSON of a preflight: the answer and the run."""
    limits = ["--json", "--seconds", str(seconds)]
    printed = run_zeromon(folder, "preflight", *limits, *options, "--", *launch, seconds=seconds + 120)
    answer: dict[str, Any] = json.loads(printed)
    return answer


def preflight_published(
    environment: Environment, folder: Path, model: str, plan_options: str
) -> dict[str, Any]:
    """Returns the answer of a preflight of a published run, of which at most two ranks run.

    V100s have the identity of an H100: torch 2.13 for CUDA 13 has no kernels for them.
    """
    config = folder / "config.json"
    config.write_text(json.dumps(MODELS[model]))
    words = shlex.split(plan_options)
    values = {"--devices": "8", "--nodes": "1", "--gpu": "a100"}
    for name in values:
        if name in words:
            at = words.index(name)
            values[name] = words[at + 1]
            del words[at : at + 2]
    if "--accumulation" in words:  # more micro-steps than two take time, and no memory
        words[words.index("--accumulation") + 1] = "2"
    gpu, nodes = values["--gpu"], int(values["--nodes"])
    if gpu == "v100":
        gpu = f"{DEVICES[gpu].nbytes / GIB}GiB"
    elif gpu not in DEVICES:
        gpu += "GiB"
    options = ["--gpu", gpu, "--nodes", str(nodes), "--processes", "2", "--steps", "3"]
    ranks = int(values["--devices"]) // nodes
    launch = launch_words(environment.python, ranks, "figure.py", str(config), *words, "--steps", "9")
    answer: dict[str, Any] = run_preflight(folder, options, launch)["preflight"]
    return answer
