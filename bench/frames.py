"""What AMQP costs per message, without sockets: CPU of one end for transfers and dispositions.

    python bench/frames.py [--quick]

A client and a server of ours exchange messages of 1 KB by handing over bytes, 64 KB at a time.
Each half of the work is measured apart: transfers that are sent, transfers that are read,
outcomes that are reported one by one and together, outcomes that are read. The figures are CPU
time, so that others on the machine disturb less, and the best round counts.
"""

import gc
import sys
import time
from collections.abc import Callable

from measure import Report

from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import AttachRequested, Delivery, Event
from twinbus.amqp.options import ConnectionOptions, LinkOptions
from twinbus.amqp.performatives import Target
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sender_link import SenderLink

MESSAGES = 1000  # of one round; fewer than the window
READ_BYTES = 64 * 1024
PAYLOAD = bytes(1024)
GOAL_US = 25.0


class Ends:
    """A client that sends and a server that receives, with one link between them."""

    def __init__(self) -> None:
        self.server = AmqpConnection(ConnectionOptions("server"), 0)
        self.client = AmqpConnection(ConnectionOptions("client"), 0, is_client=True)
        session = self.client.begin()
        self.link: SenderLink = session.attach_sender("a", LinkOptions(target=Target(address="q")))
        self.other: ReceiverLink | None = None
        self.exchange()

    def exchange(self) -> None:
        """Let both ends say what they have to say."""
        while self.client.has_outgoing or self.server.has_outgoing:
            for event in self.move(self.client, self.server):
                if isinstance(event, AttachRequested):
                    event.link.accept()
                    assert isinstance(event.link, ReceiverLink)
                    self.other = event.link
                    self.other.grant(2**31 - 1)
            self.move(self.server, self.client)

    @staticmethod
    def move(first: AmqpConnection, second: AmqpConnection) -> list[Event]:
        """Hand the bytes of one end to the other; return what that reports."""
        data = b"".join(first.take_outgoing(0))
        return second.receive(data, 0) if data else []


def cpu_us(work: Callable[[], object]) -> float:
    """Return the microseconds of CPU that some work takes for each message."""
    gc.collect()
    start = time.process_time_ns()
    work()
    return (time.process_time_ns() - start) / 1000 / MESSAGES


def one_round(ends: Ends, name: str, size: int) -> dict[str, float]:
    """Measure each half of an exchange; `size` outcomes travel in one frame."""
    deliveries: list[Delivery] = []
    frames: list[bytes] = []

    def send() -> None:
        for _ in range(MESSAGES):
            ends.link.send(PAYLOAD)

    def read() -> None:
        for at in range(0, len(data), READ_BYTES):
            events = ends.server.receive(data[at : at + READ_BYTES], 0)
            deliveries.extend(event for event in events if isinstance(event, Delivery))

    def report() -> None:
        for at in range(0, MESSAGES, size):
            for delivery in deliveries[at : at + size]:
                delivery.link.settle(delivery.number)
            frames.append(b"".join(ends.server.take_outgoing(0)))

    figures = {"a transfer is sent": cpu_us(send)}
    data = b"".join(ends.client.take_outgoing(0))
    figures["a transfer is read"] = cpu_us(read)
    figures[f"an outcome is reported, {name}"] = cpu_us(report)
    data = b"".join(frames)
    figures[f"an outcome is read, {name}"] = cpu_us(lambda: ends.client.receive(data, 0))
    assert len(deliveries) == MESSAGES
    assert not ends.link.unsettled
    return figures


def main() -> None:
    """Measure, and print one line per figure."""
    rounds = 5 if "--quick" in sys.argv else 40
    ends = Ends()
    measured = [
        one_round(ends, "alone", 1) | one_round(ends, f"one of {MESSAGES}", MESSAGES)
        for _ in range(rounds)
    ]
    report = Report("AMQP, microseconds of CPU per message of 1 KB")
    for name in measured[0]:
        best = min(figures[name] for figures in measured)
        print(f"{name:<40} {best:>8.2f} us {1e6 / best:>12,.0f} /s")
        report.add(name, best, GOAL_US, at_most=True)
    report.finish()


if __name__ == "__main__":
    main()
