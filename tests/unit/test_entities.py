"""Descriptions: checked when made, and the same after a journey as JSON."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    dead_letter_path,
    from_json,
    subscription_path,
    to_json,
)
from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    MAX_DUPLICATE_WINDOW,
    MAX_LOCK_DURATION,
    MAX_MAX_DELIVERY_COUNT,
    MAX_PATH_CHARACTERS,
    MAX_SIZE_MEGABYTES,
    MAX_SQL_CHARACTERS,
    MAX_SUBSCRIPTION_NAME_CHARACTERS,
    MAX_USER_METADATA_CHARACTERS,
    MIN_AUTO_DELETE_ON_IDLE,
    MIN_DUPLICATE_WINDOW,
    MIN_LOCK_DURATION,
    MIN_TIME_TO_LIVE,
    UNLIMITED,
)

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
sql = texts.filter(bool)
letters = st.sampled_from("abcXYZ012")
parts = st.builds(str.__add__, letters, st.text("abcXYZ012._-", max_size=10))
paths = st.lists(parts, min_size=1, max_size=3).map("/".join)
names = parts
statuses = st.sampled_from(EntityStatus)
moments = st.datetimes(
    datetime(1980, 1, 1),  # noqa: DTZ001 - the time zone is drawn with it
    datetime(2200, 1, 1),  # noqa: DTZ001
    timezones=st.just(UTC),
).map(lambda moment: moment.replace(fold=0))
spans = st.timedeltas(timedelta(microseconds=-(2**63)), timedelta(microseconds=2**63 - 1))
values = st.one_of(
    texts,
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.binary(max_size=9),
    moments,
    spans,
    st.uuids(),
)
bags = st.dictionaries(texts.filter(bool), values, max_size=3)
shared = {
    "default_message_time_to_live": st.timedeltas(MIN_TIME_TO_LIVE, UNLIMITED),
    "auto_delete_on_idle": st.timedeltas(MIN_AUTO_DELETE_ON_IDLE, UNLIMITED),
    "enable_batched_operations": st.booleans(),
    "status": statuses,
    "user_metadata": st.none() | texts,
}
stored = {
    "path": paths,
    "max_size_in_megabytes": st.integers(1, MAX_SIZE_MEGABYTES),
    "requires_duplicate_detection": st.booleans(),
    "duplicate_detection_history_time_window": st.timedeltas(
        MIN_DUPLICATE_WINDOW, MAX_DUPLICATE_WINDOW
    ),
    "enable_partitioning": st.booleans(),
    "enable_express": st.booleans(),
    "support_ordering": st.booleans(),
}
received = {
    "max_delivery_count": st.integers(1, MAX_MAX_DELIVERY_COUNT),
    "lock_duration": st.timedeltas(MIN_LOCK_DURATION, MAX_LOCK_DURATION),
    "enable_dead_lettering_on_message_expiration": st.booleans(),
    "requires_session": st.booleans(),
    "forward_to": st.none() | paths,
    "forward_dead_lettered_messages_to": st.none() | paths,
}
filters = st.one_of(
    st.builds(SqlFilter, sql, bags),
    st.builds(CorrelationFilter, subject=st.none() | texts, to=st.none() | texts, properties=bags),
    st.just(TrueFilter()),
    st.just(FalseFilter()),
)
descriptions = st.one_of(
    st.builds(QueueDescription, **shared, **stored, **received),
    st.builds(TopicDescription, **shared, **stored),
    st.builds(SubscriptionDescription, topic_path=paths, name=names, **shared, **received),
    st.builds(RuleDescription, names, filters, st.none() | st.builds(SqlAction, sql, bags)),
)


@replayed
@given(descriptions)
def test_a_description_is_the_same_after_a_journey_as_json(description: Any) -> None:
    found = from_json(to_json(description), type(description))
    assert found == description
    assert repr(found) == repr(description)


def test_runtime_properties_travel_too() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    found = RuntimeProperties(
        path="orders",
        active_message_count=1,
        dead_letter_message_count=2,
        scheduled_message_count=3,
        transfer_message_count=4,
        size_in_bytes=5,
        created_at_utc=now,
        updated_at_utc=now,
        accessed_at_utc=now,
    )
    assert from_json(to_json(found), RuntimeProperties) == found


def test_json_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="not a TopicDescription"):
        from_json(to_json(QueueDescription(path="orders")), TopicDescription)


def test_a_parameter_keeps_its_type() -> None:
    uuid = UUID(int=7)
    sent = SqlFilter("a = @a", {"@a": True, "@b": 1, "@c": 1.0, "@d": b"1", "@e": uuid})
    found = from_json(to_json(sent), SqlFilter)
    assert [type(v) for v in found.parameters.values()] == [bool, int, float, bytes, UUID]


@pytest.mark.parametrize(
    "path", ["orders", "a/b/c", "0", "a.b-c_d", "a" * MAX_PATH_CHARACTERS, "subscriptions-of-a"]
)
def test_a_good_path_is_taken(path: str) -> None:
    assert QueueDescription(path=path).path == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/orders",
        "orders/",
        "a//b",
        ".orders",
        "a/.b",
        "or ders",
        "orders\n",
        "grüße",
        "a$b",
        "orders/$DeadLetterQueue",
        "a" * (MAX_PATH_CHARACTERS + 1),
        None,
        7,
    ],
)
def test_a_bad_path_is_refused_with_the_rule(path: Any) -> None:
    for make in (QueueDescription, TopicDescription):
        with pytest.raises(InvalidArgumentError, match="use letters, digits"):
            make(path=path)
    with pytest.raises(InvalidArgumentError, match="forward_to"):
        QueueDescription(path="orders", forward_to=path if path is not None else "")


@pytest.mark.parametrize(
    "path", ["a/Subscriptions/b", "subscriptions", "a/SUBSCRIPTIONS", "Subscriptions/a"]
)
def test_the_part_that_leads_to_subscriptions_is_reserved(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="reserved part 'Subscriptions'"):
        QueueDescription(path=path)


@pytest.mark.parametrize(
    "name", ["", "a/b", "a b", "x" * (MAX_SUBSCRIPTION_NAME_CHARACTERS + 1), None]
)
def test_a_bad_name_of_a_subscription_or_rule_is_refused(name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="not a valid name"):
        SubscriptionDescription(topic_path="news", name=name)
    with pytest.raises(InvalidArgumentError, match="not a valid name"):
        RuleDescription(name)


def test_paths_of_subscriptions_and_dead_letter_queues_are_built_from_names() -> None:
    sport = SubscriptionDescription(topic_path="news", name="sport")
    assert sport.path == subscription_path("news", "sport") == "news/Subscriptions/sport"
    assert dead_letter_path(sport.path) == "news/Subscriptions/sport/$DeadLetterQueue"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_size_in_megabytes", 0),
        ("max_size_in_megabytes", MAX_SIZE_MEGABYTES + 1),
        ("max_size_in_megabytes", 1.5),
        ("max_size_in_megabytes", True),
        ("max_delivery_count", 0),
        ("max_delivery_count", MAX_MAX_DELIVERY_COUNT + 1),
        ("lock_duration", MAX_LOCK_DURATION + timedelta(microseconds=1)),
        ("lock_duration", MIN_LOCK_DURATION - timedelta(microseconds=1)),
        ("lock_duration", 60),
        ("default_message_time_to_live", timedelta(0)),
        ("auto_delete_on_idle", timedelta(minutes=4)),
        ("duplicate_detection_history_time_window", timedelta(days=8)),
        ("requires_session", 1),
        ("enable_partitioning", None),
        ("status", "active"),
        ("user_metadata", 7),
        ("user_metadata", "x" * (MAX_USER_METADATA_CHARACTERS + 1)),
    ],
)
def test_a_setting_outside_its_bounds_is_refused_by_its_name(setting: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=setting):
        QueueDescription(path="orders", **{setting: value})


@pytest.mark.parametrize("expression", ["", "x" * (MAX_SQL_CHARACTERS + 1), None])
def test_sql_that_is_empty_or_too_long_is_refused(expression: Any) -> None:
    for kind in (SqlFilter, SqlAction):
        with pytest.raises(InvalidArgumentError, match=f"1 to {MAX_SQL_CHARACTERS}|must be str"):
            kind(expression)


@pytest.mark.parametrize(
    ("status", "sends", "receives"),
    [
        (EntityStatus.ACTIVE, True, True),
        (EntityStatus.DISABLED, False, False),
        (EntityStatus.SEND_DISABLED, False, True),
        (EntityStatus.RECEIVE_DISABLED, True, False),
    ],
)
def test_a_status_says_what_may_happen(
    status: EntityStatus, *, sends: bool, receives: bool
) -> None:
    assert (status.allows_send, status.allows_receive) == (sends, receives)
