"""A link on which a client receives messages.

While the client gives credit, the link submits receives that wait at the queue. It delivers the
messages of a reply as far as the link and its session have room. The other messages wait here, and
no further receive starts until they are delivered. Their bytes count under the key of the client;
if the key has no room for them, the link releases them at once. When the link ends, messages that
wait here are released. Delivered messages stay locked until their lock expires, because SDKs may
settle them on another link.

In the mode receive-and-delete the broker locks messages as well. The link lets the broker delete
the messages that it can write at once, and releases the others. When the broker has deleted them,
the link writes them, even if the client has lowered its credit meanwhile. So a message is not
deleted if the client has no credit for it or accepts only smaller messages, and no message is
delivered twice.

A link with a session ends when the lock of the session expires. The broker refuses a receive that
waits at that moment. For an idle link `check_session` measures the time and asks the broker when
the lock should have expired, because only the broker's clock decides.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.decoder import Buffer
from twinbus.amqp.events import CreditGiven, OutcomeReported
from twinbus.amqp.performatives import (
    ACCEPTED,
    Accepted,
    DeliveryState,
    ErrorCondition,
    Modified,
    Rejected,
    Released,
    SenderSettleMode,
    TransactionalState,
)
from twinbus.amqp.sender_link import SenderLink
from twinbus.entities import DEAD_LETTER_SUFFIX
from twinbus.errors import (
    InvalidArgumentError,
    MessageLockLostError,
    MessagingError,
    SessionLockLostError,
)
from twinbus.limits import (
    MAX_REASON_CHARACTERS,
    MAX_WAIT,
    NEVER_US,
    SERVICE_BUS_FETCH_BYTES,
    SERVICE_BUS_FETCH_MESSAGES,
    SHOWN_LOST,
)
from twinbus.message import BrokeredMessage, token_column, tokens_of
from twinbus.protocol.commands import (
    Disposition,
    GetSessionState,
    Receive,
    ReleaseSession,
    SessionLock,
    Settle,
)
from twinbus.protocol.rows import messages_in
from twinbus.servicebus.conditions import NO_TRANSACTIONS, condition_of, no_modification
from twinbus.servicebus.encoding import write_message
from twinbus.servicebus.work import LinkRequest, Work

NO_WAIT: Final = timedelta(0)
_DEAD_LETTER: Final = "DeadLetterReason", "DeadLetterErrorDescription"
_CANNOT_BE_ENCODED: Final = "CannotBeEncoded"  # the dead-letter reason


class Receiving:
    """The broker's end of a link on which a client receives."""

    def __init__(
        self,
        work: Work,
        link: SenderLink,
        path: str,
        session: SessionLock | None = None,
        lock_us: int = NEVER_US,
    ) -> None:
        self._work = work
        self._lock_us = lock_us  # how long the lock of a session lasts
        self._session_expires_at = work.now + lock_us
        self._link = link
        self.path = path
        self.session = session
        self._deletes = link.snd_settle_mode is SenderSettleMode.SETTLED  # receive-and-delete
        self._is_deleting = False  # the broker deletes messages, which are written afterwards
        self._deleted: deque[list[Buffer]] = deque()  # to be written; their bytes are counted
        self._asked: LinkRequest | None = None
        self._ready: deque[BrokeredMessage] = deque()  # received, but not yet delivered
        self._ready_bytes = 0  # their size, as the connection counts it; 0: not counted
        self._is_ended = False
        self._error: MessagingError | None = None  # ends the link when all deleted are written
        self._has_looked = False  # whether the current drain has made a receive that does not wait

    # -- delivering ----------------------------------------------------------------------------

    def take_credit(self, given: CreditGiven) -> None:
        """Process the credit that the client gives."""
        asked = self._asked
        if asked is not None and (
            self._link.credit < asked.command.max_messages
            # The receive may wait for long; pump() submits another one that does not wait.
            or (given.is_draining and not self._has_looked)
        ):
            self._drop_asked()
        self.pump()

    def pump(self) -> None:
        """Deliver received messages, and receive more while there is credit."""
        link = self._link
        while self._deleted and link.may_send_promised:
            content = self._deleted.popleft()
            self._work.kept_bytes -= sum(map(len, content))
            link.send(content, is_promised=True)
        if self._deletes and not self._delete_ready() and not link.is_draining:
            return  # the next flow of the client may open its window further
        while self._ready and self._may_deliver(self._ready[0]):
            self._deliver()
        self._release_ready()
        if self._ready or self._deleted or self._is_deleting or self._asked is not None:
            return
        if self._is_ended or self._is_unread():
            return
        if self._deletes and link.credit > 0 and not link.may_send:
            return  # nothing could be written before the window opens
        if link.is_draining:
            if link.credit > 0 and not self._has_looked:
                self._has_looked = True
                self._ask(NO_WAIT)
            else:
                self._has_looked = False
                link.drained()
        elif link.credit > 0:
            self._ask(MAX_WAIT)

    def _release_ready(self) -> None:
        """Release messages if the client withdrew its credit, so that other receivers get them."""
        if self._ready and self._link.credit <= 0:
            self._give_up_ready()

    def _keep_ready(self) -> None:
        """Count the bytes of messages that wait here; release them if the key has no room."""
        size = sum([message.size for message in self._ready])
        if self._work.may_keep(size):
            self._count_ready(size)
        else:
            self._give_up_ready()

    def _give_up_ready(self) -> None:
        self._settle([*self._ready], Disposition.RELEASE)
        self._clear_ready()

    def _clear_ready(self) -> None:
        self._ready.clear()
        self._count_ready(0)

    def _count_ready(self, size: int) -> None:
        self._work.kept_bytes += size - self._ready_bytes
        self._ready_bytes = size

    def _delete_ready(self) -> bool:
        """Have the broker delete the messages that can be written now; release the others.

        Return false if there is no room for the first one.
        """
        link, total, has_room = self._link, 0, True
        chosen: list[BrokeredMessage] = []
        contents: list[list[Buffer]] = []
        room = link.session.transfers.peer_window if link.may_send else 0
        try:
            for _ in range(min(len(self._ready), link.credit, room)):
                message = self._ready[0]
                content = self._written(message, is_locked=False)
                if content is not None:
                    size = sum(map(len, content))
                    link.check_size(size)
                    total += size
                    if not self._fits(total):
                        has_room = bool(chosen)
                        break
                    chosen.append(message)
                    contents.append(content)
                self._ready.popleft()
        except MessagingError as error:
            self._error = error
        if chosen:
            link.promise(len(chosen))
            self._is_deleting = True
            tokens = tokens_of([m.lock_token for m in chosen if m.lock_token is not None])
            command = Settle(self.path, tokens, Disposition.COMPLETE)
            self._work.ask(self.path, command, partial(self._take_deleted, chosen, contents))
        elif self._error is not None and not self._is_deleting and not self._deleted:
            self.stop(self._error)
        self._give_up_ready()
        return has_room

    def _take_deleted(
        self, messages: list[BrokeredMessage], contents: list[list[Buffer]], value: Any
    ) -> None:
        """Write the messages that the broker has deleted; end the link if one is not deleted."""
        self._is_deleting = False
        lost: Any = ()
        if isinstance(value, MessagingError):
            self._error = value
            lost = [message.lock_token for message in messages]
            if isinstance(value, MessageLockLostError) and "lock_tokens" in value.facts:
                lost = value.lock_tokens
            else:
                self._settle(messages, Disposition.RELEASE)
        if not self._is_ended:
            for message, content in zip(messages, contents, strict=True):
                if message.lock_token not in lost:
                    self._deleted.append(content)
                    self._work.kept_bytes += sum(map(len, content))
            self.pump()

    def _may_deliver(self, message: BrokeredMessage) -> bool:
        return self._link.may_send and not self._is_unread() and self._fits(message.size)

    def _fits(self, size: int) -> bool:
        """Return whether messages can be written at once, or may wait for the client's window."""
        return self._link.session.transfers.fits(size) or self._work.may_keep(size)

    def _is_unread(self) -> bool:
        """Return whether the client has too many unread bytes to get further messages."""
        if self._link.session.connection.unread_bytes <= SERVICE_BUS_FETCH_BYTES:
            return False
        self._work.is_stalled = True
        return True

    def _ask(self, wait: timedelta) -> None:
        command = Receive(
            self.path,
            min(self._link.credit, SERVICE_BUS_FETCH_MESSAGES),
            wait,
            session=self.session,
            max_bytes=self._work.fetch_bytes,
            takes_rows=True,
        )
        self._asked = self._work.ask(self.path, command, self._take_reply)

    def _take_reply(self, value: Any) -> None:
        self._asked = None
        if isinstance(value, MessagingError):
            self.stop(value)
            return
        self._ready.extend(messages_in(value))
        self.pump()
        if self._ready:
            self._keep_ready()

    def _deliver(self) -> None:
        """Deliver the first message that is ready."""
        message = self._ready.popleft()
        if self._ready_bytes:
            self._count_ready(self._ready_bytes - message.size)
        assert message.lock_token is not None  # every receive locks
        content = self._written(message, is_locked=True)
        if content is None:
            return
        try:
            self._link.send(content, tag=message.lock_token.bytes_le)
        except MessagingError as error:  # too large for the client: others may accept it
            self._ready.appendleft(message)
            self.stop(error)

    def _written(self, message: BrokeredMessage, *, is_locked: bool) -> list[Buffer] | None:
        """Return a delivery in pieces; None if AMQP cannot express the message.

        Such a message would end the link of every receiver. It is therefore dead-lettered, or
        deferred if it is a dead letter already.
        """
        try:
            return write_message(message, is_locked=is_locked)
        except MessagingError as error:
            tokens = tokens_of([message.lock_token] if message.lock_token is not None else [])
            command = Settle(
                self.path, tokens, Disposition.DEAD_LETTER, _CANNOT_BE_ENCODED, error.text
            )
            if self.path.lower().endswith(DEAD_LETTER_SUFFIX.lower()):
                command = Settle(self.path, tokens, Disposition.DEFER)
            self._work.finish(self.path, command)
            return None

    # -- settling ------------------------------------------------------------------------------

    def take_outcome(self, reported: OutcomeReported) -> None:
        """Settle messages as the client requests, and confirm with the same outcome."""
        if isinstance(reported.state, TransactionalState):
            self._refuse(reported, NO_TRANSACTIONS)
            return
        try:
            disposition, reason, description = disposition_of(reported.state)
            for part in _parts(reported):
                tokens = token_column(_tokens_of(part.deliveries))
                command = Settle(self.path, tokens, disposition, reason, description)
                then = _forget if reported.is_settled else partial(self._answer, part)
                self._work.ask(self.path, command, then)
        except AmqpError as error:
            self._refuse(reported, condition_of(error))
        except (MessagingError, ValueError) as error:
            wrong = InvalidArgumentError(
                f"the outcome of a delivery cannot be carried out: {error}"
            )
            self._refuse(reported, condition_of(wrong))

    def _answer(self, reported: OutcomeReported, value: Any) -> None:
        lost: Any = ()
        if isinstance(value, MessageLockLostError) and "lock_tokens" in value.facts:
            lost = value.lock_tokens
        elif isinstance(value, MessagingError):
            self._refuse(reported, condition_of(value))
            return
        for number, tag in reported.deliveries:
            if lost and UUID(bytes_le=tag) in lost:
                self._link.settle(number, Rejected(error=condition_of(value)))
            else:
                self._link.settle(number, _echo(reported.state))

    def _refuse(self, reported: OutcomeReported, error: ErrorCondition) -> None:
        for number, _ in reported.deliveries:
            self._link.settle(number, Rejected(error=error))

    # -- the session ---------------------------------------------------------------------------

    def note_renewal(self) -> None:
        """Take note that the client renews the lock of the session."""
        self._session_expires_at = self._work.now + self._lock_us

    def check_session(self) -> None:
        """Ask whether the session is still locked, if its lock should have expired by now."""
        if self.session is None or self._is_ended or self._work.now < self._session_expires_at:
            return
        self.note_renewal()  # so the next check comes after another lock duration
        if self._asked is None:
            self._work.ask(self.path, GetSessionState(self.path, self.session), self._take_check)

    def _take_check(self, value: Any) -> None:
        if isinstance(value, SessionLockLostError) and not self._is_ended:
            self.stop(value)

    # -- the end -------------------------------------------------------------------------------

    def _drop_asked(self) -> None:
        self._work.drop(self._asked)
        self._asked = None

    def _settle(self, messages: list[BrokeredMessage], how: Disposition) -> None:
        tokens = [message.lock_token for message in messages if message.lock_token is not None]
        if tokens:
            self._work.finish(self.path, Settle(self.path, tokens_of(tokens), how))

    def stop(self, error: MessagingError) -> None:
        """End the link with an error, without waiting for the client to confirm."""
        self._link.detach(condition_of(error))
        self.end()

    def end(self) -> None:
        """Release undelivered messages, and the session."""
        if self._is_ended:
            return
        self._is_ended = True
        self._drop_asked()
        if self.session is not None:
            self._work.finish(self.path, ReleaseSession(self.path, self.session))
        else:
            self._settle([*self._ready], Disposition.RELEASE)
        self._clear_ready()
        self._work.kept_bytes -= sum(len(piece) for content in self._deleted for piece in content)
        self._deleted.clear()


def _parts(reported: OutcomeReported) -> Sequence[OutcomeReported]:
    """Split an outcome into parts so small that an error can list every lost lock."""
    deliveries = reported.deliveries
    if len(deliveries) <= SHOWN_LOST:
        return (reported,)
    return [
        reported._replace(deliveries=deliveries[at : at + SHOWN_LOST])
        for at in range(0, len(deliveries), SHOWN_LOST)
    ]


def _tokens_of(deliveries: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the bytes of the lock tokens of deliveries."""
    if len(deliveries) == 1:
        return _token_of(deliveries[0][1])
    return b"".join([_token_of(tag) for _, tag in deliveries])


def _token_of(tag: bytes) -> bytes:
    """Return the bytes of the lock token in a delivery tag, which has them in little-endian order.

    The same as `UUID(bytes_le=tag).bytes`, without a UUID.
    """
    return tag[3::-1] + tag[5:3:-1] + tag[7:5:-1] + tag[8:]


def disposition_of(
    state: DeliveryState | None,
) -> tuple[Disposition, str | None, str | None]:
    """Return the disposition that a client requests, with reason and description."""
    if isinstance(state, Accepted):
        return Disposition.COMPLETE, None, None
    if isinstance(state, Released):
        return Disposition.RELEASE, None, None
    if isinstance(state, Modified):
        if state.message_annotations:
            raise no_modification(state.message_annotations)
        how = Disposition.DEFER if state.undeliverable_here else Disposition.ABANDON
        return how, None, None
    if isinstance(state, Rejected):
        return (Disposition.DEAD_LETTER, *_reasons(state.error))
    raise InvalidArgumentError(
        f"an outcome of the type {type(state).__name__} settles nothing; send accepted, rejected, "
        "released or modified"
    )


def _reasons(error: ErrorCondition | None) -> tuple[str | None, str | None]:
    info = {} if error is None else error.info or {}
    if not all(name in _DEAD_LETTER for name in info):
        raise no_modification(name for name in info if name not in _DEAD_LETTER)
    found = [info.get(name) for name in _DEAD_LETTER]
    if error is not None and found[1] is None:
        found[1] = error.description
    reason, description = (
        None if text is None else str(text)[:MAX_REASON_CHARACTERS] for text in found
    )
    return reason, description


def _echo(state: DeliveryState | None) -> DeliveryState:
    """Return the outcome that SDKs expect as confirmation: `rejected` without its error."""
    if isinstance(state, Accepted):
        return ACCEPTED
    if isinstance(state, Rejected):
        return Rejected()
    return state if isinstance(state, Modified | Released) else ACCEPTED


def _forget(_: object) -> None:
    """Ignore a reply."""
