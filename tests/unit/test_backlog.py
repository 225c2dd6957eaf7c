"""Messages of the backlog: what is diverted comes home as it was, and poison is recognised."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed, replayed_at_length
from tests.unit.test_message import batches as any_batches
from tests.unit.test_message import exactly, plain
from twinbus.entities import QueueDescription, backlog_queue_path
from twinbus.errors import InvalidArgumentError, MessageSizeExceededError
from twinbus.limits import MAX_MESSAGE_BYTES, UNLIMITED
from twinbus.message import MESSAGE_SCHEMA, BrokeredMessage, sizes, to_batch, to_messages
from twinbus.pairing.backlog import ALIASES as RESERVED
from twinbus.pairing.backlog import (
    check_divertible,
    diverted,
    diverted_messages,
    number_in_backlog,
    place_in_backlog,
    restored,
    to_backlog,
)
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import Origin
from twinbus.protocol.rows import encode_rows

PATH, SESSION = "x-ms-path", "x-ms-sessionid"
LIFE, SCHEDULE = "x-ms-timetolive", "x-ms-scheduledenqueuetimeutc"
ALIASES = (PATH, SESSION, LIFE, SCHEDULE)
ORIGIN = Origin("sender/00000000000000ff", [7])
LATER = datetime(2031, 1, 1, tzinfo=UTC)
paths = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
origins = st.sampled_from([None, "sender/00000000000000ff"])
batches = any_batches.filter(  # a reserved name is refused, and Hypothesis reads them in the source
    lambda sent: (
        not any(RESERVED.keys() & message.application_properties.keys() for message in sent)
    )
)


def identified(**fields: Any) -> BrokeredMessage:
    return BrokeredMessage(message_id="id", **fields)


def as_diverted(message: BrokeredMessage, origin: Origin | None = None) -> BrokeredMessage:
    """Return a message as a backlog queue holds it."""
    (found,) = to_messages(diverted(to_batch([message]), "orders", origin))
    return found


def as_bytes(messages: list[BrokeredMessage]) -> bytes:
    """Return messages as they travel and as a log stores them."""
    rows, bodies = encode_rows(messages)
    return msgspec.msgpack.encode(rows) + b"".join(bodies)


def origin_of(source: str | None, first: int, count: int) -> Origin | None:
    return Origin(source, range(first, first + count)) if source else None


# -- queues ----------------------------------------------------------------------------------------


def test_a_backlog_queue_is_named_after_the_primary_and_its_index() -> None:
    assert backlog_queue_path("contoso", 0) == "contoso/x-servicebus-transfer/0"
    assert backlog_queue_path("contoso", 17) == "contoso/x-servicebus-transfer/17"


def test_a_backlog_queue_is_described_as_the_specification_says() -> None:
    assert describe_backlog_queue(PrimaryIdentity("contoso"), 3) == QueueDescription(
        path="contoso/x-servicebus-transfer/3",
        max_size_in_megabytes=5120,
        max_delivery_count=2147483647,
        default_message_time_to_live=UNLIMITED,
        auto_delete_on_idle=UNLIMITED,
        lock_duration=timedelta(minutes=1),
        enable_dead_lettering_on_message_expiration=True,
        enable_batched_operations=True,
        user_metadata="twinbus-primary Name=contoso",
    )


@replayed
@given(st.integers(0, 999), st.integers(1, 2**50 - 1))
def test_a_number_that_cancels_leads_back_to_its_place(index: int, sequence: int) -> None:
    number = number_in_backlog(index, sequence)
    assert -(2**63) <= number < 0
    assert place_in_backlog(number) == (index, sequence)


# -- diverted --------------------------------------------------------------------------------------


def test_what_a_backlog_queue_must_not_act_on_becomes_properties_of_their_types() -> None:
    found = as_diverted(
        identified(
            session_id="s",
            time_to_live=timedelta(minutes=1),
            scheduled_enqueue_time_utc=LATER,
            application_properties={"own": 1},
        )
    )
    expected = {
        "own": 1,
        SESSION: "s",
        LIFE: timedelta(minutes=1),
        SCHEDULE: LATER,
        PATH: "orders",
    }
    properties = found.application_properties
    assert {name: exactly(value) for name, value in properties.items()} == {
        name: exactly(value) for name, value in expected.items()
    }


@replayed_at_length
@given(batches, paths, origins)
def test_the_originals_are_cleared_and_everything_else_stays(
    sent: list[BrokeredMessage], path: str, source: str | None
) -> None:
    batch = diverted(to_batch(sent), path, origin_of(source, 5, len(sent)))
    assert batch.schema == MESSAGE_SCHEMA
    for before, after in zip(sent, to_messages(batch), strict=True):
        assert (after.session_id, after.time_to_live) == (None, None)
        assert after.scheduled_enqueue_time_utc is None
        changed = {"session_id", "time_to_live", "scheduled_enqueue_time_utc"}
        kept = {name for name in plain(before) if name not in changed | {"application_properties"}}
        assert {n: plain(after)[n] for n in kept} == {n: plain(before)[n] for n in kept}
        own = plain(after)["application_properties"]
        assert own.items() >= plain(before)["application_properties"].items()


@replayed_at_length
@given(batches, paths)
def test_a_message_that_was_not_tried_gets_aliases_of_what_it_had_and_no_more(
    sent: list[BrokeredMessage], path: str
) -> None:
    for before, after in zip(sent, to_messages(diverted(to_batch(sent), path)), strict=True):
        expected = {PATH}
        expected |= {SESSION} if before.session_id is not None else set()
        expected |= {LIFE} if before.time_to_live is not None else set()
        expected |= {SCHEDULE} if before.scheduled_enqueue_time_utc is not None else set()
        added = set(after.application_properties) - set(before.application_properties)
        assert added == expected


@replayed_at_length
@given(batches, paths, origins)
def test_message_objects_and_columns_are_diverted_to_the_same_bytes(
    sent: list[BrokeredMessage], path: str, source: str | None
) -> None:
    origin = origin_of(source, 5, len(sent))
    of_objects = diverted_messages(sent, path, origin)
    of_columns = to_messages(diverted(to_batch(sent), path, origin))
    assert as_bytes(of_objects) == as_bytes(of_columns)
    assert sizes(of_objects).tolist() == sizes(to_batch(of_columns)).tolist()


@pytest.mark.parametrize("life", [timedelta.max, timedelta(microseconds=1)])
def test_the_ends_of_a_life_are_diverted_to_the_same_bytes(life: timedelta) -> None:
    sent = [identified(time_to_live=life)]
    found = to_messages(diverted(to_batch(sent), "orders"))
    assert as_bytes(diverted_messages(sent, "orders")) == as_bytes(found)


@pytest.mark.parametrize(("count", "is_columns"), [(0, False), (16, False), (17, True)])
def test_a_few_objects_stay_objects_and_more_become_columns(count: int, is_columns: bool) -> None:
    sent = [identified() for _ in range(count)]
    assert isinstance(to_backlog(sent, "orders"), pa.RecordBatch) is is_columns
    assert isinstance(to_backlog(to_batch(sent), "orders"), pa.RecordBatch)


@pytest.mark.parametrize("name", RESERVED)
def test_a_message_object_that_has_a_reserved_property_is_refused(name: str) -> None:
    sent = [identified(), identified(application_properties={"own": 1, name: "mine"})]
    with pytest.raises(InvalidArgumentError, match=f"message 1 .*{name}"):
        diverted_messages(sent, "orders")


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("at", [0, 2])
def test_a_message_that_has_such_a_property_already_is_refused(name: str, at: int) -> None:
    sent = [identified(application_properties={"own": 1}) for _ in range(3)]
    sent[at] = identified(application_properties={"own": 1, name: "mine"})
    with pytest.raises(InvalidArgumentError, match=f"message {at} .*{name}"):
        diverted(to_batch(sent), "orders")


def test_no_messages_are_diverted_to_none() -> None:
    assert diverted(to_batch([]), "orders").num_rows == 0
    assert restored(diverted(to_batch([]), "orders")).batch.num_rows == 0


@pytest.mark.parametrize("count", [1, 16, 17, 1000])
def test_batches_of_any_length_are_diverted_alike(count: int) -> None:
    sent = [BrokeredMessage(str(number).encode()) for number in range(count)]
    found = to_messages(diverted(to_batch(sent), "orders"))
    assert [m.body for m in found] == [m.body for m in sent]
    assert all(m.application_properties == {PATH: "orders"} for m in found)


# -- and back --------------------------------------------------------------------------------------


@replayed_at_length
@given(batches, paths, origins)
def test_a_diverted_message_comes_back_with_every_field_and_type(
    sent: list[BrokeredMessage], path: str, source: str | None
) -> None:
    home = restored(diverted(to_batch(sent), path, origin_of(source, 5, len(sent))))
    assert home.batch.schema == MESSAGE_SCHEMA
    assert [plain(m) for m in to_messages(home.batch)] == [plain(m) for m in sent]
    assert home.paths.to_pylist() == [path] * len(sent)
    assert home.senders.to_pylist() == [source] * len(sent)
    numbers = list(range(5, 5 + len(sent))) if source else [None] * len(sent)
    assert home.numbers.to_pylist() == numbers
    assert home.faults == {}


@replayed
@given(batches, paths, st.data())
def test_a_slice_comes_back_as_that_slice(
    sent: list[BrokeredMessage], path: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(sent)))
    count = data.draw(st.integers(0, len(sent) - start))
    expected = [plain(m) for m in sent[start : start + count]]
    of_original = restored(diverted(to_batch(sent).slice(start, count), path))
    of_diverted = restored(diverted(to_batch(sent), path).slice(start, count))
    for home in (of_original, of_diverted):
        assert [plain(m) for m in to_messages(home.batch)] == expected
        assert home.paths.to_pylist() == [path] * count
        assert home.faults == {}


@replayed
@given(batches, batches, paths, paths)
def test_messages_of_several_entities_and_senders_come_back_each_to_its_own(
    first: list[BrokeredMessage], second: list[BrokeredMessage], here: str, peer: str
) -> None:
    tried = diverted(to_batch(first), here, origin_of("sender/00000000000000ff", 0, len(first)))
    home = restored(pa.concat_batches([tried, diverted(to_batch(second), peer)]))
    assert [plain(m) for m in to_messages(home.batch)] == [plain(m) for m in first + second]
    assert home.paths.to_pylist() == [here] * len(first) + [peer] * len(second)
    assert home.senders.null_count == len(second)
    assert home.faults == {}


def test_a_life_without_end_comes_back_without_end() -> None:
    home = restored(diverted(to_batch([identified(time_to_live=timedelta.max)]), "orders"))
    assert to_messages(home.batch)[0].time_to_live == timedelta.max


def test_the_edges_of_time_come_back() -> None:
    edges = [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
    sent = [
        identified(scheduled_enqueue_time_utc=at, time_to_live=timedelta(microseconds=1))
        for at in edges
    ]
    home = restored(diverted(to_batch(sent), "orders"))
    assert [plain(m) for m in to_messages(home.batch)] == [plain(m) for m in sent]


# -- poison ----------------------------------------------------------------------------------------

OF_OTHER_TYPES: dict[str, list[Any]] = {
    PATH: [7, b"orders", 1.0, True, timedelta(1), LATER, UUID(int=1)],
    SESSION: [7, b"s", 1.0, True, timedelta(1), LATER, UUID(int=1)],
    LIFE: ["60", 60, 1.0, True, b"60", LATER, UUID(int=1)],
    SCHEDULE: ["tomorrow", 60, 1.0, True, b"60", timedelta(1), UUID(int=1)],
}


def poison(properties: Mapping[str, Any]) -> BrokeredMessage:
    return identified(body=b"poison", application_properties=properties)


def test_a_message_without_a_path_is_a_fault_that_says_so() -> None:
    home = restored(to_batch([poison({"own": 1})]))
    assert set(home.faults) == {0}
    assert PATH in home.faults[0]
    assert home.paths.to_pylist() == [None]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, found in OF_OTHER_TYPES.items() for value in found]
)
def test_an_alias_of_the_wrong_type_is_a_fault_that_names_it(name: str, value: Any) -> None:
    home = restored(to_batch([poison({PATH: "orders"} | {name: value})]))
    assert set(home.faults) == {0}
    assert name in home.faults[0]


@replayed
@given(batches, paths, st.data())
def test_poison_is_separated_and_its_neighbours_come_home(
    sent: list[BrokeredMessage], path: str, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(sent)))
    name = data.draw(st.sampled_from(ALIASES))
    bad = poison({PATH: path} | {name: data.draw(st.sampled_from(OF_OTHER_TYPES[name]))})
    good = diverted(to_batch(sent), path)
    home = restored(pa.concat_batches([good.slice(0, at), to_batch([bad]), good.slice(at)]))
    assert set(home.faults) == {at}
    found = to_messages(home.batch.slice(0, at)) + to_messages(home.batch.slice(at + 1))
    assert [plain(m) for m in found] == [plain(m) for m in sent]


def test_an_alias_that_comes_twice_is_a_fault() -> None:
    twice = diverted(to_batch([identified()]), "orders")
    column = twice.column("properties")
    keys = pa.concat_arrays([column.keys, column.keys])
    items = pa.concat_arrays([column.items, column.items])
    doubled = pa.MapArray.from_arrays(pa.array([0, 2], pa.int32()), keys, items, type=column.type)
    at = MESSAGE_SCHEMA.get_field_index("properties")
    home = restored(twice.set_column(at, MESSAGE_SCHEMA.field("properties"), doubled))
    assert set(home.faults) == {0}
    assert PATH in home.faults[0]


# -- head-room -------------------------------------------------------------------------------------


@replayed
@given(
    st.sampled_from(["o", "orders", "o" * 260]), st.none() | st.text("s", min_size=1, max_size=99)
)
def test_the_check_refuses_exactly_what_grows_beyond_the_limit(
    path: str, session: str | None
) -> None:
    small = to_batch([identified(session_id=session)])
    growth = int(sizes(diverted(small, path, ORIGIN))[0])
    room = MAX_MESSAGE_BYTES - growth
    fits, too_large = ([identified(session_id=session, body=bytes(n))] for n in (room, room + 1))
    for form in (list, to_batch):
        check_divertible(form(fits), path, ORIGIN)
        with pytest.raises(MessageSizeExceededError, match="head-room") as caught:
            check_divertible(form(too_large), path, ORIGIN)
        assert (caught.value.size, caught.value.limit) == (MAX_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES)


def test_the_check_names_the_message_at_fault() -> None:
    sent = to_batch([identified(), identified(body=bytes(MAX_MESSAGE_BYTES)), identified()])
    with pytest.raises(MessageSizeExceededError, match="message 1 "):
        check_divertible(sent, "orders", Origin(ORIGIN.source, [1, 2, 3]))


def test_the_check_of_nothing_passes() -> None:
    check_divertible(to_batch([]), "orders", Origin(ORIGIN.source, []))
