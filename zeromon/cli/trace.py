"""Takes traces of a live run, and analyses Kineto traces: the time of each rank's device by activity.

  zeromon trace capture                      two steps of the only live run
  zeromon trace capture RUN --steps 1 --ranks 0,3   one step of two ranks
  zeromon trace analyze t.json.gz            one file
  zeromon trace analyze traces/              all ranks of a job: a file each
  zeromon trace analyze t.json --idle        why streams are idle; their queues
  zeromon trace analyze t.json --gemm        products against a roofline
  zeromon trace analyze t.json --critical-path   what each moment waited for
  zeromon trace analyze rank*.json --json    for scripts
  zeromon trace diff old.json.gz new.json.gz what appeared, grew, is less hidden
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

from zeromon.cli import say
from zeromon.cli.options import dashboard, flag, option, positive, refuse_format, write
from zeromon.cli.terminal import show, show_json, status
from zeromon.diagnosis.flight import findings, under_way
from zeromon.errors import CaptureRefused, TraceError
from zeromon.export.files import Progress
from zeromon.readout.text import capture_text
from zeromon.report.trace import (
    SECTIONS,
    as_diff,
    as_growth,
    as_text,
    captured,
    flight_text,
    memory_text,
)
from zeromon.snapshot import Capture, CaptureState
from zeromon.sources.live import LiveSource, find, only
from zeromon.traces.allocations import DeviceMemory, devices_of, growers
from zeromon.traces.allocator import read_snapshot
from zeromon.traces.analysis import (
    RESULT_FILE,
    RankTrace,
    analyze,
    durations,
    encode_result,
    read_result,
    waits,
)
from zeromon.traces.critical import HostStep, critical_path
from zeromon.traces.diff import Sample, diff, samples_of
from zeromon.traces.events import TraceData
from zeromon.traces.flight import DUMP_HINT, RANK_IN_NAME, Dump, read_dump
from zeromon.traces.kineto import read, read_step

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
_MOST_UNKNOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon trace capture [RUN] ...`` and ``zeromon trace analyze FILE...``"""
    verbs = parser.add_subparsers(metavar="ACTION", required=True)
    sub = verbs.add_parser(
        "capture", help="record the next steps of a live run", description=CAPTURE
    )
    sub.add_argument("target", nargs="?", metavar="RUN", help="run id, pid or host:port")
    option(sub, "--steps", "N", "number of steps", positive, 2)
    option(sub, "--ranks", "0,3", "ranks to trace (default: all of this node)", _ranks, default=())
    flag(sub, "--json", "print the result as JSON")
    sub.set_defaults(call=capture)
    sub = verbs.add_parser("analyze", help="analyse the time of the devices", description=ANALYZE)
    sub.add_argument(
        "files", nargs="+", metavar="FILE", help="Kineto JSON, plain or gzip, or folder"
    )
    option(sub, "--rank", "N", "the rank of the details", int)
    for name, text in SECTIONS.items():
        sub.add_argument(f"--{name}", action="store_true", help=text)
    text = "what each moment of a step waited for (default: the step of median length)"
    option(sub, "--critical-path", "STEP", text, int, nargs="?", const=-1)
    flag(sub, "--json", "print JSON")
    sub.set_defaults(call=call)
    sub = verbs.add_parser("diff", help="what differs between two runs", description=DIFF)
    sub.add_argument("before", metavar="A", help="trace file, or folder of a capture")
    sub.add_argument("after", metavar="B", help="the same of another run")
    flag(sub, "--json", "print JSON")
    sub.set_defaults(call=differences)
    add_actions(verbs)


def differences(options: argparse.Namespace) -> int:
    """Compares two traces; returns 1 where something differs."""
    names = (options.before, options.after)
    found = diff(*(_samples(Path(name)) for name in names))
    if options.json:
        changed = [row.name for row in found.changed]
        show_json({"changed": changed, **msgspec.to_builtins(found)})
    else:
        show(as_diff(names, found))
    return 1 if found.changed else 0


def _samples(path: Path) -> list[Sample]:
    """The steps of all ranks of a trace; raises :class:`TraceError` without any."""
    found = [sample for data, _ in _read([path]) for sample in samples_of(data)]
    if not found:
        raise TraceError(
            f"{path} has no step with device events, operators or collectives",
            "zeromon trace capture takes a trace that has them.",
        )
    return found


def _read(paths: Sequence[Path]) -> Iterator[tuple[TraceData, Callable[[int | None], HostStep]]]:
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

        def told(nbytes: int, progress: Progress = progress) -> None:
            progress.add(nbytes >> 10)

        collecting = gc.isenabled()
        gc.disable()  # millions of objects, and no cycle among them
        try:
            data = read(file, told)
            yield data, partial(read_step, file, data, told)
        finally:
            progress.end()
            if collecting:
                gc.enable()


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"ranks are numbers like 0,3, not {text}") from None


def capture(options: argparse.Namespace) -> int:
    """Requests a trace, waits for it, and prints the result."""
    source = only(find(options.target)).open()
    number = source.trace(options.steps, options.ranks)
    made = _await(source, number)
    ranks = [] if made.state == CaptureState.FAILED else read_result(Path(made.folder))
    if options.json:
        show_json({"run": source.run, "capture": made, "ranks": ranks})
    else:
        show(captured(made, ranks))
    return 1 if made.state == CaptureState.FAILED else 0


def _await(source: LiveSource, number: int) -> Capture:
    """Follows capture *number* to its end, with a line of progress."""
    told, unknown = "", 0
    while True:
        run = source.latest()
        made = run.capture
        if made is None or made.number != number:
            unknown += 1  # the next snapshot has the capture, unless the collector was restarted
            if unknown > _MOST_UNKNOWN:
                raise CaptureRefused(f"the collector has no trace {number}")
            time.sleep(_LOOK_SECONDS)
            continue
        if not made.is_open:
            status("")
            return made
        text = capture_text(made, max((rank.step for rank in run.ranks), default=0))
        if text != told:
            (status if sys.stderr.isatty() else say)(text)
            told = text
        time.sleep(_LOOK_SECONDS)


def call(options: argparse.Namespace) -> int:
    """Reads each file, then prints the analysis."""
    ranks, orders = [], []
    step = None if options.critical_path == -1 else options.critical_path
    for number, (data, again) in enumerate(_read([Path(file) for file in options.files])):
        one = analyze(data, _rank_of(data, number))
        if options.critical_path is not None:
            one = replace(one, critical_path=critical_path(data, again(step)))
        ranks.append(one)
        orders.append(durations(data))
    if not ranks:
        names = " ".join(options.files)
        hint = "A Kineto trace is a file *.json or *.json.gz, as torch.profiler exports it."
        raise TraceError(f"{names} has no trace", hint)
    waited = waits(orders)
    if waited is not None:
        ranks = [replace(r, wait_seconds=ns / 1e9) for r, ns in zip(ranks, waited, strict=True)]
    ranks = _told_apart(ranks)
    if options.json:
        sys.stdout.write(encode_result(ranks).decode() + "\n")
        return 0
    known = [rank.rank for rank in ranks]
    if options.rank is not None and options.rank not in known:
        shown = ", ".join(map(str, sorted(known)[:_MOST_UNKNOWN]))
        hint = f"The files are of {shown}{' and more' if len(known) > _MOST_UNKNOWN else ''}."
        raise TraceError(f"no file is of rank {options.rank}", hint)
    wanted = [name for name in SECTIONS if getattr(options, name)]
    wanted += ["critical-path"] if options.critical_path is not None else []
    show(as_text(ranks, wanted, options.rank))
    return 0


def _rank_of(data: TraceData, otherwise: int) -> int:
    """The rank in the trace, else in the file name, else the position on the command line."""
    if data.rank is not None:
        return data.rank
    found = _RANK_IN_NAME.search(data.name)
    return int(found.group(1)) if found else otherwise


def _told_apart(ranks: list[RankTrace]) -> list[RankTrace]:
    """In order of ranks; two files of one rank are both kept, with a note."""
    seen: set[int] = set()
    found = []
    for rank in sorted(ranks, key=lambda r: r.rank):
        note = f"another file is of rank {rank.rank}, too"
        is_twin = rank.rank in seen
        seen.add(rank.rank)
        found.append(replace(rank, notes=(*rank.notes, note)) if is_twin else rank)
    return found


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
and element type. Nothing of a file is executed. Exit code 1 when there is a finding, 2 when a file
is no dump.
"""


def add_actions(verbs: Any) -> None:
    """The actions of ``zeromon trace`` that read files of torch."""
    sub = verbs.add_parser(
        "memory", help="who holds the memory, in snapshots of torch's allocator", description=MEMORY
    )
    sub.add_argument("file", metavar="FILE", help="written by torch.cuda.memory._dump_snapshot")
    sub.add_argument("later", nargs="?", metavar="FILE", help="what grew until this one")
    flag(sub, "--json", "print JSON")
    option(sub, "-o --output", "FILE", "write a flame graph as HTML (needs plotly)")
    sub.set_defaults(call=memory)
    sub = verbs.add_parser(
        "flight", help="what hangs, in dumps of torch's Flight Recorder", description=FLIGHT
    )
    sub.add_argument("files", nargs="+", metavar="FILE", help="dump of a rank, or folder of dumps")
    flag(sub, "--json", "print JSON")
    sub.set_defaults(call=flight)


def memory(options: argparse.Namespace) -> int:
    """Reads one or two snapshots, and prints who holds what."""
    refuse_format(options.output, ".html")
    names = [name for name in (options.file, options.later) if name]
    read = [_devices(name) for name in names]
    files = list(zip(names, read, strict=True))
    grown = {
        device.device: growers(before.held, device.held)
        for device in read[-1]
        for before in read[0]
        if len(read) > 1 and before.device == device.device
    }
    text = "\n".join(memory_text(Path(name).name, found) for name, found in files)
    for rows in grown.values():
        text += "\n" + as_growth(names, rows)
    if options.output:
        page = dashboard("html_report").memory_page(Path(names[-1]).name, read[-1], text)
        write(page, options.output)
    if options.json:
        read_files = [{"file": name, "devices": found} for name, found in files]
        show_json({"files": read_files, "grown": grown})
    else:
        show(text)
    return 0


def _devices(name: str) -> tuple[DeviceMemory, ...]:
    path = Path(name)
    progress = Progress(path.stat().st_size >> 10 if path.is_file() else 0, "KiB")
    try:
        return devices_of(read_snapshot(path, lambda nbytes: progress.add(nbytes >> 10)))
    finally:
        progress.end()


# ---- flight recorder -------------------------------------------------------------------------------


def flight(options: argparse.Namespace) -> int:
    """Reads the dumps of a job, and prints what hangs."""
    dumps, notes = _dumps([Path(name) for name in options.files])
    found, ranks = findings(dumps), [dump.rank for dump in dumps]
    notes += under_way(dumps) if not found else []
    if options.json:
        show_json({"ranks": ranks, "findings": found, "notes": notes})
    else:
        show(flight_text(found, ranks, notes))
    return int(bool(found))


def _dumps(paths: list[Path]) -> tuple[list[Dump], list[str]]:
    """One dump a rank, by rank; of a folder those files that are dumps."""
    found: dict[int, Dump] = {}
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
            dump = read_dump(file)
        except TraceError as error:
            if not is_optional:
                raise
            notes.append(str(error))
            continue
        finally:
            progress.add(1)
        other = found.get(dump.rank)
        if other is not None:
            notes.append(f"{other.file} and {dump.file} are both of rank {dump.rank}")
        if other is None or not any(entry.stack for entry in other.entries):
            found[dump.rank] = dump
    progress.end()
    if not found:
        raise TraceError(f"{paths[0]} holds no dumps of torch's Flight Recorder", DUMP_HINT)
    return [found[rank] for rank in sorted(found)], notes
