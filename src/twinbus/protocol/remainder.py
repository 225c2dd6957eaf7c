"""Sends that a namespace has accepted in part.

An engine without WHOLE_BATCHES accepts the messages of a send singly or in several batches. If a
part of a send fails, its error has the fact `accepted`: a mapping from the row of each message that
is certainly enqueued to its sequence number, 0 where the engine reports none. At least one row is
not in it. Clients, pairing and the syphon then send only the other rows again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from twinbus.errors import MessagingError
from twinbus.protocol.commands import Origin, Send, SendReceipt

ACCEPTED = "accepted"  # the name of the fact


def accepted_in(error: MessagingError) -> Mapping[int, int]:
    """Return the accepted rows of a failed send with their sequence numbers; often none."""
    accepted = error.facts.get(ACCEPTED)
    return accepted if isinstance(accepted, dict) else {}


class Remainder:
    """The messages of a send that are not accepted yet, and the numbers of the others."""

    def __init__(self, command: Send) -> None:
        self.command = command  # sends the messages that are left
        # The rows of these messages in the whole send.
        self._rows: Sequence[int] = range(len(command.messages))
        self._numbers: dict[int, int] = {}  # of accepted messages, by row of the whole send

    def note(self, error: MessagingError) -> None:
        """Remove the rows accepted in a failed try; put those of all tries into the error."""
        accepted = accepted_in(error)
        if accepted:
            self._numbers |= {self._rows[at]: number for at, number in accepted.items()}
            left = [at for at in range(len(self._rows)) if at not in accepted]
            self._rows = [self._rows[at] for at in left]
            self.command = _only(self.command, left)
        if self._numbers:
            error.facts = {**error.facts, ACCEPTED: dict(self._numbers)}

    def send(self, send: Callable[[Send], SendReceipt]) -> SendReceipt:
        """Send the messages that are left, and return the receipt of the whole send."""
        try:
            return self.receipt(send(self.command))
        except MessagingError as error:
            self.note(error)
            raise

    def receipt(self, receipt: SendReceipt) -> SendReceipt:
        """Return the receipt of the whole send, from that of the messages that were left."""
        if not self._numbers:
            return receipt
        numbers = self._numbers | dict(zip(self._rows, receipt.sequence_numbers, strict=True))
        return SendReceipt([numbers[row] for row in range(len(numbers))])


def _only(command: Send, rows: Sequence[int]) -> Send:
    """Return the send of some rows."""
    messages = command.messages
    if isinstance(messages, pa.RecordBatch):
        return replace(
            command,
            messages=messages.take(pa.array(rows, pa.int64())),
            origin=_numbers_of(command.origin, rows),
        )
    return replace(
        command,
        messages=[messages[row] for row in rows],
        origin=_numbers_of(command.origin, rows),
    )


def _numbers_of(origin: Origin | None, rows: Sequence[int]) -> Origin | None:
    if origin is None:
        return None
    numbers = np.asarray(origin.numbers, np.int64)[np.asarray(rows, np.int64)]
    return Origin(origin.source, numbers, _numbers_of(origin.also, rows))
