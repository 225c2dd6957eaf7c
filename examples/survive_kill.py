"""A server is killed with -9 in the middle of traffic, and everything it acknowledged is there.

    python examples/survive_kill.py [--seconds 2] [--kills 3]

Eight threads send orders to a server process. This program kills it, more than once, and starts it
again on the same directory. The senders notice nothing but a pause: the client connects again by
itself. At the end every order is counted. An order whose acknowledgement was lost with the server
and that was sent again is there once: the server recognises it.
"""

import argparse
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from shop import QUEUE, Server, Traffic, audit

from twinbus import MessagingFactory, NamespaceManager, RetryPolicy

PATIENT = RetryPolicy(min_backoff=timedelta(milliseconds=50), max_backoff=timedelta(seconds=1))


def main() -> None:
    """Send, kill, start, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2, help="between two kills")
    parser.add_argument("--kills", type=int, default=3)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder) / "shop") as server,
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
        is_well = audit(traffic.acknowledged, factory)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
