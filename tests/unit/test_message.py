"""Messages: what goes into a batch comes out of it, and sizes follow the documented rule."""

import os
import struct
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_ID_CHARACTERS, MAX_PROPERTY_NAME_CHARACTERS, NEVER_US
from twinbus.message import (
    BOUNDED_TEXTS,
    DELIVERY_SCHEMA,
    MESSAGE_SCHEMA,
    TEXT_COLUMNS,
    BrokeredMessage,
    PropertyValue,
    check_values,
    columns_in_use,
    conform,
    ping_rows,
    sizes,
    to_batch,
    to_messages,
)

LARGEST, SMALLEST = 2**63 - 1, -(2**63)
NEVER = timedelta(microseconds=NEVER_US)
WESTWARD = timezone(timedelta(hours=-12))
EASTWARD = timezone(timedelta(hours=14))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
moments = st.datetimes(
    min_value=datetime(2, 1, 1),  # noqa: DTZ001 - the time zone is drawn with it
    max_value=datetime(9998, 1, 1),  # noqa: DTZ001
    timezones=st.sampled_from([UTC, WESTWARD, EASTWARD]),
)
spans = st.timedeltas(-NEVER, NEVER - timedelta(microseconds=1))
property_values: st.SearchStrategy[PropertyValue] = st.one_of(
    texts,
    st.integers(SMALLEST, LARGEST),
    st.floats(),
    st.booleans(),
    st.binary(max_size=20),
    moments,
    spans,
    st.uuids(),
)
bags = st.dictionaries(texts.filter(bool), property_values, max_size=4)
messages = st.builds(
    BrokeredMessage,
    body=st.binary(max_size=50),
    message_id=texts,
    **{name: st.none() | texts for name in TEXT_COLUMNS if name != "message_id"},
    time_to_live=st.none()
    | st.timedeltas(timedelta(microseconds=1), NEVER - timedelta(microseconds=1)),
    scheduled_enqueue_time_utc=st.none() | moments,
    application_properties=bags,
    amqp=st.none() | st.binary(max_size=20),
)
batches = st.lists(messages, min_size=1, max_size=5)


def exactly(value: Any) -> Any:
    """Return something that is equal only for the same type and the same bits."""
    if isinstance(value, float):
        return (float, struct.pack("<d", value) if value == value else "nan")  # noqa: PLR0124
    return (type(value), value)


def plain(message: BrokeredMessage) -> dict[str, Any]:
    """Return a message's fields so that equality is exact."""
    found = {f.name: exactly(getattr(message, f.name)) for f in fields(message)}
    bag = message.application_properties
    return found | {"application_properties": {name: exactly(v) for name, v in bag.items()}}


def expected_size(message: BrokeredMessage) -> int:
    """Return the size of a message by the rule in the docs of its module."""
    total = len(message.body) + len(message.amqp or b"")
    total += sum(len((getattr(message, name) or "").encode()) for name in TEXT_COLUMNS)
    total += 8 * (message.time_to_live is not None)
    total += 8 * (message.scheduled_enqueue_time_utc is not None)
    for name, value in message.application_properties.items():
        total += len(name.encode())
        if isinstance(value, str | bytes):
            total += len(value.encode() if isinstance(value, str) else value)
        else:
            total += {bool: 1, UUID: 16}.get(type(value), 8)
    return total


def with_property(value: Any) -> BrokeredMessage:
    return BrokeredMessage(application_properties={"name": value})


def after_the_round_trip(message: BrokeredMessage) -> BrokeredMessage:
    [found] = to_messages(to_batch([message]))
    return found


# -- the round trip ----------------------------------------------------------------------------


@replayed
@given(batches)
def test_messages_come_out_of_a_batch_as_they_went_in(sent: list[BrokeredMessage]) -> None:
    assert [plain(m) for m in to_messages(to_batch(sent))] == [plain(m) for m in sent]


@replayed
@given(batches, st.data())
def test_a_slice_of_a_batch_holds_the_messages_of_the_slice(
    sent: list[BrokeredMessage], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(sent)))
    count = data.draw(st.integers(0, len(sent)))
    found = to_messages(to_batch(sent).slice(start, count))
    assert [plain(m) for m in found] == [plain(m) for m in sent[start : start + count]]


@pytest.mark.parametrize(
    "value",
    [
        "",
        "grüße 🎈 \x00",
        0,
        LARGEST,
        SMALLEST,
        0.0,
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        5e-324,
        True,
        False,
        b"",
        b"\x00\xff",
        datetime.max.replace(tzinfo=UTC),
        datetime.min.replace(tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        timedelta(microseconds=-1),
        timedelta(microseconds=LARGEST),
        timedelta(microseconds=-LARGEST),
        UUID(int=0),
        UUID(int=2**128 - 1),
    ],
)
def test_a_property_at_the_edge_of_its_type_keeps_its_value_and_type(value: PropertyValue) -> None:
    found = after_the_round_trip(with_property(value)).application_properties
    assert exactly(found["name"]) == exactly(value)


@pytest.mark.parametrize("moment", [datetime.max, datetime.min])  # noqa: DTZ901
@pytest.mark.parametrize("zone", [WESTWARD, EASTWARD])
def test_a_moment_that_no_receiver_could_show_is_refused_or_kept(
    moment: datetime, zone: timezone
) -> None:
    aware = moment.replace(tzinfo=zone)
    for fields_ in (
        {"application_properties": {"at": aware}},
        {"scheduled_enqueue_time_utc": aware},
    ):
        try:
            batch = to_batch([BrokeredMessage(**fields_)])
        except InvalidArgumentError:
            continue
        to_messages(batch)


def test_a_time_to_live_without_end_stays_without_end() -> None:
    sent = BrokeredMessage(time_to_live=timedelta.max)
    assert after_the_round_trip(sent).time_to_live == timedelta.max


def test_properties_of_one_name_may_differ_in_type_between_messages() -> None:
    sent = [with_property(value) for value in (1, "1", 1.0, True, b"1", None) if value is not None]
    found = [m.application_properties["name"] for m in to_messages(to_batch(sent))]
    assert [type(value) for value in found] == [int, str, float, bool, bytes]


def test_fields_that_only_the_broker_sets_are_not_copied() -> None:
    sent = BrokeredMessage(body=b"x", sequence_number=7, dead_letter_reason="old")
    assert after_the_round_trip(sent) == replace(
        sent, sequence_number=None, dead_letter_reason=None
    )


def test_a_message_gets_an_id_of_its_own() -> None:
    assert BrokeredMessage().message_id != BrokeredMessage().message_id


def test_no_messages_are_an_empty_batch() -> None:
    assert to_batch([]).schema == MESSAGE_SCHEMA
    assert to_messages(to_batch([])) == []
    assert len(sizes(to_batch([]))) == 0


# -- sizes -------------------------------------------------------------------------------------


@replayed
@given(batches, st.data())
def test_sizes_follow_the_documented_rule_on_any_slice(
    sent: list[BrokeredMessage], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(sent)))
    count = data.draw(st.integers(0, len(sent)))
    found = sizes(to_batch(sent).slice(start, count))
    assert found.tolist() == [expected_size(m) for m in sent[start : start + count]]


@replayed
@given(batches, batches)
def test_sizes_follow_the_rule_on_batches_put_together_and_taken_apart(
    first: list[BrokeredMessage], second: list[BrokeredMessage]
) -> None:
    batch = pa.concat_batches([to_batch(first), to_batch(second)])
    backwards = batch.take(pa.array(np.arange(batch.num_rows)[::-1]))
    assert sizes(backwards).tolist() == [expected_size(m) for m in reversed(first + second)]


@replayed
@given(messages)
def test_the_size_of_a_message_is_that_of_its_row(message: BrokeredMessage) -> None:
    assert message.size == expected_size(message)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"body": "text"}, "encode text first"),
        ({"body": bytearray(b"x")}, "body must be bytes"),
        ({"body": None}, "body must be bytes"),
        ({"subject": b"x"}, "subject must be text, not bytes"),
        ({"message_id": 7}, "message_id must be text, not int"),
        ({"scheduled_enqueue_time_utc": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001
        ({"scheduled_enqueue_time_utc": "tomorrow"}, "scheduled_enqueue_time_utc"),
        ({"time_to_live": 5}, "time_to_live"),
        ({"application_properties": {"n": None}}, "use one of"),
        ({"application_properties": {"n": [1]}}, "'n' is a list; use one of"),
        ({"application_properties": {"n": 2**63}}, "does not fit 64 bits"),
        ({"application_properties": {"n": -(2**63) - 1}}, "does not fit 64 bits"),
        ({"application_properties": {"n": timedelta.max}}, "does not fit 64 bits"),
        ({"application_properties": {"n": datetime(2030, 1, 1)}}, "time zone"),  # noqa: DTZ001
        ({"application_properties": {"": 1}}, "must be text of 1 to"),
        ({"application_properties": {7: 1}}, "must be text of 1 to"),
        (
            {"application_properties": {"n" * (MAX_PROPERTY_NAME_CHARACTERS + 1): 1}},
            "must be text of 1 to",
        ),
        ({"application_properties": ["n"]}, "application_properties"),
        ({"time_to_live": timedelta.min}, "time_to_live"),
    ],
)
def test_a_bad_value_is_refused_before_it_is_sent(settings: dict[str, Any], advice: str) -> None:
    with pytest.raises(InvalidArgumentError, match=advice):
        to_batch([BrokeredMessage(**settings)])


@pytest.mark.parametrize("name", BOUNDED_TEXTS)
def test_an_identifier_that_is_too_long_is_refused_with_the_limit(name: str) -> None:
    BrokeredMessage(**{name: "x" * MAX_ID_CHARACTERS})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=f"{name}.*limit is {MAX_ID_CHARACTERS}"):
        BrokeredMessage(**{name: "x" * (MAX_ID_CHARACTERS + 1)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"subject": "\ud800"},
        {"application_properties": {"name": "\ud800"}},
        {"application_properties": {"\ud800": 1}},
    ],
    ids=["half a character", "in a property", "in a name"],
)
def test_a_value_that_does_not_fit_its_column_is_refused_as_an_argument(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(InvalidArgumentError, match="surrogate"):
        BrokeredMessage(**fields)


# -- batches from elsewhere --------------------------------------------------------------------


@replayed
@given(batches)
def test_a_message_batch_conforms_as_it_is(sent: list[BrokeredMessage]) -> None:
    batch = to_batch(sent)
    assert conform(batch) is batch


def test_a_delivered_batch_conforms_without_what_the_broker_knew() -> None:
    batch = to_batch([BrokeredMessage(body=b"x", message_id="1")])
    extra = [pa.nulls(1, f.type) for f in list(DELIVERY_SCHEMA)[len(MESSAGE_SCHEMA) :]]
    delivered = pa.RecordBatch.from_arrays([*batch.columns, *extra], schema=DELIVERY_SCHEMA)
    assert conform(delivered).equals(batch)


def test_columns_of_kindred_types_in_any_order_conform() -> None:
    batch = to_batch([BrokeredMessage(body=b"x", message_id="1", subject="s")])
    columns = {name: batch.column(name) for name in reversed(MESSAGE_SCHEMA.names)}
    columns["subject"] = columns["subject"].cast(pa.large_string())
    columns["body"] = columns["body"].cast(pa.large_binary())
    found = conform(pa.RecordBatch.from_pydict(columns))
    assert found.schema == MESSAGE_SCHEMA
    assert to_messages(found) == to_messages(batch)


def test_a_batch_without_a_column_is_refused_by_its_name() -> None:
    batch = to_batch([BrokeredMessage()]).drop_columns(["subject"])
    with pytest.raises(InvalidArgumentError, match="subject"):
        conform(batch)


def test_a_column_of_another_type_is_refused() -> None:
    batch = to_batch([BrokeredMessage()])
    index = MESSAGE_SCHEMA.get_field_index("time_to_live")
    wrong = batch.set_column(index, "time_to_live", pa.array(["soon"]))
    with pytest.raises(InvalidArgumentError):
        conform(wrong)


def test_a_missing_body_is_refused() -> None:
    batch = to_batch([BrokeredMessage(), BrokeredMessage()])
    wrong = batch.set_column(0, pa.field("body", pa.binary()), pa.array([b"x", None]))
    with pytest.raises(InvalidArgumentError):
        conform(wrong)


@example(["application/vnd.ms-servicebus-ping", None])
@replayed
@given(
    st.lists(
        st.none() | st.sampled_from(["text/plain", "application/vnd.ms-servicebus-ping"]),
        min_size=1,
    )
)
def test_pings_are_known_by_their_content_type(kinds: list[str | None]) -> None:
    batch = to_batch([BrokeredMessage(content_type=kind) for kind in kinds])
    found = ping_rows(columns_in_use(batch))
    pings = [kind == "application/vnd.ms-servicebus-ping" for kind in kinds]
    assert (found is None and not any(pings)) or (found is not None and found.tolist() == pings)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # this is what is tested
def test_every_message_gets_an_id_of_its_own_also_after_a_fork() -> None:
    own = {BrokeredMessage().message_id for _ in range(1000)}
    assert len(own) == 1000
    assert all(len(message_id) == 32 for message_id in own)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, BrokeredMessage().message_id.encode())
        os._exit(0)
    os.waitpid(child, 0)
    of_child = os.read(reading, 100).decode()
    for end in (reading, writing):
        os.close(end)
    assert of_child not in {BrokeredMessage().message_id for _ in range(1000)}


def changed(batch: pa.RecordBatch, name: str, values: list[Any]) -> Mapping[str, pa.Array]:
    """Return the columns in use of a batch with other values in one column."""
    at = batch.schema.get_field_index(name)
    column = pa.array(values, batch.schema.field(at).type)
    return columns_in_use(batch.set_column(at, batch.schema.field(at), column))


def test_a_time_that_no_datetime_can_hold_is_named_with_its_message() -> None:
    columns = changed(to_batch([BrokeredMessage()] * 2), "scheduled_enqueue_time_utc", [0, 2**62])
    with pytest.raises(InvalidArgumentError) as refused:
        check_values(columns)
    assert str(refused.value).startswith(f"scheduled_enqueue_time_utc of message 1 is {2**62} µs")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"int": 1, "str": "one"}, "has 2 values"),
        ({}, "has 0 values"),
        (None, "has 0 values"),
        ({"datetime": 2**62}, f"is {2**62} µs from 1970"),
    ],
)
def test_a_property_with_a_bad_value_is_named_with_its_message(value: object, problem: str) -> None:
    bags = [[("a", {"int": 1}), ("b", {"int": 2})], [], [("c", {"int": 3}), ("d", value)]]
    columns = changed(to_batch([BrokeredMessage()] * 4), "properties", [[], *bags])
    with pytest.raises(InvalidArgumentError, match=f"property 'd' of message 3 {problem}"):
        check_values(columns)


def test_a_value_of_the_wrong_type_is_named_with_its_field_and_message() -> None:
    changed_later = BrokeredMessage()
    object.__setattr__(changed_later, "subject", 7)
    with pytest.raises(InvalidArgumentError, match="subject of message 1 is 7, which cannot"):
        to_batch([BrokeredMessage(), changed_later])
