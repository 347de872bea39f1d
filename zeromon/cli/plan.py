r"""Predicts memory and step time: what fits under which ZeRO stage, or what a change would do.

MODEL is a number of parameters (7B, 350M), a Hugging Face config.json (or its folder), or a Python
entry module:factory. zeromon builds the model of both on the meta device and counts it exactly: a
config.json needs transformers. --config takes a DeepSpeed JSON or an accelerate YAML. --from RUN takes
a live or recorded run instead, whose speeds calibrate the prediction.

Every stage on these devices, with a recommendation:

  zeromon plan 7B --devices 4 --gpu a100-40
  zeromon plan config.json --devices 8 --gpu h100 --micro-batch 4 --length 4096
  zeromon plan config.json --config ds_z3.json --devices 8 --gpu 80GiB
  zeromon plan mymodel:build --devices 8 --trace --micro-batch 2 --length 2048
  zeromon plan --from RUN --devices 16 --micro-batch 8

Changes, each as a row beside what is there (step, exposed time, memory, throughput):

  zeromon plan --from RUN --changes                           the usual changes, one by one
  zeromon plan --from RUN --set stage=3                       one change
  zeromon plan --from RUN --set link=2 --set straggler=median          two together
  zeromon plan --from RUN --sweep stage=0,1,2,3 --sweep micro-batch=1,2,4,8
  zeromon plan config.json --devices 64 --nodes 8 --gpu h100 --interconnect 8x400Gb \
      --micro-batch 1 --length 4096 --sweep stage=1,2,3 --sweep checkpointing=no,yes

NAME is an option of machine, speeds, strategy or batch without its dashes; a flag takes yes or no. *
marks the Pareto-optimal points of memory and time per sample. Differences carry the
calibration's error interval. Ctrl-C prints the rows finished so far.

Exit codes: 0 a stage fits, 1 none fits. With --changes, --set or --sweep: 0, or 2 if nothing
can be predicted.
"""

import argparse
import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

from zeromon.base.errors import PlanError
from zeromon.cli import tell_user
from zeromon.cli.parser import add_flag, add_list
from zeromon.cli.plan_output import changes_as_json, changes_as_text, plan_as_json, plan_as_text
from zeromon.cli.plan_setup import add_setup_arguments, setup_from_model, setup_of_run
from zeromon.cli.terminal import output_columns, show_json, show_text, show_working
from zeromon.export.files import Progress
from zeromon.memory import plan
from zeromon.memory.plan import Point, Work, point_of, work_of
from zeromon.memory.reconcile import micro_batch_of_rank
from zeromon.memory.speeds import DEVICES, find_named_device
from zeromon.readout.throughput import (
    device_peak,
    flops_per_token,
    samples_per_step as samples_of_step,
    tokens_per_step,
)
from zeromon.snapshot import RunSnapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon plan MODEL | --from RUN [--changes] [--set NAME=VALUE] [...]``"""
    add_setup_arguments(parser)
    add_change_arguments(parser)
    add_flag(parser, "--fewest", "also the fewest devices on which a strategy fits")
    add_flag(parser, "--json", "print JSON")


def call(options: argparse.Namespace) -> int:
    """Reads, computes, prints."""
    from zeromon.cli.report import snapshot_of  # it reads collectors, which a model does not need

    run = snapshot_of(options.run)[0] if options.run else None
    if options.changes or options.set or options.sweep:
        return print_changes(options, run)
    with show_working("computing"):
        setup = setup_of_run(run, options) if run is not None else setup_from_model(options)
        rows = plan.plan_table(setup)
        content = plan_as_json(setup, rows, fewest=options.fewest)
    if options.json:
        show_json(content)
    else:
        show_text(plan_as_text(setup, rows, fewest=options.fewest))
    return 1 if content["recommended"] is None else 0


# ---- predicts changes of what ``zeromon plan`` describes: the usual ones, those of --set and --swee

_NOT_SET = (
    "model", "run", "config", "trace", "reference", "rollout", "help", "changes", "set", "sweep",
    "fewest", "json",
)  # fmt: skip
"""Options that describe what is there or what is asked, and no change of a setup."""

_MAX_POINTS = 1_000_000

USUAL: tuple[dict[str, str], ...] = (
    {"stage": "0"}, {"stage": "1"}, {"stage": "2"}, {"stage": "3"}, {"micro-batch": "x2"},
    {"accumulation": "x2"}, {"checkpointing": "yes"}, {"precision": "mixed"},
    {"offload-optimizer": "host"}, {"link": "2"}, {"straggler": "median"},
)  # fmt: skip
"""The changes of --changes; ``x2`` is twice what is there."""

Change = dict[str, str]


def add_change_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name changes."""
    change = parser.add_argument_group("changes")
    add_flag(change, "--changes", "a row for each of the usual changes")
    add_list(change, "--set", "NAME=VALUE", "a change; several are made together")
    add_list(change, "--sweep", "NAME=VALUE,...", "a row for each value; several: for each combination")
    parser.set_defaults(setup_parser=parser)


def print_changes(options: argparse.Namespace, run: RunSnapshot | None) -> int:
    """Predicts and prints what is there and every change; returns the exit code."""
    base, points, point_count = predict_points(options, run, _MAX_POINTS)
    if run is not None and all(point.time is None for point in (base, *points)):
        raise PlanError(
            f"the step of {run.run} cannot be predicted without {base.unknown}",
            hint="The run needs steps with timed forward and backward, or give what is missing.",
        )
    if options.json:
        show_json(changes_as_json(base, points, of=point_count))
    else:
        table = changes_as_text(base, points, width=output_columns())
        show_text(table + _fit_command(options, run))
    if len(points) < point_count:
        tell_user(f"interrupted: {len(points)} of {point_count} points")
    return 0 if any(point.time is not None for point in (base, *points)) else 2


def _fit_command(options: argparse.Namespace, run: RunSnapshot | None) -> str:
    """A line with the ``zeromon fit`` that launches what was swept; "" without a stage or devices."""
    swept = [(name, v) for name, v in map(_split_setting, options.sweep) if name in ("stage", "devices")]
    device = run.ranks[0].machine.device if run is not None else None
    peaks = find_named_device(device.name) if device is not None else None
    gpu = options.gpu or next((name for name in DEVICES if DEVICES[name] is peaks), "")
    if not swept or not gpu or "," in gpu or (options.nodes or 1) > 1:
        return ""
    values = " and ".join(f"{{{name}}}" for name, _ in swept)
    flags = " ".join(f"--{name.removesuffix('s')}s {counts}" for name, counts in swept)
    command = shlex.join(run.command) if run is not None and run.command else "COMMAND"
    head = f"to launch them without a GPU, with {values} in the command:"
    return f"{head}\n  zeromon fit --gpu {gpu} {flags} -- {command}\n"


def changes_of_run(run: RunSnapshot, changes: Sequence[str], limit: int) -> dict[str, Any]:
    """Returns what ``--json`` prints for *run*; see :func:`predict_run_points`."""
    base, points, point_count = predict_run_points(run, changes, limit)
    return changes_as_json(base, points, of=point_count)


def predict_run_points(
    run: RunSnapshot, changes: Sequence[str], limit: int
) -> tuple[Point, list[Point], int]:
    """Predicts *run* with ``--sweep`` of each of *changes*; without any, the usual changes.

    Raises :class:`PlanError`, also for more than *limit* points.
    """
    parser = argparse.ArgumentParser()
    add_setup_arguments(parser)
    add_change_arguments(parser)
    options = parser.parse_args(["--from", run.run])
    options.sweep, options.changes = list(changes), not changes
    return predict_points(options, run, limit)


def predict_points(
    options: argparse.Namespace, run: RunSnapshot | None, limit: int
) -> tuple[Point, list[Point], int]:
    """Returns the point as it is, the changed ones that are done, and how many were asked for."""
    setup_of, work = setup_source(options, run)
    base = _new_point({}, options, setup_of, work)
    if base.setup is None:
        raise PlanError(base.error)
    # A few sweeps have billions of combinations: none beyond the limit is made
    changes = list(itertools.islice(changes_of(options, base.setup, work.micro_batch), limit + 1))
    if len(changes) > limit:
        raise PlanError(f"more than {limit:,} points", hint="Sweep fewer settings at once.")
    points: list[Point] = []
    progress = Progress(len(changes), "points")
    try:
        for change in changes:
            points.append(_new_point(change, options, setup_of, work))
            progress.add(1)
    except KeyboardInterrupt:
        pass  # what is done counts
    finally:
        progress.end()
    return base, points, len(changes)


# ---- what there is --------------------------------------------------------------------------------

SetupOf = Callable[[argparse.Namespace], plan.Setup]


def setup_source(options: argparse.Namespace, run: RunSnapshot | None) -> tuple[SetupOf, Work]:
    """How options become a setup, of a run or a model; and the work of a sample."""
    if run is None:
        return setup_from_model, work_of(setup_from_model(options))
    base = plan.of_run(run)
    # A micro-batch of unknown size counts as one sample
    rank = next(rank for rank in run.ranks if rank.config.models)
    size = micro_batch_of_rank(rank) or 1
    micro_batches = base.plan.ranks * base.plan.accumulation
    samples, tokens, flops = samples_of_step(run), tokens_per_step(run), flops_per_token(run)
    count = samples if isinstance(samples, float) else float(micro_batches * size)
    per_sample = tokens / count if isinstance(tokens, float) else None
    device = find_named_device(options.gpu or "")
    peak = device_peak(rank)
    if device is not None:
        peak = device.flops(base.plan.precision.compute_bytes)
    return lambda changed: setup_of_run(run, changed, base), Work(
        tokens=per_sample,
        flops=per_sample * flops if per_sample is not None and isinstance(flops, float) else None,
        peak=peak if isinstance(peak, float) else None,
        micro_batch=max(1, round(count / micro_batches)),
    )


# ---- changes --------------------------------------------------------------------------------------


def changes_of(options: argparse.Namespace, base: plan.Setup, micro: int) -> Iterator[Change]:
    """Yields each combination of what the sweeps and --changes vary, with all that is set."""
    together = dict(map(_split_setting, options.set))
    axes = [
        [{name: value} for value in values.split(",")]
        for name, values in map(_split_setting, options.sweep)
    ]
    if options.changes:
        axes.append(list(_usual_changes(base, micro)))
    for changes in itertools.product(*axes):
        yield reduce(or_, changes, together)


def _split_setting(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not equals or not value:
        raise PlanError(f"{setting!r} sets nothing", hint="Like --set stage=3.")
    return name.strip().replace("_", "-"), value.strip()


def _usual_changes(base: plan.Setup, micro: int) -> Iterator[Change]:
    """Yields the usual changes that differ from what is there; *micro*: the samples of a micro-step."""
    p = base.plan
    current = {
        "stage": str(int(p.stage)),
        "precision": "mixed" if p.precision.compute_bytes < 4 else "",
        "offload-optimizer": p.optimizer_on,
        "checkpointing": "yes" if base.batch is not None and base.batch.checkpointing else "",
    }
    late = base.measured is not None and base.measured.late_seconds > 0
    for change in USUAL:
        ((name, value),) = change.items()
        if current.get(name) == value or (name == "straggler" and not late):
            continue
        if p.framework != "deepspeed" and change == {"stage": "1"}:
            continue  # torch has no wrapper for it
        if value == "x2":
            value = str(2 * (micro if name == "micro-batch" else p.accumulation))
        yield {name: value}


def _new_point(change: Change, options: argparse.Namespace, setup_of: SetupOf, work: Work) -> Point:
    # A copy: setup_from_model fills in --gpu, and each change starts from what was typed
    changed = argparse.Namespace(**vars(options))
    for name, value in change.items():
        # As the command line would set it
        dest = name.replace("-", "_")
        actions: Iterable[argparse.Action] = changed.setup_parser._actions
        action = next((a for a in actions if a.dest == dest and dest not in _NOT_SET), None)
        if action is None:
            settable = (a.dest for a in actions if a.option_strings and a.dest not in _NOT_SET)
            names = ", ".join(sorted(option.replace("_", "-") for option in settable))
            raise PlanError(f"{name!r} is no setting", hint=f"There are {names}.")
        setattr(changed, dest, _option_value(action, name, value))
    try:
        return point_of(change, setup_of(changed), work, changed.micro_batch or 0)
    except PlanError as error:
        return Point(change=change, setup=None, row=None, error=str(error))


def _option_value(action: argparse.Action, name: str, typed: str) -> Any:
    if action.nargs == 0:  # a switch
        if typed not in ("yes", "no"):
            raise PlanError(f"{name} is yes or no, not {typed!r}")
        return typed == "yes"
    convert: Any = action.type or str
    try:
        value = convert(typed)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise PlanError(f"{name}={typed}: {error}") from error
    if action.choices is not None and value not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise PlanError(f"{name} is one of {choices}, not {typed!r}")
    return value
