"""What is known of a run at one moment: frozen data that every view reads.

Made by :mod:`zeromon.fold` from events. Nothing in this package changes state or reads a clock. Times
are nanoseconds of CLOCK_MONOTONIC, sizes bytes, ratios 0..1.
"""

from zeromon.snapshot.attempt import Attempt as Attempt, Death as Death, DeathRole as DeathRole
from zeromon.snapshot.capture import (
    Capture as Capture,
    CaptureState as CaptureState,
    RankCapture as RankCapture,
    TraceCheck as TraceCheck,
)
from zeromon.snapshot.cluster import (
    Fleet as Fleet,
    FleetNode as FleetNode,
    Health as Health,
    NodeView as NodeView,
    RemoteRank as RemoteRank,
    Spread as Spread,
)
from zeromon.snapshot.communication import (
    CollectiveRow as CollectiveRow,
    CollectiveStatsRow as CollectiveStatsRow,
    Dimension as Dimension,
    GatherRow as GatherRow,
    GroupProgress as GroupProgress,
    Hang as Hang,
    HangKind as HangKind,
    InFlight as InFlight,
    Links as Links,
    SizeRow as SizeRow,
    Straggler as Straggler,
    UnitRow as UnitRow,
)
from zeromon.snapshot.engine import EngineRow as EngineRow, Setting as Setting
from zeromon.snapshot.finding import (
    ConfigFormat as ConfigFormat,
    Finding as Finding,
    Remedy as Remedy,
    Rung as Rung,
    Severity as Severity,
)
from zeromon.snapshot.host import (
    Device as Device,
    Disk as Disk,
    Energy as Energy,
    HostMemory as HostMemory,
    Pressure as Pressure,
)
from zeromon.snapshot.memory import (
    KILLED_FOR_MEMORY as KILLED_FOR_MEMORY,
    Cause as Cause,
    DeviceMemory as DeviceMemory,
    ExpectedRow as ExpectedRow,
    OutOfMemory as OutOfMemory,
    Pool as Pool,
    Risk as Risk,
    RiskCause as RiskCause,
    RoleRow as RoleRow,
    TransferRow as TransferRow,
    Unattributed as Unattributed,
)
from zeromon.snapshot.nccl import (
    InspectorRow as InspectorRow,
    Ras as Ras,
    RasCommunicator as RasCommunicator,
    RasCount as RasCount,
)
from zeromon.snapshot.pipeline import (
    PipelineBubble as PipelineBubble,
    PipelineRow as PipelineRow,
    StageRow as StageRow,
)
from zeromon.snapshot.rank import (
    CTRL_C as CTRL_C,
    DETACHED as DETACHED,
    NOT_SEEN as NOT_SEEN,
    Halt as Halt,
    RankSnapshot as RankSnapshot,
)
from zeromon.snapshot.run import RunSnapshot as RunSnapshot
from zeromon.snapshot.step import (
    RECENT_STEPS as RECENT_STEPS,
    BatchRow as BatchRow,
    ScalarRow as ScalarRow,
    StepRange as StepRange,
    StepSummary as StepSummary,
)
from zeromon.snapshot.trial import RankTrial as RankTrial, Trial as Trial, TrialState as TrialState
