"""Hosts of their own on one machine: network namespaces on a bridge, each with its own clock.

The link to one of them may be a long one: a pair of TAP devices between which this process carries the
frames, later by as much as it is told, or not at all. The bridge has a namespace, too: a browser that
sees an interface of its own network come or go gives up what it is loading. Needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import FORKED, ROOT, clean_environment

TOKEN = "seven-secret-words"
_TUNSETIFF = 0x400454CA
_TAP = 0x0002 | 0x1000
_CLONE_NEWNET = 0x40000000


def possible() -> str:
    """Why there can be none here, "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"zm{os.getpid()}"  # several test processes ask at once
    for what, command in (
        ("the ip command", ["ip", "-V"]),
        ("network namespaces", ["ip", "netns", "add", probe]),
        ("clocks of their own", ["unshare", "--time", "--uts", "--fork", "--monotonic", "1", "true"]),
        ("bridges", ["ip", "-n", probe, "link", "add", "br0", "type", "bridge"]),
    ):
        if not _works(command):
            missing = f"this machine has no {what}"
            break
    else:
        missing = "" if Path("/dev/net/tun").exists() else "this machine has no TAP devices"
    _works(["ip", "netns", "del", probe])
    return missing


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def ip(*words: str, inside: str = "") -> None:
    where = ["ip", "netns", "exec", inside] if inside else []
    subprocess.run([*where, "ip", *words], check=True, capture_output=True)


@contextmanager
def within(namespace: str) -> Iterator[None]:
    """What this thread opens, and the threads and processes that it starts, are in that network."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        assert libc.setns(there, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(home, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(there)
        os.close(home)


def tap(name: str, namespace: str) -> int:
    """A TAP device; its other end is the file that is returned."""
    with within(namespace):
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP))
    return fd


class Cable:
    """Carries frames between two TAP devices, *delay* seconds later each way; None: it is cut."""

    def __init__(self, one: int, other: int) -> None:
        self.delay: float | None = 0.0
        self.lost_share = 0.0
        """Frames that do not arrive, as a share of all."""
        self._ends = {one: other, other: one}
        self._going: deque[tuple[float, int, bytes]] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        while not self._closing.is_set():
            wait = 0.1
            if self._going:
                wait = max(0.0, self._going[0][0] - time.monotonic())
            ready, _, _ = select.select(list(self._ends), [], [], min(0.1, wait))
            now = time.monotonic()
            for end in ready:
                frame = os.read(end, 65536)
                if self.delay is not None and random.random() >= self.lost_share:
                    self._going.append((now + self.delay, self._ends[end], frame))
            while self._going and self._going[0][0] <= now:
                _, end, frame = self._going.popleft()
                try:
                    os.write(end, frame)
                except OSError:
                    continue  # as a full queue of a real one

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2)
        for end in self._ends:
            os.close(end)


BRIDGE = "zmbridge"
"""The namespace that the bridge is in."""
OUTSIDE = "10.77.0.254"
"""The address there of who is within :data:`BRIDGE`."""


@dataclass
class Host:
    """One node: its namespace, its folders, its clock, its launcher."""

    name: str
    address: str
    ahead_seconds: int
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return clean_environment() | {
            "ZEROMON_DIR": str(self.folder / "rings"),
            "ZEROMON_STORE": str(self.folder / "store"),
            "ZEROMON_HOST": "0.0.0.0",
            "ZEROMON_TOKEN": TOKEN,
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "agents", "dashboard")),
        }

    def command(self, *words: str) -> list[str]:
        """*words* on this host: its network, its host name, its clock."""
        clock = str(self.ahead_seconds)
        return [
            "ip", "netns", "exec", self.name,
            "unshare", "--uts", "--time", "--fork", "--kill-child", "--monotonic", clock,
            "--boottime", clock, "sh", "-c", f'hostname {self.name}; exec "$@"', "sh", *words,
        ]  # fmt: skip

    def start(self, *words: str, **more: str) -> subprocess.Popen[bytes]:
        log = (self.folder / "log").open("ab")
        running = subprocess.Popen(
            self.command(*words), env=self.environment | more, cwd=ROOT,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.processes.append(running)
        return running

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def pids(self) -> list[int]:
        """Every process in its network."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        )
        return [int(word) for word in found.stdout.split()]

    def kill(self) -> None:
        """All of them at once, as when the power goes."""
        ip("link", "set", "eth0", "down", inside=self.name)
        for _ in range(3):
            for pid in self.pids():
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)


class Hosts:
    """*count* hosts on one bridge, 10.77.0.1 and on; the link to the last one is a :class:`Cable`."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.hosts: list[Host] = []
        names = [f"zm{number}" for number in range(count)]
        for name in (BRIDGE, *names):
            _works(["ip", "netns", "del", name])  # what a run left behind that was itself killed
            ip("netns", "add", name)
            ip("link", "set", "lo", "up", inside=name)
        ip("link", "add", "br0", "type", "bridge", inside=BRIDGE)
        ip("addr", "add", f"{OUTSIDE}/24", "dev", "br0", inside=BRIDGE)
        ip("link", "set", "br0", "up", inside=BRIDGE)
        for number, name in enumerate(names):
            host = Host(name, f"10.77.0.{number + 1}", 1000 * number, folder / str(number))
            host.folder.mkdir()
            self.hosts.append(host)
            if number < count - 1:
                link = f"link add {name} type veth peer name eth0 netns {name}"
                ip(*link.split(), inside=BRIDGE)
            else:
                self.cable = Cable(tap(name, BRIDGE), tap("eth0", name))
            ip("link", "set", name, "master", "br0", "up", inside=BRIDGE)
            ip("addr", "add", f"{host.address}/24", "dev", "eth0", inside=name)
            ip("link", "set", "eth0", "up", inside=name)

    def get(self, number: int, path: str) -> Any:
        """What the collector of a host answers, to who is within :data:`BRIDGE`."""
        request = urllib.request.Request(
            f"http://{self.hosts[number].address}:9417{path}",
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def close(self) -> None:
        for host in self.hosts:
            for pid in host.pids():
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            for process in host.processes:
                process.wait(60)
        self.cable.close()
        for name in (*(host.name for host in self.hosts), BRIDGE):
            ip("netns", "del", name)


def train(
    hosts: Hosts, each: int, program: Path, *arguments: str, forked: bool = False, notify: str = ""
) -> None:
    """`zeromon run -- torchrun ... program` on every host, as a user would.

    *forked*: with one import of torch a host. *notify*: a URL for alerts, to which each adds its name.
    """
    nodes, address = str(len(hosts.hosts)), hosts.hosts[0].address
    for number, host in enumerate(hosts.hosts):
        place = {"NODE_PLACE": f"{number} {nodes} {address} 29477"} if forked else {}
        torchrun = (
            sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--node-rank", str(number),
            "--master-addr", address, "--master-port", "29477", "--nproc-per-node",
        )  # fmt: skip
        host.start(
            sys.executable, "-m", "zeromon", "run", "--sd-file", str(host.folder / "sd.json"), "--",
            *(FORKED if forked else torchrun), str(each), str(program), *arguments,
            GLOO_SOCKET_IFNAME="eth0", ZEROMON_NOTIFY=f"{notify}/{host.name}" if notify else "", **place,
        )  # fmt: skip
