"""Paired sends to RabbitMQ against plain pika, and bringing home against Shovel.

python bench/rabbitmq.py [--quick]

Two brokers on this machine, quorum queues, 1 KB bodies, publisher confirms. Sends go to the same
queue in turns. Plain pika is measured as most programs use it (BlockingConnection, one by one) and
at its best (callbacks). For the way home the backlog is filled with diverted messages of several
senders, in turns, before anything moves. Ours are the carriers that Spark's workers run, in as many
processes as there are cores; shovels acknowledge what the destination confirmed and have 1000
messages each under way. The rate counts from the first messages that are seen home to the last one:
starting costs nothing.
"""

import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from measure import Others, Report, ratio, side_by_side
from movers import PREFETCH, SHOVEL, Moved, rate_of
from peers import LOOPBACK, RabbitMQ, pika

from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager
from twinbus import SendAvailabilityPairedNamespaceOptions as PairingOptions
from twinbus.connection import ConnectionString
from twinbus.entities import QueueDescription, backlog_queue_path
from twinbus.message import to_batch
from twinbus.namespace.opening import open_namespace
from twinbus.pairing.backlog import diverted
from twinbus.protocol.commands import Origin, Send
from twinbus.protocol.origins import sender_source
from twinbus.syphon.carrier import Carrier, Range
from twinbus.syphon.locked_carrier import LockedCarrier

SALES = "sales"
BODY = os.urandom(1024)
QUEUES = 4
SENDERS = 4  # of each queue: their messages alternate
BATCH = 500
ROUNDS = 7
ONE_BY_ONE, PIPELINED, BACKLOG = 300, 5_000, 120_000
QUICK = 10  # times fewer
LIMIT = 1.05  # of the time of plain pika
CORES = os.cpu_count() or 2


def where(broker: RabbitMQ, name: str) -> str:
    """Return the connection string of a broker."""
    return f"Endpoint=amqp://{LOOPBACK}:{broker.port};Name={name}"


# -- sends -----------------------------------------------------------------------------------------


def paired(stack: ExitStack, home: RabbitMQ, away: RabbitMQ) -> MessagingFactory:
    """Return a factory of one broker that is paired with the other one."""
    factory = stack.enter_context(MessagingFactory.from_connection_string(where(home, "shop")))
    secondary = MessagingFactory.from_connection_string(where(away, "backup"))
    manager = NamespaceManager.from_connection_string(where(away, "backup"))
    factory.pair_namespace(
        PairingOptions(
            manager,
            secondary,
            backlog_queue_count=QUEUES,
            failover_interval=timedelta(minutes=1),
        )
    )
    return factory


def send_one_by_one(factory: MessagingFactory, count: int) -> None:
    """Send messages, each after the confirm of the one before."""
    sender = factory.create_message_sender(SALES)
    for _ in range(count):
        sender.send(BrokeredMessage(BODY))


def send_pipelined(factory: MessagingFactory, count: int) -> None:
    """Send messages without waiting for each."""
    with factory.create_message_sender(SALES).pipelined() as sender:
        for _ in range(count):
            sender.send(BrokeredMessage(BODY))


def publish_one_by_one(channel: Any, count: int) -> None:
    """Publish messages with the blocking pika, each after the confirm of the one before."""
    properties = pika.BasicProperties(delivery_mode=2)
    for _ in range(count):
        channel.basic_publish("", SALES, BODY, properties, mandatory=True)


def measure_sends(report: Report, home: RabbitMQ, away: RabbitMQ, scale: int) -> None:
    """Compare paired sends with plain pika on the same queue."""
    with ExitStack() as stack:
        factory = paired(stack, home, away)
        parameters = pika.ConnectionParameters(LOOPBACK, home.port, heartbeat=0)
        blocking = stack.enter_context(closing(pika.BlockingConnection(parameters)))
        channel = blocking.channel()
        channel.confirm_delivery()
        publish = home.send_pipelined
        singles, many = ONE_BY_ONE // scale, PIPELINED // scale
        works: list[tuple[str, Callable[[], object], int]] = [
            ("paired, one by one", partial(send_one_by_one, factory, singles), singles),
            ("pika, blocking, one by one", partial(publish_one_by_one, channel, singles), singles),
            ("pika, callbacks, one by one", partial(publish, singles, BODY, 1, SALES), singles),
            ("paired, pipelined", partial(send_pipelined, factory, many), many),
            ("pika, callbacks, 256 in flight", partial(publish, many, BODY, 256, SALES), many),
        ]
        for _, work, _ in works:
            work()
        seconds = side_by_side([work for _, work, _ in works], ROUNDS)
    for (name, _, count), taken in zip(works, seconds, strict=True):
        print(f"{name:<40} {count / statistics.median(taken):>10,.0f} messages/s", flush=True)
    title = "paired sends, times the time of plain pika"
    report.add(f"{title}, one by one", ratio(seconds[0], seconds[1]), LIMIT, at_most=True)
    report.add(f"{title}, pipelined", ratio(seconds[3], seconds[4]), LIMIT, at_most=True)


# -- the way home ----------------------------------------------------------------------------------


def fill(away: RabbitMQ, messages: int) -> list[str]:
    """Fill the backlog queues with diverted messages; return their paths."""
    paths = [backlog_queue_path("shop", index) for index in range(QUEUES)]
    with closing(open_namespace(ConnectionString.parse(where(away, "backup")))) as secondary:
        for index, path in enumerate(paths):
            for first in range(0, messages // QUEUES // SENDERS, BATCH // SENDERS):
                numbers = range(first, first + BATCH // SENDERS)
                batch = to_batch([BrokeredMessage(BODY) for _ in numbers])
                parts = [
                    diverted(
                        batch, SALES, Origin(sender_source(index * SENDERS + number + 1), numbers)
                    )
                    for number in range(SENDERS)
                ]
                secondary.ask(Send(path, interleaved(parts)), 60)
    return paths


def interleaved(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the first rows of all parts, then the second ones, and so on."""
    count = parts[0].num_rows
    order = [part * count + row for row in range(count) for part in range(len(parts))]
    return pa.concat_batches(parts).take(pa.array(order))


def carry(home: str, away: str, paths: list[str]) -> None:
    """Carry backlog queues home, as a worker of Spark does."""
    with (
        closing(open_namespace(ConnectionString.parse(home))) as primary,
        closing(open_namespace(ConnectionString.parse(away))) as secondary,
    ):
        carrier = LockedCarrier(Carrier(primary, secondary), secondary, BACKLOG)
        for path in paths:
            while not carrier.carry(path, [Range.under_lock("")])[0].is_drained:
                pass


def bring_home(home: RabbitMQ, away: RabbitMQ, messages: int) -> Moved:
    """Return how fast our carriers bring a backlog home."""
    paths = fill(away, messages)
    home.purge(SALES)
    context = multiprocessing.get_context("spawn")
    ends = where(home, "shop"), where(away, "backup")
    workers = [context.Process(target=carry, args=(*ends, paths[n::CORES])) for n in range(CORES)]
    for worker in workers:
        worker.start()
    moved = rate_of(partial(home.count, SALES), messages)
    for worker in workers:
        worker.join()
    return moved


def shovel(home: RabbitMQ, away: RabbitMQ, messages: int) -> Moved:
    """Return how fast shovels move the same backlog."""
    paths = fill(away, messages)
    home.purge(SALES)
    home.evaluate(
        SHOVEL.format(
            host=LOOPBACK,
            port=away.port,
            home=SALES,
            prefetch=PREFETCH,
            queues=", ".join(f'<<"{path}">>' for path in paths),
        )
    )
    try:
        return rate_of(partial(home.count, SALES), messages)
    finally:
        names = ", ".join(f'<<"{path}">>' for path in paths)
        home.evaluate(
            f'[rabbit_runtime_parameters:clear_any(<<"/">>, <<"shovel">>, Queue, <<"bench">>) '
            f"|| Queue <- [{names}]]."
        )


def measure_way_home(report: Report, home: RabbitMQ, away: RabbitMQ, scale: int) -> None:
    """Compare our carriers with Shovel on the same brokers, in turns."""
    messages = BACKLOG // scale // (QUEUES * BATCH) * QUEUES * BATCH or QUEUES * BATCH
    rounds = 1 if scale > 1 else 3
    rates: dict[str, list[float]] = {"twinbus": [], "shovel": []}
    for _ in range(rounds):
        for name, move in (("twinbus", bring_home), ("shovel", shovel)):
            moved = move(home, away, messages)
            rates[name].append(moved.rate)
            what = f"{name} brings {messages:,} home"
            print(f"{what:<40} {moved.rate:>10,.0f} messages/s, others {moved.others:.0%}")
    report.add("messages home, times Shovel", ratio(rates["twinbus"], rates["shovel"]), 1.0)


def main() -> None:
    """Measure everything."""
    how = RabbitMQ.missing()
    if how is not None:
        sys.exit(f"RabbitMQ is not here: {how}")
    scale = QUICK if "--quick" in sys.argv else 1
    report = Report("rabbitmq")
    others = Others()
    folder = Path(os.environ["TMPDIR"]) if "TMPDIR" in os.environ else None
    with RabbitMQ(folder) as away, RabbitMQ(folder, ["rabbitmq_shovel"]) as home:
        print(home.name)
        with NamespaceManager.from_connection_string(where(home, "shop")) as manager:
            manager.create_queue(QueueDescription(path=SALES, max_size_in_megabytes=5120))
        measure_sends(report, home, away, scale)
        measure_way_home(report, home, away, scale)
    print(f"others had {others.share():.0%} of the machine")
    report.finish()


if __name__ == "__main__":
    main()
