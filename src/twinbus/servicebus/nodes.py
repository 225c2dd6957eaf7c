"""Nodes that answer requests: `$cbs` accepts tokens, `<entity>/$management` executes operations.

A client attaches two links to a node. It sends requests on one link, and receives the answers on
the other link of the same session. If there are several, `reply-to` selects the link.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from twinbus.amqp.events import Delivery
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message
from twinbus.amqp.performatives import ACCEPTED, Properties, Rejected, Target
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.session import AmqpSession
from twinbus.amqp.types import Int, Symbol
from twinbus.errors import (
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    QuotaExceededError,
)
from twinbus.limits import MAX_AMQP_UNSETTLED, MAX_ID_CHARACTERS, MAX_UNREAD_BYTES
from twinbus.servicebus.conditions import condition_of, mapped, text_of
from twinbus.servicebus.work import Work

CBS: Final = "$cbs"
_REQUEST_CREDIT: Final = 100


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a node to a request."""

    status: int = 200
    description: str = "OK"
    body: Any = None
    condition: str | None = None


def failed(error: MessagingError) -> Answer:
    """Return the answer to a request that failed."""
    condition, status = mapped(error)
    return Answer(status, text_of(error), None, condition)


@dataclass(slots=True)
class NodeRequest:
    """A request, with the facts that its answer needs."""

    operation: str
    properties: dict[Any, Any]
    body: Any
    message_id: Any
    reply_to: str | None
    link: ReceiverLink


@dataclass(slots=True)
class Answers:
    """The link for answers, and the answers that wait for its credit."""

    node: "RequestNode"
    link: SenderLink
    waiting: deque[bytes] = field(default_factory=deque)
    waiting_bytes: int = 0

    def send(self, message: bytes) -> None:
        """Send an answer when the link has credit; end a link with too many waiting answers."""
        self.waiting.append(message)
        self._count(len(message))
        self.pump()
        if self._is_behind:
            error = QuotaExceededError(
                f"the client has not taken {len(self.waiting)} answers with {self.waiting_bytes} "
                "bytes, and sends more requests. Give the link of the answers credit, and open "
                "the window of its session"
            )
            self.clear()
            self.link.detach(condition_of(error))

    @property
    def _is_behind(self) -> bool:
        """Whether the client takes its answers so late that the link must end.

        work.py defers requests with large answers, so a client that gives credit stays below the
        bounds.
        """
        session = self.link.session
        left = self.waiting_bytes + session.transfers.waiting_bytes(self.link)
        return (
            len(self.waiting) > self.node.max_waiting
            or self.waiting_bytes + session.connection.unread_bytes > 2 * MAX_UNREAD_BYTES
            or (left > 0 and not self.node.work.may_keep(0))
        )

    def _count(self, change: int) -> None:
        self.waiting_bytes += change
        self.node.work.kept_bytes += change

    def clear(self) -> None:
        """Drop the waiting answers, because the link ends."""
        self.waiting.clear()
        self._count(-self.waiting_bytes)

    def pump(self) -> None:
        """Send waiting answers as far as the link has credit."""
        while self.waiting and self.link.may_send:
            message = self.waiting.popleft()
            self._count(-len(message))
            self.link.send(message, is_settled=True)


class RequestNode:
    """A node: receives requests and sends answers."""

    def __init__(
        self,
        work: Work,
        address: str,
        status_names: tuple[str, str, str],
        max_waiting: int = MAX_AMQP_UNSETTLED,
    ) -> None:
        self.work = work
        self.address = address
        self.max_waiting = max_waiting  # number of answers that wait for credit
        self._status_names = status_names
        self.links = 0  # number of attached links
        self._answers: dict[AmqpSession, list[Answers]] = {}

    def begin_requests(self, link: ReceiverLink) -> None:
        """Give the client credit to send requests."""
        self.links += 1
        link.grant(_REQUEST_CREDIT)

    def begin_answers(self, link: SenderLink) -> Answers:
        """Register a link for answers."""
        self.links += 1
        answers = Answers(self, link)
        self._answers.setdefault(link.session, []).append(answers)
        return answers

    def end_requests(self) -> None:
        """Unregister a link for requests."""
        self.links -= 1

    def end_answers(self, link: SenderLink) -> None:
        """Unregister a link for answers."""
        self.links -= 1
        remaining = []
        for answers in self._answers.pop(link.session, []):
            if answers.link is link:
                answers.clear()
            else:
                remaining.append(answers)
        if remaining:
            self._answers[link.session] = remaining

    def read(self, delivery: Delivery) -> NodeRequest | None:
        """Return the request in a delivery; None if it was refused."""
        link = delivery.link
        try:
            message = AmqpMessage(delivery.payload)
            properties_given = message.application_properties or {}
            properties = message.properties or Properties()
            operation = properties_given.get("operation")
            if not isinstance(operation, str):
                raise InvalidArgumentError(
                    f"the application property `operation` of a request is a "
                    f"{type(operation).__name__}; set it to the name of an operation, as text"
                )
            message_id = properties.message_id
            if isinstance(message_id, str | bytes) and len(message_id) > MAX_ID_CHARACTERS:
                raise InvalidArgumentError(
                    f"the message-id of a request has {len(message_id)} characters; its answer "
                    f"repeats it, so it may have at most {MAX_ID_CHARACTERS}"
                )
            body = message.value if message.body_kind is SectionKind.VALUE else None
        except MessagingError as error:
            link.settle(delivery.number, Rejected(error=condition_of(error)), is_settled=True)
            self.renew_credit(link)
            return None
        link.settle(delivery.number, ACCEPTED, is_settled=True)
        self.renew_credit(link)
        return NodeRequest(
            str(operation), properties_given, body, message_id, properties.reply_to, link
        )

    def renew_credit(self, link: ReceiverLink) -> None:
        """Give the client new credit when it has used half of it."""
        if link.credit < _REQUEST_CREDIT // 2:
            link.grant(_REQUEST_CREDIT)

    def answer(self, request: NodeRequest, answer: Answer) -> bool:
        """Send an answer; return false if there is no link, or the answer is too large.

        An error is sent instead of an answer that is too large.
        """
        answers = self._answers_to(request)
        if answers is None:
            return False
        message = self._encoded(request, answer)
        most = self.largest_answer(request)
        if len(message) <= most:
            answers.send(message)
            return True
        error = MessageSizeExceededError(
            f"the answer has {len(message)} bytes; the link allows {most}. Ask for fewer messages",
            size=len(message),
            limit=most,
        )
        answers.send(self._encoded(request, failed(error)))
        return False

    def fits(self, request: NodeRequest, answer: Answer) -> bool:
        """Return whether the client's link can take an answer."""
        has_link = self._answers_to(request) is not None
        return has_link and len(self._encoded(request, answer)) <= self.largest_answer(request)

    def largest_answer(self, request: NodeRequest) -> int:
        """Return the maximum size in bytes of an answer to a request."""
        answers = self._answers_to(request)
        most = 0 if answers is None else answers.link.max_message_bytes
        return min(most or MAX_UNREAD_BYTES, MAX_UNREAD_BYTES)

    def _answers_to(self, request: NodeRequest) -> Answers | None:
        of_session = self._answers.get(request.link.session, [])
        found = [answers for answers in of_session if answers.link.is_attached]
        fitting = [answers for answers in found if _address(answers.link) == request.reply_to]
        return next(iter(fitting or found), None)

    def _encoded(self, request: NodeRequest, answer: Answer) -> bytes:
        code, description, condition = self._status_names
        properties: dict[str, Any] = {code: Int(answer.status), description: answer.description}
        if answer.condition is not None:
            properties[condition] = Symbol(answer.condition)
        sections: dict[SectionKind, Any] = {
            SectionKind.PROPERTIES: Properties(correlation_id=request.message_id),
            SectionKind.APPLICATION_PROPERTIES: properties,
            SectionKind.VALUE: answer.body,
        }
        return encode_message(sections)


def _address(link: SenderLink) -> str | None:
    target = None if link.peer is None else link.peer.target
    return target.address if isinstance(target, Target) else None
