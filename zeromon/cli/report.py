"""Prints what a run did, and how it ended: steps, exposed communication, memory, deaths.

RUN is a run id or its beginning; without RUN, the newest run. The run may be live, ended, or killed
together with its collector. The first lines answer: how is it, what does a step wait for, what should be
changed, will memory run out; --full prints all tables. -o writes an HTML file with charts of every step,
which opens without a network, or, where Chromium or Chrome is installed, a PNG. Exit code 1 when a
finding is a warning or critical. With --prometheus URL the run is read from the server that scrapes its
collectors, for any number of nodes.

--ledger prints where every second of the job went instead: one cause for each second of each rank,
restarts included. Runs that were submitted again under the same --name, Slurm job or torchelastic run id
are one job, unless --run-only is given. The seconds of all ranks sum to the wall clock: 8 ranks spend 8
seconds a second. Goodput is the useful share: forwards, backwards and optimizers of steps that no
restart took again. The tokens of a cause are those that its seconds would have trained at the rate of
the useful ones. Exit code 1 when the job lost work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from zeromon.base.errors import RunAmbiguous, RunNotFound, SourceError, ZeromonError, os_errors_as
from zeromon.base.units import JOULES_A_KWH
from zeromon.cli.parser import add_flag, add_option, add_server, check_format, draw_module, in_range
from zeromon.cli.terminal import show_text, show_working
from zeromon.collector.run import snapshot_of_folder
from zeromon.diagnosis.rule import action_of
from zeromon.probes.process import process_start_ticks
from zeromon.readout.ledger import job_ledger, mean_watts
from zeromon.readout.report import activities, ledger_block, render_answers, render_run
from zeromon.ring import paths
from zeromon.snapshot import RunSnapshot, Severity
from zeromon.snapshot.ledger import Cause
from zeromon.snapshot.step import StepRange
from zeromon.sources.live import LiveSource, runs_of_node
from zeromon.sources.prometheus.client import chosen_server
from zeromon.sources.prometheus.source import find_listed_runs, only_listed_run
from zeromon.storage.run_store import Store, decode_snapshot, encode_snapshot
from zeromon.storage.snapshot_log import Past, findings_of_record
from zeromon.storage.step_history.queries import ranges_of_steps, readable_segment_tables
from zeromon.storage.step_history.rows import Series, row_of
from zeromon.storage.step_history.writer import rows_frame

if TYPE_CHECKING:
    import polars as pl


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon report [RUN] [--full] [--prometheus URL] [--json] [-o FILE] [--wait SECONDS]``"""
    parser.add_argument("run", nargs="?", help="run id or its beginning (default: the newest)")
    add_flag(parser, "--full", "print all tables and findings")
    add_flag(parser, "--json", "print JSON")
    add_server(parser)
    add_option(parser, "-o --output", "FILE", "write an HTML page, or .png")
    add_option(parser, "--wait", "SECONDS", "wait for the run to end first", in_range(0), 0.0)
    job = parser.add_argument_group("the ledger of the job")
    add_flag(job, "--ledger", "print where every second went, by cause")
    add_flag(job, "--run-only", "leave out other runs of the job")
    add_option(job, "--price", "PRICE", "price of an hour of a rank", in_range(0, 1e9, above=True))


def call(options: argparse.Namespace) -> int:
    """Finds the run, live or ended, and prints its report."""
    check_format(options.output, ".html", ".png")
    if not options.ledger and (options.run_only or options.price is not None):
        raise ZeromonError("--run-only and --price need --ledger")
    server = chosen_server(options.prometheus, named=bool(options.run))
    source = (
        only_listed_run(find_listed_runs(server, options.run)).open(server)
        if server is not None
        else None
    )
    read_run = source.latest if source is not None else lambda: newest_snapshot(options.run)
    deadline = time.monotonic() + options.wait
    with show_working("reading the run"):
        run = read_run()
    while not run.ended and time.monotonic() < deadline:
        time.sleep(0.25)
        run = read_run()
    if options.ledger:
        return print_job_ledger(run, options)
    if options.output:
        write = write_page_png if options.output.lower().endswith(".png") else write_html_page
        with show_working("drawing"):
            write(run, options.output, steps=source.series() if source is not None else None)
        sys.stderr.write(f"zeromon: wrote {options.output}\n")
    elif options.json:
        sys.stdout.write(encode_snapshot(run).decode() + "\n")
    else:
        show_text(report_text(run) if options.full else answers_text(run))
    return 1 if any(f.severity != Severity.INFO for f in run.findings) else 0


def print_job_ledger(last_run: RunSnapshot, options: argparse.Namespace) -> int:
    """Prints the ledger of the job of *last_run*; returns 1 where it lost work."""
    with show_working("reading the runs"):
        runs = [last_run] if options.run_only else runs_of_job(last_run)
        account = job_ledger(runs)
    if not account.rows:
        raise ZeromonError(f"run {last_run.run} has no ledger", "No rank of it has reported yet.")
    watts = mean_watts(last_run)
    if options.json:
        content = {
            "job": last_run.job or last_run.run, "runs": [run.run for run in runs],
            "attempts": account.attempts, "rank_seconds": account.rank_seconds,
            "goodput_ratio": account.goodput, "rows": [asdict(row) for row in account.rows],
            "notes": account.notes, "mean_watts": watts, "unit": account.unit,
            "units_per_useful_second": account.per_second if account.unit else None,
        }  # fmt: skip
        sys.stdout.write(json.dumps(content, default=str) + "\n")
    else:
        per = [] if options.price is None else [("money", options.price / 3600)]
        if watts is not None:
            per.append(("kWh at mean power", watts / len(last_run.ranks) / JOULES_A_KWH))
        head = f"job {last_run.job or last_run.run}: {', '.join(run.run for run in runs)}"
        sections = (head, ledger_block(runs, per), activities(last_run))
        show_text("\n\n".join(section for section in sections if section) + "\n")
    return 1 if any(row.cause is Cause.LOST for row in account.rows) else 0


def runs_of_job(run: RunSnapshot) -> list[RunSnapshot]:
    """All recorded runs of the job of *run*, the oldest first."""
    if not run.job:
        return [run]
    store = Store()
    siblings = [
        store.load(manifest.run)
        for manifest in store.list_manifests()
        if manifest.job == run.job and manifest.run != run.run and manifest.node == run.node
    ]
    return sorted((*siblings, run), key=lambda run: run.started_wall)


def write_html_page(
    run: RunSnapshot, path: str, *, still: bool = False, steps: Series | None = None
) -> None:
    """Writes the run, with its *steps* or its history, as one HTML file; raises :class:`SourceError`."""
    pages = draw_module("html_report")
    store = Store()
    columns = step_series(run, store.folder(run.run)) if steps is None else steps
    past = [] if run.origin else findings_of_record(store.folder(run.run))
    annotation = store.about(run.run)
    page = pages.run_page(run, columns, report_text(run), past, annotation, still=still)
    with os_errors_as(SourceError, f"write {path}", ""):
        Path(path).write_text(page)


_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "microsoft-edge")
_PAGE_WIDTH, _MAX_HEIGHT, _FIGURES_HEIGHT, _LINE_HEIGHT = 1160, 16_000, 2700, 19
_PATIENCE_SECONDS = 60


def write_page_png(run: RunSnapshot, path: str, *, steps: Series | None = None) -> None:
    """The page as a PNG, rendered by a headless browser; raises :class:`SourceError`."""
    browser = next((executable for executable in map(shutil.which, _BROWSERS) if executable), None)
    if browser is None:
        raise SourceError("a PNG needs Chromium or Chrome", "Write FILE.html, or install one.")
    row_count = report_text(run).count("\n")
    row_count += sum(12 if finding.remedy else 8 for finding in run.findings)
    high = min(_MAX_HEIGHT, _FIGURES_HEIGHT + _LINE_HEIGHT * row_count)
    with tempfile.TemporaryDirectory(prefix="zeromon-") as folder:
        page, snapshot = Path(folder) / "page.html", Path(folder) / "page.png"
        write_html_page(run, str(page), still=True, steps=steps)
        command = [
            # With the user's own profile, an open browser takes the command and writes no image
            browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/b",
            # Without virtual time, the image is taken before plotly has drawn
            f"--window-size={_PAGE_WIDTH},{high}", "--virtual-time-budget=10000",
            f"--screenshot={snapshot}", page.as_uri(),
        ]  # fmt: skip
        if os.geteuid() == 0:  # the browser's sandbox refuses root
            command.insert(1, "--no-sandbox")
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=_PATIENCE_SECONDS, check=False)
        if not snapshot.exists():
            raise SourceError(f"{browser} wrote no image", "Write FILE.html instead.")
        with os_errors_as(SourceError, f"write {path}", ""):
            shutil.copyfile(snapshot, path)


def step_series(run: RunSnapshot, folder: Path | None) -> Series:
    """The steps of a run by column: of the record in *folder*, else the last ones of the snapshot."""
    columns: Series = Past(folder).series() if folder is not None else {"step": []}
    if columns["step"]:
        return columns
    return recent_step_frame(run).sort("rank", "step").to_dict(as_series=False)


def step_tables(run: RunSnapshot, folder: Path | None) -> tuple[list[pl.LazyFrame], tuple[str, ...]]:
    """All steps, of the same source, in pieces that fit into memory; names of unreadable segments."""
    tables, broken = readable_segment_tables(folder / "history") if folder is not None else ([], ())
    return tables or [recent_step_frame(run).lazy()], broken


def recent_step_frame(run: RunSnapshot) -> pl.DataFrame:
    """The last steps, as the snapshot has them."""
    return rows_frame([row_of(rank.rank, step, 0) for rank in run.ranks for step in rank.steps.recent])


def answers_text(run: RunSnapshot) -> str:
    """The first lines of the report."""
    if run.origin:
        return render_answers(run, action_of=action_of)
    store = Store()
    past = findings_of_record(store.folder(run.run))
    return render_answers(run, store.about(run.run), past, action_of)


def report_text(run: RunSnapshot) -> str:
    """The whole report of a run, with its course over time and what its user wrote about it."""
    if run.origin:
        return render_run(run, ranges_over_time(run))
    store = Store()
    past_findings = findings_of_record(store.folder(run.run))
    return render_run(run, ranges_over_time(run), store.about(run.run), past_findings)


_LONG_STEPS = 1000


def ranges_over_time(run: RunSnapshot) -> list[StepRange]:
    """The run in ten ranges of steps, where it is too long to be described by its last steps."""
    if run.origin or max((rank.steps.watched_steps for rank in run.ranks), default=0) < _LONG_STEPS:
        return []
    return ranges_of_steps(Store().history(run.run))


_ENDING_SECONDS = 10.0
"""How long a collector may take to see that the processes of a run are gone."""


def newest_snapshot(name: str | None) -> RunSnapshot:
    """The newest snapshot of a run, from wherever; of one that has just ended, how it ended."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while _is_ending(run := _find_newest_snapshot(name)) and time.monotonic() < deadline:
        time.sleep(0.25)
    return run


def _is_ending(run: RunSnapshot) -> bool:
    """Returns whether all ranks of a local run have exited and its collector has not noticed yet."""
    is_here = run.node == socket.gethostname() and not (run.ended or run.origin)
    return is_here and bool(run.ranks) and all(process_start_ticks(r.pid) is None for r in run.ranks)


def _find_newest_snapshot(name: str | None) -> RunSnapshot:
    """The newest snapshot of a run: from a collector, from orphaned rings, or from the store."""
    snapshots = [*_live_snapshots(name), *_orphan_snapshots(name)]
    try:
        snapshots.append(Store().load(name))
    # Early in a live run the store has no record of it; older ones may begin with the same name
    except (RunNotFound, RunAmbiguous):
        if not snapshots:
            raise
    exact = [run for run in snapshots if run.run == name]
    # The same run may be stored and live: the newer snapshot is the more complete one, unless its rings
    # cannot be read: a collector that is too busy to answer may know what was in them
    return max(exact or snapshots, key=lambda run: (run.started_wall, bool(run.ranks), run.taken_wall))


def snapshot_or_none(name: str) -> RunSnapshot | None:
    """Returns the run *name*, live or as recorded; None where there is none."""
    with suppress(ZeromonError):
        return snapshot_of(name)[0]
    return None


def snapshot_of(name: str | None) -> tuple[RunSnapshot, Path | None]:
    """The run *name*, or of a path (``report --json``, or a record), and the folder of its record."""
    path = Path(name or "")
    if name and (path / "snapshot.json").is_file():
        folder = path.resolve()
        return Store(runs=folder.parent).load(folder.name), folder
    if path.suffix != ".json" or not path.is_file():
        run = newest_snapshot(name)
        return run, Store().folder(run.run)
    with os_errors_as(SourceError, f"read {path}", ""):
        return decode_snapshot(path.read_bytes()), None


def _live_snapshots(name: str | None) -> list[RunSnapshot]:
    """The runs that collectors of this node follow; one that ends at this moment has left its record."""
    snapshots = []
    for live in runs_of_node():
        if name is None or live.run.startswith(name):
            with suppress(SourceError):
                snapshots.append(LiveSource(live.address, live.run).latest())
    return snapshots


def _orphan_snapshots(name: str | None) -> list[RunSnapshot]:
    """Runs with rings that no collector follows."""
    followed = {live.run for live in runs_of_node()}
    folders: list[Path] = []
    for root in paths.user_ring_roots():
        folders += [f for f in root.glob("*/") if paths.is_run_id(f.name)]
    return [
        snapshot_of_folder(folder)
        for folder in folders
        if folder.name not in followed
        and (name is None or folder.name.startswith(name))
        and any(folder.glob("rank*.ring"))
    ]
