"""The energy of a run, and what a token costs of it. Pure."""

from statistics import fmean

from zeromon.readout.throughput import own_part
from zeromon.snapshot import RunSnapshot
from zeromon.units import human_count, human_energy, human_seconds


def energy_text(run: RunSnapshot) -> str:
    """What the run's node has used since the run was watched, or why that is unknown.

    "" from a Prometheus, where no collector has looked.
    """
    used = run.energy
    if used is None:
        return ""
    counted = (used.device_joules, "devices"), (used.host_joules, "processors and DRAM")
    known = [f"{human_energy(joules)} by {what}" for joules, what in counted if joules is not None]
    missing = f"of processors n/a: {used.host_note}" if used.host_note else ""
    if not known:
        return f"n/a: no device has a counter; {missing or 'of processors n/a'}"
    text = f"{', '.join(known)} of {run.node} in {human_seconds(used.seconds)}"
    watts, cost = mean_watts(run), joules_per_unit(run)
    if watts is not None:
        text += f", mean {human_count(watts)} W, "
        text += (
            f"J a token n/a: {cost}" if isinstance(cost, str) else f"{cost[0]:.3g} J a {cost[1]}"
        )
    return "; ".join(filter(None, (text, missing)))


def mean_watts(run: RunSnapshot) -> float | None:
    """Returns the mean power of the run's node, of what counts it; None where unknown."""
    used = run.energy
    known = [] if used is None else [used.device_joules, used.host_joules]
    joules = [each for each in known if each is not None]
    return sum(joules) / used.seconds if used is not None and joules and used.seconds else None


def joules_per_unit(run: RunSnapshot) -> tuple[float, str] | str:
    """Joules a ``token``, else a ``sample``, or why they are unknown.

    The mean power of the node for as long as its ranks live, over what they trained in that time.
    """
    watts = mean_watts(run)
    if watts is None:
        return "no counter of energy is known"
    for unit in ("token", "sample"):
        parts = [own_part(rank, f"{unit}s") for rank in run.ranks]
        known = [part for part in parts if part is not None]
        if known and len(known) == len(parts):
            lived = fmean(sum(row.seconds for row in rank.ledger) for rank in run.ranks)
            return watts * lived / sum(known), unit
    return "no batch is known of some rank"
