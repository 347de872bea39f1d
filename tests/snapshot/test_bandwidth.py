"""Bandwidths against nccl-tests."""

from __future__ import annotations

import pytest

from zeromon.ring.codes import Op
from zeromon.snapshot.communication import algbw, busbw, overlap_ratio


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),
    [
        # nccl-tests, doc/PERFORMANCE.md
        (Op.ALL_REDUCE, 8, 2 * 7 / 8),
        (Op.ALL_GATHER, 8, 7 / 8),
        (Op.REDUCE_SCATTER, 8, 7 / 8),
        (Op.ALL_TO_ALL, 4, 3 / 4),
        (Op.BROADCAST, 8, 1),
        (Op.REDUCE, 8, 1),
        (Op.SEND, 2, 1),
    ],
)
def test_busbw_is_algbw_times_the_factor_of_nccl_tests(op: Op, ranks: int, factor: float) -> None:
    """8 GB in 2 s."""
    assert busbw(op, 8_000_000_000, 2.0, ranks) == pytest.approx(4e9 * factor)


def test_bandwidth_without_meaning_is_none() -> None:
    """A barrier, no time, a group of one."""
    assert busbw(Op.BARRIER, 0, 1.0, 8) is None
    assert busbw(Op.ALL_REDUCE, 8, 0.0, 8) is None
    assert busbw(Op.ALL_REDUCE, 8, 1.0, 1) is None
    assert algbw(8, 0.0) is None


def test_no_bytes_are_no_bandwidth() -> None:
    """What is left of a broadcast of the first step has decayed to nothing after some hundred steps."""
    assert busbw(Op.BROADCAST, 0, 1e-9, 2) is None
    assert busbw(Op.ALL_GATHER, 0, 0.5, 8) is None


def test_overlap_without_communication_is_undefined_not_zero() -> None:
    """|C| = 0."""
    assert overlap_ratio(0, 0) is None
    assert overlap_ratio(100, 40) == pytest.approx(0.6)
    assert overlap_ratio(100, 130) == 0.0
