"""Trials in words, and which findings can be tried. Pure."""

from zeromon.readout.remedy import gain_text, tried_text
from zeromon.ring.trials import Change
from zeromon.snapshot import ConfigFormat, Finding, Remedy, RunSnapshot, Trial, TrialState
from zeromon.units import human_count

CHANGES = {
    "garbage_collection": Change.SHARED_COLLECTIONS,
    "reshard_without_need": Change.KEEP_GATHERED,
    "fsdp_prefetch_off": Change.PREFETCH,
}
"""Rule -> the change in the live ranks that its diff amounts to."""

_FRAMEWORK = {
    Change.KEEP_GATHERED: ConfigFormat.FSDP2,
    Change.PREFETCH: ConfigFormat.FSDP2,
    Change.SHARED_COLLECTIONS: ConfigFormat.PYTHON,
}
_REFUSED = {
    "accumulation_communicates": "gradients are summed in another order, so results differ",
    "cpu_starved": "sums are split between threads, so results differ",
    "data_wait": "the workers of an iterator are fixed when it begins",
}
"""Rule -> why its change is not tried, where one might expect that it is."""


def obstacle(run: RunSnapshot, finding: Finding) -> str:
    """Why the change of *finding* cannot be tried in the live ranks; "" where it can."""
    change = CHANGES.get(finding.rule)
    if finding.remedy is None or not finding.remedy.diff:
        return "it has no change to make"
    if change is None:
        return _REFUSED.get(finding.rule, "its change needs a new start of the script")
    if finding.remedy.dialect != _FRAMEWORK[change]:
        return "only FSDP2 can be changed while it runs"
    return _obstacle_of_run(run)


def _obstacle_of_run(run: RunSnapshot) -> str:
    if run.ended or run.detached:
        return "the run has ended" if run.ended else "the agent was removed"
    if run.nodes or len(run.ranks) != max((r.world_size for r in run.ranks), default=0):
        return "n/a: the ranks of several nodes cannot agree on a step yet"
    if not all(rank.alive and rank.step for rank in run.ranks):
        return "a rank has not ended a step yet, or is gone"
    if run.hangs:
        return "a collective hangs"
    if run.capture is not None and run.capture.is_open:
        return "a trace is being recorded"
    return ""


def progress_text(trial: Trial, step: int) -> str:
    """How far a trial is; *step*: the newest step that has ended."""
    last = trial.first + trial.size * trial.blocks - 1
    if step < trial.first - 1:
        return f"trial {trial.number} waits for step {trial.first}, now {step}"
    at = f"step {min(step, last)} of {trial.first} to {last}"
    return f"trial {trial.number}: {at}, change {trial.state}"


def result_text(trial: Trial) -> str:
    """The result in one sentence."""
    known = tried_text(trial)
    if trial.state is TrialState.REFUSED:
        return f"not tried: {trial.note}"
    if not known:
        return f"n/a: {trial.note or 'the trial is under way'}"
    text = f"{known} a step over {human_count(trial.steps)} steps"
    if not trial.significant:
        return f"n/a: {trial.note} ({text})"
    predicted = gain_text(
        Remedy(
            cause="", dialect="", diff="",
            gain_low_seconds=trial.gain_low_seconds, gain_high_seconds=trial.gain_high_seconds,
        )
    )  # fmt: skip
    return text + (f" ({predicted} less were predicted)" if predicted else "")
