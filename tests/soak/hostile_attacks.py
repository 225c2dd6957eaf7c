"""What a hostile key does to a server: attacks with values and numbers of requests, all bounded.

Each attack gets a hog: a client that writes frames by hand and does not mind errors. The hog has
one key for each kind of junk entity. No attack needs a right that an ordinary tenant does not have.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from tests.soak.bad_bytes_attacks import compressed_columns
from tests.soak.bad_bytes_tools import BROKEN, Exchange, asking, framed, frames_of, packed
from twinbus.broker.queue.tokens import token_columns, tokens_for
from twinbus.connection import ConnectionString, token_for
from twinbus.entities import (
    CorrelationFilter,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
    dead_letter_path,
    subscription_path,
)
from twinbus.errors import FaultOwner, InvalidArgumentError, MessagingError, UnauthorizedError
from twinbus.limits import MAX_BATCH_MESSAGES, PING_CONTENT_TYPE
from twinbus.message import MESSAGE_SCHEMA, BrokeredMessage, to_batch
from twinbus.protocol import commands as c
from twinbus.protocol.frames import FrameKind

JUNK, SESSIONS, IDS, TOPIC, VICTIM = "junk", "junk-sessions", "junk-ids", "junk-topic", "victim"
SUBSCRIPTION = subscription_path(TOPIC, "all")
TOKEN_LIFE_S = 3600
FLOOD = 5000  # requests written at once
SOON, LONG = timedelta(microseconds=1), timedelta(minutes=10)
MAX_DELETED = 4000  # by one command
AT_ONCE = c.ReceiveMode.RECEIVE_AND_DELETE
_HUGE_BYTES = 15_000_000  # many times what the head of a frame may have


@dataclass
class Hog:
    """One hostile connection at a time, under any of the hostile keys."""

    keys: dict[str, ConnectionString]  # by the path that the key is for
    generator: random.Random
    findings: list[str] = field(default_factory=list)
    unread: list[Exchange] = field(default_factory=list)  # that nobody reads

    def exchange(self, path: str = JUNK, **options: Any) -> Exchange:
        where = self.keys[path]
        token = token_for(where, int(time.time()) + TOKEN_LIFE_S)
        return Exchange(where.port, token, **options)

    def together(self, path: str, *commands: c.Command[Any]) -> list[Any]:
        """Ask commands at once; return the replies in their order, errors too."""
        with self.exchange(path) as exchange:
            exchange.write(frames_of(*commands))
            found = dict(exchange.all_replies(len(commands)))
        return [found.get(at) for at in range(1, len(commands) + 1)]

    def ask(self, path: str, command: c.Command[Any]) -> Any:
        [reply] = self.together(path, command)
        return reply

    def must_be_refused(self, path: str, command: c.Command[Any]) -> None:
        """Ask what the key has no right to."""
        reply = self.ask(path, command)
        if not isinstance(reply, UnauthorizedError):
            self.findings.append(f"{command!r:.150} was not refused: {reply!r:.100}")

    def raw(self, path: str, plain: Any, pings: int = 0, blobs: bytes = b"") -> None:
        """Write a command as no client would, past all checks of this process.

        The server must refuse it as an error of its caller, or end the connection.
        """
        columns = bytes(_pings(pings).serialize()) if pings else b""
        if columns:
            messages = {"$": "columns", "at": len(blobs), "size": len(columns)}
            plain = {**plain, "messages": messages}
        try:
            output = asking(plain, blobs=blobs + columns)
        except InvalidArgumentError:
            return  # no frame can hold it
        with self.exchange(path) as exchange:
            try:
                _, reply = exchange.answer(output)
            except BROKEN:
                return  # the server hung up while it was written
        if not isinstance(reply, MessagingError) or reply.fault is not FaultOwner.CALLER:
            self.findings.append(f"{plain!r:.150} was not refused: {reply!r:.100}")

    def rows(self, most: int) -> int:
        return self.generator.randint(1, most)

    def sender(self) -> str:
        return f"sender/{self.generator.getrandbits(64):016x}"

    def let_go(self) -> None:
        while self.unread:
            self.unread.pop().cancel()


def _pings(count: int) -> pa.RecordBatch:
    return to_batch([BrokeredMessage(content_type=PING_CONTENT_TYPE)] * count)


def _empty(count: int, **fields: Any) -> pa.RecordBatch:
    return to_batch([BrokeredMessage(message_id="", **fields)] * count)


def drain(hog: Hog, path: str, key: str = JUNK) -> None:
    """Take everything out of a queue, so that the next attack has room."""
    for _ in range(50):
        reply = hog.ask(key, c.Receive(path, 10_000, mode=AT_ONCE))
        if not isinstance(reply, pa.RecordBatch) or not reply.num_rows:
            return


# -- values ----------------------------------------------------------------------------------------


def odd_tokens(hog: Hog) -> None:
    odd = [hog.generator.randbytes(16), b"\xff" * 16, bytes(16), b"\x80" + bytes(15)]
    tokens = pa.array(odd * hog.rows(100), pa.binary(16))
    disposition = hog.generator.choice(list(c.Disposition))
    hog.together(JUNK, c.RenewLocks(JUNK, tokens), c.Settle(JUNK, tokens, disposition, "why"))


def unknown_numbers(hog: Hog) -> None:
    first = hog.generator.choice([1, -5, 2**40])
    numbers = range(first, first + hog.rows(MAX_BATCH_MESSAGES - 1))
    hog.together(JUNK, *[c.CancelScheduled(JUNK, numbers)] * 5)
    hog.ask(JUNK, c.ReceiveDeferred(JUNK, range(1, hog.rows(10_000) + 1)))


def delete_while_releasing(hog: Hog) -> None:
    hog.ask(SESSIONS, c.Send(SESSIONS, [BrokeredMessage(session_id="s")]))
    grant = hog.ask(SESSIONS, c.AcceptSession(SESSIONS, "s"))
    if isinstance(grant, c.SessionGrant):
        receive = c.Receive(SESSIONS, wait=SOON, mode=AT_ONCE, session=grant.lock)
        hog.together(SESSIONS, receive, c.ReleaseSession(SESSIONS, grant.lock))


def guessed_tokens(hog: Hog) -> None:
    hog.ask(JUNK, c.Send(JUNK, [BrokeredMessage()] * 2))
    batch = hog.ask(JUNK, c.Receive(JUNK))
    if not isinstance(batch, pa.RecordBatch) or not batch.num_rows:
        return
    locks, numbers = token_columns(batch.column("lock_token"))
    guesses = pa.concat_arrays([tokens_for(int(locks[0]) + n, numbers + 1) for n in range(1, 200)])
    receive = c.Receive(JUNK, wait=SOON, mode=AT_ONCE)
    hog.together(JUNK, receive, c.Settle(JUNK, guesses, hog.generator.choice(list(c.Disposition))))


def twice_named_properties(hog: Hog) -> None:
    honest = _empty(2, application_properties={"a": 1, "b": 2})
    items = honest.column("properties")
    twice = pa.MapArray.from_arrays(items.offsets, pa.array(["a"] * 4), items.items)
    columns = dict(zip(MESSAGE_SCHEMA.names, honest.columns, strict=True))
    columns["properties"] = twice.cast(MESSAGE_SCHEMA.field("properties").type)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=MESSAGE_SCHEMA)
    reply = hog.ask(JUNK, c.Send(JUNK, batch))
    if isinstance(reply, c.SendReceipt):
        hog.findings.append("a message with one property name twice was taken")


# -- origins ---------------------------------------------------------------------------------------


def origins_with_gaps(hog: Hog) -> None:
    count = hog.rows(5000)
    pings, source = _pings(count), hog.sender()
    gaps = 2 * np.arange(count)
    firsts = [hog.generator.randrange(10**12) for _ in range(4)]
    hog.together(JUNK, *(c.Send(JUNK, pings, c.Origin(source, gaps + first)) for first in firsts))


def many_senders(hog: Hog) -> None:
    pings = _pings(1)
    hog.together(JUNK, *(c.Send(JUNK, pings, c.Origin(hog.sender(), [1])) for _ in range(200)))


def stolen_origins(hog: Hog) -> None:
    number = hog.generator.getrandbits(128)
    for source in (f"contoso/x-servicebus-transfer/0#1.{number:032x}", f"spill/{number:032x}"):
        hog.must_be_refused(JUNK, c.Send(JUNK, _pings(3), c.Origin(source, range(3))))


def _raw_send(source: Any, numbers: Any, also: Any = None) -> dict[str, Any]:
    origin = {"$": "Origin", "source": source, "numbers": numbers, "also": also}
    return {"$": "Send", "path": JUNK, "origin": origin}


def raw_senders_beyond_64_bits(hog: Hog) -> None:
    bits = hog.generator.randint(65, 4000)
    large = hog.generator.getrandbits(bits) | 1 << (bits - 1)
    for source in (f"sender/{large:x}", f"sender/{-large:x}", "sender/-000000000000001", "sender/"):
        hog.raw(JUNK, _raw_send(source, [1]), 1)
    for number in (-1, -(2**63), 2**63, 2**64, large, -large, 1e300, True, None, "1"):
        hog.raw(JUNK, _raw_send(hog.sender(), [number]), 1)


def raw_huge_origins(hog: Hog) -> None:
    name = hog.generator.choice(["x", "sender/0", "//sink/", "\ud800"])
    hog.raw(JUNK, _raw_send(name * (_HUGE_BYTES // len(name.encode("utf-8", "replace"))), [1]), 1)
    first = hog.generator.randrange(10**6)
    numbers = list(range(first, first + _HUGE_BYTES // 8))
    hog.raw(JUNK, _raw_send(hog.sender(), numbers), 1)
    blob = bytes(_HUGE_BYTES // 8 * 8)
    beside = {"$": "numbers", "at": 0, "size": len(blob)}
    hog.raw(JUNK, _raw_send(hog.sender(), beside), 1, blob)
    nested: Any = None
    for _ in range(hog.generator.choice([5, 50])):
        nested = {"$": "Origin", "source": hog.sender(), "numbers": [1], "also": nested}
    hog.raw(JUNK, _raw_send(hog.sender(), [1], nested), 1)


def raw_settlements_of_many_intervals(hog: Hog) -> None:
    hog.ask(JUNK, c.Send(JUNK, _empty(10)))
    lease = hog.ask(JUNK, c.LeaseRange(JUNK, "hog", 10, duration=timedelta(seconds=5)))
    epoch = lease.epoch if isinstance(lease, c.RangeLease) else 1
    plain = {"$": "SettleRange", "path": JUNK, "epoch": epoch, "dead_lettered": [], "release": True}
    step = hog.generator.choice([0, 2])
    for count in (MAX_BATCH_MESSAGES + 1, 800_000):
        apart = [[step * at, step * at] for at in range(count)]
        hog.raw(JUNK, {**plain, "completed": apart})
    hog.raw(JUNK, {**plain, "completed": [[1, 2**70]]})
    drain(hog, JUNK)


# -- rules -----------------------------------------------------------------------------------------

_FILTERS: tuple[Callable[[random.Random], RuleFilter], ...] = (
    lambda _: SqlFilter("price > -'1'"),
    lambda _: SqlFilter("(" * 60 + "a = 1" + ")" * 60),
    lambda g: SqlFilter("a->" * g.randint(1, 10) + "a"),
    lambda g: SqlFilter("a IN (" + ",".join(["a"] * g.randint(1, 400)) + ")"),
    lambda g: SqlFilter("text LIKE @p", {"p": "%a" + "_" * g.randint(1, 200) + "%b"}),
    lambda _: SqlFilter("text LIKE @p", {"p": "%x" * 50_000}),
    lambda _: CorrelationFilter(subject="\ud800"),
    lambda g: SqlFilter("".join(g.choices("ab+-*/%()=<>'@.,;[] ", k=g.randint(1, 60)))),
)
_ACTIONS = (
    "SET a = a + a;" * 27,
    "SET a = a + a;" * 15,
    "SET a = 1;" * 20,
    "SET sys.MessageId = text + text",
    "SET sys.SessionId = NULL; REMOVE sys.MessageId",
)


def bad_rules(hog: Hog) -> None:
    name = f"r{hog.generator.randrange(1000)}"
    with contextlib.suppress(MessagingError):
        action = hog.generator.choice([None, *map(SqlAction, _ACTIONS)])
        chosen = TrueFilter() if action else hog.generator.choice(_FILTERS)(hog.generator)
        hog.ask(TOPIC, c.CreateRule(SUBSCRIPTION, RuleDescription(name, chosen, action)))
    text = "".join(hog.generator.choices("ac", k=2000))
    bags: list[Any] = [{"a": "x" * 100, "text": text}, {"a": -(2**63)}, {"a": b""}, {}]
    due = datetime.now(UTC) + timedelta(milliseconds=200)
    for schedule in (None, due):
        sent = [
            BrokeredMessage(application_properties=bag, scheduled_enqueue_time_utc=schedule)
            for bag in bags
        ]
        hog.ask(TOPIC, c.Send(TOPIC, sent * hog.rows(10)))
    time.sleep(0.3)
    hog.ask(TOPIC, c.DeleteRule(SUBSCRIPTION, name))
    drain(hog, SUBSCRIPTION, TOPIC)
    drain(hog, dead_letter_path(SUBSCRIPTION), TOPIC)


def raw_rules(hog: Hog) -> None:
    """Create rules that the values of this process would refuse."""
    texts = ("\ud800", "a\0b", "x" * 100_000)
    fields = ("subject", "message_id", "correlation_id", "to", "session_id")
    nothing = {"$": "map", "items": {}}
    odd: list[dict[str, Any]] = [
        {"$": "CorrelationFilter", hog.generator.choice(fields): text, "properties": nothing}
        for text in texts
    ]
    odd += [
        {
            "$": "SqlFilter",
            "expression": "text LIKE @p",
            "parameters": {"$": "map", "items": {"p": text}},
        }
        for text in ("\ud800", "x" * 100_000, "%x" * 50_000)  # NUL is a character of a value
    ]
    for item in odd:
        name = f"raw{hog.generator.getrandbits(64):x}"
        rule = {"$": "RuleDescription", "name": name, "filter": item, "action": None}
        hog.raw(TOPIC, {"$": "CreateRule", "path": SUBSCRIPTION, "rule": rule})


def flood_of_changes(hog: Hog) -> None:
    change = c.UpdateEntity(TopicDescription(path=TOPIC, max_size_in_megabytes=64))
    hog.together(TOPIC, *[change] * 50)


def forwards_into_others(hog: Hog) -> None:
    for target in (VICTIM, "missing"):
        description = SubscriptionDescription(topic_path=TOPIC, name="all", forward_to=target)
        hog.must_be_refused(TOPIC, c.UpdateEntity(description))
    for command in (c.Receive(VICTIM), c.Send(VICTIM, [BrokeredMessage()]), c.Peek(VICTIM)):
        hog.must_be_refused(JUNK, command)
    hog.must_be_refused(TOPIC, c.ListEntities(c.EntityKind.QUEUE))


# -- state -----------------------------------------------------------------------------------------


def many_leases(hog: Hog) -> None:
    hog.ask(JUNK, c.Send(JUNK, _empty(2000)))
    lease = c.LeaseRange(JUNK, "hog", hog.rows(20), duration=timedelta(seconds=5))
    leases = [r for r in hog.together(JUNK, *[lease] * 100) if isinstance(r, c.RangeLease)]
    past = [lease.epoch for lease in leases] + list(range(1000))
    hog.ask(JUNK, c.LeaseRange(JUNK, "hog", 1, wait=SOON, past=past))
    intervals = [(n, n) for n in range(0, 2 * hog.rows(20_000), 2)]
    parts = [c.DeadLetterPart([n], "x" * hog.rows(4000)) for n in range(hog.rows(50))]
    settle = [
        c.SettleRange(JUNK, lease.epoch, intervals, parts, release=True) for lease in leases[:5]
    ]
    hog.together(JUNK, *settle, *(c.ReleaseRange(JUNK, lease.epoch) for lease in leases))
    drain(hog, JUNK)
    drain(hog, dead_letter_path(JUNK))


def sessions_and_states(hog: Hog) -> None:
    names = [f"s{hog.generator.randrange(300)}" for _ in range(20)]
    grants = hog.together(SESSIONS, *(c.AcceptSession(SESSIONS, name) for name in names))
    found = [grant.lock for grant in grants if isinstance(grant, c.SessionGrant)]
    state = hog.generator.choice([None, bytes(200_000), b"x"])
    hog.together(SESSIONS, *(c.SetSessionState(SESSIONS, lock, state) for lock in found))
    hog.together(SESSIONS, *(c.ReleaseSession(SESSIONS, lock) for lock in found[::2]))


def deferred_in_a_session(hog: Hog) -> None:
    name = f"d{hog.generator.randrange(5)}"
    hog.ask(SESSIONS, c.Send(SESSIONS, _empty(2000, session_id=name)))
    grant = hog.ask(SESSIONS, c.AcceptSession(SESSIONS, name))
    if not isinstance(grant, c.SessionGrant):
        return
    batch = hog.ask(SESSIONS, c.Receive(SESSIONS, 10_000, session=grant.lock))
    if isinstance(batch, pa.RecordBatch) and batch.num_rows:
        tokens = batch.column("lock_token")
        hog.ask(SESSIONS, c.Settle(SESSIONS, tokens, c.Disposition.DEFER))
        numbers = batch.column("sequence_number").to_pylist()
        hog.together(SESSIONS, *[c.Receive(SESSIONS, wait=SOON, session=grant.lock)] * 20)
        deferred = c.ReceiveDeferred(SESSIONS, numbers, AT_ONCE, grant.lock)
        hog.together(SESSIONS, deferred, c.ReleaseSession(SESSIONS, grant.lock))


def reasons_of_death(hog: Hog) -> None:
    hog.ask(JUNK, c.Send(JUNK, _empty(20)))
    batch = hog.ask(JUNK, c.Receive(JUNK, 20))
    if isinstance(batch, pa.RecordBatch) and batch.num_rows:
        tokens, dead = batch.column("lock_token"), c.Disposition.DEAD_LETTER
        texts = [hog.generator.randbytes(2000).hex() for _ in range(len(tokens))]
        settle = [c.Settle(JUNK, tokens.slice(n, 1), dead, text) for n, text in enumerate(texts)]
        hog.together(JUNK, *settle)
    drain(hog, dead_letter_path(JUNK))


def tiny_messages(hog: Hog) -> None:
    for _ in range(5):
        hog.ask(JUNK, c.Send(JUNK, _empty(hog.rows(50_000))))
    drain(hog, JUNK)


def messages_of_one_moment(hog: Hog) -> None:
    due = datetime.now(UTC) + timedelta(seconds=1)
    hog.ask(JUNK, c.Send(JUNK, _empty(hog.rows(30_000), scheduled_enqueue_time_utc=due)))
    lives = [timedelta(milliseconds=n) for n in range(1, 500)]
    hog.ask(JUNK, c.Send(JUNK, [BrokeredMessage(time_to_live=life) for life in lives]))


def remembered_ids(hog: Hog) -> None:
    ids = [hog.generator.randbytes(60).hex() for _ in range(hog.rows(3000))]
    hog.ask(IDS, c.Send(IDS, [BrokeredMessage(message_id=item) for item in ids]))
    drain(hog, IDS, IDS)


# -- connections -----------------------------------------------------------------------------------


def flood(hog: Hog) -> None:
    plain = {"$": "CancelScheduled", "path": JUNK, "sequence_numbers": [1]}
    with hog.exchange() as exchange:
        exchange.write(*(asking(plain, number=number) for number in range(1, FLOOD + 1)))
        exchange.all_replies(FLOOD)


def waits(hog: Hog) -> None:
    with hog.exchange() as exchange:
        exchange.write(frames_of(*[c.Receive(JUNK, wait=LONG)] * 300))
        hog.ask(JUNK, c.Send(JUNK, [BrokeredMessage()]))


def unread_replies(hog: Hog) -> None:
    hog.ask(JUNK, c.Send(JUNK, [BrokeredMessage(os.urandom(100_000))] * 40))
    exchange = hog.exchange()
    exchange.write(frames_of(*[c.Peek(JUNK, 0, 1000)] * 50))
    hog.unread.append(exchange)
    if len(hog.unread) > 3:
        hog.unread.pop(0).cancel()
    drain(hog, JUNK)


def packed_frames(hog: Hog) -> None:
    zeros = to_batch([BrokeredMessage(bytes(250_000))] * hog.generator.choice([1, 200, 400]))
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    blob = compressed_columns(zeros, options)
    columns = {"$": "columns", "at": 0, "size": len(blob)}
    with hog.exchange() as exchange:
        send = {"$": "Send", "path": JUNK, "messages": columns, "origin": None}
        exchange.answer(asking(send, blobs=blob))
    drain(hog, JUNK)


def odd_heads(hog: Hog) -> None:
    head = packed([FrameKind.ASK, 1, "Peek", [[]] * hog.rows(180_000)])
    with hog.exchange() as exchange:
        exchange.answer(framed(head, bytes(hog.rows(10_000_000))))


def full_scans(hog: Hog) -> None:
    """Search a long queue again and again, for what it does not have."""
    for _ in range(3):
        hog.ask(JUNK, c.Send(JUNK, _empty(100_000)))
    hog.ask(JUNK, c.LeaseRange(JUNK, "hog", 200_000, duration=timedelta(seconds=3)))
    long_ago = datetime(2000, 1, 1, tzinfo=UTC)
    searches = (
        c.DeleteMessages(JUNK, 1, long_ago),
        c.LeaseRange(JUNK, "hog", 1, past=[]),
        c.Peek(JUNK, 10**9),
    )
    hog.together(JUNK, *[hog.generator.choice(searches)] * 500)
    for _ in range(4):
        hog.ask(JUNK, c.DeleteMessages(JUNK, MAX_DELETED))


def scans_of_sessions(hog: Hog) -> None:
    hog.ask(SESSIONS, c.Send(SESSIONS, _empty(100_000, session_id="long")))
    peek = c.Peek(SESSIONS, 10**9, session_id="long")
    listing = c.ListSessions(
        SESSIONS, hog.generator.choice([0, 1]), hog.generator.choice([1, 10_000])
    )
    hog.together(SESSIONS, *[hog.generator.choice((peek, listing))] * 500)
    grant = hog.ask(SESSIONS, c.AcceptSession(SESSIONS, "long"))
    if isinstance(grant, c.SessionGrant):
        delete = c.DeleteMessages(SESSIONS, MAX_DELETED, session=grant.lock)
        hog.together(SESSIONS, *[delete] * 30, c.ReleaseSession(SESSIONS, grant.lock))


def large_replies(hog: Hog) -> None:
    hog.ask(JUNK, c.Send(JUNK, [BrokeredMessage(os.urandom(250_000))] * 64))
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(hog.exchange()) for _ in range(8)]
        for exchange in many:
            exchange.write(frames_of(*[c.Peek(JUNK, 0, 1000)] * 3))
        for exchange in many:
            exchange.all_replies(3)
    drain(hog, JUNK)


def withdrawals(hog: Hog) -> None:
    """Withdraw many waiting requests, each in a write of its own or all together."""
    count = 300
    waiting = [c.LeaseRange(JUNK, "hog", 1, wait=LONG, past=[])] * count
    gone = [framed([FrameKind.WITHDRAW, number]) for number in range(1, count + 1)]
    with hog.exchange() as exchange:
        exchange.write(frames_of(*waiting))
        if hog.generator.random() < 0.5:
            exchange.write(*gone)
        else:
            for item in gone:
                exchange.write(item)
        exchange.all_replies(count)


def rules_of_many_likes(hog: Hog) -> None:
    likes = " OR ".join(["text LIKE '%a%b'"] * hog.generator.choice([10, 18, 40]))
    names = [f"like{number}" for number in range(6)]
    for name in names:
        hog.ask(TOPIC, c.CreateRule(SUBSCRIPTION, RuleDescription(name, SqlFilter(likes))))
    bag = {"text": "ac" * 60_000}
    hog.together(TOPIC, *[c.Send(TOPIC, [BrokeredMessage(application_properties=bag)])] * 20)
    hog.together(TOPIC, *(c.DeleteRule(SUBSCRIPTION, name) for name in names))
    drain(hog, SUBSCRIPTION, TOPIC)


def come_and_go(hog: Hog) -> None:
    for _ in range(10):
        with hog.exchange() as exchange:
            exchange.write(frames_of(c.Receive(JUNK, wait=LONG)))


def unknown_paths(hog: Hog) -> None:
    paths = [f"{JUNK}/Subscriptions/{hog.generator.getrandbits(64):x}" for _ in range(50)]
    hog.together(JUNK, *(c.Receive(path) for path in paths))


def many_unread_connections(hog: Hog) -> None:
    hog.ask(JUNK, c.Send(JUNK, [BrokeredMessage(os.urandom(100_000))] * 160))
    with contextlib.ExitStack() as opened:
        for _ in range(60):
            exchange = opened.enter_context(hog.exchange())
            exchange.write(frames_of(*[c.Peek(JUNK, 0, 1000)] * 3))
        time.sleep(1)
    drain(hog, JUNK)


def deferred_after_revocation(hog: Hog) -> None:
    """Let requests wait for room until their token has expired: they must not run afterwards."""
    hog.ask(JUNK, c.Send(JUNK, [BrokeredMessage(os.urandom(100_000))] * 40))
    where, expires_s = hog.keys[JUNK], int(time.time()) + 2
    send = c.Send(JUNK, [BrokeredMessage()])
    with Exchange(where.port, token_for(where, expires_s)) as exchange:
        exchange.write(frames_of(*[c.Peek(JUNK, 0, 1000)] * 20, send))
        time.sleep(max(expires_s - time.time(), 0))
        in_time = hog.ask(JUNK, send)  # with a token that is good
        late = dict(exchange.all_replies(21)).get(21)
    receipts = [item for item in (in_time, late) if isinstance(item, c.SendReceipt)]
    numbers = [receipt.sequence_numbers[0] for receipt in receipts]
    if len(numbers) == 2 and numbers[1] > numbers[0] > 0:
        hog.findings.append("a send ran after its token had expired")
    drain(hog, JUNK)


ATTACKS: tuple[Callable[[Hog], None], ...] = (
    odd_tokens,
    unknown_numbers,
    delete_while_releasing,
    guessed_tokens,
    twice_named_properties,
    origins_with_gaps,
    many_senders,
    stolen_origins,
    raw_senders_beyond_64_bits,
    raw_huge_origins,
    raw_settlements_of_many_intervals,
    bad_rules,
    raw_rules,
    flood_of_changes,
    forwards_into_others,
    many_leases,
    sessions_and_states,
    deferred_in_a_session,
    reasons_of_death,
    tiny_messages,
    messages_of_one_moment,
    remembered_ids,
    flood,
    waits,
    unread_replies,
    packed_frames,
    odd_heads,
    full_scans,
    scans_of_sessions,
    large_replies,
    withdrawals,
    rules_of_many_likes,
    come_and_go,
    unknown_paths,
    many_unread_connections,
    deferred_after_revocation,
)


def attack(hog: Hog, chosen: Callable[[Hog], None]) -> str:
    """Make one attack; return what ended it, if something did."""
    try:
        chosen(hog)
    except (MessagingError, *BROKEN) as error:
        return type(error).__name__
    return ""
