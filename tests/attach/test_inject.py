"""The injector on targets without torch: it runs what it should, once, and nothing else changes."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attaching import BUSY, SLEEPS, code_of, has_run, line, running, writes
from support import wait_for

from zeromon.attach import loader
from zeromon.attach.inject import inject_line, parked, prove_gdb_works, resolve_target
from zeromon.attach.inject.parked import gnu_hash, waits_for_interpreter
from zeromon.attach.loader import attach_ranks, detach_ranks
from zeromon.attach.rank_processes import Process, running_processes
from zeromon.base.errors import AttachRefused

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="Linux on x86-64"
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes users and namespaces")

HELPED = f"import threading, time\nthreading.Thread(target=time.sleep, args=(900,)).start()\n{BUSY}"
WAITS = "import threading\nUP\nthreading.Event().wait()"
POLLS = "import os, select\nr, w = os.pipe()\np = select.epoll()\np.register(r)\nUP\np.poll()"
HOLDS = "import ctypes\nUP\nwhile True: ctypes.PyDLL(None).usleep(700_000)"
MALLOC = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
UP
while True:
    for address in [libc.malloc(64 + (i * 977) % 300_000) for i in range(200)]:
        libc.free(address)
"""


def test_the_code_is_what_its_listing_says(tmp_path: Path) -> None:
    if shutil.which("as") is None:
        pytest.skip("needs binutils")
    listing = Path(parked.__file__).with_name("parked.s")
    made, raw = tmp_path / "o", tmp_path / "raw"
    subprocess.run(["as", listing, "-o", made], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", made, raw], check=True)
    assert raw.read_bytes()[parked._DATA.size :] == parked._CODE
    assert not any(raw.read_bytes()[: parked._DATA.size])


def test_symbols_are_where_the_loader_has_them() -> None:
    """Read from the memory of this process, and asked of the loader."""
    found = resolve_target(os.getpid())
    for name, library in (
        ("PyGILState_Ensure", ctypes.pythonapi),
        ("PyRun_SimpleString", ctypes.pythonapi),
        ("pthread_create", ctypes.CDLL(None)),
    ):
        assert found.symbols[name] == ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found.room >= 1024


def test_the_hash_of_the_gnu_table() -> None:
    """Values from the format's own description."""
    assert [gnu_hash(n) for n in (b"", b"printf", b"exit")] == [0x1505, 0x156B2BB8, 0x7C967E3F]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (BUSY, "main thread, by a pending call"),
        (SLEEPS, "main thread"),
        (HELPED, "helper thread"),
        (WAITS, "main thread in futex"),
        (POLLS, "main thread in epoll_wait"),
        (MALLOC, "main thread, by a pending call"),
    ],
    ids=["busy", "sleeps", "helped", "waits", "polls", "malloc"],
)
def test_a_line_runs_once_a_time_and_nothing_stays(tmp_path: Path, code: str, how: str) -> None:
    """The target's own arithmetic is right throughout; no code is mapped, no thread is left."""
    sign = tmp_path / "sign"
    with running(code) as target:
        threads = len(os.listdir(f"/proc/{target.pid}/task"))
        mapped = code_of(target.pid)
        for times in range(1, 9):
            injected = inject_line(target.pid, writes(sign), sign.exists)
            assert injected.how.startswith(how)
            wait_for(has_run(sign, times), 20)
        wait_for(lambda: not waits_for_interpreter(target.pid))
        assert target.poll() is None
        assert sign.read_text() == "x" * 8
        assert code_of(target.pid) == mapped
        assert len(os.listdir(f"/proc/{target.pid}/task")) == threads


PYTHONS = [
    *sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3")),
    *(Path(p) for p in ("/usr/bin/python3",) if Path(p).exists()),
]


@pytest.mark.parametrize("python", PYTHONS, ids=[p.parts[-3] for p in PYTHONS])
def test_every_python_of_this_machine(tmp_path: Path, python: Path) -> None:
    """Shared or static, stripped or not: both ways in."""
    if b"3.6" in subprocess.run([python, "-V"], capture_output=True, check=True).stdout:
        pytest.skip("too old for the test's own program")
    for number, code in enumerate((BUSY, HELPED)):
        sign = tmp_path / f"sign{number}"
        with running(code, python=str(python)) as target:
            inject_line(target.pid, writes(sign), sign.exists)
            wait_for(has_run(sign, 1))
            assert target.poll() is None


def test_a_line_that_raises_does_not_reach_the_program() -> None:
    """Also as a pending call, whose error would be raised in the midst of the loop."""
    with running(BUSY) as target:
        inject_line(target.pid, "1/0", lambda: True)
        time.sleep(0.3)
        assert target.poll() is None


def test_whoever_holds_the_interpreter_gets_the_line_later(tmp_path: Path) -> None:
    """The injection itself does not wait; a second one does not overwrite the first."""
    sign = tmp_path / "sign"
    with running(HOLDS) as target:
        inject_line(target.pid, writes(sign), sign.exists)
        wait_for(has_run(sign, 1))
        inject_line(target.pid, writes(sign), sign.exists)
        wait_for(has_run(sign, 2))
        assert target.poll() is None


@pytest.mark.parametrize(
    "code", [BUSY, SLEEPS, HELPED, WAITS], ids=["busy", "sleeps", "helped", "waits"]
)
def test_the_target_goes_on_when_we_are_killed(code: str) -> None:
    """SIGKILL at any moment of the injection, again and again: its own arithmetic stays right."""
    draw = random.Random(1)
    with running(code) as target:
        for _ in range(15):
            child = os.fork()
            if not child:
                try:
                    while True:
                        inject_line(target.pid, line("pass"), lambda: True)
                finally:
                    os._exit(1)
            time.sleep(0.02 + 0.04 * draw.random())
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            assert target.poll() is None, target.stderr and target.stderr.read()
        sign = Path(f"/proc/{target.pid}/status").read_text()
        assert "TracerPid:\t0\n" in sign


KILLS = """#!/bin/sh
while [ "$1" != -p ]; do shift; done
echo "$2" >> {folder}/tried
kill -9 "$2"
echo zeromon: 0
"""


def test_a_gdb_that_kills_is_found_on_a_process_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's process is never the first try."""
    (tmp_path / "gdb").write_text(KILLS.format(folder=tmp_path))
    (tmp_path / "gdb").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    prove_gdb_works.cache_clear()
    with running(SLEEPS) as target:
        for _ in range(2):
            with pytest.raises(AttachRefused, match="gdb does not work on this machine") as refused:
                inject_line(target.pid, "pass", lambda: True, by_gdb=True)
        assert "zeromon run" in refused.value.hint
        assert str(target.pid) not in (tmp_path / "tried").read_text().split()
        assert target.poll() is None
    prove_gdb_works.cache_clear()


@pytest.mark.parametrize("code", [BUSY, WAITS], ids=["busy", "waits"])
def test_gdb_does_it_where_our_code_cannot(tmp_path: Path, code: str) -> None:
    try:
        prove_gdb_works()
    except AttachRefused as why:  # not installed, or as gdb 13.1 on a processor with AMX
        pytest.skip(str(why))
    sign = tmp_path / "sign"
    with running(code) as target:
        assert inject_line(target.pid, writes(sign), sign.exists, by_gdb=True).how == "gdb"
        wait_for(has_run(sign, 1))
        assert target.poll() is None


# ---- refused, and untouched -----------------------------------------------------------------------


def refusal(pid: int) -> tuple[str, str]:
    with pytest.raises(AttachRefused) as refused:
        inject_line(pid, line("pass"), lambda: True)
    return str(refused.value), refused.value.hint


def test_what_is_not_python_is_refused() -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        wait_for(lambda: Path(f"/proc/{other.pid}/comm").read_text() == "sleep\n")
        assert "is not Python: it runs sleep" in refusal(other.pid)[0]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_ourselves_our_parents_and_init_are_refused() -> None:
    for pid in (os.getpid(), os.getppid(), 1):
        assert "refusing to attach to" in refusal(pid)[0]
    assert "there is no process" in refusal(2**22 + 1)[0]


def test_a_stopped_process_a_dead_one_and_a_traced_one_are_refused() -> None:
    with running(SLEEPS) as target:
        os.kill(target.pid, signal.SIGSTOP)
        wait_for(lambda: "State:\tT" in Path(f"/proc/{target.pid}/status").read_text())
        text, hint = refusal(target.pid)
        assert "is stopped" in text and f"kill -CONT {target.pid}" in hint
        os.kill(target.pid, signal.SIGCONT)
        parked._ptrace_call(parked._SEIZE, target.pid)
        assert "is being traced by" in refusal(target.pid)[0]
    zombie = os.fork()
    if not zombie:
        os._exit(0)
    wait_for(lambda: "State:\tZ" in Path(f"/proc/{zombie}/status").read_text())
    assert "has ended" in refusal(zombie)[0]
    os.waitpid(zombie, 0)


@as_root
def test_another_users_process_is_refused_with_the_command_that_helps() -> None:
    with running(SLEEPS, "setpriv", "--reuid=65534", "--clear-groups", python="/usr/bin/python3") as t:
        text, hint = refusal(t.pid)
        assert "belongs to nobody" in text
        assert hint == f"sudo -u nobody zeromon attach {t.pid}"


@as_root
def test_without_the_right_to_trace_it_says_what_is_missing() -> None:
    """Root without CAP_SYS_PTRACE, and a root that has it."""
    with running(SLEEPS) as target:
        attempt = (
            "import sys\nfrom zeromon.attach.inject import inject_line\n"
            "from zeromon.base.errors import AttachRefused\n"
            "try:\n inject_line(int(sys.argv[1]), '', lambda: True)\n"
            "except AttachRefused as e:\n print(e, '|', e.hint)"
        )
        poor = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
        done = subprocess.run(
            [*poor, sys.executable, "-c", attempt, str(target.pid)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "may not be traced from here: it has capabilities that this shell lacks" in done.stdout
        assert "--cap-add=SYS_PTRACE" in done.stdout
        assert target.poll() is None


# ---- as attach uses it ----------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "rings"
    folder.mkdir(mode=0o700)
    return folder


def process(pid: int) -> Process:
    return running_processes()[pid]


def test_a_python_without_torch_is_refused_and_keeps_its_main_thread(root: Path) -> None:
    """It has not imported threading, and what is injected must not do so in its place."""
    code = "import time\nUP\nt = time.monotonic()\nwhile time.monotonic() < t + 2: pass\n" + (
        "import threading, sys\n"
        "is_main = threading.current_thread() is threading.main_thread()\n"
        "print(is_main, 'torch' in sys.modules, flush=True)"
    )
    with running(code) as target:
        folder, (outcome,) = attach_ranks([process(target.pid)], root)
        assert "it has not loaded torch" in outcome.refused
        assert not folder.exists()
        assert [p.name for p in (root / ".attach").iterdir()] == []
        assert target.communicate()[0] == "True False\n"


@as_root
def test_a_rank_in_another_pid_namespace_has_a_pid_here_too(root: Path) -> None:
    """Found below the one that made the namespace, and reached."""
    with running(SLEEPS, "unshare", "--pid", "--fork", "--kill-child") as outer:
        inner = next(p for p in running_processes().values() if p.parent == outer.pid)
        status = Path(f"/proc/{inner.pid}/status").read_text()
        assert f"NSpid:\t{inner.pid}\t1\n" in status
        _, (outcome,) = attach_ranks([inner], root)
        assert "it has not loaded torch" in outcome.refused
        assert outcome.how
        assert outer.poll() is None


@as_root
def test_a_container_that_sees_other_files_is_refused_before_anything_happens(root: Path) -> None:
    over = f'mount -t tmpfs none {root} && exec "$@"'
    with running(SLEEPS, "unshare", "--mount", "bash", "-c", over, "bash") as target:
        _, (outcome,) = attach_ranks([process(target.pid)], root)
        assert f"in a container without access to {root}" in outcome.refused
        assert "docker exec" in outcome.hint
        assert not outcome.how


def test_one_that_never_comes_to_it_is_left_with_nothing_to_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the interpreter's lock in C: the request is withdrawn, and later nothing happens."""
    monkeypatch.setattr(loader, "_BEGIN_SECONDS", 0.3)
    code = (
        "import ctypes\nUP\nctypes.PyDLL(None).usleep(2_000_000)\nprint('free', flush=True)\n" + SLEEPS
    )
    with running(code) as target:
        _, (outcome,) = attach_ranks([process(target.pid)], root)
        assert "holds the interpreter's lock in C code; the request was withdrawn" in outcome.refused
        assert "py-spy dump" in outcome.hint
        assert target.stdout is not None and target.stdout.readline() == "free\n"
        wait_for(lambda: not waits_for_interpreter(target.pid))
        assert target.poll() is None


def test_one_that_dies_meanwhile_is_named(root: Path) -> None:
    code = "import ctypes, signal\nsignal.alarm(1)\nUP\nctypes.PyDLL(None).usleep(9_000_000)"
    with running(code) as target:
        _, (outcome,) = attach_ranks([process(target.pid)], root)
        assert "ended during the attach" in outcome.refused


def test_two_of_us_do_not_meet_at_one_process(root: Path) -> None:
    with running(SLEEPS) as target:
        desk = root / ".attach"
        desk.mkdir(mode=0o700)
        with loader._locked_process(desk / f"{target.pid}.lock", target.pid):
            (outcome,) = detach_ranks([process(target.pid)], root)
        assert "another zeromon is at process" in outcome.refused


@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles a stand-in")
@pytest.mark.parametrize("free", [True, False])
def test_a_python_without_a_gil_is_left_alone(tmp_path: Path, free: bool) -> None:
    """A stand-in that exports what such a build does: none is to be had here."""
    names = ["Py_IsInitialized", "PyGILState_Ensure", "PyGILState_Release", "PyRun_SimpleString"]
    names += ["_Py_DecRefShared"] if free else []
    source = "".join(f"void {name}(void) {{}}\n" for name in names)
    source += "#include <pthread.h>\n#include <unistd.h>\n"
    source += "int main(void) { volatile void *used = pthread_create; (void)used; sleep(60); }\n"
    (tmp_path / "python3.13t.c").write_text(source)
    program = tmp_path / "python3.13t"
    compiled = ["cc", "-rdynamic", "-pthread", "-o", str(program), f"{program}.c"]
    subprocess.run(compiled, check=True, capture_output=True)
    with subprocess.Popen([program]) as running:
        try:
            # once it sleeps, its libraries are mapped
            assert wait_for(lambda: _state_of(running.pid) == "S")
            if free:
                with pytest.raises(AttachRefused, match="without a GIL"):
                    resolve_target(running.pid)
            else:
                assert resolve_target(running.pid).symbols.keys() >= set(names)
            assert running.poll() is None
        finally:
            running.kill()


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
