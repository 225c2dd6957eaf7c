"""What travels between client and server: all of it comes back equal, and nonsense is refused."""

import struct
import tracemalloc
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.soak.bad_bytes_attacks import compressed_columns
from tests.soak.bad_bytes_tools import asking, framed, packed
from tests.unit.properties import replayed
from twinbus.entities import (
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
)
from twinbus.errors import InvalidArgumentError, MessagingError, error_of
from twinbus.limits import (
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    ROWS_AS_ROWS,
)
from twinbus.message import (
    DELIVERY_SCHEMA,
    MESSAGE_SCHEMA,
    BrokeredMessage,
    to_batch,
    to_messages,
    tokens_of,
)
from twinbus.protocol import commands as c
from twinbus.protocol.frames import FrameKind, FrameReader, frame
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.meter import METER_SCHEMA
from twinbus.protocol.rows import decode_rows, encode_rows
from twinbus.protocol.table import ROWS
from twinbus.protocol.wire import (
    decode_command,
    decode_error,
    decode_value,
    encode_ask,
    encode_reply,
    with_columns,
)
from twinbus.syphon.carrier import Carried, Range
from twinbus.syphon.settling import settlements

briefly = settings(replayed, max_examples=15)

NUMBER = st.integers(-(2**63) + 1, 2**63 - 1)  # commands take no smaller one
NUMBERS = st.lists(NUMBER, max_size=40)  # both sides of where they become a blob
PRINTED = st.characters(codec="utf-8", exclude_characters="\0")
PATH = st.text(PRINTED, max_size=30)
NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
SPAN = st.timedeltas(timedelta(0), timedelta(days=1000))
WAIT = st.timedeltas(timedelta(0), timedelta(days=1))
LEASE = st.timedeltas(timedelta(microseconds=1), timedelta(hours=1))
MOMENT = st.datetimes(timezones=st.just(UTC))
TOKENS = st.lists(st.uuids(), max_size=5).map(tokens_of)
LOCK = st.builds(c.SessionLock, PATH, st.uuids())
FEW = st.integers(1, 100)
VALUE = st.none() | st.booleans() | NUMBER | PATH | st.binary(max_size=9) | SPAN | MOMENT
FACTS = st.dictionaries(
    NAME.filter(lambda n: n not in ("self", "text")), VALUE | st.uuids(), max_size=4
)
MESSAGE = st.builds(
    BrokeredMessage,
    st.binary(max_size=20),
    subject=st.none() | st.text(st.characters(codec="utf-8"), max_size=9),
    time_to_live=st.none() | st.timedeltas(timedelta(seconds=1), timedelta(days=9)),
    scheduled_enqueue_time_utc=st.none() | MOMENT,
    application_properties=st.dictionaries(NAME, NUMBER | st.booleans() | SPAN, max_size=3),
)
MESSAGES = st.lists(MESSAGE, max_size=4) | st.lists(
    MESSAGE, min_size=ROWS_AS_ROWS, max_size=ROWS_AS_ROWS + 2
)
PARAMETERS = st.dictionaries(NAME, NUMBER | PATH | st.booleans() | MOMENT, max_size=3)
SQL = st.text(PRINTED, min_size=1, max_size=20)
RULE = st.builds(
    RuleDescription,
    NAME,
    st.builds(SqlFilter, SQL, PARAMETERS)
    | st.builds(CorrelationFilter, subject=st.none() | PATH, properties=PARAMETERS)
    | st.builds(TrueFilter)
    | st.builds(FalseFilter),
    st.none() | st.builds(SqlAction, SQL, PARAMETERS),
)
STATUS = st.sampled_from(EntityStatus)
LIFE = st.timedeltas(timedelta(seconds=1)) | st.just(timedelta.max)
ENTITY = (
    st.builds(
        QueueDescription,
        path=NAME,
        status=STATUS,
        default_message_time_to_live=LIFE,
        forward_to=NAME,
        forward_dead_lettered_messages_to=st.none() | NAME,
    )
    | st.builds(TopicDescription, path=NAME, status=STATUS, user_metadata=st.none() | PATH)
    | st.builds(SubscriptionDescription, topic_path=NAME, name=NAME, requires_session=st.booleans())
)
SECRET = st.text(PRINTED, min_size=16, max_size=40)
KEY = st.builds(
    SharedAccessKey,
    name=st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True),
    claims=st.lists(st.sampled_from(Claim), min_size=1).map(tuple),
    primary=SECRET,
    secondary=SECRET,
    entity_path=st.none() | NAME,
)
COUNTS = st.lists(st.integers(0, 2**63 - 1), max_size=40)
SOURCE = st.text(PRINTED, min_size=1, max_size=40).map("queue {}".format)
ORIGIN = st.builds(c.Origin, SOURCE, COUNTS | COUNTS.map(np.array).map(np.int64))
PARTS = st.lists(st.builds(c.DeadLetterPart, NUMBERS, PATH, st.none() | PATH), max_size=3)
MODE = st.sampled_from(c.ReceiveMode)
MAYBE_LOCK = st.none() | LOCK


def delivered(messages: list[BrokeredMessage]) -> pa.RecordBatch:
    """Return messages with the columns a broker adds."""
    sent = to_batch(messages)
    added = list(DELIVERY_SCHEMA)[len(MESSAGE_SCHEMA) :]
    columns = [*sent.columns, *(pa.nulls(len(messages), field.type) for field in added)]
    return pa.RecordBatch.from_arrays(columns, schema=DELIVERY_SCHEMA)


COMMAND: dict[type[c.Command[Any]], st.SearchStrategy[Any]] = {
    c.Send: st.builds(c.Send, PATH, MESSAGES | MESSAGES.map(to_batch), st.none() | ORIGIN),
    c.CancelScheduled: st.builds(c.CancelScheduled, PATH, NUMBERS),
    c.Receive: st.builds(c.Receive, PATH, FEW, WAIT, MODE, MAYBE_LOCK, NUMBER, st.booleans()),
    c.ReceiveDeferred: st.builds(c.ReceiveDeferred, PATH, NUMBERS, MODE, MAYBE_LOCK),
    c.Peek: st.builds(c.Peek, PATH, NUMBER, FEW, NUMBER, st.none() | PATH),
    c.DeleteMessages: st.builds(c.DeleteMessages, PATH, FEW, st.none() | MOMENT, MAYBE_LOCK),
    c.Settle: st.builds(
        c.Settle, PATH, TOKENS, st.sampled_from(c.Disposition), st.none() | PATH, st.none() | PATH
    ),
    c.RenewLocks: st.builds(c.RenewLocks, PATH, TOKENS),
    c.AcceptSession: st.builds(c.AcceptSession, PATH, st.none() | PATH, WAIT),
    c.RenewSession: st.builds(c.RenewSession, PATH, LOCK),
    c.ReleaseSession: st.builds(c.ReleaseSession, PATH, LOCK),
    c.GetSessionState: st.builds(c.GetSessionState, PATH, LOCK),
    c.SetSessionState: st.builds(c.SetSessionState, PATH, LOCK, st.none() | st.binary()),
    c.ListSessions: st.builds(c.ListSessions, PATH, FEW, FEW, st.none() | MOMENT),
    c.LeaseRange: st.builds(
        lambda path, owner, count, span, duration: c.LeaseRange(
            path, owner, count, span and span[0], span and span[1], duration=duration
        ),
        PATH,
        PATH,
        FEW,
        st.none() | st.tuples(NUMBER, NUMBER).map(sorted),
        LEASE,
    ),
    c.RenewRange: st.builds(c.RenewRange, PATH, NUMBER, LEASE),
    c.ReadRange: st.builds(c.ReadRange, PATH, NUMBER, NUMBER, NUMBER, NUMBER),
    c.SettleRange: st.builds(
        c.SettleRange, PATH, NUMBER, st.lists(st.tuples(NUMBER, NUMBER), max_size=40), PARTS
    ),
    c.ReleaseRange: st.builds(c.ReleaseRange, PATH, NUMBER),
    c.CreateEntity: st.builds(c.CreateEntity, ENTITY, st.none() | RULE),
    c.UpdateEntity: st.builds(c.UpdateEntity, ENTITY),
    c.DeleteEntity: st.builds(c.DeleteEntity, PATH),
    c.GetEntity: st.builds(c.GetEntity, PATH),
    c.ListEntities: st.builds(c.ListEntities, st.sampled_from(c.EntityKind), st.none() | PATH),
    c.GetRuntimeProperties: st.builds(c.GetRuntimeProperties, PATH),
    c.CreateRule: st.builds(c.CreateRule, PATH, RULE),
    c.UpdateRule: st.builds(c.UpdateRule, PATH, RULE),
    c.DeleteRule: st.builds(c.DeleteRule, PATH, PATH),
    c.ListRules: st.builds(c.ListRules, PATH),
    c.ReadMeter: st.builds(c.ReadMeter),
    c.PutKey: st.builds(c.PutKey, KEY),
    c.DeleteKey: st.builds(c.DeleteKey, PATH, st.none() | PATH),
    c.ListKeys: st.builds(c.ListKeys),
}
ANY_COMMAND = st.one_of(*COMMAND.values())
METERED = st.fixed_dictionaries(
    {field.name: PATH if pa.types.is_string(field.type) else NUMBER for field in METER_SCHEMA}
)
RUNTIME_COUNTS = [field.name for field in fields(RuntimeProperties) if field.type is int]
REPLY: dict[str, st.SearchStrategy[Any]] = {
    "nothing": st.none(),
    "receipt": st.builds(c.SendReceipt, NUMBERS),
    "moment": MOMENT,
    "bytes": st.binary(),
    "count": FEW,
    "names": st.lists(PATH, max_size=40),
    "grant": st.builds(c.SessionGrant, LOCK, MOMENT),
    "lease": st.builds(
        c.RangeLease,
        *(PATH, NUMBER, NUMBER, NUMBER, FEW, FEW, MOMENT),
        intervals=st.lists(st.tuples(NUMBER, NUMBER), max_size=40),
    ),
    "entity": ENTITY,
    "entities": st.lists(ENTITY, max_size=3),
    "rules": st.lists(RULE, max_size=3),
    "keys": st.lists(KEY, max_size=3),
    "runtime": st.builds(
        RuntimeProperties,
        path=PATH,
        **dict.fromkeys(RUNTIME_COUNTS, NUMBER),
        **dict.fromkeys(("created_at_utc", "updated_at_utc", "accessed_at_utc"), MOMENT),
    ),
    "deliveries": MESSAGES.map(delivered),
    "meter": st.lists(METERED, max_size=3).map(
        lambda rows: pa.RecordBatch.from_pylist(rows, METER_SCHEMA)
    ),
}


def comparable(value: Any) -> Any:
    """Return a value so that equal ones compare equal: sequences as lists, columns as rows."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), {f.name: comparable(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, pa.RecordBatch):
        return value.schema.names, value.cast(value.schema).to_pylist()
    if isinstance(value, MessagingError):
        return type(value), value.text, comparable(dict(value.facts))
    if isinstance(value, np.ndarray | pa.Array):
        return value.tolist()
    if isinstance(value, dict):
        return {name: comparable(found) for name, found in value.items()}
    return [comparable(item) for item in value] if isinstance(value, list | tuple) else value


def sent(command: c.Command[Any], number: int = 1) -> bytes:
    """Return the frame that asks for a command."""
    return b"".join(encode_ask(number, command))


def cut(stream: bytes) -> list[tuple[list[Any], memoryview]]:
    """Return the frames of a stream that a client wrote."""
    return list(FrameReader(MAX_HEAD_BYTES).feed(stream))


def asked(*commands: c.Command[Any]) -> list[Any]:
    """Send commands over the wire; return what arrives."""
    arrived = cut(b"".join(sent(command, number) for number, command in enumerate(commands, 1)))
    assert [head[1] for head, _ in arrived] == list(range(1, len(commands) + 1))
    return [comparable(as_columns(decode_command(*item))) for item in arrived]


def as_columns(command: Any) -> Any:
    """Return a command; the messages of a send as columns, however they travelled."""
    return with_columns(command) if isinstance(command, c.Send) else command


def reply_of(head: list[Any], body: memoryview) -> Any:
    """Return the value or the error that a reply brings."""
    is_refusal = head[0] == FrameKind.REFUSAL
    return decode_error(head[2:]) if is_refusal else decode_value(head[2], body)


def replied(*values: Any) -> list[Any]:
    """Send replies over the wire; return what arrives."""
    stream = b"".join(b"".join(encode_reply(at, value)) for at, value in enumerate(values, 1))
    return [comparable(reply_of(*item)) for item in FrameReader().feed(stream)]


def read(stream: bytes) -> Any:
    """Return the command of one frame, or why it is refused."""
    try:
        [item] = cut(stream)
        return decode_command(*item)
    except InvalidArgumentError as error:
        return error


# -- there and back --------------------------------------------------------------------------------


def test_every_command_is_tried_here() -> None:
    assert set(COMMAND) == {row.command for row in ROWS}


@pytest.mark.parametrize("kind", COMMAND, ids=lambda kind: kind.__name__)
def test_a_command_arrives_as_it_was_asked(kind: type[c.Command[Any]]) -> None:
    @briefly
    @given(COMMAND[kind])
    def arrives(command: c.Command[Any]) -> None:
        assert without_ids(asked(command)) == without_ids([comparable(as_columns(command))])

    arrives()


def without_ids(commands: list[Any]) -> list[Any]:
    """Return commands without the ids that a message gets when it becomes columns."""
    for _, parts in commands:
        messages = parts.get("messages")
        for row in messages[1] if messages else ():
            row.pop("message_id")
    return commands


@replayed
@given(st.lists(ANY_COMMAND, max_size=6))
def test_commands_that_are_sent_together_keep_their_messages(
    commands: list[c.Command[Any]],
) -> None:
    expected = [comparable(as_columns(command)) for command in commands]
    assert without_ids(asked(*commands)) == without_ids(expected)


PROPERTY = (
    st.booleans()
    | NUMBER
    | st.floats(allow_nan=False)
    | PATH
    | st.binary(max_size=9)
    | MOMENT
    | st.timedeltas(timedelta(days=-9), timedelta(days=9))
    | st.uuids()
)


@replayed
@given(
    st.lists(
        st.builds(
            BrokeredMessage,
            st.binary(max_size=20),
            message_id=st.none() | st.text(PRINTED, max_size=9),
            session_id=st.none() | st.text(PRINTED, min_size=1, max_size=9),
            subject=st.none() | PATH,
            content_type=st.none() | PATH,
            time_to_live=st.none() | st.timedeltas(timedelta(seconds=1), timedelta(days=9)),
            scheduled_enqueue_time_utc=st.none() | MOMENT,
            application_properties=st.dictionaries(NAME, PROPERTY, max_size=4),
        ),
        max_size=ROWS_AS_ROWS,
    )
)
def test_rows_arrive_as_they_were_sent(messages: list[BrokeredMessage]) -> None:
    rows, bodies = encode_rows(messages)
    [(head, body)] = cut(b"".join(frame([0, rows], bodies, sum(map(len, bodies)))))
    arrived = decode_rows(head[1], body)
    assert arrived == messages
    kinds = [{name: type(v) for name, v in m.application_properties.items()} for m in arrived]
    assert kinds == [
        {name: type(v) for name, v in m.application_properties.items()} for m in messages
    ]


@pytest.mark.parametrize("kind", REPLY)
def test_a_reply_arrives_as_it_was_given(kind: str) -> None:
    @briefly
    @given(REPLY[kind])
    def arrives(value: Any) -> None:
        assert replied(value) == [comparable(value)]

    arrives()


@replayed
@given(st.lists(st.one_of(*REPLY.values()), max_size=6))
def test_replies_that_are_sent_together_keep_their_messages(values: list[Any]) -> None:
    assert replied(*values) == [comparable(value) for value in values]


@replayed
@given(st.lists(ANY_COMMAND, min_size=1, max_size=4), st.lists(st.integers(0), max_size=8))
def test_frames_are_the_same_however_the_stream_is_split(
    commands: list[c.Command[Any]], places: list[int]
) -> None:
    stream = b"".join(sent(command, number) for number, command in enumerate(commands, 1))
    ends = sorted(place % (len(stream) + 1) for place in places)
    reader = FrameReader()
    pieces = [stream[a:b] for a, b in zip([0, *ends], [*ends, len(stream)], strict=True)]
    found = [item for piece in pieces for item in reader.feed(piece)]
    assert found == cut(stream)
    assert reader.filled == 0


def test_a_stream_may_come_byte_by_byte() -> None:
    stream = sent(c.Send("orders", [BrokeredMessage(b"tea")])) + sent(c.ReadMeter(), 2)
    reader = FrameReader()
    found = [item for at in range(len(stream)) for item in reader.feed(stream[at : at + 1])]
    assert found == cut(stream)


def test_a_frame_begins_its_body_at_a_multiple_of_eight_bytes() -> None:
    for size in range(20):
        [start, body] = frame([FrameKind.ASK, "x" * size], [b"body"], 4)
        assert len(start) % 8 == 0
        assert body == b"body"


def errors(kind: type[MessagingError] = MessagingError) -> list[type[MessagingError]]:
    known = [item for item in kind.__subclasses__() if item.__module__ == kind.__module__]
    return [kind, *(error for child in known for error in errors(child))]


@pytest.mark.parametrize("kind", errors(), ids=lambda kind: kind.__name__)
def test_an_error_arrives_with_its_kind_its_text_and_its_facts(kind: type[MessagingError]) -> None:
    @briefly
    @given(PATH, FACTS)
    def arrives(text: str, facts: dict[str, Any]) -> None:
        assert replied(kind(text, **facts)) == [comparable(kind(text, **facts))]

    arrives()


def test_a_fact_that_cannot_travel_is_sent_as_text() -> None:
    first = MessagingError("first")
    assert replied(MessagingError("last", history=(first,)))[0][2] == {
        "history": "(MessagingError('first'),)"
    }


def test_an_error_of_a_newer_version_is_a_messaging_error() -> None:
    assert type(error_of("Unheard", "of", {})) is MessagingError


def test_a_value_that_is_no_command_is_refused_before_it_travels() -> None:
    with pytest.raises(InvalidArgumentError, match="does not know the command"):
        encode_ask(1, c.Command())


def test_a_command_that_no_server_would_read_is_refused_before_it_travels() -> None:
    parts = [c.DeadLetterPart([number], "x" * 4000) for number in range(300)]
    with pytest.raises(InvalidArgumentError, match="Use several"):
        encode_ask(1, c.SettleRange("orders", 1, dead_lettered=parts))


# -- nonsense --------------------------------------------------------------------------------------

KINDS = st.sampled_from(
    [
        *(kind.__name__ for kind in COMMAND),
        *("map", "timedelta", "datetime", "uuid", "bytes", "numbers", "tokens", "blob", "batch"),
        *("deliveries", "error", "SendReceipt", "ReceiveMode", "SessionLock", "Unheard"),
    ]
)
FIELDS = st.sampled_from(
    [
        *("at", "size", "path", "us", "hex", "items", "value", "origin", "messages", "session"),
        *("facts", "sequence_numbers", "lock_tokens", "code", "text", "description", "rule"),
    ]
)
WIRE_NUMBER = st.integers(-(2**63), 2**64 - 1)
LEAF = st.none() | st.booleans() | WIRE_NUMBER | st.floats() | st.text(max_size=5)
LEAF_OF_ROW = (
    st.none()
    | st.integers(0, 8)
    | WIRE_NUMBER
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.dictionaries(st.text(max_size=3), LEAF | st.lists(LEAF, max_size=2), max_size=2)
    | st.sampled_from(["datetime", "timedelta", "uuid"]).flatmap(
        lambda kind: LEAF.map(lambda leaf: {"a": [kind, leaf]})
    )
)


def kinds_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    found = st.dictionaries(FIELDS, inner, max_size=4)
    return st.builds(lambda kind, parts: {**parts, "$": kind}, KINDS, found)


TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=4) | kinds_of(inner), max_leaves=12
)
NAMES = st.sampled_from(sorted(row.kind for row in ROWS)) | st.text(max_size=5)
HEAD = st.builds(
    lambda kind, number, name, values: [kind, number, name, *values],
    st.sampled_from(FrameKind).map(int),
    st.integers(-(2**63), 2**64 - 1),
    NAMES,
    st.lists(TREE, max_size=5),
)


def survives(stream: bytes) -> None:
    """Read bytes as a server and as a client do: they are understood or refused."""
    try:
        frames = cut(stream)
    except InvalidArgumentError:
        return
    for head, body in frames:
        for understand in (decode_command, reply_of, lambda head, _: decode_error(head[1:])):
            try:
                understand(head, body)
            except (InvalidArgumentError, IndexError):  # a conversation refuses short heads
                continue


@replayed
@given(st.binary(max_size=200))
def test_any_bytes_are_understood_or_refused(stored: bytes) -> None:
    survives(stored)
    survives(framed(stored, stored))


@replayed
@given(TREE | st.lists(TREE) | HEAD, st.binary(max_size=64))
def test_any_head_is_understood_or_refused(head: Any, body: bytes) -> None:
    survives(framed(head, body))


@replayed
@given(HEAD, st.binary(max_size=64))
def test_what_is_wrong_with_an_ask_is_a_refusal_of_that_one(head: Any, body: bytes) -> None:
    following = sent(c.ReadMeter(), 2)
    first, second = cut(framed(head, body) + following)
    assert isinstance(read(framed(first[0], body)), c.Command | InvalidArgumentError)
    assert decode_command(*second) == c.ReadMeter()


@replayed
@given(ANY_COMMAND, st.integers(0), st.binary(min_size=1, max_size=3))
def test_a_damaged_frame_is_understood_or_refused(
    command: c.Command[Any], at: int, damage: bytes
) -> None:
    found = bytearray(sent(command))
    at %= len(found)
    found[at : at + len(damage)] = damage
    survives(bytes(found))
    survives(bytes(found[:at]))


@pytest.mark.parametrize(
    "head",
    [
        [FrameKind.REFUSAL, 1],
        [FrameKind.REFUSAL, 1, [], "", {}],
        [FrameKind.REFUSAL, 1, "x", "", 5],
        [FrameKind.REFUSAL, 1, "x", "", {"a": {"$": "uuid"}}],
        [FrameKind.REFUSAL, 1, "x", "", {"a": {}}],
        [FrameKind.REFUSAL, 1, "x", "", {1: 2}],
        [FrameKind.REPLY, 1, {"$": "receipt"}],
        [FrameKind.REPLY, 1, {"$": "receipt", "numbers": 5}],
        [FrameKind.REPLY, 1, {"$": "receipt", "numbers": {"$": "numbers", "at": 0, "size": 9}}],
        [FrameKind.REPLY, 1, {"$": "deliveries", "at": 0, "size": 8}],
        [FrameKind.REPLY, 1, {"$": "deliveries", "at": None}],
        [FrameKind.REPLY, 1, {"$": "batch", "at": 0, "size": 8}],
    ],
    ids=str,
)
def test_a_reply_that_lacks_its_parts_is_refused(head: Any) -> None:
    [item] = cut(framed(head, bytes(8)))
    with pytest.raises(InvalidArgumentError):
        reply_of(*item)


@pytest.mark.parametrize("depth", [100, 600, 900, 3000, 100_000])
def test_a_deep_head_is_understood_or_refused(depth: int) -> None:
    start = packed([FrameKind.ASK, 1, "Peek", None])[:-1]
    survives(framed(start + b"\x91" * depth + b"\xc0"))
    survives(framed(start + b"\x82\xa1$\xa3map\xa5items\x81\xa1a" * depth + b"\xc0"))
    survives(framed(packed([FrameKind.REPLY, 1, None])[:-1] + b"\x91" * depth + b"\xc0"))
    errors_facts = packed([FrameKind.REFUSAL, 1, "x", "", {"a": None}])[:-1]
    survives(framed(errors_facts + b"\x91" * depth + b"\xc0"))


@pytest.mark.parametrize("head", [b"", b"\xc1", 7, "text", [], {}, ["kind"], [[3]], [None]])
def test_a_frame_without_a_head_is_refused(head: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        cut(framed(head))


@pytest.mark.parametrize(
    ("head_size", "body_size"), [(MAX_HEAD_BYTES + 1, 0), (2**32 - 1, 0), (5, MAX_FRAME_BYTES + 1)]
)
def test_a_frame_that_is_too_long_is_refused_unread(head_size: int, body_size: int) -> None:
    lengths = struct.pack("<II", head_size, body_size)
    for pieces in ([lengths], [lengths[:3], lengths[3:]], [lengths + bytes(100)]):
        reader = FrameReader(MAX_HEAD_BYTES)
        *complete, last = pieces
        assert [list(reader.feed(piece)) for piece in complete] == [[] for _ in complete]
        with pytest.raises(InvalidArgumentError, match="bytes"):
            list(reader.feed(last))


def test_memory_grows_with_what_arrives_and_not_with_what_is_promised() -> None:
    reader = FrameReader(MAX_HEAD_BYTES)
    tracemalloc.start()
    try:
        list(reader.feed(struct.pack("<II", MAX_HEAD_BYTES, MAX_FRAME_BYTES) + bytes(1000)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert reader.filled == 1008


@pytest.mark.parametrize("empty", [b"\x90", b"\x80", b"\xa0", b"\x91\x90"], ids=repr)
def test_a_head_of_empty_values_takes_a_bounded_multiple_of_its_size(empty: bytes) -> None:
    count = (MAX_HEAD_BYTES - 100) // len(empty)
    start = packed([FrameKind.ASK, 1, "Peek", None])[:-1]
    found = framed(start + b"\xdd" + struct.pack(">I", count) + empty * count)
    tracemalloc.start()
    try:
        assert isinstance(read(found), InvalidArgumentError)
        assert tracemalloc.get_traced_memory()[1] < 160 * MAX_HEAD_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_columns_are_refused_before_they_are_unpacked(codec: str) -> None:
    zeros = pa.array([bytes(MAX_BATCH_BYTES)] * 16)  # a gigabyte
    columns = [
        zeros if field.name == "body" else pa.nulls(16, field.type) for field in MESSAGE_SCHEMA
    ]
    batch = pa.RecordBatch.from_arrays(columns, names=MESSAGE_SCHEMA.names)
    bomb = compressed_columns(batch, pa.ipc.IpcWriteOptions(compression=codec))
    del batch, columns, zeros
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    plain = {"$": "columns", "at": 0, "size": len(bomb)}
    refusal = read(
        asking({"$": "Send", "path": "q", "messages": plain, "origin": None}, blobs=bomb)
    )
    assert isinstance(refusal, InvalidArgumentError)
    assert "compressed" in refusal.text
    assert pool.bytes_allocated() - before < len(bomb) + 1_000_000
    [(head, body)] = FrameReader().feed(
        framed([FrameKind.REPLY, 1, {"$": "deliveries", "at": 0, "size": len(bomb)}], bomb)
    )
    with pytest.raises(InvalidArgumentError):
        decode_value(head[2], body)


def test_one_bad_ask_leaves_the_next_one_alone() -> None:
    send = c.Send("orders", [BrokeredMessage(b"tea")])
    first, second = cut(sent(send).replace(b"\xa6orders", b"\xc4\x05order", 1) + sent(send, 2))
    with pytest.raises(InvalidArgumentError):
        decode_command(*first)
    assert decode_command(*second) == send


@pytest.mark.parametrize(
    "rows",
    [
        *(7, [7], [[]], [["4", "id"]], [[-1, "id"]], [[9, "id"]], [[4, "id"]] * 3),
        *([[4] + [None] * 100], [[4, "id"] + [{}] * 20], [[0, "id"]] * (ROWS_AS_ROWS + 1)),
        *([[4, []]], [[4, {"a": 1}]], [[True, "id"]]),
    ],
    ids=repr,
)
def test_rows_that_make_no_message_are_refused(rows: Any) -> None:
    send = {"$": "Send", "path": "orders", "messages": rows, "origin": None}
    assert isinstance(read(asking(send, blobs=b"bodybody")), InvalidArgumentError)


@replayed
@given(st.lists(st.lists(LEAF_OF_ROW, max_size=16), max_size=3), st.binary(max_size=16))
def test_any_rows_are_messages_or_refused(rows: Any, bodies: bytes) -> None:
    send = {"$": "Send", "path": "orders", "messages": rows, "origin": None}
    found = read(asking(send, blobs=bodies))
    if isinstance(found, c.Send):
        as_columns(found)


def test_a_kind_of_a_newer_version_is_refused_by_name() -> None:
    refusal = read(framed([FrameKind.ASK, 1, "Teleport"]))
    assert isinstance(refusal, InvalidArgumentError)
    assert "Teleport" in refusal.text


@pytest.mark.parametrize(
    "plain",
    [
        *({"$": name, "path": "q", "session": 5} for name in ("RenewSession", "ReleaseSession")),
        {"$": "GetSessionState", "path": "q", "session": {"$": "map", "items": {}}},
        {"$": "SetSessionState", "path": "q", "session": None, "state": None},
        {
            "$": "CreateRule",
            "path": "t/Subscriptions/s",
            "rule": {"$": "RuleDescription", "name": "r", "filter": 5},
        },
        {
            "$": "CreateRule",
            "path": "t/Subscriptions/s",
            "rule": {"$": "RuleDescription", "name": "r", "action": "SET a = 1"},
        },
    ],
)
def test_a_command_with_a_part_of_another_kind_is_refused_at_the_door(plain: Any) -> None:
    assert isinstance(read(asking(plain)), InvalidArgumentError)  # else the broker fails


def test_no_code_can_be_named() -> None:
    assert isinstance(read(framed([FrameKind.ASK, 1, "system", "true"])), InvalidArgumentError)
    plain = {"$": "Peek", "path": {"$": "system", "value": "true"}}
    assert isinstance(read(asking(plain)), InvalidArgumentError)


def test_a_moment_arrives_to_the_microsecond() -> None:
    last = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    assert replied(last) == [last]


# -- the largest commands fit a frame --------------------------------------------------------------


def test_a_settlement_of_as_many_intervals_as_there_may_be_fits_a_frame() -> None:
    apart = [(2 * at, 2 * at) for at in range(MAX_BATCH_MESSAGES)]
    command = c.SettleRange("backlog", 7, apart)
    [(head, body)] = cut(b"".join(map(bytes, encode_ask(1, command))))
    arrived = decode_command(head, body)
    assert isinstance(arrived, c.SettleRange)
    assert [tuple(pair) for pair in arrived.completed] == apart


def test_more_intervals_than_there_may_be_are_refused() -> None:
    apart = np.arange(2 * (MAX_BATCH_MESSAGES + 1), dtype=np.int64)
    pairs = {"$": "pairs", "at": 0, "size": apart.nbytes}
    head = [FrameKind.ASK, 1, "SettleRange", "backlog", 7, pairs]
    with pytest.raises(InvalidArgumentError, match="intervals; the limit is"):
        decode_command(head, memoryview(apart.tobytes()))


def test_poison_with_the_longest_faults_is_settled_in_commands_that_fit_a_frame() -> None:
    carried = Carried("backlog", Range(7, 1, 1000, "backlog"))
    carried.poison += [(number, f"{number} " + "€" * 5000) for number in range(1, 1001)]
    commands = settlements(carried, release=True)
    for command in commands:
        encode_ask(1, command)
    parts = [part for command in commands for part in command.dead_lettered]
    assert [list(part.sequence_numbers) for part in parts] == [[at] for at in range(1, 1001)]


def test_few_messages_with_many_properties_fit_a_frame() -> None:
    large = {f"name {at}": "x" * 2000 for at in range(100)}
    messages = [BrokeredMessage(b"body", application_properties=large) for _ in range(ROWS_AS_ROWS)]
    [(head, body)] = cut(b"".join(map(bytes, encode_ask(1, c.Send("orders", messages)))))
    arrived = decode_command(head, body)
    assert isinstance(arrived, c.Send)
    assert to_messages(arrived.messages) == messages
