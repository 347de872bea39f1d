"""Loads the agent into running processes, and removes it again.

The loader writes a script into a private folder beside the runs; the script writes its answer there.
The injected line claims the script by renaming it: the script runs at most once, and never after the
loader has withdrawn it.
"""

import ast
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromon.attach import inject
from zeromon.attach.inject.parked import waits_for_interpreter
from zeromon.attach.inject.refusal import check_attachable
from zeromon.attach.rank_processes import Process
from zeromon.base.errors import AttachRefused, ZeromonError
from zeromon.probes.process import ProcessWatch, own_package_folders
from zeromon.ring import paths
from zeromon.ring.buffer import RingReader
from zeromon.ring.files import read_json_object, replace_file, try_lock_file
from zeromon.ring.ring_file import ipc_namespace_number
from zeromon.ring.tokens import NAME, hand_over_token

_BEGIN_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_STALE_SECONDS = 3600.0
_MAX_AT_ONCE = 16
# BaseException: for a SystemExit, PyRun_SimpleString ends the whole process
_LINE = """try:
 import os
 os.rename({script!r},{taken!r})
 f=open({taken!r})
 t=f.read()
 f.close()
 exec(compile(t,'zeromon',"exec"),{{'__name__':'zeromon_inject'}})
except BaseException:
 pass"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an attach or detach for one process."""

    pid: int
    rank: int | None
    refused: str = ""
    """Why the attach or detach failed; empty after success."""
    hint: str = ""
    watched: str = ""
    """The run that the process already belongs to."""
    kept: tuple[str, ...] = ()
    """Names that another tool has patched since, after a detach."""
    how: str = ""
    stopped_ns: int = 0
    """How long one of its threads was stopped."""
    seconds: float = 0.0
    """Time from the first read of the process to its answer."""


def attach_ranks(ranks: Sequence[Process], root: Path) -> tuple[Path, list[Outcome]]:
    """Loads the agent into *ranks* of one job; returns the run's folder, and a result for each rank."""
    folder = run_folder(ranks, root)
    existing = set(folder.parent.glob(folder.name))
    paths.make_private_folder(folder)
    _write_description(folder, ranks[0])
    settings = {k: v for k, v in os.environ.items() if k.startswith("ZEROMON_")}
    settings["ZEROMON_PYTHON"] = sys.executable
    settings["ZEROMON_RUN_DIR"] = str(folder)
    hand_over_token(settings, folder)
    sole = len(ranks) == 1 and ranks[0].rank is None

    def attach_rank(rank: Process) -> Outcome:
        arguments = {
            "run_dir": str(folder),
            "pid": rank.pid,
            "ipc": ipc_namespace_number(),
            "settings": settings,
            "any_process": sole or rank.world_size == 1,
        }
        return _call_payload(rank, root, {"leave": False, "attach": arguments})

    with ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
        outcomes = list(pool.map(attach_rank, ranks))
    # No rank has the agent: the collector would follow the empty folder as a run
    if not existing and not list(folder.glob("rank*.ring")):
        for name in ("run.json", NAME):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()
    return folder, outcomes


def detach_ranks(ranks: Sequence[Process], root: Path) -> list[Outcome]:
    """Removes the agent from *ranks*."""
    with ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
        return list(pool.map(lambda rank: _call_payload(rank, root, {"leave": True}), ranks))


def run_folder(ranks: Sequence[Process], root: Path) -> Path:
    """The folder of the job's other ranks, or of an earlier attach to these; else a new folder."""
    pids, job = {rank.pid for rank in ranks}, ranks[0].job
    for folder in root.glob("*/"):
        if paths.is_run_id(folder.name):
            alive = [header.pid for header in _live_ring_headers(folder)]
            if pids.intersection(alive) or (
                alive and read_json_object(folder / "run.json").get("job") == job
            ):
                return folder
    return root / paths.new_run_id(list(ranks[0].command[1:]))


def _live_ring_headers(folder: Path) -> Iterator[Any]:
    for path in folder.glob("rank*.ring"):
        with suppress(ZeromonError, OSError, ValueError):
            reader = RingReader(path)
            header = reader.header
            reader.close()
            if ProcessWatch(header.pid, header.mono_ns).alive():
                yield header


def _write_description(folder: Path, rank: Process) -> None:
    """Writes ``run.json``, unless the run has one."""
    if (folder / "run.json").exists():
        return
    facts = {
        "run": folder.name,
        "command": list(rank.command[:50]),
        "started": time.time(),
        "mono_ns": time.monotonic_ns(),
        "job": rank.job,
    }
    replace_file(folder / "run.json", json.dumps(facts))


# ---- one process ----------------------------------------------------------------------------------


def _call_payload(rank: Process, root: Path, arguments: Mapping[str, Any]) -> Outcome:
    started = time.monotonic()
    try:
        injected, facts = _run_payload_in(rank.pid, root, arguments)
    except ZeromonError as error:
        return Outcome(rank.pid, rank.rank, refused=str(error), hint=error.hint)
    except OSError as error:
        return Outcome(rank.pid, rank.rank, refused=f"{error.strerror}: {error.filename}")
    return Outcome(
        rank.pid,
        facts.get("rank", rank.rank),
        refused=f"process {rank.pid}: {facts['refused']}" if facts.get("refused") else "",
        hint=str(facts.get("hint", "")),
        watched=str(facts.get("watched", "")),
        kept=tuple(facts.get("kept", ())),
        how=injected.how,
        stopped_ns=injected.stopped_ns,
        seconds=time.monotonic() - started,
    )


def _run_payload_in(
    pid: int, root: Path, arguments: Mapping[str, Any]
) -> tuple[inject.Injected, dict[str, Any]]:
    """Runs the payload in *pid* and returns its answer."""
    check_attachable(pid)
    packages = list(zip(("zeromon", "zeromon_agents"), own_package_folders(), strict=True))
    for folder in (root, *(Path(folder) for _, folder in packages)):
        _check_folder_visible(pid, folder)
    desk = paths.make_private_folder(root / ".attach")
    _remove_stale_files(desk)
    stem = desk / f"{pid}.{secrets.token_hex(3)}"
    script, claimed, answer = (stem.with_suffix(s) for s in (".py", ".taken", ".answer"))
    watch = ProcessWatch(pid)
    with _locked_process(desk / f"{pid}.lock", pid):
        facts = {**arguments, "packages": packages, "answer": str(answer)}
        payload = paths.SHIM / "zeromon_payload.py"
        script.write_text(f"ARGUMENTS = {facts!r}\n{payload.read_text()}")
        code = f"exec({_LINE.format(script=str(script), taken=str(claimed))!r},{{}})"
        try:
            injected = inject.inject_line(pid, code, lambda: not script.exists())
            _wait_for_answer(pid, watch, script, answer)
            # Not JSON: the payload must not import a module that the target has not imported
            return injected, ast.literal_eval(answer.read_text())
        finally:
            for path in (script, claimed, answer):
                path.unlink(missing_ok=True)


def _wait_for_answer(pid: int, watch: ProcessWatch, script: Path, answer: Path) -> None:
    """Waits for the answer; withdraws a script that was not claimed in time."""
    started = time.monotonic()
    while not answer.exists():
        waited = time.monotonic() - started
        if not watch.alive():
            raise AttachRefused(f"process {pid} ended during the attach")
        if waited > _BEGIN_SECONDS:
            try:
                script.unlink()
            except FileNotFoundError:
                if waited < _ANSWER_SECONDS:
                    time.sleep(0.01)
                    continue
                raise AttachRefused(f"process {pid} has begun the attach and does not answer") from None
            held = waits_for_interpreter(pid)
            reason = "holds the interpreter's lock in C code" if held else "did not execute the request"
            raise AttachRefused(
                f"process {pid} {reason}; the request was withdrawn after {waited:.0f} s",
                f"Its stacks can be read from outside: py-spy dump --native --pid {pid}",
            )
        time.sleep(0.002)


def _check_folder_visible(pid: int, folder: Path) -> None:
    """Raises AttachRefused unless the process has the same files as this one."""
    ours = folder.stat()
    try:
        theirs = Path(f"/proc/{pid}/root{folder}").stat()
    except PermissionError:
        return  # the injection reports what is missing
    except OSError:
        theirs = None
    if theirs is None or (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
        raise AttachRefused(
            f"process {pid} is in a container without access to {folder}",
            "Attach from within: docker exec -it CONTAINER zeromon attach --all"
            " (the container needs --cap-add=SYS_PTRACE where Yama asks for it)",
        )


@contextmanager
def _locked_process(lock: Path, pid: int) -> Iterator[None]:
    """Locks a process: only one attach at a time."""
    fd = try_lock_file(lock)
    if fd is None:
        raise AttachRefused(f"another zeromon is at process {pid}", "Let it finish.")
    try:
        yield
    finally:
        # Before the lock is released: else one attach locks this file, and the next one a new file
        lock.unlink(missing_ok=True)
        os.close(fd)


def _remove_stale_files(desk: Path) -> None:
    """Removes the files of an attach that was killed."""
    for path in desk.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
