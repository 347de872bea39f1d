"""A lock of torch's extension cache, made by torch: held, left behind, waited for, and named."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import changed, rank, run
from torch.utils.file_baton import FileBaton

from zeromon.cli.doctor import extension_cache_facts
from zeromon.collector.rank import RankFollower
from zeromon.diagnosis.engine import advise
from zeromon.fold.ledger import Observed
from zeromon.fold.state import RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.probes.process import (
    ExtensionLockReader,
    ProcessWatch,
    extension_cache_folder,
    read_extension_lock,
)
from zeromon.readout.text import doing
from zeromon.readout.verdict import hang_text, judge_run
from zeromon.ring.buffer import RingWriter
from zeromon.snapshot import Hang, Severity
from zeromon.snapshot.communication import HangKind
from zeromon.snapshot.host import ExtensionLock
from zeromon_agents.observe import stall_detector
from zeromon_agents.observe.stall_detector import StallDetector

SECOND = 1_000_000_000


@pytest.fixture
def stale(tmp_path: Path) -> Path:
    """What a process that was killed while it compiled has left."""
    path = tmp_path / "py311_cpu" / "shm comm" / "lock"
    path.parent.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        FileBaton(str(path)).try_acquire()
        os._exit(0)
    os.waitpid(child, 0)
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 7200))
    return path


def of(path: Path) -> ExtensionLock:
    found = read_extension_lock(str(path))
    assert found is not None
    return found


def test_who_holds_a_lock(tmp_path: Path, stale: Path) -> None:
    left = of(stale)
    assert (left.owner, left.is_stale) == (None, True) and 7200 <= left.age_seconds < 7300
    baton = FileBaton(str(tmp_path / "lock"))
    assert baton.try_acquire()
    held = of(tmp_path / "lock")
    assert (held.owner, held.is_stale) == (os.getpid(), False)
    baton.release()
    assert read_extension_lock(str(tmp_path / "lock")) is None
    assert read_extension_lock("/no/\0such") is None


def test_a_file_of_another_user_is_not_called_stale(
    stale: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: stale.stat().st_uid + 1)
    assert not of(stale).is_stale
    assert "its owner is n/a" in doing(rank(0, phase="other", lock=of(stale)))


def test_a_lock_is_read_every_five_seconds_and_forgotten_with_its_rank(stale: Path) -> None:
    reader = ExtensionLockReader()
    first = reader.read(str(stale), 0)
    assert first is not None and reader.read(str(stale), 4 * SECOND) is first
    stale.unlink()
    assert reader.read(str(stale), 6 * SECOND) is None
    assert reader.read("", 7 * SECOND) is None


def test_the_agent_says_which_lock_its_main_thread_waits_for(
    stale: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata: dict[str, object] = {}
    context = SimpleNamespace(
        step=0, phase=0, ring=SimpleNamespace(write=lambda *_: None), add_metadata=metadata.update
    )
    detector = StallDetector(context, SimpleNamespace(groups={}), attached=False)  # type: ignore[arg-type]
    monkeypatch.setattr(stall_detector, "in_flight", lambda _: {})

    def watch() -> None:
        while "/torch/utils/file_baton.py" not in "".join(stall_detector.main_stack()):
            pass
        for _ in range(7):
            detector.check()
        stale.unlink()

    thread = threading.Thread(target=watch)
    thread.start()
    FileBaton(str(stale)).wait()
    thread.join()
    assert metadata["lock"] == str(stale)
    assert "file_baton.py" in str(metadata["stack"])
    context.step = 1
    detector.check()
    assert (metadata["stack"], metadata["lock"]) == ([], "")


WAITS = [
    "/home/me/train.py:40 in <module>",
    "/x/site-packages/torch/utils/cpp_extension.py:2400 in _jit_compile",
    "/x/site-packages/torch/utils/file_baton.py:49 in wait",
]


def test_a_start_that_waits_for_a_stale_lock_is_critical_and_names_it(stale: Path) -> None:
    state = RankState(rank=0, pid=1)
    state.meta["stack"] = WAITS
    waits = changed(summarize_rank(state, Observed(lock=of(stale))), started_ns=0)
    late = run(waits, taken_ns=16 * SECOND)
    (finding,) = (f for f in advise(late) if f.rule == "stalled")
    assert finding.severity is Severity.CRITICAL
    for part in (f"{stale}, 2 h 00 min old", "held by no process of this node", f"rm '{stale}'"):
        assert part in finding.text
    assert judge_run(replace(late, findings=(finding,))).text.startswith("stalled: rank 0: no step")


def test_a_stopped_run_still_names_the_lock_that_it_waited_for(tmp_path: Path, stale: Path) -> None:
    """SIGTERM ends the wait and not its reason, which the record keeps; nobody compiled."""
    follower = RankFollower(RingWriter(tmp_path / "rank0.7.ring", rank=0, capacity=1024).path)
    follower.poll()
    follower.state.meta |= {"lock": str(stale), "stack": ["/x/torch/utils/cpp_extension.py:9 in load"]}
    assert follower.lock(9 * SECOND) is not None
    follower.process = ProcessWatch(2**22 + 5)
    follower.poll()
    seen = Observed(alive=False, ended="SIGTERM", lock=follower.lock(99 * SECOND))
    ended = summarize_rank(follower.state, seen)
    assert ended.status.pause == ""
    ended = changed(ended, last_event_ns=99 * SECOND, phase="other")
    stopped = judge_run(replace(run(ended), ended=True, taken_ns=99 * SECOND))
    assert "held by no process" in stopped.cause and "compiles" not in stopped.cause


def test_a_start_that_waits_for_another_process_that_compiles_is_expected(stale: Path) -> None:
    state = RankState(rank=0, pid=1)
    state.meta["stack"] = WAITS
    held = replace(of(stale), owner=4242, is_stale=False)
    waits = changed(summarize_rank(state, Observed(lock=held)), started_ns=0)
    assert not advise(run(waits, taken_ns=16 * SECOND))
    assert waits.status.pause == "compiles"
    assert "held by pid 4242" in doing(waits) and "rm " not in doing(waits)


def test_a_hang_for_which_a_missing_rank_waits_for_a_lock_names_it(stale: Path) -> None:
    late = run(rank(0), rank(1, phase="other", in_flight=(), lock=of(stale)))
    hang = Hang(
        kind=HangKind.MISSING_MEMBER, op="barrier", group="world", group_id="w", sequence=3,
        nbytes=0, seconds=20.0, waiting=(0,), missing=(1,), dead=(), elsewhere=(), calls=(),
    )  # fmt: skip
    assert f"rm '{stale}'" in hang_text(late, hang)


def test_the_doctor_names_each_lock_of_the_cache(
    stale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder, lock = extension_cache_facts()
    assert (folder.severity, lock.severity) == ("fine", "warning")
    assert str(stale) in lock.value and lock.hint.startswith(f"rm '{stale}'")
    stale.unlink()
    (folder,) = extension_cache_facts()
    assert folder.value == f"{tmp_path}, no lock"


def test_the_cache_is_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert str(extension_cache_folder(os.environ)) == get_default_build_root()
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(extension_cache_folder(os.environ)) == get_default_build_root()
