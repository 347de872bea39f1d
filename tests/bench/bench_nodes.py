"""What the head of a run costs, by the number of nodes: `bench_nodes.py [NODES ...]`.

Each node has 8 ranks and 100 collectives a second that all nodes share; the head gets their reports as
bytes, as over HTTP, and its answers are encoded. Printed: CPU seconds a second of training, bytes.
"""

from __future__ import annotations

import sys
import time

import msgspec
from records import keep

from zeromon.collector.cluster import Leader, NodeInfo, NodeReport, PeerRank, pack_groups
from zeromon.collector.cluster_client import answer_report
from zeromon.diagnosis.arrivals import PartialArrival

_RANKS = 8
_A_SECOND = 100
_SECONDS = 20
_WARM_UP = 40


def peers(first: int) -> list[PeerRank]:
    return [
        PeerRank(
            rank=rank,
            node=f"node{first}",
            ended="",
            step_seconds=0.5,
            doing="in backward, unit layers.3",
        )
        for rank in range(first, first + _RANKS)
    ]


def measure(nodes: int) -> tuple[float, float, float]:
    """CPU seconds a second at the head, and the bytes that go in and out a second."""
    cards = [NodeInfo(f"node{n}", f"10.0.0.{n}:9417", n * _RANKS, _RANKS) for n in range(nodes)]
    head, size = Leader(), nodes * _RANKS
    every, sample, due, told = 1.0, 1, [0.0] * nodes, [0] * nodes
    spent, received, sent = 0.0, 0, 0
    for second in range(-_WARM_UP, _SECONDS):
        for number, card in enumerate(cards):
            if second + _WARM_UP < due[number]:
                continue
            until = (second + _WARM_UP + 1) * _A_SECOND
            groups, joints = pack_groups(
                PartialArrival("world/0/" + "0," * 90, s, size, _RANKS, s * 10**7, s * 10**7 + number,
                      card.first_rank, s * 10**7, 10**6)
                for s in range(told[number], until) if s % sample == 0
            )  # fmt: skip
            told[number] = until
            report = NodeReport(
                "run", card, 10**6, nodes, groups, joints[-2048:], peers(card.first_rank)
            )
            body = msgspec.json.encode(report)
            began = time.process_time()
            content = answer_report(head, body, (second + _WARM_UP) * 10**9 + number)
            took = time.process_time() - began
            reply = msgspec.json.decode(content)
            every, sample = reply["every_seconds"], reply["sample"]
            due[number] = second + _WARM_UP + every
            if second >= 0:
                spent, received, sent = spent + took, received + len(body), sent + len(content)
    return spent / _SECONDS, received / _SECONDS, sent / _SECONDS


def main() -> None:
    wanted = [int(word) for word in sys.argv[1:]] or [2, 16, 128, 1024]
    print(f"{'nodes':>6} {'ranks':>6} {'CPU of a core':>14} {'in':>12} {'out':>12}")
    for nodes in wanted:
        cpu, received, sent = measure(nodes)
        traffic = f"{received / 1e3:>7.1f} kB/s {sent / 1e3:>7.1f} kB/s"
        keep(f"leader of {nodes} nodes", cpu, "of a core")
        print(f"{nodes:>6} {nodes * _RANKS:>6} {cpu:>14.2%} {traffic}")


if __name__ == "__main__":
    main()
