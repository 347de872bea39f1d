"""Data that zeromon could not measure, record or keep. Pure."""

from collections.abc import Iterable

from zeromon.diagnosis.rule import Match, rule
from zeromon.readout.text import exposed_unknown, in_graphs, in_graphs_ratio, unread_text
from zeromon.snapshot import RunSnapshot, Severity
from zeromon.snapshot.levels import UNTIMED

_MANY_BACKWARDS = 64
"""So many backward passes without an optimizer step are no usual accumulation of gradients."""
_TIMES_USUAL = 4


_MANY_UNTIMED = 0.05
"""The share of collectives without times from which figures of communication are incomplete."""


@rule("ZM004", once=True)
def no_step(run: RunSnapshot) -> Iterable[Match]:
    """Backward passes go by, and no optimizer step ends. Reported once."""
    for rank in run.ranks:
        if rank.steps.backwards_since_step <= _MANY_BACKWARDS:
            continue
        micro_steps = max((step.micro_steps for step in rank.steps.recent), default=0)
        # An accumulation of hundreds of micro-steps is usual where earlier steps had as many
        if rank.steps.backwards_since_step > _TIMES_USUAL * micro_steps:
            yield Match(
                f"{rank.steps.backwards_since_step} backward passes since the last optimizer step; "
                "without steps there is nothing to measure by",
                rank.rank,
            )


@rule("ZM009", severity=Severity.WARNING)
def history_stopped(run: RunSnapshot) -> Iterable[Match]:
    """The step history of the run can no longer be written."""
    if run.history_note:
        yield Match(
            f"the step history on disk has stopped after step {run.history_step}: {run.history_note}"
        )


@rule("ZM017", severity=Severity.WARNING)
def record_unread(run: RunSnapshot) -> Iterable[Match]:
    """The record of a rank cannot be read."""
    if run.unread:
        yield Match(unread_text(run))


@rule("ZM005", severity=Severity.WARNING)
def events_dropped(run: RunSnapshot) -> Iterable[Match]:
    """The collector came too late for records of a ring."""
    for rank in run.ranks:
        if rank.agent.dropped:
            evidence = f"{rank.agent.dropped} records were overwritten or damaged before they were read"
            yield Match(evidence, rank.rank)


@rule("ZM006", severity=Severity.WARNING)
def agent_errors(run: RunSnapshot) -> Iterable[Match]:
    """Hooks raised errors, which the agent caught."""
    for rank in run.ranks:
        if rank.agent.errors:
            evidence = f"{rank.agent.errors} hook calls failed; training is not affected"
            yield Match(evidence, rank.rank)


@rule("ZM007")
def unknown_version(run: RunSnapshot) -> Iterable[Match]:
    """DeepSpeed lacks names that the agent reads, or a group has collectives that no hook knows."""
    # All ranks run the same packages: one of them says it for the run
    for rank in run.ranks[:1]:
        if rank.agent.unseen:
            yield Match(
                f"this version of DeepSpeed has no {', '.join(rank.agent.unseen)}: "
                "figures that are read there are unknown"
            )
        if unknown := rank.config.process.get("unknown_collectives"):
            yield Match(
                f"no hook knows {', '.join(unknown)} of the process groups: such collectives "
                "have no times, and are counted only by the number that a group of torch's gives each"
            )


@rule("ZM008")
def untimed_collectives(run: RunSnapshot) -> Iterable[Match]:
    """Collectives issued from C++ have no times."""
    for rank in run.ranks:
        if (
            rank.communication.exposed_ratio is None
            and (rank.communication.untimed_ratio or 0.0) > UNTIMED
        ):
            evidence = f"exposed communication and late ranks are unknown: {exposed_unknown(rank)}"
            yield Match(evidence, rank.rank)
        elif (evidence := in_graphs(rank)) and in_graphs_ratio(rank) > _MANY_UNTIMED:
            yield Match(evidence, rank.rank)
