"""The output of ``zeromon fit``: stages side by side and the recommendation, as text and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from zeromon.memory.fit import DEVICE, HOST, Trial
from zeromon.memory.fit_stages import Stage
from zeromon.report.table import table
from zeromon.units import human_bytes, human_count, human_seconds

_HEADER = (
    "stage",
    "largest batch",
    "by",
    "host",
    "device",
    "step",
    "exposed",
    "samples/s",
    "tokens/s",
)
_UNKNOWN = "n/a"


def as_text(
    stages: Sequence[Stage], trials: Sequence[Trial], chosen: Stage | None,
    written: Mapping[str, str], notes: Sequence[str],
) -> str:  # fmt: skip
    """The tables, the recommendation with its reason, the files, and why figures are unknown."""
    lines = ["Stages at their largest micro-batch", table(_HEADER, [_cells(s) for s in stages])]
    roles = list(dict.fromkeys(role for s in stages for role in s.roles))
    if roles:
        header = ("stage", *(role.replace("_", " ") for role in roles))
        rows = [
            (s.name or "as it is", *(human_bytes(s.roles[r]) if r in s.roles else "-" for r in roles))
            for s in stages if s.roles
        ]  # fmt: skip
        lines += [
            "",
            "Predicted memory of a rank by role, without activations",
            table(header, rows),
        ]
    lines += ["", _reason(stages, chosen)]
    if chosen is not None and chosen.name in written:
        lines.append(f"  use: sh {written[chosen.name]}")
    killed = sum(t.killed for t in trials)
    stopped = sum(bool(t.outcome) and not t.killed for t in trials)
    lines.append(
        f"  {len(trials)} launches, {sum(t.wall_seconds for t in trials):.0f} s; "
        f"{stopped} stopped before their end, {killed} killed"
    )
    said = [f"{s.name or 'as it is'}: {s.why}" for s in stages if s.why]
    lines += [f"note: {note}" for note in (*said, *notes)]
    return "\n".join(lines) + "\n"


def _cells(s: Stage) -> tuple[str, ...]:
    size = _UNKNOWN if s.largest is None else "none" if not s.largest else str(s.largest)
    return (
        s.name or "as it is",
        size,
        "launch" if s.measured else "prediction",
        *(human_bytes(round(s.peaks[p])) if p in s.peaks else _UNKNOWN for p in (HOST, DEVICE)),
        *(_UNKNOWN if v is None else human_seconds(v) for v in (s.seconds, s.exposed_seconds)),
        *(
            _UNKNOWN if v is None else _number(v)
            for v in (s.samples_per_second, s.tokens_per_second)
        ),
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else human_count(value)


def _reason(stages: Sequence[Stage], chosen: Stage | None) -> str:
    if chosen is None:
        return "Nothing is recommended: no size is known to fit"
    name = f"stage {chosen.name}, " if chosen.name else ""
    text = f"Recommended: {name}micro-batch {chosen.advised}"
    rate = chosen.samples_per_second
    others = [s for s in stages if s is not chosen and s.samples_per_second is not None]
    if not chosen.measured:
        text += " (predicted; one more --launches proves it)"
    ran = ", the largest that ran"
    if chosen.alone:
        ran = f" by the line; {chosen.largest} ran beside zeromon fit, whose memory the command has"
    if rate is None:
        return f"{text}{ran}; its samples a second are n/a"
    if not others:
        return f"{text}{ran}: {_number(rate)} samples/s"
    best = max(others, key=lambda s: s.samples_per_second or 0.0)
    kind = "" if best.measured else " (predicted)"
    return (
        f"{text}: {_number(rate)} samples/s; the next, stage {best.name}, "
        f"{_number(best.samples_per_second or 0.0)}{kind}"
    )


def as_json(
    stages: Sequence[Stage], trials: Sequence[Trial], chosen: Stage | None,
    written: Mapping[str, str], notes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """All of it."""
    return {
        "stages": [
            asdict(s) | {
                "samples_per_second": s.samples_per_second, "tokens_per_second": s.tokens_per_second,
            }
            for s in stages
        ],
        "launches": [asdict(t) for t in trials],
        "recommended": None if chosen is None else {"stage": chosen.name, "micro_batch": chosen.advised},
        "reason": _reason(stages, chosen),
        "files": dict(written),
        "notes": list(notes),
    }  # fmt: skip
