"""Pairing for applications that use the SDK of Azure Service Bus, as a replacement of its client.

    from twinbus.azure import PairedServiceBusClient, PairedWith

    with PairedServiceBusClient.from_connection_string(
        primary, paired_with=PairedWith(secondary)
    ) as client, client.get_queue_sender("orders") as sender:
        sender.send_messages(ServiceBusMessage("two coffees"))

Senders go through the pairing: while the primary is unavailable, their messages go to the backlog
queues of the secondary. Receivers are those of the SDK and receive from the primary. Errors are
those of the SDK. `twinbus.azure.aio` has the same for asyncio.
"""

from twinbus.extras import require

require("twinbus.azure", "azure")

from twinbus.azure.client import PairedServiceBusClient, PairedServiceBusSender, PairedWith  # noqa: E402

__all__ = ["PairedServiceBusClient", "PairedServiceBusSender", "PairedWith"]
