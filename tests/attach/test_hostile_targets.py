"""Processes at a bad moment or in a bad place: the line runs, or is refused, and they live on."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from attaching import BUSY, SLEEPS, has_run, line, running, writes
from support import wait_for

from zeromon.attach.inject import inject_line, refusal
from zeromon.attach.inject.parked import waits_for_interpreter
from zeromon.base.errors import AttachRefused

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="Linux on x86-64"
)

THREADS = f"""
import threading
for kind in range(200):
    threading.Thread(target=threading.Event().wait, args=(900,), daemon=True).start()
{BUSY}"""
NUMPY = """
import numpy
a = numpy.arange(90_000.0).reshape(300, 300) / 9e4
known = (a @ a).tobytes()
objects = numpy.array(list(range(30_000)), dtype=object)
UP
while True:
    assert (a @ a).tobytes() == known
    assert numpy.sort(objects[::-1])[7] == 7
"""
HANDLER = """
import signal, time
def handler(number, frame):
    UP
    while True:
        {body}
signal.signal(signal.SIGUSR1, handler)
signal.raise_signal(signal.SIGUSR1)
"""
SIGNALS = """
import signal, time
count = 0
def handler(number, frame):
    global count
    count += 1
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
UP
while True:
    before = count
    time.sleep(0.02)
    assert count > before
"""
TARGETS = {
    "200 threads": THREADS,
    "numpy in C": NUMPY,
    "computes in a signal handler": HANDLER.format(body="sum(range(1000))"),
    "sleeps in a signal handler": HANDLER.format(body="time.sleep(0.05)"),
    "2,000 signals a second": SIGNALS,
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_is_busy_with_other_things_runs_the_line(tmp_path: Path, name: str) -> None:
    """Five times, each once; it asserts its own results meanwhile."""
    sign = tmp_path / "sign"
    with running(TARGETS[name]) as target:
        threads = len(os.listdir(f"/proc/{target.pid}/task"))
        for times in range(1, 6):
            inject_line(target.pid, writes(sign), sign.exists)
            wait_for(has_run(sign, times), 20)
        wait_for(lambda: not waits_for_interpreter(target.pid))
        time.sleep(0.1)
        assert target.poll() is None
        assert sign.read_text() == "x" * 5
        assert len(os.listdir(f"/proc/{target.pid}/task")) == threads


@pytest.mark.parametrize("gone", [False, True], ids=["moved", "deleted"])
@pytest.mark.parametrize("code", [BUSY, SLEEPS], ids=["busy", "sleeps"])
def test_a_python_whose_files_are_elsewhere(tmp_path: Path, code: str, gone: bool) -> None:
    """A copy of the interpreter and its library, moved or deleted while it runs."""
    bin_, lib = tmp_path / "here" / "bin", tmp_path / "here" / "lib"
    bin_.mkdir(parents=True)
    lib.mkdir()
    python = shutil.copy(Path(sys.executable).resolve(), bin_ / "python3")
    for library in Path(sys.base_prefix, "lib").glob("libpython*.so*"):
        shutil.copy(library, lib)
    sign = tmp_path / "sign"
    settings = [f"PYTHONHOME={sys.base_prefix}", f"LD_LIBRARY_PATH={lib}"]
    with running(code, "env", *settings, python=str(python)) as target:
        if gone:
            shutil.rmtree(tmp_path / "here")
        else:
            (tmp_path / "here").rename(tmp_path / "there")
        inject_line(target.pid, writes(sign), sign.exists)
        wait_for(has_run(sign, 1))
        assert target.poll() is None


BUSY_FOR = """
end = time.monotonic() + {}
while time.monotonic() < end: pass
time.sleep(0.02)
sys.exit(7)
"""
REPLACED = "process PID is ending or starting another program"
EXECS = """
import os, sys, time
first = not os.environ.get('AGAIN')
os.environ['AGAIN'] = '1'
if first:
    UP
end = time.monotonic() + 0.03 * (time.time_ns() // 1000 % 7 + 1) / 7
{body}
os.execv(sys.executable, [sys.executable, '-S', '-c', sys.orig_argv[-1]])
"""


@pytest.mark.parametrize(
    "body", ["while time.monotonic() < end: pass", "time.sleep(0.1)"], ids=["computes", "sleeps"]
)
def test_one_that_execs_at_that_moment_is_not_harmed(body: str) -> None:
    """Again and again: what was read of the one before is never used in the next."""
    told: Counter[str] = Counter()
    draw = random.Random(3)
    with running(EXECS.format(body=body)) as target:
        began = time.monotonic()
        while time.monotonic() < began + 1.5 or not told["done"]:
            try:
                inject_line(target.pid, line("pass"), lambda: True)
                told["done"] += 1
            except AttachRefused as error:
                told[str(error).replace(str(target.pid), "PID")] += 1
            time.sleep(0.02 * draw.random())
            assert target.poll() is None, (target.returncode, target.communicate(), told)
            assert time.monotonic() < began + 60, told  # a busy machine may take a while


def test_one_that_exits_at_that_moment_is_named() -> None:
    """Its exit code is its own, whenever it comes. A shell collects it, as a launcher would."""
    draw = random.Random(5)
    told: Counter[str] = Counter()
    shell = ("sh", "-c", '"$@"; echo $?', "sh")
    for _ in range(12):
        code = f"import os, sys, time\nUP\nprint(os.getpid(), flush=True)\n{BUSY_FOR}"
        with running(code.format(draw.random() / 20), *shell) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            try:
                while True:
                    inject_line(pid, line("pass"), lambda: True)
                    told["done"] += 1
            except AttachRefused as error:
                told[str(error).replace(str(pid), "PID")] += 1
            assert parent.communicate(timeout=20)[0] == "7\n", told
    ends = {"there is no process PID", "process PID has ended", REPLACED}
    assert set(told) - {"done"} <= ends, told


@pytest.mark.skipif(shutil.which("gdb") is None, reason="no gdb here")
def test_one_that_gdb_holds_is_refused_by_name(tmp_path: Path) -> None:
    with running(SLEEPS) as target:
        gdb = subprocess.Popen(
            ["gdb", "-nx", "-batch", "-p", str(target.pid), "-ex", "shell sleep 30"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_for(lambda: refusal.status_of(target.pid)["TracerPid"] == str(gdb.pid))
            with pytest.raises(AttachRefused, match=rf"is being traced by gdb \({gdb.pid}\)"):
                inject_line(target.pid, line("pass"), lambda: True)
        finally:
            gdb.kill()
            gdb.wait()


@pytest.mark.parametrize(
    ("scope", "root", "name", "way_out"),
    [
        (1, False, "1 (restricted: only an ancestor may trace)", "sysctl"),
        (2, False, "2 (admin-only: CAP_SYS_PTRACE is needed)", "sudo -E zeromon attach"),
        (3, False, "3 (no attach, until the machine restarts)", "zeromon run -- COMMAND"),
        (3, True, "3 (no attach, until the machine restarts)", "zeromon run -- COMMAND"),
    ],
)
def test_the_scopes_of_yama_are_named_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, scope: int, root: bool, name: str, way_out: str
) -> None:
    """This kernel may have no Yama: what it would answer is put in its place."""
    monkeypatch.setattr(refusal, "_yama_scope", lambda _: scope)
    status = {"VmSize": "9 kB", "CapEff": f"{1 << 19:x}" if root else "0"}
    monkeypatch.setattr(refusal, "_status_in_folder", lambda _: status)
    why = refusal.why_not_traced(1234)
    assert f"kernel.yama.ptrace_scope is {name}" in str(why)
    assert way_out in why.hint
