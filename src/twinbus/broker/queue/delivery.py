"""Delivered messages: the columns of the log, and the columns that the broker adds."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.broker.lifecycle import State
from twinbus.broker.queue.dead_letter import Deaths
from twinbus.broker.queue.shared import Shared
from twinbus.broker.queue.tokens import tokens_for
from twinbus.broker.queue.waiting import Indices, Waiting
from twinbus.limits import NEVER_US
from twinbus.message import DELIVERY_SCHEMA, LOCK_TOKEN, TIMESTAMP, MessageState, column_of

_VISIBLE = np.zeros(len(State), np.int8)
_VISIBLE[[State.DEFERRED, State.DEFERRED_LOCKED]] = MessageState.DEFERRED
_VISIBLE[State.SCHEDULED] = MessageState.SCHEDULED
NOTHING = pa.RecordBatch.from_pylist([], DELIVERY_SCHEMA)


@dataclass(frozen=True, slots=True)
class DeliveryLock:
    """The lock of delivered messages."""

    lock: int
    until: int


def delivered(
    waiting: Waiting, at: Indices, shared: Shared, lock_held: DeliveryLock | None = None
) -> pa.RecordBatch:
    """Return these messages with DELIVERY_SCHEMA; without a lock they are browsed or deleted."""
    get, count = waiting.get, len(at)
    messages = shared.bodies.fetch(get("batch", at), get("row", at))
    sequence = get("sequence", at)
    tokens, locked_until = _nulls(count, LOCK_TOKEN), _nulls(count, TIMESTAMP)
    if lock_held is not None:
        tokens = tokens_for(lock_held.lock, sequence)
        locked_until = column_of(TIMESTAMP, np.full(count, lock_held.until))
    expires, expires_at = get("expires", at), _nulls(count, TIMESTAMP)
    if expires.min() != NEVER_US:
        expires_at = pa.array(expires, mask=expires == NEVER_US).view(TIMESTAMP)
    return pa.RecordBatch.from_arrays(
        [
            *messages.columns,
            column_of(pa.int64(), sequence),
            column_of(TIMESTAMP, get("enqueued", at)),
            expires_at,
            column_of(pa.int32(), get("failures", at)),
            tokens,
            locked_until,
            column_of(pa.int8(), _VISIBLE[get("state", at)]),
            *_death_columns(get("death", at), shared.deaths),
        ],
        schema=DELIVERY_SCHEMA,
    )


@lru_cache(maxsize=64)  # most deliveries have few messages, so the same counts recur
def _nulls(count: int, kind: pa.DataType) -> pa.Array:
    return pa.nulls(count, kind)


def _death_columns(numbers: npt.NDArray[Any], deaths: Deaths) -> list[pa.Array]:
    if numbers.max() < 0:
        return [_nulls(len(numbers), pa.string())] * 3
    died = [deaths[number] if number >= 0 else None for number in numbers.tolist()]
    return [
        pa.array([getattr(death, name, None) for death in died], pa.string())
        for name in ("reason", "description", "source")
    ]
