"""Tries a finding's change in the live job, measures it, and undoes it.

zeromon try                  the findings of the only live run: which can be tried, and why others cannot
zeromon try ZM606            try the change of that finding, after a question
zeromon try ZM305 RUN --yes  of a certain run, without the question (for scripts)

All ranks switch at the same step: off, on, on, off, in blocks of a few steps, so that a drift of the
machine cancels. Only changes that cannot alter a result are tried: shared garbage collections, FSDP2's
resharding, FSDP2's prefetch. Afterwards the job is as before; the diff to keep is printed. Ctrl-C undoes
the change before the next block, and so do the ranks by themselves when this command is killed. It needs
the token of the collector (ZEROMON_TOKEN, or the same user). Exit codes: 0 shorter steps, 1 no gain or
no verdict, 2 refused.
"""

import argparse
import sys
import time

from zeromon.cli import agreed, say
from zeromon.cli.options import flag, option
from zeromon.cli.terminal import show, show_json, status
from zeromon.errors import TrialRefused, ZeromonError
from zeromon.readout.remedy import obstacle, progress_text, result_text
from zeromon.snapshot import Finding, RunSnapshot, Trial
from zeromon.sources.live import LiveSource, find, only

_LOOK_SECONDS = 0.5
_MOST_UNKNOWN = 20
_UNDO_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon try [FINDING [RUN]]``"""
    parser.add_argument("finding", nargs="?", help="code or name of the rule, such as ZM606")
    parser.add_argument("target", nargs="?", metavar="RUN", help="run id, pid or host:port")
    option(parser, "--rounds", "N", "off-on-on-off so many times", int, 6)
    flag(parser, "--yes", "do not ask")
    flag(parser, "--json", "print the result as JSON")


def call(options: argparse.Namespace) -> int:
    """Lists what can be tried, or tries one change."""
    source = only(find(options.target)).open()
    run = source.latest()
    if options.finding is None:
        show(choices(run))
        return 0
    wanted = (options.finding, options.finding.upper())
    finding = next((f for f in run.findings if f.rule in wanted or f.code in wanted), None)
    if finding is None:
        raise TrialRefused(f"the run has no finding {options.finding}", "zeromon try lists them.")
    if why := obstacle(run, finding):
        raise TrialRefused(f"{finding.code} cannot be tried: {why}")
    if not options.yes:
        _confirm(finding)
    made = _tried(source, source.try_change(finding.rule, options.rounds))
    if options.json:
        show_json({"run": source.run, "trial": made})
    else:
        show(as_text(made))
    return 0 if made.significant and (made.gain_seconds or 0.0) > 0 else 1


def choices(run: RunSnapshot) -> str:
    """The findings with a remedy, each with whether it can be tried."""
    lines = []
    for finding in run.findings:
        if finding.remedy is not None:
            why = obstacle(run, finding)
            lines.append(f"{finding.code} {finding.rule}: {why or 'can be tried'}")
    return "\n".join(lines or ["no finding with a remedy"]) + "\n"


def _confirm(finding: Finding) -> None:
    if not sys.stdin.isatty():
        raise TrialRefused("this changes a live job: confirm with --yes")
    say(f"{finding.code} {finding.text}")
    for line in finding.remedy.diff.splitlines() if finding.remedy else ():
        say(f"  {line}")
    if not agreed("zeromon: try this in the live job, and undo it?"):
        raise TrialRefused("not confirmed", "Nothing was changed.")


def _tried(source: LiveSource, number: int) -> Trial:
    """Follows trial *number* to its end; ends it when it is interrupted."""
    try:
        return _followed(source, number)
    except KeyboardInterrupt:
        say("undoing the change ...")
        try:
            end_trial(source, number)
            say("the change is undone")
        except ZeromonError as error:
            say(f"{error}; the ranks undo the change by themselves within 15 s")
        raise


def end_trial(source: LiveSource, number: int) -> None:
    """Ends trial *number*, and returns when all ranks are as before; raises :class:`TrialRefused`."""
    source.renew_trial(number, go_on=False)
    _followed(source, number, renews=False)


def _followed(source: LiveSource, number: int, *, renews: bool = True) -> Trial:
    told, unknown = "", 0
    until = time.monotonic() + _UNDO_SECONDS
    while renews or time.monotonic() < until:
        run = source.latest()
        made = next((trial for trial in run.trials if trial.number == number), None)
        unknown += made is None
        if unknown > _MOST_UNKNOWN:
            raise TrialRefused(f"the collector has no trial {number}")
        if made is not None and not made.is_open:
            return made
        if made is not None:
            text = progress_text(made, max((rank.step for rank in run.ranks), default=0))
            if text != told:
                status(text)
            told = text
            if renews and not made.note:
                source.renew_trial(number, go_on=True)
        time.sleep(_LOOK_SECONDS)
    raise TrialRefused(
        f"trial {number} has not ended", "The ranks undo it before their next block."
    )


def as_text(made: Trial) -> str:
    """The result, and the diff to keep."""
    lines = [f"{made.code} {made.rule}: {result_text(made)}"]
    if made.significant and (made.gain_seconds or 0.0) > 0:
        lines += ["  the change is undone, and alters no result; to keep it:", f"  {made.dialect}:"]
        lines += [f"    {line}" for line in made.diff.splitlines()]
    return "\n".join(lines) + "\n"
