"""A link on which a client sends: each delivery becomes one send, which succeeds or fails whole."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from twinbus.amqp.decoder import Buffer
from twinbus.amqp.events import Delivery
from twinbus.amqp.performatives import ACCEPTED, Rejected
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.errors import MessagingError
from twinbus.limits import READ_STEP_MESSAGES, SERVICE_BUS_CREDIT
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import Send
from twinbus.servicebus.conditions import condition_of
from twinbus.servicebus.messages import encoded_messages
from twinbus.servicebus.short_messages import read_messages
from twinbus.servicebus.work import Work


class Sending:
    """The broker's end of a link on which a client sends."""

    def __init__(self, work: Work, link: ReceiverLink, path: str) -> None:
        self._work = work
        self._link = link
        self.path = path

    def begin(self) -> None:
        """Give the client credit. Python's SDK ignores credit; other SDKs wait for it."""
        self._link.grant(SERVICE_BUS_CREDIT)

    def take(self, delivery: Delivery) -> Iterator[None] | None:
        """Enqueue the messages of a delivery, and report the outcome to the client.

        Return steps that are still to be done, if the delivery is a large batch.
        """
        try:
            encoded = encoded_messages(delivery.payload, delivery.message_format)
            if len(encoded) > READ_STEP_MESSAGES:
                return self._read_in_steps(delivery.number, encoded)
            self._enqueue(delivery.number, read_messages(encoded))
        except MessagingError as error:
            self._report(delivery.number, error)
        return None

    def _read_in_steps(self, number: int, encoded: Sequence[Buffer]) -> Iterator[None]:
        """Read some messages in each step, and enqueue all in the last one."""
        messages: list[BrokeredMessage] = []
        try:
            for at in range(0, len(encoded), READ_STEP_MESSAGES):
                messages += read_messages(encoded[at : at + READ_STEP_MESSAGES])
                yield
            self._enqueue(number, messages)
        except MessagingError as error:
            self._report(number, error)

    def _enqueue(self, number: int, messages: list[BrokeredMessage]) -> None:
        command = Send(self.path, messages)
        self._work.ask(self.path, command, partial(self._report, number))

    def _report(self, number: int, value: Any) -> None:
        link = self._link
        if isinstance(value, MessagingError):
            link.settle(number, Rejected(error=condition_of(value)), is_settled=True)
        else:
            link.settle(number, ACCEPTED, is_settled=True)
        self.renew_credit(link)

    def renew_credit(self, link: ReceiverLink) -> None:
        """Give the client new credit when it has used half of it."""
        if link.credit < SERVICE_BUS_CREDIT // 2:
            link.grant(SERVICE_BUS_CREDIT)

    def stop(self, error: MessagingError) -> None:
        """End the link with an error."""
        self._link.detach(condition_of(error))

    def end(self) -> None:
        """Do nothing: sends in progress continue when the link has ended."""
