"""How the nodes of a job find each other: over the store that the job itself was started with.

One rank a node introduces its collector and learns of the others, in a thread of its own that ends when
all are known, or after ten minutes. What it finds goes to ``nodes.json`` in the run's folder, for the
collector; from then on the collectors talk to each other, and the job is not asked again.

``ZEROMON_MEET`` names a folder that all nodes share, for a job whose store cannot be used.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from zeromon_agents.guard import Guard

_PATIENCE_SECONDS = 600.0
_NAME_SECONDS = 30.0
_COUNT_SECONDS = 5.0
"""By then the ranks of a node have come."""
_MOST_NODES = 65536
_SHARED = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


class Board(Protocol):
    """Where nodes leave their cards."""

    def put(self, number: int, card: bytes) -> None:
        """Leaves the card of the node whose first rank is *number*."""

    def cards(self) -> list[bytes]:
        """All cards so far."""


class StoreBoard:
    """The job's own store. Nothing here waits for a key: what is not there yet comes later."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._known: list[bytes] = []

    def put(self, number: int, card: bytes) -> None:
        """Leaves a card."""
        self._store.set(f"zeromon/node/{self._store.add('zeromon/nodes', 1)}", card)

    def cards(self) -> list[bytes]:
        """Reads those that are new: a card is never changed."""
        count = min(_MOST_NODES, int(self._store.add("zeromon/nodes", 0)))
        while len(self._known) < count:
            key = f"zeromon/node/{len(self._known) + 1}"
            if not self._store.check([key]):
                break
            self._known.append(bytes(self._store.get(key)))
        return list(self._known)


class FolderBoard:
    """A folder that all nodes share."""

    def __init__(self, folder: Path) -> None:
        key = "|".join(os.environ.get(name, "") for name in _SHARED)
        self._folder = folder / f"zeromon-{zlib.crc32(key.encode()):08x}"

    def put(self, number: int, card: bytes) -> None:
        """Leaves a card."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(self._folder / f"{number}.json", card)

    def cards(self) -> list[bytes]:
        """Reads all."""
        return [path.read_bytes() for path in sorted(self._folder.glob("*.json"))[:_MOST_NODES]]


def board() -> Board | None:
    """Where this job's nodes meet; None where nothing can be used without being in its way."""
    shared = os.environ.get("ZEROMON_MEET")
    if shared:
        return FolderBoard(Path(shared))
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    store = distributed.distributed_c10d._get_default_store()
    own = connection_of(store)
    return None if own is None else StoreBoard(own)


def connection_of(store: Any) -> Any:
    """A connection of our own to *store*: on the job's, it and we would wait for each other."""
    clone = getattr(store, "clone", None)
    if clone is not None:  # before torch 2.7 there is none
        return clone()
    below = getattr(store, "underlying_store", store)
    while hasattr(below, "underlying_store"):
        below = below.underlying_store
    if isinstance(below, torch.distributed.TCPStore):
        made = torch.distributed.TCPStore(
            below.host, below.port, is_master=False, wait_for_workers=False
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # what was before is gone
        return torch.distributed.PrefixStore(f"zeromon/{attempt}", made)
    return None


def is_first(run_dir: Path) -> bool:
    """Whether no other rank of this node has asked before."""
    try:
        os.close(os.open(run_dir / "meets", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return False
    return True


def ranks_in(run_dir: Path) -> list[int]:
    """The ranks that have a ring there, the lowest first."""
    found = (path.name.split(".")[0].removeprefix("rank") for path in run_dir.glob("rank*.ring"))
    return sorted({int(text) for text in found if text.isdigit()})


class Meeting:
    """The thread of one node's first rank. *local*: ranks of the node, 0 where no launcher says."""

    def __init__(self, run_dir: Path, rank: int, local: int, world: int, guard: Guard) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._local = local
        self._world = world
        self._guard = guard
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begins; returns at once."""
        meet = self._guard.guarded(self._meet)
        threading.Thread(target=meet, name="zeromon-meet", daemon=True).start()

    def stop(self) -> None:
        """Ends it at its next pause."""
        self._stopping.set()

    def _meet(self) -> None:
        with suppress(RuntimeError, OSError):  # the job may end meanwhile, and its store with it
            where, card = board(), self._card()
            if where is None or card is None:
                return
            where.put(card["first_rank"], json.dumps(card).encode())
            began, known = time.monotonic(), 0
            while time.monotonic() - began < _PATIENCE_SECONDS:
                cards = [c for c in map(_card_of, where.cards()) if c is not None]
                if len(cards) > known:
                    known = len(cards)
                    write(self._run_dir / "nodes.json", json.dumps(cards).encode())
                if sum(c["ranks"] for c in cards) >= self._world:
                    return
                if self._stopping.wait(0.2 if time.monotonic() - began < 10 else 5.0):
                    return

    def _card(self) -> dict[str, Any] | None:
        """Once the collector listens, and, on the first node, has named the run; None without one."""
        began = time.monotonic()
        while time.monotonic() - began < _NAME_SECONDS:
            first, ranks = self._rank, self._local
            if not ranks and time.monotonic() - began > _COUNT_SECONDS:
                here = ranks_in(self._run_dir)
                first, ranks = min(here, default=first), len(here)
                if ranks >= self._world:
                    return None  # there is no other node
            address = collector_at(self._run_dir.parent)
            name, started = ("", 0.0) if first else _name_in(self._run_dir)
            if ranks and address and (name or first):
                return {
                    "node": socket.gethostname(),
                    "address": address,
                    "first_rank": first,
                    "ranks": ranks,
                    "run": name,
                    "started": started,
                }
            if self._stopping.wait(0.1):
                return None
        return None


def _card_of(content: bytes) -> dict[str, Any] | None:
    """A card of another node, or None for what is none."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        card = json.loads(content)
        return {
            "node": str(card["node"])[:255],
            "address": str(card["address"])[:255],
            "first_rank": int(card["first_rank"]),
            "ranks": max(0, int(card["ranks"])),
            "run": str(card["run"])[:80],
            "started": float(card["started"]),
        }
    return None


def _name_in(run_dir: Path) -> tuple[str, float]:
    with suppress(OSError, ValueError, TypeError):
        name, started = json.loads((run_dir / "name.json").read_bytes())
        return str(name), float(started)
    return "", 0.0


def collector_at(root: Path) -> str:
    """Where other nodes reach the collector of *root*; "" while there is none.

    One that listens on every address is reached at the one that leads to the job's master, unless
    ``ZEROMON_ADVERTISE`` names another.
    """
    try:
        facts = json.loads((root / "collector.json").read_bytes())
        host, port = str(facts["host"]), int(facts["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if host in ("0.0.0.0", "::"):
        host = os.environ.get("ZEROMON_ADVERTISE") or _address_towards(
            os.environ.get("MASTER_ADDR", "")
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address_towards(master: str) -> str:
    """The address of this node from which *master* is reached. Nothing is sent."""
    with suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            found = str(probe.getsockname()[0])
            if not ipaddress.ip_address(found).is_loopback:
                return found
    return socket.gethostname()


def write(path: Path, content: bytes) -> None:
    """Replaces *path*; only this user can read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_bytes(content)
    temporary.replace(path)
