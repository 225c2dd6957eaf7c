"""Few messages that are placed one by one have the same history as the same messages in columns.

`test_row_intake.py` compares what sends leave behind. Here the messages live on: they expire, come
due, are forwarded, changed by actions, received, leased, settled and dead-lettered, while the clock
is set, the log refuses records for a while, messages move out of old segments, and the broker
restarts. A restart must find what the broker had in memory.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import is_ahead_of_log
from tests.namespaces import engine_settings
from tests.unit.properties import replayed
from tests.unit.test_row_intake import START, Asked, never, outcome, written
from twinbus.broker.lifecycle import DURABLE, State
from twinbus.broker.sending.row_intake import RowIntake
from twinbus.broker.turn.engine import Engine, Storages
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.clock import ManualClock
from twinbus.entities import (
    CorrelationFilter,
    EntityDescription,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message import BrokeredMessage, to_batch, to_messages, tokens_of
from twinbus.protocol import commands as c
from twinbus.protocol.commands import (
    CreateEntity,
    Disposition,
    Origin,
    RangeLease,
    ReceiveMode,
    Send,
    SessionGrant,
)
from twinbus.protocol.origins import sender_source
from twinbus.protocol.rows import DeliveryRows
from twinbus.testing.storage import FaultyStorage

MAX_MESSAGE_BYTES = 4096
SECONDS = timedelta(seconds=1)
ENTITIES: tuple[EntityDescription, ...] = (
    QueueDescription(path="plain", max_delivery_count=2),
    QueueDescription(path="mortal", default_message_time_to_live=30 * SECONDS),
    QueueDescription(path="sessions", requires_session=True, max_delivery_count=1),
    QueueDescription(
        path="once",
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window=40 * SECONDS,
    ),
    QueueDescription(
        path="rich",
        requires_session=True,
        requires_duplicate_detection=True,
        enable_dead_lettering_on_message_expiration=True,
        default_message_time_to_live=50 * SECONDS,
    ),
    QueueDescription(path="graves"),
    QueueDescription(
        path="deadly",
        enable_dead_lettering_on_message_expiration=True,
        forward_dead_lettered_messages_to="graves",
        default_message_time_to_live=20 * SECONDS,
        max_delivery_count=1,
    ),
    TopicDescription(
        path="topic",
        requires_duplicate_detection=True,
        default_message_time_to_live=70 * SECONDS,
    ),
    SubscriptionDescription(topic_path="topic", name="every"),
    SubscriptionDescription(
        topic_path="topic",
        name="mortal",
        default_message_time_to_live=15 * SECONDS,
        enable_dead_lettering_on_message_expiration=True,
    ),
    SubscriptionDescription(topic_path="topic", name="some"),
    TopicDescription(path="acts"),
    SubscriptionDescription(topic_path="acts", name="changed"),
    SubscriptionDescription(topic_path="acts", name="same"),
    SubscriptionDescription(topic_path="acts", name="bursting"),
    TopicDescription(path="odd"),
    SubscriptionDescription(topic_path="odd", name="sessions", requires_session=True),
    SubscriptionDescription(topic_path="odd", name="like"),
    QueueDescription(path="door", forward_to="topic"),
    TopicDescription(path="onward"),
    SubscriptionDescription(topic_path="onward", name="here"),
    SubscriptionDescription(topic_path="onward", name="there", forward_to="rich"),
)
BURST = "SET big = z + z; SET big = big + big; SET big = big + big"
RULES = {
    "topic/subscriptions/mortal": RuleDescription("only", CorrelationFilter(subject="s")),
    "topic/subscriptions/some": RuleDescription(
        "only", SqlFilter("x > 2 AND sys.Label LIKE 's%' OR y IS NULL OR NOT (z IN ('a', 1, x))")
    ),
    "acts/subscriptions/changed": RuleDescription(
        "only", SqlFilter("x IS NOT NULL"), SqlAction("SET x = x + 1; SET sys.Label = 'new'")
    ),
    "acts/subscriptions/bursting": RuleDescription("only", SqlFilter("1=1"), SqlAction(BURST)),
    "odd/subscriptions/like": RuleDescription(
        "only", SqlFilter("z LIKE '%a%' OR sys.MessageId < 'c'")
    ),
}
SENDABLE = [e.path for e in ENTITIES if not isinstance(e, SubscriptionDescription)]
QUEUES = [
    *(e.path for e in ENTITIES if not isinstance(e, TopicDescription)),
    *(f"{path}/$DeadLetterQueue" for path in ("plain", "sessions", "rich", "mortal")),
]
LEASABLE = ["plain", "once", "graves", "topic/subscriptions/every", "plain/$DeadLetterQueue"]
WITH_SESSIONS = ["sessions", "rich", "odd/subscriptions/sessions"]

values = st.one_of(
    st.integers(-5, 5),
    st.sampled_from([2**53 + 1, -(2**63), 2**63 - 1]),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(["", "a", "bab", "ß\n", "x" * 1200]),
    st.binary(max_size=3),
    st.just(START),
    st.just(timedelta(microseconds=5)),
    st.just(UUID(int=7)),
)
messages = st.builds(
    BrokeredMessage,
    body=st.binary(max_size=9) | st.sampled_from([bytes(MAX_MESSAGE_BYTES), b"b" * 900]),
    message_id=st.sampled_from(["", *"abcdefgh"]),
    session_id=st.none() | st.sampled_from(["s", "t", ""]),
    partition_key=st.none() | st.none() | st.sampled_from("st"),
    correlation_id=st.none() | st.text("é\x00a", max_size=3),
    subject=st.none() | st.just("s") | st.text(max_size=3),
    to=st.none() | st.just("to"),
    reply_to=st.none() | st.just("r"),
    content_type=st.none() | st.none() | st.sampled_from(["text/plain", PING_CONTENT_TYPE]),
    time_to_live=st.none()
    | st.sampled_from([timedelta(microseconds=1), 9 * SECONDS, 40 * SECONDS, timedelta.max]),
    scheduled_enqueue_time_utc=st.none()
    | st.sampled_from([START - 9 * SECONDS, START + 20 * SECONDS, START + 200 * SECONDS]),
    application_properties=st.dictionaries(st.sampled_from("xyz"), values, max_size=3),
    amqp=st.none() | st.none() | st.just(b"\x00Sx\xa1\x01a"),
)
usual = st.builds(
    BrokeredMessage,
    body=st.binary(max_size=9),
    message_id=st.sampled_from("abcdefghijklmnop"),
    session_id=st.sampled_from(["s", "t"]),
    subject=st.none() | st.just("s"),
    time_to_live=st.none() | st.sampled_from([9 * SECONDS, 40 * SECONDS]),
    scheduled_enqueue_time_utc=st.none() | st.just(START + 20 * SECONDS),
    application_properties=st.dictionaries(st.sampled_from("xyz"), values, max_size=2),
)
plain = st.builds(BrokeredMessage, body=st.binary(max_size=9), message_id=st.sampled_from("abc"))


@st.composite
def sends(draw: st.DrawFn) -> Send:
    brought = draw(
        st.lists(usual, min_size=1, max_size=2)
        | st.lists(messages, min_size=1, max_size=2)
        | st.lists(usual, min_size=1, max_size=12)
        | st.lists(plain, min_size=1, max_size=20)
    )
    origin = None
    if draw(st.booleans()):
        first = draw(st.integers(0, 15))
        origin = Origin(sender_source(draw(st.integers(1, 2))), range(first, first + len(brought)))
    return Send(draw(st.sampled_from(SENDABLE)), brought, origin)


@dataclass(frozen=True)
class Step:
    """Something that a client does, or that happens to the broker: see the methods of `World`."""

    kind: str
    path: str = ""
    count: int = 0
    flag: bool = False
    choice: Any = None
    sends: Sequence[Send] = ()


counts = st.integers(1, 6)
steps = st.one_of(
    *[st.builds(Step, st.just("send"), sends=st.lists(sends(), min_size=1, max_size=4))] * 4,
    *[
        st.builds(
            Step,
            st.just("receive"),
            st.sampled_from(QUEUES),
            counts,
            st.booleans(),
            st.sampled_from(ReceiveMode),
        )
    ]
    * 2,
    st.builds(Step, st.just("accept"), st.sampled_from(WITH_SESSIONS), counts, st.booleans()),
    *[
        st.builds(
            Step,
            st.just("settle"),
            count=counts,
            flag=st.booleans(),
            choice=st.sampled_from(Disposition),
        )
    ]
    * 2,
    st.builds(Step, st.just("delete"), st.sampled_from(QUEUES), counts),
    st.builds(Step, st.just("cancel"), st.sampled_from(SENDABLE), counts),
    st.builds(Step, st.just("peek"), st.sampled_from(QUEUES), counts),
    st.builds(Step, st.just("deferred"), st.sampled_from(QUEUES), counts, st.booleans()),
    st.builds(Step, st.just("advance"), count=st.sampled_from([1, 5, 25, 70])),
    st.builds(Step, st.just("wall"), count=st.sampled_from([-3600, -30, 45, 86400])),
    *[st.builds(Step, st.just("restart"), flag=st.booleans())] * 2,
    st.builds(Step, st.just("fail"), flag=st.booleans()),
    st.builds(Step, st.just("mend"), flag=st.booleans()),
    st.builds(Step, st.just("turn")),
    st.builds(
        Step, st.just("wait"), st.sampled_from(QUEUES), counts, choice=st.sampled_from(ReceiveMode)
    ),
    st.builds(Step, st.just("lease"), st.sampled_from(LEASABLE), counts, st.booleans()),
    st.builds(Step, st.just("state"), st.sampled_from(WITH_SESSIONS), counts),
    st.builds(
        Step,
        st.just("refuse"),
        sends=st.lists(sends(), min_size=1, max_size=3),
        flag=st.booleans(),
    ),
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a namespace with every entity."""
    folder = tmp_path_factory.mktemp("template")
    settings = engine_settings(folder, segment_bytes=64 * 1024)
    engine = Engine(settings, ManualClock(), Storages(), threaded=False)
    for entity in ENTITIES:
        assert outcome(engine, CreateEntity(entity, RULES.get(entity.path))) == entity
    engine.close()
    return folder


class World:
    """A broker that does what steps say, and notes everything that clients see."""

    def __init__(self, folder: str, way: str) -> None:
        self.way = way
        self.settings = engine_settings(
            Path(folder),
            segment_bytes=32 * 1024,
            namespace=NamespaceSettings(max_message_bytes=MAX_MESSAGE_BYTES),
        )
        self.clock = ManualClock()
        self.storage = FaultyStorage(self.clock)
        self.engine = self.opened()
        self.seen: list[Any] = []
        self.locked: list[tuple[str, list[UUID]]] = []
        self.numbers: dict[str, list[int]] = {}
        self.restarts = 0
        self.waiting: list[Asked] = []

    def opened(self) -> Engine:
        return Engine(self.settings, self.clock, Storages(self.storage), threaded=False)

    def ask(self, command: Any) -> Any:
        return self.known(outcome(self.engine, command), command.path)

    def known(self, reply: Any, path: str) -> Any:
        if isinstance(reply, DeliveryRows):
            found = reply.messages()
        elif isinstance(reply, pa.RecordBatch):
            found = to_messages(reply)
        else:
            return reply
        tokens = [m.lock_token for m in found if m.lock_token is not None]
        if tokens:
            self.locked.append((path, tokens))
        return [replace(m, lock_token=None) for m in found]

    def turn(self, sends: Sequence[Send]) -> list[Any]:
        if self.way == "batches":
            sends = [replace(send, messages=to_batch(send.messages)) for send in sends]
        asked = [Asked(send) for send in sends]
        self.engine.turn(asked)
        found = []
        for item in asked:
            result: Any = getattr(item, "outcome", "no answer")
            if isinstance(result, tuple):
                result = result[0], result[1].replace(str(self.settings.directory), "")
            found.append(result)
            if not isinstance(result, tuple) and result != "no answer":
                self.numbers.setdefault(item.command.path, []).extend(result)
        return found

    def take(self, step: Step) -> Any:
        return getattr(self, f"do_{step.kind}")(step)

    def do_send(self, step: Step) -> Any:
        return self.turn(step.sends)

    def do_receive(self, step: Step) -> Any:
        return self.ask(c.Receive(step.path, step.count, mode=step.choice, takes_rows=step.flag))

    def do_accept(self, step: Step) -> Any:
        grant = outcome(self.engine, c.AcceptSession(step.path))
        if not isinstance(grant, SessionGrant):
            return grant
        found = self.ask(c.Receive(step.path, step.count, session=grant.lock, takes_rows=step.flag))
        if step.flag:
            return [found, outcome(self.engine, c.ReleaseSession(step.path, grant.lock))]
        return [grant.lock.session_id, grant.locked_until_utc, found]

    def do_settle(self, step: Step) -> Any:
        if not self.locked:
            return None
        path, tokens = self.locked.pop(step.count % len(self.locked))
        if step.flag:
            tokens = tokens[:1]
        reason = "r" if step.choice is Disposition.DEAD_LETTER else None
        reply = outcome(self.engine, c.Settle(path, tokens_of(tokens), step.choice, reason))
        return reply[0] if isinstance(reply, tuple) else reply

    def do_delete(self, step: Step) -> Any:
        return outcome(self.engine, c.DeleteMessages(step.path, step.count))

    def do_cancel(self, step: Step) -> Any:
        numbers = self.numbers.get(step.path, [])
        if not numbers:
            return None
        number = numbers[-(step.count % len(numbers))]
        return outcome(self.engine, c.CancelScheduled(step.path, [number]))

    def do_peek(self, step: Step) -> Any:
        return self.ask(c.Peek(step.path, 0, 10 * step.count))

    def do_deferred(self, step: Step) -> Any:
        mode = ReceiveMode.PEEK_LOCK if step.flag else ReceiveMode.RECEIVE_AND_DELETE
        return self.ask(c.ReceiveDeferred(step.path, [step.count], mode))

    def do_advance(self, step: Step) -> None:
        self.clock.advance(step.count * SECONDS)
        for _ in range(4):
            self.engine.turn(())

    def do_wall(self, step: Step) -> None:
        self.clock.set_wall(step.count * SECONDS)
        for _ in range(4):
            self.engine.turn(())
            self.clock.advance(5 * SECONDS)

    def do_restart(self, step: Step) -> list[str]:
        faults = self.engine.namespace.faults()
        self.restarts += self.engine.restarts
        before = durable(self.engine)
        (self.engine.close if step.flag else self.engine.crash)()
        self.storage.full = self.storage.fails_sync = False
        self.engine = self.opened()
        if before is not None:
            assert durable(self.engine) == before, "the log differs from memory"
        self.locked.clear()
        self.waiting.clear()
        return faults

    def do_fail(self, step: Step) -> None:
        setattr(self.storage, "full" if step.flag else "fails_sync", True)

    def do_mend(self, step: Step) -> None:
        self.storage.full = self.storage.fails_sync = False
        for _ in range(6 * step.flag):
            self.clock.advance(5 * SECONDS)
            self.engine.turn(())

    def do_turn(self, _: Step) -> list[Any]:
        self.engine.turn(())
        served = [asked for asked in self.waiting if hasattr(asked, "outcome")]
        self.waiting = [asked for asked in self.waiting if asked not in served]
        return [self.known(asked.outcome, asked.command.path) for asked in served]

    def do_wait(self, step: Step) -> None:
        receive = c.Receive(step.path, step.count, 60 * SECONDS, step.choice, takes_rows=True)
        self.waiting.append(Asked(receive))
        self.engine.turn(self.waiting[-1:])

    def do_lease(self, step: Step) -> Any:
        lease = outcome(self.engine, c.LeaseRange(step.path, "owner", step.count))
        if not isinstance(lease, RangeLease):
            return lease
        dead = [c.DeadLetterPart([lease.last], "why")] if step.count % 2 else []
        done = [(lease.first, lease.last - 1)] if lease.first < lease.last else []
        settle = c.SettleRange(step.path, lease.epoch, done, dead, release=step.flag)
        return lease.intervals, outcome(self.engine, settle)

    def do_state(self, step: Step) -> Any:
        grant = outcome(self.engine, c.AcceptSession(step.path))
        if not isinstance(grant, SessionGrant):
            return grant
        state = b"state" * step.count if step.count > 1 else None
        return outcome(self.engine, c.SetSessionState(step.path, grant.lock, state))

    def do_refuse(self, step: Step) -> Any:
        name = "full" if step.flag else "fails_sync"
        setattr(self.storage, name, True)
        found = self.turn(step.sends)
        setattr(self.storage, name, False)
        self.clock.advance(30 * SECONDS)
        for _ in range(6):
            self.engine.turn(())
        return found

    def end(self) -> None:
        see = self.seen.append
        engine = self.engine
        see(engine.namespace.faults())
        see(dict(engine.namespace.failures))
        see([properties for properties, _ in engine.look_at(engine.entities())])
        see(written(engine))
        self.do_restart(Step("restart"))
        see(written(self.engine))

        self.clock.advance(300 * SECONDS)
        for _ in range(4):
            self.engine.turn(())
        see(written(self.engine))
        see(self.engine.namespace.faults())
        see(self.restarts + self.engine.restarts)
        self.engine.abandon()


def durable(engine: Engine) -> list[Any] | None:
    """Return what a restart must find; None if memory is ahead of the log."""
    if is_ahead_of_log(engine):
        return None
    found: list[Any] = []
    get: Callable[..., Any]
    namespace = engine.namespace
    for queue in namespace.directory.queues():
        at, get = queue.waiting.all(), queue.waiting.get
        states = [DURABLE[State(state)] for state in get("state", at)]
        names = ("sequence", "size", "enqueued", "expires", "failures")
        found.append((queue.path, states, *(get(name, at).tolist() for name in names)))
        if len(at):
            found += to_messages(namespace.shared.bodies.fetch(get("batch", at), get("row", at)))
        deaths = get("death", at).tolist()
        found.append([namespace.shared.deaths[death] if death >= 0 else None for death in deaths])
        found.append(
            (
                dict(queue.sessions.states),
                [(lease.owner, lease.intervals) for lease in queue.leases],
            )
        )
    return [*found, sorted(namespace.transfers.origins())]


def history(template: Path, work: Sequence[Step], way: str) -> list[Any]:
    """Return what clients see of some steps."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shutil.copytree(template, folder, dirs_exist_ok=True)
        patch.setattr(os, "fdatasync", lambda _: None)  # no power fails here
        if way == "columns":
            patch.setattr(RowIntake, "take", never)
            patch.setattr(RowIntake, "take_columns", never)
        world = World(folder, way)
        for step in work:
            world.seen.append((step.kind, world.take(step)))
        world.end()
        return world.seen


@given(st.lists(steps, min_size=3, max_size=25))
@replayed
def test_few_messages_have_the_history_of_columns(template: Path, work: list[Step]) -> None:
    rows = history(template, work, "rows")
    assert rows[-1] == 0, "the broker restarted because of an error"
    assert rows == history(template, work, "columns")
    assert rows == history(template, work, "batches")
