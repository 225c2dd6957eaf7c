"""A broker under load that expects to be killed; it reports to its parent, line by line.

ready                         the load begins
held ID ...                   everything in the queue at start (several lines)
sent NUMBER:ID ...            these were acknowledged
taking ID ...                 about to complete these
done ID ...                   acknowledged, and a later send of the same thread too: durable
deleted ID ...                received and deleted, from a queue of their own
"""

import argparse
import os
import random
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from twinbus.broker.turn.engine import EngineSettings
from twinbus.entities import QueueDescription
from twinbus.errors import EntityAlreadyExistsError
from twinbus.message import BrokeredMessage, to_messages
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import (
    CreateEntity,
    Disposition,
    Peek,
    Receive,
    ReceiveMode,
    Send,
    Settle,
)

QUEUE, DELETING = "orders", "wires"


def tell(word: str, items: list[str]) -> None:
    """Write one line; a pipe takes a short write whole."""
    for start in range(0, len(items), 50):
        os.write(1, " ".join([word, *items[start : start + 50]]).encode() + b"\n")


def hold(namespace: EmbeddedNamespace) -> None:
    """Tell what is there."""
    first = 0
    while True:
        messages = to_messages(namespace.ask(Peek(QUEUE, first, 1000)))
        tell("held", [m.message_id for m in messages])
        if not messages:
            return
        first = (messages[-1].sequence_number or 0) + 1


def send_for_ever(namespace: EmbeddedNamespace, name: str, generator: random.Random) -> None:
    """Send batches of many sizes."""
    count = 0
    while True:
        size = generator.choice([1, 1, 1, 3, 40])
        batch = []
        for _ in range(size):
            count += 1
            batch.append(BrokeredMessage(generator.randbytes(300), message_id=f"{name}.{count}"))
        numbers = namespace.ask(Send(QUEUE, batch)).sequence_numbers
        tell("sent", [f"{n}:{m.message_id}" for n, m in zip(numbers, batch, strict=True)])


def complete_for_ever(namespace: EmbeddedNamespace, name: str, generator: random.Random) -> None:
    """Receive and complete; send after that to know that it is durable."""
    count = 0
    while True:
        batch = namespace.ask(Receive(QUEUE, generator.randint(1, 60)))
        ids = [m.message_id for m in to_messages(batch)]
        tell("taking", ids)
        if ids:
            namespace.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.COMPLETE))
        count += 1
        fence = BrokeredMessage(b"", message_id=f"{name}.{count}")
        number = namespace.ask(Send(QUEUE, [fence])).sequence_numbers[0]
        tell("sent", [f"{number}:{fence.message_id}"])
        tell("done", ids)


def delete_for_ever(namespace: EmbeddedNamespace, name: str, generator: random.Random) -> None:
    """Send and receive-and-delete in a queue that nobody else reads."""
    count = 0
    mode = ReceiveMode.RECEIVE_AND_DELETE
    while True:
        batch = [BrokeredMessage(b"", message_id=f"{name}.{count + n}") for n in range(5)]
        count += 5
        namespace.ask(Send(DELETING, batch))
        received = namespace.ask(Receive(DELETING, generator.randint(1, 10), mode=mode))
        tell("deleted", [m.message_id for m in to_messages(received)])


def insist(
    work: Callable[[EmbeddedNamespace, str, random.Random], None],
    namespace: EmbeddedNamespace,
    name: str,
    generator: random.Random,
) -> None:
    """Work until killed; any error ends the process, for the parent to see."""
    try:
        work(namespace, name, generator)
    except BaseException:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Open the directory, report what is there, and work until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    settings = EngineSettings(directory=options.folder, segment_bytes=1_000_000)
    namespace = EmbeddedNamespace(settings)
    for path in (QUEUE, DELETING):
        with suppress(EntityAlreadyExistsError):
            namespace.ask(CreateEntity(QueueDescription(path=path)))
    hold(namespace)
    tell("ready", [""])
    for index, work in enumerate([send_for_ever] * 3 + [complete_for_ever] * 2 + [delete_for_ever]):
        generator = random.Random(f"{options.seed}/{options.life}/{index}")
        name = f"{options.life}.{index}"
        threading.Thread(
            target=insist, args=(work, namespace, name, generator), daemon=True
        ).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
