"""The capabilities of namespaces. Each implementation of a namespace declares its own.

Clients, pairing and the syphon check capabilities, never the type of a namespace. A Twinbus
namespace has every capability. A command that needs a missing capability fails with
UnsupportedCapabilityError, which names it; the table of commands lists what each command needs.
"""

from enum import Enum

from twinbus.errors import UnsupportedCapabilityError


class Capability(Enum):
    """A feature that not every kind of namespace has; the value is its name in error texts."""

    SESSIONS = "sessions"
    SCHEDULING = "scheduled messages"
    DEFERRING = "deferred messages"
    BROWSING = "browsing messages without locking them"
    BATCH_DELETING = "deleting messages in batches"
    LOCK_RENEWAL = "renewing message locks"
    MANAGEMENT = "creating, reading and deleting entities"
    UPDATING = "changing the settings of an entity"
    DISABLING = "entities that are disabled"
    DUPLICATE_DETECTION = "duplicate detection"
    FORWARDING = "forwarding to another entity"
    PARTITIONING = "partitioned entities"
    ANY_CASE = "paths in any case"
    LONG_PATHS = "paths of 260 characters"
    MESSAGE_LIMIT = "a size limit of 256 KB for a message"
    EXACT_QUOTA = "a size limit of an entity that is exact to a message"
    LOCK_DURATION = "locks that expire"
    UNCOUNTED_RELEASE = "releasing a message without counting a delivery"
    PROMPT_DEAD_LETTERS = "dead letters that are there when a settlement returns"
    LISTING = "listing entities"
    RULES = "rules of subscriptions"
    KEYS = "shared access keys"
    METERING = "a meter of operations"
    RECEIPT_NUMBERS = "sequence numbers in the receipt of a send"
    WHOLE_BATCHES = "batches of any size that are accepted or refused as a whole"
    SEQUENCE_NUMBERS = "sequence numbers"  # per queue; a new queue starts again
    RANGES = "leases of ranges"  # a range can be read any number of times until it is settled
    REPEAT_MEMORY = "recognising a repeated send by its number"
    TRANSFER_MEMORY = "recognising messages that were brought home before"


EVERY_CAPABILITY = frozenset(Capability)


def unsupported(namespace: str, capability: Capability, what: str) -> UnsupportedCapabilityError:
    """Return the error for `what`, which needs a capability that the namespace lacks."""
    return UnsupportedCapabilityError(
        f"{what} needs {capability.value}, which {namespace} does not support. Use a namespace "
        "with this capability, or leave out what needs it",
        capability=capability.name,
        namespace=namespace,
    )
