"""A namespace driven against a napkin model, operation by operation, through restarts.

Hypothesis prints the steps of a failure; `@reproduce_failure` or the example database replays it.
"""

import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.namespaces import embedded
from tests.simulation.model import NEVER, Item, QueueModel
from twinbus.clock import ManualClock, from_us
from twinbus.entities import (
    QueueDescription,
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
from twinbus.errors import (
    MessageLockLostError,
    MessageNotFoundError,
    RangeUnavailableError,
    SessionCannotBeLockedError,
    SessionLockLostError,
    StaleEpochError,
)
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message import BrokeredMessage, to_messages
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol import commands as c

QUEUE, SESSIONS, GRAVES, TOPIC, DOOR = "plain", "sessions", "graves", "news", "door"
RED, ALL = subscription_path(TOPIC, "red"), subscription_path(TOPIC, "all")
STATES = {"deferred": 1, "deferred-locked": 1, "scheduled": 2}
picks = st.integers(0, 10_000)
counts = st.integers(1, 4)


class BrokerMachine(RuleBasedStateMachine):
    """The queues of the real namespace and their models take the same steps."""

    @initialize(duplicates=st.booleans(), expired=st.booleans(), forwards=st.booleans())
    def open(self, duplicates: bool, expired: bool, forwards: bool) -> None:
        self.clock = ManualClock()
        self.folder = Path(tempfile.mkdtemp(prefix="twinbus-model-"))
        self.namespace = self._open()
        self.models = {
            QUEUE: QueueModel(
                dead_letters_expired=expired,
                detects_duplicates_us=20_000_000 if duplicates else None,
            ),
            SESSIONS: QueueModel(dead_letters_expired=expired),
            GRAVES: QueueModel(),  # after the queue whose dead letters it gets
        }
        if forwards:
            self.models[SESSIONS].graves = self.models[GRAVES]
        self.namespace.ask(c.CreateEntity(QueueDescription(path=GRAVES)))
        self.tokens: list[tuple[str, bytes, Item]] = []
        self.holds: list[tuple[str, c.SessionLock]] = []
        self.epochs: list[int] = []
        self.starts: list[int] = []  # first numbers of the queue in each start but the first
        for path in (QUEUE, SESSIONS):
            description = QueueDescription(
                path=path,
                max_delivery_count=3,
                requires_session=path == SESSIONS,
                requires_duplicate_detection=duplicates and path == QUEUE,
                duplicate_detection_history_time_window=timedelta(seconds=20),
                enable_dead_lettering_on_message_expiration=expired,
                forward_dead_lettered_messages_to=(
                    GRAVES if forwards and path == SESSIONS else None
                ),
            )
            self.namespace.ask(c.CreateEntity(description))
        self._create_topic()
        self.sent = 0

    def _create_topic(self) -> None:
        """Make a topic with two subscriptions, and a queue that forwards to it."""
        self.namespace.ask(c.CreateEntity(TopicDescription(path=TOPIC)))
        rules: dict[str, RuleFilter] = {
            RED: SqlFilter("color = 'red' AND sys.Label LIKE 'l%'"),
            ALL: TrueFilter(),
        }
        for path, rule_filter in rules.items():
            name = path.rpartition("/")[2]
            description = SubscriptionDescription(topic_path=TOPIC, name=name, max_delivery_count=3)
            rule_ = RuleDescription("rule", rule_filter, SqlAction("SET seen = 1"))
            self.namespace.ask(c.CreateEntity(description, rule_))
            self.models[path] = QueueModel()
        self.namespace.ask(c.CreateEntity(QueueDescription(path=DOOR, forward_to=TOPIC)))

    def _open(self) -> EmbeddedNamespace:
        return embedded(self.folder, self.clock, threaded=False, segment_bytes=20_000)

    @property
    def now(self) -> int:
        return self.clock.now_us()

    def teardown(self) -> None:
        if hasattr(self, "namespace"):
            self.namespace.close()
            shutil.rmtree(self.folder)

    # -- sending -------------------------------------------------------------------------------

    @rule(
        path=st.sampled_from([QUEUE, SESSIONS]),
        count=counts,
        life=st.sampled_from([None, 5, 90]),
        delay=st.sampled_from([None, -5, 3, 100]),
        same_id=st.booleans(),
        session=st.sampled_from(["a", "b"]),
    )
    def send(
        self,
        path: str,
        count: int,
        life: int | None,
        delay: int | None,
        same_id: bool,
        session: str,
    ) -> None:
        messages, expected = [], []
        due = None if delay is None else self.now + delay * 1_000_000
        for _ in range(count):
            self.sent += 1
            message_id = "same" if same_id else f"id{self.sent}"
            message = BrokeredMessage(
                f"m{self.sent}".encode(),
                message_id=message_id,
                session_id=session if path == SESSIONS else None,
                time_to_live=None if life is None else timedelta(seconds=life),
                scheduled_enqueue_time_utc=None if due is None else from_us(due),
            )
            messages.append(message)
            expected.append(
                self.models[path].send(
                    f"m{self.sent}",
                    self.now,
                    message_id=message_id,
                    life=None if life is None else life * 1_000_000,
                    due=due,
                    session=message.session_id,
                )
            )
        receipt = self.namespace.ask(c.Send(path, messages))
        # Within one send the rows that wait for their time are numbered before the others.
        assert sorted(receipt.sequence_numbers) == sorted(expected)

    @rule(
        path=st.sampled_from([TOPIC, DOOR]),
        color=st.sampled_from(["red", "blue", 7, None]),
        subject=st.sampled_from(["label", "other", None]),
    )
    def publish(self, path: str, color: str | int | None, subject: str | None) -> None:
        self.sent += 1
        body = f"m{self.sent}"
        properties = {} if color is None else {"color": color}
        message = BrokeredMessage(body.encode(), subject=subject, application_properties=properties)
        assert self.namespace.ask(c.Send(path, [message])).sequence_numbers == [0]
        self.models[ALL].send(body, self.now, message_id=body)
        if color == "red" and subject == "label":
            self.models[RED].send(body, self.now, message_id=body)

    @rule(number=st.integers(1, 6))
    def transfer(self, number: int) -> None:
        model = self.models[QUEUE]
        message = BrokeredMessage(b"t", message_id=f"transfer{number}")
        receipt = self.namespace.ask(c.Send(QUEUE, [message], c.Origin("backlog/0", [number])))
        if ("backlog/0", number) in model.taken:
            assert list(receipt.sequence_numbers) == [0]
            return
        model.taken.add(("backlog/0", number))
        expected = model.send("t", self.now, message_id=message.message_id)
        assert list(receipt.sequence_numbers) == [expected]

    @rule()
    def ping(self) -> None:
        message = BrokeredMessage(b"", content_type=PING_CONTENT_TYPE, session_id="x")
        receipt = self.namespace.ask(c.Send(SESSIONS, [message]))
        assert list(receipt.sequence_numbers) == [0]

    @rule(pick=picks, path=st.sampled_from([QUEUE, SESSIONS]))
    def cancel(self, pick: int, path: str) -> None:
        model = self.models[path]
        scheduled = [i for i in model.items if i.state == "scheduled"]
        if not scheduled:
            with pytest.raises(MessageNotFoundError):
                self.namespace.ask(c.CancelScheduled(path, [pick + 1_000_000]))
            return
        item = scheduled[pick % len(scheduled)]
        self.namespace.ask(c.CancelScheduled(path, [item.number]))
        model.items.remove(item)

    # -- receiving -----------------------------------------------------------------------------

    @rule(
        path=st.sampled_from([QUEUE, RED, ALL]),
        count=counts,
        mode=st.sampled_from(list(c.ReceiveMode)),
    )
    def receive(self, path: str, count: int, mode: c.ReceiveMode) -> None:
        model = self.models[path]
        batch = self.namespace.ask(c.Receive(path, count, mode=mode))
        if path in (RED, ALL):
            assert all(m.application_properties["seen"] == 1 for m in to_messages(batch))
        self._take(batch, model.deliverable()[:count], model, mode, path)

    @rule(count=counts, mode=st.sampled_from(list(c.ReceiveMode)))
    def receive_dead(self, count: int, mode: c.ReceiveMode) -> None:
        batch = self.namespace.ask(c.Receive(dead_letter_path(QUEUE), count, mode=mode))
        self._take_dead(batch, self.models[QUEUE], count, mode)

    def _take(
        self, batch: pa.RecordBatch, expected: list[Item], model: QueueModel, mode: Any, path: str
    ) -> None:
        messages = to_messages(batch)
        assert [m.body.decode() for m in messages] == [i.body for i in expected]
        assert [m.delivery_count for m in messages] == [i.failures for i in expected]
        for message, item in zip(messages, expected, strict=True):
            assert message.sequence_number == item.number
            if mode is c.ReceiveMode.RECEIVE_AND_DELETE:
                model.items.remove(item)
                continue
            assert message.lock_token is not None
            deferred = item.state == "deferred"
            item.state = "deferred-locked" if deferred else "locked"
            if path != SESSIONS:
                item.until, item.lock = self.now + model.lock_us, message.lock_token.bytes
            self.tokens.append((path, message.lock_token.bytes, item))

    def _take_dead(
        self, batch: pa.RecordBatch, model: QueueModel, count: int, mode: c.ReceiveMode
    ) -> None:
        waiting = [i for i in model.dead if i.state == "active"][:count]
        messages = to_messages(batch)
        assert [m.body.decode() for m in messages] == [i.body for i in waiting]
        assert all(m.dead_letter_source == QUEUE and m.dead_letter_reason for m in messages)
        if mode is c.ReceiveMode.RECEIVE_AND_DELETE:
            model.dead = [i for i in model.dead if i not in waiting]
        else:
            tokens = batch.column("lock_token")
            settle = c.Settle(dead_letter_path(QUEUE), tokens, c.Disposition.RELEASE)
            self.namespace.ask(settle)

    @rule(pick=picks, mode=st.sampled_from(list(c.ReceiveMode)))
    def receive_deferred(self, pick: int, mode: c.ReceiveMode) -> None:
        model = self.models[QUEUE]
        deferred = [i for i in model.items if i.state == "deferred"]
        if not deferred:
            with pytest.raises(MessageNotFoundError):
                self.namespace.ask(c.ReceiveDeferred(QUEUE, [pick + 1_000_000]))
            return
        item = deferred[pick % len(deferred)]
        batch = self.namespace.ask(c.ReceiveDeferred(QUEUE, [item.number], mode))
        self._take(batch, [item], model, mode, QUEUE)

    @precondition(lambda self: self.tokens)
    @rule(pick=picks, disposition=st.sampled_from(list(c.Disposition)))
    def settle(self, pick: int, disposition: c.Disposition) -> None:
        path, token, item = self.tokens[pick % len(self.tokens)]
        model = self.models[path]
        command = c.Settle(path, pa.array([token], pa.binary(16)), disposition, "reason", "why")
        if not self._holds(path, token, item):
            lost = MessageLockLostError if path != SESSIONS else SessionLockLostError
            with pytest.raises(lost):
                self.namespace.ask(command)
            return
        self.namespace.ask(command)
        self._settled(model, item, disposition)

    def _holds(self, path: str, token: bytes, item: Item) -> bool:
        model = self.models[path]
        alive = item in model.items and item.state.endswith("locked")
        if path != SESSIONS:
            return alive and item.lock == token
        found = model.sessions.get(item.session or "")
        return alive and found is not None and found[0] == token[:8] == item.lock

    def _settled(self, model: QueueModel, item: Item, disposition: c.Disposition) -> None:
        if disposition is c.Disposition.ABANDON:
            model.fail(item)
            return
        if disposition in (c.Disposition.COMPLETE, c.Disposition.DEAD_LETTER):
            model.items.remove(item)
            if disposition is c.Disposition.DEAD_LETTER:
                model.bury(item)
            return
        deferred = disposition is c.Disposition.DEFER or item.state == "deferred-locked"
        item.state = "deferred" if deferred else "active"
        item.lock, item.until = None, NEVER

    @precondition(lambda self: self.tokens)
    @rule(pick=picks)
    def renew(self, pick: int) -> None:
        path, token, item = self.tokens[pick % len(self.tokens)]
        command = c.RenewLocks(path, pa.array([token], pa.binary(16)))
        if path != SESSIONS and self._holds(path, token, item):
            assert self.namespace.ask(command) == from_us(self.now + 60_000_000)
            item.until = self.now + 60_000_000
        elif path != SESSIONS:
            with pytest.raises(MessageLockLostError):
                self.namespace.ask(command)

    # -- sessions ------------------------------------------------------------------------------

    @rule(name=st.sampled_from([None, "a", "b", "new"]))
    def accept(self, name: str | None) -> None:
        model = self.models[SESSIONS]
        ready = {i.session for i in model.deliverable()} - set(model.sessions)
        if (name is None and not ready) or name in model.sessions:
            with pytest.raises(SessionCannotBeLockedError):
                self.namespace.ask(c.AcceptSession(SESSIONS, name))
            return
        grant = self.namespace.ask(c.AcceptSession(SESSIONS, name))
        assert grant.lock.session_id in (ready if name is None else {name})
        lock = (grant.lock.lock_token.bytes[:8], self.now + model.lock_us)
        model.sessions[grant.lock.session_id] = lock
        self.holds.append((grant.lock.session_id, grant.lock))

    @precondition(lambda self: self.holds)
    @rule(pick=picks, what=st.sampled_from(["receive", "renew", "release", "state"]), count=counts)
    def use_session(self, pick: int, what: str, count: int) -> None:
        model = self.models[SESSIONS]
        name, lock = self.holds[pick % len(self.holds)]
        found = model.sessions.get(name)
        state = f"state{count}".encode()
        commands: dict[str, c.Command[Any]] = {
            "receive": c.Receive(SESSIONS, count, session=lock),
            "renew": c.RenewSession(SESSIONS, lock),
            "release": c.ReleaseSession(SESSIONS, lock),
            "state": c.SetSessionState(SESSIONS, lock, state),
        }
        if found is None or found[0] != lock.lock_token.bytes[:8]:
            with pytest.raises(SessionLockLostError):
                self.namespace.ask(commands[what])
            return
        reply = self.namespace.ask(commands[what])
        if what == "receive":
            expected = model.deliverable(name)[:count]
            self._take(reply, expected, model, c.ReceiveMode.PEEK_LOCK, SESSIONS)
            for item in expected:
                item.lock = found[0]
        elif what == "renew":
            model.sessions[name] = (found[0], self.now + model.lock_us)
        elif what == "release":
            model.let_go(name, failed=False)
        else:
            model.session_states[name] = state
            assert self.namespace.ask(c.GetSessionState(SESSIONS, lock)) == state

    # -- ranges --------------------------------------------------------------------------------

    @rule(owner=st.sampled_from(["one", "two"]), count=counts)
    def lease(self, owner: str, count: int) -> None:
        model = self.models[QUEUE]
        expected = model.deliverable()[:count]
        lease = self.namespace.ask(c.LeaseRange(QUEUE, owner, count))
        self._leased(lease, owner, expected)

    def _leased(self, lease: c.RangeLease | None, owner: str, expected: list[Item]) -> None:
        if not expected:
            assert lease is None
            return
        assert lease is not None
        # A lease ends where another start of the broker began to number messages.
        later = [first for first in self.starts if first > expected[0].number]
        expected = [i for i in expected if not later or i.number < later[0]]
        assert (lease.first, lease.last) == (expected[0].number, expected[-1].number)
        assert lease.message_count == len(expected)
        self.models[QUEUE].leases[lease.epoch] = (owner, self.now + 60_000_000)
        self.epochs.append(lease.epoch)
        for item in expected:
            item.state, item.lock = "leased", lease.epoch

    @rule(owner=st.sampled_from(["one", "two"]), first=st.integers(1, 30), count=counts)
    def lease_given(self, owner: str, first: int, count: int) -> None:
        model = self.models[QUEUE]
        command = c.LeaseRange(QUEUE, owner, 100, first, first + count)
        inside = [i for i in model.items if first <= i.number <= first + count]
        epochs = [e for e in model.leases if any(i.lock == e for i in inside)]
        is_foreign = any(model.leases[epoch][0] != owner for epoch in epochs)
        if is_foreign or any(i.state == "locked" for i in inside):
            with pytest.raises(RangeUnavailableError):
                self.namespace.ask(command)
            return
        for epoch in epochs:
            model.end_lease(epoch)
        expected = [i for i in inside if i.state == "active"]
        self._leased(self.namespace.ask(command), owner, expected)

    @precondition(lambda self: self.epochs)
    @rule(pick=picks, what=st.sampled_from(["read", "complete", "bury", "renew", "release"]))
    def use_lease(self, pick: int, what: str) -> None:
        model = self.models[QUEUE]
        epoch = self.epochs[pick % len(self.epochs)]
        found = [i for i in model.items if i.state == "leased" and i.lock == epoch]
        part = found[: 1 + pick % 2]
        numbers = [i.number for i in part]
        commands: dict[str, c.Command[Any]] = {
            "read": c.ReadRange(QUEUE, epoch, 0, 1_000_000),
            "complete": c.SettleRange(QUEUE, epoch, [(n, n) for n in numbers]),
            "bury": c.SettleRange(QUEUE, epoch, (), [c.DeadLetterPart(numbers, "bad")]),
            "renew": c.RenewRange(QUEUE, epoch),
            "release": c.ReleaseRange(QUEUE, epoch),
        }
        if epoch not in model.leases:
            with pytest.raises(StaleEpochError):
                self.namespace.ask(commands[what])
            return
        reply = self.namespace.ask(commands[what])
        if what == "read":
            assert [m.body.decode() for m in to_messages(reply)] == [i.body for i in found]
        elif what == "renew":
            model.leases[epoch] = (model.leases[epoch][0], self.now + 60_000_000)
        elif what == "release":
            model.end_lease(epoch)
        else:
            for item in part:
                model.items.remove(item)
                if what == "bury":
                    model.bury(item)

    # -- time and trouble ----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 4, 19, 61, 300]))
    def wait(self, seconds: int) -> None:
        # The broker notices at each moment; the model follows second by second.
        for _ in range(seconds):
            self.clock.advance(timedelta(seconds=1))
            for model in self.models.values():
                model.tick(self.now)

    @rule(politely=st.booleans())
    def restart(self, politely: bool) -> None:
        if politely:
            self.namespace.close()
        else:
            self.namespace.crash()
        self.clock.advance(timedelta(milliseconds=1))
        self.namespace = self._open()
        directory = self.namespace.engine.namespace.directory
        self.starts.append(directory.queue(QUEUE)[1].next_sequence)
        for model in self.models.values():
            model.restart()
            model.tick(self.now)

    @invariant()
    def the_same_messages_wait(self) -> None:
        if not hasattr(self, "namespace"):
            return
        for path, model in self.models.items():
            model.tick(self.now)
            for where, items in ((path, model.items), (dead_letter_path(path), model.dead)):
                batch = self.namespace.ask(c.Peek(where, 0, 1000))
                seen = [
                    (m.sequence_number, m.body.decode(), int(m.state or 0), m.delivery_count)
                    for m in to_messages(batch)
                ]
                expected = sorted(
                    (i.number, i.body, STATES.get(i.state, 0), i.failures) for i in items
                )
                assert seen == expected
            counts_ = self.namespace.ask(c.GetRuntimeProperties(path))
            scheduled = sum(i.state == "scheduled" for i in model.items)
            assert counts_.scheduled_message_count == scheduled
            assert counts_.active_message_count == len(model.items) - scheduled
            assert counts_.dead_letter_message_count == len(model.dead)

    @invariant()
    def the_bookkeeping_adds_up(self) -> None:
        if hasattr(self, "namespace"):
            engine = self.namespace.engine
            assert engine.namespace.faults() == []
            assert engine.restarts == 0


BrokerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    suppress_health_check=list(HealthCheck),
)
TestBroker = BrokerMachine.TestCase
