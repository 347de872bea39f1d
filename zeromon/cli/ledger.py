"""Prints where every second of a job went: one cause for each second of each rank, restarts included.

JOB is the name of a run or its beginning; without JOB, the newest run. Runs that were submitted again
under the same --name, Slurm job or torchelastic run id are one job, unless --run-only is given. The
seconds of all ranks sum to the wall clock: 8 ranks spend 8 seconds a second. Goodput is the useful
share: forwards, backwards and optimizers of steps that no restart took again. The tokens of a cause are
those that its seconds would have trained at the rate of the useful ones. --price is the price of an hour
of a rank. Exit code 1 when the job lost work.
"""

import argparse
import json
import sys
from dataclasses import asdict

from zeromon.cli.options import between, flag, option
from zeromon.cli.report import newest_snapshot
from zeromon.cli.terminal import show, working
from zeromon.errors import ZeromonError
from zeromon.readout.ledger import job_ledger, mean_watts
from zeromon.report.render import activities, ledger
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.ledger import Cause
from zeromon.storage.run_store import Store
from zeromon.units import JOULES_A_KWH


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon ledger [JOB] [--run-only] [--price PRICE] [--json]``"""
    parser.add_argument("job", nargs="?", help="run id or its beginning (default: the newest)")
    flag(parser, "--run-only", "leave out other runs of the job")
    option(parser, "--price", "PRICE", "price of an hour of a rank", between(0, 1e9, above=True))
    flag(parser, "--json", "print JSON")


def call(options: argparse.Namespace) -> int:
    """Finds the runs of the job and prints their ledger."""
    with working("reading the runs"):
        newest = newest_snapshot(options.job)
        runs = [newest] if options.run_only else runs_of_job(newest)
        whole = job_ledger(runs)
    if not whole.rows:
        raise ZeromonError(f"run {newest.run} has no ledger", "No rank of it has reported yet.")
    if options.json:
        content = {
            "job": newest.job or newest.run, "runs": [run.run for run in runs],
            "attempts": whole.attempts, "rank_seconds": whole.rank_seconds,
            "goodput_ratio": whole.goodput, "rows": [asdict(row) for row in whole.rows],
            "notes": whole.notes, "mean_watts": mean_watts(newest), "unit": whole.unit,
            "units_per_useful_second": whole.per_second if whole.unit else None,
        }  # fmt: skip
        sys.stdout.write(json.dumps(content, default=str) + "\n")
    else:
        per = [] if options.price is None else [("money", options.price / 3600)]
        watts = mean_watts(newest)
        if watts is not None:
            per.append(("kWh at mean power", watts / len(newest.ranks) / JOULES_A_KWH))
        head = f"job {newest.job or newest.run}: {', '.join(run.run for run in runs)}"
        parts = (head, ledger(runs, per), activities(newest))
        show("\n\n".join(part for part in parts if part) + "\n")
    return 1 if any(row.cause is Cause.LOST for row in whole.rows) else 0


def runs_of_job(newest: RunSnapshot) -> list[RunSnapshot]:
    """All recorded runs of the job of *newest*, the oldest first."""
    if not newest.job:
        return [newest]
    store = Store()
    others = [
        store.load(one.run)
        for one in store.manifests()
        if one.job == newest.job and one.run != newest.run and one.node == newest.node
    ]
    return sorted((*others, newest), key=lambda run: run.started_wall)
