"""How fast two peers bring ten backlog queues home: RabbitMQ by Shovel, NATS by sourced streams.

    python bench/movers.py [MESSAGES]

The backlog is there before anything moves. The rate counts from the first messages that are seen
home to the last one, so that starting the movers costs them nothing. Shovels run in the destination
of two brokers, acknowledge what the destination confirmed, and have 1000 messages each under way.
A NATS stream copies its sources, all in one server; they keep what it copied.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from measure import Others
from peers import LOOPBACK, QUEUE, Nats, RabbitMQ

BACKLOG = [f"backlog-{index}" for index in range(10)]
COPY = "home"  # the stream of NATS that copies the others: QUEUE has a subject of its own there
PREFETCH = 1000
LOOK_S = 0.02
PATIENCE_S = 120.0  # longer moves are cut off, and their rate is of what was moved
SHOVEL = """
[ok = rabbit_runtime_parameters:set_any(<<"/">>, <<"shovel">>, Queue, [
    {{<<"src-uri">>, <<"amqp://{host}:{port}">>}}, {{<<"src-queue">>, Queue}},
    {{<<"dest-uri">>, <<"amqp://">>}}, {{<<"dest-queue">>, <<"{home}">>}},
    {{<<"ack-mode">>, <<"on-confirm">>}}, {{<<"src-prefetch-count">>, {prefetch}}}
], none) || Queue <- [{queues}]].
"""


@dataclass(frozen=True, slots=True)
class Moved:
    """How fast messages came home."""

    rate: float  # messages a second
    others: float  # part of the machine that others had meanwhile


class Mover(Protocol):
    """Something that brings messages of ten queues home to one."""

    name: str

    def __call__(self, messages: int, body: bytes, folder: Path) -> Moved:
        """Fill the backlog, have it moved, and return how fast that was."""
        ...

    def missing(self) -> str | None:
        """Return how to install it, or None when everything is there."""
        ...


def rate_of(count: Callable[[], int], messages: int) -> Moved:
    """Watch messages come home; return how fast."""
    deadline = time.monotonic() + PATIENCE_S
    while not (before := count()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    began, background = time.monotonic(), Others()
    now = before
    while now < messages and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = count()
    moved = Moved((now - before) / (time.monotonic() - began), background.share())
    if now < messages:
        print(f"cut off after {PATIENCE_S:.0f} s, with {now:,} of {messages:,} messages home")
    assert before < now <= messages
    return moved


class Shovel:
    """RabbitMQ: two brokers, a shovel for each backlog queue."""

    name = "RabbitMQ Shovel"

    def missing(self) -> str | None:
        """Return how to install it, or None when everything is there."""
        return RabbitMQ.missing()

    def __call__(self, messages: int, body: bytes, folder: Path) -> Moved:
        """Fill the backlog, have it moved, and return how fast that was."""
        with RabbitMQ(folder) as away, RabbitMQ(folder, ["rabbitmq_shovel"]) as home:
            self.name = f"{home.name} Shovel, two brokers"
            for queue in BACKLOG:
                away.declare(queue)
                away.send_pipelined(messages // len(BACKLOG), body, PREFETCH, queue)
            home.evaluate(
                SHOVEL.format(
                    host=LOOPBACK,
                    port=away.port,
                    home=QUEUE,
                    prefetch=PREFETCH,
                    queues=", ".join(f'<<"{queue}">>' for queue in BACKLOG),
                )
            )
            return rate_of(lambda: home.declare(QUEUE), messages)


class Sources:
    """NATS JetStream: a stream that copies the backlog's streams."""

    name = "NATS sources"

    def missing(self) -> str | None:
        """Return how to install it, or None when everything is there."""
        return Nats.missing()

    def __call__(self, messages: int, body: bytes, folder: Path) -> Moved:
        """Fill the backlog, have it moved, and return how fast that was."""
        with Nats(folder) as server:
            self.name = f"{server.name}, sources"
            for stream in BACKLOG:
                server.add_stream(stream)
                server.send_pipelined(messages // len(BACKLOG), body, PREFETCH, stream)
            server.add_stream(COPY, sources=BACKLOG)
            return rate_of(lambda: server.count(COPY), messages)


def main() -> None:
    """Print what both do."""
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    for mover in (Shovel(), Sources()):
        advice = mover.missing()
        if advice:
            print(f"{mover.name} is left out: {advice}")
            continue
        moved = mover(messages, b"x" * 1024, Path.cwd())
        reported = f"{moved.rate:>12,.0f} messages/s, others had {moved.others:.0%}"
        print(f"{mover.name:<58} {reported}", flush=True)


if __name__ == "__main__":
    main()
