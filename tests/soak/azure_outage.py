"""Outages of a primary under code of the Service Bus SDK that sends through the drop-in.

    python -m tests.soak.azure_outage --outages 4 [--pair azure-azure] [--seed 7]

All four pairs of `sb://` (azure) and `twinbus://` (twinbus) namespaces. There is no Azure here:
both are Twinbus servers, reached through the official SDK or natively. The senders are a user's
code on `PairedServiceBusClient`. Everything else is as in `rabbitmq_outage`: the primary is killed
with -9 and paused in turn, workers that carry the backlog home die now and then, and in the end
everything is received and compared.

A message may be duplicated only where the primary is an `sb://` one, and all its copies must have
the same message id. The first send that begins during an outage and succeeds must end within the
failover interval and one operation timeout.
"""

import argparse
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import ClassVar

from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError

from tests.soak.rabbitmq_outage import PATIENCE, QUEUES, Engine, Run, Twinbus, Verdict, play
from tests.soak.server_process import ServerProcess
from twinbus import BrokeredMessage
from twinbus.azure import PairedServiceBusClient, PairedWith
from twinbus.connection import ConnectionString

PAIRS = ("azure-azure", "azure-twinbus", "twinbus-azure", "twinbus-twinbus")
FAILOVER_INTERVAL = timedelta(seconds=1)
BOUND_S = (FAILOVER_INTERVAL + PATIENCE.operation_timeout).total_seconds()


class Azure(Twinbus):
    """A `twinbus serve` that is reached at `sb://`, through the SDK of Azure Service Bus."""

    def _make(self) -> ServerProcess:
        return ServerProcess(self.folder, "", "--tls", str(self.folder / "certificate"))

    def where(self, name: str) -> str:
        """Return its connection string."""
        native = ConnectionString.parse(self._server.connection_string)
        return (
            f"Endpoint=sb://localhost:{self._server.port};Name={name};"
            f"SharedAccessKeyName={native.key_name};SharedAccessKey={native.key};"
            f"UseDevelopmentEmulator=true;CaFile={self.folder / 'certificate' / 'ca.pem'}"
        )


class DropInRun(Run):
    """One pair of brokers, and senders that are a user's code on the SDK."""

    engines: ClassVar[dict[str, Callable[[ExitStack], Engine]]] = {
        "azure": Azure,
        "twinbus": Twinbus,
    }
    doubling = "azure"
    errors = (ServiceBusError,)
    lengths_s = (BOUND_S, BOUND_S + 2)  # so that the first diverted success falls into the outage

    def pair(self) -> None:
        """Pair both brokers."""
        paired_with = PairedWith(
            self.backup,
            backlog_queue_count=QUEUES,
            failover_interval=FAILOVER_INTERVAL,
            ping_primary_interval=timedelta(seconds=1),
            retry_policy=PATIENCE,
        )
        self.client = PairedServiceBusClient.from_connection_string(
            self.shop, paired_with=paired_with
        )
        self._stack.callback(self.client.close)

    def sender(self) -> Callable[[str], None]:
        """Return what sends one message with this body."""
        sender = self.client.get_queue_sender("orders")
        return lambda body: sender.send_messages(ServiceBusMessage(body))

    @staticmethod
    def identity(message: BrokeredMessage) -> object:
        """Return what all copies of a message have in common."""
        return message.message_id


def table(verdicts: list[Verdict]) -> str:
    """Return the verdicts as a table."""
    ways = DropInRun.ways
    heads = ["primary", "secondary", "ok", "lost", "duplicated", "recovered", "failed"]
    heads += [f"first success after {way}" for way in ways] + ["bound"]
    rows = [heads]
    for verdict in verdicts:
        numbers = (verdict.ok, verdict.lost, verdict.duplicated, verdict.recovered, verdict.failed)
        times = [f"{verdict.to_divert_s.get(way, float('nan')):.2f} s" for way in ways]
        rows.append(
            [*verdict.pair.split("-"), *(f"{n:,}" for n in numbers), *times, f"{BOUND_S:.0f} s"]
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--outages", type=int, default=4)
    parser.add_argument("--pair", choices=PAIRS, action="append")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(
        f"replay: python -m tests.soak.azure_outage --outages {given.outages} --seed {given.seed}"
    )
    found = [play(DropInRun, pair, given.outages, given.seed) for pair in given.pair or PAIRS]
    print(table(found), flush=True)
    is_in_time = all(time_s <= BOUND_S for item in found for time_s in item.to_divert_s.values())
    sys.exit(0 if is_in_time and all(item.is_good and item.ok for item in found) else 1)


if __name__ == "__main__":
    main()
