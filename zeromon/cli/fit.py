r"""Finds the largest micro-batch, the best stage or the fewest devices of a training command.

Write {micro_batch} where the command has its micro-batch. zeromon launches the command at small sizes,
measures the peak of host and device memory, computes what fits, and launches that to prove it. A launch
that would run out of memory is stopped before it does. The script stays unchanged.

  zeromon fit -- torchrun --nproc-per-node 2 train.py --batch {micro_batch}
  zeromon fit --stages ddp,fsdp2 -- torchrun ... train.py --strategy {stage} --batch {micro_batch}
  zeromon fit --config ds.json --stages 0,1,2,3 -- deepspeed train.py --deepspeed_config ds.json
  zeromon fit --env BATCH={micro_batch} -- accelerate launch train.py
  zeromon fit --gpu h100 -- torchrun --nproc-per-node 8 train.py --batch {micro_batch}
  zeromon fit --global-batch 64 --ranks 2 -- torchrun ... --batch {micro_batch} --accum {accumulation}

With --config, each launch uses a copy of the file with the values filled in: a DeepSpeed JSON (which has
train_micro_batch_size_per_gpu, else write {micro_batch} in the command), or an accelerate YAML.

With --gpu, each launch runs on virtual devices, without a GPU, as zeromon preflight --help explains.

Without {micro_batch}, or where --min and --max are equal, the batch stays as it is. zeromon then finds
the cheapest stage that fits, as `zeromon plan` ranks them: the one that communicates least. {devices}
needs --gpu: zeromon finds the fewest that fit by bisection, under the stage that needs least memory.

  zeromon fit --gpu 24GiB --stages ddp,fsdp2 -- torchrun ... train.py --strategy {stage}
  zeromon fit --gpu 24GiB --devices 1,2,4,8 -- deepspeed --num_gpus {devices} train.py

Each launch takes real training steps: point checkpoints elsewhere. The first launches are of the stage
that needs the least memory; the arithmetic of `zeromon plan` predicts the others from it, and the table
says which figures are measured. Ctrl-C keeps what is done, and the same command continues; --again
begins again. Results: a table of stages, a recommendation with its reason, and in --output the files.

Exit code 0 with a recommendation; 1 where no size fits; 2 where the command fails or says nothing.
"""

import argparse
import hashlib
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from zeromon.base.errors import LaunchError, PlanError
from zeromon.base.units import human_bytes, human_count
from zeromon.cli import tell_user
from zeromon.cli.measured_launch import Request, lasting_hang, run_launch
from zeromon.cli.parser import add_flag, add_list, add_option, positive
from zeromon.cli.plan_setup import read_config_file
from zeromon.cli.report import snapshot_or_none
from zeromon.cli.terminal import show_progress, show_text
from zeromon.cli.virtual_machine import (
    VirtualMachine,
    add_machine_arguments,
    placed_launch,
    virtual_machine,
)
from zeromon.memory import fit
from zeromon.memory.plan import Row, Setup, of_run
from zeromon.memory.reconcile import micro_batch_of_rank
from zeromon.probes.host import HostReader
from zeromon.readout.figures import BYTES, SECONDS
from zeromon.readout.preflight import Two
from zeromon.readout.tables import Column, aligned_table, text_table
from zeromon.ring import paths
from zeromon.ring.files import replace_file
from zeromon.snapshot import RunSnapshot

FIELDS = ("micro_batch", "stage", "accumulation")
_DEVICE_COUNTS = (1, 2, 4, 8)
_MAX_SIZE = 1024
_SPARE_SHARE = 0.2
"""Share of the free host memory that launches without --max leave: the machine may have other users."""
Values = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The user's command with its places for values."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    config: Path | None = None
    """A DeepSpeed JSON or an accelerate YAML that the command names."""

    def has_place(self, field: str) -> bool:
        """Returns whether *field* has a place in the command, in a variable, or in the configuration."""
        if self.has_word(field):
            return True
        return self.config is not None and field in _settable_fields(read_config_file(self.config))

    def has_word(self, field: str) -> bool:
        """Returns whether *field* stands in the command or in a variable."""
        arguments = (*self.command, *self.environment.values())
        return any(f"{{{field}}}" in argument for argument in arguments)

    def filled(self, values: Values, folder: Path) -> tuple[list[str], dict[str, str], dict[Path, str]]:
        """Returns command, variables, and the files that they need, by their paths in *folder*."""
        arguments = [_fill_in(argument, values) for argument in self.command]
        environment = {name: _fill_in(setting, values) for name, setting in self.environment.items()}
        if self.config is None:
            return arguments, environment, {}
        copy_path, files = _rewrite_config(self.config, values, folder)
        name = str(self.config)
        replaced = [
            str(copy_path) if argument == name
            else argument.removesuffix(name) + str(copy_path) if argument.endswith("=" + name)
            else argument
            for argument in arguments
        ]  # fmt: skip
        if replaced == arguments:
            raise LaunchError(
                f"the command does not name {name}", "Give --config the path as the command has it."
            )
        return replaced, environment, files


def make_template(command: Sequence[str], variables: Sequence[str], config: str | None) -> Template:
    """Returns the template; raises :class:`LaunchError` for a variable without a value."""
    environment = {}
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not equals or not name:
            raise LaunchError(f"{variable!r} sets no variable", "Like --env BATCH={micro_batch}.")
        environment[name] = value
    return Template(
        command=tuple(command), environment=environment, config=Path(config) if config else None
    )


def _check_places(template: Template, options: argparse.Namespace) -> None:
    """Raises :class:`LaunchError` where values have no place in the command, or a place no values."""
    of_devices, nowhere = template.has_word("devices"), "nothing in the command says where the"
    problems = (
        (options.stages and not template.has_place("stage"), f"{nowhere} stage goes",
         "Write {stage} in its place."),
        (template.has_word("stage") and not options.stages, "{stage} has no values",
         "Like --stages ddp,fsdp2-zero2,fsdp2, or --stages 1,2,3."),
        (options.devices and not of_devices, f"{nowhere} number of devices goes",
         "Write {devices} in its place: -- torchrun --nproc-per-node {devices} train.py."),
        (of_devices and options.global_batch, "--global-batch needs one number of devices",
         "Leave one of --global-batch and {devices} out."),
        (of_devices and not options.gpu, "{devices} needs virtual devices",
         "Like --gpu h100, --gpu a100-40, --gpu 24GiB."),
        (not (options.stages or of_devices or template.has_place("micro_batch")),
         f"{nowhere} micro-batch goes",
         "Write {micro_batch} in its place: -- torchrun ... train.py --batch {micro_batch}; or give "
         "--env BATCH={micro_batch}, or --config ds_config.json; or write {stage} or {devices}."),
    )  # fmt: skip
    for is_wrong, message, hint in problems:
        if is_wrong:
            raise LaunchError(message, hint)


def _fill_in(pattern: str, values: Values) -> str:
    for field in (*FIELDS, "devices"):
        if field in values:
            pattern = pattern.replace(f"{{{field}}}", values[field])
    return pattern


def _settable_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    if "zero_optimization" in config or any(str(key).startswith("train_") for key in config):
        return FIELDS if "train_micro_batch_size_per_gpu" in config else ("stage", "accumulation")
    section = config.get("deepspeed_config")
    if not isinstance(section, Mapping):
        return ()
    inner = section.get("deepspeed_config_file")
    return _settable_fields(read_config_file(Path(inner))) if inner else ("stage", "accumulation")


def _rewrite_config(path: Path, values: Values, folder: Path) -> tuple[Path, dict[Path, str]]:
    """The path of a copy of *path* with *values*, and all files that it needs. JSON is YAML, too."""
    config = json.loads(json.dumps(read_config_file(path)))
    files: dict[Path, str] = {}
    section = config.get("deepspeed_config")
    if isinstance(section, dict):
        if inner := section.get("deepspeed_config_file"):
            copy, files = _rewrite_config(Path(inner), values, folder)
            section["deepspeed_config_file"] = str(copy)
        else:
            _set_number(section, "zero_stage", values.get("stage"))
            _set_number(section, "gradient_accumulation_steps", values.get("accumulation"))
    else:
        if "train_micro_batch_size_per_gpu" in config:
            _set_number(config, "train_micro_batch_size_per_gpu", values.get("micro_batch"))
            config.pop("train_batch_size", None)  # DeepSpeed computes it from the others
        _set_number(config, "gradient_accumulation_steps", values.get("accumulation"))
        if "stage" in values:
            _set_number(config.setdefault("zero_optimization", {}), "stage", values["stage"])
    target = folder / path.name
    files[target] = json.dumps(config, indent=2) + "\n"
    return target, files


def _set_number(section: dict[str, Any], key: str, value: str | None) -> None:
    if value is not None:
        section[key] = int(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon fit [options] -- command ...``"""
    changes = parser.add_argument_group("what may change")
    add_option(
        changes, "--stages", "NAME,...",
        "values of {stage}: 0 to 3, ddp, fsdp2, ... (default: the command as it is)",
    )  # fmt: skip
    add_option(
        changes, "--devices", "N,...",
        "values of {devices}, on each node (default: 1,2,4,8); needs --gpu", device_counts,
    )  # fmt: skip
    add_option(changes, "--config", "FILE", "a DeepSpeed JSON or accelerate YAML of the command")
    add_list(changes, "--env", "NAME=VALUE", "a variable for the command: BATCH={micro_batch}")
    sizes = parser.add_argument_group("sizes")
    add_option(sizes, "--min", "N", "smallest micro-batch", positive, 1)
    largest = f"largest micro-batch (default: {_MAX_SIZE}, with a part of the host's memory left free)"
    add_option(sizes, "--max", "N", largest, positive)
    add_option(sizes, "--multiple", "N", "only multiples of N", positive, 1)
    add_option(
        sizes, "--global-batch", "N",
        "total samples per step across ranks; sets {accumulation}; needs --ranks", positive,
    )  # fmt: skip
    add_option(sizes, "--ranks", "N", "data-parallel ranks, for --global-batch", positive)
    launches = parser.add_argument_group("launches")
    launch_help = (
        f"max launches in total (default: {fit.MAX_LAUNCHES}, with --gpu {fit.MAX_VIRTUAL_LAUNCHES})"
    )
    add_option(launches, "--launches", "N", launch_help, positive)
    add_option(launches, "--steps", "N", "steps per launch", positive, 12)
    add_option(launches, "--seconds", "N", "max seconds per launch", positive, 300)
    add_machine_arguments(parser.add_argument_group("virtual devices, where there are no others"), "")
    add_flag(parser, "--again", "forget what an earlier call has measured")
    add_option(
        parser, "-o --output", "DIR",
        "where the files to use and the output of launches go",
        Path, Path("zeromon-fit"),
    )  # fmt: skip
    add_flag(parser, "--json", "print JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")


def device_counts(typed: str) -> list[int]:
    """Parses the value of --devices."""
    return sorted({positive(count) for count in typed.split(",")})


def call(options: argparse.Namespace) -> int:
    """Launches until nothing is to be learnt, and prints what was found."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LaunchError("no command to fit", "zeromon fit -- torchrun ... --batch {micro_batch}")
    template = make_template(command, options.env, options.config)
    _check_places(template, options)
    names = options.stages.split(",") if options.stages else [""]
    options.launches = options.launches or (
        fit.MAX_VIRTUAL_LAUNCHES if options.gpu else fit.MAX_LAUNCHES
    )
    search = _Search(options, template, fit.least_memory_first(names))
    # A scheduler's SIGTERM then keeps the results and ends the launch, as Ctrl-C does
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.gpu:
            with virtual_machine(command, options, f"fit-{search.key}-{os.getpid()}") as machine:
                search.machine = machine
                search.go()
        else:
            search.go()
    except KeyboardInterrupt:
        tell_user("interrupted: the same command continues")
        if not search.trials:
            return 130
    content, report = (_fixed_batch_answer if search.has_fixed_batch else _batch_answer)(search)
    recommended = content["recommended"]
    if recommended is not None and search.counts:
        recommended["devices"] = search.devices
    if options.json:
        launches = [asdict(t) | {"fits": t.fits} for t in search.trials]
        for values in (*launches, recommended or {}):
            values |= {} if search.has_batch_place else {"micro_batch": None}
        report = json.dumps(content | {"launches": launches, "notes": list(search.notes)}) + "\n"
    (sys.stdout.write if options.json else show_text)(report)
    return 0 if recommended else 1


def _batch_answer(search: "_Search") -> tuple[dict[str, Any], str]:
    """The stages at their largest micro-batch, for --json and as text."""
    stages = search.stages()
    chosen = fit.recommend_fastest_stage(stages)
    scripts = search.write([(stage.name, stage.advised) for stage in stages if stage.advised])
    content = {
        "stages": [
            asdict(s)
            | {"samples_per_second": s.samples_per_second, "tokens_per_second": s.tokens_per_second}
            for s in stages
        ],
        "recommended": None if chosen is None else {"stage": chosen.name, "micro_batch": chosen.advised},
        "reason": _reason_text(stages, chosen),
        "files": scripts,
    }
    report = stages_as_text(stages, search.trials, chosen, scripts, search.notes)
    if search.counts:
        head = [f"{search.label('', search.devices)}:"] if search.devices else []
        report = "\n".join([search.launch_table(None), *search.reasons(), "", *head, report])
    return content, report


def _fixed_batch_answer(search: "_Search") -> tuple[dict[str, Any], str]:
    """The launches, the cheapest stage on the fewest devices, and why, for --json and as text."""
    chosen, reasons = search.cheapest(), search.reasons()
    scripts = search.write([(chosen.stage, chosen.micro_batch)] if chosen else [])
    label = search.label(chosen.stage, chosen.devices) if chosen else ""
    headline = f"Recommended: {label}" if chosen else "Nothing is recommended: no launch fits"
    content: dict[str, Any] = {
        "stages": [],
        "recommended": {"stage": chosen.stage, "micro_batch": chosen.micro_batch} if chosen else None,
        "reason": "; ".join([headline, *reasons]),
        "files": scripts,
    }
    report = [search.launch_table(chosen), "", headline, *(f"  - {reason}" for reason in reasons)]
    report += [f"  use: sh {script}" for script in scripts.values()]
    report += [f"  {_launches_text(search.trials)}", *(f"note: {note}" for note in search.notes)]
    return content, "\n".join(report) + "\n"


class _Search:
    """The launches so far, on disk, and what they say."""

    def __init__(self, options: argparse.Namespace, form: Template, names: Sequence[str]) -> None:
        self._options, self._template, self._names = options, form, names
        self.has_batch_place = form.has_place("micro_batch")
        self.sizes = _allowed_batch_sizes(options) if self.has_batch_place else [1]
        self.has_fixed_batch = len(self.sizes) == 1
        self.counts = (options.devices or _DEVICE_COUNTS) if form.has_word("devices") else ()
        # With the working folder: the same relative paths elsewhere are another training
        facts = [
            form.command, dict(form.environment), str(form.config), self.sizes, os.getcwd(), options.max
        ]  # fmt: skip
        if options.gpu:
            facts.append([options.gpu, options.nodes, options.link, options.network, options.processes])
        self.key = hashlib.sha256(repr(facts).encode()).hexdigest()[:10]
        self._state = paths.record_store_root() / "fit" / f"{self.key}.json"
        self.machine: VirtualMachine | None = None
        self._hang = ""
        """Where the launches run; None for the machine itself."""
        self.trials: list[fit.Trial] = []
        self.notes: list[str] = []
        self._spare_bytes = 0
        host = HostReader().read(os.getpid())
        # The limit of a cgroup may be reached: it is nobody else's memory
        is_shared = host.limit_bytes <= 0 < host.headroom_bytes
        if options.max is None and self.has_batch_place and not options.gpu and is_shared:
            self._spare_bytes = round(_SPARE_SHARE * host.headroom_bytes)
            note = f"launches leave {human_bytes(self._spare_bytes)} of the host's memory free"
            self.notes.append(f"{note}; --max N lets them take it")
        if not options.again and self._state.is_file():
            self.trials = msgspec.json.decode(self._state.read_bytes(), type=list[fit.Trial])
            tell_user(
                f"{len(self.trials)} launches are known from an earlier call (--again forgets them)"
            )

    def go(self) -> None:
        """Launches what is to be learnt next, until nothing is."""
        while len(self.trials) < self._options.launches and (target := self._next()):
            self._launch_trial(*target)

    def _next(self) -> tuple[str, int, int] | None:
        """The stage, the micro-batch and the devices to launch next; None: nothing is to be learnt."""
        if self.counts and (count := fit.next_device_count(self._device_trials(), self.counts)):
            return self._names[0], self.sizes[0], count
        if self.devices is None:
            return None
        if self.has_fixed_batch:
            stage = fit.next_stage(self._here(), self._by_cost(), self._names[0])
            return None if stage is None else (stage, self.sizes[0], self.devices)
        return self._next_size(self.devices)

    def _device_trials(self) -> list[fit.Trial]:
        """The launches that say how many devices are enough."""
        values = self._names[0], self.sizes[0]
        return [trial for trial in self.trials if (trial.stage, trial.micro_batch) == values]

    @property
    def devices(self) -> int | None:
        """The fewest devices that are known to be enough, None without any; 0 without {devices}."""
        enough = {trial.devices for trial in self._device_trials() if trial.fits}
        return min(enough.intersection(self.counts), default=None) if self.counts else 0

    def _next_size(self, devices: int) -> tuple[str, int, int] | None:
        budget = self._options.launches - len(self.trials)
        first_stage = self._names[0]
        tried = self._trials_of(first_stage)
        single = len(self._names) == 1
        # two launches of the first stage give the line; of several stages the others prove the best
        size = fit.next_size(tried, self.sizes, budget if single else min(budget, 2 - len(tried)))
        if size is not None:
            return first_stage, size, devices
        if single:
            return None
        # On virtual devices seconds are not predicted, so each stage is launched
        unknown = 0.0 if self.machine is None else math.inf
        for stage in sorted(self.stages(), key=lambda s: -(s.samples_per_second or unknown)):
            measured = self._trials_of(stage.name)
            if (
                stage.largest
                and stage.largest not in {t.micro_batch for t in measured}
                and not any(t.micro_batch <= stage.largest and not t.fits for t in measured)
            ):
                return stage.name, stage.largest, devices
            if measured and stage.name != first_stage:
                return None  # the best is proven
        return None

    def _here(self) -> list[fit.Trial]:
        """The launches on the fewest devices that are enough."""
        return [trial for trial in self.trials if trial.devices == self.devices]

    def _trials_of(self, stage: str) -> list[fit.Trial]:
        return [trial for trial in self._here() if trial.stage == stage]

    def _launch_trial(self, stage: str, size: int, devices: int) -> None:
        number = len(self.trials) + 1
        folder = self._options.output
        trial = self._make_trial(stage, size, devices)
        ranks = 0
        command, environment = self._fill_template(trial, folder / f"launch{number}")
        if self.machine is not None:
            placed = placed_launch(
                command, self._options.nodes, self._options.processes, self.machine.environment
            )
            command, ranks = placed.command, len(placed.ranks)
            environment |= placed.environment
        # zeromon run adds -2 to a name that exists, and _Watch would follow the earlier run
        name = f"fit-{self.key}-{number}-{int(time.time())}"
        label = self.label(stage, devices) + f", micro-batch {size}" * self.has_batch_place
        tell_user(f"launch {number} of at most {self._options.launches}: {label}")
        memory_line = fit.fitted_line(self._trials_of(stage), fit.HOST)
        request = Request(
            trial=trial, command=command, environment=environment, name=name,
            log=folder / f"launch{number}.log", steps=self._options.steps, ranks=ranks,
            most_seconds=self._options.seconds,
            stop_reason=self._note_hang if self.machine is not None else lambda _: "",
            # a virtual device's step has another length on a host that its ranks do not share
            best=self._best_estimate(stage) if self.machine is None else None,
            expected_bytes=None if memory_line is None else memory_line.at(size),
            spare_bytes=self._spare_bytes,
        )  # fmt: skip
        done = run_launch(request, lambda message: show_progress(f"  {message}"))
        show_progress("")
        if self._hang:
            way_out = "zeromon preflight of the same command shows where each rank stands."
            raise LaunchError(f"launch {number} hangs: {self._hang}", way_out)
        if self.machine is not None and (run := snapshot_or_none(done.run)) is not None:
            done = with_device_seconds(done, self.machine.steps_of_ranks(run))
        if self.machine is not None and "host memory" in done.outcome:
            # It says nothing about the devices
            hint = f"--processes, now {self._options.processes}, says how many ranks run at once."
            raise LaunchError(f"{done.outcome} on this machine, which runs the virtual devices", hint)
        self.trials.append(done)
        with paths.anchored_folder(self._state.parent, 1) as folder:
            replace_file(folder / self._state.name, msgspec.json.encode(self.trials))
        tell_user(f"  {done.outcome or 'measured'}: {_peaks_text(done)}, {done.wall_seconds:.1f} s")
        self._check_batch(done)

    def _note_hang(self, run: RunSnapshot) -> str:
        self._hang = lasting_hang(run)
        return self._hang

    def _check_batch(self, done: fit.Trial) -> None:
        """Notes where the run's own micro-batch is another than what was set."""
        run = snapshot_or_none(done.run)
        ranks = run.ranks if run is not None else ()
        reported_size = next((size for rank in ranks if (size := micro_batch_of_rank(rank))), None)
        if self.has_batch_place and reported_size not in (None, done.micro_batch):
            self.notes.append(
                f"the run reports a micro-batch of {reported_size}, where {done.micro_batch} was set"
            )

    def _best_estimate(self, stage: str) -> Any:
        estimates = [
            e for t in self.trials if t.stage != stage and t.fits and (e := t.estimate) is not None
        ]
        return min(estimates, key=lambda e: e.value, default=None)

    def _make_trial(self, stage: str, size: int, devices: int) -> fit.Trial:
        global_batch = self._options.global_batch
        accumulation = 1 if global_batch is None else global_batch // (size * self._options.ranks)
        return fit.Trial(stage=stage, micro_batch=size, devices=devices, accumulation=accumulation)

    def _fill_template(self, trial: fit.Trial, folder: Path) -> tuple[list[str], dict[str, str]]:
        folder.parent.mkdir(parents=True, exist_ok=True)
        command, environment, files = self._template.filled(_trial_values(trial), folder.absolute())
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content, private=False)
        return command, environment

    def _setup(self) -> tuple[Setup | None, str]:
        """The setup of the last launch of the first stage; None with the reason where it is unknown."""
        trials = self._trials_of(self._names[0])
        run = snapshot_or_none(trials[-1].run) if trials else None
        if run is None:
            return None, "no launch of the first stage is on record"
        try:
            setup = of_run(run)
        except PlanError as error:
            return None, str(error)
        # The clock of a run on virtual devices is that of this machine: it measures no speed
        return (setup if self.machine is None else replace(setup, measured=None)), ""

    def stages(self) -> list[fit.Stage]:
        """The stages with what is measured and predicted of them."""
        return fit.stages_of_trials(self._names, self._here(), self.sizes, *self._setup())

    def _rows(self) -> dict[str, Row]:
        return fit.rows_of_stages(self._names, self._setup()[0])

    def _by_cost(self) -> list[str]:
        return fit.cheapest_first(self._names, self._rows())

    def cheapest(self) -> fit.Trial | None:
        """The launch of the cheapest stage that fits on the fewest devices; None if none fits."""
        return fit.cheapest_trial(self._here(), self._by_cost())

    def label(self, stage: str, devices: int) -> str:
        """``stage fsdp2 on 2 devices``."""
        per_node = " per node" * ((self._options.nodes or 1) > 1)
        suffix = f" on {devices} device{'s' * (devices > 1)}{per_node}" if devices else ""
        return (f"stage {stage}" if stage else "the command") + suffix

    def reasons(self) -> list[str]:
        """Why no other stage and no smaller number of devices is recommended."""
        has_size = self.has_batch_place
        reasons = [
            f"{self.label(trial.stage, trial.devices)}{f', micro-batch {trial.micro_batch}' * has_size} "
            f"does not fit: {trial.outcome}"
            for trial in self.trials
            if not trial.fits
        ]
        chosen, rows = self.cheapest(), self._rows()
        if self.has_fixed_batch and chosen is not None and chosen.stage in rows:
            sent = human_bytes(rows[chosen.stage].communication_bytes)
            reasons.append(f"a rank sends {sent} per step")
        if target := self._next():
            reasons.append(f"not finished: {self.label(target[0], target[2])} is next (--launches)")
        return reasons

    def launch_table(self, chosen: fit.Trial | None) -> str:
        """The launches, with what fits and how much memory is left."""
        title = f"Launches on {self.machine.device}" if self.machine is not None else "Launches"
        pool = fit.DEVICE if any(fit.DEVICE in trial.peaks for trial in self.trials) else fit.HOST
        number_of = self.trials.index
        sent = {(name, self.devices): row.communication_bytes for name, row in self._rows().items()}
        columns: list[Column[fit.Trial]] = [
            Column("launch", lambda row: f"{'>' if row is chosen else ' '} {number_of(row) + 1}"),
            Column("stage", lambda row: row.stage or "as it is"),
            *([Column("devices", lambda row: row.devices)] if self.counts else []),
            *([Column("batch", lambda row: row.micro_batch)] if self.has_batch_place else []),
            Column("fits", lambda row: "yes" if row.fits else "no"),
            Column("peak", lambda row: row.peaks.get(pool), BYTES),
            Column("headroom", lambda row: row.headroom(pool) if row.fits else 0, BYTES),
            Column("step", lambda row: row.seconds if row.fits else None, SECONDS),
            Column("sent/step", lambda row: sent.get((row.stage, row.devices)), BYTES),
        ]
        return f"{title}\n{text_table(self.trials, *columns)}"

    def write(self, choices: Sequence[tuple[str, int]]) -> dict[str, str]:
        """Writes command and files of each stage at its micro-batch; stage -> its script."""
        scripts = {}
        for name, size in choices:
            trial = self._make_trial(name, size, self.devices or 0)
            folder = self._options.output / (f"stage-{name}" if name else "use")
            command, environment = self._fill_template(trial, folder)
            variables = [f"{name}={shlex.quote(setting)}" for name, setting in environment.items()]
            script = folder / "command.sh"
            script.parent.mkdir(parents=True, exist_ok=True)
            replace_file(script, " ".join([*variables, shlex.join(command)]) + "\n", private=False)
            scripts[name] = str(script)
        return scripts


def _allowed_batch_sizes(options: argparse.Namespace) -> list[int]:
    sizes = [n for n in range(options.min, (options.max or _MAX_SIZE) + 1) if n % options.multiple == 0]
    if options.global_batch is not None:
        if options.ranks is None:
            raise LaunchError("--global-batch needs --ranks", "The data-parallel ranks of the command.")
        share, remainder = divmod(options.global_batch, options.ranks)
        sizes = [n for n in sizes if not remainder and share % n == 0]
    if not sizes:
        raise LaunchError(
            "no micro-batch may be tried", "Look at --min, --max, --multiple, --global-batch."
        )
    return sizes


def _trial_values(trial: fit.Trial) -> dict[str, str]:
    values = {"micro_batch": str(trial.micro_batch), "accumulation": str(trial.accumulation)}
    values |= {"devices": str(trial.devices)} if trial.devices else {}
    return values | ({"stage": trial.stage} if trial.stage else {})


def _peaks_text(trial: fit.Trial) -> str:
    pool_texts = [
        f"{pool} {human_bytes(n)} of {human_bytes(trial.rooms[pool])}" for pool, n in trial.peaks.items()
    ]
    return ", ".join(pool_texts) or "no memory was measured"


# ---- the output of ``zeromon fit`` --------------------------------------------------------------


def stages_as_text(
    stages: Sequence[fit.Stage], trials: Sequence[fit.Trial], chosen: fit.Stage | None,
    scripts: Mapping[str, str], notes: Sequence[str],
) -> str:  # fmt: skip
    """The tables, the recommendation with its reason, the files, and why figures are unknown."""
    has_device = any(fit.DEVICE in stage.peaks for stage in stages)
    largest = text_table(
        stages,
        Column("stage", lambda s: s.name or "as it is"),
        Column("largest batch", lambda s: "n/a" if s.largest is None else str(s.largest or "none")),
        Column("by", lambda s: "launch" if s.measured else "prediction"),
        Column("host", lambda s: _peak_text(s, fit.HOST)),
        *([Column("device", lambda s: _peak_text(s, fit.DEVICE))] if has_device else []),
        Column("step", lambda s: s.seconds, SECONDS),
        Column("exposed", lambda s: s.exposed_seconds, SECONDS),
        Column("samples/s", lambda s: _rate_text(s.samples_per_second)),
        Column("tokens/s", lambda s: _rate_text(s.tokens_per_second)),
    )
    report_rows = ["Stages at their largest micro-batch", largest]
    roles = dict.fromkeys(role for s in stages for role in s.roles)
    if roles:
        header = ("stage", *(role.replace("_", " ") for role in roles))
        rows = [
            (s.name or "as it is", *(human_bytes(s.roles[r]) if r in s.roles else "-" for r in roles))
            for s in stages if s.roles
        ]  # fmt: skip
        title = "Predicted memory of a rank by role, without activations"
        report_rows += ["", title, aligned_table(header, rows)]
    report_rows += ["", _reason_text(stages, chosen)]
    if chosen is not None and chosen.name in scripts:
        report_rows.append(f"  use: sh {scripts[chosen.name]}")
    report_rows.append(f"  {_launches_text(trials)}")
    stage_notes = [f"{s.name or 'as it is'}: {s.why}" for s in stages if s.why]
    report_rows += [f"note: {note}" for note in (*stage_notes, *notes)]
    return "\n".join(report_rows) + "\n"


def _launches_text(trials: Sequence[fit.Trial]) -> str:
    killed = sum(t.killed for t in trials)
    stopped = sum(bool(t.outcome) and not t.killed for t in trials)
    total = f"{len(trials)} launches, {sum(t.wall_seconds for t in trials):.0f} s"
    return f"{total}; {stopped} stopped before their end, {killed} killed"


def _peak_text(stage: fit.Stage, pool: str) -> str:
    return human_bytes(round(stage.peaks[pool]) if pool in stage.peaks else None)


def _rate_text(value: float | None) -> str:
    return human_count(value) if value is None or value >= 1000 else f"{value:.3g}"


def _reason_text(stages: Sequence[fit.Stage], chosen: fit.Stage | None) -> str:
    if chosen is None:
        return "Nothing is recommended: no size is known to fit"
    name = f"stage {chosen.name}, " if chosen.name else ""
    headline = f"Recommended: {name}micro-batch {chosen.advised}"
    rate = chosen.samples_per_second
    rivals = [s for s in stages if s is not chosen and s.samples_per_second is not None]
    if not chosen.measured:
        headline += " (predicted; one more --launches proves it)"
    ran = ", the largest that ran"
    if chosen.alone:
        ran = f" by the line; {chosen.largest} ran beside zeromon fit, whose memory the command has"
    if rate is None:
        return f"{headline}{ran}; its samples a second are n/a"
    if not rivals:
        return f"{headline}{ran}: {_rate_text(rate)} samples/s"
    runner_up = max(rivals, key=lambda s: s.samples_per_second or 0.0)
    kind = "" if runner_up.measured else " (predicted)"
    return (
        f"{headline}: {_rate_text(rate)} samples/s; the next, stage {runner_up.name}, "
        f"{_rate_text(runner_up.samples_per_second or 0.0)}{kind}"
    )


def with_device_seconds(trial: fit.Trial, steps_of_ranks: Sequence[tuple[Two, Two]]) -> fit.Trial:
    """*trial* with the seconds of its slowest virtual device, for a host that takes its time."""
    if not steps_of_ranks:
        return replace(trial, seconds=None, seconds_error=None, exposed_seconds=None)
    (_, seconds), (_, exposed) = max(steps_of_ranks)
    return replace(trial, seconds=seconds, seconds_error=0.0, exposed_seconds=exposed)
