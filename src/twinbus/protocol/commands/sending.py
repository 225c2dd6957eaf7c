"""Commands that send messages and cancel scheduled ones, and the origin of numbered messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    MAX_ADDRESS_CHARACTERS,
    MAX_ORIGIN_DEPTH,
)
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands.command import EntityCommand, check_numbers
from twinbus.protocol.origins import OriginKind, origin_kind
from twinbus.values import check_type, shown


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of messages: the namespace enqueues each message of an origin once.

    `source` names a backlog queue, whose numbers the namespace remembers forever, or a sender
    (origins.py). `numbers` are the numbers of the messages in the source, one per message. A caller
    that repeats a send, because its reply was lost, uses the same origin.
    """

    source: str
    numbers: Sequence[int] | npt.NDArray[np.int64]  # a range is the cheapest form
    # A second origin of the same messages. A message is a duplicate if either origin is known.
    also: "Origin | None" = None

    def __post_init__(self) -> None:
        if type(self.source) is not str:
            check_type("source", self.source, str)
        origin_kind(self.source)
        check_numbers("numbers", self.numbers, low=0)
        if self.also is None:
            return
        check_type("also", self.also, Origin)
        if self.also.depth >= MAX_ORIGIN_DEPTH:
            raise InvalidArgumentError(
                f"an origin has more than {MAX_ORIGIN_DEPTH} sources, nested in `also`; use only "
                "the sources that numbered the messages"
            )

    @property
    def best_known(self) -> "Origin":
        """The sender that numbered the messages, if there is one; otherwise this origin.

        A message that a sender tried at the primary and then diverted has two origins. With the
        sender's, the copy that is brought home and the direct copy have the same origin.
        """
        named: Origin | None = self
        while named is not None:
            if origin_kind(named.source) is OriginKind.SENDER:
                return named
            named = named.also
        return self

    @property
    def depth(self) -> int:
        """The number of sources: this one, and those nested in `also`."""
        return 1 + (self.also.depth if self.also is not None else 0)


@dataclass(frozen=True, slots=True)
class SendReceipt:
    """The reply to a send: the messages are durable."""

    sequence_numbers: Sequence[int]  # per message; 0: not enqueued (ping, duplicate, spilled ...)


@dataclass(frozen=True, slots=True)
class Send(EntityCommand[SendReceipt]):
    """Enqueue a batch, all or none. Messages are objects or columns."""

    messages: Sequence[BrokeredMessage] | pa.RecordBatch
    origin: Origin | None = None

    def __post_init__(self) -> None:
        path = self.path
        if type(path) is not str or len(path) > MAX_ADDRESS_CHARACTERS or not path.isprintable():
            EntityCommand.__post_init__(self)
        if self.origin is not None and type(self.origin) is not Origin:
            check_type("origin", self.origin, Origin, NoneType)
        messages = self.messages
        if type(messages) is not list:
            if isinstance(messages, pa.RecordBatch):
                return
            check_type("messages", messages, tuple, list)
        for message in messages:
            if type(message) is not BrokeredMessage:
                check_type("a message", message, BrokeredMessage)


@dataclass(frozen=True, slots=True)
class CancelScheduled(EntityCommand[None]):
    """Cancel scheduled messages by the sequence numbers of their receipt; all or none.

    `origin` is one number of a sender. A caller that repeats a cancel, because its reply was lost,
    uses the same origin, so that the broker recognises the repetition.
    """

    sequence_numbers: Sequence[int]
    origin: Origin | None = None

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_numbers("sequence_numbers", self.sequence_numbers)
        check_type("origin", self.origin, Origin, NoneType)
        origin = self.origin
        if origin is not None and (
            origin_kind(origin.source) is not OriginKind.SENDER
            or len(origin.numbers) != 1
            or origin.also is not None
        ):
            raise InvalidArgumentError(
                f"the origin of a cancel is {shown(origin)}; it must have a single number of a "
                "single sender"
            )
