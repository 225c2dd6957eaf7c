"""Operations that SDKs of other languages ask for over `$management`, in the forms they use."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

from tests.scenarios.service_bus_site import QUEUE, Reply, ServiceBusSite, SocketPeer, key
from twinbus.amqp.types import Array, Described, Int, Timestamp, UInt, ULong
from twinbus.clock import from_us
from twinbus.entities import (
    CorrelationFilter,
    FalseFilter,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
)
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import (
    CreateEntity,
    Disposition,
    ListRules,
    PutKey,
    Receive,
    Send,
    Settle,
)
from twinbus.protocol.keys import Claim

pytestmark = pytest.mark.timeout(60)
TOPIC = "news"
SESSIONS = "talks"
RULE = ULong(0x13700000004)
NO_ACTION, ACTION = ULong(0x13700000005), ULong(0x13700000006)
SQL, TRUE, FALSE, CORRELATION = (ULong(0x1370000000 + code) for code in (6, 7, 8, 9))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceBusSite]:
    with ExitStack() as stack:
        made = ServiceBusSite.open(tmp_path_factory.mktemp("site"), stack)
        made.namespace.ask(CreateEntity(TopicDescription(path=TOPIC)))
        yield made


@pytest.fixture
def peer(site: ServiceBusSite) -> Iterator[SocketPeer]:
    with SocketPeer(site.door.port) as made:
        assert made.show_token("", name="root") == 202
        yield made


@pytest.fixture
def path(site: ServiceBusSite) -> str:
    """A subscription of one test."""
    made = SubscriptionDescription(topic_path=TOPIC, name=uuid4().hex)
    site.namespace.ask(CreateEntity(made))
    return made.path


def rules(reply: Reply) -> list[Any]:
    return [item["rule-description"] for item in reply.body["rules"]]


# -- rules -----------------------------------------------------------------------------------------

ADDED: dict[str, tuple[dict[str, Any], RuleDescription, Any]] = {
    "sql": (
        {"sql-filter": {"expression": "colour = 'red'"}},
        RuleDescription("rule", SqlFilter("colour = 'red'")),
        Described(SQL, ["colour = 'red'", Int(20)]),
    ),
    "everything": (
        {"sql-filter": {"expression": "1=1"}},
        RuleDescription("rule", TrueFilter()),
        Described(TRUE, []),
    ),
    "nothing": (
        {"sql-filter": {"expression": "1 = 0"}},
        RuleDescription("rule", FalseFilter()),
        Described(FALSE, []),
    ),
    "correlation": (
        {
            "correlation-filter": {
                "correlation-id": "c",
                "message-id": None,
                "to": "t",
                "reply-to": "r",
                "label": "l",
                "session-id": "s",
                "reply-to-session-id": "rs",
                "content-type": "text",
                "properties": {"n": Int(3), "when": Timestamp(5000)},
            }
        },
        RuleDescription(
            "rule",
            CorrelationFilter(
                correlation_id="c",
                to="t",
                reply_to="r",
                subject="l",
                session_id="s",
                reply_to_session_id="rs",
                content_type="text",
                properties={"n": 3, "when": from_us(5_000_000)},
            ),
        ),
        Described(
            CORRELATION,
            ["c", None, "t", "r", "l", "s", "rs", "text", {"n": 3, "when": Timestamp(5000)}],
        ),
    ),
}


@pytest.mark.parametrize("kind", ADDED)
def test_a_rule_is_added_and_read_back(
    site: ServiceBusSite, peer: SocketPeer, path: str, kind: str
) -> None:
    description, native, described = ADDED[kind]
    assert peer.manage(path, "remove-rule", {"rule-name": "$Default"}).status == 200
    added = peer.manage(path, "add-rule", {"rule-name": "rule", "rule-description": description})
    assert (added.status, added.condition) == (200, None)
    assert site.namespace.ask(ListRules(path)) == [native]
    reply = peer.manage(path, "enumerate-rules", {"top": Int(100), "skip": Int(0)})
    [rule] = rules(reply)
    assert rule.descriptor == RULE
    assert rule.value[:3] == [described, Described(NO_ACTION, []), "rule"]


def test_an_action_travels(site: ServiceBusSite, peer: SocketPeer, path: str) -> None:
    description = {
        "sql-filter": {"expression": "n > 1"},
        "sql-rule-action": {"expression": "SET n = 1"},
    }
    peer.manage(path, "add-rule", {"rule-name": "acts", "rule-description": description})
    found = {rule.name: rule for rule in site.namespace.ask(ListRules(path))}
    assert found["acts"].action == SqlAction("SET n = 1")
    reply = peer.manage(path, "enumerate-rules", {"top": Int(1), "skip": Int(1)})
    assert rules(reply)[0].value[1] == Described(ACTION, ["SET n = 1", Int(20)])


def test_a_subscription_without_rules_answers_that_there_are_none(
    peer: SocketPeer, path: str
) -> None:
    peer.manage(path, "remove-rule", {"rule-name": "$Default"})
    assert peer.manage(path, "enumerate-rules", {"top": Int(100), "skip": Int(0)}).status == 204


WRONG = {
    "neither filter": ({}, 400, "com.microsoft:argument-error"),
    "both filters": (
        {"sql-filter": {"expression": "1=1"}, "correlation-filter": {}},
        400,
        "com.microsoft:argument-error",
    ),
    "no expression": ({"sql-filter": {}}, 400, "com.microsoft:argument-error"),
    "a filter that is no map": ({"sql-filter": "1=1"}, 400, "com.microsoft:argument-error"),
    "bad SQL": ({"sql-filter": {"expression": "((("}}, 400, "com.microsoft:argument-error"),
    "a number in place of text": (
        {"correlation-filter": {"label": 5}},
        400,
        "com.microsoft:argument-error",
    ),
    "a property nobody can compare": (
        {"correlation-filter": {"properties": {"x": [1]}}},
        400,
        "com.microsoft:argument-error",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_refused(peer: SocketPeer, path: str, what: str) -> None:
    description, status, condition = WRONG[what]
    reply = peer.manage(path, "add-rule", {"rule-name": "x", "rule-description": description})
    assert (reply.status, reply.condition) == (status, condition)


def test_rules_that_exist_and_that_do_not(peer: SocketPeer, path: str) -> None:
    everything = {"sql-filter": {"expression": "1=1"}}
    again = {"rule-name": "$Default", "rule-description": everything}
    assert peer.manage(path, "add-rule", again).status == 409
    missing = peer.manage(path, "remove-rule", {"rule-name": "missing"})
    assert (missing.status, missing.condition) == (404, "amqp:not-found")
    queue = peer.manage(QUEUE, "enumerate-rules", {"top": Int(1), "skip": Int(0)})
    assert queue.status in (400, 404)


@pytest.mark.parametrize("name", ["top", "skip"])
def test_a_page_of_rules_is_given_in_numbers(peer: SocketPeer, path: str, name: str) -> None:
    reply = peer.manage(path, "enumerate-rules", {name: "one"})
    assert (reply.status, reply.condition) == (400, "com.microsoft:argument-error")


def test_a_wrong_settle_mode_locks_nothing(site: ServiceBusSite, peer: SocketPeer) -> None:
    [number] = site.namespace.ask(Send(QUEUE, [BrokeredMessage(b"x")])).sequence_numbers
    token = site.namespace.ask(Receive(QUEUE, 1)).column("lock_token")
    site.namespace.ask(Settle(QUEUE, token, Disposition.DEFER))
    body = {"sequence-numbers": Array(int, (number,)), "receiver-settle-mode": "locked"}
    reply = peer.manage(QUEUE, "receive-by-sequence-number", body)
    assert (reply.status, reply.condition) == (400, "com.microsoft:argument-error")
    body["receiver-settle-mode"] = UInt(0)
    reply = peer.manage(QUEUE, "receive-by-sequence-number", body)
    assert (reply.status, len(reply.body["messages"])) == (200, 1)


# -- deleting many, listing sessions ---------------------------------------------------------------


def test_messages_are_deleted_unread(site: ServiceBusSite, peer: SocketPeer) -> None:
    site.namespace.ask(Send(QUEUE, [BrokeredMessage(b"x") for _ in range(5)]))
    future = Timestamp(4_000_000_000_000)
    reply = peer.manage(
        QUEUE, "batch-delete-messages", {"message-count": Int(3), "enqueued-time-utc": future}
    )
    assert (reply.status, reply.body) == (200, {"message-count": 3})
    past = {"message-count": Int(3), "enqueued-time-utc": Timestamp(1000)}
    none = peer.manage(QUEUE, "batch-delete-messages", past)
    assert (none.status, none.condition) == (204, "com.microsoft:message-not-found")
    rest = peer.manage(QUEUE, "batch-delete-messages", {"message-count": Int(4000)})
    assert rest.body == {"message-count": 2}


def test_no_message_is_older_than_all_years(site: ServiceBusSite, peer: SocketPeer) -> None:
    site.namespace.ask(Send(QUEUE, [BrokeredMessage(b"x")]))
    body = {"message-count": Int(3), "enqueued-time-utc": Timestamp(-(2**63))}
    assert peer.manage(QUEUE, "batch-delete-messages", body).status == 204
    body["enqueued-time-utc"] = Timestamp(2**63 - 1)
    assert peer.manage(QUEUE, "batch-delete-messages", body).body == {"message-count": 1}


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_that_deletes_nothing_is_refused(peer: SocketPeer, count: int) -> None:
    reply = peer.manage(QUEUE, "batch-delete-messages", {"message-count": Int(count)})
    assert (reply.status, reply.condition) == (400, "com.microsoft:argument-error")


def test_sessions_are_listed_in_pages(site: ServiceBusSite, peer: SocketPeer) -> None:
    site.namespace.ask(CreateEntity(QueueDescription(path=SESSIONS, requires_session=True)))
    names = {f"s{number}" for number in range(5)}
    site.namespace.ask(Send(SESSIONS, [BrokeredMessage(b"x", session_id=name) for name in names]))
    any_time = Timestamp(253_402_300_800_000)  # how SDKs ask for those with messages
    found: list[str] = []
    for skip in (0, 3, 6):
        body = {"last-updated-time": any_time, "skip": Int(skip), "top": Int(3)}
        reply = peer.manage(SESSIONS, "get-message-sessions", body)
        found += reply.body["sessions-ids"].items if reply.status == 200 else []
    assert (len(found), set(found)) == (5, names)
    assert (reply.status, reply.condition) == (204, "com.microsoft:session-not-found")
    far_below = {"last-updated-time": any_time, "skip": -(2**40), "top": Int(3)}
    reply = peer.manage(SESSIONS, "get-message-sessions", far_below)
    assert (reply.status, reply.body["skip"]) == (200, 3)


def test_a_key_that_listens_manages_the_rules_of_its_subscription(
    site: ServiceBusSite, path: str
) -> None:
    topic = path.partition("/")[0]
    site.namespace.ask(PutKey(key("listens", Claim.LISTEN, path=topic)))
    description = {"sql-filter": {"expression": "n > 1"}}
    added = {"rule-name": "rule", "rule-description": description}
    with SocketPeer(site.door.port) as listener:
        assert listener.show_token(path, name="listens") == 202
        assert listener.manage(path, "remove-rule", {"rule-name": "$Default"}).status == 200
        assert listener.manage(path, "add-rule", added).status == 200
        reply = listener.manage(path, "enumerate-rules", {"top": Int(9), "skip": Int(0)})
        assert [rule.value[2] for rule in rules(reply)] == ["rule"]


@pytest.mark.parametrize("operation", ["add-rule", "remove-rule", "enumerate-rules"])
def test_a_key_that_only_sends_manages_no_rules(
    site: ServiceBusSite, path: str, operation: str
) -> None:
    site.namespace.ask(PutKey(key("sends", Claim.SEND, path=path.partition("/")[0])))
    body = {"rule-name": "$Default", "rule-description": {"sql-filter": {"expression": "1=1"}}}
    with SocketPeer(site.door.port) as sender:
        assert sender.show_token(path, name="sends") == 202
        reply = sender.manage(path, operation, body)
        assert (reply.status, reply.condition) == (401, "amqp:unauthorized-access")
    assert len(site.namespace.ask(ListRules(path))) == 1


def test_an_operation_that_does_not_exist_is_refused(peer: SocketPeer) -> None:
    unknown = peer.manage(QUEUE, "make-coffee", {})
    assert (unknown.status, unknown.condition) == (400, "amqp:not-allowed")
