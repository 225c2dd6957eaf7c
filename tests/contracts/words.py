"""The sentences the contract suite is written in."""

from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any, TypeVar

from tests.contracts.conftest import World
from tests.waiting import until
from twinbus.entities import (
    QueueDescription,
    RuleDescription,
    RuntimeProperties,
    SubscriptionDescription,
    TopicDescription,
    dead_letter_path,
)
from twinbus.errors import MessagingError
from twinbus.message import BrokeredMessage, to_messages, tokens_of
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    AcceptSession,
    Command,
    CreateEntity,
    Disposition,
    EntityKind,
    GetRuntimeProperties,
    ListEntities,
    Peek,
    Receive,
    ReceiveMode,
    Send,
    SendReceipt,
    SessionLock,
    Settle,
)

R = TypeVar("R")
QUEUE = "orders"
DEAD = dead_letter_path(QUEUE)
TOPIC = "news"
MANY = 1000
NO_TIME = timedelta(0)


def queue(world: World, path: str = QUEUE, **settings: Any) -> QueueDescription:
    made: QueueDescription = world.ask(CreateEntity(QueueDescription(path=path, **settings)))
    return made


def topic(world: World, path: str = TOPIC, **settings: Any) -> TopicDescription:
    made: TopicDescription = world.ask(CreateEntity(TopicDescription(path=path, **settings)))
    return made


def subscription(
    world: World, name: str, rule: RuleDescription | None = None, **settings: Any
) -> str:
    """Subscribe to the topic and return the path to receive from."""
    description = SubscriptionDescription(topic_path=TOPIC, name=name, **settings)
    world.ask(CreateEntity(description, rule))
    return description.path


def message(body: str = "order", **fields: Any) -> BrokeredMessage:
    return BrokeredMessage(body=body.encode(), **fields)


def send(world: World, *messages: BrokeredMessage | str, path: str = QUEUE) -> list[int]:
    """Send messages, or texts as their bodies; return their sequence numbers."""
    sent = [message(m) if isinstance(m, str) else m for m in messages]
    if Capability.RECEIPT_NUMBERS in world.namespace.capabilities:
        return list(world.ask(Send(path, sent)).sequence_numbers)
    before = {number for _, number in _waiting_in(world, path)}
    receipt: SendReceipt = world.ask(Send(path, sent))
    if any(receipt.sequence_numbers):
        return list(receipt.sequence_numbers)
    new = {name: number for name, number in _waiting_in(world, path) if number not in before}
    return [new.pop(item.message_id, 0) for item in sent]


def _waiting_in(world: World, path: str) -> list[tuple[str, int]]:
    """Look up ids and numbers of the messages in a queue; a topic has none."""
    try:
        found = to_messages(world.namespace.ask(Peek(path, 0, MANY), 10))
    except MessagingError:
        return []
    return [(item.message_id, item.sequence_number or 0) for item in found]


def receive(
    world: World, path: str = QUEUE, count: int = MANY, session: SessionLock | None = None
) -> list[BrokeredMessage]:
    """Lock what is there now."""
    return to_messages(world.ask(Receive(path, count, session=session)))


def receive_one(
    world: World, path: str = QUEUE, session: SessionLock | None = None
) -> BrokeredMessage:
    (only,) = receive(world, path, 1, session)
    return only


def take(world: World, path: str = QUEUE) -> list[str]:
    """Receive and delete what is there now; return the bodies."""
    batch = world.ask(Receive(path, MANY, mode=ReceiveMode.RECEIVE_AND_DELETE))
    return bodies(to_messages(batch))


def peek(world: World, path: str = QUEUE, start: int = 0) -> list[BrokeredMessage]:
    return to_messages(world.ask(Peek(path, start, MANY)))


def bodies(messages: list[BrokeredMessage]) -> list[str]:
    return [m.body.decode() for m in messages]


def tokens(*messages: BrokeredMessage) -> Any:
    return tokens_of(m.lock_token for m in messages if m.lock_token is not None)


def settle(
    world: World, disposition: Disposition, *messages: BrokeredMessage, path: str = QUEUE
) -> None:
    world.ask(Settle(path, tokens(*messages), disposition))


def complete(world: World, *messages: BrokeredMessage, path: str = QUEUE) -> None:
    settle(world, Disposition.COMPLETE, *messages, path=path)


def abandon(world: World, *messages: BrokeredMessage, path: str = QUEUE) -> None:
    settle(world, Disposition.ABANDON, *messages, path=path)


def accept(world: World, session_id: str | None = None, path: str = QUEUE) -> SessionLock:
    lock: SessionLock = world.ask(AcceptSession(path, session_id)).lock
    return lock


def start(world: World, command: Command[R]) -> "Future[R]":
    """Submit a command that may have to wait, and make sure the namespace has taken it in."""
    broker = world.broker
    names_session = isinstance(command, AcceptSession) and command.session_id is not None
    if broker is None or names_session:  # some clients wait for a named session by themselves
        future = world.namespace.submit(command)
        world.ask(ListEntities(EntityKind.QUEUE))
        return future
    before = broker.snapshot().open_receives
    future = world.namespace.submit(command)
    until(lambda: broker.snapshot().open_receives != before or future.done(), "the request waits")
    return future


def outcome(future: "Future[Any]") -> list[str]:
    """Return the bodies of the messages a started receive got."""
    return bodies(to_messages(future.result(timeout=10)))


def runtime(world: World, path: str = QUEUE) -> RuntimeProperties:
    properties: RuntimeProperties = world.ask(GetRuntimeProperties(path))
    return properties


def later(world: World, **span: float) -> datetime:
    return world.clock.now() + timedelta(**span)
