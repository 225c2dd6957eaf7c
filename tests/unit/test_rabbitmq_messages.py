"""A message survives the trip through AMQP 0-9-1 properties and headers."""

import json
import struct
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pika = pytest.importorskip("pika")

from twinbus.errors import InvalidArgumentError, MessageSizeExceededError  # noqa: E402
from twinbus.limits import RABBITMQ_MAX_EXPIRATION_MS, UNLIMITED  # noqa: E402
from twinbus.message import (  # noqa: E402
    LOCK_TOKEN,
    BrokeredMessage,
    application_values,
    property_child,
    to_messages,
)
from twinbus.namespace.rabbitmq import columns  # noqa: E402
from twinbus.namespace.rabbitmq.columns import Deliveries, delivered  # noqa: E402
from twinbus.namespace.rabbitmq.messages import (  # noqa: E402
    Publication,
    check_frame,
    dead_letter,
    published,
)

NOW_S = 1_800_000_000
FRAME_BYTES = 131_072


def publication(
    message: BrokeredMessage, *, origin: str | None = None, to_topic: bool = False
) -> Publication:
    values = application_values(message)
    return published(values, message.message_id, origin, NOW_S, to_topic=to_topic)


def encoded(found: Publication) -> bytes:
    """Return the properties as they travel."""
    return b"".join(
        (found.before, len(found.headers).to_bytes(4, "big"), found.headers, found.after)
    )


def sent(message: BrokeredMessage, **how: Any) -> Any:
    """Return what is published, as pika reads it from the bytes that travel."""
    decoded = pika.BasicProperties()
    decoded.decode(encoded(publication(message, **how)))
    return decoded


Delivery = tuple[bytes, bytes]  # properties and body


def delivery(found: bytes, body: bytes = b"") -> Delivery:
    return found, body


def received(*messages: Delivery) -> list[BrokeredMessage]:
    deliveries = Deliveries()
    for tag, (found, body) in enumerate(messages):
        deliveries.add(tag, found, body)
    return to_messages(delivered(deliveries, pa.nulls(len(deliveries), LOCK_TOKEN)))


def received_from(properties: Any) -> BrokeredMessage:
    """Return a message that another program has sent."""
    (found,) = received(delivery(b"".join(properties.encode())))
    return found


def round_trip(message: BrokeredMessage, **how: Any) -> BrokeredMessage:
    (found,) = received(delivery(encoded(publication(message, **how)), message.body))
    return found


_TEXT = st.text(st.characters(codec="utf-8"), max_size=300)
_VALUE = st.one_of(
    _TEXT,
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.binary(max_size=50),
    st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(fold=0)),
    st.timedeltas(timedelta(days=-36500), timedelta(days=36500)),
    st.uuids(),
)
_NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=50)


@given(st.dictionaries(_NAME, _VALUE, max_size=5))
def test_every_type_of_property_survives_the_round_trip(properties: dict[str, Any]) -> None:
    came = round_trip(BrokeredMessage(b"", application_properties=properties))
    assert repr(dict(came.application_properties)) == repr(properties)  # NaN equals itself there
    for name, value in came.application_properties.items():
        assert property_child(name, value) == property_child(name, properties[name])


@given(_TEXT, _TEXT, _TEXT, _TEXT, st.binary(max_size=50))
def test_every_field_survives_the_round_trip(
    subject: str, correlation: str, content_type: str, reply_to: str, body: bytes
) -> None:
    message = BrokeredMessage(
        body,
        message_id="m1",
        subject=subject,
        correlation_id=correlation,
        content_type=content_type,
        reply_to=reply_to,
        to="there",
        reply_to_session_id="s",
        partition_key="p",
        amqp=b"sections",
    )
    came = round_trip(message)
    for name in (
        "body",
        "message_id",
        "subject",
        "correlation_id",
        "content_type",
        "reply_to",
        "to",
        "reply_to_session_id",
        "partition_key",
        "amqp",
    ):
        assert getattr(came, name) == getattr(message, name), name


def test_other_programs_see_plain_values() -> None:
    properties = sent(
        BrokeredMessage(
            b"",
            message_id="m1",
            subject="created",
            application_properties={
                "text": "a",
                "count": 7,
                "ratio": 1.5,
                "on": True,
                "raw": b"\0",
                "when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
                "span": timedelta(seconds=90, milliseconds=500),
                "key": UUID(int=1),
            },
        ),
        origin="sender/0000000000000001:7",
    )
    types = properties.headers.pop("x-twinbus-types")
    assert properties.headers == {
        "text": "a",
        "count": 7,
        "ratio": "1.5",
        "on": True,
        "raw": b"\0",
        "when": "2026-01-02T03:04:05.000000+00:00",
        "span": "PT90.5S",
        "key": "00000000-0000-0000-0000-000000000001",
        "x-twinbus-origin": "sender/0000000000000001:7",
    }
    assert types == '{"ratio":"float","when":"datetime","span":"timedelta","key":"uuid"}'
    assert (properties.type, properties.delivery_mode, properties.timestamp) == (
        "created",
        2,
        NOW_S,
    )


def test_the_origin_comes_back_as_a_property() -> None:
    came = round_trip(BrokeredMessage(b""), origin="sender/0000000000000001:7")
    assert came.application_properties == {"x-twinbus-origin": "sender/0000000000000001:7"}


def test_a_time_to_live_is_the_expiration_in_milliseconds() -> None:
    message = BrokeredMessage(b"", time_to_live=timedelta(seconds=3))
    assert sent(message).expiration == "3000"
    came = round_trip(message)
    assert came.time_to_live == timedelta(seconds=3)
    assert came.expires_at_utc == datetime.fromtimestamp(NOW_S + 3, UTC)


@pytest.mark.parametrize(
    "life",
    [timedelta(microseconds=1), timedelta(milliseconds=RABBITMQ_MAX_EXPIRATION_MS + 1)],
)
def test_a_time_to_live_that_rabbitmq_cannot_express_comes_back_all_the_same(
    life: timedelta,
) -> None:
    assert round_trip(BrokeredMessage(b"", time_to_live=life)).time_to_live == life


def test_a_message_never_expires_before_its_time() -> None:
    assert sent(BrokeredMessage(b"", time_to_live=timedelta(microseconds=1))).expiration == "1"
    too_long = timedelta(milliseconds=RABBITMQ_MAX_EXPIRATION_MS + 1)
    assert sent(BrokeredMessage(b"", time_to_live=too_long)).expiration is None
    assert sent(BrokeredMessage(b"", time_to_live=UNLIMITED)).expiration is None


@pytest.mark.parametrize("name", ["CC", "bcc", "x-death", "x-delivery-count", "x-twinbus-types"])
def test_names_that_the_broker_acts_on_are_escaped(name: str) -> None:
    message = BrokeredMessage(b"", application_properties={name: "mine"})
    assert name not in sent(message).headers
    assert round_trip(message).application_properties == {name: "mine"}


def test_a_direct_reply_address_does_not_reach_the_broker_as_one() -> None:
    message = BrokeredMessage(b"", reply_to="amq.rabbitmq.reply-to")
    assert sent(message).reply_to is None
    assert round_trip(message).reply_to == "amq.rabbitmq.reply-to"


def test_a_subject_can_be_filtered_by_a_topic() -> None:
    message = BrokeredMessage(b"", subject="sport")
    assert sent(message, to_topic=True).headers == {"twinbus-subject": "sport"}
    assert round_trip(message, to_topic=True).application_properties == {}


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="shorter name"):
        sent(BrokeredMessage(b"", application_properties={"é" * 200: 1}))


def test_headers_that_fit_no_frame_are_refused() -> None:
    message = BrokeredMessage(b"", application_properties={"large": "x" * 200_000})
    with pytest.raises(MessageSizeExceededError, match="into the body"):
        check_frame(publication(message), 131_072)


def test_whatever_another_program_sent_can_be_received() -> None:
    properties = pika.BasicProperties(
        message_id="x" * 200,
        expiration="soon",
        timestamp=2**60,
        headers={
            "nested": {"a": [1, None]},
            "nothing": None,
            "": "no name",
            "x-twinbus-types": '{"when":"datetime"}',
            "when": "yesterday",
            "x-death": "not a list",
            "x-delivery-count": "many",
        },
    )
    came = received_from(properties)
    assert came.application_properties == {"nested": '{"a": [1, null]}', "when": "yesterday"}
    assert (came.time_to_live, came.enqueued_time_utc, came.delivery_count) == (None, None, 0)
    assert len(came.message_id) == 128


_KINDS = st.sampled_from(["float", "datetime", "timedelta", "uuid", "other", 7])
_TYPED = st.one_of(
    _TEXT,
    st.datetimes().map(datetime.isoformat),  # without a time zone
    st.sampled_from(["0001-01-01T00:00:00+14:00", "PT99999999999999S", "PT1e9S", "-PTS", "nan"]),
)


@given(st.dictionaries(_NAME, st.tuples(_KINDS, _TYPED), max_size=4))
def test_a_property_with_an_unfitting_type_is_received_as_text(
    properties: dict[str, tuple[object, str]],
) -> None:
    types = json.dumps({name: kind for name, (kind, _) in properties.items()})
    texts = {name: text for name, (_, text) in properties.items()}
    headers = {**texts, "x-twinbus-types": types}
    came = received_from(pika.BasicProperties(headers=headers))
    for name, value in came.application_properties.items():
        property_child(name, value)


def test_a_time_without_a_zone_is_received_as_text() -> None:
    headers = {"when": "2026-01-01T00:00:00", "x-twinbus-types": '{"when":"datetime"}'}
    came = received_from(pika.BasicProperties(headers=headers))
    assert came.application_properties == {"when": "2026-01-01T00:00:00"}


def test_a_death_that_the_broker_found_has_the_usual_reason() -> None:
    death = {"reason": "delivery_limit", "queue": "orders", "count": 1}
    came = received_from(pika.BasicProperties(headers={"x-death": [death]}))
    assert came.dead_letter_reason == "MaxDeliveryCountExceeded"
    assert came.dead_letter_source == "orders"


def test_messages_of_many_kinds_are_received_together() -> None:
    life = timedelta(seconds=3)
    plain = BrokeredMessage(b"plain", message_id="1")
    rich = BrokeredMessage(
        b"rich", message_id="2", subject="s", time_to_live=life, application_properties={"n": 7}
    )
    typed = BrokeredMessage(b"", message_id="3", application_properties={"n": "x", "f": 1.5})
    found = received(
        *(delivery(encoded(publication(sent)), sent.body) for sent in (plain, rich, plain, typed))
    )
    assert [message.body for message in found] == [b"plain", b"rich", b"plain", b""]
    assert [message.subject for message in found] == [None, "s", None, None]
    assert [message.time_to_live for message in found] == [None, life, None, None]
    assert [message.delivery_count for message in found] == [0, 0, 0, 0]
    bags = [message.application_properties for message in found]
    assert bags == [{}, {"n": 7}, {}, {"n": "x", "f": 1.5}]


def test_numbers_of_other_programs_keep_their_values() -> None:
    table = b"".join(
        (
            b"\x01f" + b"f" + struct.pack(">f", 1.5),
            b"\x01d" + b"d" + struct.pack(">d", -2.25),
            b"\x01b" + b"b" + struct.pack(">b", -1),
            b"\x01T" + b"T" + struct.pack(">Q", 60),
            b"\x01U" + b"T" + struct.pack(">Q", 2**60),  # beyond any datetime
        )
    )
    found = struct.pack(">HL", 0x2000, len(table)) + table
    (message,) = received(delivery(found))
    minute = datetime(1970, 1, 1, 0, 1, tzinfo=UTC)
    assert message.application_properties == {"f": 1.5, "d": -2.25, "b": -1, "T": minute}


def test_a_dead_letter_is_a_copy_with_its_reason_that_does_not_expire() -> None:
    message = BrokeredMessage(
        b"body",
        message_id="m1",
        content_type="text/plain",
        subject="s",
        time_to_live=timedelta(seconds=3),
        application_properties={"n": 7},
    )
    copied = encoded(publication(message)), message.body
    copy = dead_letter(*copied, "orders", "Why", "because", FRAME_BYTES)
    (found,) = received(delivery(encoded(copy), copy.body))
    assert found.application_properties == {"n": 7}
    assert (found.body, found.content_type, found.subject) == (b"body", "text/plain", "s")
    assert (found.dead_letter_reason, found.dead_letter_error_description) == ("Why", "because")
    assert (found.dead_letter_source, found.time_to_live) == ("orders", None)


def test_a_dead_letter_keeps_the_values_of_another_program() -> None:
    table = b"".join(
        (
            b"\x05price" + b"d" + struct.pack(">d", 1.5),
            b"\x03nan" + b"d" + struct.pack(">d", float("nan")),
            b"\x04when" + b"T" + struct.pack(">Q", 1_800_000_000_000),
            b"\x10x-delivery-count" + b"l" + struct.pack(">q", 3),
        )
    )
    copy = dead_letter(
        struct.pack(">HL", 0x2000, len(table)) + table, b"body", "orders", None, None, FRAME_BYTES
    )
    kept = table[: table.index(b"\x10x-delivery-count")]
    assert copy.headers.startswith(kept + b"\x1cx-twinbus-dead-letter-source")
    (found,) = received(delivery(encoded(copy), copy.body))
    assert (found.application_properties["price"], found.delivery_count) == (1.5, 0)


@pytest.mark.parametrize(
    ("frame_bytes", "expected"),
    [(600, ("Why", "because")), (450, ("Why", None)), (400, (None, None)), (128, (None, None))],
)
def test_a_dead_letter_has_as_much_of_its_cause_as_fits(
    frame_bytes: int, expected: tuple[str | None, str | None]
) -> None:
    headers = {
        "large": "x" * 200,
        "x-twinbus-dead-letter-reason": "Old",
        "x-twinbus-dead-letter-description": "old",
    }
    before = b"".join(pika.BasicProperties(headers=headers).encode())
    copy = dead_letter(before, b"body", "orders", "Why", "because", frame_bytes)
    (found,) = received(delivery(encoded(copy), copy.body))
    assert (found.dead_letter_reason, found.dead_letter_error_description) == expected
    assert found.dead_letter_source == "orders"


def test_the_reason_of_a_receiver_replaces_that_of_the_broker() -> None:
    death = {"reason": "expired", "queue": "orders", "count": 1}
    headers = {"x-twinbus-dead-letter-reason": "Mine", "x-death": [death]}
    found = received_from(pika.BasicProperties(headers=headers))
    assert (found.dead_letter_reason, found.dead_letter_source) == ("Mine", "orders")


_LIKE = st.builds(
    BrokeredMessage,
    st.binary(max_size=3),
    message_id=st.sampled_from(["a", "b", "é", "long id" * 18]),
    subject=st.sampled_from([None, "s", "t", "long"]),
    content_type=st.sampled_from([None, "x/y"]),
    to=st.sampled_from([None, "there"]),
    time_to_live=st.sampled_from([None, timedelta(seconds=3)]),
    application_properties=st.dictionaries(
        st.sampled_from(["n", "m", "CC"]),
        st.sampled_from([1, 2, 2**40, True, False, b"x", b"y", "t", "u", "é", "", 1.5]),
        max_size=2,
    ),
)


@given(st.lists(st.sampled_from(range(4)), max_size=60), st.lists(_LIKE, min_size=4, max_size=4))
def test_messages_that_are_read_together_equal_those_that_are_read_one_by_one(
    order: list[int], kinds: list[BrokeredMessage]
) -> None:
    deliveries = [
        delivery(encoded(publication(kinds[kind], origin=f"sender/{kind:016x}:{row}")))
        for row, kind in enumerate(order)
    ]
    alone = [found for each in deliveries for found in received(each)]
    assert received(*deliveries) == alone
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(columns, "RABBITMQ_ALIKE", 2)
        assert received(*deliveries) == alone


@pytest.mark.parametrize("at", [0, 7, 19])
def test_a_malformed_message_among_others_of_the_same_length_is_reported(at: int) -> None:
    good = encoded(publication(BrokeredMessage(b"", application_properties={"name": "value"})))
    damaged = good.replace(b"\x04name", b"\x05name")
    deliveries = [delivery(damaged if row == at else good) for row in range(20)]
    with pytest.raises(pika.exceptions.AMQPError):
        received(*deliveries)


def test_bytes_in_place_of_texts_do_not_disturb_the_messages_beside_them() -> None:
    good = encoded(publication(BrokeredMessage(b"", message_id="ab")))
    deliveries = [delivery(good)] * 20 + [delivery(good.replace(b"ab", b"\xff\xfe"))]
    assert [found.message_id for found in received(*deliveries)] == ["ab"] * 20 + [None]
