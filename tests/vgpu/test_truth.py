"""The arithmetic of the truth, against one that looks at every moment."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from vgpu.truth import Timeline
from zeromon_vgpu.intervals import intersect, length, subtract, union
from zeromon_vgpu.timeline import Operation

MOMENTS = 40

spans = st.lists(
    st.tuples(st.integers(0, MOMENTS), st.integers(0, MOMENTS)).map(lambda pair: (min(pair), max(pair))),
    max_size=8,
)


def moments(spans: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in spans for moment in range(start, end)}


def operation(kind: str, start: int, end: int, *, direction: str = "", name: str = "") -> Operation:
    span = start, end
    return Operation(
        kind, 0, 7, 0, start, start, start, -1, end, 0, direction, (span, span), "", {}, name
    )


@settings(deadline=None)
@given(spans, spans)
def test_intervals_equal_sets_of_moments(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    a, b = union(left), union(right)
    assert moments(a) == moments(left) and length(a) == len(moments(left))
    assert moments(intersect(a, b)) == moments(left) & moments(right)
    assert moments(subtract(a, b)) == moments(left) - moments(right)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["kernel", "collective", "fill", "to host", "on device", "wait", "mark"]),
            st.integers(0, MOMENTS), st.integers(0, MOMENTS),
        ),
        max_size=10,
    ),
    st.integers(0, MOMENTS), st.integers(0, MOMENTS),
)  # fmt: skip
def test_figures_equal_counted_moments(work: list[tuple[str, int, int]], one: int, other: int) -> None:
    start, end = min(one, other), max(one, other)
    made, c, k, m = [], set(), set(), set()
    for kind, first, second in work:
        span = (min(first, second), max(first, second))
        copy = kind in ("to host", "on device")
        made.append(operation("copy" if copy else kind, *span, direction=kind if copy else ""))
        inside = moments([span]) & set(range(start, end))
        c |= inside if kind == "collective" else set()
        k |= inside if kind in ("kernel", "fill", "on device") else set()
        m |= inside if kind == "to host" else set()
    found = Timeline(tuple(made)).figures(start, end)
    assert (found.compute, found.communication, found.copy) == (len(k), len(c), len(m))
    assert found.exposed == len(c - k) and found.exposed_copy == len(m - c - k)
    assert found.idle == end - start - len(c | k | m)
    assert found.compute + found.exposed + found.exposed_copy + found.idle == found.span
    assert found.overlap == (len(c & k) / len(c) if c else None)


def test_steps_and_phases_last_from_mark_to_mark() -> None:
    timeline = Timeline(
        (
            operation("mark", 10, 10, name="step 0"), operation("kernel", 10, 14),
            operation("mark", 12, 12, name="forward"), operation("collective", 13, 20),
            operation("mark", 16, 16, name="backward"), operation("mark", 20, 20, name="step 1"),
        )
    )  # fmt: skip
    assert timeline.steps == {0: (10, 20)}
    phases = timeline.phases(*timeline.window(0, 0))
    assert {name: figures.span for name, figures in phases.items()} == {
        "other": 2, "forward": 4, "backward": 4,
    }  # fmt: skip
    assert phases["forward"].exposed == 2 and phases["backward"].exposed == 4
