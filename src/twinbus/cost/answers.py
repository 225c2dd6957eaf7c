"""The results of a report: typed rows, which can be shown without Spark.

Times are seconds since 1970, durations are seconds. Fields have the names of the columns that the
report writes.
"""

from dataclasses import dataclass, field
from datetime import date

from twinbus.cost.prices import MonthlyPrice, PriceSheet
from twinbus.cost.survey import Survey


@dataclass(frozen=True, slots=True)
class StageOperations:
    """The billed operations of a namespace in a stage."""

    ledger: str
    stage: str
    operations: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DayOperations:
    """The billed operations of a stage on a day."""

    day: date
    stage: str
    operations: int


@dataclass(frozen=True, slots=True)
class EntityOperations:
    """The billed operations of an entity."""

    ledger: str
    path: str
    operations: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class EntityOutage:
    """A failover of an entity, as one process observed it."""

    primary: str
    process: str
    path: str
    failing: float  # time of the first failure
    failed_over: float
    cause: str | None  # None: it failed over before the first day of the report
    returned: float | None  # None: it has not returned yet
    returned_by: str | None
    diverted: int | None  # number of messages; None: it has not returned yet
    drained: float | None  # when the last of these messages was home
    seconds_to_fail_over: float
    seconds_away: float | None
    seconds_to_drain: float | None


@dataclass(frozen=True, slots=True)
class PulledQueue:
    """A backlog queue that was removed from the rotation."""

    path: str
    times: int


@dataclass(frozen=True, slots=True)
class EntityTransfers:
    """The diverted messages of an entity."""

    path: str | None  # None: the messages have no destination
    moved: int
    dead_lettered: int
    bytes: int
    delay_p50: float | None  # from diversion to arrival; None: no message has arrived
    delay_p90: float | None
    delay_p99: float | None
    delay_max: float | None
    reordered: int | None  # overtaken by a later message; None: no ledger of the primary
    behind_p50: int | None  # percentiles: how many later messages overtook a message
    behind_p90: int | None
    behind_p99: int | None
    behind_max: int | None


@dataclass(frozen=True, slots=True)
class FlowStep:
    """How many messages were diverted and brought home since the previous step."""

    at: float
    diverted: int
    moved: int


@dataclass(frozen=True, slots=True)
class DelayStep:
    """How many messages had a delay between this value and twice this value."""

    seconds: float
    messages: int


@dataclass(frozen=True, slots=True)
class StatusCount:
    """How many messages of a queue have a status; see reconciliation.py."""

    ledger: str
    path: str  # empty: a deleted queue whose path is not in the ledger
    status: str
    messages: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A message that is not accounted for."""

    ledger: str
    path: str | None
    sequence_number: int | None
    message_id: str | None
    status: str
    accepted: float | None


@dataclass(frozen=True, slots=True)
class LostLog:
    """A log that was lost completely."""

    ledger: str
    at: float
    last: int  # number of its last record


@dataclass(slots=True)
class Report:
    """The results that are shown to people."""

    sheet: PriceSheet
    survey: Survey
    begins: float | None = None
    ends: float | None = None
    stages: list[StageOperations] = field(default_factory=list)
    days: list[DayOperations] = field(default_factory=list)
    entities: list[EntityOperations] = field(default_factory=list)  # only the busiest
    money: list[MonthlyPrice] = field(default_factory=list)
    outages: list[EntityOutage] = field(default_factory=list)
    pulled: list[PulledQueue] = field(default_factory=list)
    transfers: list[EntityTransfers] = field(default_factory=list)
    flow: list[FlowStep] = field(default_factory=list)
    delays: list[DelayStep] = field(default_factory=list)
    statuses: list[StatusCount] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)  # only the first
    suspect_count: int = 0
    lost_logs: list[LostLog] = field(default_factory=list)

    @property
    def is_reconciled(self) -> bool:
        """Whether every message is accounted for, as far as the ledgers show."""
        return not self.suspect_count and not self.lost_logs
