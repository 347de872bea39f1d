"""What the terminal view costs: `bench_tui.py [ours]`. Needs tmux.

CPU of the whole process, as a share of a core, at 4 snapshots a second in 200x60, with 64 and 1,024
synthetic ranks: at rest on each screen, and while a cursor moves, the table is sorted and filtered. The
synthetic source makes its snapshots in the same process; what that alone costs is said beside it. Then
the time from a key to what it shows, and from the command to the first snapshot of a real collector's
HTTP. memray's live view and nvitop, installed beside it at the first run, follow where they run here.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench_attach import PEERS  # noqa: E402
from records import keep  # noqa: E402
from tui.snapshots import snapshot  # noqa: E402
from tui_program import HZ, Synthetic  # noqa: E402

from zeromon.collector.http import start_http_server  # noqa: E402
from zeromon.storage.snapshot_log import Past  # noqa: E402

SECONDS = 8.0
SCREENS = ("overview", "memory", "communication", "timeline", "ranks", "findings", "logs")


class Terminal:
    """A program in a tmux of its own."""

    def __init__(self, command: list[str], width: int = 200, height: int = 60) -> None:
        self._name = f"zeromon-bench-{os.getpid()}-{time.monotonic_ns()}"
        environment = {**os.environ, "COLORTERM": "truecolor", "TERM": "screen-256color"}
        self.began = time.perf_counter()
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height),
                   "exec " + shlex.join(command), env=environment)  # fmt: skip
        self.pid = int(self._tmux("display", "-p", "#{pane_pid}"))

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        command = ["tmux", "-L", self._name, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    def wait(self, shown: Callable[[str], bool], timeout: float = 30.0) -> float:
        """Seconds until the screen is so."""
        began = time.perf_counter()
        while not shown(self.text()):
            if time.perf_counter() - began > timeout:
                raise TimeoutError(self.text())
        return time.perf_counter() - began

    def cpu(self, seconds: float, meanwhile: Callable[[int], None] = lambda _: None) -> float:
        """Of a core; *meanwhile* is called twice a second."""
        before, began = _cpu_seconds(self.pid), time.perf_counter()
        for beat in range(round(seconds * 2)):
            meanwhile(beat)
            time.sleep(max(0.0, began + (beat + 1) / 2 - time.perf_counter()))
        return (_cpu_seconds(self.pid) - before) / (time.perf_counter() - began)

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._name, "kill-server"], check=False, capture_output=True)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def of_source(ranks: int) -> float:
    """What making the synthetic snapshots costs, of a core."""
    source, began = Synthetic(ranks), time.process_time()
    for _ in range(20):
        source.latest()
    return (time.process_time() - began) / 20 * HZ


def view(ranks: int) -> dict[str, float]:
    """CPU and delays with so many ranks."""
    terminal = Terminal([sys.executable, str(HERE / "tui_program.py"), str(ranks)])
    found: dict[str, float] = {"source": of_source(ranks)}
    try:
        terminal.wait(lambda text: "running, step" in text)
        time.sleep(3)
        for number, name in enumerate(SCREENS, 1):
            terminal.press(str(number))
            time.sleep(1)
            found[name] = terminal.cpu(SECONDS)
        terminal.press("5")
        time.sleep(1)

        def use(beat: int) -> None:
            terminal.press(*(("Down",) * 3 if beat % 4 else ("s",)))

        terminal.press("/", *"exposed>8", "Enter")
        found["cursor, sort, filter"] = terminal.cpu(SECONDS, use)
    finally:
        terminal.close()
    return found


class Raw:
    """A program on a terminal that this process reads: what it draws is seen the moment it comes."""

    def __init__(self, command: list[str]) -> None:
        self.began = time.perf_counter()
        self._pid, self._fd = pty.fork()
        if not self._pid:
            os.environ.update(COLORTERM="truecolor", TERM="xterm-256color")
            os.execvp(command[0], command)
        size = struct.pack("HHHH", 60, 200, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)

    def press(self, key: str, shown: str) -> float:
        """Seconds from the key until *shown* is drawn."""
        self._read_what_is_there()
        began = time.perf_counter()
        os.write(self._fd, key.encode())
        self.wait(shown)
        return time.perf_counter() - began

    def wait(self, shown: str, timeout: float = 30.0) -> None:
        """Reads until *shown* is drawn."""
        seen, end = "", time.perf_counter() + timeout
        while shown not in seen:
            if time.perf_counter() > end:
                raise TimeoutError(shown)
            if select.select([self._fd], [], [], 0.1)[0]:
                seen += os.read(self._fd, 1 << 16).decode(errors="replace")

    def _read_what_is_there(self) -> None:
        while select.select([self._fd], [], [], 0.05)[0]:
            os.read(self._fd, 1 << 16)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)


def keys(ranks: int) -> list[float]:
    """Seconds from keys that change the screen until its content is drawn; first times included."""
    program = Raw([sys.executable, str(HERE / "tui_program.py"), str(ranks)])
    try:
        program.wait("running, step")
        time.sleep(2)
        order = [("2", "by role"), ("5", "exposed communication, "), ("3", "in flight"),
                 ("6", "because"), ("7", "follows"), ("1", "step time")]  # fmt: skip
        return [program.press(key, shown) for key, shown in order * 4]
    finally:
        program.close()


class _View:
    """A collector with one fixed snapshot."""

    def __init__(self) -> None:
        self.view = (snapshot(8),)

    def was_read(self) -> None:
        pass

    def past(self, _: str) -> Past:
        return Past(Path(os.devnull))


def start() -> float:
    """Seconds from the command to the first snapshot; the shortest of five."""
    server = start_http_server(_View(), "127.0.0.1", 0)  # type: ignore[arg-type]
    command = [
        str(Path(sys.executable).with_name("zeromon")),
        "attach",
        f"127.0.0.1:{server.server_port}",
    ]
    found = []
    for _ in range(5):
        program = Raw(command)
        try:
            program.wait("running, step")
            found.append(time.perf_counter() - program.began)
        finally:
            program.close()
    server.shutdown()
    return min(found)


def installed(name: str) -> str:
    """The program of the package *name* in an environment of its own; "" where it cannot be had."""
    program = PEERS / "bin" / name
    if not (PEERS / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
    if not program.exists():
        pip = [str(PEERS / "bin" / "python"), "-m", "pip", "install", "--quiet", name]
        subprocess.run(pip, check=False)
    return str(program) if program.exists() else ""


def beside() -> dict[str, float]:
    """CPU of memray's live view and nvitop, where they run."""
    found: dict[str, float] = {}
    busy = "import time\nwhile True: x = [bytearray(1 << 16) for _ in range(50)]; time.sleep(0.01)"
    for name, command, shown in (
        ("memray", ["memray", "run", "--live", "-c", busy], "Heap"),
        ("nvitop", ["nvitop", "--monitor", "--interval", "1"], "GPU"),
    ):
        program = installed(name)
        if not program:
            print(f"{name}: cannot be installed here")
            continue
        terminal = Terminal([program, *command[1:]])
        try:
            terminal.wait(lambda text, shown=shown: shown in text, 10)  # type: ignore[misc]
            time.sleep(2)
            found[name] = terminal.cpu(SECONDS)
            print(f"{name}: {found[name]:.1%} of a core")
            keep(name, found[name], "of a core")
        except (TimeoutError, subprocess.CalledProcessError, FileNotFoundError):
            print(f"{name}: does not run here")
        finally:
            terminal.close()
    return found


def main() -> None:
    """Prints the figures."""
    if shutil.which("tmux") is None:
        print("tmux is not installed")
        return
    seconds = start()
    keep("first snapshot", seconds, "s")
    print(f"from the command to the first snapshot: {seconds:.2f} s")
    for ranks in (64, 1024):
        row = view(ranks)
        alone = f"the source alone {row['source']:.1%}"
        print(f"{ranks:5} ranks, {HZ} snapshots/s, 200x60, of a core ({alone}):")
        for name in (*SCREENS, "cursor, sort, filter"):
            print(f"        {name:22} {row[name]:6.1%}")
            keep(f"{name}, {ranks} ranks", row[name], "of a core")
        delays = keys(ranks)
        row["key_seconds"], row["slowest_key_seconds"] = statistics.median(delays), max(delays)
        key, slowest = row["key_seconds"] * 1e3, row["slowest_key_seconds"] * 1e3
        keep(f"key to screen, {ranks} ranks", row["key_seconds"], "s")
        print(f"        key to screen          {key:.0f} ms, the slowest {slowest:.0f} ms")
    if "ours" not in sys.argv:
        beside()


if __name__ == "__main__":
    main()
