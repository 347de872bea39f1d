"""The benches of zeromon, one after the other: `make bench`; beside other tools: `make bench-peers`.

    run.py [-o FILE] [NAME ...]       all, or those whose name contains one of the words; a command with
                                      arguments, as "bench_rings.py 128 8 600 15", runs as it is
    run.py --peers [-o FILE]          those that install or start other tools
    run.py --compare A.json B.json    what got worse beyond the noise; exit code 1 if anything did
    run.py --publish FILE             stores the figures for the pages of docs/evidence

The file has every figure with its unit, which direction is better, and its noise; and the commit, the
versions and the machine. A short bench runs several times: the figure is the median, and its noise at
least what the rounds differ by.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from records import FILE

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "tools"))

import evidence_pages  # noqa: E402

ASSUMED = 0.2
"""The noise of a figure whose bench ran once and does not know it, as a share of the figure."""

LEAST = 0.05
"""The least noise of a figure of several rounds: those of another hour differ by more."""


class Bench(NamedTuple):
    """A program with the arguments of its short form, and how long all its rounds take."""

    command: str
    minutes: float
    rounds: int = 1


OURS = (
    Bench("bench_hooks.py", 0.3),
    Bench("bench_imports.py 3", 0.4),
    Bench("bench_census.py", 0.2, rounds=3),
    Bench("bench_collector.py", 1.1),
    Bench("bench_counts.py --calls ddp fsdp2 zero3", 0.8),
    Bench("bench_exposition.py 8 80", 0.2),
    Bench("bench_forecast.py 5", 0.3),
    Bench("bench_nodes.py 16 128", 0.2, rounds=2),
    Bench("bench_store.py 200000 ours", 0.4),
    Bench("bench_snapshot.py 0.1", 0.4),
    Bench("bench_traces.py ours", 0.3, rounds=2),
    Bench("bench_seconds.py 1 ddp fsdp2", 1),
    Bench("truth/ours.py", 1.2),
    Bench("bench_exposed.py ddp", 0.8),
    Bench("bench_pipeline.py", 1.1),
    Bench("bench_step.py 50 small", 2.5),
    Bench("bench_stragglers.py 0.2", 1.5),
    Bench("bench_tui.py ours", 2.9),
    Bench("bench_dash.py", 2.1),
    Bench("bench_attach.py 10 fsdp2", 0.3),
    Bench("bench_soak.py --steps 300", 0.5),
    Bench("bench_rings.py 8 8 30 15", 1.2),
)
"""Not here, because they take long, or need a cgroup of their own: advice, fit, fleet, ledger, scale,
try, whatif. `rings` fails where no prometheus is installed."""
PEERS = (
    Bench("bench_prediction.py", 2.2),
    Bench("bench_traces.py", 2),
    Bench("bench_attach.py", 10),
    Bench("bench_store.py", 10),
    Bench("bench_tui.py", 6),
    Bench("bench_fit_peers.py", 6),
    Bench("truth/side_by_side.py --pairs 12", 25),
)
PUBLISHED = {
    "attach": "cost.attach", "census": "cost.census", "collector": "cost.collector",
    "exposition": "cost.exposition", "forecast": "accuracy.forecast", "hooks": "cost.hooks",
    "imports": "cost.imports", "ours": "accuracy.truth", "prediction": "accuracy.prediction",
    "rings": "scale.rings", "scale": "scale.prometheus", "seconds": "accuracy.seconds",
    "snapshot": "cost.file-snapshot", "soak": "reliability.soak",
    "store": "cost.store", "traces": "cost.traces", "tui": "cost.tui",
}  # fmt: skip
"""Bench -> the file and entry of docs/evidence/data that its figures replace."""
PACKAGES = ("torch", "deepspeed", "numpy", "polars", "msgspec", "textual", "dash")


def figures(bench: Bench) -> tuple[list[dict[str, Any]], int]:
    """The figures of all rounds of *bench*, and its exit code where one failed."""
    kept: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    name, *words = bench.command.split()
    code = 0
    for _ in range(bench.rounds):
        with tempfile.NamedTemporaryFile("r") as file:
            command = [sys.executable, "-W", "ignore", str(HERE / name), *words]
            # an installed package has its bytecode: without it each start would compile anew
            env = os.environ | {FILE: file.name, "PYTHONDONTWRITEBYTECODE": ""}
            code |= subprocess.run(command, env=env, check=False).returncode
            for line in file:
                row = json.loads(line)
                kept[row["name"]].append(row)
    title = Path(name).stem.removeprefix("bench_")
    return [merged(f"{title}: {key}", rows) for key, rows in kept.items()], code


def merged(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of the rounds."""
    values = [row["value"] for row in rows]
    noises = [row["noise"] for row in rows if row["noise"] is not None]
    middle = statistics.median(values)
    if len(values) > 1 and rows[0]["noise"] is None:
        noises.append(max(max(values) - min(values), LEAST * abs(middle)))
    noise = max(noises, default=None)
    return rows[0] | {"name": name, "value": middle, "noise": noise}


def surroundings() -> dict[str, Any]:
    """The commit, the versions and the machine."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    changed = " with changes" if git("status", "--porcelain") else ""
    versions = {name: found[name] for name in PACKAGES if name in found}
    return {
        "commit": git("rev-parse", "HEAD") + changed,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"python": platform.python_version()} | versions,
        "machine": {
            "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
            "cores": os.cpu_count(), "kernel": platform.release(),
        },
        "load": os.getloadavg()[0],
    }  # fmt: skip


def compared(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], bool]:
    """The lines of a comparison, and whether anything got worse."""
    lines = [
        f"{part}: {before[part]} / {after[part]}"
        for part in ("commit", "versions", "machine")
        if before[part] != after[part]
    ]
    old, new = ({row["name"]: row for row in one["figures"]} for one in (before, after))
    verdicts: defaultdict[str, list[str]] = defaultdict(list)
    for name in old.keys() & new.keys():
        a, b = old[name], new[name]
        noise = spread(a) + spread(b)
        change = abs(b["value"]) - abs(a["value"]) if a["better"] == "zero" else b["value"] - a["value"]
        worse = -change if a["better"] == "higher" else change
        verdict = "within the noise" if abs(worse) <= noise else "worse" if worse > 0 else "better"
        share = f" ({change / abs(a['value']):+.1%})" if a["value"] else ""
        verdicts[verdict].append(
            f"  {name}: {a['value']:.4g} -> {b['value']:.4g} {a['unit']}{share}, noise {noise:.2g}"
        )
    for verdict in ("worse", "better"):
        lines += [f"{verdict}: {len(verdicts[verdict])}", *sorted(verdicts[verdict])]
    lines.append(f"within the noise: {len(verdicts['within the noise'])}")
    for only, names in (("first", old.keys() - new.keys()), ("second", new.keys() - old.keys())):
        lines += [f"only in the {only}: {', '.join(sorted(names))}"] if names else []
    return lines, bool(verdicts["worse"])


def spread(row: dict[str, Any]) -> float:
    """The noise of a figure; an assumed one where it is not known."""
    return float(row["noise"] if row["noise"] is not None else ASSUMED * abs(row["value"]))


def run(benches: Iterable[Bench], path: Path) -> int:
    """Runs them, and writes what there is after each; returns how many failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = surroundings() | {"minutes": {}, "failed": [], "figures": []}
    for bench in benches:
        print(f"== {bench.command}", flush=True)
        began = time.monotonic()
        rows, code = figures(bench)
        found["figures"] += rows
        found["minutes"][bench.command] = round((time.monotonic() - began) / 60, 2)
        found["failed"] += [bench.command] if code else []
        path.write_text(json.dumps(found, indent=1) + "\n")
    spent, failed = sum(found["minutes"].values()), ", ".join(found["failed"]) or "none"
    print(f"{len(found['figures'])} figures in {path}, {spent:.1f} minutes; failed: {failed}")
    return len(found["failed"])


def publish(found: dict[str, Any], folder: Path = evidence_pages.EVIDENCE) -> list[str]:
    """Stores the figures of each bench that has an entry; returns the benches that have none."""
    machine, torch = found["machine"], found["versions"].get("torch", "n/a")
    programs = {Path(command.split()[0]).stem.removeprefix("bench_"): command.split()[0]
                for command in found["minutes"]}  # fmt: skip
    without = []
    for title, program in programs.items():
        rows = [row for row in found["figures"] if row["name"].startswith(f"{title}: ")]
        if title not in PUBLISHED or not rows:
            without.append(program)
            continue
        subject, _, name = PUBLISHED[title].partition(".")
        entry = {
            "tool": f"tests/bench/{program}", "date": found["date"][:10], "commit": found["commit"],
            "machine": f"{machine['cpu']}, {machine['cores']} cores, torch {torch}",
            "head": ["figure", "value", "noise"],
            "rows": [
                [row["name"].partition(": ")[2], f"{row['value']:,.4g} {row['unit']}",
                 "n/a" if row["noise"] is None else f"{row['noise']:.2g}"]
                for row in rows
            ],
        }  # fmt: skip
        evidence_pages.publish(subject, {name: entry}, folder)
    return without


def main() -> int:
    """Runs, compares or publishes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--peers", action="store_true", help="those beside other tools")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench.json"), metavar="FILE")
    parser.add_argument("--publish", type=Path, metavar="FILE", help="store these figures")
    options = parser.parse_args()
    if options.publish:
        without = publish(json.loads(options.publish.read_text()))
        print(f"not on a page: {', '.join(without) or 'none'}")
        return 0
    if options.compare:
        lines, worse = compared(*(json.loads(path.read_text()) for path in options.compare))
        print("\n".join(lines))
        return worse
    benches = PEERS if options.peers else OURS
    long_forms = [name for name in options.names if ".py " in name]
    names = [name for name in options.names if name not in long_forms]
    chosen = [b for b in benches if not options.names or any(name in b.command for name in names)]
    chosen += [Bench(command, 0) for command in long_forms]
    return run(chosen, options.output) > 0


if __name__ == "__main__":
    sys.exit(main())
