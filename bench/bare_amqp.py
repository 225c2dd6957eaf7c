"""A server of the Service Bus dialect that stores nothing: what a client of it can do at best.

    python bench/bare_amqp.py

It prints its port and then runs until it is ended. It takes every token and every link, accepts
whatever is sent, delivers the same message as often as there is credit, and settles what the client
reports. It knows frames and nothing else: no queue, no disk, no rights, no limits.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import (
    AttachRequested,
    CreditGiven,
    Delivery,
    Event,
    OutcomeReported,
    WindowOpened,
)
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message
from twinbus.amqp.options import ConnectionOptions
from twinbus.amqp.performatives import ACCEPTED, Properties, Source, Target
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sasl import ANONYMOUS, SaslServer
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.types import Int
from twinbus.message import BrokeredMessage
from twinbus.servicebus.encoding import write_message

CREDIT = 1000
LOCKED = datetime.now(UTC) + timedelta(days=1)
MESSAGE = b"".join(
    bytes(piece)
    for piece in write_message(
        BrokeredMessage(
            b"x" * 1024,
            sequence_number=1,
            enqueued_time_utc=datetime.now(UTC),
            lock_token=uuid4(),
            locked_until_utc=LOCKED,
        )
    )
)


class BareConnection(asyncio.Protocol):
    """One client."""

    def __init__(self) -> None:
        options = ConnectionOptions("bare", tolerates_overrun=True)
        sasl = SaslServer((ANONYMOUS,), lambda _: True)
        self._amqp = AmqpConnection(options, _now(), sasl=sasl)
        self._transport: Any = None
        self._answers: SenderLink | None = None  # of $cbs
        self._number = 0  # of the next delivery, for its tag

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Act on what the client says, and answer."""
        events = self._amqp.receive(data, _now())
        while events:
            for event in events:
                self._act(event)
            events = self._amqp.take_events()
        if self._amqp.has_outgoing:
            self._transport.write(b"".join(self._amqp.take_outgoing(_now())))
        if self._amqp.is_done:
            self._transport.close()

    def _act(self, event: Event) -> None:
        if isinstance(event, AttachRequested):
            self._accept(event.link)
        elif isinstance(event, Delivery):
            self._take(event)
        elif isinstance(event, CreditGiven):
            self._deliver(event.link)
            if event.is_draining:
                event.link.drained()
        elif isinstance(event, WindowOpened):
            for link in event.session.links:
                if isinstance(link, SenderLink):
                    self._deliver(link)
        elif isinstance(event, OutcomeReported) and not event.is_settled:
            for number, _ in event.deliveries:
                event.link.settle(number, event.state)

    def _accept(self, link: SenderLink | ReceiverLink) -> None:
        peer = link.peer
        assert peer is not None
        terminus = peer.source if isinstance(link, SenderLink) else peer.target
        address = terminus.address if isinstance(terminus, Source | Target) else None
        link.accept()
        link.context = address
        if isinstance(link, ReceiverLink):
            link.grant(CREDIT)
        elif address == "$cbs":
            self._answers = link

    def _take(self, delivery: Delivery) -> None:
        link = delivery.link
        link.settle(delivery.number, ACCEPTED, is_settled=True)
        if link.credit < CREDIT // 2:
            link.grant(CREDIT)
        if link.context == "$cbs" and self._answers is not None:
            request = AmqpMessage(delivery.payload).properties
            assert request is not None
            sections = {
                SectionKind.PROPERTIES: Properties(correlation_id=request.message_id),
                SectionKind.APPLICATION_PROPERTIES: {
                    "status-code": Int(202),
                    "status-description": "Accepted",
                },
                SectionKind.VALUE: None,
            }
            self._answers.send(encode_message(sections), is_settled=True)

    def _deliver(self, link: SenderLink) -> None:
        if link.context == "$cbs":
            return
        while link.may_send:
            self._number += 1
            link.send(MESSAGE, tag=self._number.to_bytes(16, "little"))


def _now() -> int:
    return time.monotonic_ns() // 1000


async def serve(ready: Callable[[int], None]) -> None:
    """Accept clients for ever."""
    server = await asyncio.get_running_loop().create_server(BareConnection, "127.0.0.1", 0)
    ready(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(lambda port: print(port, flush=True)))
