"""The unmodified SDK sends to topics and receives from subscriptions."""

import pytest

from tests.interop.bus import Bus, bodies, body, properties, take, take_one
from twinbus import RuleDescription, SqlFilter
from twinbus.entities import SqlAction

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import ServiceBusMessage, ServiceBusReceiver, ServiceBusSubQueue


@pytest.fixture
def topic(bus: Bus) -> str:
    path = bus.name()
    bus.manager.create_topic(path)
    return path


def subscriber(bus: Bus, topic: str, name: str) -> ServiceBusReceiver:
    receiver = bus.keep(bus.sdk.get_subscription_receiver(topic, name))
    assert isinstance(receiver, ServiceBusReceiver)
    return receiver


def publish(bus: Bus, topic: str, *messages: ServiceBusMessage) -> None:
    bus.keep(bus.sdk.get_topic_sender(topic)).send_messages(list(messages))


def test_every_subscription_gets_a_copy(bus: Bus, topic: str) -> None:
    for name in ("one", "two"):
        bus.manager.create_subscription(topic, name)
    publish(bus, topic, ServiceBusMessage("a"))
    for name in ("one", "two"):
        receiver = subscriber(bus, topic, name)
        message = take_one(receiver)
        assert body(message) == b"a"
        receiver.complete_message(message)


def test_a_filter_reads_the_properties_that_the_sdk_sends(bus: Bus, topic: str) -> None:
    rule = RuleDescription("big", SqlFilter("amount > 10 AND kind = 'order' AND sys.Label = 's'"))
    bus.manager.create_subscription(topic, "big", rule)
    bus.manager.create_subscription(topic, "all")
    publish(
        bus,
        topic,
        *(
            ServiceBusMessage(
                f"{amount}", subject="s", application_properties={"amount": amount, "kind": kind}
            )
            for amount, kind in [(5, "order"), (50, "order"), (50, "offer"), (11, "order")]
        ),
    )
    assert bodies(take(subscriber(bus, topic, "big"), 2)) == [b"50", b"11"]
    assert bus.active(f"{topic}/Subscriptions/big") == 2
    assert bus.active(f"{topic}/Subscriptions/all") == 4


def test_an_action_changes_what_the_subscription_gets(bus: Bus, topic: str) -> None:
    rule = RuleDescription(
        "mark", SqlFilter("1 = 1"), SqlAction("SET colour = 'red'; REMOVE old; SET sys.Label = 'x'")
    )
    bus.manager.create_subscription(topic, "red", rule)
    publish(
        bus,
        topic,
        ServiceBusMessage("a", subject="s", application_properties={"old": 1, "kept": 2.5}),
    )
    message = take_one(subscriber(bus, topic, "red"))
    assert properties(message) == {"colour": "red", "kept": 2.5}
    assert message.subject == "x"
    assert body(message) == b"a"


def test_a_subscription_has_a_dead_letter_queue(bus: Bus, topic: str) -> None:
    bus.manager.create_subscription(topic, "one")
    publish(bus, topic, ServiceBusMessage("a"))
    receiver = subscriber(bus, topic, "one")
    receiver.dead_letter_message(take_one(receiver), reason="bad")
    graveyard = bus.keep(
        bus.sdk.get_subscription_receiver(topic, "one", sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    )
    assert take_one(graveyard).dead_letter_reason == "bad"


def test_names_differ_by_more_than_case(bus: Bus, topic: str) -> None:
    bus.manager.create_subscription(topic, "one")
    publish(bus, topic.upper(), ServiceBusMessage("a"))
    assert bodies(take(subscriber(bus, topic.upper(), "ONE"))) == [b"a"]
