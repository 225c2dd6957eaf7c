"""The fast paths of reading and writing AMQP messages give the bytes of the general paths."""

import struct
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.amqp.values import SCALARS, UNICODE, VALUES
from tests.unit.properties import replayed, replayed_at_length
from tests.unit.test_message import exactly, messages, moments
from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.encoder import encode, write_compound
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message
from twinbus.amqp.performatives import Header, Properties
from twinbus.amqp.types import Described, Int, Symbol
from twinbus.errors import InvalidArgumentError
from twinbus.message import BrokeredMessage, MessageState
from twinbus.pairing.backlog import diverted_messages
from twinbus.protocol.commands import Origin
from twinbus.protocol.origins import sender_source
from twinbus.servicebus import encoding
from twinbus.servicebus.encoding import write_message, write_sent
from twinbus.servicebus.messages import (
    DATETIME_OFFSET,
    TIMESPAN,
    native_value,
    read_message,
)
from twinbus.servicebus.short_messages import _read_usual, read_messages

TEXT = st.text(UNICODE, max_size=5)
PLAIN_IDS = st.text(UNICODE, min_size=1, max_size=80)
IDS = st.none() | PLAIN_IDS | st.just("") | st.uuids() | st.binary(max_size=3)
BODIES = st.binary(max_size=20) | st.integers(250, 260).map(bytes)
SECTIONS = st.fixed_dictionaries(
    {SectionKind.DATA: BODIES | st.tuples(BODIES, BODIES)},
    optional={
        SectionKind.HEADER: st.builds(
            Header,
            durable=st.booleans(),
            ttl=st.none() | st.sampled_from([1, 60_000, 2**32 - 1]),
            delivery_count=st.integers(0, 3),
        ),
        SectionKind.DELIVERY_ANNOTATIONS: st.dictionaries(TEXT.map(str), TEXT, max_size=1).map(
            lambda found: {Symbol("way"): text for text in found.values()}
        ),
        SectionKind.MESSAGE_ANNOTATIONS: st.just({Symbol("own"): Int(3)}),
        SectionKind.PROPERTIES: st.builds(
            Properties,
            message_id=IDS,
            subject=st.none() | TEXT,
            creation_time=st.none() | st.integers(0, 2**40),
        ),
        SectionKind.APPLICATION_PROPERTIES: st.dictionaries(TEXT.filter(bool), TEXT, max_size=2),
        SectionKind.FOOTER: st.just({Symbol("hash"): b"1"}),
    },
)
PLAIN_SECTIONS = st.fixed_dictionaries(
    {
        SectionKind.PROPERTIES: PLAIN_IDS.map(lambda text: Properties(message_id=text)),
        SectionKind.DATA: BODIES,
    }
)
PAYLOADS = (SECTIONS | PLAIN_SECTIONS).map(encode_message)
SENT = PAYLOADS.map(lambda payload: read_message(AmqpMessage(payload)))
NATIVE = messages | st.builds(BrokeredMessage, body=BODIES, message_id=PLAIN_IDS)
SPOILT = st.builds(
    lambda message, amqp: replace(message, amqp=amqp),
    SENT,
    st.binary(max_size=12) | st.integers(0, 3).map(lambda kind: bytes([kind]) + bytes(9)),
)
CHANGED = st.builds(lambda message, text: replace(message, subject=text), SENT, TEXT)
FACTS: dict[str, st.SearchStrategy[Any]] = {
    "sequence_number": st.integers(1, 2**62) | st.integers(1, 300),
    "enqueued_time_utc": moments,
    "locked_until_utc": moments,
    "lock_token": st.uuids(),
    "delivery_count": st.none() | st.integers(0, 300),
    "state": st.none() | st.sampled_from(MessageState),
    "dead_letter_reason": st.none() | TEXT,
    "dead_letter_error_description": st.none() | TEXT,
    "dead_letter_source": st.none() | TEXT,
}
PLAIN_FACTS = FACTS | {
    "state": st.just(MessageState.ACTIVE),
    **{name: st.none() for name in FACTS if name.startswith("dead_letter")},
}
DELIVERED = st.builds(
    lambda message, facts: replace(message, **facts),
    SENT | NATIVE | SPOILT | CHANGED,
    st.fixed_dictionaries(PLAIN_FACTS) | st.fixed_dictionaries(FACTS),
)
USUAL: dict[str, Any] = {
    "sequence_number": 1,
    "enqueued_time_utc": datetime(2030, 1, 1, tzinfo=UTC),
    "locked_until_utc": datetime(2030, 1, 2, tzinfo=UTC),
    "lock_token": UUID(int=7),
    "state": MessageState.ACTIVE,
}


def long_way(message: BrokeredMessage) -> bytes:
    return b"".join(encoding._write_any(message, is_browsed=False, is_locked=True))


@given(DELIVERED)
@replayed
def test_a_delivery_has_the_same_bytes_either_way(message: BrokeredMessage) -> None:
    short = encoding._write_plain(message)
    assert short is None or b"".join(short) == long_way(message)


PROPERTIES = messages.map(lambda message: message.application_properties)
SIMPLE = st.builds(
    BrokeredMessage, body=BODIES, message_id=PLAIN_IDS, application_properties=PROPERTIES
)


@given(SIMPLE | NATIVE | SENT)
@replayed
def test_a_message_to_be_sent_has_the_same_bytes_either_way(message: BrokeredMessage) -> None:
    short = encoding._write_simple(message)
    if short is not None:
        assert short == encoding._write_sent(message)


def test_a_diverted_message_has_a_short_way() -> None:
    due = datetime(2030, 1, 1, microsecond=1, tzinfo=UTC)
    message = BrokeredMessage(b"a", session_id="s", scheduled_enqueue_time_utc=due)
    [stored] = diverted_messages([message], "orders", Origin(sender_source(7), [1]))
    assert encoding._write_simple(stored) == encoding._write_sent(stored)


@pytest.mark.parametrize(
    "message",
    [
        BrokeredMessage(b"native"),
        read_message(AmqpMessage(encode_message({SectionKind.DATA: b"of an SDK"}))),
    ],
    ids=["native", "SDK"],
)
def test_the_usual_delivery_has_a_short_way(message: BrokeredMessage) -> None:
    assert encoding._write_plain(replace(message, **USUAL)) is not None


@given(DELIVERED)
@replayed
def test_a_message_that_is_browsed_or_deleted_takes_the_long_way(message: BrokeredMessage) -> None:
    browsed = encoding._write_any(message, is_browsed=True, is_locked=True)
    assert write_message(message, is_browsed=True) == browsed
    deleted = encoding._write_any(message, is_browsed=False, is_locked=False)
    assert write_message(message, is_locked=False) == deleted


def result_of(read: Callable[[], BrokeredMessage | None]) -> Any:
    """Return the fields that were read, with their types and in order; or the error."""
    try:
        message = read()
    except (AmqpError, InvalidArgumentError) as error:
        return type(error), str(error)
    if message is None:
        return None
    values = {each.name: exactly(getattr(message, each.name)) for each in fields(message)}
    properties = message.application_properties
    return values | {"application_properties": [(k, exactly(v)) for k, v in properties.items()]}


def read_either_way(payload: bytes) -> tuple[Any, Any]:
    """Return what the fast path and the general path make of a message; the former may be None."""
    return (
        result_of(lambda: _read_usual(payload)),
        result_of(lambda: read_message(AmqpMessage(payload))),
    )


def encoded_map(parts: list[Any], count: int, width: int) -> bytes:
    """Return application properties that need not be valid; large ones if `width` is 4."""
    return written_map(b"".join(map(encode, parts)), count, width)


def written_map(content: bytes, count: int, width: int) -> bytes:
    head = struct.pack(">BII", 0xD1, len(content) + 4, count)
    if width == 1 and len(content) < 255:
        head = bytes((0xC1, len(content) + 1, count))
    return bytes((0x00, 0x53, SectionKind.APPLICATION_PROPERTIES)) + head + content


NAMES = st.sampled_from(["tenant", "tenant", "x-ms-path", "é", "", "n" * 300])
TIMES = st.sampled_from([TIMESPAN, DATETIME_OFFSET, Symbol("other")]).flatmap(
    lambda name: st.builds(Described, st.just(name), st.integers(-(2**63), 2**63 - 1))
)
ENTRIES = st.lists(
    st.tuples(TEXT | NAMES | st.just(Symbol("tenant")), SCALARS | TIMES | VALUES), max_size=4
).map(lambda pairs: [part for pair in pairs for part in pair])
NATIVE_ENTRIES = st.dictionaries(
    TEXT.filter(bool), SCALARS.filter(lambda value: value is not None) | TIMES, max_size=4
).map(lambda found: [part for pair in found.items() for part in pair])
APPLICATION = st.just(b"") | (NATIVE_ENTRIES | ENTRIES).flatmap(
    lambda parts: st.builds(
        encoded_map,
        st.just(parts),
        st.just(len(parts)) | st.integers(0, 9),
        st.sampled_from([1, 4]),
    )
)
HEADERS = st.just(b"") | st.builds(
    Header, durable=st.booleans(), ttl=st.none() | st.sampled_from([0, 1, 60_000, 2**32 - 1])
).map(Header.encode)
FIELDS = st.builds(
    Properties,
    message_id=PLAIN_IDS | IDS,
    user_id=st.none() | st.binary(max_size=3),
    **dict.fromkeys(
        ("to", "subject", "reply_to", "group_id", "reply_to_group_id", "correlation_id"),
        st.none() | TEXT | st.just("t" * 300),
    ),
    content_type=st.none() | st.just("text/plain"),
    content_encoding=st.none() | st.just("gzip"),
    **dict.fromkeys(("absolute_expiry_time", "creation_time"), st.none() | st.integers(0, 2**40)),
    group_sequence=st.none() | st.integers(0, 9),
).map(Properties.encode)
ID_ONLY = PLAIN_IDS.map(lambda text: Properties(message_id=text).encode())
DATA = BODIES.map(lambda body: encode_message({SectionKind.DATA: body}))
USUAL_FORM = st.tuples(HEADERS, ID_ONLY | FIELDS, APPLICATION, DATA).map(b"".join)


@given(PAYLOADS | USUAL_FORM, st.data())
@replayed_at_length
def test_a_message_is_read_the_same_either_way(payload: bytes, data: st.DataObject) -> None:
    short, long = read_either_way(payload)
    assert short is None or short == long
    for _ in range(4):
        at = data.draw(st.integers(0, min(len(payload), 120) - 1))
        other = st.integers(0, 255).map(lambda byte: bytes([byte])) | st.binary(max_size=2)
        spoilt = payload[:at] + data.draw(other) + payload[at + 1 :]
        short, long = read_either_way(spoilt)
        assert short is None or short == long


@given(USUAL_FORM)
@replayed
def test_a_message_that_ends_too_early_is_read_the_same_either_way(payload: bytes) -> None:
    for size in range(min(len(payload), 400)):
        short, long = read_either_way(payload[:size])
        assert short is None or short == long


@given(HEADERS, PLAIN_IDS, NATIVE_ENTRIES, DATA)
@replayed
def test_a_message_with_simple_properties_has_a_short_way(
    header: bytes, message_id: str, parts: list[Any], data: bytes
) -> None:
    properties = Properties(message_id=message_id, subject="created", group_id="a").encode()
    payload = header + properties + encoded_map(parts, len(parts), 1) + data
    is_native = all(native_value(value) is not None for value in parts[1::2])
    assert (_read_usual(payload) is not None) == is_native


def test_a_diverted_message_is_read_the_short_way() -> None:
    due = datetime(2030, 1, 1, tzinfo=UTC)
    life = timedelta(hours=1)
    message = BrokeredMessage(
        b"a", session_id="s", time_to_live=life, scheduled_enqueue_time_utc=due
    )
    [stored] = diverted_messages([message], "orders", Origin(sender_source(7), [1]))
    read = _read_usual(write_sent(stored))
    assert read is not None
    assert replace(read, amqp=None) == stored


@pytest.mark.parametrize("count", [65, 5000])
def test_a_message_with_many_properties_is_read_the_long_way(count: int) -> None:
    parts = [part for at in range(count) for part in (f"p{at}", at)]
    payload = Properties(message_id="1").encode() + encoded_map(parts, len(parts), 4)
    payload += encode_message({SectionKind.DATA: b""})
    assert _read_usual(payload) is None
    [message] = read_messages([payload])
    assert len(message.application_properties) == count


EMPTY = encode_message({SectionKind.DATA: b""})
ID = Properties(message_id="1").encode()


def listed(*values: bytes) -> bytes:
    """Return properties with these encoded values, which need not be valid."""
    return bytes((0x00, 0x53, SectionKind.PROPERTIES)) + write_compound(
        0xC0, len(values), b"".join(values)
    )


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        (ID + encoded_map(["a", 1, "a", 2], 4, 1), "two equal keys"),
        (ID + encoded_map(["a", 1], 4, 1), "beyond the end of its list"),
        (ID + encoded_map(["a", 1, "b"], 3, 1), "no value"),
        (ID + written_map(encode("a") + b"\xa1\x03", 2, 1), "beyond the end of its list"),
        (ID + encoded_map([], 0, 1)[:-2] + b"\x00", "too small"),
        (listed(encode("1"), encode("user")), "user-id of properties must be a binary"),
        (listed(encode("1"), *[b"\x40"] * 5, b"\xa3\x02\xc3\xa9"), "not valid ascii"),
        (listed(encode("1"), *[b"\x40"] * 5, encode("type")), "content-type of properties must be"),
        (listed(encode("1"), *[b"\x40"] * 13), "has 14 fields"),
        (listed(encode("1"), b"\xa1\x01\xff"), "user-id of properties must be a binary"),
        (listed(encode("1"), b"\x40", b"\xa1\x01\xff"), "not valid utf-8"),
        (listed(b"\xa1\x01\xff"), "not valid utf-8"),
        (ID + ID, "occurs twice"),
    ],
)
def test_an_invalid_message_has_the_same_error_either_way(sections: bytes, error: str) -> None:
    short, long = read_either_way(sections + EMPTY)
    assert short is None
    assert long[0] is AmqpError
    assert error in long[1]


@pytest.mark.parametrize(
    "sections",
    [
        listed(encode("")),
        listed(b"\x40", b"\x40", encode("to")),
        ID + encoded_map(["a", b"1" * 9000], 2, 4),
        ID + encoded_map(["a", None], 2, 1),
        ID + encoded_map([Symbol("a"), 1], 2, 1),
        ID + encoded_map(["a", [1]], 2, 1),
    ],
    ids=["empty id", "no id", "large property", "null", "symbol", "list"],
)
def test_an_unusual_message_takes_the_long_way(sections: bytes) -> None:
    short, long = read_either_way(sections + EMPTY)
    assert short is None
    assert isinstance(long, dict)


def test_every_property_with_a_native_field_has_a_short_way() -> None:
    properties = Properties(
        message_id="1",
        to="a",
        subject="b",
        reply_to="c",
        correlation_id="d",
        content_type="e",
        absolute_expiry_time=1,
        creation_time=0,
        group_id="f",
        reply_to_group_id="g",
    ).encode()
    short, long = read_either_way(Header(ttl=1).encode() + properties + EMPTY)
    assert short == long
    assert isinstance(short, dict)


@pytest.mark.parametrize("size", [0, 10, 1024])
def test_the_simplest_message_of_an_sdk_has_a_short_way(size: int) -> None:
    sections = {SectionKind.PROPERTIES: Properties(message_id="1"), SectionKind.DATA: bytes(size)}
    assert _read_usual(encode_message(sections)) is not None


@pytest.mark.parametrize("excess", range(1, 5))
def test_an_id_that_goes_beyond_its_list_is_refused_either_way(excess: int) -> None:
    sections = {SectionKind.PROPERTIES: Properties(message_id="abc"), SectionKind.DATA: b"body"}
    payload = bytearray(encode_message(sections))
    payload[7] += excess  # the length of the id
    short, long = read_either_way(bytes(payload))
    assert short is None
    assert long[0] is AmqpError
