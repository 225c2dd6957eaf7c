"""The server's end of a connection of a Service Bus client, without IO.

The driver (server/amqp.py, or a simulation) passes in the bytes that it has read, calls `go_on`
while a large batch is not read completely, submits the requests that `take_requests` returns,
passes in their replies with `answer`, writes the bytes that `amqp.take_outgoing` returns, and calls
`tick` periodically.

A client sends tokens to `$cbs`. The tokens decide which links the client may attach and which
requests it may make. They are checked again at each request and at each `tick`. The address of a
link selects its purpose:

    $cbs                      tokens (nodes.py)
    <entity>/$management      operations (management.py)
    anything else             an entity: the client sends (sending.py) or receives (receiving.py)

Transactions are not supported: the server refuses a link to a coordinator with
`amqp:not-implemented`, and also deliveries and outcomes that belong to a transaction.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from twinbus.amqp.conditions import Condition
from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import (
    AttachRequested,
    CreditGiven,
    Delivery,
    DeliveryDropped,
    Event,
    LinkDetached,
    OutcomeReported,
    WindowOpened,
)
from twinbus.amqp.lifecycle import EndpointState
from twinbus.amqp.options import ConnectionOptions, PeerBounds
from twinbus.amqp.performatives import (
    Coordinator,
    ErrorCondition,
    Rejected,
    Source,
    Target,
    TransactionalState,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sasl import ANONYMOUS, EXTERNAL, MSSBCBS, SaslServer
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.types import Described, Symbol
from twinbus.clock import moment_us, to_us
from twinbus.entities import DEAD_LETTER_SUFFIX, EntityDescription
from twinbus.errors import (
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
    OperationTimeoutError,
    SessionCannotBeLockedError,
)
from twinbus.limits import (
    AUTHENTICATION_US,
    MAX_TOKEN_ANSWERS,
    MAX_TOKEN_MESSAGE_BYTES,
    MAX_WAIT,
    SECOND_US,
    SERVICE_BUS_ACCEPT_WAIT,
    SERVICE_BUS_FETCH_BYTES,
    SERVICE_BUS_IDLE_US,
    STRANGER_AMQP_BYTES,
    STRANGER_AMQP_LINKS,
    STRANGER_AMQP_SESSIONS,
)
from twinbus.protocol.commands import AcceptSession, SessionGrant
from twinbus.protocol.keys import Claim
from twinbus.protocol.requests import Request
from twinbus.servicebus.conditions import MICROSOFT, NO_TRANSACTIONS, condition_of
from twinbus.servicebus.management import MANAGEMENT, ManagementNode
from twinbus.servicebus.nodes import CBS, Answer, Answers, NodeRequest, RequestNode, failed
from twinbus.servicebus.receiving import NO_WAIT, Receiving
from twinbus.servicebus.sending import Sending
from twinbus.servicebus.work import Deliver, LinkRequest, ServiceBusGuard, Work

_CBS_NAMES: Final = ("status-code", "status-description", "error-condition")
_SESSION_FILTER: Final = f"{MICROSOFT}session-filter"
_STRANGER: Final = PeerBounds(  # of a connection without a valid token
    max_sessions=STRANGER_AMQP_SESSIONS,
    max_links=STRANGER_AMQP_LINKS,
    max_kept_bytes=STRANGER_AMQP_BYTES,
    max_partial_bytes=STRANGER_AMQP_BYTES,
    max_unread_bytes=STRANGER_AMQP_BYTES,
)
_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH_TICKS: Final = 621_355_968_000_000_000  # 1970 in .NET ticks, which are 100 ns


def _refused(condition: str, text: str) -> ErrorCondition:
    return ErrorCondition(condition=condition, description=text, info={})


_NO_ADDRESS: Final = _refused(
    Condition.NOT_IMPLEMENTED, "the link has no address; attach it to the address of an entity"
)


class ServiceBusConversation:
    """One connection, from its first byte to its end."""

    def __init__(
        self,
        guard: ServiceBusGuard,
        deliver: Deliver,
        container_id: str,
        now: int,
        max_message_bytes: int,
    ) -> None:
        options = ConnectionOptions(
            container_id,
            idle_timeout_us=SERVICE_BUS_IDLE_US,
            tolerates_overrun=True,
            bounds=_STRANGER,
            rejects_too_large=True,  # SDKs treat a link that ends as a lost connection
        )
        sasl = SaslServer((MSSBCBS, ANONYMOUS, EXTERNAL), lambda _: True)  # tokens decide later
        self.amqp = AmqpConnection(options, now, sasl=sasl)
        self._work = Work(guard, deliver, now, self.amqp, self._admitted)
        self._began_at = now
        self._max_message_bytes = max_message_bytes
        self._cbs = RequestNode(self._work, CBS, _CBS_NAMES, MAX_TOKEN_ANSWERS)
        self._management: dict[str, ManagementNode] = {}  # by the path of the entity
        self._events: deque[Event] = deque()  # that wait until a large batch is read
        self._steps: Iterator[None] | None = None  # that are still to be done for this batch
        self._accepting: dict[SenderLink, LinkRequest | None] = {}  # links that wait for a session

    def _admitted(self) -> None:
        self.amqp.bounds = PeerBounds()

    # -- called by the driver ------------------------------------------------------------------

    def receive(self, data: bytes, now: int) -> None:
        """Process bytes that have arrived."""
        self._work.now = now
        self._take(self.amqp.receive(data, now))

    @property
    def is_unfinished(self) -> bool:
        """Whether a large batch is not read completely; then `go_on` must be called."""
        return self._steps is not None

    def go_on(self, now: int) -> None:
        """Read some more messages of a large batch, then act on the events after it."""
        self._work.now = now
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
            self._take(self.amqp.take_events())

    def answer(self, request: LinkRequest, value: Any, now: int) -> None:
        """Process a reply of the broker."""
        self._work.now = now
        self._work.answer(request, value)
        if self.amqp.has_events:
            self._take(self.amqp.take_events())

    @property
    def has_requests(self) -> bool:
        """Whether `take_requests` has requests to return."""
        return bool(self._work.arrived or self._work.withdrawn)

    def take_requests(self) -> tuple[list[Request], list[Request]]:
        """Return new requests for the broker, and requests whose reply is no longer needed."""
        work = self._work
        arrived, work.arrived = work.arrived, []
        withdrawn, work.withdrawn = work.withdrawn, []
        return arrived, withdrawn

    @property
    def may_read(self) -> bool:
        """Whether the driver may read more bytes."""
        return self.amqp.may_read and not self._work.is_behind

    @property
    def must_be_counted(self) -> bool:
        """Whether the driver must count the bytes of replies or requests under the client's key."""
        return self._work.must_be_counted

    @property
    def reply_bytes(self) -> int:
        """How many bytes of replies are unread or expected, or wait at links."""
        return self._work.reply_bytes

    @property
    def request_bytes(self) -> int:
        """The size of the messages in unanswered requests."""
        return self._work.request_bytes

    @property
    def waits_for_room(self) -> bool:
        """Whether `note_buffered` may find something to do when the driver has no bytes left."""
        amqp, work = self.amqp, self._work
        return amqp.buffered_bytes > 0 or work.is_stalled or work.has_deferred or amqp.has_events

    def note_buffered(self, size: int) -> None:
        """Record the number of unwritten bytes of the driver; deliver more if they are few."""
        amqp, work = self.amqp, self._work
        amqp.note_buffered(size)
        work.submit_deferred()
        if work.is_stalled and amqp.unread_bytes <= SERVICE_BUS_FETCH_BYTES:
            work.is_stalled = False
            for session in self.amqp.sessions:
                for link in session.links:
                    if isinstance(link.context, Receiving | Answers):
                        link.context.pump()
        if amqp.has_events:
            self._take(amqp.take_events())

    def lose(self) -> None:
        """Handle the loss of the connection."""
        self._steps = None
        self._events.clear()
        self._take(self.amqp.lose())

    def end(self, error: MessagingError, now: int) -> None:
        """Close the connection with an error."""
        self.amqp.close(now, condition_of(error))
        self._take(self.amqp.take_events())

    def end_links(self, path: str, error: MessagingError) -> None:
        """End the links to an entity with an error."""
        for session in self.amqp.sessions:
            for link in session.links:
                endpoint = link.context
                if (
                    isinstance(endpoint, Sending | Receiving)
                    and endpoint.path.lower() == path.lower()
                ):
                    endpoint.stop(error)

    def tick(self, now: int) -> None:
        """Apply timeouts, and end the links that the client's tokens no longer allow."""
        self._work.tick(now)
        if not self._work.is_admitted and now >= self._began_at + AUTHENTICATION_US:
            self._end_stranger(now)
        for session in self.amqp.sessions:
            for link in session.links:
                endpoint = link.context
                if link.state is EndpointState.ACTIVE and isinstance(endpoint, Sending | Receiving):
                    claim = Claim.SEND if isinstance(endpoint, Sending) else Claim.LISTEN
                    try:
                        self._work.check_right(claim, endpoint.path)
                    except MessagingError as error:
                        endpoint.stop(error)
                    if isinstance(endpoint, Receiving):
                        endpoint.check_session()
        self._take(self.amqp.tick(now))

    def _end_stranger(self, now: int) -> None:
        """End a connection without a valid token in time, or for which the server has no room."""
        try:
            self._work.enter()
        except MessagingError as error:
            self.amqp.close(now, condition_of(error))
        if not self._work.is_admitted:
            limit_s = AUTHENTICATION_US // SECOND_US
            text = f"no valid token arrived within {limit_s} s; send one to $cbs"
            self.amqp.close(now, _refused(Condition.UNAUTHORIZED_ACCESS, text))

    # -- events --------------------------------------------------------------------------------

    def _take(self, events: list[Event]) -> None:
        """Act on events in order; those after a large batch wait until the batch is read."""
        waiting = self._events
        waiting += events
        while waiting and self._steps is None:
            self._take_event(waiting.popleft())
            if self.amqp.has_events and not waiting:
                waiting += self.amqp.take_events()

    def _take_event(self, event: Event) -> None:
        if isinstance(event, Delivery):
            self._take_delivery(event)
        elif isinstance(event, OutcomeReported):
            if isinstance(event.link.context, Receiving):
                event.link.context.take_outcome(event)
        elif isinstance(event, CreditGiven):
            self._take_credit(event)
        else:
            self._take_rare_event(event)

    def _take_rare_event(self, event: Event) -> None:
        if isinstance(event, AttachRequested):
            self._take_attach(event.link)
        elif isinstance(event, WindowOpened):
            for link in event.session.links:
                if isinstance(link.context, Receiving | Answers):
                    link.context.pump()
        elif isinstance(event, LinkDetached):
            self._take_detach(event)
        elif isinstance(event, DeliveryDropped):
            endpoint = event.link.context
            if isinstance(endpoint, Sending | RequestNode):
                endpoint.renew_credit(event.link)

    def _take_delivery(self, event: Delivery) -> None:
        endpoint = event.link.context
        if isinstance(event.state, TransactionalState):
            event.link.settle(event.number, Rejected(error=NO_TRANSACTIONS), is_settled=True)
            if isinstance(endpoint, Sending | RequestNode):
                endpoint.renew_credit(event.link)
        elif isinstance(endpoint, Sending):
            self._steps = endpoint.take(event)
        elif isinstance(endpoint, RequestNode):
            request = endpoint.read(event)
            if request is not None and isinstance(endpoint, ManagementNode):
                endpoint.carry_out(request)
            elif request is not None:
                self._cbs.answer(request, self._put_token(request))

    def _take_credit(self, event: CreditGiven) -> None:
        endpoint = event.link.context
        if isinstance(endpoint, Receiving):
            endpoint.take_credit(event)
        elif isinstance(endpoint, Answers):
            endpoint.pump()
            if event.is_draining:
                event.link.drained()

    def _take_detach(self, event: LinkDetached) -> None:
        link, endpoint = event.link, event.link.context
        link.context = None
        if isinstance(endpoint, Sending | Receiving):
            endpoint.end()
        elif isinstance(endpoint, RequestNode):
            endpoint.end_requests()
            self._forget_unused(endpoint)
        elif isinstance(endpoint, Answers):
            endpoint.node.end_answers(endpoint.link)
            self._forget_unused(endpoint.node)
        elif isinstance(link, SenderLink) and link in self._accepting:
            self._work.drop(self._accepting.pop(link))

    def _forget_unused(self, node: RequestNode) -> None:
        if isinstance(node, ManagementNode) and not node.links:
            self._management.pop(node.path.lower(), None)

    # -- tokens --------------------------------------------------------------------------------

    def _put_token(self, request: NodeRequest) -> Answer:
        try:
            if request.operation != "put-token":
                raise InvalidArgumentError(f"$cbs has no operation {request.operation!r:.60}")
            audience, token = request.properties.get("name"), request.body
            if not isinstance(audience, str) or not isinstance(token, str):
                raise InvalidArgumentError(
                    f"put-token has a {type(audience).__name__} as name and a "
                    f"{type(token).__name__} "
                    "as token; both must be text"
                )
            self._work.show(str(token), path_in(audience).removesuffix(MANAGEMENT))
        except MessagingError as error:
            return failed(error)
        return Answer(202, "Accepted")

    # -- links ---------------------------------------------------------------------------------

    def _take_attach(self, link: SenderLink | ReceiverLink) -> None:
        peer = link.peer
        assert peer is not None
        terminus = peer.source if isinstance(link, SenderLink) else peer.target
        address = terminus.address if isinstance(terminus, Source | Target) else None
        if address is None:
            is_coordinator = isinstance(peer.target, Coordinator)
            link.refuse(NO_TRANSACTIONS if is_coordinator else _NO_ADDRESS)
            return
        path = path_in(address)
        if path == CBS:
            self._attach_node(link, self._cbs, MAX_TOKEN_MESSAGE_BYTES)
        elif path.endswith(MANAGEMENT):
            self._attach_management(link, path.removesuffix(MANAGEMENT))
        else:
            self._attach_entity(link, path)

    def _attach_node(
        self, link: SenderLink | ReceiverLink, node: RequestNode, max_message_bytes: int
    ) -> None:
        if isinstance(link, SenderLink):
            if link.accept():
                link.context = node.begin_answers(link)
        elif link.accept(max_message_bytes=max_message_bytes):
            link.context = node
            node.begin_requests(link)

    def _attach_management(self, link: SenderLink | ReceiverLink, path: str) -> None:
        try:
            self._work.enter()
            self._work.admission_for(path)
        except MessagingError as error:
            link.refuse(condition_of(error))
            return
        node = self._management.get(path.lower())
        if node is None:
            node = self._management[path.lower()] = ManagementNode(
                self._work, path, self._link_of_session
            )
        self._attach_node(link, node, self._max_message_bytes)

    def _link_of_session(self, path: str, session_id: str) -> Receiving | None:
        """Return the link of this connection that has locked a session."""
        for session in self.amqp.sessions:
            for link in session.links:
                endpoint = link.context
                if (
                    isinstance(endpoint, Receiving)
                    and endpoint.session is not None
                    and endpoint.session.session_id == session_id
                    and endpoint.path.lower() == path.lower()
                ):
                    return endpoint
        return None

    def _attach_entity(self, link: SenderLink | ReceiverLink, path: str) -> None:
        try:
            self._work.enter()
            if isinstance(link, SenderLink):
                description = self._work.entity_for(path, Claim.LISTEN)
                self._attach_receiver(link, path, description)
            else:
                self._work.entity_for(path, Claim.SEND)
                if link.accept(max_message_bytes=self._max_message_bytes):
                    link.context = Sending(self._work, link, path)
                    link.context.begin()
        except MessagingError as error:
            link.refuse(condition_of(error))

    def _attach_receiver(self, link: SenderLink, path: str, description: EntityDescription) -> None:
        assert link.peer is not None
        assert isinstance(link.peer.source, Source)
        filters = link.peer.source.filter or {}
        is_dead_letter = path.lower().endswith(DEAD_LETTER_SUFFIX.lower())
        needs = getattr(description, "requires_session", False) and not is_dead_letter
        if needs != (_SESSION_FILTER in filters):
            raise InvalidOperationError(
                f"{path} requires sessions; accept a session (attach with a session filter)"
                if needs
                else f"{path} has no sessions; receive without a session filter",
                path=path,
            )
        if needs:
            lock_us = to_us(getattr(description, "lock_duration", timedelta.max))
            self._accept_session(link, path, filters[_SESSION_FILTER], lock_us)
        elif link.accept():
            link.context = Receiving(self._work, link, path)
            link.context.pump()

    def _accept_session(self, link: SenderLink, path: str, wanted: Any, lock_us: int) -> None:
        """Lock a session; the reply to the attach is sent when the session is locked."""
        name = wanted.value if isinstance(wanted, Described) else wanted
        if name is not None and not isinstance(name, str):
            raise InvalidArgumentError(
                f"the session filter is a {type(name).__name__}; it must be the id of a session as "
                "text, or null for any session"
            )
        wait = NO_WAIT if name is not None else self._accept_wait(link)
        command = AcceptSession(path, None if name is None else str(name), wait)
        then = partial(self._take_session, link, path, lock_us)
        self._accepting[link] = None
        self._accepting[link] = self._work.ask(path, command, then)

    def _accept_wait(self, link: SenderLink) -> timedelta:
        """Return how long a client wants to wait for a session."""
        assert link.peer is not None
        wanted_ms = (link.peer.properties or {}).get(f"{MICROSOFT}timeout")
        if isinstance(wanted_ms, int) and wanted_ms > 0:
            return timedelta(milliseconds=min(int(wanted_ms), MAX_WAIT // _MILLISECOND))
        return SERVICE_BUS_ACCEPT_WAIT

    def _take_session(self, link: SenderLink, path: str, lock_us: int, value: Any) -> None:
        self._accepting.pop(link, None)
        if isinstance(value, SessionCannotBeLockedError) and value.session_id is None:
            value = OperationTimeoutError(value.text)  # SDKs expect a timeout if no session is free
        if isinstance(value, MessagingError):
            link.refuse(condition_of(value))
            return
        assert isinstance(value, SessionGrant)
        assert link.peer is not None
        assert isinstance(link.peer.source, Source)
        granted = {Symbol(_SESSION_FILTER): value.lock.session_id}
        ticks = moment_us(value.locked_until_utc) * 10 + _EPOCH_TICKS
        receiving = Receiving(self._work, link, path, value.lock, lock_us)
        if link.accept(
            source=replace(link.peer.source, filter=granted),
            properties={Symbol(f"{MICROSOFT}locked-until-utc"): ticks},
        ):
            link.context = receiving
            receiving.pump()
        else:
            receiving.end()


def path_in(address: str) -> str:
    """Return the entity path in an address, which may have a scheme and a host."""
    try:
        path = urlsplit(address).path if "://" in address else address
    except ValueError:  # no entity has such a path
        path = address
    return unquote(path).strip("/")
