"""A client of a server that is killed now and then; it reports to its parent what it knows.

sent TIME ID ...               these were acknowledged
received TIME ID:NUMBER ...    delivered here
completed TIME ID:NUMBER ...   their completion was acknowledged
complaint TEXT                 what no client should meet

It works until its standard input ends.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from tests.soak.server_kill import QUEUE
from twinbus import BrokeredMessage, MessagingError, MessagingFactory, RetryPolicy, TransientError
from twinbus.errors import MessageLockLostError

POLICY = RetryPolicy(
    operation_timeout=timedelta(seconds=30),
    min_backoff=timedelta(milliseconds=20),
    max_backoff=timedelta(milliseconds=200),
)
ONCE = RetryPolicy.once(timedelta(seconds=30))
_stop = threading.Event()
Work = Callable[[MessagingFactory, str, random.Random], None]


def tell(word: str, ids: list[str]) -> None:
    """Write one line; a short write goes whole."""
    for start in range(0, len(ids), 50):
        text = " ".join([word, f"{time.time():.6f}", *ids[start : start + 50]])
        os.write(1, text.encode() + b"\n")


def messages_of(name: str, first: int, count: int) -> list[BrokeredMessage]:
    return [BrokeredMessage(b"x" * 200, message_id=f"{name}.{first + n}") for n in range(count)]


def send(factory: MessagingFactory, name: str, generator: random.Random) -> None:
    """Send singles and batches."""
    sender = factory.create_message_sender(QUEUE)
    count = 0
    while not _stop.is_set():
        batch = messages_of(name, count, generator.choice([1, 1, 1, 5, 50]))
        count += len(batch)
        ids = [m.message_id for m in batch]
        sender.send_batch(batch)
        tell("sent", ids)


def send_once(factory: MessagingFactory, name: str, generator: random.Random) -> None:
    """Send without retries: what is acknowledged is there once, and what fails may be there."""
    sender = factory.create_message_sender(QUEUE)
    count = 0
    while not _stop.is_set():
        batch = messages_of(name, count, generator.choice([1, 1, 3]))
        count += len(batch)
        ids = [m.message_id for m in batch]
        try:
            sender.send_batch(batch)
        except TransientError:
            _stop.wait(0.05)
        else:
            tell("sent", ids)


def send_pipelined(factory: MessagingFactory, name: str, generator: random.Random) -> None:
    """Keep many sends in flight; each has its own answer."""
    count = 0
    with factory.create_message_sender(QUEUE).pipelined() as pipeline:
        while not _stop.is_set():
            batch = messages_of(name, count, generator.randint(1, 100))
            count += len(batch)
            futures = [pipeline.send(message) for message in batch]
            for future in futures:
                future.result(timeout=60)
            tell("sent", [m.message_id for m in batch])


def receive(factory: MessagingFactory, name: str, generator: random.Random) -> None:  # noqa: ARG001
    """Receive and complete; a lock that a restart took is no surprise."""
    receiver = factory.create_message_receiver(QUEUE)
    while not _stop.is_set():
        messages = receiver.receive_batch(generator.randint(1, 100), timedelta(seconds=0.2))
        ids = [f"{m.message_id}:{m.sequence_number}" for m in messages]
        tell("received", ids)
        try:
            receiver.complete(messages)
        except MessageLockLostError:
            continue
        tell("completed", ids)


def insist(work: Work, connection_string: str, name: str, generator: random.Random) -> None:
    """Work until the end; an error that reaches the application is one too many."""
    policy = ONCE if work is send_once else POLICY
    try:
        with MessagingFactory.from_connection_string(
            connection_string, retry_policy=policy
        ) as factory:
            work(factory, name, generator)
    except (MessagingError, TimeoutError) as error:
        os.write(1, f"complaint {name} {error!r:.300}".replace("\n", " ").encode() + b"\n")


def main() -> None:
    """Work until standard input ends."""
    number, seed = sys.argv[1:]
    connection_string = sys.stdin.readline().strip()
    threads = []
    works: list[Work] = [send, send_once, send_pipelined, receive, receive]
    for index, work in enumerate(works):
        generator = random.Random(f"{seed}/{number}/{index}")
        arguments = (work, connection_string, f"{number}.{index}", generator)
        threads.append(threading.Thread(target=insist, args=arguments))
        threads[-1].start()
    sys.stdin.read()
    _stop.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
