"""Kills a server with -9 while clients send, and checks that no acknowledged order is lost.

    python examples/survive_kill.py [--seconds 2] [--kills 3]

Eight threads send orders to a server process. The program kills the server several times and starts
it again on the same directory. The senders only see a pause, because the client reconnects by
itself. At the end the program counts every order. If a kill lost the acknowledgement of an order,
the client sends that order again; the server recognises it and enqueues it once.
"""

import argparse
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from shop import Traffic, audit

from twinbus import MessagingFactory, NamespaceManager, RetryPolicy
from twinbus.demo.servers import QUEUE, DemoServer

PATIENT = RetryPolicy(min_backoff=timedelta(milliseconds=50), max_backoff=timedelta(seconds=1))


def main() -> None:
    """Run the example; the exit code is 0 if no order was lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2, help="time between two kills")
    parser.add_argument("--kills", type=int, default=3, help="how often to kill the server")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        DemoServer(Path(folder) / "shop") as server,
        NamespaceManager.from_connection_string(server.connection) as manager,
        MessagingFactory.from_connection_string(server.connection, retry_policy=PATIENT) as factory,
    ):
        manager.create_queue(QUEUE)
        traffic = Traffic(factory)
        for kill in range(1, arguments.kills + 1):
            time.sleep(arguments.seconds)
            server.kill()
            print(f"kill -9 number {kill}: {len(traffic.acknowledged):,} acknowledged so far")
            server.start()
        time.sleep(arguments.seconds)
        traffic.stop()
        print(f"the longest send took {traffic.longest_wait_s:.1f} s; none failed")
        is_complete = audit(traffic.acknowledged, factory)
    sys.exit(0 if is_complete else 1)


if __name__ == "__main__":
    main()
