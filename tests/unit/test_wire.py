"""What travels between client and server comes back equal."""

from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.properties import replayed
from tests.unit.wire_values import (
    ANY_COMMAND,
    COMMAND,
    ENTITY,
    FEW,
    KEY,
    LOCK,
    MESSAGES,
    MOMENT,
    NAME,
    NUMBER,
    NUMBERS,
    PATH,
    PRINTED,
    RULE,
    SPAN,
    as_columns,
    cut,
    reply_of,
    sent,
)
from twinbus.entities import RuntimeProperties
from twinbus.errors import InvalidArgumentError, MessagingError, error_of
from twinbus.limits import ROWS_AS_ROWS
from twinbus.message import DELIVERY_SCHEMA, MESSAGE_SCHEMA, BrokeredMessage, to_batch
from twinbus.protocol import commands as c
from twinbus.protocol.frames import FrameKind, FrameReader, frame
from twinbus.protocol.meter import METER_SCHEMA
from twinbus.protocol.rows import decode_rows, encode_rows
from twinbus.protocol.table import ROWS
from twinbus.protocol.wire import (
    decode_command,
    encode_ask,
    encode_reply,
)

briefly = settings(replayed, max_examples=15)


VALUE = st.none() | st.booleans() | NUMBER | PATH | st.binary(max_size=9) | SPAN | MOMENT
FACTS = st.dictionaries(
    NAME.filter(lambda n: n not in ("self", "text")), VALUE | st.uuids(), max_size=4
)


def delivered(messages: list[BrokeredMessage]) -> pa.RecordBatch:
    """Return messages with the columns a broker adds."""
    sent = to_batch(messages)
    added = list(DELIVERY_SCHEMA)[len(MESSAGE_SCHEMA) :]
    columns = [*sent.columns, *(pa.nulls(len(messages), field.type) for field in added)]
    return pa.RecordBatch.from_arrays(columns, schema=DELIVERY_SCHEMA)


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


def asked(*commands: c.Command[Any]) -> list[Any]:
    """Send commands over the wire; return what arrives."""
    arrived = cut(b"".join(sent(command, number) for number, command in enumerate(commands, 1)))
    assert [head[1] for head, _ in arrived] == list(range(1, len(commands) + 1))
    return [comparable(as_columns(decode_command(*item))) for item in arrived]


def replied(*values: Any) -> list[Any]:
    """Send replies over the wire; return what arrives."""
    stream = b"".join(b"".join(encode_reply(at, value)) for at, value in enumerate(values, 1))
    return [comparable(reply_of(*item)) for item in FrameReader().feed(stream)]


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
    with pytest.raises(InvalidArgumentError, match="has no command"):
        encode_ask(1, c.Command())


def test_a_command_that_no_server_would_read_is_refused_before_it_travels() -> None:
    parts = [c.DeadLetterPart([number], "x" * 4000) for number in range(300)]
    with pytest.raises(InvalidArgumentError, match="Use several"):
        encode_ask(1, c.SettleRange("orders", 1, dead_lettered=parts))


def test_a_moment_arrives_to_the_microsecond() -> None:
    last = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    assert replied(last) == [last]
