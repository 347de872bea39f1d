"""Dumps of torch's Flight Recorder: what hangs, in files as NCCL writes them."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from zeromon.cli import main

SECOND = 10**9
START = 1_795_464_359 * SECOND
STATES = {"scheduled": (False, None), "started": (False, START), "completed": (True, START)}


def entry(
    number: int, op: str = "all_reduce", *, state: str = "completed", group: str = "0", **more: Any
) -> dict[str, Any]:
    """A collective as torch 2.13 records it on NCCL; a second after the one before it."""
    retired, started = STATES[state]
    desc = "default_pg" if group == "0" else "mesh_tp"
    frames = [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py",
         "line": 3245},
        {"name": "train", "filename": "/home/user/train.py", "line": 40 + number},
    ]  # fmt: skip
    return {
        "frames": frames, "record_id": number, "pg_id": 0, "process_group": (group, desc),
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
        "profiling_name": f"nccl:{op}", "time_created_ns": START + number * SECOND,
        "input_sizes": [[4, 4]], "input_dtypes": ["Float"], "output_sizes": [[4, 4]],
        "output_dtypes": ["Float"], "state": state, "time_discovered_started_ns": started,
        "time_discovered_completed_ns": started if retired else None, "retired": retired,
        "timeout_ms": 600_000, "is_p2p": False, **more,
    }  # fmt: skip


def dumped(
    folder: Path, ranks: dict[int, list[dict[str, Any]]], *, size: int = 4, after: int = 600,
    as_json: bool = False,
) -> Path:  # fmt: skip
    """The folder of a job of *size* ranks whose dumps were written so many seconds *after* its start."""
    folder.mkdir(exist_ok=True)
    groups = {
        "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(size)))},
        "9": {"name": "9", "desc": "mesh_tp", "ranks": "[0, 1]"},
    }
    for rank, entries in ranks.items():
        content = {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries,
                   "nccl_comm_state": {}, "comm_lib_version": "2.28"}  # fmt: skip
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(json.dumps(content).encode() if as_json else pickle.dumps(content, 2))
        os.utime(path, (START / SECOND + after,) * 2)
    return folder


def read(folder: Path, capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    """What `zeromon trace flight --json` says."""
    assert main(["trace", "flight", str(folder), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


DONE = [entry(n) for n in range(1, 5)]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_rank_that_has_not_come_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    waiting = [*DONE, entry(5, state="started"), entry(6, state="scheduled")]
    ranks = {0: waiting, 1: waiting, 2: DONE, 3: waiting}
    folder = dumped(tmp_path / "d", ranks, as_json=as_json)
    (found,) = read(folder, capsys, 1)["findings"]
    assert (found["kind"], found["op"], found["sequence"], found["group"]) == (
        "a member has not come", "all_reduce", 5, "world",
    )  # fmt: skip
    calls = [(r["rank"], r["state"], r["call"]) for r in found["ranks"]]
    assert [(rank, state, c["state"], c["sequence"]) for rank, state, c in calls] == [
        (0, "waiting", "started", 5), (1, "waiting", "started", 5),
        (2, "has not called it", "completed", 4), (3, "waiting", "started", 5),
    ]  # fmt: skip
    assert found["since_ns"] == START + 5 * SECOND
    assert found["seconds"] == pytest.approx(595)
    assert main(["trace", "flight", str(folder)]) == 1
    rows = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows[0][0] == "0-1,"
    assert "train.py:45 train" in rows[0][1]
    assert rows[1][0] == "2"
    assert "last all_reduce #4 " in rows[1][1]


def test_many_scattered_ranks_fit_a_terminal_and_are_named_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [[4096, 11008]] * 9
    waiting = [*DONE, entry(5, "_all_gather_base", state="started", input_sizes=shapes)]
    dumped(tmp_path / "d", {n: waiting if n % 5 else DONE for n in range(64)}, size=64)
    assert main(["trace", "flight", str(tmp_path / "d")]) == 1
    lines = capsys.readouterr().out.splitlines()
    ahead, below = lines[:5], lines[5:]
    assert max(map(len, ahead)) <= 80
    assert ahead[3].split(None, 2)[:2] == ["13", "ranks"]
    assert "train.py:44 train" in ahead[3]
    assert below[0] == "  13 ranks: 0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60"


def test_a_rank_without_a_dump_is_told_apart_from_one_that_has_not_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = [*DONE, entry(5, state="started")]
    folder = dumped(tmp_path / "d", {0: waiting, 1: waiting, 2: waiting})
    (found,) = read(folder, capsys, 1)["findings"]
    assert found["kind"] == "a member has no dump"
    assert found["ranks"][3]["state"] == "no dump"
    assert found["ranks"][3]["call"] is None


@pytest.mark.parametrize(
    ("more", "kind", "shown"),
    [
        ({"op": "broadcast"}, "mismatched operations", "broadcast #3 [4,4] Float"),
        ({"input_sizes": [[4, 5]], "output_sizes": [[4, 5]]}, "mismatched sizes",
         "all_reduce #3 [4,5] Float"),
        ({"input_sizes": [[4, 4], [9]]}, "mismatched sizes", "all_reduce #3 [4,4] [9] Float"),
        ({"input_dtypes": ["Int"], "output_dtypes": ["Int"]}, "mismatched element types",
         "all_reduce #3 [4,4] Int"),
    ],
)  # fmt: skip
def test_the_first_call_that_differs_comes_before_what_hangs_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], kind: str, shown: str
) -> None:
    rest = [entry(4), entry(5, state="started")]
    other = [*DONE[:2], entry(3, **more), entry(4)]
    folder = dumped(tmp_path / "d", {0: [*DONE[:3], *rest], 1: other}, size=2)
    (found,) = read(folder, capsys, 1)["findings"]
    assert (found["kind"], found["sequence"], found["seconds"]) == (kind, 3, None)
    assert [r["state"] for r in found["ranks"]] == ["done", "done"]
    assert main(["trace", "flight", str(folder)]) == 1
    first, second = capsys.readouterr().out.splitlines()[3:5]
    assert "all_reduce #3 [4,4] Float" in first
    assert shown in second


FLAT = {"input_sizes": [[16]], "output_sizes": [[16]]}


def test_another_shape_of_as_many_elements_alone_is_legal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dumped(tmp_path / "d", {0: [*DONE, entry(5)], 1: [*DONE, entry(5, **FLAT)]}, size=2)
    assert read(folder, capsys, 0) == {"ranks": [0, 1], "findings": [], "notes": []}


@pytest.mark.parametrize(
    ("after", "kind"),
    [([entry(7, "broadcast", state="started")], "mismatched operations"), ([], "a member has not come")],
)
def test_another_shape_comes_before_what_goes_wrong_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: list[Any], kind: str
) -> None:
    """torch's analyser, fr_trace, names the first of them alone."""
    done = [*DONE, entry(6)]
    ranks = {0: [*done, entry(7, state="started")], 1: [*done, *after]}
    for of_rank, more in ((ranks[0], {}), (ranks[1], FLAT)):
        of_rank.insert(4, entry(5, **more))
    folder = dumped(tmp_path / "d", ranks, size=2)
    first, second = read(folder, capsys, 1)["findings"]
    assert (first["kind"], first["sequence"]) == ("mismatched shapes of as many elements", 5)
    assert (second["kind"], second["sequence"]) == (kind, 7)
    assert main(["trace", "flight", str(folder)]) == 1
    rows = capsys.readouterr().out.splitlines()[3:5]
    assert "[4,4] Float" in rows[0] and "[16] Float" in rows[1]


def coalesced(number: int, *sizes: list[int], state: str = "completed") -> list[dict[str, Any]]:
    """An all-gather of tensors of different sizes: a broadcast of each, all with one number."""
    return [
        *(entry(number, "_broadcast_oop", input_sizes=[s], output_sizes=[s]) for s in sizes),
        entry(number, "ALLGATHER_coalesced", state=state, input_sizes=[[]], output_sizes=[[]]),
    ]


def test_the_parts_of_a_coalesced_call_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {0: coalesced(5, [4], [9], state="started"), 1: coalesced(5, [4], [8], state="started")}
    folder = dumped(tmp_path / "d", {rank: [*DONE, *rows] for rank, rows in ranks.items()}, size=2)
    (found,) = read(folder, capsys, 1)["findings"]
    assert (found["kind"], found["sequence"]) == ("mismatched sizes", 5)
    assert found["op"] == "_broadcast_oop in ALLGATHER_coalesced"
    assert [row["call"]["sizes"] for row in found["ranks"]] == [[[[9]], [[9]]], [[[8]], [[8]]]]


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        # The recorder of rank 1 has forgotten the first part
        ({0: coalesced(1, [4], [9]), 1: coalesced(1, [4], [9])[1:]}, []),
        # Rank 1 had not issued the last part, nor its end, when it dumped
        ({0: [*DONE, *coalesced(5, [4], [9])], 1: [*DONE, *coalesced(5, [4], [9])[:1]]}, []),
        ({0: [*DONE, *coalesced(5, [4], [9])], 1: [*DONE, *coalesced(5, [4])]},
         ["mismatched operations"]),
        ({0: [*DONE, *coalesced(5, [4], [9], state="started")],
          1: [*DONE, *coalesced(5, [4], [9], state="started")]}, ["all members are in it"]),
    ],
)  # fmt: skip
def test_parts_that_a_dump_does_not_have_do_not_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: dict[int, Any], kinds: list[str]
) -> None:
    folder = dumped(tmp_path / "d", ranks, size=2)
    found = read(folder, capsys, bool(kinds))["findings"]
    assert [one["kind"] for one in found] == kinds


def test_the_types_that_differ_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = entry(5, state="started", output_dtypes=["Half"])
    ranks = {0: [*DONE, half], 1: [*DONE, entry(5, state="started")]}
    assert main(["trace", "flight", str(dumped(tmp_path / "d", ranks, size=2))]) == 1
    text = capsys.readouterr().out
    assert "all_reduce #5 of world: mismatched element types" in text
    first, second = text.splitlines()[3:5]
    assert "[4,4] Half" in first and "[4,4] Float" in second and "to" in first


@pytest.mark.parametrize(
    ("op", "one", "other", "code"),
    [
        ("gather", {"input_sizes": [[4]], "output_sizes": [[4], [4]]},
         {"input_sizes": [[4]], "output_sizes": []}, 0),
        ("gather", {"input_sizes": [[4]], "output_sizes": [[4], [4]]},
         {"input_sizes": [[5]], "output_sizes": []}, 1),
        ("scatter", {"input_sizes": [[4], [4]], "output_sizes": [[4]]},
         {"input_sizes": [], "output_sizes": [[4]]}, 0),
        ("scatter", {"input_sizes": [[4], [4]], "output_sizes": [[4]]},
         {"input_sizes": [], "output_sizes": [[5]]}, 1),
        ("alltoall_base", {"input_sizes": [[6]], "output_sizes": [[2]]},
         {"input_sizes": [[3]], "output_sizes": [[7]]}, 0),
        ("alltoall_base", {"input_sizes": [[6]], "output_sizes": [[2]]},
         {"input_sizes": [[3]], "output_sizes": [[8]]}, 1),
    ],
)  # fmt: skip
def test_sides_that_may_differ_between_members(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], op: str, one: Any, other: Any, code: int
) -> None:
    ranks = {0: [*DONE, entry(5, op, **one)], 1: [*DONE, entry(5, op, **other)]}
    found = read(dumped(tmp_path / "d", ranks, size=2), capsys, code)["findings"]
    assert [row["kind"] for row in found] == ["mismatched sizes"] * code


def test_what_one_rank_has_forgotten_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorder keeps the last calls: the oldest ones of one rank are gone."""
    odd = [entry(1, "broadcast"), *DONE[1:]]
    folder = dumped(tmp_path / "d", {0: DONE[2:], 1: odd}, size=2)
    assert read(folder, capsys, 0)["findings"] == []
    folder = dumped(tmp_path / "e", {0: DONE, 1: odd}, size=2)
    assert read(folder, capsys, 1)["findings"][0]["sequence"] == 1


def test_groups_that_wait_for_each_other_are_a_deadlock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tp = entry(1, group="9")
    first = [*DONE, tp, entry(5, state="started")]
    second = [*DONE, tp, entry(2, group="9", state="started")]
    folder = dumped(tmp_path / "d", {0: first, 1: second}, size=2)
    found = read(folder, capsys, 1)["findings"]
    assert {one["kind"] for one in found} == {"deadlock of groups"}
    assert {one["group"] for one in found} == {"world", "mesh_tp"}


def test_a_receive_without_its_send_is_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = entry(4, "recv 1<-0", state="started", is_p2p=True, p2p_seq_id=7)
    folder = dumped(tmp_path / "d", {0: DONE, 1: [*DONE, alone]}, size=2)
    (found,) = read(folder, capsys, 1)["findings"]
    assert (found["kind"], found["op"], found["sequence"]) == (
        "its peer has not answered", "recv 1<-0", -7,
    )  # fmt: skip
    assert [row["rank"] for row in found["ranks"]] == [1]


def test_a_dump_of_a_healthy_job_has_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dumped(tmp_path / "d", {0: [*DONE, entry(5, state="started")], 1: DONE}, size=2, after=7)
    assert main(["trace", "flight", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "Nothing hangs in the dumps of ranks 0-1" in text
    assert "rank 0 is in all_reduce #5 for 2.00 s: too short for a hang" in text


def test_other_files_of_the_folder_are_named_and_a_call_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    folder = dumped(tmp_path / "d", {0: DONE})
    (folder / "nccl_trace_rank_1").write_bytes(pickle.dumps({"entries": [Evil()]}, 2))
    (folder / "train.log").write_text("not looked at")
    notes = read(folder, capsys, 0)["notes"]
    assert len(notes) == 1
    assert "GLOBAL, which no plain data need" in notes[0]
    assert not (tmp_path / "ran").exists()
    assert main(["trace", "flight", str(folder / "nccl_trace_rank_1")]) == 2
    assert main(["trace", "flight", str(tmp_path)]) == 2
