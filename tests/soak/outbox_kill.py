"""Kill -9 an application that has both namespaces and the syphon in its own process.

    python -m tests.soak.outbox_kill --kills 20 [--seed 7]

Each life sends all the time, while its destination is switched off and on, so that messages are
diverted to the outbox and brought home side by side. What was acknowledged is written down. It is
killed at a random moment while its syphon carries. The last life lets the outbox empty. In the
end every acknowledged message is on the primary once, and no message is there twice.
"""

import argparse
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from itertools import count
from pathlib import Path

from tests.soak.pairing_site import PRIMARY
from tests.soak.syphon_kill import MARK, end_all
from tests.waiting import until
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.entities import EntityStatus, backlog_queue_path
from twinbus.pairing.cancelling import pages
from twinbus.syphon.syphon import Syphon

QUEUE = "orders"
QUEUES = 2
BATCHES = (1, 1, 20, 200)  # messages of a send
PACE_S = 0.1  # between two sends
SWITCH_S = 2.0  # between two changes of the destination
LONGEST_S = 4.0  # that a life goes on when its syphon has brought the first messages home
START_S = 300.0  # for Spark to start, and for the leases of the life before to lapse
MOVING = "messages come home"


def connection(folder: Path, name: str) -> str:
    return f"Endpoint=embedded://{folder / name};Name={name}"


def live(folder: Path, life: int, seed: int, *, is_last: bool) -> None:
    """Be the application."""
    generator = random.Random(f"{seed}.{life}")
    home, away = connection(folder, PRIMARY), connection(folder, "outbox")
    with (
        NamespaceManager.from_connection_string(home) as manager,
        MessagingFactory.from_connection_string(home) as factory,
    ):
        manager.create_queue(QUEUE, exist_ok=True)
        switch(manager, EntityStatus.ACTIVE)
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager.from_connection_string(away),
            MessagingFactory.from_connection_string(away),
            backlog_queue_count=QUEUES,
            failover_interval=timedelta(0),
            enable_syphon=True,
            ping_primary_interval=timedelta(seconds=1),
        )
        pairing = factory.pair_namespace(options)
        assert isinstance(pairing.syphon, Syphon)
        syphon = pairing.syphon
        if is_last:
            outbox = options.secondary_namespace_manager
            paths = [backlog_queue_path(PRIMARY, index) for index in range(QUEUES)]
            until(
                lambda: not any(waiting(outbox, q) for q in paths), "the outbox is empty", START_S
            )
            print(MOVING, flush=True)
            return
        threading.Thread(target=keep_switching, args=[manager], daemon=True).start()
        with (folder / "acknowledged").open("a", encoding="utf-8") as acknowledged:
            sending = [factory, f"life{life}", generator, acknowledged.fileno()]
            threading.Thread(target=send_on, args=sending, daemon=True).start()
            until(lambda: syphon.progress.moved, "messages come home", START_S)
            print(MOVING, flush=True)
            threading.Event().wait()


def waiting(manager: NamespaceManager, path: str) -> int:
    return manager.get_runtime_properties(path).active_message_count


def switch(manager: NamespaceManager, status: EntityStatus) -> None:
    manager.update_queue(QueueDescription(path=QUEUE, status=status))


def keep_switching(manager: NamespaceManager) -> None:
    while True:
        for status in (EntityStatus.DISABLED, EntityStatus.ACTIVE):
            switch(manager, status)
            time.sleep(SWITCH_S)


def send_on(factory: MessagingFactory, name: str, generator: random.Random, book: int) -> None:
    """Send until the end, and write down what was acknowledged."""
    numbers = count()
    while True:
        sender = factory.create_message_sender(QUEUE)  # each picks one of the backlog queues
        for _ in range(20):
            ids = [f"{name}.{next(numbers)}" for _ in range(generator.choice(BATCHES))]
            sender.send_batch([BrokeredMessage(bytes(500), message_id=item) for item in ids])
            os.write(book, ("\n".join(ids) + "\n").encode())
            time.sleep(generator.uniform(0, 2 * PACE_S))


def start(
    folder: Path, life: int, seed: int, mark: str, *, is_last: bool
) -> "subprocess.Popen[str]":
    """Start a life; return when its syphon has brought messages home."""
    called = f"live(Path({str(folder)!r}), {life}, {seed}, is_last={is_last})"
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.soak.outbox_kill import *\n{called}"],
            env={**os.environ, MARK: mark, "TMPDIR": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    assert line.strip() == MOVING, (folder / "log").read_text()[-3000:]
    return process


def audit(folder: Path) -> tuple[list[str], list[str], int]:
    """Return which messages are lost, which are doubled, and how many were acknowledged."""
    home: Counter[str] = Counter()
    with MessagingFactory.from_connection_string(connection(folder, PRIMARY)) as factory:
        for page in pages(factory.courier.ask, QUEUE):
            home.update(page.column("message_id").to_pylist())
    acknowledged = (folder / "acknowledged").read_text(encoding="utf-8").splitlines()
    lost = [item for item in acknowledged if item not in home]
    return lost, [key for key, times in home.items() if times > 1], len(acknowledged)


def run(kills: int, seed: int) -> tuple[list[str], list[str], int]:
    """Kill the application so often, let its last life finish, and compare."""
    generator = random.Random(seed)
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="twinbus-outbox-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            for life in range(1, kills + 1):
                process = start(folder, life, seed, mark, is_last=False)
                seconds = generator.uniform(0, LONGEST_S)
                time.sleep(seconds)
                with process:
                    process.kill()
                end_all(mark)
                print(
                    f"{life} of {kills}: killed {seconds:.1f} s after its first batch", flush=True
                )
            with start(folder, kills + 1, seed, mark, is_last=True) as process:
                assert process.wait(START_S) == 0, (folder / "log").read_text()[-3000:]
        finally:
            end_all(mark)
        return audit(folder)


def _exit(*_: object) -> None:
    sys.exit(1)  # by way of every `finally`


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _exit)
    print(f"replay: python -m tests.soak.outbox_kill --kills {given.kills} --seed {given.seed}")
    lost, doubled, acknowledged = run(given.kills, given.seed)
    print(
        f"{given.kills} kills, {acknowledged:,} acknowledged: {len(lost)} lost, "
        f"{len(doubled)} doubled {(lost + doubled)[:5]}"
    )
    sys.exit(1 if lost or doubled or not acknowledged else 0)


if __name__ == "__main__":
    main()
