"""The row path and the column path lead to the same records, replies, refusals and counts."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.namespaces import engine_settings
from tests.unit.properties import replayed
from twinbus.broker.accounts.trail import Trail, table_of
from twinbus.broker.sending.intake import Intake
from twinbus.broker.sending.row_intake import RowIntake
from twinbus.broker.store.entry_rows import EntryRows
from twinbus.broker.store.log_format import PartKind
from twinbus.broker.store.message_rows import MessageRows
from twinbus.broker.turn.engine import Engine, EngineSettings, Storages
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.clock import ManualClock
from twinbus.entities import (
    CorrelationFilter,
    EntityStatus,
    QueueDescription,
    RuleDescription,
    RuleFilter,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import MessagingError
from twinbus.limits import ENTRIES_AS_ROWS, NEVER_US, PING_CONTENT_TYPE
from twinbus.message import BrokeredMessage, to_batch, to_messages
from twinbus.protocol.commands import (
    AcceptSession,
    Command,
    CreateEntity,
    Origin,
    Receive,
    ReceiveMode,
    Send,
    SendReceipt,
    SessionGrant,
    SessionLock,
)
from twinbus.protocol.origins import sender_source
from twinbus.protocol.requests import Request

MAX_MESSAGE_BYTES = 4096
ENTITIES = (
    QueueDescription(path="plain"),
    QueueDescription(path="mortal", default_message_time_to_live=timedelta(days=1)),
    QueueDescription(path="sessions", requires_session=True),
    QueueDescription(path="once", requires_duplicate_detection=True),
    QueueDescription(
        path="rich",
        requires_session=True,
        requires_duplicate_detection=True,
        enable_dead_lettering_on_message_expiration=True,
        default_message_time_to_live=timedelta(seconds=90),
    ),
    QueueDescription(path="forwarding", forward_to="plain"),
    TopicDescription(path="empty"),
    TopicDescription(
        path="topic",
        requires_duplicate_detection=True,
        default_message_time_to_live=timedelta(hours=2),
    ),
    SubscriptionDescription(topic_path="topic", name="every"),
    SubscriptionDescription(
        topic_path="topic", name="mortal", default_message_time_to_live=timedelta(seconds=50)
    ),
    SubscriptionDescription(topic_path="topic", name="some", status=EntityStatus.ACTIVE),
    SubscriptionDescription(
        topic_path="topic", name="closed", status=EntityStatus.RECEIVE_DISABLED
    ),
    TopicDescription(path="odd"),
    SubscriptionDescription(topic_path="odd", name="sessions", requires_session=True),
    SubscriptionDescription(topic_path="odd", name="sums"),
    TopicDescription(path="onward"),
    SubscriptionDescription(topic_path="onward", name="here"),
    SubscriptionDescription(topic_path="onward", name="there", forward_to="mortal"),
)
RULES: dict[str, RuleFilter] = {
    "topic/subscriptions/mortal": CorrelationFilter(subject="s"),
    "topic/subscriptions/some": SqlFilter("x > 2 AND sys.Label LIKE 's%' OR y IS NULL"),
    "odd/subscriptions/sums": SqlFilter("x + 1 > 3"),
}
SENDABLE = [e.path for e in ENTITIES if not isinstance(e, SubscriptionDescription)]


class Asked(Request):
    """A request that keeps its reply."""

    __slots__ = ("outcome",)

    def answer(self, value: Any) -> None:
        self.outcome = value.sequence_numbers if isinstance(value, SendReceipt) else value

    def fail(self, error: MessagingError) -> None:
        self.outcome = type(error), str(error)


START = ManualClock().now()
values = st.one_of(
    st.integers(-5, 5),
    st.floats(0, 1),
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.just(START),
    st.just(timedelta(seconds=5)),
    st.just(UUID(int=7)),
)
properties = st.dictionaries(st.sampled_from("xyz"), values, max_size=3)
messages = st.builds(
    BrokeredMessage,
    body=st.binary(max_size=40) | st.just(bytes(MAX_MESSAGE_BYTES)),
    message_id=st.sampled_from("abcdefgh"),
    session_id=st.none() | st.just("s"),
    partition_key=st.none() | st.sampled_from("st"),
    correlation_id=st.none() | st.text(max_size=3),
    subject=st.none() | st.just("s") | st.text(max_size=3),
    content_type=st.none() | st.sampled_from(["text/plain", PING_CONTENT_TYPE]),
    time_to_live=st.none() | st.sampled_from([timedelta(seconds=40), timedelta(hours=1)]),
    scheduled_enqueue_time_utc=st.none()
    | st.sampled_from([START - timedelta(hours=1), START + timedelta(minutes=1)]),
    application_properties=properties,
)
usual = st.builds(
    BrokeredMessage,
    body=st.binary(max_size=9),
    message_id=st.sampled_from("abcdefghijklmnop"),
    session_id=st.sampled_from(["s", "t"]),
    subject=st.none() | st.just("s"),
    time_to_live=st.none() | st.sampled_from([timedelta(seconds=40), timedelta.max]),
    scheduled_enqueue_time_utc=st.none() | st.just(START + timedelta(minutes=1)),
    application_properties=properties,
)
plain = st.builds(BrokeredMessage, body=st.binary(max_size=9), message_id=st.sampled_from("abc"))


@st.composite
def sends(draw: st.DrawFn) -> Send:
    brought = draw(
        st.lists(plain, max_size=20)
        | st.lists(usual, min_size=1, max_size=3)
        | st.lists(usual, min_size=1, max_size=12)
        | st.lists(messages, min_size=1, max_size=3)
    )
    origin = None
    if draw(st.booleans()):
        first = draw(st.integers(0, 12))
        source = sender_source(draw(st.integers(1, 2)))
        count = max(0, len(brought) + draw(st.sampled_from([0, 0, 0, 1])))
        origin = Origin(source, range(first, first + count))
    path = draw(st.sampled_from(["plain", "rich", "topic", *SENDABLE]))
    is_batch = draw(st.sampled_from([False, False, True]))
    return Send(path, to_batch(brought) if is_batch else brought, origin)


turns = st.lists(st.lists(sends(), min_size=1, max_size=4), min_size=1, max_size=6)


def never(*_: Any) -> bool:
    return False


def carried_out(work: Sequence[Sequence[Send]], *, by_rows: bool) -> list[Any]:
    """Return everything that can be seen of turns: replies, counts, and the log."""
    seen: list[Any] = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not by_rows:
            patch.setattr(RowIntake, "take", never)
            patch.setattr(RowIntake, "take_columns", never)
        settings = engine_settings(
            Path(folder),
            segment_bytes=1024 * 1024,
            namespace=NamespaceSettings(max_message_bytes=MAX_MESSAGE_BYTES),
        )
        clock = ManualClock()
        engine = opened(settings, clock)
        for turn in work:
            asked = [Asked(command) for command in turn]
            engine.turn(asked)
            seen += [item.outcome for item in asked]
            clock.advance(timedelta(seconds=2))
        seen.append(engine.snapshot(is_open=True).meter.to_pylist())
        seen.append(engine.namespace.faults())
        seen += [properties for properties, _ in engine.look_at(engine.entities())]
        seen += written(engine)
        engine.abandon()
        again = Engine(settings, clock, Storages(), threaded=False)
        seen += written(again)
        seen += followed(again)
        clock.advance(timedelta(seconds=60))
        seen += delivered(again)
        seen.append(again.namespace.faults())
        again.abandon()
    return seen


def opened(settings: EngineSettings, clock: ManualClock) -> Engine:
    """Return an engine with every entity."""
    engine = Engine(settings, clock, Storages(), threaded=False)
    for entity in ENTITIES:
        rule = RULES.get(entity.path)
        named = None if rule is None else RuleDescription(name="only", filter=rule)
        asked = Asked(CreateEntity(entity, named))
        engine.turn([asked])
        assert asked.outcome == entity
    return engine


def written(engine: Engine) -> list[Any]:
    """Return what the namespace holds, message by message, and what it remembers."""
    found: list[Any] = []
    get: Callable[..., Any]
    for queue in engine.namespace.directory.queues():
        at, get = queue.waiting.all(), queue.waiting.get
        if len(at):
            bodies = engine.namespace.shared.bodies.fetch(get("batch", at), get("row", at))
            names = ("sequence", "size", "state", "enqueued", "expires", "due", "failures")
            columns = [get(name, at).tolist() for name in names]
            found.append((queue.path, columns, to_messages(bodies)))
            sessions = queue.sessions.by_number.values()
            found.append([(session.name, list(session.sequence_numbers)) for session in sessions])
    histories = [entity.history for entity in engine.namespace.directory if entity.history]
    found += [list(history.within(0, NEVER_US)) for history in histories]
    return [*found, sorted(engine.namespace.transfers.origins())]


def followed(engine: Engine) -> list[Any]:
    """Return the rows of the ledger that follow from the log."""

    def path_of(number: int) -> str:
        queue = engine.namespace.directory.queue_numbered(number)
        return "" if queue is None else queue.path

    trail = Trail(path_of, partial(engine.namespace.shared.bodies.texts, "message_id"))
    engine.log.close()
    for record in engine.log.replay():
        trail.add_record(record.number, [part for part, _ in record.parts], 0)
    return sorted(map(repr, table_of(trail.take(), trail.path).to_pylist()))


def delivered(engine: Engine) -> list[Any]:
    """Receive every message; return the deliveries, queue by queue."""
    found: list[Any] = []
    for queue in list(engine.namespace.directory.queues()):
        locks: list[SessionLock | None] = [None]
        if queue.settings.requires_session:
            locks = []
            while isinstance(grant := outcome(engine, AcceptSession(queue.path)), SessionGrant):
                locks.append(grant.lock)
                found.append(grant.lock.session_id)
        for lock in locks:
            mode = ReceiveMode.RECEIVE_AND_DELETE
            reply = outcome(engine, Receive(queue.path, 100, mode=mode, session=lock))
            found.append(to_messages(reply) if isinstance(reply, pa.RecordBatch) else reply)
    return found


def outcome(engine: Engine, command: Command[Any]) -> Any:
    asked = Asked(command)
    engine.turn([asked])
    return asked.outcome


@given(turns)
@replayed
def test_both_ways_lead_to_the_same(work: list[list[Send]]) -> None:
    assert carried_out(work, by_rows=True) == carried_out(work, by_rows=False)


RICH = BrokeredMessage(
    b"body",
    message_id="m",
    session_id="s",
    correlation_id="c",
    content_type="text/plain",
    subject="s",
    time_to_live=timedelta(hours=1),
    application_properties={
        "x": 3,
        "text": "é",
        "half": 0.5,
        "yes": True,
        "bytes": b"b",
        "moment": START,
        "span": timedelta(seconds=5),
        "uuid": UUID(int=7),
    },
)
LATER = replace(RICH, scheduled_enqueue_time_utc=START + timedelta(minutes=1))


@pytest.mark.parametrize("path", ["plain", "mortal", "sessions", "once", "rich", "empty", "topic"])
@pytest.mark.parametrize("message", [RICH, LATER], ids=["now", "later"])
def test_usual_single_sends_need_no_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: BrokeredMessage
) -> None:
    engine = opened(EngineSettings(directory=tmp_path), ManualClock())
    origin = Origin(sender_source(1), range(1))
    monkeypatch.setattr(Intake, "_checked", None)
    assert outcome(engine, Send(path, [message], origin)) in ([0], [1])
    monkeypatch.undo()
    stored = [queue for queue in engine.namespace.directory.queues() if len(queue.waiting)]
    assert len(stored) == {"empty": 0, "topic": 4}.get(path, 1) or message is LATER
    engine.close()


def test_the_log_has_a_few_places_and_ids_as_rows(tmp_path: Path) -> None:
    engine = opened(engine_settings(tmp_path), ManualClock())
    for count in (1, ENTRIES_AS_ROWS + 1):
        several = [replace(RICH, message_id=f"{count} {number}") for number in range(count)]
        outcome(engine, Send("rich", to_batch(several)))
    engine.log.close()
    engine.abandon()
    kinds = [
        (part.kind, isinstance(part.columns, EntryRows))
        for record in engine.log.replay()
        for part, _ in record.parts
        if part.kind in (PartKind.PLACES, PartKind.HISTORY)
    ]
    assert kinds == [
        (PartKind.PLACES, True),
        (PartKind.HISTORY, True),
        (PartKind.PLACES, False),
        (PartKind.HISTORY, False),
    ]


def test_single_messages_to_a_plain_queue_take_the_row_path(tmp_path: Path) -> None:
    settings = engine_settings(tmp_path)
    engine = Engine(settings, ManualClock(), Storages(), threaded=False)
    engine.turn([Asked(CreateEntity(ENTITIES[0]))])
    origin = Origin(sender_source(1), range(1))
    engine.turn([Asked(Send("plain", [BrokeredMessage(b"one")], origin))])
    engine.turn([Asked(Send("plain", [BrokeredMessage(bytes([n])) for n in range(9)]))])
    engine.log.close()
    engine.abandon()
    kinds = [
        type(part.columns)
        for record in engine.log.replay()
        for part, _ in record.parts
        if part.kind is PartKind.MESSAGES
    ]
    assert [issubclass(kind, MessageRows) for kind in kinds] == [True, False]
