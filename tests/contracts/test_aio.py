"""The asyncio face: the same classes and methods, and what cancellation leaves behind."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import twinbus
from tests.inside import blocking_client
from tests.namespaces import address_of, door_of, embedded
from tests.waiting import until_async
from twinbus import (
    BrokeredMessage,
    Claim,
    MessagingFactory,
    QueueDescription,
    RuleDescription,
    SqlFilter,
    aio,
    dead_letter_path,
)
from twinbus.client.receiver import ReceiveOptions
from twinbus.client.state import FactoryState
from twinbus.errors import (
    EntityAlreadyExistsError,
    EntityNotFoundError,
    InvalidArgumentError,
    MessageLockLostError,
    MessageNotFoundError,
    NamespaceClosedError,
    SessionCannotBeLockedError,
)
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.opening import find_embedded

ORDERS, NEWS, SESSIONS = "orders", "news", "sessions"
NOW = timedelta(0)
SOON = timedelta(seconds=5)
LONG = timedelta(minutes=5)
INNER = {
    "courier",
    "joining_a_pairing",
    "request",
}  # what parts of the library talk about among themselves


@dataclass
class World:
    """A manager and a factory of one namespace."""

    connection: str
    broker: Callable[[], EmbeddedNamespace | None]
    manager: aio.NamespaceManager
    factory: aio.MessagingFactory

    def queue(self, options: ReceiveOptions | None = None) -> aio.QueueClient:
        return self.factory.create_queue_client(ORDERS, options)

    async def send(self, *bodies: bytes) -> None:
        await self.queue().send_batch([BrokeredMessage(body) for body in bodies])

    async def until_a_receive_waits(self) -> None:
        async def does_wait() -> bool:
            broker = self.broker()
            assert broker is not None
            return broker.snapshot().open_receives > 0

        await until_async(does_wait, "a receive waits")

    async def take(self, path: str = ORDERS) -> list[bytes]:
        receiver = self.factory.create_message_receiver(path)
        messages = await receiver.receive_batch(100, NOW)
        await receiver.complete(messages)
        return [message.body for message in messages]


Test = Callable[[Callable[[World], Awaitable[None]]], None]


@pytest.fixture(params=["embedded", "server"])
def within(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Test]:
    """Run a coroutine in a world with a queue, a queue with sessions and a topic."""

    def run(
        connection: str,
        broker: Callable[[], EmbeddedNamespace | None],
        work: Callable[[World], Awaitable[None]],
    ) -> None:
        async def main() -> None:
            async with opened(connection, broker) as world:
                await work(world)

        asyncio.run(asyncio.wait_for(main(), 30))

    if request.param == "embedded":
        connection = f"Endpoint=embedded://{tmp_path / 'shop'}"
        yield lambda work: run(connection, lambda: find_embedded(tmp_path / "shop"), work)
        return
    with embedded(tmp_path / "shop") as namespace, door_of(namespace) as door:
        yield lambda work: run(address_of(door).to_text(), lambda: namespace, work)


@asynccontextmanager
async def opened(
    connection: str, broker: Callable[[], EmbeddedNamespace | None]
) -> AsyncIterator[World]:
    async with (
        aio.NamespaceManager.from_connection_string(connection) as manager,
        aio.MessagingFactory.from_connection_string(connection) as factory,
    ):
        await manager.create_queue(ORDERS)
        await manager.create_queue(QueueDescription(path=SESSIONS, requires_session=True))
        await manager.create_topic(NEWS)
        yield World(connection, broker, manager, factory)


class BlockedCall:
    """A blocking method that has done its work, and returns when it is let go."""

    def __init__(self, client: Any, name: str) -> None:
        blocking = blocking_client(client)
        self._method = getattr(blocking, name)
        self._may_return = threading.Event()
        self.has_worked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        setattr(blocking, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._method(*args, **kwargs)
        self._loop.call_soon_threadsafe(self.has_worked.set)
        assert self._may_return.wait(10)
        return found

    async def cancelled(self, work: Coroutine[Any, Any, Any]) -> None:
        """Cancel work while its result is on the way."""
        task = asyncio.create_task(work)
        await self.has_worked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        self._may_return.set()


# -- the same classes and methods ------------------------------------------------------------------


def members(kind: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and name not in INNER
    }


def parameters(method: Any) -> list[tuple[str, object]]:
    found = list(inspect.signature(method).parameters.values())
    return [(item.name, item.default) for item in found if item.name != "self"]


@pytest.mark.parametrize("name", aio.__all__)
def test_a_class_has_every_method_of_its_blocking_twin(name: str) -> None:
    twin, kind = getattr(twinbus, name), getattr(aio, name)
    assert sorted(set(members(twin)) - set(members(kind))) == []


@pytest.mark.parametrize("name", aio.__all__)
def test_a_method_has_the_parameters_of_its_blocking_twin(name: str) -> None:
    twin, kind = members(getattr(twinbus, name)), members(getattr(aio, name))
    methods = [item for item in sorted(set(twin) & set(kind)) if inspect.isroutine(twin[item])]
    reported = {method: parameters(kind[method]) for method in methods}
    assert reported == {method: parameters(twin[method]) for method in methods}


@pytest.mark.parametrize("name", aio.__all__)
def test_every_method_is_explained(name: str) -> None:
    kind = getattr(aio, name)
    methods = [member for member in members(kind).values() if inspect.isroutine(member)]
    assert all(inspect.getdoc(item) for item in (kind, *methods))


def test_every_client_class_has_a_twin() -> None:
    clients = {
        name
        for name in twinbus.__all__
        if inspect.isclass(getattr(twinbus, name))
        and (hasattr(getattr(twinbus, name), "close") or name == "ReceivedMessage")
    }
    assert clients == set(aio.__all__)


# -- each area -------------------------------------------------------------------------------------


def test_entities_are_managed(within: Test) -> None:
    async def work(world: World) -> None:
        manager = world.manager
        made = await manager.update_queue(QueueDescription(path=ORDERS, max_delivery_count=3))
        assert await manager.get_queue(ORDERS) == made
        assert [queue.path for queue in await manager.list_queues()] == [ORDERS, SESSIONS]
        assert await manager.topic_exists(NEWS)
        await manager.delete_topic(NEWS)
        assert not await manager.topic_exists(NEWS)
        with pytest.raises(EntityNotFoundError):
            await manager.get_topic(NEWS)
        assert (await manager.get_runtime_properties(ORDERS)).active_message_count == 0
        assert (await manager.read_meter()).num_rows > 0

    within(work)


def test_with_exist_ok_an_existing_entity_is_returned_as_it_is(within: Test) -> None:
    async def work(world: World) -> None:
        manager = world.manager
        assert await manager.create_queue(SESSIONS, exist_ok=True) == await manager.get_queue(
            SESSIONS
        )
        assert await manager.create_topic(NEWS, exist_ok=True) == await manager.get_topic(NEWS)
        made = await manager.create_subscription(NEWS, "sport", exist_ok=True)
        assert await manager.create_subscription(NEWS, "sport", exist_ok=True) == made
        with pytest.raises(EntityAlreadyExistsError):
            await manager.create_topic(ORDERS, exist_ok=True)

    within(work)


def test_rules_and_subscriptions_are_managed(within: Test) -> None:
    async def work(world: World) -> None:
        urgent = RuleDescription("urgent", SqlFilter("priority > 5"))
        await world.manager.create_subscription(NEWS, "sport", rule=urgent)
        assert await world.manager.get_rule(NEWS, "sport", "urgent") == urgent
        async with world.factory.create_subscription_client(NEWS, "sport") as sport:
            await sport.add_rule(RuleDescription("all"))
            await sport.remove_rule("urgent")
            assert [rule.name for rule in await sport.get_rules()] == ["all"]
            async with world.factory.create_topic_client(NEWS) as news:
                await news.send(BrokeredMessage(b"goal"))
            message = await sport.receive(SOON)
            assert message is not None
            await message.complete()

    within(work)


def test_keys_are_managed(within: Test) -> None:
    async def work(world: World) -> None:
        made = await world.manager.create_key("shop", [Claim.SEND], entity_path=ORDERS)
        assert await world.manager.get_key("shop", ORDERS) == made
        again = await world.manager.regenerate_key("shop", "primary", ORDERS)
        assert again.primary != made.primary
        await world.manager.delete_key("shop", ORDERS)
        assert "shop" not in [key.name for key in await world.manager.list_keys()]

    within(work)


def test_messages_are_sent_received_and_settled(within: Test) -> None:
    async def work(world: World) -> None:
        async with world.queue() as queue:
            assert queue.path == ORDERS
            await world.send(b"a", b"b", b"c", b"d")
            a, b, c, d = await queue.receive_batch(4, SOON)
            assert await d.renew_lock() > datetime.now(UTC)
            await a.complete()
            await b.abandon()
            await c.dead_letter("bad", "worse")
            await d.defer()
            with pytest.raises(MessageLockLostError):
                await a.complete()
            assert [message.body for message in await queue.peek(max_messages=10)] == [b"b", b"d"]
            assert d.sequence_number is not None
            (deferred,) = await queue.receive_deferred(d.sequence_number)
            await queue.complete([deferred])
            assert await world.take(dead_letter_path(ORDERS)) == [b"c"]
            assert await world.take() == [b"b"]

    within(work)


def test_an_empty_queue_gives_nothing(within: Test) -> None:
    async def work(world: World) -> None:
        assert await world.queue().receive(NOW) is None

    within(work)


def test_scheduled_messages_can_be_cancelled(within: Test) -> None:
    async def work(world: World) -> None:
        sender = world.factory.create_message_sender(ORDERS)
        later = datetime.now(UTC) + timedelta(hours=1)
        numbers = await sender.schedule(BrokeredMessage(b"later"), at=later)
        properties = await world.manager.get_runtime_properties(ORDERS)
        assert properties.scheduled_message_count == 1
        await sender.cancel_scheduled(numbers)
        assert await world.queue().peek() == []

    within(work)


def test_many_single_sends_are_in_flight_at_once(within: Test) -> None:
    async def work(world: World) -> None:
        bodies = [f"{at}".encode() for at in range(100)]
        async with world.queue().pipelined() as pipeline:
            await asyncio.gather(*(pipeline.send(BrokeredMessage(body)) for body in bodies))
            await pipeline.flush()
            with pytest.raises(InvalidArgumentError):
                await pipeline.send("tea")  # type: ignore[arg-type]
        assert sorted(await world.take()) == sorted(bodies)

    within(work)


def test_a_locked_session_has_a_state(within: Test) -> None:
    async def work(world: World) -> None:
        sender = world.factory.create_message_sender(SESSIONS)
        await sender.send(BrokeredMessage(b"tea", session_id="table 7"))
        async with await world.factory.accept_message_session(SESSIONS, wait=SOON) as session:
            assert session.session_id == "table 7"
            await session.set_state(b"seated")
            assert await session.get_state() == b"seated"
            assert await session.renew_lock() == session.locked_until_utc
            with pytest.raises(SessionCannotBeLockedError):
                await world.factory.accept_message_session(SESSIONS, "table 7", NOW)
            message = await session.receive(SOON)
            assert message is not None
            await message.complete()

    within(work)


def test_messages_are_iterated_until_the_receiver_is_closed(within: Test) -> None:
    async def work(world: World) -> None:
        await world.send(b"a", b"b", b"c")
        seen = []
        async with world.queue() as queue:
            async for message in queue:
                seen.append(message.body)
                await message.complete()
                if len(seen) == 3:
                    await queue.close()
        assert seen == [b"a", b"b", b"c"]

    within(work)


def test_closing_a_receiver_ends_an_iteration_that_waits(within: Test) -> None:
    async def work(world: World) -> None:
        queue = world.queue()

        async def read() -> list[bytes]:
            return [message.body async for message in queue]

        reading = asyncio.create_task(read())
        await world.until_a_receive_waits()
        await queue.close()
        assert await asyncio.wait_for(reading, 2) == []

    within(work)


def test_many_receives_wait_at_once(within: Test) -> None:
    async def work(world: World) -> None:
        queue = world.queue()
        waiting = [asyncio.create_task(queue.receive(LONG)) for _ in range(50)]
        await world.send(*(b"tea" for _ in waiting))
        found = await asyncio.gather(*waiting)
        assert [message.body for message in found if message is not None] == [b"tea"] * 50

    within(work)


# -- cancellation ----------------------------------------------------------------------------------


def test_a_cancelled_receive_takes_no_message_away(within: Test) -> None:
    async def work(world: World) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(world.queue().receive(LONG), 0.1)
        await world.send(b"tea")

        async def is_there() -> bool:
            return await world.take() == [b"tea"]

        await until_async(is_there)

    within(work)


@pytest.mark.parametrize("options", [None, ReceiveOptions(auto_renew_for=LONG)])
def test_a_cancelled_receive_gives_back_what_was_on_the_way(
    within: Test, options: ReceiveOptions | None
) -> None:
    async def work(world: World) -> None:
        await world.send(b"tea", b"coffee")
        queue = world.queue(options)
        found = BlockedCall(queue, "receive_batch")
        await found.cancelled(queue.receive_batch(2, SOON))
        await until_async(lambda: is_back(world, [b"tea", b"coffee"], 0))

    within(work)


def test_a_cancelled_receive_of_deferred_messages_gives_them_back(within: Test) -> None:
    async def work(world: World) -> None:
        await world.send(b"tea")
        queue = world.queue()
        message = await queue.receive(SOON)
        assert message is not None
        assert message.sequence_number is not None
        number = message.sequence_number
        await message.defer()
        found = BlockedCall(queue, "receive_deferred")
        await found.cancelled(queue.receive_deferred(number))

        async def is_available() -> bool:
            try:
                (again,) = await world.queue().receive_deferred(number)
            except MessageNotFoundError:
                return await world.take() == [b"tea"]
            return again.body == b"tea"

        await until_async(is_available)

    within(work)


def test_a_cancelled_accept_gives_the_session_back(within: Test) -> None:
    async def work(world: World) -> None:
        found = BlockedCall(world.factory, "accept_message_session")
        await found.cancelled(world.factory.accept_message_session(SESSIONS, "table 7", NOW))
        factory = aio.MessagingFactory.from_connection_string(world.connection)
        async with factory, await factory.accept_message_session(SESSIONS, "table 7", SOON):
            pass

    within(work)


async def is_back(world: World, bodies: list[bytes], failures: int) -> bool:
    """Whether messages can be received again, having failed so often."""
    messages = await world.queue().receive_batch(10, NOW)
    found = [(message.body, message.delivery_count) for message in messages]
    return found == [(body, failures) for body in bodies]


# -- the end ---------------------------------------------------------------------------------------


def test_closing_twice_is_harmless(within: Test) -> None:
    async def work(world: World) -> None:
        queue = world.queue()
        for closable in (queue, world.factory, world.manager):
            await closable.close()
            await closable.close()
        assert world.factory.state is FactoryState.CLOSED

    within(work)


def test_a_client_can_be_closed_after_its_factory(within: Test) -> None:
    async def work(world: World) -> None:
        queue = world.queue()
        await world.factory.close()
        await queue.close()

    within(work)


def test_what_was_closed_refuses_work_as_its_blocking_twin_does(within: Test) -> None:
    async def work(world: World) -> None:
        queue = world.queue()
        await world.factory.close()
        with pytest.raises(NamespaceClosedError):
            await queue.send(BrokeredMessage())
        with pytest.raises(NamespaceClosedError):
            await queue.receive(NOW)

    within(work)


def test_a_factory_that_closes_ends_receives_that_wait(within: Test) -> None:
    async def work(world: World) -> None:
        factory = aio.MessagingFactory(MessagingFactory.from_connection_string(world.connection))
        waiting = asyncio.create_task(factory.create_queue_client(ORDERS).receive(LONG))
        await world.until_a_receive_waits()
        await factory.close()
        with pytest.raises(twinbus.MessagingError):
            await asyncio.wait_for(waiting, 6)

    within(work)
