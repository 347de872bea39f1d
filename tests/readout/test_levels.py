"""The shared thresholds."""

import pytest

from zeromon.snapshot.levels import EXPOSED, OOM, Level


@pytest.mark.parametrize(
    ("value", "severity"),
    [(None, None), (0.0, None), (0.49, None), (0.5, "warning"), (0.79, "warning"), (0.8, "critical")],
)
def test_a_level_includes_its_thresholds(value: float | None, severity: str) -> None:
    assert Level(0.5, 0.8).severity(value) == severity


@pytest.mark.parametrize(("value", "severity"), [(0.10, "info"), (0.24, "info"), (0.25, "warning")])
def test_lost_time_is_one_severity_lower(value: float, severity: str) -> None:
    assert EXPOSED.severity_of_cost(value) == EXPOSED.severity(value) == severity


def test_the_risk_of_a_full_horizon_is_the_first_threshold() -> None:
    from zeromon.memory.forecast import HORIZON_STEPS, risk_of_growth, risk_of_level

    assert OOM.severity(risk_of_growth(HORIZON_STEPS)) == "warning"
    assert OOM.severity(risk_of_growth(HORIZON_STEPS + 1)) is None
    assert OOM.severity(risk_of_level(97, 100)) == "warning"
