"""A value that exists is valid: whatever its fields are given, it is built whole or refused.

Each kind is built from fields that fit and from fields of any other type. The result is a value
or InvalidArgumentError, and never another exception. What was built travels over the wire or goes
through JSON and comes back equal.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.broker import commands as c
from twinbus.broker.access import Claim, SharedAccessKey
from twinbus.broker.lifecycle import State
from twinbus.entities import (
    DESCRIPTIONS,
    CorrelationFilter,
    EntityStatus,
    FalseFilter,
    QueueDescription,
    RuleDescription,
    RuntimeProperties,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
    from_json,
    to_json,
)
from twinbus.errors import InvalidArgumentError, MessagingError
from twinbus.limits import MAX_BATCH_MESSAGES
from twinbus.message import (
    APPLICATION_FIELDS,
    LOCK_TOKEN,
    MESSAGE_SCHEMA,
    TEXT_COLUMNS,
    BrokeredMessage,
    to_batch,
    to_messages,
    tokens_of,
)
from twinbus.namespace import wire
from twinbus.namespace.wire import COMMANDS, decode_asks, encode_asks, with_columns
from twinbus.plain import Plain
from twinbus.values import shown

thoroughly = settings(replayed, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
VALUES = (c.Origin, c.SessionLock, c.DeadLetterPart, SharedAccessKey)  # parts a client sends
DESCRIBED = tuple(kind for kind in DESCRIPTIONS if kind not in (RuntimeProperties, EntityStatus))

# -- any value -------------------------------------------------------------------------------------


class Colour(StrEnum):
    """A text of a class of its own."""

    RED = "red"


class Pair(NamedTuple):
    """A tuple of a class of its own."""

    first: int
    last: int


class Listed(list[Any]):
    """A list of a class of its own."""


class Nowhere(tzinfo):
    """A time zone that does not know its offset."""

    def utcoffset(self, moment: datetime | None, /) -> None:
        del moment


class Shy:
    """An object that cannot be shown, compared or hashed."""

    def __repr__(self) -> str:
        raise ValueError("not to be shown")

    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


class Drawn:
    """What a test is given; hypothesis shows it, and some of it cannot be shown."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if isinstance(self.value, dict):
            return f"{{{', '.join(f'{name}: {shown(held)}' for name, held in self.value.items())}}}"
        return shown(self.value)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def text_of(character: str, size: int) -> Callable[[], str]:
    return lambda: character * size


LOCK = c.SessionLock("s", UUID(int=1))
KEY = SharedAccessKey(name="k", claims=(Claim.SEND,), primary="p" * 16, secondary="s" * 16)
SIZES = (50, 51, 128, 129, 256, 257, 260, 261, 452, 453, 512, 513, 1024, 1025, 4096, 4097, 300_000)
NAIVE = datetime(2030, 1, 1, tzinfo=UTC).replace(tzinfo=None)
EAST, WEST = timezone(timedelta(hours=14)), timezone(-timedelta(hours=14))
# Some of these cannot be shown, and hypothesis shows what it draws from: each is made when drawn.
MAKERS: list[Callable[[], Any]] = [
    *(text_of(of, size) for of in "xé" for size in SIZES),
    *(
        lambda text=text: text
        for text in ("", "\0", "a\0b", "\ud800", "a\udfff", "\uffff", "$", "/")
    ),
    *(lambda: Colour.RED, lambda: np.str_("numpy"), lambda: "sender/xyz", lambda: "spill/xyz"),
    *(lambda n=n: n for n in (0, 1, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63))),
    *(lambda: -(2**63) - 1, lambda: 10**5000, lambda: -(10**5000), lambda: True, lambda: False),
    *(
        lambda x=x: x
        for x in (0.0, 1.5, 1e300, math.inf, -math.inf, math.nan, 1j, Decimal("1e999"))
    ),
    *(lambda: b"", lambda: b"x" * 300_000, lambda: bytearray(b"x"), lambda: memoryview(b"x")),
    *(lambda: None, lambda: Ellipsis, object, Shy, lambda: c.Receive, lambda: len),
    *(list, tuple, dict, set, lambda: [Shy()], lambda: {"a": Shy()}, lambda: nested(5000)),
    *(lambda: [1, 2], lambda: (1, 2), lambda: [True], lambda: [1.0], lambda: ["a"], lambda: [None]),
    *(lambda: [2**63], lambda: [-1], lambda: [10**5000], lambda: Listed([1]), lambda: Pair(1, 2)),
    *(lambda: [Pair(1, 2)], lambda: [(1, 2, 3)], lambda: [[2**63, 0]], lambda: [(0, -(2**63))]),
    *(lambda: [1] * (MAX_BATCH_MESSAGES + 1), lambda: [(1, 1)] * (MAX_BATCH_MESSAGES + 1)),
    *(lambda: {"a": 1}, lambda: {1: "a"}, lambda: {"": 1}, lambda: {"a": [1]}, lambda: {"a": None}),
    *(
        lambda: {"\ud800": 1},
        lambda: {"a": "\ud800"},
        lambda: {"a": "x" * 2000},
        lambda: {"a": 2**63},
    ),
    *(lambda: {"a": NAIVE}, lambda: {"a": datetime.max.replace(tzinfo=WEST)}),
    *(lambda: {"a": datetime(2030, 1, 1, tzinfo=Nowhere())}, lambda: {"a": timedelta.max}),
    *(lambda: {"a": Colour.RED}, lambda: {"a": math.nan}, lambda: {str(n): n for n in range(99)}),
    *(lambda: {"x" * 300: 1}, lambda: {"a": b"x" * 2000}, lambda: MappingProxyType({"a": 1})),
    *(lambda m=m: m for m in (NAIVE, datetime(2030, 1, 1, tzinfo=UTC))),
    *(lambda z=z: datetime.min.replace(tzinfo=z) for z in (UTC, EAST, WEST, Nowhere())),
    *(lambda z=z: datetime.max.replace(tzinfo=z) for z in (UTC, EAST, WEST, Nowhere())),
    *(lambda s=s: s for s in (timedelta.min, timedelta.max, timedelta(0), timedelta(days=1))),
    *(lambda: timedelta(microseconds=1), lambda: -timedelta(microseconds=1), lambda: UUID(int=5)),
    *(
        lambda e=e: e
        for e in (*c.ReceiveMode, *c.Disposition, *c.EntityKind, *EntityStatus, *State)
    ),
    *(lambda: [Claim.SEND], lambda: (Claim.SEND, "send"), lambda: [Claim.MANAGE, Claim.MANAGE]),
    *(lambda: range(0), lambda: range(5, 0), lambda: range(0, 10, 3), lambda: range(9, 0, -1)),
    *(lambda: range(MAX_BATCH_MESSAGES + 1), lambda: range(10**30), lambda: range(10**5000)),
    *(lambda: range(-(10**30), -(10**30) + 3), lambda: range(2**63, 2**63 + 2)),
    *(lambda: np.array([1, 2, 2**63 - 1]), lambda: np.array([], np.int64), lambda: np.array([-1])),
    *(lambda: np.array([1.5, np.nan]), lambda: np.array([True]), lambda: np.array(["a"])),
    *(lambda: np.array([None]), lambda: np.array([[1, 2], [3, 4]]), lambda: np.array(5)),
    *(lambda: np.array([1, 2], ">i8"), lambda: np.array([1], np.uint64), lambda: np.int64(7)),
    *(lambda: np.array([1], np.int32), lambda: np.array([]), lambda: np.float64(1.0)),
    *(lambda: np.array(["2030-01-01"], "M8[us]"), lambda: np.datetime64("NaT"), lambda: np.True_),
    *(lambda: np.zeros(MAX_BATCH_MESSAGES + 1, np.int64), lambda: np.arange(9)[::-2]),
    lambda: np.ma.masked_array([1, 2], [True, False]),  # type: ignore[no-untyped-call]
    *(lambda: pa.array([b"x" * 16], LOCK_TOKEN), lambda: pa.array([b"x" * 16, None], LOCK_TOKEN)),
    lambda: pa.array([b"x" * 16] * 5, LOCK_TOKEN).slice(2, 2),
    lambda: pa.array([b"x" * 16] * (MAX_BATCH_MESSAGES + 1), LOCK_TOKEN),
    *(lambda: pa.array([], LOCK_TOKEN), lambda: pa.array([b"x" * 15], pa.binary(15))),
    *(lambda: pa.array([b"x" * 16]), lambda: pa.nulls(3, LOCK_TOKEN), lambda: pa.nulls(3)),
    lambda: pa.chunked_array([[b"x" * 16]], LOCK_TOKEN),
    *(lambda: pa.scalar(b"x" * 16, LOCK_TOKEN), lambda: pa.table({"body": [b""]})),
    *(lambda: LOCK, lambda: KEY, lambda: c.DeadLetterPart([1], "bad"), lambda: c.Origin("q", [1])),
    lambda: c.Origin("a", [1], c.Origin("b", [1], c.Origin("c", [1]))),
    *(lambda: [c.DeadLetterPart([1], "bad")] * 1001, lambda: [LOCK], lambda: [KEY]),
    lambda: [c.DeadLetterPart(range(60_000), "bad")] * 2,
    *(TrueFilter, lambda: SqlFilter("a = 1"), lambda: SqlAction("SET a = 1"), lambda: TrueFilter),
    *(lambda: RuleDescription("r"), lambda: QueueDescription(path="q"), BrokeredMessage),
    *(
        lambda: TopicDescription(path="t"),
        lambda: SubscriptionDescription(topic_path="t", name="s"),
    ),
    *(lambda: [BrokeredMessage()], lambda: [BrokeredMessage(), None], lambda: to_batch([])),
    *(lambda: to_batch([BrokeredMessage()]), c.ReadMeter, lambda: c.SendReceipt([1])),
]
ODD = st.sampled_from(range(len(MAKERS))).map(lambda at: MAKERS[at]())
CHARACTER = st.characters() | st.sampled_from("\0\ud800\udfff\uffff$@/'\"\\\U0001f600")
TEXT = st.text(CHARACTER, max_size=20)
WHOLE = st.integers() | st.sampled_from([2**62, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1])
SCALAR = st.one_of(
    *(ODD, st.booleans(), WHOLE, st.floats(), TEXT, st.binary(max_size=20), st.timedeltas()),
    *(st.uuids(), st.datetimes(timezones=st.sampled_from([None, UTC, EAST, WEST]))),
    st.builds(range, WHOLE, WHOLE, WHOLE.filter(bool)),
)
ANYTHING = st.recursive(
    SCALAR,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TEXT | st.integers() | st.none(), inner, max_size=3),
    ),
    max_leaves=6,
)

# -- values that fit, field by field ---------------------------------------------------------------

PRINTED = st.characters(codec="utf-8", exclude_characters="\0")
NUMBER = st.integers(-(2**63), 2**63 - 1)
NUMBERS = (
    st.lists(NUMBER, max_size=40)
    | st.lists(NUMBER, max_size=40).map(lambda held: np.array(held, np.int64))
    | st.builds(lambda first, count: range(first, first + count), NUMBER, st.integers(0, 50))
)
COUNTS = st.lists(st.integers(0, 2**63 - 1), max_size=40) | st.builds(range, st.integers(0, 99))
PATH = st.text(PRINTED, max_size=30)
NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
TOKENS = st.lists(st.uuids(), max_size=5).map(tokens_of)
WAIT = st.timedeltas(timedelta(0), timedelta(days=1))
LEASE = st.timedeltas(timedelta(microseconds=1), timedelta(hours=1))
LIFE = st.timedeltas(timedelta(seconds=1)) | st.just(timedelta.max)
REASON = st.none() | PATH
MODE = st.sampled_from(c.ReceiveMode)
HELD = st.none() | st.builds(c.SessionLock, PATH, st.uuids())
AWARE = st.datetimes(timezones=st.just(UTC))
PROPERTY = st.one_of(
    *(st.booleans(), NUMBER, st.floats(), PATH, st.binary(max_size=20), AWARE, st.uuids()),
    st.timedeltas(-timedelta(days=10**8), timedelta(days=10**8)),
)
BAG = st.dictionaries(st.text(PRINTED, min_size=1, max_size=20), PROPERTY, max_size=3)
SQL = st.text(PRINTED, min_size=1, max_size=20)
FILTER = (
    st.builds(SqlFilter, SQL, BAG)
    | st.builds(CorrelationFilter, subject=REASON, properties=BAG)
    | st.builds(TrueFilter)
    | st.builds(FalseFilter)
)
RULE = st.builds(RuleDescription, NAME, FILTER, st.none() | st.builds(SqlAction, SQL, BAG))
DESCRIPTION = (
    st.builds(QueueDescription, path=NAME, default_message_time_to_live=LIFE)
    | st.builds(TopicDescription, path=NAME)
    | st.builds(SubscriptionDescription, topic_path=NAME, name=NAME)
)
SOURCE = (
    PATH.map("queue {}".format) | st.just("sender/0123456789abcdef") | PATH.map("//sink/{}".format)
)
ORIGIN = st.builds(c.Origin, SOURCE, COUNTS)
MESSAGE = st.builds(
    BrokeredMessage,
    st.binary(max_size=20),
    subject=REASON,
    time_to_live=st.none() | st.timedeltas(timedelta(microseconds=1)),
    scheduled_enqueue_time_utc=st.none() | AWARE,
    application_properties=BAG,
)
MESSAGES = st.lists(MESSAGE, max_size=3) | st.lists(MESSAGE, max_size=3).map(to_batch)
SECRET = st.text(PRINTED, min_size=16, max_size=40)
SESSION = {"path": PATH, "session": st.builds(c.SessionLock, PATH, st.uuids())}
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "max_size_in_megabytes": st.integers(1, 81_920),
    "max_delivery_count": st.integers(1, 2**31 - 1),
    "default_message_time_to_live": LIFE,
    "auto_delete_on_idle": st.timedeltas(timedelta(minutes=5)),
    "lock_duration": st.timedeltas(timedelta(seconds=1), timedelta(minutes=5)),
    "enable_dead_lettering_on_message_expiration": st.booleans(),
    "enable_batched_operations": st.booleans(),
    "enable_partitioning": st.booleans(),
    "requires_session": st.booleans(),
    "requires_duplicate_detection": st.booleans(),
    "duplicate_detection_history_time_window": st.timedeltas(
        timedelta(seconds=20), timedelta(days=7)
    ),
    "forward_to": st.none() | NAME,
    "status": st.sampled_from(EntityStatus),
    "user_metadata": REASON,
    "path": NAME,
    "topic_path": NAME,
    "name": NAME,
}
FITTING: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    c.Send: {"path": PATH, "messages": MESSAGES, "origin": st.none() | ORIGIN},
    c.CancelScheduled: {"path": PATH, "sequence_numbers": NUMBERS},
    c.Receive: {
        "path": PATH,
        "max_messages": st.integers(1, 10_000),
        "wait": WAIT,
        "mode": MODE,
        "session": HELD,
        "max_bytes": NUMBER,
    },
    c.ReceiveDeferred: {
        "path": PATH,
        "sequence_numbers": NUMBERS,
        "mode": MODE,
        "session": HELD,
    },
    c.Peek: {
        "path": PATH,
        "from_sequence_number": NUMBER,
        "max_messages": st.integers(1, 10_000),
        "max_bytes": NUMBER,
    },
    c.Settle: {
        "path": PATH,
        "lock_tokens": TOKENS,
        "disposition": st.sampled_from(c.Disposition),
        "reason": REASON,
        "description": REASON,
    },
    c.RenewLocks: {"path": PATH, "lock_tokens": TOKENS},
    c.AcceptSession: {"path": PATH, "session_id": REASON, "wait": WAIT},
    c.RenewSession: SESSION,
    c.ReleaseSession: SESSION,
    c.GetSessionState: SESSION,
    c.SetSessionState: SESSION | {"state": st.none() | st.binary(max_size=20)},
    c.LeaseRange: {
        "path": PATH,
        "owner": PATH,
        "max_messages": st.integers(1, 1_000_000),
        "first": st.none() | NUMBER,
        "last": st.none() | NUMBER,
        "duration": LEASE,
        "wait": WAIT,
        "past": st.none() | NUMBERS,
        "max_bytes": st.none() | st.integers(1, 2**63 - 1),
    },
    c.RenewRange: {"path": PATH, "epoch": NUMBER, "duration": LEASE},
    c.ReadRange: {
        "path": PATH,
        "epoch": NUMBER,
        "first": NUMBER,
        "last": NUMBER,
        "max_bytes": NUMBER,
    },
    c.SettleRange: {
        "path": PATH,
        "epoch": NUMBER,
        "completed": st.lists(st.tuples(NUMBER, NUMBER), max_size=40),
        "dead_lettered": st.lists(st.builds(c.DeadLetterPart, NUMBERS, PATH, REASON), max_size=3),
        "release": st.booleans(),
    },
    c.ReleaseRange: {"path": PATH, "epoch": NUMBER},
    c.CreateEntity: {"description": DESCRIPTION, "rule": st.none() | RULE},
    c.UpdateEntity: {"description": DESCRIPTION},
    c.DeleteEntity: {"path": PATH},
    c.GetEntity: {"path": PATH},
    c.ListEntities: {"kind": st.sampled_from(c.EntityKind), "topic_path": REASON},
    c.GetRuntimeProperties: {"path": PATH},
    c.CreateRule: {"path": PATH, "rule": RULE},
    c.DeleteRule: {"path": PATH, "name": PATH},
    c.ListRules: {"path": PATH},
    c.ReadMeter: {},
    c.PutKey: {"key": st.just(KEY)},
    c.DeleteKey: {"name": PATH, "entity_path": REASON},
    c.ListKeys: {},
    c.Origin: {"source": SOURCE, "numbers": COUNTS, "also": st.none() | ORIGIN},
    c.SessionLock: {"session_id": PATH, "lock_token": st.uuids()},
    c.DeadLetterPart: {"sequence_numbers": NUMBERS, "reason": PATH, "description": REASON},
    SharedAccessKey: {
        "name": NAME,
        "claims": st.lists(st.sampled_from(Claim), min_size=1).map(tuple),
        "primary": SECRET,
        "secondary": SECRET,
        "entity_path": REASON,
    },
    RuleDescription: {
        "name": NAME,
        "filter": FILTER,
        "action": st.none() | st.builds(SqlAction, SQL, BAG),
    },
    SqlFilter: {"expression": SQL, "parameters": BAG},
    SqlAction: {"expression": SQL, "parameters": BAG},
    CorrelationFilter: dict.fromkeys((f.name for f in fields(CorrelationFilter)), REASON)
    | {"properties": BAG},
    TrueFilter: {},
    FalseFilter: {},
    BrokeredMessage: dict.fromkeys(TEXT_COLUMNS, REASON)
    | {
        "body": st.binary(max_size=20),
        "time_to_live": st.none() | st.timedeltas(timedelta(microseconds=1)),
        "scheduled_enqueue_time_utc": st.none() | AWARE,
        "application_properties": BAG,
    },
} | {
    kind: {f.name: SETTINGS[f.name] for f in fields(kind)}
    for kind in (QueueDescription, TopicDescription, SubscriptionDescription)
}


@st.composite
def given_fields(draw: st.DrawFn, kind: type) -> Drawn:
    """Draw the fields of a kind: some fit, some are of any other type."""
    fitting = FITTING[kind]
    odd = draw(st.sets(st.sampled_from(sorted(fitting)), max_size=2)) if fitting else set()
    values = {name: draw(ANYTHING if name in odd else fits) for name, fits in fitting.items()}
    return Drawn(values)


def built(kind: type, values: Mapping[str, Any]) -> Any:
    """Return the value of these fields, or None when it is refused."""
    try:
        return kind(**values)
    except InvalidArgumentError as error:
        error.text.encode()  # the refusal travels too
        return None


def texts_in(value: Any) -> Iterator[str]:
    """Give every text a value holds."""
    if isinstance(value, Enum):
        return
    if isinstance(value, str):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from texts_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for name, held in value.items():
            yield from texts_in(name)
            yield from texts_in(held)
    elif isinstance(value, list | tuple):
        for held in value:
            yield from texts_in(held)


def comparable(value: Any) -> Any:
    """Return a value so that equal ones compare equal: sequences as lists, NaN as a text."""
    if isinstance(value, pa.RecordBatch):
        columns = [column.cast(pa.int64()) if _is_time(column) else column for column in value]
        rows = [column.to_pylist() for column in columns if not pa.types.is_map(column.type)]
        return [*rows, value.column("properties").to_string()]
    if isinstance(value, Enum) and not isinstance(value, str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [comparable(getattr(value, f.name)) for f in fields(value)]
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, np.ndarray | pa.Array):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): comparable(held) for name, held in value.items()}
    return [comparable(one) for one in value] if isinstance(value, list | tuple | range) else value


def _is_time(column: pa.Array) -> bool:
    return bool(pa.types.is_temporal(column.type))


def after_ipc(batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
    """Return a batch as it leaves a connection."""
    if batch is None:
        return None
    batch.validate(full=True)
    return wire._from_ipc(wire._to_ipc(batch))


def check_travels(command: c.Command[Any]) -> None:
    """Send a command over the wire: it arrives equal, unless its columns cannot travel."""
    try:
        ready = with_columns(command)
    except InvalidArgumentError:
        assert isinstance(command, c.Send), "only columns may turn out not to fit"
        return
    frame = encode_asks([(1, ready)])
    (ask,) = decode_asks(pa.py_buffer(frame.metadata), after_ipc(frame.batch)).asks
    assert not isinstance(ask.command, MessagingError), ask.command
    assert comparable(ask.command) == comparable(ready)


def check_is_kept(description: Any) -> None:
    """Write a description as JSON: it comes back equal."""
    text = to_json(description)
    assert comparable(from_json(text, type(description))) == comparable(description)


def check_becomes_columns(message: BrokeredMessage) -> None:
    """Turn a message into columns: it comes back equal."""
    batch = to_batch([message])
    batch.validate(full=True)
    assert message.size >= len(message.body)
    [again] = to_messages(batch)
    if message.message_id is not None:  # else it is given one
        assert comparable(to_batch([again])) == comparable(batch)
    check_travels(c.Send("queue", [message]))


def carrier_of(value: Any) -> c.Command[Any]:
    """Return a command that carries a value which is none."""
    match value:
        case c.Origin():
            return c.Send("queue", [], value)
        case c.SessionLock():
            return c.RenewSession("queue", value)
        case c.DeadLetterPart():
            return c.SettleRange("queue", 1, (), [value])
    return c.PutKey(value)


# -- the laws --------------------------------------------------------------------------------------


def test_every_kind_that_a_client_sends_is_built_here() -> None:
    assert set(FITTING) == {*COMMANDS, *VALUES, *DESCRIBED, BrokeredMessage}
    for kind, fitting in FITTING.items():
        names = {field.name for field in fields(kind)}
        assert set(fitting) == (names & set(APPLICATION_FIELDS) if "body" in names else names)


@pytest.mark.parametrize("kind", FITTING, ids=lambda kind: kind.__name__)
def test_no_field_of_a_value_takes_what_does_not_fit(kind: type) -> None:
    @settings(replayed, max_examples=1, phases=[Phase.generate])
    @given(st.fixed_dictionaries(FITTING[kind]))
    def holds(values: dict[str, Any]) -> None:
        assert built(kind, values) is not None
        found = [f"{name}={mistake}" for name in values for mistake in mistakes(kind, values, name)]
        assert not found

    holds()


def mistakes(kind: type, values: dict[str, Any], name: str) -> Iterator[str]:
    """Give every odd value of a field that is neither refused nor good, and what it leads to."""
    for make in MAKERS:
        odd = make()
        try:
            check(built(kind, values | {name: odd}))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a mistake
            yield f"{shown(odd)}: {type(error).__name__}: {error!s:.80}"


@pytest.mark.parametrize("kind", FITTING, ids=lambda kind: kind.__name__)
def test_a_value_of_any_fields_is_valid_or_refused(kind: type) -> None:
    @thoroughly
    @given(given_fields(kind))
    def holds(values: Drawn) -> None:
        check(built(kind, values.value))

    holds()


def check(value: Any) -> None:
    """Check that a value is valid, if there is one: it is written and comes back equal."""
    if value is None:
        return
    "".join(texts_in(value)).encode()
    if isinstance(value, COMMANDS):
        check_travels(value)
    elif isinstance(value, VALUES):
        check_travels(carrier_of(value))
    elif isinstance(value, BrokeredMessage):
        check_becomes_columns(value)
    elif isinstance(value, DESCRIBED):
        check_is_kept(value)


# -- columns that were not made here ---------------------------------------------------------------

ODD_COLUMNS = st.sampled_from(
    [
        pa.array(["text"]),
        pa.array([b"bytes"]),
        pa.array([b"\xff\xfe"]),
        pa.array([7]),
        pa.array([2**63 - 1]),
        pa.array([1.5]),
        pa.array([float("nan")]),
        pa.array([None], pa.null()),
        pa.array([["a"]]),
        pa.array([{"a": 1}]),
        pa.array([True]),
        pa.array(["a"], pa.large_string()),
        pa.array(["a"]).dictionary_encode(),
        pa.array([10**18], pa.timestamp("ns")),
        pa.array([2**62], pa.timestamp("s", "UTC")),
        pa.array([1], pa.duration("s")),
        pa.array([1], pa.date32()),
        pa.array([Decimal(1)]),
        pa.array([[("a", {"int": 1})]], MESSAGE_SCHEMA.field("properties").type),
        pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())),
    ]
)


@thoroughly
@given(st.dictionaries(st.sampled_from([*MESSAGE_SCHEMA.names, "other"]), ODD_COLUMNS))
def test_columns_become_a_message_batch_of_valid_values_or_are_refused(
    odd: dict[str, pa.Array],
) -> None:
    whole = to_batch([BrokeredMessage()])
    columns = dict(zip(whole.schema.names, whole.columns, strict=True)) | odd
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    check_travels(c.Send("queue", batch))


def test_columns_with_a_text_that_is_not_utf8_are_refused() -> None:
    half = pa.StringArray.from_buffers(
        1, pa.py_buffer(struct.pack("<2i", 0, 1)), pa.py_buffer(b"\xff")
    )
    whole = to_batch([BrokeredMessage()])
    at = whole.schema.get_field_index("subject")
    batch = whole.set_column(at, whole.schema.field(at), half)
    with pytest.raises(InvalidArgumentError):
        with_columns(c.Send("queue", batch))


# -- JSON that was not written here ----------------------------------------------------------------

TABLE = wire._KINDS
SCALARS = ("map", "timedelta", "datetime", "uuid", "bytes")
BLOBS = ("run", "numbers", "tokens", "blob", "batch")
PARTS: dict[str, tuple[str, ...]] = (
    {kind.__name__: names for kind, names in TABLE.fields.items()}
    | {name: ("value",) for name, kind in TABLE.types.items() if kind not in TABLE.fields}
    | {"map": ("items",), "timedelta": ("us",), "datetime": ("us",)}
    | {"uuid": ("hex",), "bytes": ("hex",), "run": ("first", "count")}
    | dict.fromkeys(("numbers", "tokens", "blob", "batch"), ("at", "size"))
    | {"Unheard": ("path",)}
)
ENUM_VALUES = [one.value for kind in TABLE.types.values() if issubclass(kind, Enum) for one in kind]
LEAF = st.one_of(
    *(st.none(), st.booleans(), WHOLE, st.floats(), TEXT, NAME),
    st.sampled_from(range(2)).map(lambda at: (10**5000, "x" * 300_000)[at]),
    st.sampled_from([*ENUM_VALUES, UUID(int=5).hex, 0, 8, 16, 24]),
)


def trees_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return JSON of a kind of the table, with its fields or some of them."""

    def parts_of(kind: str) -> st.SearchStrategy[Any]:
        held = st.fixed_dictionaries({}, optional=dict.fromkeys(PARTS[kind], inner))
        whole = st.fixed_dictionaries(dict.fromkeys(PARTS[kind], inner))
        return (held | whole).map(lambda parts: {"$": kind, **parts})

    kinds = st.sampled_from(sorted(PARTS)).flatmap(parts_of)
    bare = st.dictionaries(st.sampled_from(["$", "path", "name"]), inner, max_size=3)
    return kinds | st.lists(inner, max_size=3) | bare


TREE = st.recursive(LEAF, trees_of, max_leaves=10)


@st.composite
def almost_right(draw: st.DrawFn) -> Any:
    """Draw a value that fits as JSON, with one part of it replaced."""
    kind = draw(st.sampled_from([*COMMANDS, *VALUES, *DESCRIBED]))
    if kind is c.Send:
        kind = c.Peek
    fitting = {name: draw(fits) for name, fits in FITTING[kind].items()}
    writing = wire._Writing()
    plain = {"$": kind.__name__} | {name: writing.dump(v) for name, v in fitting.items()}
    for name in draw(st.sets(st.sampled_from(sorted(plain)), max_size=2)):
        plain[name] = draw(TREE)
    return plain


@settings(thoroughly, max_examples=400)
@given((TREE | almost_right()).map(Drawn))
def test_any_tree_is_a_valid_value_or_refused(tree: Drawn) -> None:
    try:
        value = Plain(TABLE).load(tree.value)
    except InvalidArgumentError as error:
        error.text.encode()
    else:
        for one in value if isinstance(value, list) else [value]:
            check(one)


def metadata(head: Any, blobs: bytes) -> pa.Buffer:
    text = json.dumps(head).encode()
    return pa.py_buffer(struct.pack("<I", len(text)) + text + blobs)


def is_json(tree: Any) -> bool:
    """Whether Python writes a tree as JSON: it refuses numbers of over 4300 digits."""
    try:
        json.dumps(tree)
    except ValueError:
        return False
    return True


@settings(thoroughly, max_examples=400)
@given(
    (TREE | almost_right()).filter(is_json).map(Drawn), st.binary(max_size=64), st.integers(0, 2)
)
def test_any_ask_is_a_valid_command_or_its_refusal(tree: Drawn, blobs: bytes, rows: int) -> None:
    batch = to_batch([BrokeredMessage(b"a"), BrokeredMessage(b"b")])
    (ask,) = decode_asks(metadata({"asks": [[1, tree.value, rows]]}, blobs), batch).asks
    assert isinstance(ask.command, c.Command | InvalidArgumentError)
    if isinstance(ask.command, c.Command):
        check_travels(ask.command)
    else:
        ask.command.text.encode()
