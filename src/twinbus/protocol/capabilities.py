"""What a namespace can do. Each way to reach a namespace declares its capabilities.

Clients, pairing and the syphon choose by capability and never by the type of a namespace. A Twinbus
namespace has every capability. A command that needs a missing one fails with
UnsupportedCapabilityError, which names the capability; the table of commands says what each needs.
"""

from enum import Enum

from twinbus.errors import UnsupportedCapabilityError


class Capability(Enum):
    """Something that not every engine does; the value names it in error texts."""

    SESSIONS = "sessions"
    SCHEDULING = "scheduled messages"
    DEFERRING = "deferred messages"
    BROWSING = "browsing messages without locking them"
    BATCH_DELETING = "deleting messages in batches"
    LOCK_RENEWAL = "renewing message locks"
    MANAGEMENT = "creating, reading and deleting entities"
    LISTING = "listing entities"
    RULES = "rules of subscriptions"
    KEYS = "shared access keys"
    METERING = "a meter of operations"
    RECEIPT_NUMBERS = "sequence numbers in the receipt of a send"
    WHOLE_BATCHES = "batches of any size that are taken whole or not at all"
    SEQUENCE_NUMBERS = "sequence numbers"  # per queue; one that is created anew starts again
    RANGES = "leases of ranges"  # a range can be read again and again until it is settled
    REPEAT_MEMORY = "recognising a repeated send by its number"
    TRANSFER_MEMORY = "recognising messages that were brought home before"


EVERY_CAPABILITY = frozenset(Capability)


def unsupported(namespace: str, capability: Capability, what: str) -> UnsupportedCapabilityError:
    """Return the error of a namespace that lacks a capability; `what` needed it."""
    return UnsupportedCapabilityError(
        f"{what} needs {capability.value}, which {namespace} does not support. Use a namespace "
        "that supports it, or do without",
        capability=capability.name,
        namespace=namespace,
    )
