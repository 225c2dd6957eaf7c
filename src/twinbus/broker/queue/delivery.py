"""What a receiver gets: the message columns as they lie in the log, and what the broker knows."""

from dataclasses import dataclass
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
from twinbus.message import DELIVERY_SCHEMA, LOCK_TOKEN, TIMESTAMP, MessageState

_VISIBLE = np.zeros(len(State), np.int8)
_VISIBLE[[State.DEFERRED, State.DEFERRED_LOCKED]] = MessageState.DEFERRED
_VISIBLE[State.SCHEDULED] = MessageState.SCHEDULED
NOTHING = pa.RecordBatch.from_pylist([], DELIVERY_SCHEMA)


@dataclass(frozen=True, slots=True)
class Held:
    """The lock messages are delivered under."""

    lock: int
    until: int


def delivered(
    waiting: Waiting, at: Indices, shared: Shared, held: Held | None = None
) -> pa.RecordBatch:
    """Return these messages with DELIVERY_SCHEMA; without a lock they are browsed or gone."""
    get, count = waiting.get, len(at)
    messages = shared.bodies.fetch(get("batch", at), get("row", at))
    tokens, locked_until = pa.nulls(count, LOCK_TOKEN), pa.nulls(count, TIMESTAMP)
    if held is not None:
        tokens = tokens_for(held.lock, get("sequence", at))
        locked_until = pa.array(np.full(count, held.until)).view(TIMESTAMP)
    expires = get("expires", at)
    return pa.RecordBatch.from_arrays(
        [
            *messages.columns,
            pa.array(get("sequence", at)),
            pa.array(get("enqueued", at)).view(TIMESTAMP),
            pa.array(expires, mask=expires == NEVER_US).view(TIMESTAMP),
            pa.array(get("failures", at)),
            tokens,
            locked_until,
            pa.array(_VISIBLE[get("state", at)]),
            *_death_columns(get("death", at), shared.deaths),
        ],
        schema=DELIVERY_SCHEMA,
    )


def _death_columns(numbers: npt.NDArray[Any], deaths: Deaths) -> list[pa.Array]:
    if not (numbers >= 0).any():
        return [pa.nulls(len(numbers), pa.string())] * 3
    died = [deaths[number] if number >= 0 else None for number in numbers.tolist()]
    return [
        pa.array([getattr(death, name, None) for death in died], pa.string())
        for name in ("reason", "description", "source")
    ]
