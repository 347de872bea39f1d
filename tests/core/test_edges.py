"""Files, processes, HTTP: the parts with effects."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from core.build import deepspeed_facts, device_memory, rank, run
from zeromon import collector as collector_module
from zeromon import paths
from zeromon.collector import Collector, RankFollower
from zeromon.device import Nvml
from zeromon.errors import (
    CaptureRefused,
    CollectorError,
    RingError,
    RunAmbiguous,
    RunNotFound,
    SourceError,
)
from zeromon.events import ExitKind, Kind, head
from zeromon.exporter import start_server
from zeromon.metrics import METRICS
from zeromon.process import ProcessWatch, describe_status
from zeromon.ring import NameKind, RingWriter
from zeromon.snapshot import (
    Capture,
    Device,
    Finding,
    Health,
    HostMemory,
    InFlight,
    Pressure,
    Risk,
    RunSnapshot,
    TraceCheck,
)
from zeromon.source import LiveSource, find, only, runs_at
from zeromon.store import Store

ROOT = Path(__file__).resolve().parents[2]


class Fixed:
    """A view that never changes."""

    def __init__(self, *runs: RunSnapshot) -> None:
        self.view = runs
        self.health = Health(runs=1, ticks=5, busy_seconds=0.25, last_tick_wall=1000.5)
        self.reads = 0

    def was_read(self) -> None:
        self.reads += 1


def get(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


# ---- HTTP ---------------------------------------------------------------------------------------


def full_run() -> RunSnapshot:
    """A run in which every metric has a value."""
    device = Device(
        name="X", used_bytes=1, total_bytes=2, utilization_ratio=0.5, power_watts=1.0,
        temperature_celsius=50.0, pcie_receive_bytes_per_second=1.0,
        pcie_transmit_bytes_per_second=1.0, nvlink_receive_bytes_per_second=1.0,
        nvlink_transmit_bytes_per_second=1.0, throttle_reasons=("thermal",), ecc_errors=0, xid=79,
    )  # fmt: skip
    one = rank(
        0, memory=device_memory(), device_stats=device, untimed={"world": 1},
        unattributed={"world": 1}, overhead_ratio=0.001, overhead_noise_ratio=0.002,
        pinned_bytes=5,
        risks=(Risk(pool="device", ratio=0.5, cause="growth", steps_left=9.0),),
        host=HostMemory(limit_bytes=9, headroom_bytes=5, oom_kills=0),
        wait_seconds=0.1, late_seconds=0.0,
        pressure=Pressure(cpu_wait_ratio=0.1, major_faults_per_second=0.0),
    )  # fmt: skip
    one = replace(one, **deepspeed_facts())
    stuck = InFlight(
        op="all_reduce", group="world", sequence=9, unit="", phase="backward", nbytes=4,
        issued_ns=-(10**12), group_id="world//0",
    )  # fmt: skip
    split = replace(one.traffic[0], wait_seconds=0.001, transfer_seconds=0.002)
    check = TraceCheck(
        steps=(3,), live_exposed_seconds=1.1, trace_exposed_seconds=1.0,
        live_communication_seconds=2.0, trace_communication_seconds=2.0,
    )  # fmt: skip
    one = replace(one, in_flight=(stuck,), traffic=(split,), check=check)
    finding = Finding(rule="oom_risk", severity="critical", text="x", rank=0)
    return run(one, findings=(finding,))


def test_every_metric_is_exposed_under_its_name_in_text_and_openmetrics() -> None:
    """Both formats parse; every series has run and rank; names are those of the table."""
    view = Fixed(full_run())
    server = start_server(view, "127.0.0.1", 0)
    _, text = get(server.server_port, "/metrics")
    _, opened = get(server.server_port, "/metrics", Accept="application/openmetrics-text")
    server.shutdown()
    for parse, body in ((text_string_to_metric_families, text), (openmetrics, opened)):
        samples = [s for family in parse(body.decode()) for s in family.samples]
        names = {s.name for s in samples}
        for spec in METRICS:
            wanted = f"{spec.name}_sum" if spec.kind == "histogram" else spec.name
            assert wanted in names, spec.name
        own = {spec.name for spec in METRICS if spec.own is not None}
        assert all({"run", "rank"} <= set(s.labels) for s in samples if s.name not in own)
        assert all(not s.labels for s in samples if s.name in own)
        assert not any("fqn" in s.labels or "unit" in s.labels for s in samples)
    assert view.reads == 2


class Tracing(Fixed):
    """A view that takes requests for traces."""

    def __init__(self, *runs: RunSnapshot) -> None:
        super().__init__(*runs)
        self.asked: list[tuple[str, int, tuple[int, ...]]] = []

    def trace(self, name: str, steps: int, ranks: list[int]) -> Capture:
        if steps > 100:
            raise CaptureRefused("too many", "Ask for fewer.")
        self.asked.append((name, steps, tuple(ranks)))
        return Capture(number=7, state="waiting", first=12, steps=steps, ranks=(0,), folder="/f")


def post(port: int, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{port}{path}"
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_trace_is_asked_for_with_the_key_only() -> None:
    """Also on loopback: a web page, or another user of the machine, must not start one."""
    view = Tracing(run(rank(0)))
    server = start_server(view, "127.0.0.1", 0, key="secret")
    port, good = server.server_port, {"Authorization": "Bearer secret"}
    body = json.dumps({"run": "train-1", "steps": 3, "ranks": [0]}).encode()
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "secre\u0301t".encode().decode("latin-1")},
    ):
        assert post(port, "/api/trace", body, **headers)[0] == 401
    assert view.asked == []
    assert post(port, "/api/trace", body, **good | {"Host": "evil.example"})[0] == 403
    assert post(port, "/metrics", body, **good)[0] == 405
    for wrong in (
        b"",
        b"{",
        b'{"steps": 2}',
        b'{"run": 1}',
        b'{"run": "a", "ranks": ["0"]}',
        b"\xff",
    ):
        status, said = post(port, "/api/trace", wrong, **good)
        assert (status, said["error"].startswith("not a request")) == (400, True), wrong
    status, said = post(port, "/api/trace", body, **good)
    assert (status, said["number"], said["first"]) == (202, 7, 12)
    assert view.asked == [("train-1", 3, (0,))]
    many = json.dumps({"run": "train-1", "steps": 101}).encode()
    status, said = post(port, "/api/trace", many, **good)
    assert (status, said) == (409, {"error": "too many", "hint": "Ask for fewer."})
    server.shutdown()


def test_without_a_key_nobody_asks_for_traces() -> None:
    server = start_server(Tracing(run(rank(0))), "127.0.0.1", 0)
    body = json.dumps({"run": "train-1"}).encode()
    assert post(server.server_port, "/api/trace", body, Authorization="Bearer ")[0] == 401
    server.shutdown()


def test_what_is_unknown_is_absent() -> None:
    """A CPU rank has no device memory, not one of zero bytes."""
    server = start_server(Fixed(run(rank(0))), "127.0.0.1", 0)
    _, text = get(server.server_port, "/metrics")
    server.shutdown()
    assert b"zeromon_memory_allocated_bytes" not in text
    assert b"zeromon_host_memory_rss_bytes" in text


def test_the_metrics_page_and_the_code_agree() -> None:
    """Each metric with its type, unit and labels, and none besides."""
    rows = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("| `zeromon_"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0].strip("`")] = cells[1:]
    expected = {
        spec.name: [spec.kind, spec.unit or "-", ", ".join(spec.labels) or "-", spec.help]
        for spec in METRICS
    }
    assert rows == expected


def test_hostile_names_stay_inside_their_label() -> None:
    """Quotes and newlines of a node's name do not make series of their own."""
    evil = 'n"} 1\nzeromon_evil{x="'
    server = start_server(Fixed(run(rank(0, node=evil))), "127.0.0.1", 0)
    _, text = get(server.server_port, "/metrics")
    server.shutdown()
    families = list(text_string_to_metric_families(text.decode()))
    assert not any(family.name == "zeromon_evil" for family in families)
    assert any(s.labels.get("node") == evil for family in families for s in family.samples)


def test_a_public_address_needs_a_token_and_asks_for_it() -> None:
    """No token, no listening; a wrong one gets 401."""
    with pytest.raises(CollectorError):
        start_server(Fixed(), "0.0.0.0", 0)
    server = start_server(Fixed(run(rank(0))), "0.0.0.0", 0, token="secret")
    port = server.server_port
    assert get(port, "/metrics")[0] == 401
    assert get(port, "/metrics", Authorization="Bearer wrong")[0] == 401
    assert get(port, "/metrics", Authorization="Bearer secret")[0] == 200
    server.shutdown()


def test_a_web_page_elsewhere_cannot_read_the_api() -> None:
    """DNS rebinding: the Host header must be this machine's."""
    server = start_server(Fixed(run(rank(0))), "127.0.0.1", 0)
    assert get(server.server_port, "/api/runs", Host="evil.example:9417")[0] == 403
    assert get(server.server_port, "/api/runs")[0] == 200
    assert get(server.server_port, "/nothing")[0] == 404
    server.shutdown()


def test_a_taken_port_is_stepped_over_or_refused() -> None:
    """The next free one, unless exactly this one is wanted."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start_server(Fixed(), "127.0.0.1", port)
        assert server.server_port != port
        server.shutdown()
        with pytest.raises(CollectorError) as caught:
            start_server(Fixed(), "127.0.0.1", port, strict_port=True)
        assert "--port" in caught.value.hint


def test_a_source_reads_what_the_server_shows() -> None:
    """The same picture on the other side of HTTP, and clear errors for the rest."""
    picture = full_run()
    server = start_server(Fixed(picture), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.server_port}"
    assert LiveSource(address, picture.run).latest() == picture
    assert [r.run for r in runs_at(address)] == [picture.run]
    with pytest.raises(RunNotFound):
        LiveSource(address, "other").latest()
    found = find(address)
    assert only(found).run == picture.run
    server.shutdown()
    server.server_close()
    with pytest.raises(SourceError):
        LiveSource(address, picture.run).latest()
    with pytest.raises(SourceError):
        find("127.0.0.1:notaport")


def test_a_run_is_found_by_its_beginning_by_a_pid_and_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live runs go before ended ones; several are a choice."""
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path))
    live = run(rank(0), rank(1), run="train-live")
    over = run(rank(5), run="train-over", ended=True)
    view = Fixed(live, over)
    server = start_server(view, "127.0.0.1", 0)
    facts = {"pid": 1, "host": "127.0.0.1", "port": server.server_port}
    (tmp_path / "collector.json").write_text(json.dumps(facts))
    assert only(find(None)).run == "train-live"
    assert only(find("train")).run == "train-live"
    assert only(find("train-o")).run == "train-over"
    assert only(find("101")).run == "train-live"
    assert only(find("105")).run == "train-over"
    for nothing in ("999", "other"):
        with pytest.raises(RunNotFound):
            find(nothing)
    view.view = (live, run(rank(0), run="train-two"))
    both = find("train")
    assert isinstance(both, list)
    assert [r.run for r in both] == ["train-live", "train-two"]
    server.shutdown()
    server.server_close()
    with pytest.raises(RunNotFound):
        find(None)


def test_something_else_on_the_port_is_not_a_collector() -> None:
    """A server that answers something else."""
    server = start_server(Fixed(), "127.0.0.1", 0)
    with pytest.raises(RunNotFound):
        find(f"127.0.0.1:{server.server_port}")
    server.shutdown()
    two = Fixed(run(rank(0), run="a-1"), run(rank(0), run="a-2"))
    server = start_server(two, "127.0.0.1", 0)
    with pytest.raises(RunAmbiguous):
        only(find(f"127.0.0.1:{server.server_port}"))
    server.shutdown()


# ---- processes ----------------------------------------------------------------------------------


def grandchild(code: str) -> int:
    """The pid of a process that is not our child: somebody else reaps it."""
    program = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {code!r}])\n"
        "print(p.pid, flush=True)\np.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return int(parent.stdout.readline())


def wait_until_dead(watch: ProcessWatch) -> None:
    deadline = time.monotonic() + 10
    while watch.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)


def test_the_end_of_a_foreign_process_is_seen() -> None:
    """And its exit status, where the kernel tells (Linux 6.15)."""
    watch = ProcessWatch(grandchild("import time; time.sleep(0.3); raise SystemExit(7)"))
    assert watch.alive()
    wait_until_dead(watch)
    assert not watch.alive()
    if watch.status() is not None:  # an older kernel does not tell
        assert describe_status(watch.status() or 0) == "exit code 7"


def test_a_signal_is_named() -> None:
    """SIGKILL from outside."""
    pid = grandchild("import time; time.sleep(60)")
    watch = ProcessWatch(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until_dead(watch)
    assert describe_status(9) == "SIGKILL"
    assert describe_status(0) == "finished"
    assert watch.status() in (9, None)


def test_a_later_process_with_the_same_pid_is_another() -> None:
    """Born after the ring was made."""
    assert ProcessWatch(os.getpid(), time.monotonic_ns()).alive()
    assert not ProcessWatch(os.getpid(), 0).alive()
    assert not ProcessWatch(2**22 + 5).alive()


# ---- paths --------------------------------------------------------------------------------------


def test_folders_are_private_and_never_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0700, also when it was wider; a link is refused."""
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "z"))
    root = paths.choose_root()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o777)
    assert stat.S_IMODE(paths.make_private(root).stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(RingError):
        paths.make_private(tmp_path / "link")
    with pytest.raises(RingError):
        paths.make_private(Path("/proc/nothing/here"))


def test_run_ids_are_names_not_paths() -> None:
    """No slash, no dot in front."""
    assert paths.is_run_id("train_gpt-091500-abc")
    assert not any(map(paths.is_run_id, ("", "../x", "a/b", ".hidden", "a b", "x" * 99, "a\n")))
    assert paths.new_run_id(["torchrun", "--n", "2", "my train.py"]).startswith("my_train-")
    assert paths.new_run_id(["/usr/bin/deepspeed"]).startswith("deepspeed-")


# ---- collector ----------------------------------------------------------------------------------


def ring_in(folder: Path, number: int = 0) -> RingWriter:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return RingWriter(folder / f"rank{number}.{os.getpid()}.ring", rank=number, capacity=1024)


def test_stale_rings_of_a_dead_run_are_recorded_and_cleared_away(tmp_path: Path) -> None:
    """A run whose collector died with it: the next collector writes its record."""
    root = tmp_path / "rings"
    program = (
        "import sys\nfrom pathlib import Path\nfrom zeromon.ring import RingWriter\n"
        "w = RingWriter(Path(sys.argv[1]), rank=0, capacity=1024)\n"
        "w.write(1, 4, 0, 1, 2, 0, 0)\nw.write(9, 5, 0, 1, 0, 1, 0)\n"
    )
    (root / "old").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", program, str(root / "old" / "rank0.1.ring")], check=True)
    made = Collector(root, Store(tmp_path / "store"))
    for _ in range(6):
        made.tick()
    assert not (root / "old").exists()
    kept = Store(tmp_path / "store").load("old")
    assert kept.ended
    assert kept.ranks[0].steps == 1
    assert "killed" in kept.ranks[0].ended or kept.ranks[0].ended == "ended"
    assert len(list((tmp_path / "store" / "runs" / "old").glob("*.ring.gz"))) == 1


def test_folders_of_the_user_are_never_touched(tmp_path: Path) -> None:
    """ZEROMON_DIR may be a folder with other things in it, also beside our rings."""
    root = tmp_path / "scratch"
    (root / "checkpoints").mkdir(parents=True)
    (root / "checkpoints" / "model.pt").write_text("dear")
    ring_in(root / "run")
    (root / "run" / "notes.txt").write_text("dear, too")
    made = Collector(root, Store(tmp_path / "store"))
    made.tick()
    made._runs["run"].ranks[next(iter(made._runs["run"].ranks))].process = ProcessWatch(2**22 + 5)
    for _ in range(6):
        made.tick()
    assert made.view[0].ended
    assert (root / "checkpoints" / "model.pt").read_text() == "dear"
    assert [p.name for p in (root / "run").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "facts", ['{"started": "x", "pid": 1}', '{"command": 5}', '{"pid": 1e99}', '{"pid": "z"}', "[]"]
)
def test_a_hostile_run_file_does_not_stop_the_collector(tmp_path: Path, facts: str) -> None:
    """The other run is shown."""
    ring_in(tmp_path / "rings" / "good")
    ring_in(tmp_path / "rings" / "bad")
    (tmp_path / "rings" / "bad" / "run.json").write_text(facts)
    (tmp_path / "rings" / "bad" / "rank9.1.ring").mkdir()
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    for _ in range(3):
        made.tick()
    assert "good" in [r.run for r in made.view]


def test_a_broken_ring_does_not_hide_the_others(tmp_path: Path) -> None:
    """It is named in the run's note."""
    writer = ring_in(tmp_path / "rings" / "a", 1)
    writer.write(5, head(Kind.STEP), 0, 1, 0, 1, 0)
    (tmp_path / "rings" / "a" / "rank0.1.ring").write_bytes(b"junk")
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    (picture,) = made.view
    assert [r.rank for r in picture.ranks] == [1]
    assert "not a ring" in picture.note


def test_a_full_disk_keeps_the_rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be stored is not deleted."""
    root = tmp_path / "rings"
    writer = ring_in(root / "a")
    writer.write(5, head(Kind.EXIT, ExitKind.CLEAN), 0, 0, 0, 0, 0)
    made = Collector(root, Store(Path("/proc/no/such/place")))
    made.tick()
    for follower in made._runs["a"].ranks.values():
        follower.process = ProcessWatch(2**22 + 5)
    for _ in range(6):
        made.tick()
    assert made.view[0].ended
    assert list((root / "a").glob("*.ring"))


def test_the_collector_stays_until_the_views_have_seen_the_end(tmp_path: Path) -> None:
    """Somebody looked a moment ago: wait for them to look again."""
    now = [0.0]
    made = Collector(tmp_path, Store(tmp_path / "store"), clock=lambda: now[0])
    made.tick()
    now[0] = 2.0
    assert not made.may_end()  # too soon
    now[0] = 10.0
    assert made.may_end()  # nobody has ever looked
    made._runs["x"] = None  # type: ignore[assignment]
    made.was_read()
    del made._runs["x"]
    made._read_since_end = False
    now[0] = 20.0
    assert not made.may_end()
    made.was_read()
    assert made.may_end()


def test_an_elastic_restart_shows_the_newest_process_of_a_rank(tmp_path: Path) -> None:
    """Two rings of one rank."""
    folder = tmp_path / "rings" / "a"
    first = ring_in(folder)
    first.name(NameKind.META, {"strategy": "old"})
    time.sleep(0.01)
    second = RingWriter(folder / "rank0.999.ring", rank=0, capacity=1024)
    second.name(NameKind.META, {"strategy": "new"})
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    assert [r.strategy for r in made.view[0].ranks] == ["new"]


def test_a_name_that_is_used_again_overwrites_no_record(tmp_path: Path) -> None:
    """`--name exp` twice: exp and exp-2; the same run after a restart of the collector: exp."""
    store = Store(tmp_path / "store")
    store.save(run(rank(0), run="exp", started_wall=1000.0))
    folder = tmp_path / "rings" / "exp"
    ring_in(folder)
    (folder / "run.json").write_text('{"started": 2000.0}')
    made = Collector(tmp_path / "rings", store)
    made.tick()
    assert [r.run for r in made.view] == ["exp-2"]
    (folder / "run.json").write_text('{"started": 1000.0}')
    again = Collector(tmp_path / "rings", store)
    again.tick()
    assert [r.run for r in again.view] == ["exp"]


def test_only_one_collector_holds_the_lock(tmp_path: Path) -> None:
    """The second one goes away at once, successfully."""
    held = collector_module.lock(tmp_path)
    assert held is not None
    assert collector_module.serve(tmp_path, "127.0.0.1", 0, "", strict_port=False) == 0
    os.close(held)


def test_an_ending_is_told_by_the_best_evidence(tmp_path: Path) -> None:
    """Exit status before goodbye, exception before both."""
    writer = ring_in(tmp_path)
    follower = RankFollower(writer.path)
    follower.poll()
    assert follower.ending() == ("", False)
    follower.process = ProcessWatch(2**22 + 5)
    follower.poll()
    assert follower.ending()[1]
    writer.write(5, head(Kind.EXIT, ExitKind.CLEAN), 0, 0, 0, 0, 0)
    follower.poll()
    assert follower.ending() == ("ended", False)
    number = writer.name(NameKind.TEXT, {"text": "ValueError: x"})
    writer.write(6, head(Kind.EXIT, ExitKind.EXCEPTION), 0, number, 0, 0, 0)
    follower.poll()
    assert follower.ending() == ("exception", True)
    assert follower.snapshot().exception == "ValueError: x"


# ---- devices ------------------------------------------------------------------------------------


def test_without_nvml_there_is_no_device_and_no_complaint() -> None:
    """This holds on a machine without a driver; with one, an unknown UUID has no figures."""
    assert Nvml().read("", 0) is None
    assert Nvml().read("no-such-uuid", 0) is None
