"""Sends the deliveries of a session, in one frame or several, within the peer's window.

At most one delivery waits for the window, and no other delivery is sent until its last frame is. So
a peer that does not read cannot make memory grow here. This module encodes transfers by hand, and
not with the table of composite types (performatives.py), because every message that is sent passes
through here.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinbus.amqp.decoder import Buffer
from twinbus.amqp.deliveries import MASK, distance
from twinbus.amqp.encoder import encode, write_binary, write_boolean, write_compound, write_uint
from twinbus.amqp.frames import FRAME_HEAD_BYTES, pack_head
from twinbus.amqp.performatives import ACCEPTED, DeliveryState
from twinbus.amqp.sender_link import SenderLink
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AMQP_TAG_BYTES

if TYPE_CHECKING:
    from twinbus.amqp.connection import AmqpConnection

_MAX_WINDOW = 2**31 - 1
# Maximum size of a transfer frame without the payload and the fields around the flag `more`: the
# head of the frame, the descriptor, the head of the list, and the flag.
_OVERHEAD = FRAME_HEAD_BYTES + 16
_MOST_FIELDS = 3 * 5 + 2 + MAX_AMQP_TAG_BYTES + 1  # handle, number, format; tag; whether settled
_ACCEPTED_BYTES = ACCEPTED.encode()
_NO_STATE_BUT_ABORTED = b"\x40\x40\x42\x41"  # the fields after `more`: ..., resume, aborted


@dataclass(slots=True)
class WaitingDelivery:
    """A delivery with frames that wait for the peer's window."""

    link: SenderLink
    number: int
    fields: bytes  # of its transfers, up to the flag `more`
    rest: bytes  # the fields after `more`
    count: int  # number of all fields
    payload: memoryview
    size: int  # of the whole message, which stays in memory until its last frame is written


class OutgoingTransfers:
    """The outgoing half of a session."""

    __slots__ = ("_channel", "_connection", "_waiting", "next_id", "next_number", "peer_window")

    def __init__(self, connection: "AmqpConnection", channel: int) -> None:
        self._connection = connection
        self._channel = channel
        self._waiting: WaitingDelivery | None = None
        self.next_id = connection.options.first_number  # of the next transfer, in 32 bits
        self.next_number = connection.options.first_number  # of the next delivery
        self.peer_window = 0  # number of transfers that the peer accepts

    @property
    def may_send(self) -> bool:
        """Whether the peer accepts a transfer now, and none waits."""
        return self.peer_window > 0 and self._waiting is None

    def fits(self, size: int) -> bool:
        """Return whether a message of this size can be written at once."""
        room = self._connection.peer_frame_bytes - _OVERHEAD - _MOST_FIELDS
        return self.may_send and size <= self.peer_window * room

    def waiting_bytes(self, link: SenderLink) -> int:
        """Return the size of the delivery of a link that waits for the window."""
        waiting = self._waiting
        return 0 if waiting is None or waiting.link is not link else waiting.size

    def open_window(self, window: int, expected_next: int | None = None) -> int:
        """Set the peer's window; return how many transfers it acknowledged that were not sent.

        `expected_next` is the id of the transfer that the peer expects next.
        """
        ahead = 0 if expected_next is None else distance(expected_next, self.next_id)
        if ahead <= 0:
            self.peer_window = max(0, min(ahead + window, _MAX_WINDOW))
            self._pump()
        return max(ahead, 0)

    def send(  # noqa: PLR0913 - the parts of a transfer, in the hot path
        self,
        link: SenderLink,
        payload: Buffer | list[Buffer],
        size: int,
        tag: bytes | None,
        message_format: int,
        *,
        is_settled: bool,
        state: DeliveryState | None,
    ) -> int:
        """Send a delivery; return its number."""
        number = self.next_number
        wire_number = number & MASK
        if tag is None:
            tag = wire_number.to_bytes(4)
        fields = b"%b%b%b%b%b" % (
            link.handle_bytes,
            write_uint(wire_number),
            write_binary(tag),
            write_uint(message_format),
            b"\x41" if is_settled else b"\x42",
        )
        rest, count = (b"", 6) if state is None else (b"\x40" + state_bytes(state), 8)
        room = self._connection.peer_frame_bytes - _OVERHEAD - len(fields) - len(rest)
        if room <= 0:
            raise InvalidArgumentError(
                f"the state of the delivery has {len(rest)} bytes, too many for a frame of the "
                f"peer, which has at most {self._connection.peer_frame_bytes}"
            )
        self.next_number = number + 1
        if not is_settled:
            link.session.outcomes.add_sent(number, link)
            link.unsettled[number] = tag
        if size <= room:
            self._write(fields, rest, count, payload, size)
        else:
            content = memoryview(b"".join(payload) if isinstance(payload, list) else payload)
            self._set_waiting(WaitingDelivery(link, number, fields, rest, count, content, size))
            self._pump()
        return number

    def _write(
        self,
        fields: bytes,
        rest: bytes,
        count: int,
        payload: Buffer | list[Buffer],
        size: int,
        *,
        has_more: bool = False,
    ) -> None:
        if has_more or rest:
            fields = fields + write_boolean(has_more) + rest
        else:
            count -= 1
        head = b"\x00\x53\x14" + write_compound(0xC0, count, fields)
        length = FRAME_HEAD_BYTES + len(head) + size
        self.next_id = (self.next_id + 1) & MASK
        self.peer_window -= 1
        head = pack_head(length, 2, 0, self._channel) + head
        self._connection.write_buffers(head, payload, length)

    def _pump(self) -> None:
        """Send frames of the waiting delivery, as far as the peer's window allows."""
        while (waiting := self._waiting) is not None and self.peer_window > 0:
            overhead = _OVERHEAD + len(waiting.fields) + len(waiting.rest)
            room = self._connection.peer_frame_bytes - overhead
            piece, waiting.payload = waiting.payload[:room], waiting.payload[room:]
            has_more = bool(waiting.payload)
            if not has_more:
                self._set_waiting(None)
            self._write(
                waiting.fields, waiting.rest, waiting.count, piece, len(piece), has_more=has_more
            )

    def abort(self, link: SenderLink, number: int) -> bool:
        """Abort the waiting delivery if it is this one."""
        waiting = self._waiting
        if waiting is None or waiting.link is not link or waiting.number != number:
            return False
        if waiting.rest == _NO_STATE_BUT_ABORTED:
            return False
        waiting.rest, waiting.count = _NO_STATE_BUT_ABORTED, 10
        waiting.payload = memoryview(b"")
        if link.unsettled.pop(number, None) is not None:  # an aborted delivery is settled
            link.session.outcomes.forget_sent(number)
        self._pump()
        return True

    def forget(self, link: SenderLink) -> None:
        """Drop the waiting delivery of a link that ends."""
        if self._waiting is not None and self._waiting.link is link:
            self._set_waiting(None)

    def _set_waiting(self, waiting: WaitingDelivery | None) -> None:
        """Set the delivery that waits for the window, and count its bytes."""
        for change, found in ((-1, self._waiting), (1, waiting)):
            if found is not None:
                self._connection.withheld_bytes += change * found.size
        self._waiting = waiting


def state_bytes(state: DeliveryState) -> bytes:
    """Return an encoded delivery state."""
    return _ACCEPTED_BYTES if state is ACCEPTED else encode(state)
