"""The fast paths of reading and writing AMQP messages give the bytes of the general paths."""

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.amqp.values import UNICODE
from tests.unit.properties import replayed
from tests.unit.test_message import messages, moments
from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message
from twinbus.amqp.performatives import Header, Properties
from twinbus.amqp.types import Int, Symbol
from twinbus.errors import InvalidArgumentError
from twinbus.message import BrokeredMessage, MessageState
from twinbus.pairing.backlog import diverted_messages
from twinbus.protocol.commands import Origin
from twinbus.protocol.origins import sender_source
from twinbus.servicebus import encoding
from twinbus.servicebus.encoding import write_message
from twinbus.servicebus.messages import _read_plain, read_message

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


def read_either_way(payload: bytes) -> tuple[BrokeredMessage | None, BrokeredMessage | None]:
    """Return what the fast and the general path read; None for nothing, or for an error."""
    short = long = None
    try:
        short = _read_plain(payload)
    except InvalidArgumentError:
        with pytest.raises(InvalidArgumentError):
            read_message(AmqpMessage(payload))
        return None, None
    with suppress(AmqpError, InvalidArgumentError):
        long = read_message(AmqpMessage(payload))
    return short, long


@given(PAYLOADS, st.data())
@replayed
def test_a_message_is_read_the_same_either_way(payload: bytes, data: st.DataObject) -> None:
    short, long = read_either_way(payload)
    assert short is None or short == long
    at = data.draw(st.integers(0, min(len(payload), 60) - 1))
    spoilt = payload[:at] + data.draw(st.binary(max_size=2)) + payload[at + 1 :]
    short, long = read_either_way(spoilt)
    assert short is None or short == long


@pytest.mark.parametrize("size", [0, 10, 1024])
def test_the_simplest_message_of_an_sdk_has_a_short_way(size: int) -> None:
    sections = {SectionKind.PROPERTIES: Properties(message_id="1"), SectionKind.DATA: bytes(size)}
    assert _read_plain(encode_message(sections)) is not None


@pytest.mark.parametrize("excess", range(1, 5))
def test_an_id_that_goes_beyond_its_list_is_refused_either_way(excess: int) -> None:
    sections = {SectionKind.PROPERTIES: Properties(message_id="abc"), SectionKind.DATA: b"body"}
    payload = bytearray(encode_message(sections))
    payload[7] += excess  # the length of the id
    assert read_either_way(bytes(payload)) == (None, None)
