"""What travels between client and server: all of it comes back equal, and nonsense is refused."""

import json
import struct
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.broker import commands as c
from twinbus.broker.access import Claim, SharedAccessKey
from twinbus.broker.meter import METER_SCHEMA
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
from twinbus.limits import MAX_HEAD_BYTES
from twinbus.message import (
    DELIVERY_SCHEMA,
    MESSAGE_SCHEMA,
    BrokeredMessage,
    to_batch,
    tokens_of,
)
from twinbus.namespace.wire import (
    COMMANDS,
    Frame,
    Reply,
    decode_asks,
    decode_replies,
    encode_asks,
    encode_replies,
    with_columns,
)

briefly = settings(replayed, max_examples=15)

NUMBER = st.integers(-(2**63), 2**63 - 1)
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
MESSAGES = st.lists(MESSAGE, max_size=4)
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
    c.Receive: st.builds(c.Receive, PATH, FEW, WAIT, MODE, MAYBE_LOCK, NUMBER),
    c.ReceiveDeferred: st.builds(c.ReceiveDeferred, PATH, NUMBERS, MODE, MAYBE_LOCK),
    c.Peek: st.builds(c.Peek, PATH, NUMBER, FEW, NUMBER),
    c.Settle: st.builds(
        c.Settle, PATH, TOKENS, st.sampled_from(c.Disposition), st.none() | PATH, st.none() | PATH
    ),
    c.RenewLocks: st.builds(c.RenewLocks, PATH, TOKENS),
    c.AcceptSession: st.builds(c.AcceptSession, PATH, st.none() | PATH, WAIT),
    c.RenewSession: st.builds(c.RenewSession, PATH, LOCK),
    c.ReleaseSession: st.builds(c.ReleaseSession, PATH, LOCK),
    c.GetSessionState: st.builds(c.GetSessionState, PATH, LOCK),
    c.SetSessionState: st.builds(c.SetSessionState, PATH, LOCK, st.none() | st.binary()),
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
REPLY: dict[str, st.SearchStrategy[Any]] = {
    "nothing": st.none(),
    "receipt": st.builds(c.SendReceipt, NUMBERS),
    "moment": MOMENT,
    "bytes": st.binary(),
    "grant": st.builds(c.SessionGrant, LOCK, MOMENT),
    "lease": st.builds(c.RangeLease, PATH, NUMBER, NUMBER, NUMBER, FEW, FEW, MOMENT),
    "entity": ENTITY,
    "entities": st.lists(ENTITY, max_size=3),
    "rules": st.lists(RULE, max_size=3),
    "keys": st.lists(KEY, max_size=3),
    "runtime": st.builds(
        RuntimeProperties, created_at_utc=MOMENT, updated_at_utc=MOMENT, accessed_at_utc=MOMENT
    ),
    "deliveries": MESSAGES.map(delivered),
    "meter": st.lists(METERED, max_size=3).map(
        lambda rows: pa.RecordBatch.from_pylist(rows, METER_SCHEMA)
    ),
}


def told(value: Any) -> Any:
    """Return a value so that equal ones compare equal: sequences as lists, columns as rows."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), {f.name: told(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, pa.RecordBatch):
        return value.schema.names, value.cast(value.schema).to_pylist()
    if isinstance(value, MessagingError):
        return type(value), value.text, told(dict(value.facts))
    if isinstance(value, np.ndarray | pa.Array):
        return value.tolist()
    if isinstance(value, dict):
        return {name: told(held) for name, held in value.items()}
    return [told(one) for one in value] if isinstance(value, list | tuple) else value


def asked(*commands: c.Command[Any]) -> list[Any]:
    """Send commands over the wire in one frame; return what arrives."""
    frame = encode_asks([(at, with_columns(one)) for at, one in enumerate(commands, 1)])
    arrived = decode_asks(pa.py_buffer(frame.metadata), frame.batch)
    assert [ask.number for ask in arrived.asks] == list(range(1, len(commands) + 1))
    return [told(ask.command) for ask in arrived.asks]


def replied(*values: Any) -> list[Any]:
    """Send replies over the wire in one frame; return what arrives."""
    frame = encode_replies([Reply(at, value) for at, value in enumerate(values, 1)])
    return [told(one.value) for one in decode_replies(pa.py_buffer(frame.metadata), frame.batch)]


def metadata(head: Any, blobs: bytes = b"") -> pa.Buffer:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return pa.py_buffer(struct.pack("<I", len(text)) + text + blobs)


# -- there and back --------------------------------------------------------------------------------


def test_every_command_is_tried_here() -> None:
    assert set(COMMAND) == set(COMMANDS)


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_a_command_arrives_as_it_was_asked(kind: type[c.Command[Any]]) -> None:
    @briefly
    @given(COMMAND[kind])
    def arrives(command: c.Command[Any]) -> None:
        assert asked(command) == [told(with_columns(command))]

    arrives()


@replayed
@given(st.lists(ANY_COMMAND, max_size=6))
def test_commands_that_share_a_frame_keep_their_messages(commands: list[c.Command[Any]]) -> None:
    assert asked(*commands) == [told(with_columns(one)) for one in commands]


@pytest.mark.parametrize("kind", REPLY)
def test_a_reply_arrives_as_it_was_given(kind: str) -> None:
    @briefly
    @given(REPLY[kind])
    def arrives(value: Any) -> None:
        assert replied(value) == [told(value)]

    arrives()


@replayed
@given(st.lists(st.one_of(*REPLY.values()), max_size=6))
def test_replies_that_share_a_frame_keep_their_messages(values: list[Any]) -> None:
    assert replied(*values) == [told(value) for value in values]


def errors(kind: type[MessagingError] = MessagingError) -> list[type[MessagingError]]:
    known = [one for one in kind.__subclasses__() if one.__module__ == kind.__module__]
    return [kind, *(one for child in known for one in errors(child))]


@pytest.mark.parametrize("kind", errors(), ids=lambda kind: kind.__name__)
def test_an_error_arrives_with_its_kind_its_text_and_its_facts(kind: type[MessagingError]) -> None:
    @briefly
    @given(PATH, FACTS)
    def arrives(text: str, facts: dict[str, Any]) -> None:
        assert replied(kind(text, **facts)) == [told(kind(text, **facts))]

    arrives()


def test_a_fact_that_cannot_travel_is_told_in_words() -> None:
    first = MessagingError("first")
    assert replied(MessagingError("last", history=(first,)))[0][2] == {
        "history": "(MessagingError('first'),)"
    }


def test_an_error_of_a_newer_version_is_a_messaging_error() -> None:
    assert type(error_of("Unheard", "of", {})) is MessagingError


@replayed
@given(st.none() | PATH, st.booleans())
def test_a_token_and_a_goodbye_arrive(token: str | None, bye: bool) -> None:
    frame = encode_asks([], token, bye=bye)
    arrived = decode_asks(pa.py_buffer(frame.metadata), frame.batch)
    assert (arrived.asks, arrived.token, arrived.bye) == ([], token, bye)


def test_a_value_that_is_no_command_is_refused_before_it_travels() -> None:
    with pytest.raises(InvalidArgumentError, match="does not know the command"):
        with_columns(c.Command())


def test_the_size_of_a_frame_counts_head_and_messages() -> None:
    batch = to_batch([BrokeredMessage(b"x" * 1000)])
    assert Frame(b"head", batch).size >= 1004 > Frame(b"head", None).size == 4


# -- nonsense --------------------------------------------------------------------------------------

KINDS = st.sampled_from(
    [
        *(kind.__name__ for kind in COMMANDS),
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
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


def kinds_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    held = st.dictionaries(FIELDS, inner, max_size=4)
    return st.builds(lambda kind, parts: {**parts, "$": kind}, KINDS, held)


TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=4) | kinds_of(inner), max_leaves=12
)
ITEMS = st.lists(st.tuples(st.integers(), kinds_of(TREE), st.integers(0, 3)), max_size=3)
BATCH = st.none() | MESSAGES.map(to_batch)


def survives(held: pa.Buffer | None, batch: pa.RecordBatch | None) -> None:
    """Read it as a server and as a client do: it is understood or refused."""
    for decode in (decode_asks, decode_replies):
        try:
            decode(held, batch)
        except InvalidArgumentError:
            continue


@replayed
@given(st.binary(max_size=200), BATCH)
def test_any_bytes_are_understood_or_refused(held: bytes, batch: Any) -> None:
    survives(pa.py_buffer(held), batch)
    survives(metadata(held), batch)


@replayed
@given(TREE | st.fixed_dictionaries({"asks": TREE}), st.binary(max_size=64))
def test_any_head_is_understood_or_refused(head: Any, blobs: bytes) -> None:
    survives(metadata(head, blobs), None)


@replayed
@given(ITEMS, st.binary(max_size=64), BATCH)
def test_what_is_wrong_with_an_ask_is_the_answer_to_that_one(
    items: Any, blobs: bytes, batch: Any
) -> None:
    found = decode_asks(metadata({"asks": items}, blobs), batch).asks
    assert all(isinstance(ask.command, c.Command | InvalidArgumentError) for ask in found)
    assert len(found) == len(items)


@replayed
@given(ITEMS, st.binary(max_size=64), BATCH)
def test_any_reply_is_understood_or_refused(items: Any, blobs: bytes, batch: Any) -> None:
    survives(metadata({"replies": items}, blobs), batch)


@replayed
@given(ANY_COMMAND, st.integers(0), st.binary(min_size=1, max_size=3))
def test_a_damaged_frame_is_understood_or_refused(
    command: c.Command[Any], at: int, damage: bytes
) -> None:
    frame = encode_asks([(1, with_columns(command))])
    held = bytearray(frame.metadata)
    at %= len(held)
    held[at : at + len(damage)] = damage
    survives(pa.py_buffer(bytes(held)), frame.batch)
    survives(pa.py_buffer(bytes(held[:at])), frame.batch)


@pytest.mark.parametrize(
    "item",
    [
        {"$": "error"},
        {"$": "error", "code": [], "text": "", "facts": {}},
        {"$": "error", "code": "x", "text": "", "facts": 5},
        {"$": "SendReceipt", "sequence_numbers": [[1], [1, 2]]},
    ],
)
def test_a_reply_that_lacks_its_parts_is_refused(item: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        decode_replies(metadata({"replies": [[1, item, 0]]}), None)


@pytest.mark.parametrize("rows", [1, 2**40, 2**70])
def test_a_reply_with_more_rows_than_messages_is_understood_or_refused(rows: int) -> None:
    survives(metadata({"replies": [[1, {"$": "deliveries"}, rows]] * 2}), delivered([]))


@pytest.mark.parametrize("depth", [100, 600, 900, 100_000])
def test_a_deep_head_is_understood_or_refused(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    survives(metadata(b'{"asks":[[1,' + nested + b',0]],"replies":[[1,' + nested + b",0]]}"), None)


@pytest.mark.parametrize("held", [None, b"", b"abc", struct.pack("<I", 1), metadata([])])
def test_a_frame_without_a_head_is_refused(held: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        decode_asks(held, None)


def test_a_head_that_is_too_long_is_refused_unread() -> None:
    held = struct.pack("<I", MAX_HEAD_BYTES + 1) + b" " * (MAX_HEAD_BYTES + 1)
    with pytest.raises(InvalidArgumentError, match="does not fit"):
        decode_asks(pa.py_buffer(held), None)


def test_one_bad_ask_leaves_the_others_of_its_frame_alone() -> None:
    send = with_columns(c.Send("orders", [BrokeredMessage(b"tea")]))
    frame = encode_asks([(1, send), (2, send)])
    broken = frame.metadata.replace(b'"orders"', b"12345678", 1)
    first, second = decode_asks(pa.py_buffer(broken), frame.batch).asks
    assert isinstance(first.command, InvalidArgumentError)
    assert told(second.command) == told(send)


def test_a_send_that_promises_more_messages_than_it_brings_is_refused() -> None:
    head = {"asks": [[1, {"$": "Send", "path": "orders"}, 3]]}
    (ask,) = decode_asks(metadata(head), to_batch([BrokeredMessage()])).asks
    assert isinstance(ask.command, InvalidArgumentError)
    assert "fewer messages" in ask.command.text


def test_a_kind_of_a_newer_version_is_refused_by_name() -> None:
    (ask,) = decode_asks(metadata({"asks": [[1, {"$": "Teleport"}, 0]]}), None).asks
    assert isinstance(ask.command, InvalidArgumentError)
    assert "Teleport" in ask.command.text


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
    (ask,) = decode_asks(metadata({"asks": [[1, plain, 0]]}), None).asks
    assert isinstance(ask.command, InvalidArgumentError)  # else the broker fails and restarts


def test_no_code_can_be_named() -> None:
    head = {"asks": [[1, {"$": "system", "value": "true"}, 0]]}
    (ask,) = decode_asks(metadata(head), None).asks
    assert isinstance(ask.command, InvalidArgumentError)


def test_a_moment_arrives_to_the_microsecond() -> None:
    last = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    assert replied(last) == [last]
