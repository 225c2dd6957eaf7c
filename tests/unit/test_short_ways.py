"""The short ways of a single send lead to the same place as the long ones."""

import asyncio
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.namespaces import embedded
from tests.unit.properties import replayed
from twinbus.broker.queue.waiting import Rows, Waiting
from twinbus.broker.sending.repeats import Repeats
from twinbus.broker.sending.transfers import Transfers
from twinbus.broker.store.commit import Commit
from twinbus.clock import ManualClock
from twinbus.entities import QueueDescription
from twinbus.errors import InvalidArgumentError
from twinbus.limits import LARGE_FRAME_BYTES
from twinbus.message import BrokeredMessage
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol import frames as wire_frames
from twinbus.protocol import wire
from twinbus.protocol.commands import CreateEntity, Origin, Send
from twinbus.protocol.origins import sender_source
from twinbus.protocol.requests import Request
from twinbus.server.turns import CountingSelector, Turns

ROUNDS = 10  # of a loop: more than any turn needs
LATER = datetime(2031, 1, 1, tzinfo=UTC)
texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
messages = st.builds(
    BrokeredMessage,
    body=st.binary(max_size=30),
    message_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    session_id=texts,
    subject=texts,
    time_to_live=st.none() | st.just(timedelta(hours=1)),
    scheduled_enqueue_time_utc=st.none() | st.just(LATER),
    application_properties=st.just({}) | st.just({"a": 1}),
    amqp=st.none() | st.binary(max_size=3),
)
plain_messages = st.builds(BrokeredMessage, body=st.binary(max_size=30))
origins = st.builds(
    Origin,
    source=st.just(sender_source(7)),
    numbers=st.integers(0, 9).map(lambda first: range(first, first + 1)) | st.just([3]),
)


# -- frames ----------------------------------------------------------------------------------------


@given(messages | plain_messages, st.none() | origins, st.integers(1, 2**40))
@replayed
def test_a_send_of_one_message_has_the_same_frame_either_way(
    message: BrokeredMessage, origin: Origin | None, number: int
) -> None:
    send = Send("orders", [message], origin)
    # both ways give the same frame: from outside nobody knows which was taken
    short = wire._encode_single(number, send)
    assert short is None or joined(short) == joined(wire._encode_send(number, send))


def test_the_usual_send_has_a_short_way() -> None:
    send = Send("orders", [BrokeredMessage(b"x")], Origin(sender_source(7), range(1)))
    # see above
    assert wire._encode_single(1, send) is not None


def test_a_message_with_properties_is_encoded_without_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = BrokeredMessage(b"x", session_id="s", application_properties={"region": "north"})
    monkeypatch.setattr(wire, "as_batch", None)
    assert wire.encode_ask(1, Send("orders", [message]))


def joined(pieces: wire_frames.Buffers) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


frames = st.builds(
    lambda head, body: joined(wire_frames.frame([3, *head], [body], len(body))),
    st.lists(st.integers().filter(lambda number: abs(number) < 2**63) | st.text(max_size=3)),
    st.binary(max_size=20),
)


@given(st.lists(frames, max_size=3), st.integers(0, 60))
@replayed
def test_bytes_that_are_one_frame_are_read_like_any_others(pieces: list[bytes], cut: int) -> None:
    data = b"".join(pieces)[cut:] if len(pieces) > 1 else b"".join(pieces)
    reader = wire_frames.FrameReader()
    frame = reader.single_frame(data)
    if frame is None:
        assert len(pieces) != 1
    else:
        [(head, body)] = wire_frames.FrameReader().feed(data)
        assert (frame[0], bytes(frame[1])) == (head, bytes(body))
        assert reader.frame_bytes == len(data)


@given(st.lists(st.tuples(st.integers(1, LARGE_FRAME_BYTES), st.booleans()), min_size=1))
@replayed
def test_a_large_frame_is_the_same_however_its_bytes_are_read(cuts: list[tuple[int, bool]]) -> None:
    body = bytes(range(256)) * 1024
    sent = joined(wire_frames.frame([3, "x"], [body], len(body)))
    reader, at = wire_frames.FrameReader(), 0
    found: list[wire_frames.Frame] = []
    for count, into_room in cycle(cuts):
        if reader.own is not None and into_room:
            room = reader.room()
            taken = min(count, len(room), len(sent) - at)
            room[:taken] = sent[at : at + taken]
            found += reader.filled_in(taken)
        else:
            taken = min(max(count, 1000), len(sent) - at)
            found += reader.feed(sent[at : at + taken])
        at += taken
        if at == len(sent):
            break
    assert [(head, bytes(stored)) for head, stored in found] == [([3, "x"], body)]
    assert reader.own is None
    assert not reader.filled


# -- messages --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept(BrokeredMessage):
    """A message of a subclass, which has the usual constructor of a dataclass."""


@given(messages)
@replayed
def test_a_message_made_quickly_is_like_one_made_as_usual(message: BrokeredMessage) -> None:
    values = {item.name: getattr(message, item.name) for item in fields(message)}
    usual = Kept(**values)
    assert [getattr(usual, name) for name in values] == list(values.values())
    assert BrokeredMessage(**values) == message == replace(message)
    with pytest.raises(FrozenInstanceError):
        message.body = b""  # type: ignore[misc]


@pytest.mark.parametrize(
    "bad", [{"body": "text"}, {"message_id": "i" * 129}, {"message_id": 1}, {"subject": "\ud800"}]
)
def test_a_message_made_quickly_is_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        BrokeredMessage(**bad)


def test_an_unknown_field_of_a_message_is_refused_under_its_name() -> None:
    with pytest.raises(TypeError, match=r"BrokeredMessage.__init__.*'color'"):
        BrokeredMessage(color=1)  # type: ignore[call-arg]


# -- rows, and numbers of senders ------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=100), st.booleans())
@replayed
def test_one_row_is_added_like_many(added: list[tuple[int, bool]], has_locks: bool) -> None:
    short, long = Waiting(), Waiting()
    for waiting in (short, long) if has_locks else ():
        waiting.put("lock", np.array([], np.intp), 0)  # a column that is there on use only
    for number, (size, is_single) in enumerate(added, 1):
        many = Rows(np.array([number]), 5, size, batch=number, row=np.zeros(1, np.int32))
        long.add(many)
        if is_single:
            short.add_one(number, 5, size, number)
        else:
            short.add(many)
    assert short.faults() == long.faults() == []
    at = np.arange(len(added))
    for name in Rows._fields:
        assert short.get(name, at).tolist() == long.get(name, at).tolist()
    assert (short.live, short.size_in_bytes) == (long.live, long.size_in_bytes)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3), st.sampled_from("ab")), max_size=9)
)
@replayed
def test_a_sender_that_goes_on_is_found_to_do_so_either_way(
    sends: list[tuple[int, int, str]],
) -> None:
    transfers = Transfers()
    repeats = Repeats(transfers)
    for first, count, user in sends:
        commit = Commit(1)
        origin = Origin(sender_source(7), range(first, first + count))
        short = repeats.continued(origin, user, commit)
        if short is None:
            continue_with = origin, user
        else:
            assert repeats.is_ahead(origin, commit)
            assert repeats.may_use(origin, user, commit)
            long = repeats.taken(origin, user, commit)
            assert short._replace(intervals=[*short.intervals]) == long
            continue_with = origin, short.owner
        taken, owner = continue_with
        transfers.take(taken.source, [(taken.numbers[0], taken.numbers[-1])], owner)


# -- turns at once ---------------------------------------------------------------------------------


class Counted(Request):
    """A request that counts its replies."""

    __slots__ = ("replies",)

    def answer(self, value: Any) -> None:  # noqa: ARG002
        self.replies = getattr(self, "replies", 0) + 1


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    with embedded(tmp_path, ManualClock(), threaded=False) as opened:
        opened.ask(CreateEntity(QueueDescription(path="orders")))
        yield opened


def flushes_of(
    namespace: EmbeddedNamespace, ready: int, groups: list[int], *, may_turn: bool
) -> tuple[int, list[bool]]:
    """Add groups of requests in one round of a loop; return the flushes, and who was answered."""
    requests = [[Counted(Send("orders", [BrokeredMessage()])) for _ in range(n)] for n in groups]

    async def one_round() -> None:
        turns = Turns(namespace, selector, lambda: None)
        selector.ready = ready
        for group in requests:
            turns.add(group, may_turn=may_turn)
        for _ in range(ROUNDS):
            await asyncio.sleep(0)

    selector = CountingSelector()
    before = namespace.flushes.total
    loop = asyncio.SelectorEventLoop(selector)
    try:
        loop.run_until_complete(one_round())
    finally:
        loop.close()
    answered = [getattr(request, "replies", 0) == 1 for group in requests for request in group]
    return namespace.flushes.total - before, answered


def test_a_request_that_is_alone_has_the_turn_at_once(namespace: EmbeddedNamespace) -> None:
    assert flushes_of(namespace, 1, [1, 1], may_turn=True) == (2, [True, True])


def test_requests_of_several_sockets_share_a_turn(namespace: EmbeddedNamespace) -> None:
    assert flushes_of(namespace, 2, [1, 1], may_turn=True) == (1, [True, True])


def test_a_request_that_does_not_come_from_a_socket_waits_for_the_next_round(
    namespace: EmbeddedNamespace,
) -> None:
    assert flushes_of(namespace, 1, [1, 1], may_turn=False) == (1, [True, True])
