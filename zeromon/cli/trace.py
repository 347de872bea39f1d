"""Takes traces of a live run, and analyses Kineto traces: the time of each rank's device by activity.

  zeromon trace capture                      two steps of the only live run
  zeromon trace capture RUN --steps 1 --ranks 0,3   one step of two ranks
  zeromon trace analyze t.json.gz            one file
  zeromon trace analyze traces/              all ranks of a job: a file each
  zeromon trace analyze t.json --idle        why streams are idle; their queues
  zeromon trace analyze t.json --gemm        products against a roofline
  zeromon trace analyze t.json --critical-path   what each moment waited for
  zeromon trace analyze rank*.json --json    for scripts
  zeromon trace diff old.json.gz new.json.gz   new, longer or less overlapped work
  zeromon trace memory snapshot.pickle       who held torch's memory at its peak
  zeromon trace flight /tmp/dumps/           what hangs: torch's Flight Recorder

`zeromon trace ACTION --help` describes each.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from zeromon.base import can_rewrite_lines
from zeromon.base.errors import CaptureRefused, TraceError
from zeromon.cli import tell_user
from zeromon.cli.parser import add_flag, add_option, check_format, draw_module, positive, write_text
from zeromon.cli.terminal import show_json, show_progress, show_text
from zeromon.diagnosis.flight import calls_under_way, flight_findings, flight_text
from zeromon.export.files import Progress
from zeromon.readout import trace_report
from zeromon.readout.text import capture_text
from zeromon.snapshot.step import Capture, CaptureState
from zeromon.sources.live import LiveSource, find_live_runs, only_live_run
from zeromon.traces.allocations import DeviceMemory, memory_by_device, memory_growers, read_snapshot
from zeromon.traces.analysis import (
    RESULT_FILE,
    analyze_trace,
    collective_durations,
    encode_analysis_result,
    rank_waits,
    read_analysis_result,
)
from zeromon.traces.critical import HostStep, critical_path
from zeromon.traces.diff import Sample, diff_samples, samples_of
from zeromon.traces.events import TraceData
from zeromon.traces.flight import DUMP_HINT, RANK_IN_NAME, Dump, read_flight_dump
from zeromon.traces.kineto import read_host_step, read_trace

ANALYZE = """The time of each rank's device by activity, to the nanosecond.

FILE is a Kineto trace, plain or gzip, or a folder with one a rank. The parts add up: compute + exposed
communication + exposed copies + idle = span. Exposed time is not hidden by compute. Details are of the
rank with the most exposed communication, or of --rank. A truncated file is analysed as far as it is
complete, with a note. Exit code 2 when a file is not a trace.
"""

CAPTURE = """Records exactly the next steps of a live run with torch.profiler, and analyses them.

RUN is a run id (or its beginning), the pid of a rank, or host:port; without RUN, the only live run. All
ranks record the same steps; only those steps take longer. The files (Kineto JSON, for Perfetto and for
zeromon trace analyze) are in the run's folder, which is printed. The output compares the live figures of
the same steps with the trace. One capture runs at a time; a rank whose script runs its own profiler is
skipped. Ctrl-C stops the waiting, not the capture. Exit code 1 when no rank could record.
"""

DIFF = """What differs between the traces of two runs, a step: parts of the step, collectives, FSDP units
and families of kernels that appeared, are gone, are called more often, take longer, or are less hidden.

A and B are Kineto traces, plain or gzip, or the folders of two captures with a file a rank. Each
profiler step of each rank is one sample. Only differences beyond their noise have a row; more steps show
smaller ones. Exit code 1 where something differs.
"""

_RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)
_LOOK_SECONDS = 0.5
_MAX_UNKNOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon trace capture [RUN] ...`` and ``zeromon trace analyze FILE...``"""
    verbs = parser.add_subparsers(metavar="ACTION", required=True)
    sub = verbs.add_parser("capture", help="record the next steps of a live run", description=CAPTURE)
    sub.add_argument("target", nargs="?", metavar="RUN", help="run id, pid or host:port")
    add_option(sub, "--steps", "N", "number of steps", positive, 2)
    add_option(
        sub, "--ranks", "0,3", "ranks to trace (default: all of this node)", _read_ranks, default=()
    )
    add_flag(sub, "--json", "print the result as JSON")
    sub.set_defaults(call=capture_trace)
    sub = verbs.add_parser("analyze", help="analyse the time of the devices", description=ANALYZE)
    sub.add_argument("files", nargs="*", metavar="FILE", help="Kineto JSON, plain or gzip, or folder")
    add_option(sub, "--rank", "N", "the rank of the details", int)
    for name, help_text in trace_report.SECTIONS.items():
        sub.add_argument(f"--{name}", action="store_true", help=help_text)
    help_text = "what each moment of a step waited for (default: the step of median length)"
    add_option(sub, "--critical-path", "STEP", help_text, _step_or_file, nargs="?", const=-1)
    add_flag(sub, "--json", "print JSON")
    sub.set_defaults(call=call)
    sub = verbs.add_parser("diff", help="what differs between two runs", description=DIFF)
    sub.add_argument("before", metavar="A", help="trace file, or folder of a capture")
    sub.add_argument("after", metavar="B", help="the same of another run")
    add_flag(sub, "--json", "print JSON")
    sub.set_defaults(call=compare_traces)
    add_file_actions(verbs)


def compare_traces(options: argparse.Namespace) -> int:
    """Compares two traces; returns 1 where something differs."""
    names = (options.before, options.after)
    difference = diff_samples(*(_read_step_samples(Path(name)) for name in names))
    if options.json:
        changed = [row.name for row in difference.changed]
        show_json({"changed": changed, **msgspec.to_builtins(difference)})
    else:
        show_text(trace_report.as_diff(names, difference))
    return 1 if difference.changed else 0


def _read_step_samples(path: Path) -> list[Sample]:
    """The steps of all ranks of a trace; raises :class:`TraceError` without any."""
    samples = [sample for data, _ in _read_traces([path]) for sample in samples_of(data)]
    if not samples:
        raise TraceError(
            f"{path} has no step with device events, operators or collectives",
            "zeromon trace capture takes a trace that has them.",
        )
    return samples


def _read_traces(paths: Sequence[Path]) -> Iterator[tuple[TraceData, Callable[[int | None], HostStep]]]:
    """Reads one trace after another, of files and folders, with a progress bar.

    Yields with each what reads the host's part of a step of it.
    """
    files = []
    for path in paths:
        inside = filter(Path.is_file, path.glob("*.json*")) if path.is_dir() else (path,)
        files += sorted(file for file in inside if file.name != RESULT_FILE)
    for number, file in enumerate(files, 1):
        size = file.stat().st_size >> 10 if file.is_file() else 0
        progress = Progress(size, f"KiB, file {number} of {len(files)}", patience=1.0)

        def add_progress(nbytes: int, progress: Progress = progress) -> None:
            progress.add(nbytes >> 10)

        collecting = gc.isenabled()
        gc.disable()  # millions of objects, and no cycle among them
        try:
            data = read_trace(file, add_progress)
            yield data, partial(read_host_step, file, data, add_progress)
        finally:
            progress.end()
            if collecting:
                gc.enable()


def _read_ranks(numbers: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(number) for number in numbers.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"ranks are numbers like 0,3, not {numbers}") from None


def _step_or_file(typed: str) -> int | str:
    """Returns a step, or the FILE that follows ``--critical-path`` and that argparse takes for STEP."""
    if typed.isdecimal():
        return int(typed)
    if Path(typed).exists():
        return typed
    raise argparse.ArgumentTypeError(f"'{typed}' is neither a step nor a file")


def capture_trace(options: argparse.Namespace) -> int:
    """Requests a trace, waits for it, and prints the result."""
    source = only_live_run(find_live_runs(options.target)).open()
    number = source.trace(options.steps, options.ranks)
    capture = _await_capture(source, number)
    ranks = [] if capture.state == CaptureState.FAILED else read_analysis_result(Path(capture.folder))
    if options.json:
        show_json({"run": source.run, "capture": capture, "ranks": ranks})
    else:
        show_text(trace_report.capture_report(capture, ranks))
    return 1 if capture.state == CaptureState.FAILED else 0


def _await_capture(source: LiveSource, number: int) -> Capture:
    last_message, unknown = "", 0
    while True:
        run = source.latest()
        capture = run.capture
        if capture is None or capture.number != number:
            unknown += 1  # the next snapshot has the capture, unless the collector was restarted
            if unknown > _MAX_UNKNOWN:
                raise CaptureRefused(f"the collector has no trace {number}")
            time.sleep(_LOOK_SECONDS)
            continue
        if not capture.is_open:
            show_progress("")
            return capture
        message = capture_text(capture, run.last_step)
        if message != last_message:
            (show_progress if can_rewrite_lines(sys.stderr) else tell_user)(message)
            last_message = message
        time.sleep(_LOOK_SECONDS)


def call(options: argparse.Namespace) -> int:
    """Reads each file, then prints the analysis."""
    ranks, orders = [], []
    # argparse gives None where the option is absent, so -1 stands for the option without STEP
    step = None if options.critical_path == -1 else options.critical_path
    files = options.files
    if isinstance(step, str):
        step, files = None, [step, *files]
    if not files:
        raise TraceError("no files given", "Try: zeromon trace analyze t.json.gz")
    for number, (data, reader) in enumerate(_read_traces([Path(file) for file in files])):
        rank_trace = analyze_trace(data, _rank_of_trace(data, number))
        if options.critical_path is not None:
            rank_trace = replace(rank_trace, critical_path=critical_path(data, reader(step)))
        ranks.append(rank_trace)
        orders.append(collective_durations(data))
    if not ranks:
        names = " ".join(files)
        hint = "A Kineto trace is a file *.json or *.json.gz, as torch.profiler exports it."
        raise TraceError(f"{names} has no trace", hint)
    waited = rank_waits(orders)
    if waited is not None:
        ranks = [replace(r, wait_seconds=ns / 1e9) for r, ns in zip(ranks, waited, strict=True)]
    # In order of ranks; two files of one rank are both kept, with a note.
    numbers: set[int] = set()
    marked = []
    for rank in sorted(ranks, key=lambda r: r.rank):
        note = f"another file is of rank {rank.rank}, too"
        is_twin = rank.rank in numbers
        numbers.add(rank.rank)
        marked.append(replace(rank, notes=(*rank.notes, note)) if is_twin else rank)
    ranks = marked
    if options.json:
        sys.stdout.write(encode_analysis_result(ranks).decode() + "\n")
        return 0
    known_ranks = [rank.rank for rank in ranks]
    if options.rank is not None and options.rank not in known_ranks:
        listed = ", ".join(map(str, sorted(known_ranks)[:_MAX_UNKNOWN]))
        hint = f"The files are of {listed}{' and more' if len(known_ranks) > _MAX_UNKNOWN else ''}."
        raise TraceError(f"no file is of rank {options.rank}", hint)
    sections = [name for name in trace_report.SECTIONS if getattr(options, name)]
    sections += ["critical-path"] if options.critical_path is not None else []
    show_text(trace_report.as_text(ranks, sections, options.rank))
    return 0


def _rank_of_trace(data: TraceData, otherwise: int) -> int:
    """The rank in the trace, else in the file name, else the position on the command line."""
    if data.rank is not None:
        return data.rank
    match = _RANK_IN_NAME.search(data.name)
    return int(match.group(1)) if match else otherwise


# ---- ``zeromon trace memory`` and ``zeromon trace flight`` --------------------------------------

MEMORY = """Who holds the memory of a device, and who held it at its peak, by role and stack.

FILE is a snapshot by torch.cuda.memory._dump_snapshot. It has the segments of the allocator; the peak,
the stacks and the allocations that failed are in it after torch.cuda.memory._record_memory_history().
With a second FILE: the stacks that hold more there, or less. Nothing of a file is executed. Exit code 2
when a file is no snapshot.
"""

FLIGHT = """Which collective hangs, which ranks wait in it, and which have not called it.

FILE is a dump of torch's Flight Recorder, pickle or JSON, one a rank, or a folder of them: the files
that TORCH_NCCL_DUMP_ON_TIMEOUT writes, named nccl_trace_rank_N, and those of
torch._C._distributed_c10d._dump_fr_trace(). Calls under the same number are compared by operation, size
and element type; before what hangs also by shape. Nothing of a file is executed. Exit code 1 when there
is a finding, 2 when a file is no dump.
"""


def add_file_actions(verbs: Any) -> None:
    """The actions of ``zeromon trace`` that read files of torch."""
    sub = verbs.add_parser(
        "memory", help="who holds the memory, in snapshots of torch's allocator", description=MEMORY
    )
    sub.add_argument("file", metavar="FILE", help="written by torch.cuda.memory._dump_snapshot")
    sub.add_argument("later", nargs="?", metavar="FILE", help="what grew until this one")
    add_flag(sub, "--json", "print JSON")
    add_option(sub, "-o --output", "FILE", "write a flame graph as HTML (needs plotly)")
    sub.set_defaults(call=show_memory_snapshots)
    sub = verbs.add_parser(
        "flight", help="what hangs, in dumps of torch's Flight Recorder", description=FLIGHT
    )
    sub.add_argument("files", nargs="+", metavar="FILE", help="dump of a rank, or folder of dumps")
    add_flag(sub, "--json", "print JSON")
    sub.set_defaults(call=show_flight_dumps)


def show_memory_snapshots(options: argparse.Namespace) -> int:
    """Reads one or two snapshots, and prints who holds what."""
    check_format(options.output, ".html")
    names = [name for name in (options.file, options.later) if name]
    per_file = [_read_device_memory(name) for name in names]
    files = list(zip(names, per_file, strict=True))
    grown = {
        device.device: memory_growers(earlier.held, device.held)
        for device in per_file[-1]
        for earlier in per_file[0]
        if len(per_file) > 1 and earlier.device == device.device
    }
    report = "\n".join(trace_report.memory_text(Path(name).name, devices) for name, devices in files)
    for rows in grown.values():
        report += "\n" + trace_report.as_growth(names, rows)
    if options.output:
        page = draw_module("html_report").memory_page(Path(names[-1]).name, per_file[-1], report)
        write_text(page, options.output)
    if options.json:
        read_files = [{"file": name, "devices": devices} for name, devices in files]
        show_json({"files": read_files, "grown": grown})
    else:
        show_text(report)
    return 0


def _read_device_memory(name: str) -> tuple[DeviceMemory, ...]:
    path = Path(name)
    progress = Progress(path.stat().st_size >> 10 if path.is_file() else 0, "KiB")
    try:
        return memory_by_device(read_snapshot(path, lambda nbytes: progress.add(nbytes >> 10)))
    finally:
        progress.end()


# ---- flight recorder -------------------------------------------------------------------------------


def show_flight_dumps(options: argparse.Namespace) -> int:
    """Reads the dumps of a job, and prints what hangs."""
    dumps, notes = _read_rank_dumps([Path(name) for name in options.files])
    problems, ranks = flight_findings(dumps), [dump.rank for dump in dumps]
    notes += calls_under_way(dumps) if not problems else []
    if options.json:
        show_json({"ranks": ranks, "findings": problems, "notes": notes})
    else:
        show_text(flight_text(problems, ranks, notes))
    return int(bool(problems))


def _read_rank_dumps(paths: list[Path]) -> tuple[list[Dump], list[str]]:
    """One dump a rank, by rank; of a folder those files that are dumps."""
    rank_dumps: dict[int, Dump] = {}
    notes = []
    inside = {
        file: path.is_dir()
        for path in paths
        for file in (sorted(path.iterdir()) if path.is_dir() else [path])
        if file == path or (RANK_IN_NAME.search(file.name) and file.is_file())
    }
    progress = Progress(len(inside), "files")
    for file, is_optional in inside.items():
        try:
            dump = read_flight_dump(file)
        except TraceError as error:
            if not is_optional:
                raise
            notes.append(str(error))
            continue
        finally:
            progress.add(1)
        twin = rank_dumps.get(dump.rank)
        if twin is not None:
            notes.append(f"{twin.file} and {dump.file} are both of rank {dump.rank}")
        # Of two dumps of a rank, only one with stacks says where the call is
        if twin is None or not any(entry.stack for entry in twin.entries):
            rank_dumps[dump.rank] = dump
    progress.end()
    if not rank_dumps:
        raise TraceError(f"{paths[0]} holds no dumps of torch's Flight Recorder", DUMP_HINT)
    return [rank_dumps[rank] for rank in sorted(rank_dumps)], notes
