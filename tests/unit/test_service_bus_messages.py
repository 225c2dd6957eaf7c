"""A message of an SDK stays the same message: through native clients, a divert and the way home."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message, encode_section
from twinbus.amqp.performatives import Header, Properties
from twinbus.amqp.types import Described, Int, Symbol, Timestamp, ULong
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AMQP_ITEMS
from twinbus.message import BrokeredMessage, MessageState, to_batch, to_messages
from twinbus.pairing.backlog import diverted, diverted_messages, restored
from twinbus.servicebus.encoding import write_message, write_sent
from twinbus.servicebus.messages import (
    STORED_HEAD,
    BodyKind,
    check_sections,
    fingerprint,
    read_delivered,
    read_message,
)

SECTIONS = {
    SectionKind.HEADER: Header(durable=True, priority=7, ttl=60_000),
    SectionKind.MESSAGE_ANNOTATIONS: {Symbol("x-opt-partition-key"): "s", Symbol("own"): Int(3)},
    SectionKind.PROPERTIES: Properties(
        message_id=UUID(int=7), correlation_id=ULong(8), group_id="s", user_id=b"me", subject="a"
    ),
    SectionKind.APPLICATION_PROPERTIES: {"int": Int(5), "list": Symbol("a symbol"), "text": "b"},
    SectionKind.FOOTER: {Symbol("hash"): b"1"},
}
BODIES = {
    "data": (SectionKind.DATA, b"content"),
    "several": (SectionKind.DATA, (b"one", b"two")),
    "text": (SectionKind.VALUE, "content"),
    "value": (SectionKind.VALUE, {"a": Int(1)}),
    "sequence": (SectionKind.SEQUENCE, [1, "two"]),
}


def sent(body: str) -> BrokeredMessage:
    kind, content = BODIES[body]
    return read_message(AmqpMessage(encode_message({**SECTIONS, kind: content})))


def kept(message: BrokeredMessage) -> dict[SectionKind, bytes | None]:
    """Return what a receiver gets, but for what the broker itself writes."""
    found = AmqpMessage(b"".join(write_message(message)))
    beside = (SectionKind.PROPERTIES, SectionKind.APPLICATION_PROPERTIES, SectionKind.FOOTER)
    body = b"".join(found.spliced(dict.fromkeys((*beside, *_WRITTEN))))
    return {**{section: found.raw(section) for section in beside}, SectionKind.DATA: body}


_WRITTEN = (
    SectionKind.HEADER,
    SectionKind.DELIVERY_ANNOTATIONS,
    SectionKind.MESSAGE_ANNOTATIONS,
)


@pytest.mark.parametrize("body", BODIES)
def test_a_message_that_was_diverted_and_brought_home_is_still_the_same(body: str) -> None:
    before = sent(body)
    backlog = diverted(to_batch([before]), "orders")
    [after] = to_messages(restored(backlog).batch)
    assert after == before
    assert kept(after) == kept(before)


@pytest.mark.parametrize("body", BODIES)
def test_sections_are_delivered_byte_for_byte(body: str) -> None:
    kind, content = BODIES[body]
    complete = AmqpMessage(encode_message({**SECTIONS, kind: content}))
    delivered = kept(read_message(complete))
    for section in (SectionKind.PROPERTIES, SectionKind.APPLICATION_PROPERTIES, SectionKind.FOOTER):
        assert delivered[section] == complete.raw(section)


def test_the_aliases_of_a_diverted_message_have_the_types_that_dotnet_wrote() -> None:
    message = BrokeredMessage(
        b"a",
        session_id="s",
        time_to_live=timedelta(minutes=1),
        scheduled_enqueue_time_utc=datetime(2031, 2, 3, 4, 5, 6, 7_890, tzinfo=UTC),
    )
    [stored] = diverted_messages([message], "orders")
    aliases = AmqpMessage(write_sent(stored)).application_properties or {}
    assert aliases == {
        "x-ms-path": "orders",
        "x-ms-sessionid": "s",
        "x-ms-timetolive": Described(Symbol("com.microsoft:timespan"), 600_000_000),
        "x-ms-scheduledenqueuetimeutc": Timestamp(1_927_857_906_007),
    }
    assert type(aliases["x-ms-scheduledenqueuetimeutc"]) is Timestamp


def test_a_field_that_a_native_client_changed_wins_and_the_rest_keeps_its_types() -> None:
    changed = replace(sent("data"), subject="b", application_properties={"int": 5, "new": "c"})
    found = AmqpMessage(b"".join(write_message(changed)))
    properties = found.properties
    assert properties is not None
    assert (properties.subject, properties.message_id, properties.user_id) == (
        "b",
        UUID(int=7),
        b"me",
    )
    stored = found.application_properties or {}
    assert stored == {"int": 5, "new": "c"}
    assert type(stored["int"]) is Int


def test_a_changed_field_leaves_the_properties_that_native_messages_cannot_express() -> None:
    stored = {"none": None, "large": ULong(2**64 - 1), "int": Int(5), "gone": "x"}
    properties = {SectionKind.APPLICATION_PROPERTIES: stored, SectionKind.DATA: b"body"}
    message = read_message(AmqpMessage(encode_message(properties)))
    changed = replace(message, subject="b", application_properties={"int": 5, "new": "c"})
    found = AmqpMessage(b"".join(write_message(changed))).application_properties or {}
    assert found == {"none": None, "large": ULong(2**64 - 1), "int": Int(5), "new": "c"}
    assert (type(found["large"]), type(found["int"])) == (ULong, Int)


@pytest.mark.parametrize("spoilt", [b"", b"x", b"\xff" * 40])
def test_sections_that_are_none_do_no_harm(spoilt: bytes) -> None:
    message = BrokeredMessage(b"body", message_id="1", subject="a", amqp=spoilt)
    found = AmqpMessage(b"".join(write_message(message)))
    assert [bytes(data_section) for data_section in found.data_sections] == [b"body"]
    assert found.properties is not None
    assert found.properties.subject == "a"


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("given", [None, Properties(subject="a")], ids=["none", "others"])
def test_a_message_without_an_id_gets_one_that_receivers_see(
    body: str, given: Properties | None
) -> None:
    kind, content = BODIES[body]
    beside = {} if given is None else {SectionKind.PROPERTIES: given}
    message = read_message(AmqpMessage(encode_message({**beside, kind: content})))
    found = AmqpMessage(b"".join(write_message(message)))
    assert found.properties == replace(given or Properties(), message_id=message.message_id)
    assert AmqpMessage(b"".join(write_message(message))).properties == found.properties


def test_a_content_type_that_is_not_ascii_does_not_keep_a_message_from_amqp_receivers() -> None:
    native = BrokeredMessage(b"body", content_type="text/\u00fcber")
    found = AmqpMessage(b"".join(write_message(native))).properties
    assert found is not None
    assert found.content_type == "text/\\xfcber"
    with pytest.raises(InvalidArgumentError, match="content-type"):
        write_sent(native)  # an application that sends to Azure learns that Azure has no such type


SPOILT = {
    "header": b"\x00\x53\x70\xc0\x03\x01\xa1\x00",
    "delivery annotations": b"\x00\x53\x71\xc1\x04\x02\xa3\x50a",
    "properties": b"\x00\x53\x73\xc0\x03\x01\xa1\x50",
    "application properties": b"\x00\x53\x74\xc1\x04\x02\xa1\x50a",
    "footer": b"\x00\x53\x78\xc1\x04\x02\xa1\x50a",
}


@pytest.mark.parametrize("section", SPOILT)
def test_a_section_that_cannot_be_decoded_is_refused(section: str) -> None:
    data = encode_message({SectionKind.DATA: b"body"})
    with pytest.raises(AmqpError):
        read_message(AmqpMessage(SPOILT[section] + data))
    known = fingerprint(BrokeredMessage(b"body", message_id="1"))
    with pytest.raises(InvalidArgumentError, match="Send the message without it"):
        check_sections(STORED_HEAD.pack(BodyKind.DATA, known) + SPOILT[section])


@pytest.mark.parametrize("stored", [b"", bytes(9)[:8], b"\x07" + bytes(8)])
def test_stored_sections_without_their_head_are_refused(stored: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be decoded"):
        check_sections(stored)


def test_a_spoilt_header_that_a_log_has_does_not_keep_a_message_from_amqp_receivers() -> None:
    native = BrokeredMessage(b"body", message_id="1")
    stored = STORED_HEAD.pack(BodyKind.DATA, fingerprint(native)) + SPOILT["header"]
    found = AmqpMessage(b"".join(write_message(replace(native, amqp=stored))))
    assert found.properties is not None
    assert found.properties.message_id == "1"
    assert [bytes(data_section) for data_section in found.data_sections] == [b"body"]


def test_a_section_without_room_for_entries_of_the_broker_is_refused_and_not_delivered() -> None:
    crowded = encode_section(
        SectionKind.MESSAGE_ANNOTATIONS,
        {f"{number:04x}": None for number in range(MAX_AMQP_ITEMS // 2)},
    )
    native = BrokeredMessage(b"body", message_id="1")
    stored = STORED_HEAD.pack(BodyKind.DATA, fingerprint(native)) + crowded
    with pytest.raises(InvalidArgumentError, match="32768 entries"):
        check_sections(stored)
    delivered = replace(native, amqp=stored, sequence_number=1)  # an earlier release stored it
    found = AmqpMessage(b"".join(write_message(delivered)))
    assert found.message_annotations == {"x-opt-sequence-number": 1}
    assert [bytes(data_section) for data_section in found.data_sections] == [b"body"]


@pytest.mark.parametrize("state", [99, -1, "deferred", [1], b"", 1.5])
def test_a_sender_that_writes_a_state_does_not_keep_a_message_from_its_receivers(
    state: object,
) -> None:
    annotations = {Symbol("x-opt-message-state"): state}
    payload = encode_message({SectionKind.MESSAGE_ANNOTATIONS: annotations, SectionKind.DATA: b"a"})
    sent = replace(read_message(AmqpMessage(payload)), state=MessageState.ACTIVE)
    found = read_delivered(b"".join(write_message(sent)))
    assert (found.body, found.state) == (b"a", MessageState.ACTIVE)
