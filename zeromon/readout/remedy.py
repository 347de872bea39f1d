"""A remedy in words: the cause, the change, what it is expected to achieve, and its price. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from zeromon.base.units import human_bytes, human_count, human_seconds
from zeromon.ring.trial_words import Change
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.finding import ConfigFormat, Remedy, Rung, Trial, TrialState

_MIN_SHOWN_SECONDS = 5e-7
"""A shorter time is shown as ``0 us``."""


@dataclass(frozen=True, slots=True)
class DiffLine:
    """One line of the change that a remedy proposes."""

    text: str
    kind: str
    """``added``, ``removed``, or "" for context."""


@dataclass(frozen=True, slots=True)
class RemedyText:
    """The parts of a remedy, for a view to place and colour."""

    cause: str
    """``because ...``"""
    dialect: str
    """The configuration that the diff changes, such as ``DeepSpeed JSON``."""
    diff: tuple[DiffLine, ...]
    expected: tuple[str, ...]
    """Effects: a shorter step, less memory, and what else is expected."""
    price: str

    @property
    def reason(self) -> str:
        """The line above the diff: the cause, and what the diff changes."""
        return f"{self.cause}; {self.dialect}:"

    @property
    def outlook(self) -> str:
        """The line below the diff: the expected effects, and the cost."""
        lead = "" if self.expected[:1] and self.expected[0].startswith("tried: ") else "predicted: "
        return f"{lead}{'; '.join(self.expected)}; cost: {self.price}"


def remedy_text(remedy: Remedy) -> RemedyText:
    """*remedy* in words."""
    expected = [f"a step {gain} shorter"] if (gain := gain_text(remedy)) else []
    if tried := tried_text(remedy):
        expected = [f"tried: {tried} per step", *(f"predicted: {gain}" for gain in [gain] if gain)]
    if remedy.frees_bytes is not None:
        expected.append(f"{human_bytes(remedy.frees_bytes)} less per rank")
    if remedy.effect:
        expected.append(remedy.effect)
    return RemedyText(
        cause=f"because {remedy.cause}",
        dialect=remedy.dialect,
        diff=tuple(
            DiffLine(diff_line, {"+": "added", "-": "removed"}.get(diff_line.strip()[:1], ""))
            for diff_line in (*remedy.diff.splitlines(), *ladder_lines(remedy.rungs))
        ),
        expected=tuple(expected),
        price=remedy.price or "none",
    )


def ladder_lines(rungs: Iterable[Rung]) -> tuple[str, ...]:
    """The OOM ladder as text, a line for each rung."""
    return tuple(_rung_text(number, rung) for number, rung in enumerate(rungs, 1))


def _rung_text(number: int, rung: Rung) -> str:
    frees = human_bytes(rung.frees_bytes)
    bound = "at most " if rung.at_most else ""
    enough = f" <- enough{', with those above' * (number > 1)}" if rung.enough else ""
    return f"{number}. {rung.change}: frees {bound}{frees}; cost: {rung.price}{enough}"


def gain_text(change: Remedy | Trial) -> str:
    """``12.0 ms to 30.0 ms``; ``up to 30.0 ms`` where the gain may be nothing; "" for no gain."""
    low, high = change.gain_low_seconds, change.gain_high_seconds
    if low is None or high is None:
        return ""
    span = human_seconds(high)
    return f"up to {span}" if low < _MIN_SHOWN_SECONDS else f"{human_seconds(low)} to {span}"


def tried_text(tried: Remedy | Trial) -> str:
    """``-24.3 ms ± 3.1 ms``: the change of a step's time by a change that was tried; "" if not known."""
    gain, error = (
        (tried.tried_seconds, tried.tried_error_seconds)
        if isinstance(tried, Remedy)
        else (tried.gain_seconds, tried.error_seconds)
    )
    if gain is None or error is None:
        return ""
    sign = "-" if gain >= 0 else "+"
    return f"{sign}{human_seconds(abs(gain))} ± {human_seconds(error)}"


def effect_text(remedy: Remedy | None) -> str:
    """The effect for a table: ``-12.0 ms per step``, ``up to -30.0 ms``, ``-3.0 GiB``; "" for none."""
    if remedy is None:
        return ""
    if tried := tried_text(remedy):
        return f"tried {tried}"
    low, high = remedy.gain_low_seconds, remedy.gain_high_seconds
    if low is not None and low >= _MIN_SHOWN_SECONDS:
        return f"-{human_seconds(low)} per step"
    if high:
        return f"up to -{human_seconds(high)}"
    return f"-{human_bytes(remedy.frees_bytes)}" if remedy.frees_bytes is not None else ""


# ---- trials in words, and which findings can be tried -------------------------------------------

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


def trial_obstacle(run: RunSnapshot, finding: Finding) -> str:
    """Why the change of *finding* cannot be tried in the live ranks; "" where it can."""
    change = CHANGES.get(finding.rule)
    if finding.remedy is None or not finding.remedy.diff:
        return "it has no change to make"
    if change is None:
        return _REFUSED.get(finding.rule, "its change needs a new start of the script")
    if finding.remedy.dialect != _FRAMEWORK[change]:
        return "only FSDP2 can be changed while it runs"
    if run.ended or run.detached:
        return "the run has ended" if run.ended else "the agent was removed"
    if run.nodes or len(run.ranks) != max((r.world_size for r in run.ranks), default=0):
        return "n/a: the ranks of several nodes cannot agree on a step yet"
    if not all(rank.status.alive and rank.steps.last_step for rank in run.ranks):
        return "a rank has not ended a step yet, or is gone"
    if run.hangs:
        return "a collective hangs"
    if run.capture is not None and run.capture.is_open:
        return "a trace is being recorded"
    return ""


def progress_text(trial: Trial, step: int) -> str:
    """How far a trial is; *step*: the newest step that has ended."""
    last_step = trial.first + trial.size * trial.blocks - 1
    if step < trial.first - 1:
        return f"trial {trial.number} waits for step {trial.first}, now {step}"
    at = f"step {min(step, last_step)} of {trial.first} to {last_step}"
    return f"trial {trial.number}: {at}, change {trial.state}"


def result_text(trial: Trial) -> str:
    """The result in one sentence."""
    change = tried_text(trial)
    if trial.state is TrialState.REFUSED:
        return f"not tried: {trial.note}"
    if not change:
        return f"n/a: {trial.note or 'the trial is under way'}"
    result = f"{change} per step over {human_count(trial.steps)} steps"
    if not trial.is_significant:
        return f"n/a: {trial.note} ({result})"
    predicted = gain_text(trial)
    return result + (f" ({predicted} less were predicted)" if predicted else "")
