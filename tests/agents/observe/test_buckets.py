"""How long the compute stream stands still for each bucket of DDP's reducer."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from zeromon_agents.observe.device_timer import Bucket, waits_of_each

MS = 1_000_000


@pytest.mark.parametrize(
    ("span", "ends", "sizes", "waits"),
    [
        (10, [4, 10], [1, 1], [4, 6]),  # no copies: the gradients are views
        (12, [4, 10], [2, 1], [4, 2]),  # copies of 4 and 2 ms
        (6, [-5, -1], [1, 2], [0, 0]),  # reduced before the backward was computed
        (5, [-5, 4], [2, 1], [0, 2]),  # copies of 2 and 1 ms, the first before the second's end
    ],
)
def test_waits_and_copies_add_up(span: int, ends: list[int], sizes: list[int], waits: list[int]) -> None:
    found = waits_of_each(span * MS, [end * MS for end in ends], sizes)
    assert found == pytest.approx([wait * MS for wait in waits], abs=10)


_BUCKETS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100)), min_size=1, max_size=8)


@given(_BUCKETS, st.floats(0, 2))
def test_the_waits_of_any_backward_are_found(buckets: list[tuple[int, int]], copy_ms: float) -> None:
    """A stream that waits for each bucket and copies it, played and then solved."""
    ends, end = [], -20
    for longer, _ in buckets:
        end += longer
        ends.append(end * MS)
    at, true = 0.0, []
    for done, (_, size) in zip(ends, buckets, strict=True):
        true.append(max(0.0, done - at))
        at += true[-1] + copy_ms * MS * size
    found = waits_of_each(round(at), ends, [size for _, size in buckets])
    assert found == pytest.approx(true, abs=1000)


def test_a_bucket_is_known_with_all_its_events() -> None:
    bucket = Bucket([0, 0, 100, 0, 0, 0, object(), 0], tensors=3)
    assert not bucket.is_known
    bucket.left = bucket.end = object()
    assert bucket.is_known
    assert bucket.copy_size == 100 + 3 * (3 << 20)
