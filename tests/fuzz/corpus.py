"""Makes the corpus anew: ``PYTHONPATH=tests python tests/fuzz/corpus.py``. The files are small."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from builders import full_run, summary
from fuzz.mutation import CORPUS, DIVIDED
from fuzz.targets import KEY
from kineto_traces import Program, event, host
from memory_snapshots import Training, write
from prometheus_client.parser import text_string_to_metric_families

from zeromon.collector.cluster import KnownNode, Leader, LeaderReply, NodeInfo, NodeReport
from zeromon.collector.cluster_client import answer_report, as_peer_rank
from zeromon.diagnosis.arrivals import MatchedCollective, PartialArrival
from zeromon.export.prometheus.metrics import Writer
from zeromon.fold.checkpoint import checkpoint_of_state, encode_checkpoints
from zeromon.fold.fold import fold_event
from zeromon.fold.state import RankState
from zeromon.ring.buffer import NameKind, RingReader, RingWriter
from zeromon.ring.events import decode_record
from zeromon.snapshot import Hang, RunSnapshot
from zeromon.snapshot.communication import HangKind
from zeromon.snapshot.run import About, RemoteRank
from zeromon.storage import run_store, snapshot_log
from zeromon.storage.run_store import manifest_of_run
from zeromon.storage.step_history.rows import row_of
from zeromon.storage.step_history.writer import Writer as StepWriter

DATA = Path(__file__).parents[1] / "data"


def put(target: str, name: str, content: bytes | str) -> None:
    """Writes one seed."""
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def rings(scratch: Path) -> RankState:
    """Rings: small files, and their records and names as JSON. Returns the state of the records."""
    path = scratch / "rank0.ring"
    path.write_bytes(gzip.decompress((DATA / "every_kind.ring.gz").read_bytes()))
    reader = RingReader(path)
    names = [[name.kind, name.payload] for name in reader.names()]
    raws = reader.read(final=True)
    rows = [_words(raw) for raw in raws]
    put("ring_records", "every_kind.json", json.dumps(rows))
    more = [
        [NameKind.META, {"world_size": 2, "local_rank": 1, "stack": ["a.py:1 in f"], "lock": "/x/lock",
                         "device": "cuda:0", "engine0": {"zero": {"stage": 3}, "disk_path": "/"}}],
        [NameKind.META, {"model0": {"framework": "fsdp2", "stage": 3, "numel": 9, "units": 2},
                         "exception": {"type": "E", "text": "t", "where": "x.py:1"}}],
        [NameKind.GROUP, {"label": "dp", "name": "0", "ranks": [0, 1], "backend": "nccl", "dim": "dp"}],
        [NameKind.UNIT, {"fqn": "layers.0", "params": 2, "nbytes": 64, "kind": "fsdp2"}],
    ]  # fmt: skip
    put("ring_names", "every_kind.json", json.dumps(names))
    put("ring_names", "metadata.json", json.dumps(more))
    for crc in (False, True):
        small = scratch / "small.ring"
        writer = RingWriter(small, rank=0, capacity=64, names_size=2048, crc=crc, pid=1)
        for kind, payload in [*names, *more]:
            writer.name(kind, payload)
        for row in rows[:90]:  # more than it holds
            writer.write(*row)
        writer.close()
        put("ring_file", f"crc{crc:d}.ring", small.read_bytes())
        small.unlink()
    state = RankState(rank=0)
    for raw in raws:
        if (found := decode_record(raw)) is not None:
            fold_event(state, found)
    return state


def _words(raw: Any) -> list[int]:
    _, t_ns, word, *fields = raw
    return [t_ns, word & 0xFFFFFFFF, word >> 32, *fields[:4]]


def stores(scratch: Path, run: RunSnapshot, state: RankState) -> None:
    """The files of a recorded run."""
    snapshot = run_store.encode_snapshot(run)
    put("store_snapshot", "full.json", snapshot)
    finding = {"wall": 1.0, "rule": "oom_risk", "rank": 0, "code": "ZM201", "severity": "critical"}
    lines = [finding | {"text": "x"}, {"wall": 2.0, "rule": "oom_risk", "rank": 0, "gone": True}]
    about = msgspec.json.encode(About(note="why", tags=("a",)))
    parts = (
        snapshot,
        msgspec.json.encode(manifest_of_run(run)),
        about,
        "\n".join(map(json.dumps, lines)).encode(),
    )
    put("store_record", "all", DIVIDED.join(parts))
    put("store_record", "small", DIVIDED.join((b"{}", *parts[1:])))
    log = snapshot_log.Writer(scratch / "snapshots")
    for wall in (1e9, 1e9 + 1):
        log.append(replace(run, taken_wall=wall))
    log.close()
    put("store_log", "two.moments", next((scratch / "snapshots").iterdir()).read_bytes())
    rows = [
        row_of(rank, summary(n, start_ns=n * 10**9, end_ns=(n + 1) * 10**9), 0)
        for n in range(1, 9)
        for rank in (0, 1)
    ]
    steps = StepWriter(scratch / "steps")
    steps.append(rows)
    written = next((scratch / "steps").glob("*.log")).read_bytes()
    put("store_steps", "some.log", written)
    put("store_history", "some.log", written)
    steps.close_segment()
    put("store_parquet", "some.parquet", next((scratch / "steps").glob("*.parquet")).read_bytes())
    put(
        "store_totals",
        "one.json",
        encode_checkpoints({"rank0.ring": checkpoint_of_state(state, 100, 5)}),
    )


def traces() -> None:
    """Kineto traces of a device and of a host, and a snapshot of an allocator."""
    nccl = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 9,
            "dtype": "Float", "Group size": 2}  # fmt: skip
    device = [
        event("gemm", 1.0, 5.0, correlation=3),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3.0, 9.5, 9, correlation=4, **nccl),
        event("Memcpy HtoD", 8.0, 1.0, 11, cat="gpu_memcpy"),
        host("ProfilerStep#3", 0.0, 20.0, 1, "user_annotation"),
        host("cudaLaunchKernel", 0.5, 0.2, 1, "cuda_runtime") | {"args": {"correlation": 3}},
        host("FSDP::all_gather (layers.0)", 2.0, 3.0, 1, "user_annotation"),
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ]
    cpu = [host("ProfilerStep#1", 0, 9, 1, "user_annotation"), host("aten::mm", 1, 3, 1),
           host("gloo:all_reduce", 2, 4, 2, "user_annotation")]  # fmt: skip
    for name, events in (("device", device), ("cpu", cpu)):
        head = {"schemaVersion": 1, "distributedInfo": {"rank": 1, "world_size": 2, "backend": "nccl"}}
        content = head | {"traceEvents": events, "traceName": "x"}
        put("trace", f"{name}.json", json.dumps(content))
        put("trace", f"{name}-lines.json", json.dumps(content, indent=1))
    program = Program(7)
    program.actions = 12
    program.run()
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
    product = {**host("aten::mm", 0, 9, 1), "args": shapes}
    device = {"id": 0, "name": "NVIDIA H100", "totalGlobalMem": 85_000_000_000}
    content = {"deviceProperties": [device], "traceEvents": [product, *program.events]}
    put("trace", "step.json", json.dumps(content))
    put("trace", "packed.json", gzip.compress(json.dumps({"traceEvents": cpu}).encode(), mtime=0))
    (CORPUS / "memory_snapshot").mkdir(parents=True, exist_ok=True)
    write(CORPUS / "memory_snapshot" / "training.pickle", Training(layers=2, steps=1))
    calls = [
        {"record_id": n, "process_group": ["0", "default_pg"], "collective_seq_id": n, "p2p_seq_id": 0,
         "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18 + n, "input_sizes": [[4, 4]],
         "input_dtypes": ["Float"], "output_sizes": [[4, 4]], "output_dtypes": ["Float"],
         "state": "completed" if n < 3 else "started", "retired": n < 3, "is_p2p": False,
         "frames": [{"filename": "train.py", "line": n, "name": "main"}]}
        for n in range(1, 4)
    ]  # fmt: skip
    group = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    dump = {"version": "2.10", "pg_config": group, "pg_status": {}, "entries": calls}
    put("flight_recorder", "dump.json", json.dumps(dump))
    put("flight_recorder", "dump.pickle", pickle.dumps(dump, 2))


def configurations() -> None:
    """What the planted configurations of tests/data, which are seeds as they are, do not have."""
    yaml = "distributed_type: FSDP\nfsdp_config: &x\n  fsdp_version: 2\nother: *x\nnum_processes: 8\n"
    put("config_yaml", "anchor.yaml", f"compute_environment: LOCAL_MACHINE\n{yaml}")


def nodes(run: RunSnapshot) -> None:
    """What nodes publish, report and reply."""
    cards = [
        NodeInfo(node=f"n{n}", address="10.0.0.1:9417", first_rank=2 * n, ranks=2, run="r")
        for n in range(2)
    ]
    told = [json.loads(msgspec.json.encode(card)) | {"started": 1.0} for card in cards]
    put("node_card", "one.json", json.dumps(told[0]))
    put("node_card", "all.json", json.dumps(told))
    joint = PartialArrival("", 7, 4, 2, 10**9, 2 * 10**9, 1, 10**9, 10**6)
    peers = [as_peer_rank(rank, "n1") for rank in run.ranks]
    report = NodeReport("r", cards[1], 5, 2, ["g"], [(0, joint)], peers)
    body = msgspec.json.encode(report)
    put("node_message", "report.json", body)
    match = MatchedCollective("", 7, 10**9, 1, 10**6, 10**6, 10**6)
    hang = Hang(kind=HangKind.MISSING_MEMBER, op="all_reduce", group="dp", group_id="0", sequence=3,
                nbytes=4, seconds=20.0, waiting=(0,), missing=(2,), dead=(), elsewhere=(),
                calls=("rank 0: all_reduce of 4 B",), members=(0, 2))  # fmt: skip
    away = RemoteRank(rank=0, node="n0", alive=True, failed=False, ended="", doing="in backward")
    reply = LeaderReply(1, 2, 1.0, 1, [KnownNode(card, 0.5, 0.1) for card in cards], ["g"], [(0, match)],
                        (hang,), [away], ["0"])  # fmt: skip
    put("node_reply", "full.json", msgspec.json.encode(reply))
    put("node_reply", "first.json", answer_report(Leader(), body, time.monotonic_ns()))


def requests(run: RunSnapshot) -> None:
    """Requests to a collector."""
    reads = ("/", "/metrics", "/sd", "/api/runs", f"/api/runs/{run.run}", f"/api/runs/{run.run}/span",
             f"/api/runs/{run.run}/at?wall=1e9", f"/api/runs/{run.run}/findings",
             f"/api/runs/{run.run}/series?since_us=0&until_us=9&ranks=0&most=5",
             f"/api/runs/{run.run}/lanes?steps=3&rank=0")  # fmt: skip
    head = "Host: localhost:9417\r\nAccept: application/openmetrics-text;q=0.5,*/*\r\n"
    head += f"Accept-Encoding: gzip\r\nAuthorization: Bearer {KEY}\r\n"
    for number, path in enumerate(reads):
        put("http", f"get{number}", f"GET {path} HTTP/1.1\r\n{head}\r\n")
    for path, body in (
        ("trace", {"run": run.run, "steps": 1, "ranks": [0]}),
        ("try", {"run": run.run, "rule": "ZM306", "rounds": 2}),
        ("exchange", {"run": "r"}),
    ):
        text = json.dumps(body)
        more = f"Content-Length: {len(text)}\r\n"
        put("http", f"post-{path}", f"POST /api/{path} HTTP/1.1\r\n{head}{more}\r\n{text}")


def answers(run: RunSnapshot) -> None:
    """Answers of a Prometheus with every metric: runs, two vectors, a matrix."""
    text = Writer().write([run], None, openmetrics=False).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    vector = [
        {"metric": s.labels | {"__name__": s.name, "run": "r", "instance": "a:1"},
         "value": [2e9, str(s.value)]}
        for s in samples
    ]  # fmt: skip
    listed = [{"metric": {"run": "r", "of": of}, "value": [2e9, "1"]} for of in ("ranks", "up", "known")]
    matrix = [
        {"metric": v["metric"], "values": [[2e9 + n, "1.5"] for n in range(4)]} for v in vector[:12]
    ]

    def answered(kind: str, result: list[Any]) -> bytes:
        return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode()

    vectors = [answered("vector", part) for part in (listed, vector[::2], vector[1::2])]
    whole = [*vectors, answered("matrix", matrix)]
    put("prometheus", "all", DIVIDED.join(whole))
    put(
        "prometheus",
        "few",
        DIVIDED.join([answered("vector", vector[:15]), answered("matrix", matrix[:2])]),
    )
    put("prometheus", "refused", b'{"status":"error","errorType":"bad_data","error":"no"}')


def main() -> None:
    """Replaces the corpus."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    run = full_run()
    with tempfile.TemporaryDirectory() as folder:
        state = rings(Path(folder))
        stores(Path(folder), run, state)
    traces()
    configurations()
    nodes(run)
    requests(run)
    answers(run)


if __name__ == "__main__":
    main()
