"""Judges which ranks that make no progress are stalled or in a hang, so that the ledger counts it."""

from collections.abc import Sequence

from zeromon.collector.rank import RankFollower
from zeromon.diagnosis.stalls import stalls
from zeromon.fold.state import RankState, Silence
from zeromon.snapshot import Hang, RunSnapshot
from zeromon.snapshot.ledger import Cause


def judge_silences(followers: Sequence[RankFollower], run: RunSnapshot) -> None:
    """Notes the stall or hang of each follower's state, since the rank's last progress.

    The fold ends it with the next progress. What is expected to take long is neither. A silence keeps
    its cause, for its seconds may be counted already.
    """
    hangs = [hang for hang in run.hangs if not hang.pause]
    stalled = {stall.rank.rank for stall in stalls(run) if not stall.rank.pause}
    for follower in followers:
        if follower.alive:
            rank = follower.state.rank
            hang = next((one for one in hangs if rank in (*one.waiting, *one.missing)), None)
            if hang is None and hangs and rank in stalled:
                hang = hangs[0]  # others wait, and it is not known for what it does not call
            _judge(follower.state, hang, stalls=rank in stalled, now_ns=run.taken_ns)


def _judge(state: RankState, hang: Hang | None, *, stalls: bool, now_ns: int) -> None:
    if state.silence is None and (stalls or hang is not None):
        cause = Cause.STALL if hang is None else Cause.HANG
        state.silence = Silence(cause, "", max(state.progress_ns, state.first_event_ns))
    if (silence := state.silence) is None:
        return
    silence.counted_ns = now_ns
    if hang is not None and silence.cause is Cause.HANG and not silence.of:
        silence.of = _culprit(hang)


def _culprit(hang: Hang) -> str:
    """``rank 1``: the first rank that the others wait for; "" where that is not known."""
    awaited = (*hang.dead, *hang.missing, *hang.elsewhere)
    return f"rank {awaited[0]}" if awaited else ""
