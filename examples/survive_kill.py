"""A broker is killed with -9 in the middle of traffic, and everything it acknowledged is there.

    python examples/survive_kill.py [--seconds 4] [--kills 3]

A process runs a namespace on a directory and takes orders from several threads. This program kills
it, more than once, starts it again on the same directory, and at the end counts every order.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from twinbus.broker.commands import (
    CreateEntity,
    Disposition,
    GetRuntimeProperties,
    Receive,
    Send,
    Settle,
)
from twinbus.entities import QueueDescription
from twinbus.errors import EntityAlreadyExistsError
from twinbus.message import BrokeredMessage, to_messages
from twinbus.namespace.embedded import EmbeddedNamespace

QUEUE = "orders"
SENDERS = 8


def take_orders(folder: Path, life: int) -> None:
    """Be the broker: send orders from many threads, say which are acknowledged, be killed."""
    namespace = EmbeddedNamespace(folder)
    with suppress(EntityAlreadyExistsError):
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))

    def send(sender: int) -> None:
        number = 0
        while True:
            number += 1
            order = BrokeredMessage(os.urandom(512), message_id=f"{life}.{sender}.{number}")
            namespace.ask(Send(QUEUE, (order,)))
            os.write(1, f"{order.message_id}\n".encode())

    for sender in range(SENDERS):
        threading.Thread(target=send, args=(sender,), daemon=True).start()
    threading.Event().wait()


def run_and_kill(folder: Path, life: int, seconds: float) -> set[str]:
    """Start the broker, let it work, kill it; return the orders it acknowledged."""
    command = [sys.executable, __file__, "--be-the-broker", str(folder), "--life", str(life)]
    told = folder / "acknowledged.txt"
    with told.open("wb") as out:
        broker = subprocess.Popen(command, stdout=out)
    while told.stat().st_size == 0:
        if broker.poll() is not None:
            sys.exit("the broker did not start")
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(broker.pid, signal.SIGKILL)
    broker.wait()
    lines = told.read_text().splitlines(keepends=True)
    acknowledged = {line.strip() for line in lines if line.endswith("\n")}
    print(f"  life {life}: {len(acknowledged):>7,} orders acknowledged, then kill -9", flush=True)
    return acknowledged


def receive_all(folder: Path) -> list[str]:
    """Open the directory one last time and take every order out."""
    with EmbeddedNamespace(folder) as namespace:
        held = namespace.ask(GetRuntimeProperties(QUEUE)).active_message_count
        print(f"  the directory opens again and holds {held:,} orders", flush=True)
        found: list[str] = []
        while batch := namespace.ask(Receive(QUEUE, 1000)):
            found += [message.message_id for message in to_messages(batch)]
            namespace.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.COMPLETE))
        return found


def main() -> None:
    """Tell the story and check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each life lasts")
    parser.add_argument("--kills", type=int, default=3, help="how often it is killed")
    parser.add_argument("--be-the-broker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--life", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_the_broker:
        take_orders(options.be_the_broker, options.life)
    print(f"A broker takes orders from {SENDERS} threads and is killed {options.kills} times:")
    with tempfile.TemporaryDirectory(prefix="twinbus-demo-") as name:
        acknowledged: set[str] = set()
        for life in range(1, options.kills + 1):
            acknowledged |= run_and_kill(Path(name), life, options.seconds)
        found = receive_all(Path(name))
    lost, doubled = acknowledged - set(found), len(found) - len(set(found))
    extra = len(set(found) - acknowledged)
    print(f"  acknowledged {len(acknowledged):,}   found {len(found):,}", end="   ")
    print(f"lost {len(lost)}   doubled {doubled}")
    print(f"  ({extra} more were durable when the kill swallowed their acknowledgement)")
    sys.exit(1 if lost or doubled else 0)


if __name__ == "__main__":
    main()
