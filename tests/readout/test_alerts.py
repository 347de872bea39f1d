"""When a person is told, and what: one message for a situation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import rank, run

from zeromon.readout.alerts import Alerts, Message, harmless_text
from zeromon.snapshot import Finding, RunSnapshot, Severity
from zeromon.snapshot.finding import ConfigFormat, Remedy
from zeromon.snapshot.levels import (
    ALERT_AGAIN_SECONDS,
    ALERT_OVER_SECONDS,
    ALERT_PATIENCE_SECONDS,
    ALERT_SECONDS,
    ALERTS_AN_HOUR,
)
from zeromon.snapshot.run import NodeView, RemoteRank

_DEAD = {"alive": False, "failed": True, "ended": "SIGKILL"}
_REMEDY = Remedy(
    cause="its loader is slow", dialect=ConfigFormat.PYTHON, diff="+ num_workers=4", price="memory"
)
_STALL = Finding(
    rule="stalled", severity=Severity.CRITICAL, text="no step has ended for 60 s", code="ZM013"
)
_LATE = Finding(
    rule="straggler", severity=Severity.WARNING, text="rank 1 is late", code="ZM309", share=0.4,
    rank=1, remedy=_REMEDY,
)  # fmt: skip
_DIED = Finding(
    rule="rank_died", severity=Severity.CRITICAL, text="SIGKILL after step 3", code="ZM001", rank=1
)
HEALTHY = run(rank(0), rank(1))
LATE = run(rank(0), rank(1), findings=(_LATE,))
STALLED = run(rank(0), rank(1), findings=(_STALL,))
DYING = run(rank(0), rank(1, **_DEAD), findings=(_DIED,))
DEAD = run(rank(0, **_DEAD), rank(1, **_DEAD), findings=(_DIED,), ended=True)


class Watch:
    """Shows snapshots to the rules, one a second."""

    def __init__(self, alerts: Alerts | None = None, at: float = 0.0) -> None:
        self.alerts = alerts or Alerts()
        self.at = at
        self.told: list[Message] = []

    def show(self, shown: RunSnapshot, seconds: float = 1.0) -> list[str]:
        """The titles of the messages that *shown* gives in so many *seconds*."""
        before = len(self.told)
        for _ in range(max(1, round(seconds))):
            self.at += 1.0
            moment = replace(shown, taken_ns=round(self.at * 1e9), taken_wall=self.at)
            self.told += self.alerts.observe(moment)
        return [message.title for message in self.told[before:]]


def test_a_death_is_told_once_however_it_goes_on() -> None:
    watch = Watch()
    watch.show(HEALTHY, 100)
    assert watch.show(DYING, ALERT_SECONDS + 20) == ["dying: train-1"]
    assert watch.show(DEAD) == []
    body = watch.told[0].body
    assert body.startswith("rank 1: SIGKILL after step 3\nnode n0, step ")
    assert "since 1970-01-01 00:01:41 UTC" in body
    assert body.endswith("zeromon attach train-1")


def test_a_death_that_ends_the_run_at_once_is_told() -> None:
    watch = Watch()
    assert watch.show(DEAD) == ["dead: train-1"]
    assert watch.told[0].body.endswith("zeromon report train-1")


def test_a_death_that_a_restart_hides_is_told_and_its_end_too() -> None:
    watch = Watch()
    said = Finding(rule="restarted", severity=Severity.WARNING, text="attempt 1 ended: rank 1, SIGKILL")
    again = replace(HEALTHY, attempt=2, findings=(said,))
    watch.show(HEALTHY)
    assert watch.show(DYING) == []
    assert watch.show(again, 5) == ["restarted: train-1"]
    assert watch.told[0].body.startswith("attempt 1 ended: rank 1, SIGKILL\n")
    assert watch.show(again, ALERT_OVER_SECONDS) == ["over: train-1"]
    assert "attempt 2" in watch.told[-1].body


@pytest.mark.parametrize("ended", [False, True])
def test_a_healthy_run_tells_nothing(ended: bool) -> None:
    watch = Watch()
    assert watch.show(HEALTHY, 4000) == []
    assert watch.show(replace(HEALTHY, ended=ended), 10) == []


def test_who_stops_a_run_is_not_told_of_a_death() -> None:
    stop = {**_DEAD, "ended": "exception", "exception": "KeyboardInterrupt: "}
    watch = Watch()
    watch.show(DYING)  # the first of them is gone, and nothing says yet that it was stopped
    assert watch.show(run(rank(0, **stop), rank(1, **stop), ended=True)) == []


def test_a_stall_is_told_again_ever_later_and_when_it_is_over() -> None:
    watch = Watch()
    assert watch.show(STALLED, ALERT_SECONDS + 1) == ["stalled: train-1"]
    assert watch.show(STALLED, ALERT_AGAIN_SECONDS - 60) == []
    assert watch.show(STALLED, 120) == ["still stalled: train-1"]
    assert len(watch.show(STALLED, 8 * 3600)) == 4  # after 1, 2, 4 and 8 hours
    assert watch.show(HEALTHY, ALERT_OVER_SECONDS - 1) == []
    assert watch.show(HEALTHY, 1) == ["over: train-1"]
    assert "running, step" in watch.told[-1].body
    assert "stall: over after 8.5 h" in watch.told[-1].body


def test_a_run_that_finishes_after_a_problem_says_so_once() -> None:
    watch = Watch()
    watch.show(STALLED, 10)
    assert watch.show(replace(HEALTHY, ended=True), 2) == ["finished: train-1"]


def test_a_straggler_must_last_and_names_its_change() -> None:
    watch = Watch()
    assert watch.show(LATE, ALERT_PATIENCE_SECONDS - 5) == []
    assert watch.show(HEALTHY, 5) == []
    assert watch.show(LATE, ALERT_PATIENCE_SECONDS + 1) == ["slow: train-1"]
    assert "because its loader is slow; Python:\n+ num_workers=4\n" in watch.told[0].body


def test_a_problem_that_comes_and_goes_is_told_once_in_a_while() -> None:
    watch = Watch()
    for _ in range(8):
        watch.show(STALLED, 30)
        watch.show(HEALTHY, ALERT_OVER_SECONDS + 30)
    assert [message.title for message in watch.told] == ["stalled: train-1", "over: train-1"]


def test_a_worse_problem_hides_another_and_does_not_end_it() -> None:
    watch = Watch()
    assert watch.show(LATE, 70) == ["slow: train-1"]
    assert watch.show(STALLED, 200) == ["stalled: train-1"]
    assert watch.show(LATE, 70) == ["over: train-1"]
    assert watch.told[-1].body.split("\n")[1].startswith("stall: over")
    watch.show(STALLED, ALERT_AGAIN_SECONDS)
    assert watch.show(HEALTHY, ALERT_OVER_SECONDS) == ["over: train-1"]
    assert watch.told[-1].body.split("\n")[1].startswith("stall, straggler: over")


def test_a_death_ends_what_was_before_it() -> None:
    watch = Watch()
    watch.show(STALLED, 10)
    watch.show(DYING, 10)
    watch.show(replace(HEALTHY, attempt=2), ALERT_OVER_SECONDS + 1)
    titles = [message.title.partition(":")[0] for message in watch.told]
    assert titles == ["stalled", "dying", "over"]
    assert watch.told[-1].body.split("\n")[1].startswith("death: over")


def test_an_hour_has_its_share_and_the_last_message_says_so() -> None:
    watch = Watch()
    again = replace(HEALTHY, attempt=2)
    for _ in range(30):
        watch.show(DYING, 10)
        watch.show(again, ALERT_OVER_SECONDS + 1)
    assert len(watch.told) == ALERTS_AN_HOUR
    withheld = ["withheld until 1970-01-01 01:00:0" in message.body for message in watch.told]
    assert withheld == [False] * (ALERTS_AN_HOUR - 1) + [True]
    assert watch.show(DEAD) == ["dead: train-1"]  # the end is told all the same
    assert watch.show(DEAD, 3) == []


def test_a_restarted_collector_tells_nothing_twice() -> None:
    first = Watch()
    first.show(STALLED, 10)
    saved = json.loads(json.dumps(first.alerts.saved()))
    second = Watch(Alerts(saved), first.at)
    assert second.show(STALLED, 100) == []
    assert second.show(HEALTHY, ALERT_OVER_SECONDS + 1) == ["over: train-1"]


def test_of_many_nodes_the_leader_alone_speaks() -> None:
    def nodes(here: int) -> tuple[NodeView, ...]:
        view: dict[str, Any] = {"ranks": 1, "address": "", "heard_seconds": 0.0, "silent": False}
        return tuple(NodeView(node=f"n{n}", first_rank=n, here=n == here, **view) for n in range(2))

    assert Watch().show(replace(DEAD, nodes=nodes(1))) == []
    assert Watch().show(replace(DEAD, nodes=nodes(0))) == ["dead: train-1"]
    assert Watch().show(run(rank(1, **_DEAD), ended=True)) == []  # rank 0 is on another node
    away = RemoteRank(rank=1, node="n1", alive=False, failed=True, ended="SIGKILL", doing="in backward")
    there = run(rank(0), away=(away,), findings=(_DIED,), nodes=nodes(0))
    assert Watch().show(there, 10) == ["dying: train-1"]


@pytest.mark.parametrize(
    "evil",
    ["@everyone", "<@123>", "<!channel> @here", "[x](http://evil)", "www.evil.com", "``` ```",
     "a\r\nBcc: all@x", "https://evil/"],
)  # fmt: skip
def test_a_name_of_the_run_is_only_text(evil: str) -> None:
    shown = harmless_text(evil)
    for mark in ("@e", "@h", "@1", "@x", "://", "](", "www.", "```", "\r", "\n"):
        assert mark not in shown
    died = replace(_DIED, text=evil)
    watch = Watch()
    watch.show(replace(DEAD, findings=(died,), node=evil))
    assert evil not in watch.told[0].body
    assert len(watch.told[0].body.split("\n")) == 3
