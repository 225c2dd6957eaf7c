"""Names of origins: who numbered the messages of a send, so that a repeat is recognised.

    sender/<16 hex digits>    a sender of a client; belongs to the key that used it first
    //sink/<name>             a writer of Spark; belongs to its key as well
    spill/<32 hex digits>     a spill store; only the broker itself may use it
    anything else             a queue whose messages are brought home: needs the claim Transfer

The broker names its own queues `<path>#<number>.<birth>[.<start>]`. `birth` is a nonce that the
queue got when it was created. `start` is a nonce of the start of the broker that gave the message
its number, left out for the start in which the queue was created. A directory that was restored
from a backup gives the same numbers again, but in another start: they are other origins.
"""

import re
from enum import Enum
from functools import lru_cache
from uuid import NAMESPACE_URL, uuid5

from twinbus.errors import InvalidArgumentError
from twinbus.limits import KNOWN_SENDERS, MAX_ORIGIN_CHARACTERS
from twinbus.values import check_text

_SENDER = "sender/"
_SINK = "//sink/"  # no path begins so
_SPILL = "spill/"
_SENDER_NAME = re.compile(r"sender/[0-9a-f]{16}")
ORIGIN_PROPERTY = "x-twinbus-origin"  # on engines without a memory of origins: <source>:<number>


class OriginKind(Enum):
    """Who numbered the messages."""

    SENDER = "sender"
    SINK = "sink"
    SPILL = "spill"
    TRANSFER = "transfer"


def sender_source(number: int) -> str:
    """Return the name of a sender as an origin; its number has 64 bits."""
    return f"{_SENDER}{number:016x}"


def sink_source(name: str) -> str:
    """Return the name of a sink as an origin."""
    return f"{_SINK}{name}"


def spill_source(nonce: str) -> str:
    """Return the name of a spill store as an origin."""
    return f"{_SPILL}{nonce}"


def queue_source(path: str, number: int, birth: str, start: str = "") -> str:
    """Return the name of a queue as an origin."""
    return f"{path.lower()}#{number}.{birth}" + (f".{start}" if start else "")


@lru_cache(maxsize=KNOWN_SENDERS)  # asked for with every send
def origin_kind(source: str) -> OriginKind:
    """Return what a name stands for; a name that is none is refused."""
    check_text("the source of an origin", source, MAX_ORIGIN_CHARACTERS, least=1)
    if source.startswith(_SENDER):
        if not _SENDER_NAME.fullmatch(source):
            raise InvalidArgumentError(
                f"the origin {source!r:.60} names no sender; write sender/ and 16 hex digits"
            )
        return OriginKind.SENDER
    if source.startswith(_SINK):
        return OriginKind.SINK
    return OriginKind.SPILL if source.startswith(_SPILL) else OriginKind.TRANSFER


@lru_cache(maxsize=KNOWN_SENDERS)  # needed for the record of every send
def sender_number(source: str) -> int | None:
    """Return the number of a sender; None: the name is that of another kind, or of none."""
    if not _SENDER_NAME.fullmatch(source):
        return None
    return int(source.removeprefix(_SENDER), 16)


def message_id_of(source: str, number: int) -> str:
    """Return the message id of a message that has none: the same for every copy of it."""
    return str(uuid5(NAMESPACE_URL, f"twinbus:{source}:{number}"))
