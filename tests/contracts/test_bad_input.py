"""Bad input: every mistake has its typed error, and nothing is changed by it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pyarrow as pa
import pytest

from tests.contracts.conftest import World
from tests.contracts.words import QUEUE, message, peek, queue, send, take
from twinbus.entities import (
    EntityStatus,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import (
    BrokerRestartingError,
    EntityNotFoundError,
    FaultOwner,
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    NamespaceClosedError,
)
from twinbus.limits import MAX_ID_CHARACTERS, MAX_PATH_CHARACTERS, UNLIMITED
from twinbus.message import BrokeredMessage, to_batch
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    AcceptSession,
    CancelScheduled,
    Command,
    CreateEntity,
    DeleteRule,
    GetEntity,
    LeaseRange,
    ListEntities,
    Peek,
    Receive,
    ReceiveDeferred,
    RenewLocks,
    Send,
    SessionLock,
)

DAY = timedelta(days=1)
WRONG = cast("Any", object())

# -- names -------------------------------------------------------------------------------------

BAD_PATHS = [
    "",
    "/orders",
    "orders/",
    "a//b",
    "two words",
    "$orders",
    "-orders",
    "orders?",
    "örders",
    "a/Subscriptions/b",
    "a/subscriptions/b",
    "orders/$DeadLetterQueue",
    "x" * (MAX_PATH_CHARACTERS + 1),
    None,
    7,
]


@pytest.mark.parametrize("path", BAD_PATHS)
@pytest.mark.parametrize("kind", [QueueDescription, TopicDescription])
def test_a_path_must_follow_the_rules(kind: type[QueueDescription], path: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        kind(path=path)


@pytest.mark.parametrize("path", ["a", "0", "a.b-c_d", "a/b/c", "x" * MAX_PATH_CHARACTERS])
def test_a_path_that_follows_the_rules_is_taken(world: World, path: str) -> None:
    if len(path) > 200:
        world.need(Capability.LONG_PATHS)
    queue(world, path)
    send(world, "a", path=path)
    assert take(world, path) == ["a"]


@pytest.mark.parametrize("name", ["", "a/b", "two words", "-a", "x" * 51, None, 7])
def test_the_name_of_a_subscription_must_follow_the_rules(name: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        SubscriptionDescription(topic_path="news", name=name)


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_no_entity_can_have_is_refused(world: World, path: Any) -> None:
    queue(world)
    with pytest.raises((EntityNotFoundError, InvalidArgumentError)):
        world.ask(GetEntity(path))
    with pytest.raises((EntityNotFoundError, InvalidArgumentError)):
        world.ask(Send(path, [message("a")]))


# -- settings ----------------------------------------------------------------------------------

BAD_SETTINGS = [
    ("max_size_in_megabytes", 0),
    ("max_size_in_megabytes", -1),
    ("max_size_in_megabytes", 81_921),
    ("max_size_in_megabytes", 1.5),
    ("max_size_in_megabytes", "1"),
    ("max_delivery_count", 0),
    ("max_delivery_count", 2**31),
    ("max_delivery_count", True),
    ("default_message_time_to_live", timedelta(0)),
    ("default_message_time_to_live", timedelta(milliseconds=999)),
    ("default_message_time_to_live", 60),
    ("auto_delete_on_idle", timedelta(minutes=4)),
    ("auto_delete_on_idle", None),
    ("lock_duration", timedelta(0)),
    ("lock_duration", timedelta(minutes=5, seconds=1)),
    ("lock_duration", UNLIMITED),
    ("duplicate_detection_history_time_window", timedelta(seconds=19)),
    ("duplicate_detection_history_time_window", timedelta(days=8)),
    ("enable_dead_lettering_on_message_expiration", 1),
    ("enable_batched_operations", "yes"),
    ("enable_partitioning", None),
    ("requires_session", 1),
    ("requires_duplicate_detection", "no"),
    ("forward_to", ""),
    ("forward_to", "two words"),
    ("forward_to", 7),
    ("forward_dead_lettered_messages_to", ""),
    ("forward_dead_lettered_messages_to", 7),
    ("status", "active"),
    ("user_metadata", "x" * 1025),
    ("user_metadata", 7),
]


@pytest.mark.parametrize(("setting", "value"), BAD_SETTINGS)
def test_a_setting_out_of_range_is_refused(setting: str, value: Any) -> None:
    settings: dict[str, Any] = {setting: value}
    with pytest.raises(InvalidArgumentError):
        QueueDescription(path=QUEUE, **settings)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_size_in_megabytes", 81_920),
        ("max_delivery_count", 1),
        ("max_delivery_count", 2**31 - 1),
        ("default_message_time_to_live", timedelta(seconds=1)),
        ("auto_delete_on_idle", timedelta(minutes=5)),
        ("lock_duration", timedelta(seconds=1)),
        ("lock_duration", timedelta(minutes=5)),
        ("duplicate_detection_history_time_window", timedelta(seconds=20)),
        ("duplicate_detection_history_time_window", timedelta(days=7)),
        ("status", EntityStatus.RECEIVE_DISABLED),
        ("user_metadata", "x" * 1024),
        ("user_metadata", ""),
    ],
)
def test_a_setting_at_its_bound_is_taken(world: World, setting: str, value: Any) -> None:
    settings: dict[str, Any] = {setting: value}
    made = queue(world, **settings)
    assert (getattr(made, setting) or "") == value  # an empty text may be none


# -- messages ----------------------------------------------------------------------------------

BAD_FIELDS: dict[str, dict[str, Any]] = {
    "a text as body": {"body": "text"},
    "no body": {"body": None},
    "a long message_id": {"message_id": "x" * (MAX_ID_CHARACTERS + 1)},
    "a long session_id": {"session_id": "x" * (MAX_ID_CHARACTERS + 1)},
    "a long partition_key": {"partition_key": "x" * (MAX_ID_CHARACTERS + 1)},
    "a schedule without zone": {"scheduled_enqueue_time_utc": datetime(2030, 1, 1)},  # noqa: DTZ001
    "a property without name": {"application_properties": {"": 1}},
    "a property named by a number": {"application_properties": {1: 1}},
    "an object as property": {"application_properties": {"n": WRONG}},
    "None as property": {"application_properties": {"n": None}},
    "a list as property": {"application_properties": {"n": [1]}},
    "a property beyond 64 bits": {"application_properties": {"n": 2**63}},
    "a moment without zone": {"application_properties": {"at": datetime(2030, 1, 1)}},  # noqa: DTZ001
    "a text that is no UTF-8": {"subject": "\ud800"},
    "a property that is no UTF-8": {"application_properties": {"n": "\ud800"}},
    "a number as subject": {"subject": 7},
    "a number as message_id": {"message_id": 7},
    "bytes as session_id": {"session_id": b"s"},
    "a number as time_to_live": {"time_to_live": 60},
}


@pytest.mark.parametrize("bad", BAD_FIELDS)
def test_a_bad_message_is_refused(world: World, bad: str) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        send(world, "good", BrokeredMessage(**BAD_FIELDS[bad]))
    assert peek(world) == []


@pytest.mark.parametrize(
    "messages",
    [
        pa.record_batch({"body": [b"a"]}),
        pa.record_batch({"unrelated": [1]}),
        to_batch([message("a")]).slice(0, 0),
        [],
        ["a"],
        [None],
        None,
        7,
    ],
    ids=["body only", "no message", "no rows", "empty", "text", "none in it", "none", "number"],
)
def test_something_that_is_no_batch_of_messages_is_refused(world: World, messages: Any) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        world.ask(Send(QUEUE, messages))
    assert peek(world) == []


def test_columns_are_checked_like_objects(world: World) -> None:
    queue(world)
    batch = to_batch([message("a")])
    long_id = pa.array(["x" * (MAX_ID_CHARACTERS + 1)])
    at = batch.schema.get_field_index("message_id")
    with pytest.raises(InvalidArgumentError):
        world.ask(Send(QUEUE, batch.set_column(at, batch.schema.field(at), long_id)))
    assert peek(world) == []


# -- commands ----------------------------------------------------------------------------------

BAD_COMMANDS: dict[str, Callable[[], Command[Any]]] = {
    "a text as max_messages": lambda: Receive(QUEUE, cast("int", "1")),
    "no max_messages": lambda: Receive(QUEUE, cast("int", None)),
    "half a message": lambda: Receive(QUEUE, cast("int", 1.5)),
    "a number as wait": lambda: Receive(QUEUE, wait=cast("timedelta", 5)),
    "an object as mode": lambda: Receive(QUEUE, mode=WRONG),
    "an object as max_bytes": lambda: Receive(QUEUE, max_bytes=WRONG),
    "a text as session": lambda: Receive("sessions", session=cast("SessionLock", "s")),
    "a text to peek from": lambda: Peek(QUEUE, cast("int", "1")),
    "an object as deferred numbers": lambda: ReceiveDeferred(QUEUE, WRONG),
    "a text as deferred number": lambda: ReceiveDeferred(QUEUE, cast("list[int]", ["one"])),
    "an object as scheduled numbers": lambda: CancelScheduled(QUEUE, WRONG),
    "a text as scheduled number": lambda: CancelScheduled(QUEUE, cast("list[int]", ["one"])),
    "an object as lock tokens": lambda: RenewLocks(QUEUE, WRONG),
    "a text as lease size": lambda: LeaseRange(QUEUE, "me", cast("int", "1")),
    "no owner of a lease": lambda: LeaseRange(QUEUE, cast("str", None), 1),
    "a number as lease duration": lambda: LeaseRange(
        QUEUE, "me", 1, duration=cast("timedelta", 60)
    ),
    "a number as session_id": lambda: AcceptSession("sessions", cast("str", 7)),
    "a long session_id": lambda: AcceptSession("sessions", "x" * (MAX_ID_CHARACTERS + 1)),
    "a long wait for a session": lambda: AcceptSession("sessions", wait=2 * DAY),
    "an object as description": lambda: CreateEntity(WRONG),
    "an object as kind": lambda: ListEntities(WRONG),
}


@pytest.mark.parametrize("bad", BAD_COMMANDS)
def test_a_value_of_the_wrong_kind_is_refused(world: World, bad: str) -> None:
    queue(world)
    queue(world, "sessions", requires_session=True)
    with pytest.raises(InvalidArgumentError):
        world.ask(BAD_COMMANDS[bad]())


def test_something_that_is_no_command_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgumentError):
        world.ask(WRONG)


def test_no_mistake_of_a_caller_restarts_the_broker(world: World) -> None:
    queue(world)
    queue(world, "sessions", requires_session=True)
    restarts = []
    for bad, command in BAD_COMMANDS.items():
        try:
            world.ask(command())
        except BrokerRestartingError:
            restarts.append(bad)
        except MessagingError:
            pass
    assert restarts == []


def test_submit_never_raises(world: World) -> None:
    future = world.namespace.submit(Receive("nowhere"))
    assert isinstance(future.exception(timeout=10), EntityNotFoundError)


# -- what errors say ---------------------------------------------------------------------------


def test_an_error_of_the_caller_says_so_and_is_not_transient(world: World) -> None:
    error = world.namespace.submit(Receive("nowhere")).exception(timeout=10)
    assert isinstance(error, MessagingError)
    assert error.fault is FaultOwner.CALLER
    assert not error.is_transient
    assert "nowhere" in str(error)


def test_the_refusal_of_an_oversize_message_names_the_limit(world: World) -> None:
    world.need(Capability.MESSAGE_LIMIT)
    queue(world)
    with pytest.raises(MessageSizeExceededError, match=r"\d+"):
        send(world, message("x" * 300 * 1024))


def test_an_unknown_path_is_named(world: World) -> None:
    with pytest.raises(EntityNotFoundError, match="nowhere"):
        world.ask(DeleteRule("nowhere/Subscriptions/sport", "rule"))


def test_a_closed_namespace_refuses_work(world: World) -> None:
    queue(world)
    world.namespace.close()
    error = world.namespace.submit(Receive(QUEUE)).exception(timeout=10)
    assert isinstance(error, NamespaceClosedError)


def test_closing_ends_waiting_receives(world: World) -> None:
    queue(world)
    waiting = world.namespace.submit(Receive(QUEUE, wait=timedelta(hours=1)))
    world.namespace.close()
    try:
        assert waiting.result(timeout=10).num_rows == 0
    except MessagingError as error:
        assert isinstance(error, NamespaceClosedError)  # noqa: PT017


def test_a_moment_before_1970_is_a_moment(world: World) -> None:
    queue(world)
    long_ago = datetime(1900, 1, 1, tzinfo=UTC)
    send(world, message("a", application_properties={"at": long_ago}))
    assert peek(world)[0].application_properties["at"] == long_ago
