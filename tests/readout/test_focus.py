"""Which rank is the worst: one answer for all rules and views."""

from dataclasses import replace

from builders import changed, rank, run, summary

from zeromon.diagnosis.rules.communication import exposed_communication
from zeromon.export.prometheus.rules import Thresholds, all_alerts
from zeromon.readout.communication_report import by_unit
from zeromon.readout.text import run_state
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.focus import (
    first_failed,
    most_exposed,
    most_exposed_of,
    nearest_oom,
    roles_of,
    worst_rank,
)
from zeromon.snapshot.memory import Risk
from zeromon.snapshot.run import DeathRole
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.plots import Trends
from zeromon.tui.screens.communication import _rank_in_focus
from zeromon.tui.view_model import ViewModel
from zeromon_dashboard.page import Known
from zeromon_dashboard.url_state import Route


def _longer_but_lesser_share() -> tuple[RankSnapshot, RankSnapshot]:
    """Rank 0 waits longer, rank 1 for a larger share of its shorter step."""
    base = rank(watched_steps=40)
    return (
        changed(base, rank=0, median_seconds=0.2, exposed_seconds=0.06, exposed_ratio=0.30),
        changed(base, rank=1, median_seconds=0.1, exposed_seconds=0.05, exposed_ratio=0.50),
    )


def test_every_rule_and_view_names_the_same_rank() -> None:
    one = run(*_longer_but_lesser_share())
    model = ViewModel(run=one, ranks=one.ranks, look=DisplayOptions(), trends=Trends())
    by_terminal, by_rules = _rank_in_focus(model), worst_rank(one)
    by_page = Known(Route(run="r"), one, {}).rank
    assert most_exposed(one.ranks) is one.ranks[1]
    assert by_rules is not None and by_rules.rank == 1
    assert next(iter(exposed_communication(one))).rank == 1
    assert "Waits of rank 1" in by_unit(one, 8)
    assert by_terminal is not None and by_terminal.rank == 1
    assert by_page is not None and by_page.rank == 1
    described = next(a for a in all_alerts(Thresholds()) if a.name == "ZeromonExposedCommunication")
    assert "topk(1, zeromon_exposed_communication_ratio" in described.description


def test_between_equal_shares_time_then_the_lower_rank_decides() -> None:
    base = rank(watched_steps=40, exposed_ratio=0.2, exposed_seconds=0.02)
    ranks = [replace(base, rank=2), replace(base, rank=1), changed(base, rank=3, exposed_seconds=0.03)]
    assert [r.rank for r in most_exposed_of(ranks, 1)] == [3]
    assert most_exposed(ranks[:2]) is ranks[1]


def test_a_rank_that_has_just_begun_comes_last() -> None:
    new = rank(1, watched_steps=3, exposed_ratio=0.9)
    old = rank(0, watched_steps=300, exposed_ratio=0.1)
    assert most_exposed([new, old]) is old
    assert most_exposed([new]) is new
    assert most_exposed([]) is None


def test_an_untimed_rank_comes_after_one_that_does_not_wait() -> None:
    untimed = rank(0, exposed_ratio=None, exposed_seconds=None, recent=(summary(1, idle=True),))
    timed = rank(1, exposed_ratio=0.0, exposed_seconds=0.0)
    assert most_exposed([untimed, timed]) is timed


def test_the_nearest_to_its_limit_is_named_with_that_memory() -> None:
    low, high = (
        Risk(pool="host", ratio=0.2, cause="none"),
        Risk(pool="device", ratio=0.7, cause="none"),
    )
    near = nearest_oom([rank(0, risks=(low,)), rank(1, risks=(low, high))])
    assert near is not None
    assert (near[0].rank, near[1]) == (1, high)
    assert nearest_oom([rank(0)]) is None


def test_nobody_is_blamed_for_what_an_unread_rank_may_have_caused() -> None:
    """A launcher ends the ranks that are left; an error of its own still names a rank."""
    ended = ("killed without a final record (SIGKILL or a crash)", "SIGKILL", "SIGTERM")
    for how in ended:
        left = rank(1, failed=True, alive=False, ended=how, last_event_ns=1)
        snapshot = run(left, ended=True, unread=(0,))
        assert roles_of(snapshot) == {1: DeathRole.VICTIM}
        assert "died: cause unknown, the record of rank 0 is lost; rank 1 ended" in run_state(snapshot)
    own = rank(1, failed=True, alive=False, ended="exception", exception="ValueError: x")
    assert roles_of(run(own, ended=True, unread=(0,))) == {1: DeathRole.CULPRIT}
    stopped = rank(1, failed=True, alive=False, ended="SIGINT")
    assert roles_of(run(stopped, ended=True, unread=(0,))) == {1: DeathRole.STOPPED}
    assert roles_of(run(rank(1, alive=False), ended=True, unread=(0,))) == {}


def test_the_first_failure_is_not_one_that_the_launcher_stopped() -> None:
    stopped = rank(0, failed=True, ended="SIGTERM", last_event_ns=1)
    crashed = rank(1, failed=True, ended="exit code 1", last_event_ns=9)
    assert first_failed([stopped, crashed]) is crashed
