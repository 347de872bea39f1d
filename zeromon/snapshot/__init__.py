"""What is known of a run at one moment: frozen data that every view reads.

Made by :mod:`zeromon.fold` from events. Nothing in this package changes state or reads a clock. Times
are nanoseconds of CLOCK_MONOTONIC, sizes bytes, ratios 0..1.
"""

from zeromon.snapshot.attempt import Attempt, Death, DeathRole, RankProcess
from zeromon.snapshot.capture import Capture, CaptureState, RankCapture, TraceCheck
from zeromon.snapshot.cluster import Fleet, FleetNode, Health, NodeView, RemoteRank, Spread
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
    Links,
    MemberCall,
    SizeRow,
    Straggler,
    UnitRow,
)
from zeromon.snapshot.finding import ConfigFormat, Finding, Remedy, Rung, Severity
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
from zeromon.snapshot.nccl import InspectorRow, Ras, RasCommunicator, RasCount
from zeromon.snapshot.pipeline import PipelineBubble, PipelineRow, StageRow
from zeromon.snapshot.rank import CTRL_C, DETACHED, NOT_SEEN, EngineRow, Halt, RankSnapshot, Setting
from zeromon.snapshot.run import RunSnapshot
from zeromon.snapshot.step import (
    RECENT_STEPS,
    BatchRow,
    LoadingRow,
    ScalarRow,
    StepRange,
    StepSummary,
)
from zeromon.snapshot.trial import RankTrial, Trial, TrialState
