"""Hostile numbers: a frame of a hundred bytes may say billions; it is refused and harms nobody."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from tests.namespaces import ROOT, address_of, door_of, embedded
from tests.soak.bad_bytes_tools import Exchange, asking, batch_of, framed, head_of, packed
from twinbus import (
    BrokeredMessage,
    MessagingError,
    MessagingFactory,
    QueueDescription,
    SharedAccessKey,
)
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString, token_for
from twinbus.entities import (
    CorrelationFilter,
    RuleDescription,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import FaultOwner, InvalidArgumentError
from twinbus.limits import MAX_BATCH_MESSAGES, MAX_RECEIVE_MESSAGES, SECOND_US
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import (
    AcceptSession,
    CancelScheduled,
    Command,
    CreateEntity,
    CreateRule,
    DeadLetterPart,
    DeleteEntity,
    DeleteKey,
    DeleteRule,
    EntityKind,
    LeaseRange,
    ListEntities,
    Origin,
    Peek,
    PutKey,
    ReadRange,
    Receive,
    ReceiveDeferred,
    ReleaseRange,
    RenewRange,
    RenewSession,
    Send,
    SessionLock,
    SettleRange,
)
from twinbus.protocol.frames import FrameReader
from twinbus.protocol.keys import Claim
from twinbus.protocol.table import ROWS
from twinbus.protocol.wire import decode_command, encode_ask

pytestmark = pytest.mark.timeout(20)  # who counts to a billion is found out
ORDERS, OTHER, NEWS = "orders", "other", "news"
SUBSCRIPTION = f"{NEWS}/Subscriptions/eu"
SENDER = "sender/0000000000000001"


def run(first: Any, count: Any) -> dict[str, Any]:
    """Return consecutive numbers as they travel."""
    return {"$": "run", "first": first, "count": count}


HUGE: dict[str, Any] = {
    "one too many": run(0, MAX_BATCH_MESSAGES + 1),
    "billions": run(0, 2**31),
    "more than any memory": run(0, 2**40),
    "more than len can say": run(-(2**62), 2**63),
    "more than a column holds": run(0, 2**64 - 1),
    "from where no column reaches": run(2**63, 1),
    "to where no column reaches": run(2**62, 2),
    "from as far as a frame can say": run(2**64 - 1, 1),
}
ODD: dict[str, Any] = {
    "fewer than none": run(0, -5),
    "a fraction": run(1e3, 1),
    "words": run("a", "b"),
    "a truth": run(True, 1),
    "lists": run([1], [2]),
    "nothing": run(None, 1),
    "no fields": {"$": "run"},
    "fractions": [1.5],
    "texts": ["a"],
    "a map": {"$": "map", "items": {}},
    "no sequence": 5,
    "a number too long for a column": [2**63],
    "a run within": [run(0, 2**40)],
    "no numbers at all": None,
}


def send(numbers: Any) -> dict[str, Any]:
    return {"$": "Send", "path": ORDERS, "origin": origin(numbers)}


def origin(numbers: Any, **parts: Any) -> dict[str, Any]:
    return {"$": "Origin", "source": SENDER, "numbers": numbers, **parts}


def also(numbers: Any) -> dict[str, Any]:
    return {"$": "Send", "path": ORDERS, "origin": origin(run(0, 1), also=origin(numbers))}


def settle(numbers: Any) -> dict[str, Any]:
    part = {"$": "DeadLetterPart", "sequence_numbers": numbers, "reason": "poison"}
    return {"$": "SettleRange", "path": ORDERS, "epoch": 1, "dead_lettered": [part]}


def about(kind: str) -> Any:
    return lambda numbers: {"$": kind, "path": ORDERS, "sequence_numbers": numbers}


TAKES_NUMBERS: dict[str, Any] = {
    "Send": send,
    "Origin.also": also,
    "CancelScheduled": about("CancelScheduled"),
    "ReceiveDeferred": about("ReceiveDeferred"),
    "DeadLetterPart": settle,
}
every_command = pytest.mark.parametrize("command", TAKES_NUMBERS.values(), ids=TAKES_NUMBERS)
every_number = pytest.mark.parametrize("numbers", (HUGE | ODD).values(), ids=HUGE | ODD)


KEY = SharedAccessKey(name="k", claims=(Claim.SEND,), primary="p" * 20, secondary="s" * 20)
LOCK = SessionLock("s", UUID(int=1))
COMMANDS: list[Command[Any]] = [
    Peek(ORDERS),
    Receive(ORDERS, session=LOCK),
    RenewSession(ORDERS, LOCK),
    AcceptSession(ORDERS, "s"),
    LeaseRange(ORDERS, "owner", 10, 1, 2),
    RenewRange(ORDERS, 1),
    ReadRange(ORDERS, 1, 1, 2),
    SettleRange(ORDERS, 1, [(1, 1), (5, 9)], [DeadLetterPart([2], "poison", "why")]),
    ReleaseRange(ORDERS, 1),
    PutKey(KEY),
    DeleteKey("k"),
    CreateEntity(QueueDescription(path=ORDERS, forward_to=OTHER)),
    CreateRule(SUBSCRIPTION, RuleDescription("all", SqlFilter("a = @b", {"@b": 1}))),
    CreateRule(SUBSCRIPTION, RuleDescription("one", CorrelationFilter(subject="a"))),
    DeleteEntity(ORDERS),
    ListEntities(EntityKind.QUEUE),
]


every_whole = pytest.mark.parametrize("command", COMMANDS, ids=lambda value: type(value).__name__)


def decoded(plain: Any, blobs: bytes = b"") -> Any:
    """Return what a server reads where a client wrote this, or why it refuses it."""
    is_send = isinstance(plain, dict) and plain["$"] == "Send"
    return read(asking(plain, batch_of(1) if is_send else None, blobs=blobs))


def read(frame: bytes) -> Any:
    """Return the command of a frame, or why it is refused."""
    try:
        [(head, body)] = FrameReader().feed(frame)
        return decode_command(head, body)
    except InvalidArgumentError as error:
        return error


# -- where a frame is read -------------------------------------------------------------------------


@every_command
@every_number
def test_hostile_numbers_are_refused_where_a_frame_is_read(command: Any, numbers: Any) -> None:
    assert isinstance(decoded(command(numbers)), InvalidArgumentError)


@every_command
def test_honest_numbers_are_read(command: Any) -> None:
    known = {row.command for row in ROWS}
    for numbers in (run(0, 1), run(2**62 - 1, 1), [7]):
        assert type(decoded(command(numbers))) in known


def test_the_numbers_of_an_origin_are_not_below_zero() -> None:
    for numbers in (run(-1, 1), run(-(2**62), 1), [-7]):
        assert isinstance(decoded(TAKES_NUMBERS["Send"](numbers)), InvalidArgumentError)


def test_a_refusal_says_how_many_numbers_there_may_be() -> None:
    error = decoded(TAKES_NUMBERS["CancelScheduled"](run(0, 2**40)))
    assert str(2**40) in error.text
    assert str(MAX_BATCH_MESSAGES) in error.text


def test_numbers_beside_the_head_are_as_many_as_a_batch_has_and_no_more() -> None:
    def beside(count: int) -> Any:
        blob = np.arange(count, dtype=np.int64).tobytes()
        numbers = {"$": "numbers", "at": 0, "size": len(blob)}
        return decoded(TAKES_NUMBERS["CancelScheduled"](numbers), blob)

    assert isinstance(beside(MAX_BATCH_MESSAGES), CancelScheduled)
    assert isinstance(beside(MAX_BATCH_MESSAGES + 1), InvalidArgumentError)


def test_one_refused_ask_leaves_those_around_it_alone() -> None:
    cancel = TAKES_NUMBERS["CancelScheduled"]
    asks = [cancel([1]), cancel(run(0, 2**40)), cancel([3])]
    stream = b"".join(asking(plain, number=number) for number, plain in enumerate(asks, 1))
    heads = [head for head, _ in FrameReader().feed(stream)]
    refused = [isinstance(read(framed(head)), InvalidArgumentError) for head in heads]
    assert refused == [False, True, False]


@pytest.mark.parametrize("depth", [3, 300, 3000])
def test_an_origin_within_origins_is_read_or_refused(depth: int) -> None:
    inner = packed(origin([1]) | {"also": None})[:-1] * depth + packed(None)
    assert isinstance(read(framed(packed(head_of(send(None)))[:-1] + inner)), InvalidArgumentError)
    messages: dict[str, Any] = {"$": "Send", "path": ORDERS, "messages": [], "origin": None}
    frame = framed(packed(head_of(messages))[:-1] + inner)
    assert isinstance(read(frame), Send | InvalidArgumentError)


def replaced(plain: Any, second: Any) -> Iterator[Any]:
    """Give a value as often as it has parts, each time with another in place of one of them."""
    yield second
    if not isinstance(plain, dict | list):
        return
    for name in list(plain) if isinstance(plain, dict) else range(len(plain)):
        for part in replaced(plain[name], second) if name != "$" else ():
            if name == "items" and part is second:
                continue  # a map of anything is a map
            changed: Any = plain.copy()
            changed[name] = part
            yield changed


def plain_of(command: Command[Any]) -> Any:
    """Return a command as it travels."""
    [(head, _)] = FrameReader().feed(b"".join(encode_ask(1, command)))
    names = [field.name for field in fields(command)]  # type: ignore[arg-type]
    return {"$": head[2], **dict(zip(names, head[3:], strict=True))}


@every_whole
def test_a_huge_run_where_none_belongs_is_refused(command: Command[Any]) -> None:
    for plain in replaced(plain_of(command), run(0, 2**62)):
        assert isinstance(decoded(plain), InvalidArgumentError), plain


# -- where a command is made -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers", [range(2**24), range(2**62), range(2**70), range(-(2**70), 0)], ids=str
)
def test_a_client_is_refused_before_anything_travels(numbers: range) -> None:
    for make in (
        lambda: Origin(SENDER, numbers),
        lambda: CancelScheduled(ORDERS, numbers),
        lambda: ReceiveDeferred(ORDERS, numbers),
        lambda: DeadLetterPart(numbers, "poison"),
    ):
        with pytest.raises(InvalidArgumentError):
            make()


# -- through the door ------------------------------------------------------------------------------


@dataclass
class Server:
    """A namespace behind a door, with an honest client and a way in for the others."""

    directory: Path
    clock: ManualClock
    namespace: EmbeddedNamespace
    where: ConnectionString
    honest: MessagingFactory
    opened: ExitStack

    def exchange(self, key: SharedAccessKey = ROOT) -> Exchange:
        expires_s = self.clock.now_us() // SECOND_US + 600
        where = replace(self.where, key_name=key.name, key=key.primary)
        exchange = Exchange(self.where.port, token_for(where, expires_s))
        return self.opened.enter_context(exchange)

    def assert_unharmed(self) -> None:
        """An honest client goes on, and the broker had nothing to heal."""
        self.honest.create_message_sender(OTHER).send(BrokeredMessage(b"honest"))
        receiver = self.honest.create_message_receiver(OTHER)
        assert [message.body for message in receiver.receive_batch(10)] == [b"honest"]
        assert self.namespace.engine.restarts == 0
        assert list(self.directory.glob("diagnostics/*")) == []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    clock = ManualClock()
    with ExitStack() as stack:
        namespace = stack.enter_context(embedded(tmp_path / "namespace", clock))
        for path in (ORDERS, OTHER):
            namespace.ask(CreateEntity(QueueDescription(path=path)))
        namespace.ask(CreateEntity(TopicDescription(path=NEWS)))
        namespace.ask(CreateEntity(SubscriptionDescription(topic_path=NEWS, name="eu")))
        where = address_of(stack.enter_context(door_of(namespace, clock)))
        honest = MessagingFactory(ServerNamespace(where, clock), clock=clock)
        stack.enter_context(honest)
        yield Server(tmp_path / "namespace", clock, namespace, where, honest, stack)


@every_command
def test_hostile_numbers_are_refused_at_the_door_and_harm_nobody(
    server: Server, command: Any
) -> None:
    hostile = server.exchange()
    for numbers in (HUGE | ODD).values():
        plain = command(numbers)
        error = hostile.ask(plain, batch_of(1) if plain["$"] == "Send" else None)
        assert type(error) is InvalidArgumentError
    server.assert_unharmed()


@every_whole
@pytest.mark.parametrize("count", [0, 1, 3, MAX_BATCH_MESSAGES])
def test_a_run_in_any_place_harms_nobody(server: Server, command: Command[Any], count: int) -> None:
    hostile = server.exchange()
    for plain in replaced(plain_of(command), run(0, count)):
        answer = hostile.ask(plain)
        assert not isinstance(answer, MessagingError) or answer.fault is FaultOwner.CALLER, plain
    server.honest.create_message_sender(NEWS).send(BrokeredMessage(b"honest"))
    server.assert_unharmed()


@pytest.mark.parametrize("wrong", [5, [1], True, "text"], ids=str)
@pytest.mark.parametrize(
    "command",
    [item for item in COMMANDS if isinstance(item, CreateRule)],
    ids=lambda value: type(value.rule.filter).__name__,
)
def test_a_rule_with_a_value_of_another_type_harms_nobody(
    server: Server, command: CreateRule, wrong: Any
) -> None:
    hostile = server.exchange()
    sender = server.honest.create_message_sender(NEWS)
    for plain in replaced(plain_of(command), wrong):
        answer = hostile.ask(plain)
        assert not isinstance(answer, MessagingError) or answer.fault is FaultOwner.CALLER, plain
        sender.send(BrokeredMessage(b"honest", message_id="m", subject="a"))
        server.assert_unharmed()
        hostile.ask(plain_of(DeleteRule(SUBSCRIPTION, command.rule.name)))


def test_who_sent_hostile_numbers_may_go_on_over_the_same_connection(server: Server) -> None:
    hostile = server.exchange()
    hostile.ask(send(run(0, 2**40)), batch_of(1))
    receipt = hostile.ask(send(run(0, 1)), batch_of(1))
    assert len(receipt.sequence_numbers) == 1


def test_numbers_of_a_refused_send_are_not_taken(server: Server) -> None:
    hostile = server.exchange()
    for numbers in HUGE.values():
        hostile.ask(also(numbers), batch_of(1))
    receipt = hostile.ask(also(run(0, 1)), batch_of(1))
    assert all(receipt.sequence_numbers)


@pytest.mark.parametrize("command", ["CancelScheduled", "ReceiveDeferred"])
def test_as_many_numbers_as_there_may_be_are_refused_for_what_they_name(
    server: Server, command: str
) -> None:
    plain = TAKES_NUMBERS[command](run(1, MAX_RECEIVE_MESSAGES))
    error = server.exchange().ask(plain)
    assert error.code == "MessageNotFound"
    server.assert_unharmed()


def test_an_origin_numbers_every_message_in_each_of_its_parts(server: Server) -> None:
    wrong: list[Any] = [run(0, 2), run(0, 0), []]
    for numbers in wrong:
        error = server.exchange().ask(also(numbers), batch_of(1))
        assert isinstance(error, InvalidArgumentError)
    server.assert_unharmed()


def test_who_may_only_listen_cannot_harm_the_server_with_a_key_of_endless_claims(
    server: Server,
) -> None:
    listener = SharedAccessKey(
        name="ears", claims=(Claim.LISTEN,), primary="one" * 8, secondary="two" * 8
    )
    server.namespace.ask(PutKey(listener))
    key = {"$": "SharedAccessKey", "name": "k", "primary": "p" * 20, "secondary": "s" * 20}
    plain = {"$": "PutKey", "key": {**key, "claims": run(0, 2**62)}}
    assert server.exchange(listener).ask(plain).code == "InvalidArgument"
    server.assert_unharmed()


def test_the_honest_part_of_the_backlog_is_taken_while_numbers_are_refused(server: Server) -> None:
    hostile = server.exchange()
    sender = server.honest.create_message_sender(ORDERS)
    for number, text in enumerate((b"a", b"b", b"c"), 1):
        hostile.write(asking(send(run(0, 2**40)), batch_of(1), number=number))
        sender.send(BrokeredMessage(text))
    assert [type(error) for _, error in hostile.all_replies(3)] == [InvalidArgumentError] * 3
    found = server.honest.create_message_receiver(ORDERS).receive_batch(10)
    assert [message.body for message in found] == [b"a", b"b", b"c"]
