"""Every figure of the first screen beside an independent count: `python tests/bench/truth/ours.py`.

Figures, charts and parts of a step are those that the terminal's overview and the page's take from
zeromon/readout. Simulated ranks are counted by arithmetic (simulated.py).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import real
from records import keep
from scores import Case, Readings, Row, percent, rows, table, worst
from simulated import RANKS, STEPS, WINDOW, simulation
from support import LAUNCH, Node

from zeromon.collector.daemon import Collector
from zeromon.readout.breakdown import PARTS, rank_parts
from zeromon.readout.charts import charts_of
from zeromon.readout.figures import FIGURES
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.storage.run_store import Store

OURS = "zeromon"
SEEDS = range(1, 21)

FIRST_SCREEN = (
    *(figure.name for figure in FIGURES),
    *(f"part {part}" for part in PARTS),
    "chart step-time",
    "chart memory",
    "chart exposed",
)
"""Names of all figures. Of the others steps/s is 1 / step, tokens/s and MFU need what only the user
knows, and what watching costs needs runs without zeromon (bench_step.py)."""


def readings(ranks: Sequence[RankSnapshot], steps: int = WINDOW) -> Readings:
    """What the first screen shows of *ranks*; of charts the last so many *steps*."""
    found: dict[str, dict[int, list[float | None]]] = {name: {} for name in FIRST_SCREEN}
    for rank in ranks:
        for figure in FIGURES:
            found[figure.name][rank.rank] = [figure.of_rank(rank)]
        parts: Mapping[str, float] = rank_parts(rank)
        for part in PARTS:
            found[f"part {part}"][rank.rank] = [parts.get(part)]
        for chart in charts_of(ranks):
            if f"chart {chart.name}" not in found:
                continue  # throughput, as tokens/s
            found[f"chart {chart.name}"][rank.rank] = [*map(chart.read, rank.steps.recent[-steps:])]
    return found


def simulated(seed: int) -> tuple[Case, Readings]:
    """One simulation, through rings, collector and snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        rings = Path(folder) / "rings" / "run"
        rings.mkdir(mode=0o700, parents=True)
        collector = Collector(rings.parent, Store(Path(folder) / "store"))
        made = simulation(seed)
        made.write(rings)
        collector.tick()
        (run,) = collector.view
        assert len(run.ranks) == RANKS and {rank.steps.last_step for rank in run.ranks} == {STEPS}
        return made.case(seed), readings(run.ranks)


def trained(kind: str) -> tuple[Case, Readings]:
    """One run of two ranks on gloo that counts itself."""
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-truth-")))
    counts = node.folder / "counts"
    counts.mkdir()
    found: list[RunSnapshot] = []

    def look(run: RunSnapshot) -> None:
        if (
            real.is_counted(counts)
            and not found
            and {r.steps.last_step for r in run.ranks} == {real.STEPS}
        ):
            found.append(run)
            real.release(counts)

    try:
        launch = [*LAUNCH, str(real.RANKS), *real.command(kind)]
        buffer = {"TORCH_FR_BUFFER_SIZE": "20000"}
        result = node.run(launch, seen=look, TRUTH=str(counts), **buffer)
        assert result.code == 0 and found, result.output
        return real.counted(kind, counts), readings(found[0].ranks)
    finally:
        node.close()


def summary(found: Sequence[Row], monitors: Sequence[str] = (OURS,)) -> str:
    """The largest error of each figure, and where."""
    lines = []
    for monitor in monitors:
        largest = worst(found, monitor)
        lines.append(f"Largest error of each figure, {monitor}")
        for name in FIRST_SCREEN:
            row = largest.get(name)
            said = f"{percent(row.errors[monitor])} ({row.case})" if row else "no independent count"
            lines.append(f"  {name:<20} {said}")
    return "\n".join(lines)


def main() -> None:
    """The tables."""
    found: list[Row] = []
    for seed in SEEDS:
        case, shown = simulated(seed)
        found += rows(case, {OURS: shown})
    print(table([row for row in found if row.case == found[0].case], (OURS,)))
    print(f"\n{len(SEEDS)} simulated runs of {RANKS} ranks and {STEPS} steps\n{summary(found)}\n")
    for kind in real.KINDS:
        case, shown = trained(kind)
        made = rows(case, {OURS: shown})
        print(table(made, (OURS,)) + "\n", flush=True)
        found += made
    for name, row in worst(found, OURS).items():
        keep(f"largest error of {name}", row.errors[OURS], "of the count")


if __name__ == "__main__":
    main()
