"""Senders: one message, several, and many in flight."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.contracts.client_site import (
    NEWS,
    NOW,
    ORDERS,
    SESSIONS,
    Site,
    bodies,
    got,
    message,
)
from twinbus import BrokeredMessage, MessagingError
from twinbus.errors import (
    EntityNotFoundError,
    FactoryFaultedError,
    InvalidArgumentError,
    MessageSizeExceededError,
    NamespaceClosedError,
)
from twinbus.limits import MAX_MESSAGE_BYTES
from twinbus.message import to_batch

# -- sending ---------------------------------------------------------------------------------------


def test_a_sender_sends_one_message_or_several(site: Site) -> None:
    with site.factory.create_message_sender(ORDERS) as sender:
        sender.send(message("one"))
        sender.send_batch([message("two"), message("three")])
    assert site.take() == ["one", "two", "three"]


def test_a_sender_sends_columns_as_they_are(site: Site) -> None:
    site.factory.create_message_sender(ORDERS).send_batch(to_batch([message("a"), message("b")]))
    assert site.take() == ["a", "b"]


def test_a_batch_with_a_message_that_is_too_large_is_refused_as_a_whole(site: Site) -> None:
    large = BrokeredMessage(body=bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(MessageSizeExceededError):
        site.factory.create_message_sender(ORDERS).send_batch([message(), large])
    assert site.take() == []


def test_sending_to_an_entity_that_does_not_exist_is_refused(site: Site) -> None:
    with pytest.raises(EntityNotFoundError):
        site.factory.create_message_sender("nowhere").send(message())


@pytest.mark.parametrize("path", ["", None, 7])
def test_a_client_needs_the_path_of_an_entity(site: Site, path: Any) -> None:
    for make in (
        site.factory.create_message_sender,
        site.factory.create_message_receiver,
        site.factory.create_queue_client,
        site.factory.create_topic_client,
    ):
        with pytest.raises(InvalidArgumentError):
            make(path)


def test_a_scheduled_message_appears_when_its_time_has_come(site: Site) -> None:
    sender = site.factory.create_message_sender(ORDERS)
    at = site.clock.now() + timedelta(hours=1)
    numbers = sender.schedule(message("later"), at)
    assert len(numbers) == 1
    assert site.take() == []
    site.pass_time(hours=1)
    assert site.take() == ["later"]


def test_scheduled_messages_can_be_cancelled_one_or_several_at_once(site: Site) -> None:
    sender = site.factory.create_message_sender(ORDERS)
    at = site.clock.now() + timedelta(hours=1)
    first, second, third = sender.schedule([message("1"), message("2"), message("3")], at)
    sender.cancel_scheduled(first)
    sender.cancel_scheduled([second])
    assert [m.sequence_number for m in site.receiver().peek(max_messages=9)] == [third]
    site.pass_time(hours=1)
    assert site.take() == ["3"]


def test_a_schedule_needs_a_time_with_a_zone(site: Site) -> None:
    sender = site.factory.create_message_sender(ORDERS)
    with pytest.raises(InvalidArgumentError, match="time zone"):
        sender.schedule(message(), datetime(2031, 1, 1))  # noqa: DTZ001 - the point


def test_a_received_message_can_be_sent_on(site: Site) -> None:
    site.send("order", subject="urgent", application_properties={"n": 1})
    received = got(site.receiver().receive(NOW))
    site.factory.create_topic_client(NEWS).send(received)
    received.complete()
    (copy,) = site.factory.create_subscription_client(NEWS, "eu").receive_batch(9, NOW)
    assert (copy.body, copy.subject) == (b"order", "urgent")
    assert copy.application_properties == {"n": 1}


# -- sending many ----------------------------------------------------------------------------------


def test_a_pipelined_sender_delivers_every_message_in_order(site: Site) -> None:
    texts = [str(number) for number in range(2500)]
    with site.factory.create_message_sender(ORDERS).pipelined() as pipeline:
        futures = [pipeline.send(message(text)) for text in texts]
    assert all(future.result(timeout=0) is None for future in futures)
    found = site.take() + site.take() + site.take()
    assert found == texts


def test_one_message_that_is_too_large_fails_alone(site: Site) -> None:
    large = BrokeredMessage(body=bytes(MAX_MESSAGE_BYTES + 1))
    sent = [message(str(number)) for number in range(50)]
    with site.factory.create_message_sender(ORDERS).pipelined() as pipeline:
        before = [pipeline.send(item) for item in sent[:25]]
        alone = pipeline.send(large)
        after = [pipeline.send(item) for item in sent[25:]]
    assert isinstance(alone.exception(timeout=0), MessageSizeExceededError)
    assert [future.exception(timeout=0) for future in before + after] == [None] * 50
    assert sorted(site.take()) == sorted(bodies(sent))


def test_a_message_without_a_session_fails_alone(site: Site) -> None:
    with site.factory.create_message_sender(SESSIONS).pipelined() as pipeline:
        good = [pipeline.send(message(session_id="s")) for _ in range(5)]
        bad = pipeline.send(message())
    assert isinstance(bad.exception(timeout=0), MessagingError)
    assert [future.exception(timeout=0) for future in good] == [None] * 5


def test_a_value_that_is_no_message_fails_alone(site: Site) -> None:
    with site.factory.create_message_sender(ORDERS).pipelined() as pipeline:
        good = pipeline.send(message("good"))
        with pytest.raises(InvalidArgumentError):
            pipeline.send("bad").result(timeout=10)  # type: ignore[arg-type]
        last = pipeline.send(message("last"))
        assert last.exception(timeout=10) is None
    assert good.exception(timeout=0) is None
    assert site.take() == ["good", "last"]


def test_every_message_to_an_entity_that_does_not_exist_fails(site: Site) -> None:
    with site.factory.create_message_sender("nowhere").pipelined() as pipeline:
        futures = [pipeline.send(message()) for _ in range(3)]
    assert [type(future.exception(timeout=0)) for future in futures] == [EntityNotFoundError] * 3


def test_flushing_returns_when_everything_was_answered(site: Site) -> None:
    with site.factory.create_message_sender(ORDERS).pipelined() as pipeline:
        pipeline.flush()
        futures = [pipeline.send(message()) for _ in range(100)]
        pipeline.flush()
        assert all(future.done() for future in futures)


def test_a_closed_pipelined_sender_refuses(site: Site) -> None:
    pipeline = site.factory.create_message_sender(ORDERS).pipelined()
    pipeline.close()
    pipeline.close()
    with pytest.raises(NamespaceClosedError):
        pipeline.send(message())


def test_a_pipelined_sender_of_a_faulted_factory_fails_each_message(site: Site) -> None:
    pipeline = site.factory.create_message_sender(ORDERS).pipelined()
    site.factory.fault("the partner is gone")
    assert isinstance(pipeline.send(message()).exception(timeout=10), FactoryFaultedError)
    pipeline.close()
