"""Runs a training command on virtual GPUs, before it costs a GPU hour: does it start, does it fit?

  zeromon preflight --gpu h100 -- torchrun --nproc-per-node 8 train.py
  zeromon preflight --gpu a100-40 --nodes 2 --network 200Gb -- accelerate launch train.py
  zeromon preflight --gpu 24GiB --steps 4 --json -- deepspeed train.py --deepspeed_config ds.json

The script is unchanged and runs with its own torch, which must be a CUDA build, on libraries that stand
in for NVIDIA's. Real: the script, the framework, the caching allocator, the order of kernels and
collectives, the data loader. Modelled: how long kernels and collectives take, and the memory of the
devices, which takes host memory only where something is written. Kernels compute nothing, so losses and
other values that the device computes mean nothing.

The run ends after --steps steps, when it hangs, or when it fails. It takes real steps: point checkpoints
and trackers elsewhere. What it was stays as a run: zeromon report NAME. The libraries are built once, in
half a minute, by this machine's g++.

Exit code 0 where it fits and nothing is found; 1 where it does not, hangs or fails, or has findings; 2
where it cannot run.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from zeromon.base.errors import LaunchError, ZeromonError
from zeromon.cli import tell_user
from zeromon.cli.measured_launch import Request, lasting_hang, run_launch
from zeromon.cli.parser import add_flag, add_option, positive
from zeromon.cli.report import snapshot_of, snapshot_or_none
from zeromon.cli.terminal import show_json, show_progress, show_text
from zeromon.cli.virtual_machine import (
    RankRings,
    VirtualMachine,
    add_machine_arguments,
    placed_launch,
    virtual_machine,
)
from zeromon.diagnosis.engine import BY_SEVERITY, advise
from zeromon.memory.fit import Trial
from zeromon.readout.figures import STEP
from zeromon.readout.preflight import Preflight, preflight_result, preflight_text
from zeromon.ring import paths
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.storage.run_store import Store
from zeromon.storage.snapshot_log import replace_record

_STEPS, _SECONDS = 6, 300
_DATA_PARALLEL_HINT = "; DataParallel cannot run here: use CUDA_VISIBLE_DEVICES=0, or torchrun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon preflight [options] -- command ...``"""
    add_machine_arguments(parser.add_argument_group("the machine that is modelled"), "h100")
    add_option(
        parser, "--calibrate", "RUN",
        "kernels and links as slow as in a run on such GPUs, whose command is run first",
    )  # fmt: skip
    length = parser.add_argument_group("how long")
    add_option(length, "--steps", "N", "optimizer steps", positive, _STEPS)
    add_option(length, "--seconds", "N", "at most so long", positive, _SECONDS)
    parser.add_argument("--name", help="name of the run (default: preflight, the script, the time)")
    add_option(parser, "-o --output", "FILE", "keep what the command prints", Path)
    add_flag(parser, "--json", "print JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")


def call(options: argparse.Namespace) -> int:
    """Launches the command on virtual devices, and says what became of it."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LaunchError("no command to run", "zeromon preflight -- torchrun ... train.py")
    # As `zeromon run` does: an earlier record of that name stays
    name = Store().free_name(options.name or f"preflight-{paths.new_run_id(command)}", 0.0)
    measured = snapshot_of(options.calibrate)[0] if options.calibrate else None
    with virtual_machine(command, options, name) as machine:
        if measured is not None:
            machine.check_calibrating(measured)
            tell_user(f"first the command of {measured.run}, to compare its steps")
            nodes = len(measured.nodes) if len(measured.nodes) > 1 else None
            modelled = _launch_on_machine(measured.command, options, f"model-of-{name}", machine, nodes)
            if modelled.run is None:
                raise LaunchError(f"the command of {measured.run} did not train", modelled.error)
            machine = machine.calibrated_by(measured, modelled.run)
        launched = _launch_on_machine(command, options, name, machine, options.nodes)
        return _show_answer(launched, command, options, machine)


@dataclass(frozen=True, slots=True)
class _Launched:
    """One launch on the virtual machine, and what its command printed."""

    run: RunSnapshot | None
    ranks: tuple[int, ...]
    outcome: str
    error: str
    output: str
    rings: RankRings


def _launch_on_machine(
    command: Sequence[str],
    options: argparse.Namespace,
    name: str,
    machine: VirtualMachine,
    nodes: int | None,
) -> _Launched:
    launch = placed_launch(command, nodes, options.processes, machine.environment)
    rings = RankRings(machine.folder / "live")
    request = Request(
        trial=Trial(stage="", micro_batch=1), command=launch.command,
        environment=launch.environment, name=name, ranks=len(launch.ranks),
        log=options.output or machine.folder / "output", steps=options.steps,
        most_seconds=options.seconds, stop_reason=partial(_reason_to_stop, rings),
    )  # fmt: skip
    tell_user(f"to look at it meanwhile: ZEROMON_DIR={machine.folder / 'live'} zeromon attach")
    outcome, error = "", ""
    try:
        outcome = run_launch(request, lambda message: show_progress(f"  {message}")).outcome
    except LaunchError as failure:
        error = str(failure)
    show_progress("")
    output = request.log.read_text(errors="replace")
    return _Launched(snapshot_or_none(name), launch.ranks, outcome, error, output, rings)


def _show_answer(
    launched: _Launched, command: Sequence[str], options: argparse.Namespace, machine: VirtualMachine
) -> int:
    run, outcome, error = launched.run, launched.outcome, launched.error
    if run is None or not run.ranks:
        if "/data_parallel.py" in launched.output:
            error += _DATA_PARALLEL_HINT
        without_ranks = Preflight(
            device=machine.device, world_size=0, representatives=(), fits=None, steps=0,
            outcome=outcome or error,
        )  # fmt: skip
        if options.json:
            show_json({"preflight": without_ranks, "run": None})
        else:
            show_text(f"Preflight of {' '.join(command)}\n  ended     {without_ranks.outcome}\n")
            sys.stderr.write(launched.output[-2000:])
        return 1
    steps = machine.steps_of_ranks(run)
    on_host = max((STEP.of_rank(rank) or 0.0 for rank in run.ranks), default=0.0)
    run, waits = machine.on_its_clock(run, launched.rings)
    run = _judged_run(run, has_steps=not outcome and not error)
    try:
        replace_record(Store(), run)
    except (OSError, ZeromonError) as failure:
        tell_user(f"the record of {run.run} could not be replaced: {failure}")
    result = preflight_result(
        run, machine.device, launched.ranks, outcome or error, options.steps, steps, waits,
        on_host or None, machine.operator_seconds,
    )  # fmt: skip
    if options.json:
        show_json({"preflight": result, "run": run})
    else:
        show_text(preflight_text(run, result))
        if error and not any(rank.status.exception for rank in run.ranks):
            sys.stderr.write("\n".join(launched.output.strip().splitlines()[-12:]) + "\n")
    return 1 if launched.outcome or error or result.findings or result.growth_bytes else 0


# ---- what became of it --------------------------------------------------------------------------


def _judged_run(run: RunSnapshot, *, has_steps: bool) -> RunSnapshot:
    """Returns *run* with findings on the times of its devices. *has_steps*: for which it was ended."""
    if has_steps:
        ranks = (
            rank.with_status(ended="finished", failed=False, exception="").with_communication(
                in_flight=()
            )
            for rank in run.ranks
        )
        run = replace(run, ranks=tuple(ranks))
    earlier = (finding for finding in run.findings if not _depends_on_times(finding))
    findings = chain(earlier, filter(_depends_on_times, advise(run)))
    return replace(run, findings=tuple(sorted(findings, key=BY_SEVERITY)))


def _depends_on_times(finding: Finding) -> bool:
    # or on how ranks ended, which is another matter for those that were ended for having all steps
    return finding.share is not None or finding.rule == "rank_died"


def _reason_to_stop(rings: RankRings, run: RunSnapshot) -> str:
    rings.open_new()
    return lasting_hang(run)
