"""Holds zeromon's figures of CUDA runs against the device's timeline: ``truth_table.py [COLUMN...]``.

A column is a version of torch with its ranks (``2.13.0:2``). Each strategy trains there device-bound and
launch-bound, and reads its loss in each step, in each tenth one, or never. A result is kept as a line of
``--out``; a run that was cut goes on where it stopped. ``--publish FILE`` stores the results for
docs/evidence/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("tests", "tools", "")]

from evidence_pages import Entry, commit_here, publish as publish_entries, today  # noqa: E402
from support import FORKED, LAUNCH, ForkServer, Node, clean_environment  # noqa: E402

from vgpu.environment import Environment, Missing, find  # noqa: E402
from vgpu.table import reason  # noqa: E402
from vgpu.truth import NOTHING, Timeline  # noqa: E402
from zeromon.fold.ledger import add_ledger_step  # noqa: E402
from zeromon.fold.state import LedgerSums  # noqa: E402
from zeromon.readout.breakdown import RECORDED  # noqa: E402
from zeromon.readout.ledger import USEFUL  # noqa: E402
from zeromon.ring.codes import operation_by_name  # noqa: E402
from zeromon.snapshot import RankSnapshot  # noqa: E402
from zeromon.snapshot.communication import overlap_ratio  # noqa: E402
from zeromon_vgpu.intervals import clip, length, subtract, union  # noqa: E402
from zeromon_vgpu.machine import write_machine  # noqa: E402

PROGRAMS = Path(__file__).parent / "programs"
COMPUTE_STREAM = 7
STEPS = 14
FIRST, LAST = 3, STEPS - 2
"""Steps of the program, from 0, that are compared: neither the last one nor the first three.

In the second step DDP rebuilds its buckets, with ``static_graph`` in the third: such a step is untimed.
"""
STEP_RATIO, POINTS, BANDWIDTH_RATIO = 0.02, 0.01, 0.1
"""The targets: by how much a step, a share of a step and a bandwidth may differ."""
TRAINED = ("forward", "backward", "optimizer")
COMPARED_PHASES = (*TRAINED, "other")
_COMPUTES = [number for number, name in enumerate(RECORDED) if name in TRAINED]
BOUNDS: dict[str, tuple[dict[str, float], tuple[str, ...]]] = {
    "device": ({"slow": 300, "node_speed": 2e8}, ("--hidden", "512", "--batch", "512")),
    "launch": ({"node_speed": 2e9}, ("--hidden", "256", "--layers", "24")),
}
"""What sets the pace -> the machine, and the model. Slow kernels let the host run ahead.

A launch-bound step has as many layers as a real model: with 4 of them a tenth of a millisecond of
torch's own Python around a phase is a point of the step. With 512 tokens a gradient is copied in
2 % of the time in which it is computed, as with some thousand tokens on a real device.
"""
LOGS = ("1", "10", "0")
VIRTUAL = "virtual H100"
"""The device of a result that names none."""


@dataclass(frozen=True)
class Strategy:
    """One program of the table."""

    title: str
    words: tuple[str, ...]
    program: str = "train.py"
    least_ranks: int = 2
    arithmetic: bool = False
    """True where it sends values that the host reads."""
    merged: tuple[str, ...] = ()
    """Phases that count as the first of them, as the program's marks do not tell them apart.

    Where nothing wraps the model, forward begins where the last step ended. A schedule of a pipeline
    alternates between them.
    """


STRATEGIES = (
    Strategy("DDP", ("ddp",)),
    Strategy("DDP, `gradient_as_bucket_view`", ("ddp", "--bucket-view")),
    Strategy("DDP, `find_unused_parameters`", ("ddp", "--find-unused")),
    Strategy("DDP, `static_graph`", ("ddp", "--static-graph")),
    Strategy("DDP, `no_sync`, 2 micro-steps", ("ddp", "--accumulate", "2", "--no-sync")),
    Strategy("DDP, `torch.compile`", ("ddp", "--compile")),
    Strategy("HF Trainer, its defaults", (), "trainer.py"),
    Strategy("FSDP1", ("fsdp1",)),
    Strategy("FSDP2", ("fsdp2",)),
    Strategy("FSDP2, `torch.compile`", ("fsdp2", "--compile")),
    Strategy("HSDP", ("hsdp",), least_ranks=4),
    Strategy("ZeRO-1", ("zero1",)),
    Strategy("ZeRO-2", ("zero2",)),
    Strategy("ZeRO-3", ("zero3",)),
    Strategy("tensor parallel", ("tp",), merged=("forward", "other")),
    Strategy("pipeline", ("pp",), arithmetic=True, merged=("forward", "backward", "other")),
)


# ---- one rank beside its device -------------------------------------------------------------------


def compare(rank: RankSnapshot, truth: Timeline, merged: Sequence[str] = ()) -> dict[str, Any]:
    """Figures of one rank, as [zeromon, device] or [zeromon, device's least, most]; None: n/a.

    Exposed time on the device is at least how long the compute stream waits for an event while a
    collective runs and no kernel does. It is at most |C \\ K| with the kernels of that stream: between
    them lie the moments in which the stream waits for the host, and the kernels of other streams.
    """
    steps = [one for one in rank.steps.recent if FIRST < one.step <= LAST + 1]
    start, end = truth.optimizer_end(FIRST - 1), truth.optimizer_end(LAST)
    whole, figures = end - start, truth.figures(start, end)
    found: dict[str, Any] = {
        "steps": len(steps),
        "step": [sum(one.end_ns - one.start_ns for one in steps) / 1e9, whole / 1e9],
    }
    spent = dict.fromkeys(RECORDED, 0)
    for one in steps:
        for name, nanoseconds in zip(RECORDED, one.phase_ns, strict=False):
            spent[name] += nanoseconds
    phases = truth.phases(start, end)
    told = {name: [spent[name], phases.get(name, NOTHING).span] for name in COMPARED_PHASES}
    for name in merged[1:]:
        told[merged[0]] = [sum(pair) for pair in zip(told[merged[0]], told.pop(name), strict=True)]
    found |= {name: [one / whole for one in pair] for name, pair in told.items()}
    timed = [one for one in steps if one.timed]
    work = truth.of("kernel", "fill", "copy")
    kernels = union(one.span for one in work if one.stream == COMPUTE_STREAM)
    most = length(subtract(clip(truth.communication, start, end), kernels))
    least = truth.least_exposed(start, end, COMPUTE_STREAM)
    exposed = sum(one.exposed_ns for one in timed)
    share = exposed / max(1, sum(one.end_ns - one.start_ns for one in timed))
    found["exposed"] = [share if timed else None, least / whole, most / whole]
    communication = sum(max(0, one.communication_ns) for one in timed)
    is_known = communication and all(one.communication_ns >= 0 for one in timed)
    overlap = overlap_ratio(communication, exposed) if is_known else None
    widest = max(figures.communication, 1)
    found["overlap"] = [overlap, 1 - most / widest, 1 - least / widest]
    # the ledger has all steps; those around the compared ones are taken out again
    around = LedgerSums()
    for one in rank.steps.recent:
        if one not in steps:
            add_ledger_step(around, one)
    useful = sum(row.seconds for row in rank.ledger.rows if row.cause in USEFUL)
    useful -= sum(around.spent_ns[at] - around.exposed_ns[at] for at in _COMPUTES) / 1e9
    trained = sum(phases.get(name, NOTHING).span for name in TRAINED)
    or_merged = sum(phases.get(name, NOTHING).span for name in {*TRAINED, *merged})
    bounds = [(trained - most) / whole, (or_merged - least) / whole]
    if "backward" not in merged:  # of a pipeline it is not known what is between the phases
        found["goodput"] = [useful * 1e9 / whole, *bounds]
    found["copy"], found["idle"] = figures.copy / whole, figures.idle / whole
    found["busbw"] = bus_bandwidths(rank, truth, start, end)
    return found


def bus_bandwidths(
    rank: RankSnapshot, truth: Timeline, start: int, end: int
) -> dict[str, list[float | None]]:
    """Operation -> [zeromon's last steps, the device's from *start* to *end*], bytes/s; None: n/a.

    An operation whose bytes zeromon has only in part, as beside DDP's untimed buckets, is n/a. One with
    less than a hundredth of the bytes is left out: it takes as long as its kernel takes to start.
    """
    device: dict[str, list[float]] = {}
    for one in truth.of("collective"):
        if start <= one.start and one.end <= end and "bus_bytes" in one.detail:
            function = one.name.removeprefix("ncclDevKernel_").partition("_")[0]
            sums = device.setdefault(operation_by_name(function).label, [0, 0, 0])
            sums[0] += int(one.detail["bus_bytes"])
            sums[1] += one.end - one.transfer
            sums[2] += one.bytes
    found: dict[str, list[float | None]] = {}
    most_bytes = max((nbytes for _, _, nbytes in device.values()), default=0)
    for op, (bus_bytes, nanoseconds, nbytes) in device.items():
        if nbytes < 0.01 * most_bytes:
            continue
        rows = [row for row in rank.communication.traffic if row.op == op and row.busbw_bytes_per_second]
        timed = [
            (row.busbw_bytes_per_second or 0.0, row.transfer_seconds or row.seconds) for row in rows
        ]
        spent = sum(seconds for _, seconds in timed)
        is_whole = sum(row.nbytes for row in rows) * (LAST + 1 - FIRST) > 0.9 * nbytes
        sent = sum(rate * seconds for rate, seconds in timed)
        found[op] = [sent / spent if spent and is_whole else None, bus_bytes * 1e9 / nanoseconds]
    return found


def error(figures: Sequence[float | None]) -> float | None:
    """How far zeromon's figure lies outside what the device says; None where it is n/a."""
    shown, *device = figures
    if shown is None:
        return None
    bounds = [one for one in device if one is not None]
    return max(min(bounds) - shown, shown - max(bounds), 0.0)


def busbw_error(rank: Mapping[str, Any]) -> float | None:
    """By which ratio the operation that is furthest off differs; None where zeromon has no bandwidth."""
    pairs = rank.get("busbw", {}).values()
    errors = (zeromon / device - 1 for zeromon, device in pairs if zeromon is not None)
    return max(errors, key=abs, default=None)


def misses(ranks: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The figures of a cell that miss their target."""
    worst: dict[str, float] = defaultdict(float)
    for rank in ranks:
        zeromon, device = rank["step"]
        worst["step"] = max(worst["step"], abs(zeromon / device - 1) / STEP_RATIO)
        worst["busbw"] = max(worst["busbw"], abs(busbw_error(rank) or 0) / BANDWIDTH_RATIO)
        for name in (*COMPARED_PHASES, "exposed", "goodput"):
            if name not in rank:
                continue
            worst[name] = max(worst[name], (error(rank[name]) or 0.0) / POINTS)
    return (name for name, ratio in worst.items() if ratio > 1)


class Place(Protocol):
    """Where programs train: on the virtual device, or on a GPU."""

    def command(self, folder: Path, bound: str) -> list[str]:
        """What starts a program on so many ranks; its words follow. *folder* is the run's."""

    def shape(self, bound: str) -> Sequence[str]:
        """The model that lets this side set the pace."""

    def variables(self, folder: Path) -> dict[str, str]:
        """What its processes find in their environment."""

    def timeline(self, folder: Path, rank: int) -> Timeline:
        """What the device of a rank did."""

    def server(self) -> ForkServer | None:
        """What forks the ranks, so that not each of them imports torch."""


@dataclass(frozen=True)
class Virtual:
    """The virtual device."""

    environment: Environment

    def command(self, folder: Path, bound: str) -> list[str]:
        write_machine(folder, changes=BOUNDS[bound][0])
        return [str(self.environment.python), *LAUNCH[1:]]

    def shape(self, bound: str) -> Sequence[str]:
        return BOUNDS[bound][1]

    def variables(self, folder: Path) -> dict[str, str]:
        return self.environment.variables(folder)

    def timeline(self, folder: Path, rank: int) -> Timeline:
        return Timeline.read(folder, rank)

    def server(self) -> ForkServer | None:
        return cuda_fork_server(self.environment)


@cache
def cuda_fork_server(environment: Environment) -> ForkServer:
    """What forks ranks from a process that has imported the CUDA build of torch, and DeepSpeed."""
    own = clean_environment() | environment.variables(Path(tempfile.gettempdir()))
    own.pop("VGPU_DIR")  # that of each run
    own["DS_ACCELERATOR"] = "cuda"  # without a run, DeepSpeed finds no device
    return ForkServer("deepspeed", environment=own, python=str(environment.python))


def run_cell(place: Place, strategy: Strategy, bound: str, log: str, ranks: int) -> dict[str, Any]:
    """Trains once under zeromon; the figures of each rank, or the reason why there are none."""
    with tempfile.TemporaryDirectory() as name, closing(Node(Path(name, "node"))) as node:
        folder = Path(name, "device")
        folder.mkdir()
        words = [str(PROGRAMS / strategy.program), *strategy.words, *place.shape(bound)]
        words += ["--steps", str(STEPS), "--log", log]
        command = place.command(folder, bound)
        at = command.index(LAUNCH[1]) + 1
        command[at:at] = [str(ranks)]
        variables = place.variables(folder)
        if strategy.arithmetic:
            variables["VGPU_ARITHMETIC"] = "1"
        server = None if strategy.arithmetic else place.server()
        if strategy.arithmetic:  # which begins with the process: one that imports torch for its ranks
            command[at - 1 : at] = FORKED[1:]
        result = node.run([*command, *words], timeout=600, server=server, **variables)
        if result.code:
            return {"failed": result.output[-3000:]}
        compared = [
            compare(rank, place.timeline(folder, rank.rank), strategy.merged)
            for rank in result.snapshot.ranks
        ]
        return {"ranks": compared}


# ---- the page --------------------------------------------------------------------------------------

HEAD = (
    "strategy", "bound", "log every", "step", *COMPARED_PHASES, "exposed", "overlap", "goodput", "busbw",
    "off target",
)  # fmt: skip


def percent(share: float | None) -> float | None:
    """A share in percent or points, to a tenth; None where it is not known."""
    return None if share is None else round(share * 100, 1)


def summary_row(cell: Mapping[str, Any]) -> list[Any]:
    """The cell as a row of :data:`HEAD`; each figure is that of the rank that is furthest off."""
    head = [cell["strategy"], cell["bound"], "never" if cell["log"] == "0" else cell["log"]]
    if "failed" in cell:
        return [*head, *[None] * (len(HEAD) - len(head) - 1), f"failed: {reason(cell['failed'])}"]
    ranks = cell["ranks"]
    step = max((rank["step"][0] / rank["step"][1] - 1 for rank in ranks), key=abs)
    phases = [
        max((rank[name][0] - rank[name][1] for rank in ranks if name in rank), key=abs, default=None)
        for name in COMPARED_PHASES
    ]
    exposed = max((rank["exposed"] for rank in ranks), key=lambda one: error(one) or 0.0)
    overlap = max((rank["overlap"] for rank in ranks), key=lambda one: error(one) or 0.0)
    goodput = max((one["goodput"] for one in ranks if "goodput" in one), key=error, default=None)
    bandwidths = [one for rank in ranks if (one := busbw_error(rank)) is not None]
    busbw = max(bandwidths, key=abs, default=None)
    ranges = [figures and list(map(percent, figures)) for figures in (exposed, overlap, goodput)]
    return [
        *head,
        percent(step),
        *map(percent, phases),
        *ranges,
        percent(busbw),
        ", ".join(misses(ranks)),
    ]


def entries_of(cells: Iterable[Mapping[str, Any]], commit: str = "") -> dict[str, Entry]:
    """One entry per device, torch and number of ranks; *commit* where the results have none."""
    columns: dict[tuple[str, str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for cell in cells:
        columns[cell.get("device", VIRTUAL), cell["version"], cell["world"]].append(cell)
    return {
        f"{device.split()[0].lower()}-{version}-{world}"
        if device == VIRTUAL
        else device.split()[-1].lower(): {
            "tool": "tests/vgpu/truth_table.py" if device == VIRTUAL else "tests/gpu/truth.py",
            "date": max(cell.get("date", "") for cell in rows),
            "commit": max(rows, key=lambda cell: cell.get("date", "")).get("commit") or commit,
            "machine": f"{device}, torch {version}, {world} ranks",
            "view": "timeline", "head": list(HEAD), "rows": [summary_row(cell) for cell in rows],
        }
        for (device, version, world), rows in columns.items()
    }  # fmt: skip


def publish(files: Sequence[Path], commit: str = "") -> None:
    """Stores the results in *files*; of a cell that is there twice, the last one."""
    cells = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    publish_entries("timeline", entries_of({cell_key(cell): cell for cell in cells}.values(), commit))


def cell_key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a cell is of."""
    names = "device", "version", "world", "strategy", "bound", "log"
    return tuple(cell.get(name, VIRTUAL) for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("columns", nargs="*", default=["2.13.0:2"], metavar="VERSION:RANKS")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "truth.jsonl")
    parser.add_argument("--only", nargs="*", default=[], help="titles of strategies that contain this")
    parser.add_argument("--logs", nargs="*", default=LOGS)
    parser.add_argument("--bounds", nargs="*", default=list(BOUNDS))
    parser.add_argument("--commit", default="", help="commit of the results, where they lack it")
    parser.add_argument("--publish", type=Path, nargs="+", help="store these results for the page")
    given = parser.parse_args()
    if given.publish:
        publish(given.publish, given.commit)
        return 0
    known = given.out.read_text().splitlines() if given.out.exists() else []
    have = {cell_key(json.loads(line)) for line in known}
    missed, commit = 0, commit_here()
    for column in given.columns:
        version, _, count = column.partition(":")
        try:
            environment = find(version)
        except Missing as reason:
            print(reason, file=sys.stderr)
            return 3
        for strategy in STRATEGIES:
            if given.only and not any(word in strategy.title for word in given.only):
                continue
            for bound in given.bounds:
                for log in given.logs:
                    cell = {"version": version, "world": int(count), "strategy": strategy.title,
                            "bound": bound, "log": log, "date": today(), "commit": commit}  # fmt: skip
                    if cell_key(cell) in have or int(count) < strategy.least_ranks:
                        continue
                    cell |= run_cell(Virtual(environment), strategy, bound, log, int(count))
                    with given.out.open("a") as file:
                        file.write(json.dumps(cell) + "\n")
                    print(*summary_row(cell), sep=" | ", flush=True)
                    missed += "ranks" not in cell or bool(list(misses(cell["ranks"])))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
