"""`zeromon attach` beside memray, hypno and gdb: `tests/bench/bench_attach.py [ROUNDS [KIND ...]]`.

Attach and detach, round after round, on training jobs of two gloo ranks (1,000 rounds are the claim; the
default is shorter), on a target that is always inside malloc, and on a collective that hangs. The job's
losses must be those of as many steps that were left alone, and its ranks must hold as many descriptors
and threads after the last round as after the tenth. With a KIND only the rounds on it are made. A
*pause* is by how much the longest step that overlaps an attach exceeds the median step of the same job:
it holds whatever stopped the training thread, and the noise of the machine, which the same number of
moments without an attach show.

The others run in environments of their own (.attach-peers, made from PyPI at the first call); gdb is
the machine's.
"""

from __future__ import annotations

import bisect
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attaching import Job
from records import keep
from support import Held, held, wait_for

from zeromon.attach.inject import inject_line
from zeromon.attach.loader import attach_ranks, detach_ranks
from zeromon.base.errors import ZeromonError
from zeromon.ring import paths

PEERS = Path(__file__).resolve().parents[2] / ".attach-peers"
KINDS = ("fsdp2", "ddp", "zero3")
PATIENCE_SECONDS = 45
NOTHING = "exec('try:\\n pass\\nexcept BaseException:\\n pass',{})"

MALLOC = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
n = 0
while True:
    held = [libc.malloc(64 + (i * 977) % 300_000) for i in range(200)]
    for address in held:
        libc.free(address)
    n += 1
    if n % 50 == 0:
        open(sys.argv[1], "w").write(str(n))
"""


def moments(spans: list[tuple[float, float]], ends: list[float], spent: list[float]) -> list[float]:
    """For each span by how much, s, its longest step exceeds the median step."""
    usual = statistics.median(spent)
    found = []
    for began, ended in spans:
        first = bisect.bisect_left(ends, began)
        last = bisect.bisect_left(ends, ended)
        steps = spent[first : last + 1]
        if steps:
            found.append(max(0.0, max(steps) - usual))
    return found


def in_words(pauses: list[float]) -> str:
    """Median and maximum."""
    if not pauses:
        return "n/a"
    return f"median {1e3 * statistics.median(pauses):6.1f} ms, max {1e3 * max(pauses):6.1f} ms"


def rounds_on(kind: str, rounds: int, root: Path, folder: Path) -> bool:
    """Attach and detach *rounds* times; prints what it cost. Whether all went well."""
    job = Job(kind, folder / kind)
    refused: Counter[str] = Counter()
    attached: list[tuple[float, float]] = []
    left: list[tuple[float, float]] = []
    idle: list[tuple[float, float]] = []
    stops: Counter[str] = Counter()
    helper_ns: list[int] = []
    answers: list[float] = []
    holdings: dict[int, list[Held]] = {}
    try:
        job.wait_until(20)
        ranks = job.ranks()
        for done in range(rounds):
            began = time.monotonic()
            _, joined = attach_ranks(ranks, root)
            attached.append((began, time.monotonic()))
            time.sleep(0.1)
            began = time.monotonic()
            gone = detach_ranks(ranks, root)
            left.append((began, time.monotonic()))
            time.sleep(0.05)
            idle.append((time.monotonic() - 0.05, time.monotonic()))
            refused.update(o.refused for o in [*joined, *gone] if o.refused)
            stops.update(o.how.split(" thread")[0] for o in [*joined, *gone] if o.how)
            helper_ns += [o.stopped_ns for o in [*joined, *gone] if o.how]
            answers += [o.seconds for o in joined if o.how]
            for ring in root.glob("*/rank*.ring"):  # a collector does this
                ring.unlink()
            assert job.alive, job.log.read_text()
            if done + 1 in (1, 10, rounds // 2, rounds):
                time.sleep(0.5)
                holdings[done + 1] = [held(rank.pid) for rank in ranks]
        facts = job.finish(timeout=3600)
    finally:
        job.kill()
    keep(f"{kind}, thread stopped", statistics.median(helper_ns) / 1e6, "ms")
    keep(f"{kind}, refused", sum(refused.values()), f"of {rounds} rounds")
    steps = len(facts[0]["losses"])
    same = all(rank["losses"] == rank["again"] for rank in facts)
    print(f"{kind}: {rounds} rounds of attach and detach on 2 ranks, {steps} steps")
    print(f"  refused {dict(refused) or 'none'}; losses bit-identical: {same};")
    print(f"  left patched: {facts[0]['changed'] or 'nothing'}; marked: {facts[0]['marked']}")
    print(f"  thread stopped: {dict(stops)}, median {statistics.median(helper_ns) / 1e6:.2f} ms,")
    print(f"  max {max(helper_ns) / 1e6:.2f} ms; answer after {statistics.median(answers):.3f} s")
    for done, found in holdings.items():
        print(f"  after {done} rounds: {'; '.join(map(in_figures, found))}")
    print(f"  step, median {1e3 * statistics.median(facts[0]['spent']):.1f} ms; longest step less that:")
    for name, spans in (("attach", attached), ("detach", left), ("neither", idle)):
        print(f"    {name:8} {in_words(moments(spans, facts[0]['ends'], facts[0]['spent']))}")
    grown = [
        last[:2] != first[:2]
        for first, last in zip(*(holdings[n] for n in (min(10, rounds), rounds)), strict=True)
    ]
    return same and not refused and not facts[0]["changed"] and not any(grown)


def in_figures(one: Held) -> str:
    """What a rank holds, in a line."""
    return (
        f"{one.descriptors} descriptors, {one.threads} threads, {one.mappings} mappings,"
        f" {one.rss_bytes / 1e6:.1f} MB"
    )


def in_short(error: BaseException) -> str:
    """An error in a few words."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer in {PATIENCE_SECONDS} s"
    return str(error)[:80]


Injector = Callable[[int], None]


def peers() -> dict[str, Injector]:
    """Ways to run nothing in a process; those that are not to be had here are named."""

    def ours(pid: int) -> None:
        inject_line(pid, NOTHING, lambda: True)

    def by_gdb(pid: int) -> None:
        inject_line(pid, NOTHING, lambda: True, by_gdb=True)

    found: dict[str, Injector] = {"zeromon": ours}
    if shutil.which("gdb"):
        found["zeromon by gdb"] = by_gdb
    python = PEERS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
    for name, program in PROGRAMS_OF_PEERS.items():
        package = name.split()[0]
        have = subprocess.run([str(python), "-c", f"import {package}"], capture_output=True, check=False)
        if have.returncode:
            pip = [str(python), "-m", "pip", "install", "--quiet", package]
            if subprocess.run(pip, check=False).returncode:
                print(f"{name}: cannot be installed here")
                continue
        found[name] = _runner(python, program)
    return found


PROGRAMS_OF_PEERS = {
    "hypno": "import sys, hypno\nhypno.inject_py(int(sys.argv[1]), b'pass')",
    "memray (gdb)": """
import socket, sys, tempfile
from memray.commands.attach import inject
server = socket.socket()
server.bind(("localhost", 0))
server.listen(1)
server.settimeout(10)
with tempfile.TemporaryDirectory() as folder:
    error = inject("gdb", int(sys.argv[1]), server.getsockname()[1], False, folder)
    if error:
        sys.exit(error)
    client = server.accept()[0]
    client.sendall(b"pass")
    client.shutdown(socket.SHUT_WR)
    client.recv(4096)
""",
}


def _runner(python: Path, program: str) -> Injector:
    def run(pid: int) -> None:
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [str(python), "-c", program, str(pid)],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the gdb that it started
                process.wait()
                raise
            output.seek(0)
            if code:
                raise RuntimeError((output.read().strip().splitlines() or ["failed"])[-1][:200])

    return run


def beside(injectors: dict[str, Injector], rounds: int, folder: Path) -> None:
    """Every way on its own job: how often it worked, how long the training thread stood."""
    for name, run in injectors.items():
        job = Job("fsdp2", folder / f"peer-{name.replace(' ', '-')}")
        spans, failed = [], Counter[str]()
        try:
            job.wait_until(20)
            pid = job.ranks()[0].pid
            for _ in range(rounds):
                began = time.monotonic()
                try:
                    run(pid)
                    spans.append((began, time.monotonic()))
                except (RuntimeError, ZeromonError, subprocess.TimeoutExpired, OSError) as error:
                    failed[in_short(error)] += 1
                time.sleep(0.15)
                if not job.alive:
                    break
            alive = job.alive
            facts = job.finish() if alive else []
        finally:
            job.kill()
        print(f"{name}: {len(spans)} of {rounds} worked; {dict(failed) or 'none failed'}")
        if facts:
            call = statistics.median(e - b for b, e in spans) if spans else 0.0
            print(
                f"  call {call:.3f} s; {in_words(moments(spans, facts[0]['ends'], facts[0]['spent']))}"
            )
        else:
            print("  the job died")


def _has_moved(sign: Path, before: str) -> bool:
    return sign.read_text() not in ("", before)


def on_malloc(injectors: dict[str, Injector], rounds: int, folder: Path) -> None:
    """A target whose only thread is always inside malloc or free."""
    for name, run in injectors.items():
        sign = folder / "malloc"
        sign.unlink(missing_ok=True)
        target = subprocess.Popen([sys.executable, "-c", MALLOC, str(sign)], stderr=subprocess.DEVNULL)
        done, why = 0, ""
        try:
            wait_for(sign.exists)
            for _ in range(rounds):
                run(target.pid)
                done += 1
                before = sign.read_text()
                wait_for(partial(_has_moved, sign, before), 10)
        except (AssertionError, RuntimeError, ZeromonError, subprocess.TimeoutExpired) as error:
            state = "died" if target.poll() is not None else "stands still"
            why = f"; the target {state} ({in_short(error)})"
        finally:
            target.kill()
            target.wait()
        print(f"{name}: {done} of {rounds} on a target inside malloc{why}")


def on_hung(injectors: dict[str, Injector], rounds: int, folder: Path) -> None:
    """Rank 0 waits in a collective that rank 1 never enters."""
    job = Job("fsdp2", folder / "hung", "25")
    try:
        job.wait_until(20)
        time.sleep(1.0)
        pid = job.ranks()[0].pid
        for name, run in injectors.items():
            done, why = 0, ""
            try:
                for _ in range(rounds):
                    run(pid)
                    done += 1
            except (RuntimeError, ZeromonError, subprocess.TimeoutExpired) as error:
                why = f"; {in_short(error)}"
            print(f"{name}: {done} of {rounds} on a hung collective{why}", flush=True)
            if not job.alive:
                print("  the job died")
                return
    finally:
        job.kill()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    os.environ.update(
        ZEROMON_DIR=str(folder / "rings"), ZEROMON_STORE=str(folder / "store"), ZEROMON_COLLECTOR="off"
    )
    root = paths.choose_ring_root()
    try:
        fine = [rounds_on(kind, rounds, root, folder) for kind in sys.argv[2:] or KINDS]
        if sys.argv[2:]:
            sys.exit(not all(fine))
        injectors = peers()
        print(f"\nnothing, run {min(rounds, 20)} times in rank 0 of an FSDP2 job")
        beside(injectors, min(rounds, 20), folder)
        print()
        on_malloc(injectors, max(rounds // 5, 20), folder)
        print()
        on_hung({"zeromon": injectors["zeromon"]}, max(rounds // 20, 20), folder)
        on_hung({n: r for n, r in injectors.items() if n != "zeromon"}, 3, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
