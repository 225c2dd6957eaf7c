"""Delivered messages: the columns of the log, and the columns that the broker adds."""

from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.broker.lifecycle import State
from twinbus.broker.queue.dead_letter import Deaths
from twinbus.broker.queue.shared import QueueContext
from twinbus.broker.queue.tokens import token_bytes, tokens_for
from twinbus.broker.queue.waiting import Indices, Waiting
from twinbus.limits import NEVER_US
from twinbus.message import DELIVERY_SCHEMA, LOCK_TOKEN, TIMESTAMP, MessageState, column_of
from twinbus.protocol.rows import BrokerFacts, DeliveredRow, DeliveryRows

_SHOWN_STATES = np.zeros(len(State), np.int8)  # by State: the MessageState that receivers see
_SHOWN_STATES[[State.DEFERRED, State.DEFERRED_LOCKED]] = MessageState.DEFERRED
_SHOWN_STATES[State.SCHEDULED] = MessageState.SCHEDULED
NOTHING = pa.RecordBatch.from_pylist([], DELIVERY_SCHEMA)


@dataclass(frozen=True, slots=True)
class DeliveryLock:
    """The lock of delivered messages."""

    lock: int  # the lock number
    until: int  # when the lock expires


def delivered(
    waiting: Waiting, at: Indices, shared: QueueContext, lock: DeliveryLock | None = None
) -> pa.RecordBatch:
    """Return these messages with DELIVERY_SCHEMA.

    `lock` is None if the receiver browses the messages, or deletes them on receipt.
    """
    get, count = waiting.get, len(at)
    messages = shared.bodies.fetch(get("batch", at), get("row", at))
    sequence = get("sequence", at)
    tokens, locked_until = _nulls(count, LOCK_TOKEN), _nulls(count, TIMESTAMP)
    if lock is not None:
        tokens = tokens_for(lock.lock, sequence)
        locked_until = column_of(TIMESTAMP, np.full(count, lock.until))
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
            column_of(pa.int8(), _SHOWN_STATES[get("state", at)]),
            *_death_columns(get("death", at), shared.deaths),
        ],
        schema=DELIVERY_SCHEMA,
    )


def delivered_rows(
    waiting: Waiting, at: Indices, shared: QueueContext, lock: DeliveryLock | None = None
) -> DeliveryRows:
    """Return a few messages as rows; otherwise like `delivered`."""
    names = ("batch", "row", "sequence", "enqueued", "expires", "failures", "state", "death")
    columns = [waiting.get(name, at).tolist() for name in names]
    rows = []
    for batch, row, number, enqueued, expires, failures, state, death in zip(*columns, strict=True):
        token = until = None
        if lock is not None:
            token, until = token_bytes(lock.lock, number), lock.until
        facts = BrokerFacts(
            number,
            enqueued,
            None if expires == NEVER_US else expires,
            failures,
            token,
            until,
            int(_SHOWN_STATES[state]),
            *(astuple(shared.deaths[death]) if death >= 0 else ()),
        )
        rows.append(DeliveredRow(*shared.bodies.row(batch, row), facts))
    return DeliveryRows(rows)


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
