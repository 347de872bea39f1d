"""What is known of a run at one moment: frozen data that every view reads.

Made by :mod:`zeromon.fold` from events. Nothing in this package changes state or reads a clock. Times
are nanoseconds of CLOCK_MONOTONIC, sizes bytes, ratios 0..1.
"""

from zeromon.snapshot.attempt import (
    Attempt as Attempt,
)
from zeromon.snapshot.attempt import (
    Death as Death,
)
from zeromon.snapshot.attempt import (
    DeathRole as DeathRole,
)
from zeromon.snapshot.capture import (
    Capture as Capture,
)
from zeromon.snapshot.capture import (
    CaptureState as CaptureState,
)
from zeromon.snapshot.capture import (
    RankCapture as RankCapture,
)
from zeromon.snapshot.capture import (
    TraceCheck as TraceCheck,
)
from zeromon.snapshot.cluster import (
    Fleet as Fleet,
)
from zeromon.snapshot.cluster import (
    FleetNode as FleetNode,
)
from zeromon.snapshot.cluster import (
    Health as Health,
)
from zeromon.snapshot.cluster import (
    NodeView as NodeView,
)
from zeromon.snapshot.cluster import (
    RemoteRank as RemoteRank,
)
from zeromon.snapshot.cluster import (
    Spread as Spread,
)
from zeromon.snapshot.communication import (
    CollectiveRow as CollectiveRow,
)
from zeromon.snapshot.communication import (
    CollectiveStatsRow as CollectiveStatsRow,
)
from zeromon.snapshot.communication import (
    Dimension as Dimension,
)
from zeromon.snapshot.communication import (
    GatherRow as GatherRow,
)
from zeromon.snapshot.communication import (
    GroupProgress as GroupProgress,
)
from zeromon.snapshot.communication import (
    Hang as Hang,
)
from zeromon.snapshot.communication import (
    HangKind as HangKind,
)
from zeromon.snapshot.communication import (
    InFlight as InFlight,
)
from zeromon.snapshot.communication import (
    Links as Links,
)
from zeromon.snapshot.communication import (
    SizeRow as SizeRow,
)
from zeromon.snapshot.communication import (
    Straggler as Straggler,
)
from zeromon.snapshot.communication import (
    UnitRow as UnitRow,
)
from zeromon.snapshot.engine import (
    EngineRow as EngineRow,
)
from zeromon.snapshot.engine import (
    Setting as Setting,
)
from zeromon.snapshot.finding import (
    ConfigFormat as ConfigFormat,
)
from zeromon.snapshot.finding import (
    Finding as Finding,
)
from zeromon.snapshot.finding import (
    Remedy as Remedy,
)
from zeromon.snapshot.finding import (
    Rung as Rung,
)
from zeromon.snapshot.finding import (
    Severity as Severity,
)
from zeromon.snapshot.host import (
    Device as Device,
)
from zeromon.snapshot.host import (
    Disk as Disk,
)
from zeromon.snapshot.host import (
    Energy as Energy,
)
from zeromon.snapshot.host import (
    HostMemory as HostMemory,
)
from zeromon.snapshot.host import (
    Pressure as Pressure,
)
from zeromon.snapshot.memory import (
    KILLED_FOR_MEMORY as KILLED_FOR_MEMORY,
)
from zeromon.snapshot.memory import (
    Cause as Cause,
)
from zeromon.snapshot.memory import (
    DeviceMemory as DeviceMemory,
)
from zeromon.snapshot.memory import (
    ExpectedRow as ExpectedRow,
)
from zeromon.snapshot.memory import (
    OutOfMemory as OutOfMemory,
)
from zeromon.snapshot.memory import (
    Pool as Pool,
)
from zeromon.snapshot.memory import (
    Risk as Risk,
)
from zeromon.snapshot.memory import (
    RiskCause as RiskCause,
)
from zeromon.snapshot.memory import (
    RoleRow as RoleRow,
)
from zeromon.snapshot.memory import (
    TransferRow as TransferRow,
)
from zeromon.snapshot.memory import (
    Unattributed as Unattributed,
)
from zeromon.snapshot.nccl import (
    InspectorRow as InspectorRow,
)
from zeromon.snapshot.nccl import (
    Ras as Ras,
)
from zeromon.snapshot.nccl import (
    RasCommunicator as RasCommunicator,
)
from zeromon.snapshot.nccl import (
    RasCount as RasCount,
)
from zeromon.snapshot.pipeline import (
    PipelineBubble as PipelineBubble,
)
from zeromon.snapshot.pipeline import (
    PipelineRow as PipelineRow,
)
from zeromon.snapshot.pipeline import (
    StageRow as StageRow,
)
from zeromon.snapshot.rank import (
    CTRL_C as CTRL_C,
)
from zeromon.snapshot.rank import (
    DETACHED as DETACHED,
)
from zeromon.snapshot.rank import (
    NOT_SEEN as NOT_SEEN,
)
from zeromon.snapshot.rank import (
    Halt as Halt,
)
from zeromon.snapshot.rank import (
    RankSnapshot as RankSnapshot,
)
from zeromon.snapshot.run import (
    RunSnapshot as RunSnapshot,
)
from zeromon.snapshot.step import (
    RECENT_STEPS as RECENT_STEPS,
)
from zeromon.snapshot.step import (
    BatchRow as BatchRow,
)
from zeromon.snapshot.step import (
    ScalarRow as ScalarRow,
)
from zeromon.snapshot.step import (
    StepRange as StepRange,
)
from zeromon.snapshot.step import (
    StepSummary as StepSummary,
)
