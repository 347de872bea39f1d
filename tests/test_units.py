"""Numbers for people."""

from __future__ import annotations

from zeromon.base.units import human_bytes, human_rate, human_ratio, human_seconds


def test_numbers_for_people() -> None:
    """Binary bytes, decimal rates, sensible digits."""
    assert human_bytes(1536) == "1.5 KiB"
    assert human_bytes(-1) == human_bytes(None) == "n/a"
    assert human_bytes(3 * 2**40) == "3.0 TiB"
    assert (human_bytes(2**20 - 1), human_bytes(1023 * 1024)) == ("1.0 MiB", "1023.0 KiB")
    assert human_seconds(0.0123) == "12.3 ms"
    assert human_seconds(0.000012) == "12 us"
    assert human_seconds(200) == "3 min 20 s"
    assert human_seconds(7260) == "2 h 01 min"
    assert human_rate(1.5e9) == "1.50 GB/s"
    assert human_ratio(0.123) == "12.3 %"
    assert human_ratio(None) == "n/a"
