"""A seeded run of clients, a broker and the network between them, and the invariants they keep.

`WireWorld(seed, folder).run()` raises ViolationError, with the seed, when an invariant is broken:

    an acknowledged message is in the namespace, or was completed, or deleted by a receive
    a numbered message is enqueued once
    a request has one outcome, by its deadline at the latest, or was given up
    the broker keeps neither requests nor locks for a client that is gone
    a server conversation that is idle keeps nothing, and an idle client conversation has no timer

The broker's own replies, seen before they enter the network, are what clients are compared with.
"""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

from tests.inside import pending_of
from tests.namespaces import embedded
from tests.simulation.wire_clients import (
    LOCK,
    QUEUES,
    SESSIONS,
    ClientRequest,
    SimulatedClient,
    Truth,
    ViolationError,
)
from tests.simulation.wire_network import ClientLink, Connection, SimulatedDoor, small_limits
from twinbus.broker.lifecycle import State
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.tokens import token_of
from twinbus.broker.store.storage import DiskStorage
from twinbus.broker.turn.engine import Storages
from twinbus.clock import ManualClock, from_us
from twinbus.entities import QueueDescription, dead_letter_path
from twinbus.errors import MessagingError
from twinbus.limits import NEVER_US, SECOND_US
from twinbus.message import to_messages
from twinbus.protocol import commands as c
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.server_conversation import Phase, ServerConversation
from twinbus.protocol.server_requests import ServerRequest

STEPS = 220  # of one run, before the network is healed
HANG_UP_US = 5 * SECOND_US  # two ticks of the door, and the longest step twice
LONGEST_HEALING_US = 400 * SECOND_US


class FastStorage(DiskStorage):
    """Files that are not synced: no run loses power."""

    def create(self, path: Path, size: int = 0) -> int:  # noqa: ARG002 - reserves nothing
        return super().create(path)

    def sync(self, descriptor: int) -> None:
        """Return at once."""

    def sync_directory(self, path: Path) -> None:
        """Return at once."""


class WireWorld:
    """Clients, the network, and one broker, on one clock."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.clock = ManualClock()
        self.truth = Truth()
        storages = Storages(FastStorage(), FastStorage())
        self.namespace = embedded(
            folder, self.clock, storages, threaded=False, segment_bytes=4 * 1024**2
        )
        for path in QUEUES:
            described = QueueDescription(
                path=path,
                lock_duration=LOCK,
                max_delivery_count=self.random.choice((3, 1000)),
                requires_session=path == SESSIONS,
            )
            self.namespace.ask(c.CreateEntity(described))
        self.secrets: dict[str, str] = {}
        for name in ("red", "blue"):
            self._replace_key(name)
        self.door = SimulatedDoor(self.namespace, self.clock, self._on_reply)
        self.connections: list[Connection] = []
        self.leaving: list[ClientLink] = []  # links after a goodbye
        self.later: list[Callable[[], object]] = []
        self._violations: list[ViolationError] = []
        self.clients = [SimulatedClient(self, index) for index in range(self.random.randint(2, 5))]

    def _replace_key(self, name: str) -> None:
        secret = f"{name}-{self.random.getrandbits(128):032x}"
        self.secrets[name] = secret
        claims = (Claim.SEND, Claim.LISTEN)
        key = SharedAccessKey(name=name, claims=claims, primary=secret, secondary=secret)
        self.namespace.ask(c.PutKey(key))

    def connect(self, token: str) -> ClientLink:
        """Open a connection."""
        connection = Connection(self.random)
        self.connections.append(connection)
        self.truth.counts["connections"] += 1
        return ClientLink(connection, self.door.accept(connection), token, self.clock)

    # -- what the broker did -------------------------------------------------------------------

    def _on_reply(self, request: ServerRequest, value: Any) -> None:
        """Note what the broker did, before its reply enters the network.

        The broker catches what its callers raise: a violation is kept for the next check.
        """
        try:
            self._note_reply(request, value)
        except ViolationError as violation:
            self._violations.append(violation)

    def _note_reply(self, request: ServerRequest, value: Any) -> None:
        command, truth = request.command, self.truth
        if isinstance(value, MessagingError):
            return
        if isinstance(command, c.Send):
            messages = command.messages
            if not isinstance(messages, list | tuple):
                messages = to_messages(messages)
            for message, number in zip(messages, value.sequence_numbers, strict=True):
                if number:
                    truth.enqueued[message.message_id] += 1
                    self._check(
                        truth.enqueued[message.message_id] == 1,
                        f"{message.message_id} was enqueued twice",
                    )
        elif isinstance(command, c.Receive | c.Peek | c.ReadRange):
            for message in to_messages(value):
                body, number = message.message_id, message.sequence_number
                assert number is not None
                known = truth.numbers.setdefault((command.path, body), number)
                self._check(known == number, f"{body} is there twice: {known} and {number}")
                self._check(body not in truth.completed, f"{body} is back after it was completed")
                if getattr(command, "mode", None) is c.ReceiveMode.RECEIVE_AND_DELETE:
                    truth.deleted.add(body)

    # -- running -------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        """Live through faults, heal, and check every invariant; return what has happened."""
        with small_limits(self.clock):
            try:
                for _ in range(STEPS):
                    self.step()
                self._heal()
                self._check_idle()
                self._lapse()
                self._check_messages()
            finally:
                self.namespace.close()
        return self.truth.counts

    def step(self) -> None:
        """Let a little time pass, and something happen."""
        self._act()
        if self.random.random() < 0.03:
            self._fault()
        self._move(self.random.choice((0, 1, 5, 20, 50, 100, 200, 400, 2000)))

    def _act(self) -> None:
        for client in self.clients:
            client.retry()
            if self.random.random() < 0.5:
                client.act()

    def _fault(self) -> None:
        if self.random.random() < 0.1:
            self._replace_key(self.random.choice(("red", "blue")))
            self.truth.counts["keys replaced"] += 1
            return
        live = [link for link in self._links() if not link.is_over]
        if not live:
            return
        connection = self.random.choice(live).connection
        if self.random.random() < 0.5:
            connection.drop(self.clock.now_us())
            self.truth.counts["connections dropped"] += 1
        else:
            connection.stall(self.clock.now_us())
            self.truth.counts["stalls"] += 1

    def _links(self) -> list[ClientLink]:
        links = [client.link for client in self.clients if client.link is not None]
        return links + self.leaving

    def _move(self, most_ms: int) -> None:
        """Let time pass, then let every party move its bytes, in a random order."""
        span = timedelta(milliseconds=self.random.uniform(0, most_ms))
        self.clock.advance(span)
        has_turn = self.random.random() < 0.8
        parties: list[Callable[[], None]] = [client.move for client in self.clients]
        parties += [self._move_leaving, lambda: self.door.round(self.random, has_turn=has_turn)]
        self.random.shuffle(parties)
        for party in parties:
            party()
        later, self.later = self.later, []
        for ask in later:
            ask()
        self._check_step()

    def _move_leaving(self) -> None:
        for link in self.leaving:
            for outcome in link.move():
                outcome.deliver()
        self.leaving = [link for link in self.leaving if not link.is_over]

    # -- invariants at every step --------------------------------------------------------------

    def _check(self, holds: bool, text: str, command: object = "") -> None:
        if not holds:
            raise ViolationError(f"seed {self.seed}: {text} {command!r:.80}")

    def _check_step(self) -> None:
        if self._violations:
            raise self._violations[0]
        now = self.clock.now_us()
        for client in self.clients:
            client.requests = [r for r in client.requests if not self._is_settled(r, now)]
        for link in self._links():
            conversation = link.conversation
            self.truth.counts["steps with a ping of a client"] += conversation.is_pinged
            if not pending_of(conversation):
                self._check(conversation.next_event == NEVER_US, "an idle client has a next event")
                self._check_late_locks(link)
            self._check_withdrawn(link)
        for connection in self.door.connections:
            self._check_bookkeeping(connection.conversation)
            if connection.conversation.phase is Phase.ENDED:
                connection.ended_at = connection.ended_at or now
                self._check(now < connection.ended_at + HANG_UP_US, "a server does not hang up")
        if not self.door.turns.arrivals:
            self._check_broker()

    def _is_settled(self, request: ClientRequest, now: int) -> bool:
        """Check that a request has no more than one outcome, and one in time."""
        self._check(request.outcomes <= 1, "a request has two outcomes:", request.command)
        if request.is_given_up:
            self._check(not request.outcomes, "a request that was given up has an outcome")
            return True
        if request.outcomes:
            return True
        self._check(not request.link.is_over, "a request outlives its link:", request.command)
        self._check(request.deadline > now, "a request outlives its deadline:", request.command)
        known = pending_of(request.link.conversation).get(request.number)
        self._check(
            known is not None and known.request is request,
            "the conversation has lost a request that is pending:",
            request.command,
        )
        return False

    def _check_late_locks(self, link: ClientLink) -> None:
        """Check that a client that is idle has given back what came after it gave up."""
        if link.is_over or link.has_refused_undo:
            return
        for _, request, value in link.server.locking_replies:
            if request.number in link.given_up:
                self._check(
                    not self._is_locked(request.command, value),
                    "a client keeps the locks of a reply that nobody waited for:",
                    request.command,
                )
        link.given_up.clear()

    def _check_withdrawn(self, link: ClientLink) -> None:
        """Check that the server lets a request go when it has read that the client gave it up."""
        conversation = link.server.conversation
        unanswered = [*conversation.open_requests, *conversation.deferred_requests]
        known = {request.number for request in unanswered}
        for number, end in link.withdrawn:
            if link.connection.to_server.bytes_read >= end:
                self._check(number not in known, f"request {number} was withdrawn and still waits")

    def _check_bookkeeping(self, conversation: ServerConversation) -> None:
        opened, found = [*conversation.open_requests], [*conversation.deferred_requests]
        fetching = sum(request.reply_bytes for request in opened)
        unanswered = sum(request.size for request in opened + found)
        expected = conversation.reply_bytes - conversation.unread_bytes
        self._check(expected == fetching, "the expected replies are not those of open requests")
        self._check(conversation.request_bytes == unanswered, "the unanswered bytes are wrong")
        counts = self.truth.counts
        counts["steps with held requests"] += conversation.has_deferred
        counts["steps of crowded connections"] += bool(self.door.attendance.crowded)
        counts["steps without reading"] += not conversation.may_read
        counts["steps with a ping of the server"] += conversation.is_pinged

    def _check_broker(self) -> None:
        """Check that every request at the broker has a connection, and that no lock is orphaned."""
        opened = {
            id(request)
            for connection in self.door.connections
            for request in connection.conversation.open_requests
        }
        waiting = {id(request) for request in self._engine.waiting_requests()}
        self._check(waiting <= opened, "a request waits at the broker for nobody")
        self._check(opened <= waiting, "a server waits for a reply that the broker does not owe")
        for request, value in self.door.orphaned:
            self._check(
                not self._is_locked(request.command, value),
                "locks are held for a client that is gone:",
                request.command,
            )
        self.door.orphaned.clear()

    @property
    def _engine(self) -> Any:
        return self.namespace.engine

    def _queue(self, path: str) -> Queue:
        queue: Queue = self._engine.namespace.directory.queue(path)[1]
        return queue

    def _is_locked(self, command: Any, value: Any) -> bool:
        queue = self._queue(command.path)
        if isinstance(command, c.AcceptSession):
            lock = queue.sessions.lock_of(value.lock.session_id)
            return lock is not None and token_of(lock.number, 0) == value.lock.lock_token
        if isinstance(command, c.LeaseRange):
            return queue.leases.find(value.epoch) is not None
        if getattr(command, "session", None) is not None:
            return False  # messages of a session are locked again under the same tokens
        return len(queue.locked_rows(value.column("lock_token"))[0]) > 0

    # -- the end -------------------------------------------------------------------------------

    def _heal(self) -> None:
        """Let the network work, and every request and every send come to its end."""
        for connection in self.connections:
            connection.heal()
        for client in self.clients:
            if client.link is not None:
                client.link.reads_again_at = 0
        deadline = self.clock.now_us() + LONGEST_HEALING_US
        while self._is_busy():
            for client in self.clients:
                client.retry()
            self._move(500)
            if self.clock.now_us() > deadline:
                self._check(False, "a request or a send does not end:", self._unfinished())
        for _ in range(8):
            self._move(1500)

    def _is_busy(self) -> bool:
        return any(
            client.retries or client.requests or (link and pending_of(link.conversation))
            for client in self.clients
            for link in [client.link if client.link and not client.link.is_over else None]
        ) or bool(self.leaving)

    def _unfinished(self) -> list[str]:
        return [
            f"{client.name}: {[f'{r.command!r:.50}' for r in client.requests]}, "
            f"{len(client.retries)} retries"
            for client in self.clients
        ]

    def _check_idle(self) -> None:
        """Check that the server keeps nothing for clients that want nothing."""
        for connection in self.door.connections:
            conversation = connection.conversation
            kept = {
                "open requests": len(conversation.open_requests),
                "deferred requests": conversation.has_deferred,
                "expected replies": conversation.reply_bytes - conversation.unread_bytes,
                "unanswered bytes": conversation.request_bytes,
                "unread bytes": conversation.unread_bytes,
                "unsent replies": len(conversation.unsent_requests),
            }
            left = {name: count for name, count in kept.items() if count}
            self._check(not left, f"an idle conversation keeps {left}")
        self._check(not self._engine.waiting_requests(), "somebody waits at an idle broker")

    def _lapse(self) -> None:
        """Let every client vanish; when their locks have lapsed, nothing is locked."""
        for client in self.clients:
            if client.link is not None:
                for outcome in client.link.vanish():
                    outcome.deliver()
        for _ in range(30):
            self._move(1500)
            for connection in self.connections:
                connection.to_server.ends_at = min(
                    connection.to_server.ends_at or NEVER_US, self.clock.now_us()
                )
        self._check(not self.door.connections, "a connection outlives its client")
        for path in QUEUES:
            queue = self._queue(path)
            locked = queue.waiting.count(State.LOCKED, State.DEFERRED_LOCKED, State.LEASED)
            self._check(not locked, f"{locked} messages of {path} are locked for nobody")
            self._check(not queue.sessions.locked, f"a session of {path} is locked for nobody")
            self._check(not len(queue.leases), f"a range of {path} is leased for nobody")

    def _check_messages(self) -> None:
        """Check that every acknowledged message is there, or was completed or deleted."""
        present: Counter[str] = Counter()
        for path in QUEUES:
            for place in (path, dead_letter_path(path)):
                batch = self.namespace.ask(c.Peek(place, 0, 10_000))
                present.update(message.message_id for message in to_messages(batch))
        twice = [body for body, count in present.items() if count > 1]
        self._check(not twice, f"messages are there twice: {twice[:5]}")
        truth = self.truth
        lost = truth.acknowledged - present.keys() - truth.completing - truth.deleted
        self._check(not lost, f"acknowledged messages are lost: {sorted(lost)[:5]}")
        back = truth.completed & present.keys()
        self._check(not back, f"completed messages are there: {sorted(back)[:5]}")
        truth.counts["messages acknowledged"] = len(truth.acknowledged)
        truth.counts["messages completed"] = len(truth.completed)
        truth.counts["simulated seconds"] = (
            self.clock.now() - from_us(ManualClock().now_us())
        ).seconds
