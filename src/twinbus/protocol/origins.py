"""Names of origins: who numbered the messages of a send, so that duplicates are recognised.

    sender/<16 hex digits>    a sender of a client; belongs to the key that used it first
    //sink/<name>             a writer of Spark; belongs to its key as well
    spill/<32 hex digits>     a spill store; only the broker itself may use it
    anything else             a queue whose messages are brought home: needs the claim Transfer

The broker names its own queues `<path>#<number>.<birth>[.<start>]`. `number` is the queue's number
in the log. `birth` is a nonce of the queue's creation. `start` is a nonce of the broker start in
which the message got its number; it is omitted for the start in which the queue was created. After
a directory was restored from a backup, the broker assigns the same numbers again, but in another
start, so these are different origins.
"""

import re
from enum import Enum
from functools import lru_cache
from uuid import NAMESPACE_URL, uuid5

from twinbus.errors import InvalidArgumentError
from twinbus.limits import KNOWN_SENDERS, MAX_ORIGIN_CHARACTERS
from twinbus.values import check_text

_SENDER = "sender/"
_SINK = "//sink/"  # entity paths cannot begin with this
_SPILL = "spill/"
_SENDER_NAME = re.compile(r"sender/[0-9a-f]{16}")
ORIGIN_PROPERTY = "x-twinbus-origin"  # <source>:<number>, on engines without transfer memory


class OriginKind(Enum):
    """Who numbered the messages."""

    SENDER = "sender"
    SINK = "sink"
    SPILL = "spill"
    TRANSFER = "transfer"


def sender_source(number: int) -> str:
    """Return the origin name of a sender; its number has 64 bits."""
    return f"{_SENDER}{number:016x}"


def sink_source(name: str) -> str:
    """Return the origin name of a sink."""
    return f"{_SINK}{name}"


def spill_source(nonce: str) -> str:
    """Return the origin name of a spill store."""
    return f"{_SPILL}{nonce}"


def queue_source(path: str, number: int, birth: str, start: str = "") -> str:
    """Return the origin name of a queue."""
    return f"{path.lower()}#{number}.{birth}" + (f".{start}" if start else "")


@lru_cache(maxsize=KNOWN_SENDERS)  # called for every send
def origin_kind(source: str) -> OriginKind:
    """Return the kind of an origin name; refuse an invalid name."""
    check_text("the source of an origin", source, MAX_ORIGIN_CHARACTERS, least=1)
    if source.startswith(_SENDER):
        if not _SENDER_NAME.fullmatch(source):
            raise InvalidArgumentError(
                f"the origin {source!r:.60} is not a valid sender; write sender/ and 16 hex digits"
            )
        return OriginKind.SENDER
    if source.startswith(_SINK):
        return OriginKind.SINK
    return OriginKind.SPILL if source.startswith(_SPILL) else OriginKind.TRANSFER


@lru_cache(maxsize=KNOWN_SENDERS)  # called for the record of every send
def sender_number(source: str) -> int | None:
    """Return the number of a sender; None for another kind of name, or an invalid one."""
    if not _SENDER_NAME.fullmatch(source):
        return None
    return int(source.removeprefix(_SENDER), 16)


def message_id_of(source: str, number: int) -> str:
    """Return a message id for a message without one; every copy of it gets the same id."""
    return str(uuid5(NAMESPACE_URL, f"twinbus:{source}:{number}"))
