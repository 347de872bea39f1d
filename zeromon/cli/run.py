"""Runs a training command and watches every rank it starts.

The command replaces this process: same pid, same signals, same exit code, same terminal. Any launcher
works that passes its environment on: torchrun, python -m torch.distributed.run,
accelerate launch, deepspeed, srun, bash, or plain python.

Under a launcher that starts one copy of `zeromon run` per rank (srun zeromon run -- python train.py)
the ranks of a node find each other by Slurm job and step, or by MASTER_ADDR and MASTER_PORT. A
Slurm run is named JOB-SCRIPT or JOB.STEP-SCRIPT: `zeromon attach 4711` finds it.

environment:
  ZEROMON_PORT   port of the collector (default 9417, or the next free one)
  ZEROMON_DIR    live records (default /dev/shm/zeromon-UID, or temporary)
  ZEROMON_STORE  records of ended runs (default ~/.local/state/zeromon)
  ZEROMON_RUN    name of the run
  ZEROMON_NOTIFY URLs as for --notify, with commas or spaces between them
"""

import argparse
import errno
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from zeromon.base.errors import LaunchError, RingError
from zeromon.cli import tell_user
from zeromon.cli.parser import add_flag, add_list, add_option
from zeromon.probes import process
from zeromon.probes.process import ProcessWatch, own_package_folders
from zeromon.ring import paths, tokens
from zeromon.ring.files import replace_file
from zeromon.sources.live import collector_address

_LAUNCH_SECONDS = 10.0
_COLLECTOR_PATIENCE_SECONDS = 2.0
_TASKS = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""How many tasks a launcher starts on this node."""
_SHARED_BY_TASKS = ("MASTER_ADDR", "MASTER_PORT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon run [options] -- command ...``"""
    parser.add_argument("--name", help="name of the run (default: the script, the time)")
    parser.add_argument("--port", type=int, help="port of the collector (default 9417)")
    add_option(
        parser, "--sd-file", "FILE",
        "file to keep the list of all nodes' collectors in, for Prometheus's file_sd", Path,
    )  # fmt: skip
    add_option(parser, "--steps", "N", "steps that the run will take, for its progress", int, 0)
    add_list(
        parser, "--notify", "URL",
        "send an alert when a rank dies, stalls, is late or is about to run out of memory: "
        "slack://..., discord://..., ntfys://TOPIC, mailtos://..., https://HOST/HOOK; repeatable",
    )  # fmt: skip
    add_list(
        parser, "--track", "NAME",
        "send metrics of all nodes to the script's wandb, mlflow or tensorboard run "
        "(kubeflow: progress only); repeatable",
    )  # fmt: skip
    add_flag(parser, "--quiet", "do not print where to find the views")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")


def call(options: argparse.Namespace) -> int:
    """Prepares the environment and becomes the command."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LaunchError("no command to run")
    if options.port is not None and not 0 < options.port < 65536:
        raise LaunchError(f"{options.port} is not a port", "Ports are 1 to 65535.")
    _check_settings()
    name = _choose_run_id(options.name, command)
    targets = _alert_targets(options.notify)
    _check_trackers(options.track)
    if shutil.which(command[0]) is None:  # before a collector records a run that never begins
        return _refuse_command(command[0], errno.EACCES if Path(command[0]).exists() else errno.ENOENT)
    for warning in warnings_for_command(command):
        tell_user(warning)
    folder: Path | None = None
    try:
        folder, environment = _prepare_run(name, command, options, targets)
    except (RingError, OSError, subprocess.SubprocessError) as error:
        tell_user(f"this run is not watched: {error}")
        environment = dict(os.environ)
        # Unwatched or not, no rank may inherit the collector's token
        environment.pop(tokens.TOKEN, None)
    # exec drops what Python has buffered
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        if folder is not None:
            # Otherwise the collector waits for ranks of a run that never begins
            process.withdraw_task(folder)
            # Other tasks of the launcher share the folder, and their command may be there
            if not _is_one_of_many():
                secret = (folder / paths.NOTIFY, folder / tokens.NAME)
                for path in (*secret, *folder.glob(f"*{paths.TRACK}*")):
                    path.unlink(missing_ok=True)
                (folder / "run.json").unlink(missing_ok=True)
            # Other tasks, or the collector, still have files in it
            with suppress(OSError):
                folder.rmdir()
        return _refuse_command(command[0], error.errno or errno.EACCES)


def _refuse_command(name: str, error: int) -> int:
    """Says why *name* cannot run; returns the exit code that a shell has for it."""
    tell_user(f"cannot run {name}: {os.strerror(error)}")
    return 127 if error == errno.ENOENT else 126


def _check_settings() -> None:
    """Refuses settings that would fail where nobody sees it."""
    port = os.environ.get("ZEROMON_PORT", "1")
    if not (port.isdigit() and 0 < int(port) < 65536):
        raise LaunchError(f"ZEROMON_PORT={port} is not a port", "Ports are 1 to 65535.")
    host = os.environ.get("ZEROMON_HOST", "127.0.0.1")
    if not host.startswith("127.") and host != "localhost" and not tokens.job_token():
        raise LaunchError(
            f"ZEROMON_HOST={host} without a token", "Set ZEROMON_TOKEN, or listen on 127.0.0.1."
        )


def _alert_targets(urls: list[str]) -> Sequence[tuple[str, str]]:
    """Where alerts go; takes the variable out of the environment, which every rank would inherit."""
    inherited = os.environ.pop("ZEROMON_NOTIFY", "")
    if not urls and not inherited:
        return []
    from zeromon.collector.notify import parse_target, split_notify_urls

    urls = [*urls, *split_notify_urls(inherited)]
    return [parse_target(url) for url in dict.fromkeys(urls)]


def _check_trackers(names: list[str]) -> None:
    """Refuses what nothing could be sent to."""
    if names:
        from zeromon.export.trackers import TRACKERS, check_tracker

        for name in names:
            if name not in TRACKERS:
                raise LaunchError(f"{name!r} is no tracker", f"One of {', '.join(TRACKERS)}.")
            check_tracker(name)


_IN_BACKGROUND = """
import os, pathlib, sys
from zeromon.collector.collector_process import go_to_background
go_to_background()
os.nice(10)
from zeromon.cli.attach_track import track_in_background
track_in_background(sys.argv[1], pathlib.Path(sys.argv[2]))
"""


def _launch_in_background(arguments: list[str], environment: dict[str, str]) -> None:
    """Runs this Python with *arguments* until it has gone to the background; it inherits no terminal."""
    null = subprocess.DEVNULL
    subprocess.run(
        # In the user's folder, a random.py of theirs would shadow the standard library
        [sys.executable, *arguments], cwd="/", env=environment, stdin=null, stdout=null, stderr=null,
        timeout=_LAUNCH_SECONDS, check=False,
    )  # fmt: skip


def _without_shim(environment: dict[str, str], root: Path) -> dict[str, str]:
    """The environment of a process of zeromon's own beside the command."""
    own_environment = dict(environment, ZEROMON_DIR=str(root))
    core, agents = environment["ZEROMON_CORE"], environment["ZEROMON_AGENTS"]
    own_environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys((core, agents)))
    own_environment.pop("ZEROMON_SHIM")
    return own_environment


def _prepare_run(
    name: str, command: list[str], options: argparse.Namespace, targets: Sequence[tuple[str, str]]
) -> tuple[Path, dict[str, str]]:
    """The run's folder and the command's environment; starts the collector and says where."""
    root = paths.choose_ring_root()
    folder = _make_run_folder(root, name, is_named=bool(options.name))
    if targets:  # before the description, by which a collector knows a run
        replace_file(folder / paths.NOTIFY, json.dumps(targets))
    job = options.name or os.environ.get("ZEROMON_RUN", "")
    _write_description(folder, command, job=job, steps=options.steps)
    environment = child_environment(os.environ, folder)
    if options.port is not None:
        environment["ZEROMON_PORT"] = str(options.port)
    if options.sd_file is not None:
        environment["ZEROMON_SD_FILE"] = str(options.sd_file.absolute())
    address = start_collector(root, environment)
    # A process for each tracker, once for all tasks of a launcher
    own_environment = _without_shim(environment, folder.parent)
    # wandb and mlflow may be importable by the command's PYTHONPATH alone
    own_environment["PYTHONPATH"] += environment["PYTHONPATH"].removeprefix(str(paths.SHIM))
    for name in dict.fromkeys(options.track):
        with suppress(FileExistsError, subprocess.TimeoutExpired):
            # The task that creates the file starts the tracker; all others get FileExistsError
            (folder / f"{paths.TRACK}{name}").touch(0o600, exist_ok=False)
            _launch_in_background(["-c", _IN_BACKGROUND, name, str(folder)], own_environment)
    if not options.quiet:
        endpoint = f"http://{address}/metrics" if address else "the collector is still starting"
        tell_user(f"watching run {folder.name} ({endpoint}); look at it with: zeromon attach")
        port = environment.get("ZEROMON_PORT")
        if address and port and not address.endswith(f":{port}"):
            tell_user(f"  port {port} is taken, or another run's collector serves this node already")
        store = paths.record_store_root()
        if foreign := paths.foreign_reason(store, store / "runs"):
            tell_user(f"  its record is not kept: {foreign}; see ZEROMON_STORE")
        if not os.environ.get("ZEROMON_STORE") and paths.user_state_folder() is None:
            tell_user(f"  without a home folder its record goes to {store}; see ZEROMON_STORE")
    return folder, environment


def _is_one_of_many() -> bool:
    """Returns whether a launcher has started one `zeromon run` per rank."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


def _make_run_folder(root: Path, name: str, *, is_named: bool) -> Path:
    """A folder whose name no other run has, nor a record; the tasks of one launcher share theirs."""
    if _is_one_of_many():
        return paths.make_private_folder(root / name)
    if is_named and _is_run_live(root / name):
        raise LaunchError(f"a run named {name} is running", "Choose another --name.")
    for attempt in range(1, 1000):
        folder = root / (name if attempt == 1 else f"{name}-{attempt}")
        # A record keeps its name: this run's would be NAME-2, under which nobody would look for it
        if (paths.record_store_root() / "runs" / folder.name / "snapshot.json").exists():
            continue
        # mkdir decides: between a test and the creation, another run may take the name
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder
    raise LaunchError(f"a thousand runs are named {name}", "Choose another --name.")


def _choose_run_id(given_name: str | None, command: list[str]) -> str:
    name = given_name or os.environ.get("ZEROMON_RUN")
    if name:
        if not paths.is_run_id(name):
            raise LaunchError(
                f"{name!r} cannot name a run", "Use letters, digits, dots, dashes, underscores."
            )
        return name
    script = paths.script_name_of(command)
    # 4711.0: job and step of Slurm; 4711 outside of a step, "" outside of a job.
    numbers = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # Slurm's interactive step has the id 4294967290, which names nothing
    job = ".".join(number for number in numbers if number.isdigit() and len(number) < 10)
    if job:
        return f"{job}-{script}"
    if _is_one_of_many():
        key = "|".join(os.environ.get(variable, "") for variable in _SHARED_BY_TASKS)
        if key.strip("|"):
            return f"{script}-{zlib.crc32(key.encode()):08x}"
    return paths.new_run_id(command)


def _is_run_live(folder: Path) -> bool:
    """Returns whether *folder* is that of a live run with a launcher, which one of many tasks joins."""
    try:
        facts = json.loads((folder / "run.json").read_text())
        return ProcessWatch(int(facts["pid"]), facts["mono_ns"]).alive()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_description(folder: Path, command: list[str], *, job: str, steps: int) -> None:
    facts = {
        "run": folder.name, "command": command, "job": job, "steps": max(0, steps),
        "started": time.time(), "mono_ns": time.monotonic_ns(), "pid": os.getpid(),
    }  # fmt: skip
    if _is_one_of_many():  # the run ends with the last task
        del facts["pid"]
        facts["tasks"] = next((int(n) for n in map(os.environ.get, _TASKS) if n and n.isdigit()), 0)
        # The first task that lives writes run.json: a later one would move the start of the run
        if not process.announce_task(folder):
            return
    replace_file(folder / "run.json", json.dumps(facts))


def child_environment(environment: os._Environ[str], folder: Path) -> dict[str, str]:
    """The environment that makes every Python below the command load the shim first.

    The job's token is no part of it: it goes into *folder*. An empty entry of PYTHONPATH is the working
    directory, unless it is the only one.
    """
    child = dict(environment)
    shim = str(paths.SHIM)
    # A nested zeromon run inherits the shim, which must come once and first
    entries = os.pathsep.join(p for p in child.get("PYTHONPATH", "").split(os.pathsep) if p != shim)
    child["PYTHONPATH"] = f"{shim}{os.pathsep}{entries}" if entries else shim
    child["ZEROMON_SHIM"] = "1"
    child["ZEROMON_CORE"], child["ZEROMON_AGENTS"] = own_package_folders()
    child["ZEROMON_RUN_DIR"] = str(folder)
    child["ZEROMON_PYTHON"] = sys.executable
    tokens.hand_over_token(child, folder)
    return child


def start_collector(root: Path, environment: dict[str, str]) -> str | None:
    """Makes sure that a collector serves *root*; returns its address once it listens, or None.

    The command waits for it, but not long: where it does not come, the agents start it again.
    """
    with suppress(subprocess.TimeoutExpired):
        _launch_in_background(["-m", "zeromon.collector", "--daemon"], _without_shim(environment, root))
    deadline = time.monotonic() + _COLLECTOR_PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if (address := collector_address(root)) is not None:
            return address
        time.sleep(0.02)
    return None


def warnings_for_command(command: list[str]) -> list[str]:
    """Warnings, before the launch, about anything in *command* that is known to keep the agents out."""
    names = [Path(arg).name for arg in command]
    warnings = []
    if "opentelemetry-instrument" in names:
        warnings.append(
            "opentelemetry-instrument replaces sitecustomize and keeps zeromon out; put it first:"
            " opentelemetry-instrument zeromon run -- ..."
        )
    # Behind the script, -E and -S are options of the script
    script = next((i for i, arg in enumerate(command) if arg.endswith(".py")), len(command))
    if {"-I", "-E", "-S"} & set(command[1:script]) and names[0].startswith("python"):
        warnings.append("python -I, -E and -S ignore sitecustomize: this process is not watched")
    return warnings
