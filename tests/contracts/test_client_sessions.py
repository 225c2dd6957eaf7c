"""Sessions, and the clients of queues, topics and subscriptions."""

from datetime import timedelta

import pytest

from tests.contracts.client_site import (
    DELETE,
    NEWS,
    NOW,
    ORDERS,
    SESSIONS,
    Site,
    bodies,
    got,
    message,
)
from twinbus import RuleDescription, SqlFilter
from twinbus.client.receiver import ReceiveOptions
from twinbus.entities import subscription_path
from twinbus.errors import SessionCannotBeLockedError

# -- sessions --------------------------------------------------------------------------------------


def test_a_session_gives_its_own_messages_in_order(site: Site) -> None:
    site.send("a1", path=SESSIONS, session_id="a")
    site.send("b1", path=SESSIONS, session_id="b")
    site.send("a2", path=SESSIONS, session_id="a")
    with site.factory.accept_message_session(SESSIONS, "a", NOW) as session:
        assert session.session_id == "a"
        assert bodies(session.receive_batch(9, NOW)) == ["a1", "a2"]


def test_a_session_is_browsed_alone(site: Site) -> None:
    site.send("a1", path=SESSIONS, session_id="a")
    site.send("b1", path=SESSIONS, session_id="b")
    with site.factory.accept_message_session(SESSIONS, "b", NOW) as session:
        assert bodies(session.peek(max_messages=9)) == ["b1"]


def test_sessions_are_listed(site: Site) -> None:
    queue = site.factory.create_queue_client(SESSIONS)
    assert queue.list_sessions() == []
    site.send("a1", path=SESSIONS, session_id="a")
    with queue.accept_message_session("b", NOW) as session:
        session.set_state(b"state")
    assert sorted(queue.list_sessions()) == ["a", "b"]
    assert queue.list_sessions(site.clock.now() - timedelta(minutes=1)) == ["b"]


def test_messages_are_deleted_unread(site: Site) -> None:
    for body in "abc":
        site.send(body)
    receiver = site.factory.create_message_receiver(ORDERS)
    assert receiver.delete_messages(2) == 2
    assert bodies(receiver.receive_batch(9, NOW)) == ["c"]


def test_the_next_session_with_messages_can_be_accepted(site: Site) -> None:
    site.send("b1", path=SESSIONS, session_id="b")
    queue = site.factory.create_queue_client(SESSIONS)
    with queue.accept_message_session(wait=NOW) as session:
        assert session.session_id == "b"
        assert session.locked_until_utc == site.clock.now() + timedelta(minutes=1)


def test_a_session_is_locked_by_one_receiver_and_free_when_closed(site: Site) -> None:
    queue = site.factory.create_queue_client(SESSIONS)
    with queue.accept_message_session("a", NOW), pytest.raises(SessionCannotBeLockedError):
        queue.accept_message_session("a", NOW)
    queue.accept_message_session("a", NOW).close()


def test_closing_a_session_gives_back_the_messages_it_had_locked(site: Site) -> None:
    site.send("1", "2", path=SESSIONS, session_id="a")
    options = ReceiveOptions(prefetch_count=10)
    with site.factory.accept_message_session(SESSIONS, "a", NOW, options) as session:
        got(session.receive(NOW)).complete()
    with site.factory.accept_message_session(SESSIONS, "a", NOW) as session:
        assert bodies(session.receive_batch(9, NOW)) == ["2"]


def test_the_state_of_a_session_outlives_its_holders(site: Site) -> None:
    queue = site.factory.create_queue_client(SESSIONS)
    with queue.accept_message_session("a", NOW) as session:
        assert session.get_state() is None
        session.set_state(b"half way")
    with queue.accept_message_session("a", NOW) as session:
        assert session.get_state() == b"half way"
        session.set_state(None)
        assert session.get_state() is None


def test_a_session_can_be_renewed(site: Site) -> None:
    with site.factory.accept_message_session(SESSIONS, "a", NOW) as session:
        for _ in range(3):
            site.pass_time(seconds=50)
            until = session.renew_lock()
        assert until == session.locked_until_utc == site.clock.now() + timedelta(minutes=1)


def test_closing_a_session_whose_lock_lapsed_is_no_error(site: Site) -> None:
    session = site.factory.accept_message_session(SESSIONS, "a", NOW)
    site.pass_time(minutes=2)
    session.close()
    session.close()


def test_messages_of_a_session_are_deferred_and_received_by_number(site: Site) -> None:
    site.send("1", path=SESSIONS, session_id="a")
    with site.factory.accept_message_session(SESSIONS, "a", NOW) as session:
        first = got(session.receive(NOW))
        first.defer()
        (again,) = session.receive_deferred(first.sequence_number or 0)
        again.complete()
        assert session.peek() == []


# -- clients of entities ---------------------------------------------------------------------------


def test_a_queue_client_sends_and_receives(site: Site) -> None:
    with site.factory.create_queue_client(ORDERS) as queue:
        queue.send(message("one"))
        got(queue.receive(NOW)).complete()
        assert queue.peek() == []


def test_a_topic_client_sends_to_every_subscription(site: Site) -> None:
    site.manager.create_subscription(NEWS, "us")
    with site.factory.create_topic_client(NEWS) as topic:
        topic.send(message("headline"))
    for name in ("eu", "us"):
        with site.factory.create_subscription_client(NEWS, name, DELETE) as subscription:
            assert bodies(subscription.receive_batch(9, NOW)) == ["headline"]


def test_a_subscription_client_knows_its_topic_and_name(site: Site) -> None:
    client = site.factory.create_subscription_client(NEWS, "eu")
    assert (client.topic_path, client.name) == (NEWS, "eu")
    assert client.path == subscription_path(NEWS, "eu")


def test_a_subscription_client_keeps_its_rules(site: Site) -> None:
    client = site.factory.create_subscription_client(NEWS, "eu")
    assert [rule.name for rule in client.get_rules()] == ["$Default"]
    client.add_rule(RuleDescription("sport", SqlFilter("kind = 'sport'")))
    client.remove_rule("$Default")
    assert [rule.name for rule in client.get_rules()] == ["sport"]
    topic = site.factory.create_topic_client(NEWS)
    topic.send(message("goal", application_properties={"kind": "sport"}))
    topic.send(message("rain", application_properties={"kind": "weather"}))
    assert bodies(client.receive_batch(9, NOW)) == ["goal"]
