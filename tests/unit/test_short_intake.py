"""The short way in and the long one lead to the same records, replies, refusals and counts."""

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.namespaces import engine_settings
from tests.unit.properties import replayed
from twinbus.broker.sending.short_intake import ShortIntake
from twinbus.broker.store.log_format import PartKind
from twinbus.broker.store.message_rows import MessageRows
from twinbus.broker.turn.engine import Engine, Storages
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.clock import ManualClock
from twinbus.entities import QueueDescription, TopicDescription
from twinbus.errors import MessagingError
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message import BrokeredMessage, to_batch, to_messages
from twinbus.protocol.commands import CreateEntity, Origin, Send, SendReceipt
from twinbus.protocol.origins import sender_source
from twinbus.protocol.requests import Request

MAX_MESSAGE_BYTES = 4096
ENTITIES = (
    QueueDescription(path="plain"),
    QueueDescription(path="mortal", default_message_time_to_live=timedelta(days=1)),
    QueueDescription(path="sessions", requires_session=True),
    QueueDescription(path="once", requires_duplicate_detection=True),
    QueueDescription(path="forwarding", forward_to="plain"),
    TopicDescription(path="topic"),
)


class Asked(Request):
    """A request that keeps its reply."""

    __slots__ = ("outcome",)

    def answer(self, value: Any) -> None:
        self.outcome = value.sequence_numbers if isinstance(value, SendReceipt) else value

    def fail(self, error: MessagingError) -> None:
        self.outcome = type(error), str(error)


messages = st.builds(
    BrokeredMessage,
    body=st.binary(max_size=40) | st.just(bytes(MAX_MESSAGE_BYTES)),
    message_id=st.sampled_from("abc"),
    session_id=st.none() | st.just("s"),
    partition_key=st.none() | st.sampled_from("st"),
    subject=st.none() | st.text(max_size=3),
    content_type=st.none() | st.sampled_from(["text/plain", PING_CONTENT_TYPE]),
    time_to_live=st.none() | st.just(timedelta(hours=1)),
    scheduled_enqueue_time_utc=st.none() | st.just(ManualClock().now() + timedelta(minutes=1)),
    application_properties=st.dictionaries(
        st.sampled_from("xy"), st.integers(-5, 5) | st.floats(0, 1) | st.booleans(), max_size=2
    ),
)
plain = st.builds(BrokeredMessage, body=st.binary(max_size=9), message_id=st.sampled_from("abc"))


@st.composite
def sends(draw: st.DrawFn) -> Send:
    brought = draw(st.lists(plain, max_size=20) | st.lists(messages, min_size=1, max_size=3))
    origin = None
    if draw(st.booleans()):
        first = draw(st.integers(0, 12))
        source = sender_source(draw(st.integers(1, 2)))
        count = max(0, len(brought) + draw(st.sampled_from([0, 0, 0, 1])))
        origin = Origin(source, range(first, first + count))
    path = draw(st.sampled_from(["plain"] * 5 + [entity.path for entity in ENTITIES]))
    return Send(path, to_batch(brought) if draw(st.booleans()) else brought, origin)


turns = st.lists(st.lists(sends(), min_size=1, max_size=4), min_size=1, max_size=6)


def never(*_: Any) -> bool:
    return False


def carried_out(work: Sequence[Sequence[Send]], *, is_short: bool) -> list[Any]:
    """Return everything that can be seen of turns: replies, counts, and the log."""
    seen: list[Any] = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not is_short:
            patch.setattr(ShortIntake, "take", never)
            patch.setattr(ShortIntake, "take_columns", never)
        settings = engine_settings(
            Path(folder),
            segment_bytes=1024 * 1024,
            namespace=NamespaceSettings(max_message_bytes=MAX_MESSAGE_BYTES),
        )
        engine = Engine(settings, ManualClock(), Storages(), threaded=False)
        for entity in ENTITIES:
            engine.turn([Asked(CreateEntity(entity))])
        for turn in work:
            asked = [Asked(command) for command in turn]
            engine.turn(asked)
            seen += [item.outcome for item in asked]
        seen.append(engine.snapshot(is_open=True).meter.to_pylist())
        seen.append(engine.namespace.faults())
        seen += [(p.path, p.active_message_count) for p, _ in engine.look_at(engine.entities())]
        engine.abandon()
        again = Engine(settings, ManualClock(), Storages(), threaded=False)
        seen += written(again)
        again.abandon()
    return seen


def written(engine: Engine) -> list[Any]:
    """Return what the namespace holds after a start, message by message, and what it remembers."""
    found: list[Any] = []
    get: Callable[..., Any]
    for queue in engine.namespace.directory.queues():
        at, get = queue.waiting.all(), queue.waiting.get
        if len(at):
            bodies = engine.namespace.shared.bodies.fetch(get("batch", at), get("row", at))
            sizes, numbers = get("size", at).tolist(), get("sequence", at).tolist()
            found.append((queue.path, numbers, sizes, to_messages(bodies)))
    return [*found, sorted(engine.namespace.transfers.origins())]


@given(turns)
@replayed
def test_both_ways_lead_to_the_same(work: list[list[Send]]) -> None:
    assert carried_out(work, is_short=True) == carried_out(work, is_short=False)


def test_single_messages_to_a_plain_queue_take_the_short_way(tmp_path: Path) -> None:
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
