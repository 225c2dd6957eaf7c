"""The sentences of the contract suite that RabbitMQ must fulfil as well.

Left out are those that need a capability which RabbitMQ lacks (sessions, schedules, deferring,
browsing, renewal, rules, sequence numbers, listing), those that move a manual clock, and what
docs/how-to/use-rabbitmq.md lists as different: names are case-sensitive, a full queue is noticed
one message late, settings cannot be changed.
"""

# ruff: noqa: F401 - pytest collects what is imported
from collections.abc import Iterator

import pytest

from tests.contracts.test_management import (
    test_a_dead_letter_queue_cannot_be_deleted_by_itself,
    test_a_new_queue_holds_nothing,
    test_a_queue_has_defaults,
    test_an_unknown_entity_cannot_be_managed,
    test_only_a_subscription_is_created_with_a_rule,
    test_queues_and_topics_share_their_paths,
    test_the_dead_letter_count_falls_when_dead_letters_are_completed,
)
from tests.contracts.test_pings import (
    test_a_ping_is_acknowledged,
    test_a_ping_is_never_delivered,
    test_a_ping_is_not_stored,
    test_a_ping_to_an_unknown_entity_is_refused,
)
from tests.contracts.test_receiving import (
    test_a_first_delivery_has_no_failed_delivery_before_it,
    test_a_locked_message_is_delivered_to_no_one_else,
    test_a_message_received_and_deleted_has_no_lock,
    test_a_receive_takes_at_least_one_message_whatever_its_size,
    test_a_receive_takes_no_more_bytes_than_it_asked_for,
    test_a_receive_takes_no_more_than_it_asked_for,
    test_a_receive_takes_what_is_there_if_it_asked_for_more,
    test_a_receive_that_does_not_wait_returns_empty_at_once,
    test_a_returned_message_comes_before_younger_ones,
    test_competing_consumers_never_get_the_same_message,
    test_each_locked_message_has_its_own_token,
    test_nothing_can_be_received_from_a_topic,
    test_nothing_can_be_received_from_an_unknown_entity,
)
from tests.contracts.test_sending import (
    test_a_batch_is_enqueued_in_the_order_it_was_sent,
    test_a_batch_may_be_sent_as_columns,
    test_a_batch_of_too_many_messages_is_refused,
    test_a_datetime_of_another_zone_comes_back_as_the_same_moment,
    test_a_large_batch_arrives_whole,
    test_a_message_of_256_kilobytes_is_taken,
    test_a_received_batch_may_be_sent_on_as_it_came,
    test_a_sent_message_is_there_to_receive,
    test_an_application_property_keeps_its_value_and_type,
    test_an_empty_batch_is_refused,
    test_an_empty_body_is_a_body,
    test_any_bytes_are_a_body,
    test_many_properties_of_many_messages_stay_apart,
    test_nothing_can_be_sent_past_a_topic_to_its_subscription,
    test_nothing_can_be_sent_to_a_dead_letter_queue,
    test_queues_hold_their_own_messages,
    test_sending_to_an_unknown_entity_is_refused,
    test_what_the_broker_sets_cannot_be_set_by_the_sender,
)
from tests.contracts.test_settling import (
    test_a_dead_letter_queue_is_read_like_a_queue,
    test_a_dead_lettered_message_keeps_reason_description_and_source,
    test_a_message_is_settled_only_once,
    test_a_released_message_is_delivered_again_at_once,
    test_a_token_of_another_queue_settles_nothing,
    test_a_token_of_the_queue_settles_nothing_in_its_dead_letter_queue,
    test_an_abandoned_message_is_delivered_again_at_once,
    test_an_unlimited_queue_never_gives_up,
    test_each_abandonment_counts_as_a_failed_delivery,
    test_many_messages_are_dead_lettered_in_order,
)
from tests.contracts.test_topics import (
    test_a_batch_reaches_a_subscription_in_order,
    test_a_deleted_subscription_gets_nothing,
    test_a_message_reaches_every_subscription,
    test_a_message_to_a_topic_without_subscriptions_is_accepted,
    test_a_queue_cannot_be_subscribed_to,
    test_a_subscription_gets_only_what_is_sent_after_its_creation,
    test_a_subscription_has_its_own_dead_letter_queue,
    test_a_subscription_needs_its_topic,
    test_a_token_of_one_subscription_settles_nothing_in_another,
    test_an_unknown_subscription_is_refused,
    test_everything_a_message_has_reaches_the_subscription,
)
from tests.rabbitmq.conftest import ContractWorld, RabbitWorld, opened
from twinbus.testing.rabbitmq import RabbitBroker


@pytest.fixture
def world(broker: RabbitBroker) -> Iterator[RabbitWorld]:
    yield from opened(broker, ContractWorld)
