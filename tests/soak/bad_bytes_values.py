"""Attacks that speak the protocol well and say odd things: poisonous messages, odd commands."""

import inspect
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tests.soak.bad_bytes_tools import (
    BROKEN,
    HANG_UP,
    POISON,
    SEND,
    Target,
    asking,
    batch_of,
    short,
)
from twinbus.errors import BrokerRestartingError, InvalidArgumentError, MessagingError
from twinbus.message import MESSAGE_SCHEMA
from twinbus.protocol.table import ROWS


def poison(target: Target) -> None:
    """Values no client of ours would write: refused, or good for whoever receives them."""
    good = batch_of(1)
    extremes = [2**63 - 1, -(2**63), 2**62, -(2**62), 2**63 - 2, -1, 0]
    for name in ("time_to_live", "scheduled_enqueue_time_utc"):
        for value in extremes:
            column = pa.array([value], pa.int64()).cast(MESSAGE_SCHEMA.field(name).type)
            _send_poison(target, good, name, column, f"{name} {value}")
    kind = MESSAGE_SCHEMA.field("properties").type
    bags: dict[str, Any] = {
        "no value": [("a", None)],
        "an empty value": [("a", {})],
        "two values": [("a", {"int": 1, "str": "x"})],
        "the same name twice": [("a", {"int": 1}), ("a", {"int": 2})],
        "no name": [("", {"int": 1})],
        "a long name": [("n" * 1000, {"int": 1})],
        "a late time": [("a", {"datetime": 2**63 - 1})],
        "an early time": [("a", {"datetime": -(2**63)})],
        "a long span": [("a", {"timedelta": 2**63 - 1})],
        "no bag": None,
    }
    plain = pa.map_(
        pa.string(),
        pa.struct(
            [
                (f.name, pa.int64() if f.name in ("datetime", "timedelta") else f.type)
                for f in kind.item_type
            ]
        ),
    )
    for what, bag in bags.items():
        column = _with_type(pa.array([bag], plain), kind)
        _send_poison(target, good, "properties", column, f"properties: {what}")
    for name in ("message_id", "session_id", "content_type"):
        for text in ("", "\x00", "x" * 200_000, None):
            _send_poison(target, good, name, pa.array([text], pa.string()), f"{name} {text!r:.10}")


def _with_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    items = column.items
    children = [
        items.field(at).view(f.type) if f.type != items.field(at).type else items.field(at)
        for at, f in enumerate(kind.item_type)
    ]
    values = pa.StructArray.from_arrays(
        children, fields=list(kind.item_type), mask=items.is_null() if items.null_count else None
    )
    mask = column.is_null() if column.null_count else None
    return pa.MapArray.from_arrays(column.offsets, column.keys, values, type=kind, mask=mask)


def _send_poison(target: Target, good: pa.RecordBatch, name: str, column: Any, what: str) -> None:
    """Send it; receive and read what was taken, as any application would."""
    at = MESSAGE_SCHEMA.names.index(name)
    batch = good.set_column(at, MESSAGE_SCHEMA.field(name), column)
    with target.exchange() as exchange:
        try:
            _, value = exchange.answer(asking({**SEND, "path": POISON}, batch))
            if isinstance(value, MessagingError) and not isinstance(value, InvalidArgumentError):
                target.find(f"{what}: {value!r:.150}")
        except BROKEN as error:
            target.find(f"{what}: the connection broke: {short(error)}")
    target.drain(POISON, what)


# -- commands ----------------------------------------------------------------------------------

_LOCK = {"$": "SessionLock", "session_id": "s", "lock_token": {"$": "uuid", "hex": "0" * 32}}
_TOKENS = {"$": "tokens", "at": 0, "size": 16}
_NUMBERS = {"$": "numbers", "at": 0, "size": 16}
_FIELDS: dict[str, Any] = {
    "path": POISON,
    "sequence_numbers": [1],
    "lock_tokens": _TOKENS,
    "disposition": {"$": "Disposition", "value": "dead_letter"},
    "session": _LOCK,
    "state": None,
    "owner": "me",
    "max_messages": 1,
    "epoch": 1,
    "first": 1,
    "last": 1,
    "description": {"$": "QueueDescription", "path": POISON},
    "rule": {"$": "RuleDescription", "name": "r"},
    "name": "nobody",
    "kind": {"$": "EntityKind", "value": "queue"},
    "key": None,
}
_ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**64 - 1,
    2**63 - 1,
    -(2**63),
    "",
    "text",
    "\ud800",
    "x" * 10_000,
    [],
    [1],
    [[1, 2]],
    [[-(2**63), 2**63 - 1]],
    [2**63 - 1, -(2**63), 0],
    float("nan"),
    float("inf"),
    {"$": "map", "items": {}},
    {"$": "timedelta", "us": -1},
    {"$": "timedelta", "us": 10**17},
    {"$": "datetime", "us": 0},
    {"$": "uuid", "hex": "f" * 32},
    {"$": "blob", "at": 0, "size": 16},
    _TOKENS,
    _NUMBERS,
    _LOCK,
    {**_LOCK, "session_id": "\ud800"},
    {"$": "QueueDescription", "path": POISON, "lock_duration": 5},
    {"$": "Claim", "value": "send"},
    {"$": "DeadLetterPart", "sequence_numbers": [1], "reason": "\ud800"},
    [{"$": "DeadLetterPart", "sequence_numbers": [2**63 - 1], "reason": "r"}],
]


def odd_commands(target: Target) -> None:
    """Every command with odd values in its fields: each is answered, and nothing else happens."""
    for command in (row.command for row in ROWS):
        names = list(inspect.signature(command).parameters)
        for name in names:
            plain = {"$": command.__name__}
            plain |= {key: _FIELDS[key] for key in names if key in _FIELDS}
            for odd in _ODD:
                what = f"{command.__name__}.{name}={odd!r:.60}"
                if not _is_answered(target, {**plain, name: odd}, what):
                    if target.server.health()["status"] != "ok":
                        return
                    break  # one finding for a field will do


def _is_answered(target: Target, plain: dict[str, Any], what: str) -> bool:
    try:
        number, value = target.stand().answer(asking(plain, number=target.asks, blobs=bytes(32)))
    except BROKEN as error:
        target.find(f"{what}: the connection broke: {short(error)}")
        target.stand_anew()
        return False
    if number == HANG_UP:  # what is no MessagePack ends the connection
        target.stand_anew()
        if not isinstance(value, InvalidArgumentError):
            target.find(f"{what}: {value!r:.100}")
            return False
    return not _is_internal(target, value, what)


def _is_internal(target: Target, value: object, what: str) -> bool:
    """Whether an error reports trouble inside the broker, which no client may cause."""
    if not isinstance(value, BrokerRestartingError) and type(value) is not MessagingError:
        return False
    target.find(f"{what}: {value!r:.100}")
    return True


def odd_settlements(target: Target) -> None:
    """Settle real locks with odd words."""
    odd: list[Any] = ["\ud800", "\x00", "x" * 2_000_000, "", 5, None]
    for reason in odd:
        with target.exchange() as exchange:
            try:
                exchange.ask({**SEND, "path": POISON}, batch_of(1))
                batch = exchange.ask({"$": "Receive", "path": POISON})
                blob = b"".join(batch.column("lock_token").to_pylist())
                settle = {
                    "$": "Settle",
                    "path": POISON,
                    "lock_tokens": {"$": "tokens", "at": 0, "size": len(blob)},
                    "disposition": {"$": "Disposition", "value": "dead_letter"},
                    "reason": reason,
                    "description": reason,
                }
                _, value = exchange.answer(asking(settle, number=3, blobs=blob))
            except BROKEN as error:
                target.find(f"reason {reason!r:.20}: {short(error)}")
                continue
            _is_internal(target, value, f"reason {reason!r:.20}")
        target.drain(POISON, f"reason {reason!r:.20}")
        target.drain(f"{POISON}/$DeadLetterQueue", f"reason {reason!r:.20}")


ATTACKS: tuple[Callable[[Target], None], ...] = (poison, odd_settlements, odd_commands)
