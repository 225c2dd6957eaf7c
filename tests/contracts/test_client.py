"""The client: what applications hold in their hands, whatever the way to the namespace."""

import inspect
import pkgutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

import twinbus
from tests.contracts.keys import ROOT
from twinbus import (
    BrokeredMessage,
    Claim,
    Disposition,
    EntityAlreadyExistsError,
    EntityNotFoundError,
    EntityStatus,
    FactoryFaultedError,
    FactoryState,
    InvalidArgumentError,
    InvalidOperationError,
    MessageLockLostError,
    MessageReceiver,
    MessageSizeExceededError,
    MessageState,
    MessagingError,
    MessagingFactory,
    NamespaceClosedError,
    NamespaceManager,
    PipelinedSender,
    QueueClient,
    QueueDescription,
    ReceivedMessage,
    ReceiveMode,
    ReceiveOptions,
    RetryPolicy,
    RuleDescription,
    SessionCannotBeLockedError,
    SessionLockLostError,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    dead_letter_path,
    subscription_path,
)
from twinbus.broker.turn.engine import EngineSettings
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString, Place
from twinbus.ledger import NO_LEDGER
from twinbus.limits import MAX_MESSAGE_BYTES
from twinbus.message import to_batch, to_messages
from twinbus.namespace.contract import Namespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.opening import open_namespace
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command, PutKey, RenewLocks, RenewSession
from twinbus.server.door import Door

R = TypeVar("R")
ORDERS, NEWS, SESSIONS = "orders", "news", "sessions"
NOW = timedelta(0)
AHEAD = ReceiveOptions(prefetch_count=10)
DELETE = ReceiveOptions(mode=ReceiveMode.RECEIVE_AND_DELETE)
RENEWED = ReceiveOptions(auto_renew_for=timedelta(minutes=10))


class Observed:
    """A namespace that remembers which requests were answered."""

    def __init__(self, inner: Namespace) -> None:
        self.inner = inner
        self._answered: Counter[type] = Counter()
        self._changed = threading.Condition()

    @property
    def id(self) -> str:
        return self.inner.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.inner.capabilities

    def submit(self, command: Command[R]) -> "Future[R]":
        return self.inner.submit(command)

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        reply = self.inner.ask(command, timeout_s)
        with self._changed:
            self._answered[type(command)] += 1
            self._changed.notify_all()
        return reply

    def close(self) -> None:
        self.inner.close()

    def wait_for(self, kind: type, count: int) -> None:
        """Return when so many requests of a kind have been answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._answered[kind] >= count, timeout=20)

    def count(self, kind: type) -> int:
        with self._changed:
            return self._answered[kind]


@dataclass
class Site:
    """A namespace, a factory and a manager of it, and the clock they live by."""

    clock: ManualClock
    connect: Callable[[], Namespace]
    factory: MessagingFactory = field(init=False)
    manager: NamespaceManager = field(init=False)
    observed: Observed = field(init=False)

    def __post_init__(self) -> None:
        self.observed = Observed(self.connect())
        self.factory = MessagingFactory(
            self.observed, name="contoso", clock=self.clock, retry_policy=RetryPolicy()
        )
        self.manager = NamespaceManager(
            self.connect(), clock=self.clock, retry_policy=RetryPolicy()
        )

    def pass_time(self, **span: float) -> None:
        self.clock.advance(timedelta(**span))

    def send(self, *texts: str, path: str = ORDERS, **fields: Any) -> None:
        sender = self.factory.create_message_sender(path)
        sender.send_batch([message(text, **fields) for text in texts])

    def take(self, path: str = ORDERS) -> list[str]:
        """Receive and delete what is there now, as somebody else; return the bodies."""
        with MessagingFactory(self.connect(), clock=self.clock) as other:
            return bodies(other.create_message_receiver(path, DELETE).receive_batch(1000, NOW))

    def receiver(self, options: ReceiveOptions | None = None) -> MessageReceiver:
        return self.factory.create_message_receiver(ORDERS, options)

    def watch(self) -> list[FactoryState]:
        seen: list[FactoryState] = []
        self.factory.on_state_change(seen.append)
        return seen


@pytest.fixture(params=["embedded", "server"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    clock = ManualClock()
    with ExitStack() as stack:
        if request.param == "embedded":
            where = ConnectionString(place=Place.EMBEDDED, directory=tmp_path / "namespace")
        else:
            inner = stack.enter_context(
                EmbeddedNamespace(
                    EngineSettings(directory=tmp_path / "namespace", ledger=NO_LEDGER), clock
                )
            )
            inner.ask(PutKey(ROOT))
            door = stack.enter_context(closing(Door(inner, clock)))
            where = ConnectionString(
                place=Place.SERVER,
                host="127.0.0.1",
                port=door.port,
                key_name=ROOT.name,
                key=ROOT.primary,
            )
        site = Site(clock, lambda: open_namespace(where, clock))
        stack.enter_context(site.manager)
        stack.enter_context(site.factory)
        site.manager.create_queue(ORDERS)
        site.manager.create_queue(QueueDescription(path=SESSIONS, requires_session=True))
        site.manager.create_topic(NEWS)
        site.manager.create_subscription(NEWS, "eu")
        yield site


def message(text: str = "order", **fields: Any) -> BrokeredMessage:
    return BrokeredMessage(body=text.encode(), **fields)


def bodies(messages: Any) -> list[str]:
    return [one.body.decode() for one in messages]


def got(received: ReceivedMessage | None) -> ReceivedMessage:
    assert received is not None
    return received


# -- the public face -------------------------------------------------------------------------------

CLASSES_OF_THE_SPECIFICATION = [
    "MessagingFactory",
    "NamespaceManager",
    "QueueClient",
    "TopicClient",
    "SubscriptionClient",
    "MessageSender",
    "MessageReceiver",
    "MessageSession",
    "BrokeredMessage",
    "QueueDescription",
    "TopicDescription",
    "SubscriptionDescription",
    "RetryPolicy",
    "PairedNamespaceOptions",
    "SendAvailabilityPairedNamespaceOptions",
    "MessagingError",
]


def classes() -> dict[str, type]:
    """Return every class of the package by its name."""
    modules = [
        import_module(module.name)
        for module in pkgutil.walk_packages(twinbus.__path__, "twinbus.")
        if not module.name.startswith("twinbus.pipeline.")  # old names, which warn
    ]
    return {
        name: kind
        for module in modules
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__
    }


def test_what_the_public_face_lists_can_be_imported_and_is_listed_once_in_order() -> None:
    assert all(hasattr(twinbus, name) for name in twinbus.__all__)
    assert len(set(twinbus.__all__)) == len(twinbus.__all__)
    imported = {
        name
        for name, value in vars(twinbus).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert imported == set(twinbus.__all__)


def test_the_classes_of_the_specification_are_in_the_public_face() -> None:
    made = classes()
    missing = [
        name
        for name in CLASSES_OF_THE_SPECIFICATION
        if name in made and name not in twinbus.__all__
    ]
    assert missing == []
    assert "MessagingFactory" in made


def test_every_kind_of_messaging_error_is_in_the_public_face() -> None:
    kinds = {
        name
        for name, kind in classes().items()
        if issubclass(kind, MessagingError) and kind.__module__ == "twinbus.errors"
    }
    assert kinds - set(twinbus.__all__) == set()


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
    one, two, three = sender.schedule([message("1"), message("2"), message("3")], at)
    sender.cancel_scheduled(one)
    sender.cancel_scheduled([two])
    assert [m.sequence_number for m in site.receiver().peek(max_messages=9)] == [three]
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
        before = [pipeline.send(one) for one in sent[:25]]
        alone = pipeline.send(large)
        after = [pipeline.send(one) for one in sent[25:]]
    assert isinstance(alone.exception(timeout=0), MessageSizeExceededError)
    assert [future.exception(timeout=0) for future in before + after] == [None] * 50
    assert sorted(site.take()) == sorted(bodies(sent))


def test_a_message_without_a_session_fails_alone(site: Site) -> None:
    with site.factory.create_message_sender(SESSIONS).pipelined() as pipeline:
        good = [pipeline.send(message(session_id="s")) for _ in range(5)]
        bad = pipeline.send(message())
    assert isinstance(bad.exception(timeout=0), MessagingError)
    assert [future.exception(timeout=0) for future in good] == [None] * 5


def test_what_is_no_message_fails_alone(site: Site) -> None:
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


# -- receiving -------------------------------------------------------------------------------------


def test_a_receiver_gets_the_next_message_or_none(site: Site) -> None:
    site.send("one")
    with site.receiver() as receiver:
        assert got(receiver.receive(NOW)).body == b"one"
        assert receiver.receive(NOW) is None


def test_a_receiver_takes_what_is_there_up_to_a_number(site: Site) -> None:
    site.send("1", "2", "3")
    receiver = site.receiver()
    assert bodies(receiver.receive_batch(2, NOW)) == ["1", "2"]
    assert bodies(receiver.receive_batch(2, NOW)) == ["3"]
    assert receiver.receive_batch(2, NOW) == []


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("options", [None, AHEAD], ids=["plain", "prefetch"])
def test_a_receiver_is_asked_for_at_least_one_message(
    site: Site, count: int, options: ReceiveOptions | None
) -> None:
    site.send("1", "2", "3")
    with site.receiver(options) as receiver:
        receiver.receive(NOW)
        with pytest.raises(InvalidArgumentError):
            receiver.receive_batch(count, NOW)


def test_a_waiting_receiver_gets_what_is_sent_meanwhile(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(site.receiver().receive, timedelta(minutes=5))
        site.send("at last")
        assert got(receiving.result(timeout=20)).body == b"at last"


def test_a_waiting_receiver_gets_nothing_when_its_wait_is_over(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(site.receiver().receive, timedelta(minutes=5))
        while not wait([receiving], timeout=0.01).done:
            site.pass_time(minutes=5)
        assert receiving.result() is None


def test_what_is_received_and_deleted_is_gone_and_has_no_lock(site: Site) -> None:
    site.send("one")
    (received,) = site.receiver(DELETE).receive_batch(9, NOW)
    assert received.lock_token is None
    with pytest.raises(InvalidOperationError):
        received.complete()
    assert site.receiver().peek() == []


@pytest.mark.parametrize(
    "broken",
    [
        {"mode": "peek_lock"},
        {"prefetch_count": -1},
        {"prefetch_count": 10_001},
        {"prefetch_count": 1.5},
        {"auto_renew_for": 60},
        {"auto_renew_for": timedelta(seconds=-1)},
        {"mode": ReceiveMode.RECEIVE_AND_DELETE, "prefetch_count": 1},
        {"mode": ReceiveMode.RECEIVE_AND_DELETE, "auto_renew_for": timedelta(minutes=1)},
    ],
)
def test_options_that_break_a_rule_cannot_be_made(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        ReceiveOptions(**broken)


def test_columns_are_received_and_settled_by_their_tokens(site: Site) -> None:
    site.send("1", "2")
    receiver = site.receiver()
    batch = receiver.receive_columns(9, NOW)
    assert bodies(to_messages(batch)) == ["1", "2"]
    receiver.settle_columns(batch.column("lock_token"), Disposition.COMPLETE)
    assert receiver.peek() == []


def test_browsing_shows_also_what_is_deferred_or_scheduled_and_locks_nothing(site: Site) -> None:
    site.send("active", "deferred")
    receiver = site.receiver()
    _, second = receiver.receive_batch(2, NOW)
    second.defer()
    site.factory.create_message_sender(ORDERS).schedule(
        message("scheduled"), site.clock.now() + timedelta(hours=1)
    )
    site.pass_time(minutes=2)
    found = receiver.peek(max_messages=9)
    assert {one.body.decode(): one.state for one in found} == {
        "active": MessageState.ACTIVE,
        "deferred": MessageState.DEFERRED,
        "scheduled": MessageState.SCHEDULED,
    }
    assert bodies(receiver.peek(from_sequence_number=(second.sequence_number or 0) + 1)) == [
        "scheduled"
    ]
    assert all(one.lock_token is None for one in found)


def test_iterating_gives_messages_as_they_come_until_the_receiver_is_closed(site: Site) -> None:
    site.send("1", "2", "3")
    receiver = site.receiver()
    seen = []
    for received in receiver:
        received.complete()
        seen.append(received.body.decode())
        if len(seen) == 3:
            receiver.close()
    assert seen == ["1", "2", "3"]


# -- settling --------------------------------------------------------------------------------------


def test_a_completed_message_is_not_delivered_again(site: Site) -> None:
    site.send("one")
    got(site.receiver().receive(NOW)).complete()
    site.pass_time(hours=1)
    assert site.take() == []


def test_an_abandoned_message_comes_back_and_counts_a_failed_delivery(site: Site) -> None:
    site.send("one")
    receiver = site.receiver()
    got(receiver.receive(NOW)).abandon()
    again = got(receiver.receive(NOW))
    assert (again.body, again.delivery_count) == (b"one", 1)


def test_a_deferred_message_comes_back_only_by_its_number(site: Site) -> None:
    site.send("1", "2", "3")
    receiver = site.receiver()
    deferred = receiver.receive_batch(3, NOW)
    deferred[0].defer()
    receiver.defer(deferred[1:])
    assert receiver.receive(NOW) is None
    numbers = [one.sequence_number or 0 for one in deferred]
    assert bodies(receiver.receive_deferred(numbers[0])) == ["1"]
    (second, third) = receiver.receive_deferred(numbers[1:])
    second.complete()
    third.complete()
    assert bodies(receiver.peek(max_messages=9)) == ["1"]


def test_a_dead_lettered_message_says_why_in_the_dead_letter_queue(site: Site) -> None:
    site.send("bad")
    got(site.receiver().receive(NOW)).dead_letter("unreadable", "no such product")
    dead = site.factory.create_message_receiver(dead_letter_path(ORDERS))
    found = got(dead.receive(NOW))
    assert found.dead_letter_reason == "unreadable"
    assert found.dead_letter_error_description == "no such product"
    found.complete()
    assert dead.peek() == []


def test_several_messages_are_settled_in_one_operation(site: Site) -> None:
    site.send(*"123456")
    receiver = site.receiver()
    one, two, three, four, five, six = receiver.receive_batch(9, NOW)
    receiver.complete([one, two])
    receiver.abandon([three])
    receiver.defer([four])
    receiver.dead_letter([five, six], "reason")
    receiver.complete([])
    assert bodies(receiver.peek(max_messages=9)) == ["3", "4"]
    assert site.take(dead_letter_path(ORDERS)) == ["5", "6"]


def test_a_lock_can_be_renewed_by_the_message_and_by_the_receiver(site: Site) -> None:
    site.send("one")
    receiver = site.receiver()
    received = got(receiver.receive(NOW))
    site.pass_time(seconds=50)
    assert received.renew_lock() == site.clock.now() + timedelta(minutes=1)
    site.pass_time(seconds=50)
    assert receiver.renew_locks([received]) == site.clock.now() + timedelta(minutes=1)
    site.pass_time(seconds=50)
    received.complete()
    assert receiver.peek() == []


def test_a_lapsed_lock_cannot_be_settled_or_renewed(site: Site) -> None:
    site.send("one")
    received = got(site.receiver().receive(NOW))
    site.pass_time(minutes=1)
    with pytest.raises(MessageLockLostError):
        received.complete()
    with pytest.raises(MessageLockLostError):
        received.renew_lock()


def test_a_message_cannot_be_settled_twice(site: Site) -> None:
    site.send("one")
    received = got(site.receiver().receive(NOW))
    received.complete()
    with pytest.raises(InvalidOperationError, match="already completed"):
        received.complete()
    with pytest.raises(InvalidOperationError, match="already completed"):
        received.abandon()


def test_a_message_that_was_browsed_or_never_received_cannot_be_settled(site: Site) -> None:
    site.send("one")
    receiver = site.receiver()
    with pytest.raises(InvalidOperationError):
        receiver.complete(receiver.peek())
    with pytest.raises(InvalidOperationError):
        receiver.renew_locks(receiver.peek())
    with pytest.raises(InvalidOperationError):
        ReceivedMessage(body=b"made by hand").complete()


# -- fetching ahead --------------------------------------------------------------------------------


def test_messages_fetched_ahead_come_in_order_and_can_be_settled(site: Site) -> None:
    texts = [str(number) for number in range(35)]
    site.send(*texts)
    seen = []
    with site.receiver(AHEAD) as receiver:
        for _ in texts:
            received = got(receiver.receive(NOW))
            received.complete()
            seen.append(received.body.decode())
        assert receiver.receive(NOW) is None
    assert seen == texts
    assert site.take() == []


def test_closing_gives_back_what_was_fetched_ahead_and_not_read(site: Site) -> None:
    site.send("1", "2", "3", "4", "5")
    with site.receiver(AHEAD) as receiver:
        got(receiver.receive(NOW)).complete()
    left = site.receiver().receive_batch(9, NOW)
    assert bodies(left) == ["2", "3", "4", "5"]
    assert [one.delivery_count for one in left] == [0] * 4


def test_an_iteration_that_is_broken_off_leaves_nothing_locked_but_what_was_read(
    site: Site,
) -> None:
    site.send("1", "2", "3", "4", "5")
    with site.receiver(AHEAD) as receiver:
        for received in receiver:
            received.complete()
            break
    assert bodies(site.receiver().receive_batch(9, NOW)) == ["2", "3", "4", "5"]


def test_an_iteration_over_messages_fetched_ahead_ends_when_the_receiver_is_closed(
    site: Site,
) -> None:
    site.send("1", "2", "3", "4", "5")
    receiver = site.receiver(AHEAD)
    seen = []
    for received in receiver:
        seen.append(received.body.decode())
        received.complete()
        receiver.close()
    assert seen == ["1"]


def test_messages_fetched_ahead_whose_locks_lapsed_are_not_handed_out(site: Site) -> None:
    site.send("1", "2", "3")
    with site.receiver(AHEAD) as receiver:
        got(receiver.receive(NOW)).complete()
        site.pass_time(minutes=2)
        second = got(receiver.receive(NOW))
        assert second.body == b"2"
        second.complete()
        third = got(receiver.receive(NOW))
        third.complete()
    assert site.take() == []


def test_messages_that_come_later_are_fetched_too(site: Site) -> None:
    with site.receiver(AHEAD) as receiver:
        assert receiver.receive(NOW) is None
        site.send("1", "2")
        found = [receiver.receive(NOW), receiver.receive(NOW)]
    assert bodies(filter(None, found)) == ["1", "2"]


def test_a_batch_can_be_received_from_what_was_fetched_ahead(site: Site) -> None:
    site.send(*"123456")
    with site.receiver(AHEAD) as receiver:
        assert bodies(receiver.receive_batch(2, NOW)) == ["1", "2"]
        assert bodies(receiver.receive_batch(3, NOW)) == ["3", "4", "5"]
    assert site.take() == ["6"]


# -- renewal ---------------------------------------------------------------------------------------


def test_a_lock_is_renewed_by_itself_while_the_application_works(site: Site) -> None:
    site.send("one")
    with site.receiver(RENEWED) as receiver:
        received = got(receiver.receive(NOW))
        for times in range(1, 6):
            site.pass_time(seconds=40)
            site.observed.wait_for(RenewLocks, times)
        received.complete()
    assert site.take() == []


def test_a_lock_is_renewed_no_longer_than_asked_for(site: Site) -> None:
    site.send("one")
    options = ReceiveOptions(auto_renew_for=timedelta(seconds=50))
    with site.receiver(options) as receiver:
        received = got(receiver.receive(NOW))
        site.pass_time(seconds=40)
        site.observed.wait_for(RenewLocks, 1)
        site.pass_time(seconds=40)
        site.pass_time(seconds=40)
        with pytest.raises(MessageLockLostError):
            received.complete()
    assert site.observed.count(RenewLocks) == 1


def test_what_was_settled_is_not_renewed(site: Site) -> None:
    site.send("done", "held")
    with site.receiver(RENEWED) as receiver:
        done, held = receiver.receive_batch(2, NOW)
        done.abandon()
        site.pass_time(seconds=40)
        site.observed.wait_for(RenewLocks, 1)
        site.pass_time(seconds=40)
        site.observed.wait_for(RenewLocks, 2)
        held.complete()
    assert site.observed.count(RenewLocks) == 2
    assert site.take() == ["done"]


def test_a_closed_receiver_renews_nothing(site: Site) -> None:
    site.send("one")
    with site.receiver(RENEWED) as receiver:
        receiver.receive(NOW)
    site.pass_time(seconds=61)
    assert site.take() == ["one"]
    assert site.observed.count(RenewLocks) == 0


def test_a_session_is_renewed_by_itself(site: Site) -> None:
    site.send("one", path=SESSIONS, session_id="s")
    with site.factory.accept_message_session(SESSIONS, "s", NOW, RENEWED) as session:
        received = got(session.receive(NOW))
        for times in range(1, 4):
            site.pass_time(seconds=40)
            site.observed.wait_for(RenewSession, times)
        received.complete()
        session.set_state(b"still held")


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


def test_a_session_is_held_by_one_and_free_when_closed(site: Site) -> None:
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


def test_the_state_of_a_session_outlives_those_who_hold_it(site: Site) -> None:
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


# -- closing ---------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Any], Any]] = {
    "send": lambda queue: queue.send(message()),
    "send_batch": lambda queue: queue.send_batch([message()]),
    "schedule": lambda queue: queue.schedule(message(), datetime.fromisoformat("2031-01-01T00Z")),
    "cancel_scheduled": lambda queue: queue.cancel_scheduled(1),
    "pipelined": lambda queue: queue.pipelined(),
    "receive": lambda queue: queue.receive(NOW),
    "receive_batch": lambda queue: queue.receive_batch(1, NOW),
    "receive_columns": lambda queue: queue.receive_columns(1, NOW),
    "receive_deferred": lambda queue: queue.receive_deferred(1),
    "peek": lambda queue: queue.peek(),
    "accept_message_session": lambda queue: queue.accept_message_session("a", NOW),
}


def perform(call: str, queue: QueueClient) -> None:
    """Make a call of a client; a pipelined sender is used, too."""
    made = CALLS[call](queue)
    if isinstance(made, PipelinedSender):
        with made:
            made.send(message()).result(timeout=10)


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_client_refuses_while_its_factory_goes_on(site: Site, call: str) -> None:
    queue = site.factory.create_queue_client(ORDERS)
    queue.close()
    queue.close()
    with pytest.raises(NamespaceClosedError, match=ORDERS):
        CALLS[call](queue)
    site.send("still open")


def test_a_closed_subscription_client_keeps_no_rules(site: Site) -> None:
    client = site.factory.create_subscription_client(NEWS, "eu")
    client.close()
    for call in (
        client.get_rules,
        lambda: client.add_rule(RuleDescription("new")),
        lambda: client.remove_rule("$Default"),
    ):
        with pytest.raises(NamespaceClosedError):
            call()


def test_a_closed_session_refuses(site: Site) -> None:
    session = site.factory.accept_message_session(SESSIONS, "a", NOW)
    session.close()
    for call in (
        session.get_state,
        session.renew_lock,
        lambda: session.set_state(b""),
        lambda: session.receive(NOW),
    ):
        with pytest.raises((NamespaceClosedError, SessionLockLostError)):
            call()


def test_leaving_a_context_closes_the_client(site: Site) -> None:
    with site.factory.create_message_sender(ORDERS) as sender:
        pass
    with pytest.raises(NamespaceClosedError):
        sender.send(message())


def test_a_client_may_be_closed_after_its_factory(site: Site) -> None:
    site.send("1", "2", "3")
    site.send("1", path=SESSIONS, session_id="a")
    receiver = site.receiver(ReceiveOptions(prefetch_count=10, auto_renew_for=timedelta(hours=1)))
    receiver.receive(NOW)
    session = site.factory.accept_message_session(SESSIONS, "a", NOW, RENEWED)
    site.factory.close()
    receiver.close()
    session.close()


# -- the life of a factory -------------------------------------------------------------------------


def test_a_factory_is_opened_then_closing_then_closed(site: Site) -> None:
    assert site.factory.name == "contoso"
    seen = [site.factory.state]
    site.factory.on_state_change(seen.append)
    site.factory.close()
    site.factory.close()
    seen.append(site.factory.state)
    opened, closing_, closed = FactoryState.OPENED, FactoryState.CLOSING, FactoryState.CLOSED
    assert seen == [opened, closing_, closed, closed]


def test_leaving_its_context_closes_a_factory(site: Site) -> None:
    with site.factory as factory:
        assert factory is site.factory
    assert site.factory.state is FactoryState.CLOSED


@pytest.mark.parametrize("call", CALLS)
def test_the_clients_of_a_closed_factory_refuse(site: Site, call: str) -> None:
    queue = site.factory.create_queue_client(ORDERS)
    site.factory.close()
    with pytest.raises(NamespaceClosedError):
        perform(call, queue)


def test_a_closed_factory_makes_no_clients(site: Site) -> None:
    site.factory.close()
    for make in (
        lambda: site.factory.create_message_sender(ORDERS),
        lambda: site.factory.create_message_receiver(ORDERS),
        lambda: site.factory.create_queue_client(ORDERS),
        lambda: site.factory.create_topic_client(NEWS),
        lambda: site.factory.create_subscription_client(NEWS, "eu"),
        lambda: site.factory.accept_message_session(SESSIONS, "a", NOW),
    ):
        with pytest.raises(NamespaceClosedError):
            make()


def test_a_watcher_can_stop_watching(site: Site) -> None:
    seen: list[FactoryState] = []
    stop = site.factory.on_state_change(seen.append)
    stop()
    site.factory.close()
    assert seen == []


def test_a_watcher_sees_the_state_it_is_told(site: Site) -> None:
    seen: list[bool] = []
    site.factory.on_state_change(lambda state: seen.append(site.factory.state is state))
    site.factory.close()
    assert seen == [True, True]


def test_a_watcher_may_stop_watching_when_it_is_called(site: Site) -> None:
    seen: list[FactoryState] = []

    def once(state: FactoryState) -> None:
        seen.append(state)
        stop()

    stop = site.factory.on_state_change(once)
    others = site.watch()
    site.factory.close()
    assert seen == [FactoryState.CLOSING]
    assert others == [FactoryState.CLOSING, FactoryState.CLOSED]


@pytest.mark.parametrize("call", CALLS)
def test_a_faulted_factory_refuses_every_call_with_its_cause(site: Site, call: str) -> None:
    queue = site.factory.create_queue_client(ORDERS)
    seen = site.watch()
    site.factory.fault("fabrikam is gone")
    assert seen == [FactoryState.FAULTED]
    with pytest.raises(FactoryFaultedError, match="fabrikam is gone") as caught:
        perform(call, queue)
    assert caught.value.cause == "fabrikam is gone"


def test_a_faulted_factory_stays_faulted(site: Site) -> None:
    seen = site.watch()
    site.factory.fault("first")
    site.factory.fault("second")
    site.factory.close()
    assert seen == [FactoryState.FAULTED]
    with pytest.raises(FactoryFaultedError, match="first"):
        site.factory.create_message_sender(ORDERS)


def test_a_closed_factory_cannot_be_faulted(site: Site) -> None:
    site.factory.close()
    site.factory.fault("too late")
    assert site.factory.state is FactoryState.CLOSED


def test_a_receive_that_waits_ends_when_its_factory_is_closed(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(site.receiver().receive, timedelta(hours=1))
        site.send("another path is used", path=SESSIONS, session_id="a")
        site.factory.close()
        site.manager.close()
        error = receiving.exception(timeout=20)
    assert error is None or isinstance(error, NamespaceClosedError)


def test_a_connection_string_decides_where_a_namespace_lives(tmp_path: Path) -> None:
    text = f"Endpoint=embedded://{tmp_path / 'here'};Name=contoso"
    clock = ManualClock()
    with (
        NamespaceManager.from_connection_string(text, clock=clock) as manager,
        MessagingFactory.from_connection_string(text, clock=clock) as factory,
    ):
        assert factory.name == "contoso"
        manager.create_queue(ORDERS)
        with factory.create_queue_client(ORDERS) as queue:
            queue.send(message())
            assert queue.receive(NOW)


def test_the_last_user_of_an_embedded_namespace_closes_it(tmp_path: Path) -> None:
    text = f"Endpoint=embedded://{tmp_path / 'here'}"
    clock = ManualClock()
    with NamespaceManager.from_connection_string(text, clock=clock) as manager:
        MessagingFactory.from_connection_string(text, clock=clock).close()
        manager.create_queue(ORDERS)
    with EmbeddedNamespace(tmp_path / "here", clock) as alone:
        assert alone is not None


# -- managing --------------------------------------------------------------------------------------


def test_a_queue_is_created_described_listed_changed_and_deleted(site: Site) -> None:
    manager = site.manager
    assert manager.create_queue("a") == QueueDescription(path="a")
    asked = QueueDescription(path="b", lock_duration=timedelta(seconds=5), user_metadata="mine")
    assert manager.create_queue(asked) == asked
    assert manager.get_queue("B") == asked
    assert [queue.path for queue in manager.list_queues()] == ["a", "b", ORDERS, SESSIONS]
    changed = replace(asked, status=EntityStatus.SEND_DISABLED)
    assert manager.update_queue(changed) == manager.get_queue("b") == changed
    manager.delete_queue("b")
    assert (manager.queue_exists("a"), manager.queue_exists("b")) == (True, False)
    with pytest.raises(EntityNotFoundError):
        manager.get_queue("b")


def test_a_topic_is_created_described_listed_changed_and_deleted(site: Site) -> None:
    manager = site.manager
    assert manager.create_topic("a") == TopicDescription(path="a")
    asked = TopicDescription(path="b", max_size_in_megabytes=7)
    assert manager.create_topic(asked) == asked == manager.get_topic("b")
    assert [topic.path for topic in manager.list_topics()] == ["a", "b", NEWS]
    changed = replace(asked, user_metadata="changed")
    assert manager.update_topic(changed) == manager.get_topic("b") == changed
    manager.delete_topic("b")
    assert (manager.topic_exists("a"), manager.topic_exists("b")) == (True, False)
    with pytest.raises(EntityNotFoundError):
        manager.get_topic("b")


def test_a_subscription_is_created_described_listed_changed_and_deleted(site: Site) -> None:
    manager = site.manager
    asked = SubscriptionDescription(topic_path=NEWS, name="asia", max_delivery_count=3)
    assert manager.create_subscription(NEWS, asked) == asked
    assert manager.get_subscription(NEWS, "asia") == asked
    assert [one.name for one in manager.list_subscriptions(NEWS)] == ["asia", "eu"]
    changed = replace(asked, max_delivery_count=4)
    assert manager.update_subscription(changed) == changed
    assert manager.get_subscription(NEWS, "asia") == changed
    manager.delete_subscription(NEWS, "asia")
    assert manager.subscription_exists(NEWS, "eu")
    assert not manager.subscription_exists(NEWS, "asia")
    with pytest.raises(EntityNotFoundError):
        manager.get_subscription(NEWS, "asia")


def test_rules_are_created_described_listed_and_deleted(site: Site) -> None:
    manager = site.manager
    rule = RuleDescription("sport", SqlFilter("kind = 'sport'"))
    manager.create_rule(NEWS, "eu", rule)
    assert manager.get_rule(NEWS, "eu", "SPORT") == rule
    assert [one.name for one in manager.list_rules(NEWS, "eu")] == ["$Default", "sport"]
    manager.delete_rule(NEWS, "eu", "$Default")
    assert manager.rule_exists(NEWS, "eu", "sport")
    assert not manager.rule_exists(NEWS, "eu", "$Default")
    with pytest.raises(EntityNotFoundError):
        manager.get_rule(NEWS, "eu", "$Default")
    with pytest.raises(EntityAlreadyExistsError):
        manager.create_rule(NEWS, "eu", rule)


def test_a_subscription_may_start_with_a_rule_in_place_of_the_catch_all(site: Site) -> None:
    rule = RuleDescription("sport", SqlFilter("kind = 'sport'"))
    site.manager.create_subscription(NEWS, "sport", rule)
    assert list(site.manager.list_rules(NEWS, "sport")) == [rule]


def test_what_exists_cannot_be_created_again(site: Site) -> None:
    for create in (
        lambda: site.manager.create_queue("ORDERS"),
        lambda: site.manager.create_topic(NEWS),
        lambda: site.manager.create_topic(ORDERS),
        lambda: site.manager.create_subscription(NEWS, "eu"),
    ):
        with pytest.raises(EntityAlreadyExistsError):
            create()


def test_an_entity_of_another_kind_is_not_the_one_asked_for(site: Site) -> None:
    manager = site.manager
    assert not manager.queue_exists(NEWS)
    assert not manager.topic_exists(ORDERS)
    with pytest.raises(EntityNotFoundError):
        manager.delete_queue(NEWS)
    with pytest.raises(EntityNotFoundError):
        manager.delete_topic(ORDERS)
    assert manager.topic_exists(NEWS)
    assert manager.queue_exists(ORDERS)


def test_with_exist_ok_an_existing_entity_is_returned_as_it_is(site: Site) -> None:
    manager = site.manager
    queue = manager.create_queue(QueueDescription(path="bills", max_delivery_count=3))
    topic = manager.create_topic(TopicDescription(path="sport", user_metadata="ours"))
    reader = manager.create_subscription(
        "sport", SubscriptionDescription(topic_path="sport", name="all", max_delivery_count=4)
    )
    assert manager.create_queue("BILLS", exist_ok=True) == queue
    assert manager.create_topic("sport", exist_ok=True) == topic
    assert manager.create_subscription("sport", "all", exist_ok=True) == reader


def test_with_exist_ok_a_missing_entity_is_created(site: Site) -> None:
    manager = site.manager
    urgent = RuleDescription("urgent", SqlFilter("priority > 5"))
    wanted = QueueDescription(path="bills", max_delivery_count=3)
    assert manager.create_queue(wanted, exist_ok=True) == wanted
    assert manager.create_topic("sport", exist_ok=True).path == "sport"
    assert manager.create_subscription("sport", "all", urgent, exist_ok=True).name == "all"
    assert list(manager.list_rules("sport", "all")) == [urgent]


def test_with_exist_ok_an_entity_of_another_kind_is_still_an_error(site: Site) -> None:
    with pytest.raises(EntityAlreadyExistsError, match="news exists already, as a topic"):
        site.manager.create_queue(NEWS, exist_ok=True)
    with pytest.raises(EntityAlreadyExistsError, match="orders exists already, as a queue"):
        site.manager.create_topic(ORDERS, exist_ok=True)


def test_runtime_properties_tell_what_an_entity_holds(site: Site) -> None:
    site.send("1", "2", "3")
    received = got(site.receiver().receive(NOW))
    received.dead_letter()
    later = site.clock.now() + timedelta(hours=1)
    site.factory.create_message_sender(ORDERS).schedule(message(), later)
    held = site.manager.get_runtime_properties(ORDERS)
    assert held.active_message_count == 2
    assert held.dead_letter_message_count == 1
    assert held.scheduled_message_count == 1
    assert site.manager.get_runtime_properties(NEWS).subscription_count == 1


def test_the_meter_tells_which_operations_there_were(site: Site) -> None:
    site.send("1")
    meter = site.manager.read_meter()
    assert isinstance(meter, pa.RecordBatch)
    assert meter.num_rows > 0


def test_keys_are_made_found_listed_and_deleted(site: Site) -> None:
    manager = site.manager
    root = manager.create_key("root", [Claim.MANAGE])
    sender = manager.create_key("sender", [Claim.SEND], ORDERS)
    assert len({root.primary, root.secondary, sender.primary, sender.secondary}) == 4
    assert manager.get_key("ROOT") == root
    assert manager.get_key("sender", "Orders") == sender
    assert [key for key in manager.list_keys() if key.name != ROOT.name] == [root, sender]
    manager.delete_key("sender", ORDERS)
    with pytest.raises(EntityNotFoundError):
        manager.get_key("sender", ORDERS)
    with pytest.raises(EntityNotFoundError):
        manager.delete_key("sender", ORDERS)


def test_one_secret_of_a_key_is_made_anew_and_the_other_stays(site: Site) -> None:
    manager = site.manager
    old = manager.create_key("key", [Claim.SEND], ORDERS)
    first = manager.regenerate_key("key", "primary", ORDERS)
    assert (first.primary == old.primary, first.secondary == old.secondary) == (False, True)
    second = manager.regenerate_key("key", "secondary", ORDERS)
    assert (second.primary == first.primary, second.secondary == old.secondary) == (True, False)
    assert manager.get_key("key", ORDERS) == second


def test_a_secret_that_no_key_has_is_not_made_anew(site: Site) -> None:
    old = site.manager.create_key("key", [Claim.SEND])
    with pytest.raises(InvalidArgumentError):
        site.manager.regenerate_key("key", "Primary")  # type: ignore[arg-type]
    assert site.manager.get_key("key") == old


def test_a_closed_manager_refuses(site: Site) -> None:
    site.manager.close()
    site.manager.close()
    with pytest.raises(NamespaceClosedError):
        site.manager.list_queues()
