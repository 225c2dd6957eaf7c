"""Descriptions and rules come back from the documents of the administration API as they were."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.entities import (
    CorrelationFilter,
    EntityDescription,
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
from twinbus.limits import MAX_MESSAGE_BYTES, UNLIMITED
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.servicebus.atom import AtomEntry, entry_document, feed_document, read_description
from twinbus.servicebus.entity_documents import read_entity, write_entity
from twinbus.servicebus.rule_documents import read_rule, write_rule

NOW = datetime(2026, 5, 4, 3, 2, 1, 7, tzinfo=UTC)
RUNTIME = RuntimeProperties(
    path="orders",
    active_message_count=1,
    dead_letter_message_count=2,
    scheduled_message_count=3,
    transfer_message_count=4,
    size_in_bytes=5,
    created_at_utc=NOW,
    updated_at_utc=NOW,
    accessed_at_utc=NOW,
)
KEY = SharedAccessKey(
    name="shop", claims=(Claim.SEND, Claim.LISTEN), primary="p" * 20, secondary="<s>" * 10
)
# What XML can carry: no control characters, no surrogates, and line ends as they are.
TEXT = st.text(
    st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\ufffe\uffff"),
    min_size=1,
    max_size=30,
)
SPAN = st.one_of(
    st.just(UNLIMITED), st.timedeltas(timedelta(minutes=5), timedelta(days=10_000_000))
)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "default_message_time_to_live": SPAN,
    "auto_delete_on_idle": SPAN,
    "enable_batched_operations": st.booleans(),
    "status": st.sampled_from(EntityStatus),
    "user_metadata": st.none() | TEXT,
}
RECEIVED = {
    "max_delivery_count": st.integers(1, 2**31 - 1),
    "lock_duration": st.timedeltas(timedelta(seconds=1), timedelta(minutes=5)),
    "enable_dead_lettering_on_message_expiration": st.booleans(),
    "requires_session": st.booleans(),
    "forward_to": st.sampled_from([None, "target", "a/b"]),
    "forward_dead_lettered_messages_to": st.sampled_from([None, "target", "a/b"]),
}
SENT = {
    "max_size_in_megabytes": st.integers(1, 81_920),
    "requires_duplicate_detection": st.booleans(),
    "enable_express": st.booleans(),
    "support_ordering": st.booleans(),
    "duplicate_detection_history_time_window": st.timedeltas(
        timedelta(seconds=20), timedelta(days=7)
    ),
    "enable_partitioning": st.booleans(),
}
DESCRIPTIONS = st.one_of(
    st.builds(QueueDescription, path=st.just("a/b"), **SETTINGS, **RECEIVED, **SENT),
    st.builds(TopicDescription, path=st.just("news"), **SETTINGS, **SENT),
    st.builds(
        SubscriptionDescription,
        topic_path=st.just("news"),
        name=st.just("sport"),
        enable_dead_lettering_on_filter_evaluation_exceptions=st.booleans(),
        **SETTINGS,
        **RECEIVED,
    ),
)
VALUES = st.dictionaries(
    TEXT,
    st.one_of(
        TEXT,
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1)).map(  # noqa: DTZ001
            lambda moment: moment.replace(tzinfo=UTC)
        ),
        st.timedeltas(timedelta(0), timedelta(days=1000)),
    ),
    max_size=4,
)
RULES = st.builds(
    RuleDescription,
    st.sampled_from(["$Default", "one", "a.b"]),
    st.one_of(
        st.just(TrueFilter()),
        st.just(FalseFilter()),
        st.builds(SqlFilter, TEXT, VALUES),
        st.builds(CorrelationFilter, subject=st.none() | TEXT, properties=VALUES),
    ),
    st.none() | st.builds(SqlAction, TEXT, VALUES),
)


def document(content: str) -> bytes:
    entry = AtomEntry(
        title="<t>", url="https://x/?a&b", published=NOW, updated=NOW, content=content
    )
    return entry_document(entry, "shop & co")


def names_of(description: EntityDescription) -> dict[str, Any]:
    if isinstance(description, SubscriptionDescription):
        return {"topic_path": description.topic_path, "name": description.name}
    return {"path": description.path}


@replayed
@given(DESCRIPTIONS)
def test_a_description_comes_back_as_it_was(description: EntityDescription) -> None:
    sent = document(write_entity(description, RUNTIME, [], MAX_MESSAGE_BYTES))
    wanted = read_entity(read_description(sent), MAX_MESSAGE_BYTES, str)
    assert wanted.create(**names_of(description)) == description
    assert wanted.update(description) == description


@replayed
@given(RULES)
def test_a_rule_comes_back_as_it_was(rule: RuleDescription) -> None:
    assert read_rule(read_description(document(write_rule(rule, NOW)))) == rule


def test_keys_come_back_as_they_were() -> None:
    written = write_entity(QueueDescription(path="orders"), RUNTIME, [KEY], None)
    wanted = read_entity(read_description(document(written)), MAX_MESSAGE_BYTES, str)
    assert wanted.keys == [KEY]


@pytest.mark.parametrize("keys", [None, []])
def test_keys_that_are_not_named_are_not_those_that_are_none(keys: list[Any] | None) -> None:
    written = write_entity(QueueDescription(path="orders"), RUNTIME, keys, None)
    wanted = read_entity(read_description(document(written)), MAX_MESSAGE_BYTES, str)
    assert wanted.keys == keys


def test_an_update_keeps_what_is_fixed_where_it_says_nothing() -> None:
    current = QueueDescription(path="orders", requires_session=True, max_delivery_count=3)
    described = '<QueueDescription xmlns="{}"><Status>Disabled</Status></QueueDescription>'
    service_bus = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
    sent = document(described.format(service_bus))
    changed = read_entity(read_description(sent), MAX_MESSAGE_BYTES, str).update(current)
    assert changed == replace(current, status=EntityStatus.DISABLED, max_delivery_count=10)


@pytest.mark.parametrize("onward", [None, "https://x/?$skip=2&$top=2"])
def test_a_feed_has_two_links_if_there_is_more(onward: str | None) -> None:
    entry = AtomEntry(title="a", url="u", published=NOW, updated=NOW, content="<x/>")
    found = feed_document("queues", "https://x", onward, [entry], "shop").decode()
    head = found.partition("<entry>")[0]
    assert head.count("<link ") == (2 if onward else 1)
    assert ("$skip=2&amp;$top=2" in head) == bool(onward)
