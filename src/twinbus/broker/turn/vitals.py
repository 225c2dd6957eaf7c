"""What other threads may read about an engine: its state at a moment, as frozen values.

The engine (engine.py) and the writer (writer.py) create these values. Health checks, metrics and
the server's loop read them. A value never changes, so reading it needs no lock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from twinbus.broker.turn.watch import Degradation
from twinbus.entities import RuntimeProperties


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts and sizes of a namespace at a moment."""

    is_open: bool  # False: it was closed, or has stopped for good
    is_spilling: bool  # the log refuses records or is slow, so sends go to the spill store
    restarts: int  # number of self-healing restarts
    open_receives: int
    storage_bytes: int
    entities: Sequence[RuntimeProperties]
    meter: pa.RecordBatch  # METER_SCHEMA
    failed_commands: int = 0  # internal errors that affected one command or timer
    rule_failures: int = 0  # number of messages for which a rule failed
    spilled_sends: int = 0  # number of sends in the spill store
    # By path: the age of the oldest message; 0 if there is none.
    oldest_ages_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the broker read from its log when it opened the directory."""

    messages: int  # number of messages in the namespace
    records: int  # number of records in the log
    seconds: float


class Flushes(NamedTuple):
    """How often the log was flushed since the start, and how long the last flush took."""

    total: int = 0
    last_us: int = 0


@dataclass(frozen=True, slots=True)
class Vitals:
    """Whether a namespace works; any thread may read it at any time."""

    is_open: bool
    is_healing: bool
    is_spilling: bool
    restarts: int
    trouble: str  # why it stopped or restarts; empty: it works
    refusal: str = ""  # why the log accepts no records; empty: it accepts them
    degradation: Degradation | None = None  # set if sends are in the spill store for too long
