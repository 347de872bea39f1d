"""The thresholds that forecasts, rules, alerts and views share. Pure.

A number stands here when more than one module judges by it. A threshold of one rule alone stands in
that rule. No view defines a threshold of its own (``tests/readout/test_copies.py``).
"""

from dataclasses import dataclass

from zeromon.ring.codes import TextEnum


class Severity(TextEnum):
    """How urgent a finding is; the most urgent first, which is the order of every list of findings."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"

    @classmethod
    def _missing_(cls, _: object) -> "Severity":
        """The least urgent, for the text of another version."""
        return cls.INFO

    @property
    def order(self) -> int:
        """The position in a list that begins with the most urgent."""
        return _ORDER[self]


_ORDER = {severity: number for number, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class Level:
    """From which value on a quantity needs attention, and from which it is urgent; more is worse."""

    warning: float
    critical: float
    is_lost_time: bool = False
    """Lost time is a cost and no failure, so its severities are one lower."""

    def severity(self, value: float | None) -> Severity | None:
        """Critical, warning, or None below both thresholds and for an unknown value.

        Warning or ``info`` for lost time.
        """
        if value is None or value < self.warning:
            return None
        if self.is_lost_time:
            return self.severity_of_cost(value)
        return Severity.CRITICAL if value >= self.critical else Severity.WARNING

    def severity_of_cost(self, value: float) -> Severity:
        """The severity of a finding about lost time: ``warning`` from *critical* on, else ``info``."""
        return Severity.WARNING if value >= self.critical else Severity.INFO


OOM = Level(0.5, 0.8)
"""The risk of running out of a memory, 0..1; see :mod:`zeromon.memory.forecast`."""

EXPOSED = Level(0.10, 0.25, is_lost_time=True)
"""Exposed communication as a share of a step."""

OWN_CODE = Level(0.15, 0.25, is_lost_time=True)
"""The script's own code between the phases, as a share of a step."""

DEVICE_IDLE = 0.3
"""A device that runs a kernel for less than this share of the time is idle."""

HOST_BOUND, DEVICE_BOUND = 0.5, 0.1
"""From which, and up to which share of the computing phases a device waits for the host."""

BLOCKED = Level(0.10, 0.25)
"""The share of a step in which the training thread waits for offloaded state to move."""

# Equal bounds: between them, a straggler would be mere information
LATE = Level(0.10, 0.10, is_lost_time=True)
"""How far a straggler arrives behind the second to last rank, as a share of a step."""

SLOW_STEP = 2.0
"""A step of so many times the median is slow."""

WINDOW_STEPS = 20
WINDOW_SECONDS = 5.0
"""The last steps that are judged: at least so many, and of at least so many seconds."""

LATE_STEPS = 0.8
"""The share of these steps in which a straggler arrives last."""

MIN_EXPLAINED_SHARE = 0.5
"""The share of a delay that its reason has to cover."""

UNSTEADY_SECONDS = 30.0
"""A lack of CPUs moves between identical ranks: only one that stays for so long makes a straggler."""

AVOIDABLE = Level(0.05, 0.15)
"""The share of a step that a remedy could save at most."""

CPU_WAIT = Level(0.15, 0.25)
"""The share of the time in which a rank's main thread could run and had no CPU."""

IN_FLIGHT_SECONDS = Level(5.0, 30.0)
"""The age of a collective that has not ended."""

UNTIMED = 0.10
"""The share of collectives without times above which a figure of exposed communication is unknown."""

NORM_SPIKE = Level(8.0, 30.0)
"""How far a gradient norm lies above the median of those before it, in their deviations (1.4826 MAD)."""

NORM_SPIKE_RATIO = 3.0
"""And by how many times it exceeds that median at least."""

POOR_OVERLAP = 0.3
"""Below this share of hidden communication, overlap is poor."""

PAUSE_SECONDS = 1800.0
"""The time after which an expected pause (a checkpoint, an evaluation) needs attention."""

START_SECONDS = 120.0
"""A rank without progress whose first step has not ended for so long needs attention."""

STALL_SECONDS = 15.0
STALL_STEPS = 5
"""A rank is stalled when no step has ended for so many seconds and so many of its usual steps."""

HANG_SECONDS = 10.0
"""A collective in flight for less than this is no hang; see :mod:`zeromon.diagnosis.hangs`."""

NODE_SILENT_SECONDS = 10.0
"""A node whose collector has not reported for this long counts as lost."""

STALE_SECONDS = 5.0
"""A snapshot older than this is marked as old; a collector makes one a second."""

COLLECTOR_CPU = Level(0.10, 0.50)
"""The share of a core that a collector spends on its ranks."""

ALERT_SECONDS, ALERT_PATIENCE_SECONDS = 3.0, 60.0
"""How long a problem holds before a person is told; the second is of one that may pass by itself."""

ALERT_OVER_SECONDS = 60.0
"""A problem is over when it has not been there for so long."""

ALERT_AGAIN_SECONDS = 1800.0
"""The least time between two messages about one problem that stands, or comes again."""

ALERTS_AN_HOUR = 10
"""Messages about one run; the end of a run is told beyond that."""
