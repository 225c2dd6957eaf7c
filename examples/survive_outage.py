"""The broker is killed with -9 and stays down, and the application goes on sending.

    python examples/survive_outage.py [--seconds 3]

Eight threads send orders through a factory whose namespace is paired with a second one. This
program kills the primary: the sends go to backlog queues on the secondary. It starts the primary
again: a ping gets through, the sends return, and the diverted orders are brought home. At the end
every order is counted.
"""

import argparse
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from shop import QUEUE, Server, Traffic, audit

from twinbus import (
    HealthState,
    MessagingFactory,
    NamespaceManager,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
)
from twinbus.testing import Mover

QUICK = RetryPolicy(operation_timeout=timedelta(seconds=1))  # how long a send may try the primary


def pair(primary: MessagingFactory, secondary: str) -> SendAvailabilityPairing:
    """Pair a factory with the namespace of a connection string."""
    options = SendAvailabilityPairedNamespaceOptions(
        NamespaceManager.from_connection_string(secondary),
        MessagingFactory.from_connection_string(secondary),
        backlog_queue_count=4,
        failover_interval=timedelta(0),
    )
    options.ping_primary_interval = timedelta(seconds=1)
    pairing = primary.pair_namespace(options)
    pairing.on_event(lambda event: print(f"  {event.at:%H:%M:%S.%f}  {type(event).__name__}"))
    return pairing


def main() -> None:
    """Send, kill, go on sending, start, come home, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3, help="before, during and after")
    seconds = parser.parse_args().seconds
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder) / "shop") as primary,
        Server(Path(folder) / "backup") as secondary,
        NamespaceManager.from_connection_string(primary.connection) as manager,
        MessagingFactory.from_connection_string(primary.connection, retry_policy=QUICK) as factory,
    ):
        manager.create_queue(QUEUE)
        pairing = pair(factory, secondary.connection)
        traffic = Traffic(factory)
        time.sleep(seconds)
        print(f"kill -9: {len(traffic.acknowledged):,} acknowledged so far")
        primary.kill()
        time.sleep(seconds)
        print(f"the primary is down: {len(traffic.acknowledged):,} acknowledged")
        primary.start()
        while any(one.state is HealthState.FAILED_OVER for one in pairing.status()):
            time.sleep(0.1)
        time.sleep(seconds)
        traffic.stop()
        print(f"the longest send took {traffic.longest_wait_s:.1f} s; none failed")
        [status] = pairing.status()
        mover = Mover(factory.courier.namespace, pairing.secondary.courier.namespace)
        for queue in pairing.backlog_queues():
            while mover.move(queue.path):
                pass
        print(f"diverted {status.diverted:,}   brought home {mover.moved:,}")
        is_well = audit(traffic.acknowledged, factory)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
