"""The answers of a report: its rows, each of one type. No Spark is needed to hold or show them.

Moments are seconds since 1970, lengths of time are seconds. The names of fields are those of the
columns that the report writes.
"""

from dataclasses import dataclass, field
from datetime import date

from twinbus.cost.prices import MonthlyPrice, PriceSheet
from twinbus.cost.survey import Survey


@dataclass(frozen=True, slots=True)
class StageOperations:
    """What a namespace was billed for in one stage."""

    ledger: str
    stage: str
    operations: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DayOperations:
    """What was billed in one stage on one day."""

    day: date
    stage: str
    operations: int


@dataclass(frozen=True, slots=True)
class EntityOperations:
    """What was billed for one entity."""

    ledger: str
    path: str
    operations: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Outage:
    """One failover of one entity, as one process lived through it."""

    primary: str
    process: str
    path: str
    failing: float  # since when
    failed_over: float
    cause: str | None  # None: it failed over before the first day
    returned: float | None  # None: not yet
    returned_by: str | None
    diverted: int | None  # messages; None: it has not returned
    drained: float | None  # when the last of them was home
    seconds_to_fail_over: float
    seconds_away: float | None
    seconds_to_drain: float | None


@dataclass(frozen=True, slots=True)
class PulledQueue:
    """A backlog queue that left the rotation."""

    path: str
    times: int


@dataclass(frozen=True, slots=True)
class EntityTransfers:
    """The diverted messages of one entity."""

    path: str | None  # None: the messages did not say
    moved: int
    dead_lettered: int
    bytes: int
    delay_p50: float | None  # until they were home; None: none is
    delay_p90: float | None
    delay_p99: float | None
    delay_max: float | None
    reordered: int | None  # that came late; None: the ledger of the primary is not there
    behind_p50: int | None  # places
    behind_p90: int | None
    behind_p99: int | None
    behind_max: int | None


@dataclass(frozen=True, slots=True)
class FlowStep:
    """How many messages were diverted and brought home since the step before."""

    at: float
    diverted: int
    moved: int


@dataclass(frozen=True, slots=True)
class DelayStep:
    """How many messages took from so long to twice as long to come home."""

    seconds: float
    messages: int


@dataclass(frozen=True, slots=True)
class StatusCount:
    """How many messages of a queue are in one status; see reconciliation.py."""

    ledger: str
    path: str  # empty: a deleted queue, whose path the ledger does not know
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
    """A log that was lost as a whole."""

    ledger: str
    at: float
    last: int  # the last record that it had


@dataclass(slots=True)
class Report:
    """The answers, as far as a person reads them."""

    sheet: PriceSheet
    survey: Survey
    begins: float | None = None
    ends: float | None = None
    stages: list[StageOperations] = field(default_factory=list)
    days: list[DayOperations] = field(default_factory=list)
    entities: list[EntityOperations] = field(default_factory=list)  # the busiest
    money: list[MonthlyPrice] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    pulled: list[PulledQueue] = field(default_factory=list)
    transfers: list[EntityTransfers] = field(default_factory=list)
    flow: list[FlowStep] = field(default_factory=list)
    delays: list[DelayStep] = field(default_factory=list)
    statuses: list[StatusCount] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)  # the first of them
    suspect_count: int = 0
    lost_logs: list[LostLog] = field(default_factory=list)

    @property
    def is_reconciled(self) -> bool:
        """Whether every message is accounted for, as far as the ledgers tell."""
        return not self.suspect_count and not self.lost_logs
