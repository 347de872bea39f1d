"""``zeromon trace memory`` and ``zeromon trace flight``: what torch has written about a run."""

import argparse
from pathlib import Path
from typing import Any

from zeromon.cli.options import dashboard, flag, option, refuse_format, write
from zeromon.cli.terminal import show, show_json
from zeromon.diagnosis.flight import findings, under_way
from zeromon.errors import TraceError
from zeromon.export.files import Progress
from zeromon.report.flight import as_text as flight_text
from zeromon.report.memory_snapshot import as_growth, as_text
from zeromon.traces.allocations import DeviceMemory, devices_of, growers
from zeromon.traces.allocator import read_snapshot
from zeromon.traces.flight import DUMP_HINT, RANK_IN_NAME, Dump, read_dump

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
    text = "\n".join(as_text(Path(name).name, found) for name, found in files)
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
