"""Memory by role over the record: the bands of each moment sum to what the rank holds."""

from __future__ import annotations

from builders import device_memory, rank, run

from zeromon.readout.charts import EVERYTHING_ELSE, role_bands
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.memory import RoleRow


def role(name: str, device: int = 0, host: int = 0) -> RoleRow:
    return RoleRow(role=name, device_bytes=device, host_bytes=host, disk_bytes=0, pinned_bytes=0)


def at(step: int, rss: int, **roles: int) -> RankSnapshot:
    rows = tuple(role(name, host=nbytes) for name, nbytes in roles.items())
    return rank(1, last_step=step, rss_bytes=rss, roles=rows)


def test_the_bands_of_a_moment_sum_to_the_resident_set() -> None:
    moments = [
        run(rank(0), at(3, 100, sharded_param=40, buffer=0)),
        run(rank(0), at(9, 150, sharded_param=40, optimizer_state=80)),
        run(rank(0), at(9, 160, sharded_param=40, optimizer_state=80)),
        run(rank(0), at(12, 110, sharded_param=40, optimizer_state=80)),
    ]
    found = role_bands(moments, 1)
    assert found is not None and (found.place, found.steps) == ("host", (3, 9, 12))
    assert found.bands == {
        "sharded param": (40, 40, 40),
        "optimizer state": (0, 80, 80),
        EVERYTHING_ELSE: (60, 40, 0),  # the kernel has taken pages back: nothing is negative
    }
    assert list(found.bands)[-1] == EVERYTHING_ELSE


def test_on_a_device_it_is_what_the_allocator_has_reserved() -> None:
    rows = (role("sharded_param", device=30, host=500),)
    memory = device_memory(reserved_bytes=100)
    found = role_bands([run(rank(0, last_step=1, rss_bytes=900, roles=rows, memory_device=memory))], 0)
    assert found is not None and found.place == "device"
    assert found.bands == {"sharded param": (30,), EVERYTHING_ELSE: (70,)}


def test_without_a_census_there_is_nothing() -> None:
    assert role_bands([run(rank(0)), run(at(3, -1, sharded_param=4))], 1) is None
    assert role_bands([], 0) is None
