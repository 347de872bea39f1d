"""Tries a finding's change in the live job, measures it, and undoes it.

  zeromon try                    list findings, and whether each can be tried
  zeromon try ZM606              try this finding's change; ask first
  zeromon try ZM305 RUN --yes    the same for RUN, without asking

All ranks switch at the same step: off, on, on, off, in blocks of a few steps, so that a drift of the
machine cancels. Only changes that cannot alter a result are tried: shared garbage collections, FSDP2's
resharding, FSDP2's prefetch. Afterwards the job is as before; the diff to keep is printed. Ctrl-C undoes
the change before the next block. If this command is killed, the ranks undo the change themselves. It
needs the token of the collector (ZEROMON_TOKEN, or the same user). Exit codes: 0 shorter steps, 1 no
gain or no verdict, 2 refused.
"""

import argparse
import sys
import time

from zeromon.base.errors import TrialRefused, ZeromonError
from zeromon.cli import tell_user, user_agrees
from zeromon.cli.parser import add_flag, add_option
from zeromon.cli.terminal import show_json, show_progress, show_text
from zeromon.readout.remedy import progress_text, result_text, trial_obstacle
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.finding import Trial
from zeromon.sources.live import LiveSource, find_live_runs, only_live_run

_LOOK_SECONDS = 0.5
_MAX_UNKNOWN = 20
_UNDO_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon try [FINDING [RUN]]``"""
    parser.add_argument("finding", nargs="?", help="code or name of the rule, such as ZM606")
    parser.add_argument("target", nargs="?", metavar="RUN", help="run id, pid or host:port")
    add_option(parser, "--rounds", "N", "repeat off-on-on-off N times", int, 6)
    add_flag(parser, "--yes", "do not ask")
    add_flag(parser, "--json", "print the result as JSON")


def call(options: argparse.Namespace) -> int:
    """Lists what can be tried, or tries one change."""
    source = only_live_run(find_live_runs(options.target)).open()
    run = source.latest()
    if options.finding is None:
        show_text(trial_choices(run))
        return 0
    names = (options.finding, options.finding.upper())
    finding = next((f for f in run.findings if f.rule in names or f.code in names), None)
    if finding is None:
        raise TrialRefused(f"the run has no finding {options.finding}", "zeromon try lists them.")
    if reason := trial_obstacle(run, finding):
        raise TrialRefused(f"{finding.code} cannot be tried: {reason}")
    if not options.yes:
        if not sys.stdin.isatty():
            raise TrialRefused("this changes a live job: confirm with --yes")
        tell_user(f"{finding.code} {finding.text}")
        for row in finding.remedy.diff.splitlines() if finding.remedy else ():
            tell_user(f"  {row}")
        if not user_agrees("zeromon: try this in the live job, and undo it?"):
            raise TrialRefused("not confirmed", "Nothing was changed.")
    trial = _run_trial(source, source.try_change(finding.rule, options.rounds))
    if options.json:
        show_json({"run": source.run, "trial": trial})
    else:
        rows = [f"{trial.code} {trial.rule}: {result_text(trial)}"]
        if trial.is_significant and (trial.gain_seconds or 0.0) > 0:
            rows += ["  the change is undone, and alters no result; to keep it:", f"  {trial.dialect}:"]
            rows += [f"    {row}" for row in trial.diff.splitlines()]
        show_text("\n".join(rows) + "\n")
    return 0 if trial.is_significant and (trial.gain_seconds or 0.0) > 0 else 1


def trial_choices(run: RunSnapshot) -> str:
    """The findings with a remedy, each with whether it can be tried."""
    rows = []
    for finding in run.findings:
        if finding.remedy is not None:
            reason = trial_obstacle(run, finding)
            rows.append(f"{finding.code} {finding.rule}: {reason or 'can be tried'}")
    return "\n".join(rows or ["no finding with a remedy"]) + "\n"


def _run_trial(source: LiveSource, number: int) -> Trial:
    """Follows trial *number* to its end; ends it when it is interrupted."""
    try:
        return _follow_trial(source, number)
    except KeyboardInterrupt:
        tell_user("undoing the change ...")
        try:
            end_trial(source, number)
            tell_user("the change is undone")
        except ZeromonError as error:
            tell_user(f"{error}; the ranks undo the change by themselves within 15 s")
        raise


def end_trial(source: LiveSource, number: int) -> None:
    """Ends trial *number*, and returns when all ranks are as before; raises :class:`TrialRefused`."""
    source.renew_trial(number, go_on=False)
    _follow_trial(source, number, renews=False)


def _follow_trial(source: LiveSource, number: int, *, renews: bool = True) -> Trial:
    last_message, unknown = "", 0
    deadline = time.monotonic() + _UNDO_SECONDS
    while renews or time.monotonic() < deadline:
        run = source.latest()
        trial = next((trial for trial in run.trials if trial.number == number), None)
        unknown += trial is None
        if unknown > _MAX_UNKNOWN:
            raise TrialRefused(f"the collector has no trial {number}")
        if trial is not None and not trial.is_open:
            return trial
        if trial is not None:
            message = progress_text(trial, run.last_step)
            if message != last_message:
                show_progress(message)
            last_message = message
            # With a note, the collector has withdrawn the trial: the ranks undo it
            if renews and not trial.note:
                # The lease: without it the ranks undo the change, as they do when this command is killed
                source.renew_trial(number, go_on=True)
        time.sleep(_LOOK_SECONDS)
    raise TrialRefused(f"trial {number} has not ended", "The ranks undo it before their next block.")
