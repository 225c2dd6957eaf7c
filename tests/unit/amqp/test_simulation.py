"""A client and a server that do anything at any time, over a wire that splits bytes anywhere.

Each run is a seed. Every frame is watched: none is sent beyond the window or the credit that its
end knows of. At the end everything that was sent has arrived, once and in order, unless its link
was detached or its delivery aborted, and every outcome has come back.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.amqp.ends import End, Pair, receiver_options, sender_options
from twinbus.amqp.events import (
    AttachRequested,
    CreditGiven,
    DeliveriesSettled,
    Delivery,
    Drained,
    Event,
    LinkDetached,
    OutcomeReported,
    SessionBegun,
    SessionEnded,
    WindowOpened,
)
from twinbus.amqp.link import AmqpLink
from twinbus.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    Modified,
    ReceiverSettleMode,
    SenderSettleMode,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.session import AmqpSession

STEPS = 500
OUTCOMES = (ACCEPTED, RELEASED, Modified(delivery_failed=True))


@dataclass
class Route:
    """What is known of the deliveries of one link, by its name and direction."""

    sent: list[bytes] = field(default_factory=list)
    arrived: list[bytes] = field(default_factory=list)
    is_detached: bool = False
    aborted: set[bytes] = field(default_factory=set)


class Simulation:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        options: list[dict[str, Any]] = [
            {
                "max_frame_bytes": choose([512, 700, 65536]),
                "incoming_window": choose([1, 2, 5, 2048]),
                "first_number": choose([0, 2**32 - 2, 2**31 - 3]),
                "max_unsettled": choose([20, 10_000]),
            }
            for _ in range(2)
        ]
        self.pair = Pair(server=options[0], client=options[1], on_server=lambda _: None)
        self.pair.random = self.random
        self.pair.pieces = choose([0, 1, 9, 700])
        self.ends = {"client": self.pair.client, "server": self.pair.server}
        self.seen = dict.fromkeys(self.ends, 0)
        self.routes: dict[tuple[str, bool], Route] = {}  # by name, and whether the client sends
        self.links: dict[str, list[SenderLink | ReceiverLink]] = {"client": [], "server": []}
        self.sessions: list[AmqpSession] = []
        self.unsettled: list[Delivery] = []
        self.draining: set[ReceiverLink] = set()
        self.outcomes: Counter[str] = Counter()
        self.attached = 0
        self.detached: Counter[AmqpLink] = Counter()

    def route_of(self, link: AmqpLink) -> Route:
        is_clients = link.session.connection is self.pair.client.connection
        client_sends = isinstance(link, SenderLink) == is_clients
        return self.routes.setdefault((link.name, client_sends), Route())

    def run(self) -> None:
        self.sessions.append(self.pair.begin())
        for _ in range(STEPS):
            self.random.choice(
                [
                    self.attach,
                    self.send,
                    self.send,
                    self.send,
                    self.grant,
                    self.grant,
                    self.settle,
                    self.detach if self.random.random() < 0.05 else self.settle,
                    self.abort,
                    self.travel,
                    self.travel,
                    self.travel,
                    self.travel,
                    self.end_session if self.random.random() < 0.01 else self.travel,
                ]
            )()
        self.finish()

    # -- what the programs at both ends do -----------------------------------------------------

    def attach(self) -> None:
        self.attached += 1
        if self.attached > 12:
            return
        sessions = [
            session for session in self.sessions if session.state.value in {"opening", "active"}
        ]
        session = self.random.choice(sessions) if sessions else self.pair.begin()
        if not sessions:
            self.sessions.append(session)
        options = {
            "snd_settle_mode": self.random.choice(list(SenderSettleMode)),
            "rcv_settle_mode": self.random.choice(list(ReceiverSettleMode)),
            "max_message_bytes": 0,
        }
        name = f"link-{self.attached}"
        link: SenderLink | ReceiverLink
        if self.random.random() < 0.5:
            link = session.attach_sender(name, sender_options(**options))
        else:
            link = session.attach_receiver(name, receiver_options(**options))
        self.links["client"].append(link)
        self.route_of(link)

    def of(self, kind: type[Any]) -> list[Any]:
        return [link for links in self.links.values() for link in links if isinstance(link, kind)]

    def send(self) -> None:
        senders = [link for link in self.of(SenderLink) if link.may_send]
        if not senders:
            return
        link = self.random.choice(senders)
        route = self.route_of(link)
        size = self.random.choice([0, 1, 30, 480, 600, 3000])
        payload = b"%d:" % len(route.sent) + self.random.randbytes(size)
        middle = self.random.randrange(len(payload) + 1)
        pieces = [payload[:middle], memoryview(payload)[middle:]]
        link.send(pieces if self.random.random() < 0.5 else payload)
        route.sent.append(payload)

    def abort(self) -> None:
        for link in self.of(SenderLink):
            number = max(link.unsettled, default=-1)
            if self.random.random() < 0.3 and link.abort(number):
                self.route_of(link).aborted.add(self.route_of(link).sent[-1])

    def grant(self) -> None:
        receivers = [link for link in self.of(ReceiverLink) if link.is_attached]
        if receivers:
            link = self.random.choice(receivers)
            drain = self.random.random() < 0.2
            link.grant(self.random.randrange(6), drain=drain)

    def settle(self) -> None:
        self.random.shuffle(self.unsettled)
        for _ in range(self.random.randrange(4)):
            if self.unsettled:
                delivery = self.unsettled.pop()
                delivery.link.settle(delivery.number, self.random.choice(OUTCOMES))

    def detach(self) -> None:
        links = [link for link in self.of(AmqpLink) if link.is_attached]
        if links:
            link = self.random.choice(links)
            self.route_of(link).is_detached = True
            link.detach()

    def end_session(self) -> None:
        session = self.random.choice(self.sessions)
        for link in session.links:
            self.route_of(link).is_detached = True
        session.end()

    # -- the wire ------------------------------------------------------------------------------

    def travel(self) -> None:
        self.pair.write()
        name = self.random.choice(["client", "server"])
        for _ in range(self.random.randrange(40)):
            self.pair.read(self.ends[name])
            self.handle(name, self.ends[name])

    def handle(self, name: str, end: End) -> None:
        fresh, self.seen[name] = end.events[self.seen[name] :], len(end.events)
        for event in fresh:
            self.handle_event(name, event)

    def handle_event(self, name: str, event: Event) -> None:
        if isinstance(event, AttachRequested):
            event.link.accept(max_message_bytes=0)
            self.links[name].append(event.link)
        elif isinstance(event, Delivery):
            self.route_of(event.link).arrived.append(event.payload)
            if not event.is_settled:
                self.unsettled.append(event)
        elif isinstance(event, OutcomeReported):
            self.outcomes[name] += len(event.deliveries)
            if not event.is_settled:
                for number, _ in event.deliveries:
                    assert event.link.settle(number, event.state) or not event.link.is_attached
        elif isinstance(event, CreditGiven):
            if event.is_draining:
                event.link.drained()
        elif isinstance(event, LinkDetached):
            self.detached[event.link] += 1
            self.route_of(event.link).is_detached = True

    def finish(self) -> None:
        """Let everything that is under way arrive, grant what is needed, and settle the rest."""
        for _ in range(30):
            while (
                self.pair.write()
                | self.pair.read(self.pair.client)
                | self.pair.read(self.pair.server)
            ):
                for name, end in self.ends.items():
                    self.handle(name, end)
            for delivery in self.unsettled:
                delivery.link.settle(delivery.number)
            self.unsettled.clear()

    def check(self) -> None:
        for route in self.routes.values():
            expected = [payload for payload in route.sent if payload not in route.aborted]
            if route.is_detached:
                expected = expected[: len(route.arrived)]
            assert route.arrived == expected
        for end in self.ends.values():
            assert not end.connection.is_done
            assert end.connection.incomplete_bytes == 0
            for session in end.connection.sessions:
                for link in session.links:
                    assert isinstance(link, SenderLink | ReceiverLink)
                    if link.is_attached:
                        assert not link.unsettled
            ended = [event.session for event in end.of(SessionEnded)]
            assert len(set(ended)) == len(ended)
            begun = {event.session for event in end.of(SessionBegun)}
            assert begun - set(ended) == set(end.connection.sessions)
        assert set(self.detached.values()) <= {1}


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_ends_do_nothing_is_lost_doubled_or_sent_too_early(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.run()
    simulation.check()


def test_the_runs_meet_every_kind_of_event() -> None:
    kinds: set[type] = set()
    transfers = 0
    for seed in range(60):
        simulation = Simulation(seed)
        simulation.run()
        for end in simulation.ends.values():
            kinds |= {type(event) for event in end.events}
            transfers += end.watch.transfers
    assert {Delivery, OutcomeReported, DeliveriesSettled, Drained, LinkDetached} <= kinds
    assert {SessionEnded, CreditGiven, WindowOpened} <= kinds
    assert transfers > 2500
