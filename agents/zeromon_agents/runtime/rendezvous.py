"""Exchanges the collectors' addresses between the nodes of a job, over the job's own store.

One rank per node publishes its node's address and reads those of the other nodes, in a thread that ends
when all ranks are covered, or after ten minutes. It writes the nodes to ``nodes.json`` in the run's
folder. From then on the collectors talk to each other, and the job's store is not used again.

The store has no authentication: whoever reaches it can publish a node. Where the job has a
``ZEROMON_TOKEN``, each node signs with it what it publishes, and ignores what is not signed
(:mod:`zeromon.ring.tokens`).
"""

import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zeromon.ring.files import replace_file
from zeromon.ring.paths import read_run_name
from zeromon.ring.tokens import is_own_card, job_token, sign_node_card
from zeromon_agents.runtime.guard import Guard

_TIMEOUT_SECONDS = 600.0
_NAME_SECONDS = 30.0
_COUNT_SECONDS = 5.0
"""After this time all ranks of a node have created their rings."""
_MAX_NODES = 65536
NOTE = "nodes.note"
"""Why other nodes are unknown, a sentence; in the run's folder."""


class JobStore:
    """The job's own store. No call waits for a key that is not there yet."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._known: list[bytes] = []

    def publish(self, node: bytes) -> None:
        """Publishes a node under the next free number."""
        self._store.set(f"zeromon/node/{self._store.add('zeromon/nodes', 1)}", node)

    def nodes(self) -> list[bytes]:
        """Returns all nodes; reads only new ones, because a published node does not change."""
        # The store has no authentication: a false count without a bound would fill the memory
        count = min(_MAX_NODES, int(self._store.add("zeromon/nodes", 0)))
        while len(self._known) < count:
            key = f"zeromon/node/{len(self._known) + 1}"
            # A node takes its number before it sets its key: `get` would block the thread until then
            if not self._store.check([key]):
                break
            self._known.append(bytes(self._store.get(key)))
        return list(self._known)


def rendezvous_store() -> JobStore | None:
    """Returns where this job's nodes publish; None where that would disturb the job."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    store = distributed.distributed_c10d._get_default_store()
    own_store = connection_of(store)
    return None if own_store is None else JobStore(own_store)


def connection_of(store: Any) -> Any:
    """Returns a second connection to *store*: on one, the job and the agent would block each other."""
    clone = getattr(store, "clone", None)
    if clone is not None:  # torch 2.7 and later
        return clone()
    below = getattr(store, "underlying_store", store)
    # init_process_group and elastic launchers wrap the TCPStore in PrefixStores, one inside another
    while hasattr(below, "underlying_store"):
        below = below.underlying_store
    if isinstance(below, torch.distributed.TCPStore):
        # By default the constructor waits until world_size clients have connected
        tcp_store = torch.distributed.TCPStore(
            below.host, below.port, is_master=False, wait_for_workers=False
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restart has a new store
        return torch.distributed.PrefixStore(f"zeromon/{attempt}", tcp_store)
    return None


def is_first_on_node(run_dir: Path) -> bool:
    """Returns whether this is the first call for *run_dir*, among all ranks of this node."""
    try:
        os.close(os.open(run_dir / "meets", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return False
    return True


def ranks_in(run_dir: Path) -> list[int]:
    """Returns the ranks that have a ring in *run_dir*, in ascending order."""
    numerals = (path.name.split(".")[0].removeprefix("rank") for path in run_dir.glob("rank*.ring"))
    return sorted({int(numeral) for numeral in numerals if numeral.isdigit()})


class Rendezvous:
    """The thread of one node's first rank. *local*: ranks of the node, 0 where unknown."""

    def __init__(self, run_dir: Path, rank: int, local: int, world: int, guard: Guard) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._local = local
        self._world = world
        self._guard = guard
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread and returns at once."""
        run = self._guard.guarded(self._run)
        self._thread = threading.Thread(target=run, name="zeromon-rdzv", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread at its next pause; waits for that a second at most."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        with suppress(RuntimeError, OSError):  # the job and its store may end meanwhile
            self._meet_nodes()

    def _note(self, sentence: str) -> None:
        """Tells the collector why nodes are missing."""
        with suppress(OSError):
            replace_file(self._run_dir / NOTE, sentence.encode())

    def _meet_nodes(self) -> None:
        store, node = rendezvous_store(), self._known_node()
        if store is None or node is None:
            return
        token = job_token(self._run_dir)
        store.publish(json.dumps(sign_node_card(token, node)).encode())
        start_seconds, node_count, refused = time.monotonic(), 0, 0
        while time.monotonic() - start_seconds < _TIMEOUT_SECONDS:
            published = store.nodes()
            decoded = (node_of(content, token) for content in published)
            nodes = [peer for peer in decoded if peer is not None]
            if len(published) - len(nodes) > refused:
                refused = len(published) - len(nodes)
                self._note(f"published nodes ignored for another ZEROMON_TOKEN, or none: {refused}")
            if len(nodes) > node_count:
                node_count = len(nodes)
                replace_file(self._run_dir / "nodes.json", json.dumps(nodes).encode())
            if sum(peer["ranks"] for peer in nodes) >= self._world:
                return
            if self._stopping.wait(0.2 if time.monotonic() - start_seconds < 10 else 5.0):
                return

    def _known_node(self) -> dict[str, Any] | None:
        """Returns this node as soon as its collector listens; None without a collector or other nodes.

        On the first node the collector must also have named the run.
        """
        start_seconds = time.monotonic()
        while time.monotonic() - start_seconds < _NAME_SECONDS:
            first_rank, ranks = self._rank, self._local
            if not ranks and time.monotonic() - start_seconds > _COUNT_SECONDS:
                local_ranks = ranks_in(self._run_dir)
                first_rank, ranks = min(local_ranks, default=first_rank), len(local_ranks)
                if ranks >= self._world:
                    return None  # all ranks are on this node
            address = collector_at(self._run_dir.parent)
            name, started = ("", 0.0) if first_rank else read_run_name(self._run_dir)
            if ranks and address and (name or first_rank):
                return {
                    "node": socket.gethostname(),
                    "address": address,
                    "first_rank": first_rank,
                    "ranks": ranks,
                    "run": name,
                    "started": started,
                }
            if self._stopping.wait(0.1):
                return None
        return None


def node_of(content: bytes, token: str) -> dict[str, Any] | None:
    """Decodes a node that a holder of *token* has published; None for anything else."""
    # OverflowError of int(1e999), RecursionError of deep nesting: anything may be in the store
    with suppress(ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        node = json.loads(content)
        if not is_own_card(token, node):
            return None
        return {
            "node": str(node["node"])[:255],
            "address": str(node["address"])[:255],
            "first_rank": int(node["first_rank"]),
            # With a negative number in the sum, this thread would not end before its timeout
            "ranks": max(0, int(node["ranks"])),
            "run": str(node["run"])[:80],
            "started": float(node["started"]),
        }
    return None


def collector_at(root: Path) -> str:
    """Returns the address at which other nodes reach the collector of *root*; "" while none listens.

    For a collector that listens on every address, it is ``ZEROMON_ADVERTISE``, or else the address of
    this node on the way to the job's master.
    """
    try:
        listens = json.loads((root / "collector.json").read_bytes())
        host, port = str(listens["host"]), int(listens["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if host in ("0.0.0.0", "::"):
        host = os.environ.get("ZEROMON_ADVERTISE") or _address_towards(os.environ.get("MASTER_ADDR", ""))
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address_towards(master: str) -> str:
    """Returns the address of this node on the way to *master*. It sends no packet."""
    with suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
            # Debian resolves a host's own name to 127.0.1.1, which no other node reaches
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return socket.gethostname()


_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)  # fmt: skip


class RankInfo:
    """Rank and world size of this process, and its rank among the ranks of its node."""

    def __init__(self) -> None:
        distributed = torch.distributed
        has_group = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if has_group else int(os.environ.get("RANK", 0))
        world = distributed.get_world_size() if has_group else int(os.environ.get("WORLD_SIZE", 1))
        self.world_size = world
        local_rank = first_number(_LOCAL_RANK, -1)
        # torch.multiprocessing.spawn sets no variable; on its one node both ranks are the same
        self.local_rank = self.rank if local_rank < 0 else local_rank
        self.knows_local_rank = local_rank >= 0
        self.local_world_size = first_number(_LOCAL_SIZE, 0)
        """0 where the launcher does not set it."""

    def is_node_leader(self, run_dir: Path) -> bool:
        """Returns whether this rank introduces its node's collector to the other nodes."""
        return self.local_rank == 0 if self.knows_local_rank else is_first_on_node(run_dir)


def first_number(names: Sequence[str], otherwise: int) -> int:
    """Returns the first of these environment variables that is a number, or *otherwise*."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(numeral) for numeral in values if numeral.isdigit()), otherwise)
