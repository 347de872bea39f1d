"""The state of a run at one moment: frozen data that every view reads.

Made by :mod:`zeromon.fold` from events. Nothing in this package changes state or reads a clock. Times
are nanoseconds of CLOCK_MONOTONIC, sizes bytes, ratios 0..1.
"""

from zeromon.snapshot.communication import (
    CallHistory,
    CollectiveRow,
    CollectiveStatsRow,
    Dimension,
    GatherRow,
    GroupProgress,
    Hang,
    HangKind,
    InFlight,
    InspectorRow,
    Links,
    MemberCall,
    PipelineBubble,
    PipelineRow,
    Ras,
    RasCommunicator,
    RasCount,
    SizeRow,
    StageRow,
    Straggler,
    UnitRow,
)
from zeromon.snapshot.finding import (
    ConfigFormat,
    Finding,
    RankTrial,
    Remedy,
    Rung,
    Severity,
    Trial,
    TrialState,
)
from zeromon.snapshot.host import (
    CodeLine,
    CpuUser,
    Device,
    Disk,
    Energy,
    ExtensionLock,
    HostMemory,
    Pressure,
    WorkerMemory,
)
from zeromon.snapshot.memory import (
    KILLED_FOR_MEMORY,
    Cause,
    DeviceMemory,
    ExpectedRow,
    OutOfMemory,
    Pool,
    Risk,
    RiskCause,
    RoleRow,
    TransferRow,
    Unattributed,
)
from zeromon.snapshot.rank import CTRL_C, DETACHED, NOT_SEEN, EngineRow, Halt, RankSnapshot, Setting
from zeromon.snapshot.run import (
    Attempt,
    Death,
    DeathRole,
    Fleet,
    FleetNode,
    Health,
    NodeView,
    RankProcess,
    RemoteRank,
    RunSnapshot,
    Spread,
)
from zeromon.snapshot.step import (
    RECENT_STEPS,
    BatchRow,
    Capture,
    CaptureState,
    LoadingRow,
    RankCapture,
    ScalarRow,
    StepRange,
    StepSummary,
    TraceCheck,
)
