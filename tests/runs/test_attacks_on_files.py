"""Attacks and faults on the files of a live run: training goes on, and the record says what it lost.

Each row is a training of two ranks below the real `zeromon run`. Losses, states of the random generators
and exit code are those of the same training alone, wherever training goes on.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from environments import PROGRAM, STEPS, Environment, Told, run
from support import ASKED, LAUNCH, ZEROMON, Node, fork_server, start, wait_for

from zeromon.collector.run import snapshot_of_folder
from zeromon.readout.report import render_run
from zeromon.readout.verdict import Health, judge_run
from zeromon.ring.buffer import RingReader
from zeromon.ring.ring_file import remove_ring_file

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts file systems of its own"
)

LIVE = "/dev/shm/zeromon-*"
RING_0, RING_1 = f"{LIVE}/r/rank0*.ring", f"{LIVE}/r/rank1*.ring"
KILL_COLLECTOR = f"kill -9 $(sed 's/.*\"pid\": \\([0-9]*\\).*/\\1/' {LIVE}/collector.json)"
SMALL_TMPFS = "mkdir $W/live; mount -t tmpfs -o size=2m,mode=700 none $W/live"
FILL = "head -c 4m /dev/zero > $W/live/x"
ON_DISK = (
    "truncate -s 32m $W/disk; mkfs.ext4 -q $W/disk; mkdir $W/store; mount -o loop $W/disk $W/store; "
    "chmod 700 $W/store"
)
FREEZE = "(fsfreeze -f $W/store; sleep 10; fsfreeze -u $W/store) > /dev/null 2>&1 &"
IN_STORE = {"ZEROMON_STORE": "$W/store"}
IN_SMALL = {"ZEROMON_DIR": "$W/live"}
NO_SEGMENTS = ("unshare", "--ipc", "bash", "-c", 'echo 0 > /proc/sys/kernel/shmmni; "$@"', "bash")

attacked = functools.partial(Environment, command=(*ASKED, "2", PROGRAM))

ATTACKS = {
    "B1 a ring is truncated to nothing and another to a page": attacked(
        settings={"PAUSE": "0.3", "AT_0_3": f"truncate -s 0 {RING_0}; truncate -s 4096 {RING_1}"}
    ),
    "B1 a ring is truncated, the memory of another removed and the collector killed": attacked(
        settings={
            "PAUSE": "1.5",
            "AT_0_3": f"truncate -s 0 {RING_0}; ipcrm -m $(sed 's/.* //' {RING_1}); {KILL_COLLECTOR}",
        }
    ),
    "31 the live folder is removed": attacked(settings={"PAUSE": "0.3", "AT_0_3": f"rm -rf {LIVE}/r"}),
    "31 the store is removed": attacked(
        settings=IN_STORE | {"PAUSE": "0.3", "AT_0_3": "rm -rf $W/store"}, told="ZM009"
    ),
    "34 the live folder is full from the start": attacked(
        f"{SMALL_TMPFS}; {FILL} || true", IN_SMALL, told="not watched", ranks=()
    ),
    "34 the live folder fills up": attacked(SMALL_TMPFS, IN_SMALL | {"PAUSE": "0.3", "AT_0_3": FILL}),
    "22 umask 000": attacked(
        "umask 000",
        {"ZEROMON_STORE": "$W/state/store"},
        after=f"find $W/state {LIVE} -perm /077 | grep -v '/collector.lock'",
    ),
    "24 the store belongs to another user": attacked(
        "mkdir -m 777 $W/store; chown nobody $W/store", IN_STORE, told="belongs to someone else"
    ),
    "24 the store is a link": attacked(
        "mkdir $W/real; ln -s real $W/store", IN_STORE, told="store is a link", after="ls $W/real"
    ),
    "33 the store becomes read-only": attacked(
        ON_DISK, IN_STORE | {"PAUSE": "0.5", "AT_0_3": "mount -o remount,abort $W/store"}, told="ZM009"
    ),
    "33 a write into the store takes ten seconds": attacked(
        ON_DISK, IN_STORE | {"PAUSE": "0.5", "AT_0_3": FREEZE}, wait_seconds=15
    ),
    "B1 a kernel without segments": attacked(as_user=NO_SEGMENTS),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The same training without zeromon and without attacks."""
    fork_server(with_deepspeed=False)
    return run(attacked(), tmp_path_factory.mktemp("alone") / "w", {}, watched=False)


def reported(told: Told) -> list[tuple[int, int, int]]:
    """Rank, steps and errors of the agent, of each rank of the record."""
    return [
        (one["rank"], one["steps"]["watched_steps"], one["agent"]["errors"])
        for one in told.record.get("ranks", ())
    ]


SLOWER = {
    "31 the store is removed", "33 a write into the store takes ten seconds", "22 umask 000",
    "24 the store belongs to another user",
}  # fmt: skip


@pytest.mark.parametrize(  # tests/storage/test_run_store.py refuses a link in every call
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n in SLOWER or "is a link" in n)) for n in ATTACKS],
)
def test_training_goes_on_with_the_same_losses(name: str, tmp_path: Path, alone: Told) -> None:
    one = ATTACKS[name]
    told = run(one, tmp_path / "w", {}, watched=True)
    print("\n".join(told.errors), told.report, sep="\n")
    assert (told.code, told.output) == (0, alone.output), told.errors
    known = [(rank, STEPS, 0) for rank in one.ranks]
    whole = [(rank, STEPS, 0) for rank in (0, 1)]  # where a ring's name still found room
    assert reported(told) == known or (not one.ranks and reported(told) == whole)
    assert re.search(one.told, "\n".join([*told.errors, told.report]))
    assert told.after == ""
    if one.ranks:
        assert "finished after 8 steps" in told.report
        assert "cannot be read" not in told.report


SMALL_STORE = "mkdir $W/store; mount -t tmpfs -o size=2m,mode=700 none $W/store"
FILL_STORE = "cat /dev/zero > $W/store/x"
WITHOUT_RINGS = (  # as after a reboot
    f"rm -rf {LIVE}; {shlex.join(ZEROMON)} report r; {shlex.join(ZEROMON)} runs;"
    " touch -d '2 minutes ago' $W/store/runs/r/snapshot.json;"
    f" echo LATER; {shlex.join(ZEROMON)} report r; {shlex.join(ZEROMON)} runs"
)


def test_w3_a_store_that_fills_up_keeps_the_end_and_says_what_it_lost(
    tmp_path: Path, alone: Told
) -> None:
    """Room for the last snapshot was reserved at the start.

    The store fills up just after a save: the next one would give the reserved room to the history.
    """
    saved = "touch $W/now; until [ $W/store/runs/r/snapshot.json -nt $W/now ]; do sleep .1; done"
    settings = IN_STORE | {"PAUSE": "1", "AT_0_3": f"{saved}; {FILL_STORE}"}
    one = attacked(SMALL_STORE, settings, after=WITHOUT_RINGS)
    told = run(one, tmp_path / "w", {}, watched=True)
    print(told.report, told.after, sep="\n")
    assert (told.code, told.output) == (0, alone.output)
    lost = r"the store was full from [-0-9]+ [0-9:]+ on, step [1-7] of 8"
    whole = rf"finished after 8 steps; its record is incomplete: {lost}"
    for text in (told.report, *told.after.split("LATER")):
        assert re.search(whole, " ".join(text.split())), text
        assert "running" not in text
    assert "ZM009" in told.report


def test_w3_a_record_that_could_not_be_finished_is_incomplete(tmp_path: Path, alone: Told) -> None:
    """Somebody took the room that was reserved, too."""
    take = f"rm $W/store/runs/r/.reserve; {FILL_STORE}2"
    settings = IN_STORE | {"PAUSE": "1", "AT_0_3": FILL_STORE, "AT_0_6": take}
    one = attacked(SMALL_STORE, settings, after=WITHOUT_RINGS, wait_seconds=3)
    told = run(one, tmp_path / "w", {}, watched=True)
    print(told.report, told.after, sep="\n")
    assert (told.code, told.output) == (0, alone.output)
    later = told.after.split("LATER")[1]
    assert re.search(r"incomplete: [a-z ]+ [-0-9]+ [0-9:]+", later)
    assert "running" not in later


@pytest.mark.long  # its threads die in an order that a busy machine changes
def test_b1_without_segments_the_rank_of_a_truncated_file_is_named_and_no_other(tmp_path: Path) -> None:
    """What is left of the attack: the file is mapped, so its rank ends with SIGBUS."""
    one = attacked(settings={"PAUSE": "1", "AT_0_3": f"truncate -s 4096 {RING_0}"}, as_user=NO_SEGMENTS)
    told = run(one, tmp_path / "w", {}, watched=True)
    print(told.report)
    assert told.code != 0
    first = told.report.splitlines()[1]
    assert "the record of rank 0 is lost" in first
    assert "cause unknown" in first
    assert "rank 1 died" not in told.report and "died: rank 1" not in told.report


def test_b1_a_lost_record_is_named_and_no_other_rank_is_blamed(node: Node) -> None:
    """The rank was killed, and its memory removed before anybody read it."""
    environment = node.environment("r", PAUSE="1")
    training = start([*LAUNCH, "2", PROGRAM], environment, stderr=subprocess.DEVNULL)
    folder = node.root / "r"
    ring = wait_for(lambda: next(iter(folder.glob("rank0.*.ring")), None))
    reader = RingReader(ring)
    wait_for(lambda: reader.newest() > 50)
    os.kill(reader.header.pid, signal.SIGKILL)
    training.wait(timeout=60)
    reader.close()
    remove_ring_file(ring)
    ring.write_text("")
    snapshot = snapshot_of_folder(folder)
    assert (snapshot.unread, [rank.rank for rank in snapshot.ranks]) == ((0,), [1])
    judged, text = judge_run(snapshot), render_run(snapshot)
    assert judged.health is Health.DEAD
    assert judged.cause.startswith("died: cause unknown, the record of rank 0 is lost; rank 1 ended")
    assert "ZM017" in [finding.code for finding in snapshot.findings]
    assert "may have the cause" in text
    assert not [f for f in snapshot.findings if f.rule == "rank_died" and f.severity == "critical"]
