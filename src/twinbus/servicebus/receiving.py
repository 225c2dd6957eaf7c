"""A link on which a client receives.

The credit of the client becomes receives that wait at the queue. A reply is delivered as far as the
link and its session take it; what they do not take waits here, and no more is asked for meanwhile.
When the link ends, what waits here is given back; what was delivered stays locked until the lock
lapses, because SDKs settle it on another link then.
"""

from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

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
from twinbus.errors import InvalidArgumentError, MessageLockLostError, MessagingError
from twinbus.limits import (
    MAX_REASON_CHARACTERS,
    MAX_WAIT,
    SERVICE_BUS_FETCH_BYTES,
    SERVICE_BUS_FETCH_MESSAGES,
    SHOWN_LOST,
)
from twinbus.message import BrokeredMessage, to_messages, tokens_of
from twinbus.protocol.commands import (
    Disposition,
    Receive,
    ReceiveMode,
    ReleaseSession,
    SessionLock,
    Settle,
)
from twinbus.servicebus.conditions import NO_TRANSACTIONS, condition_of
from twinbus.servicebus.messages import write_message
from twinbus.servicebus.work import LinkRequest, Work

NO_WAIT: Final = timedelta(0)
_DEAD_LETTER: Final = "DeadLetterReason", "DeadLetterErrorDescription"


class Receiving:
    """The broker's end of such a link."""

    def __init__(
        self, work: Work, link: SenderLink, path: str, session: SessionLock | None = None
    ) -> None:
        self._work = work
        self._link = link
        self.path = path
        self.session = session
        is_settled = link.snd_settle_mode is SenderSettleMode.SETTLED
        self._mode = ReceiveMode.RECEIVE_AND_DELETE if is_settled else ReceiveMode.PEEK_LOCK
        self._asked: LinkRequest | None = None
        self._ready: deque[BrokeredMessage] = deque()  # received, and not yet delivered
        self._is_ended = False
        self._has_looked = False  # what the queue has, since the client began to drain the link

    # -- delivering ----------------------------------------------------------------------------

    def take_credit(self, given: CreditGiven) -> None:
        """Take what the client lets us send."""
        if given.is_draining and not self._has_looked:
            self._drop_asked()  # it waits; what the queue has now is asked for by the pump
        self.pump()

    def pump(self) -> None:
        """Deliver what there is, and ask for more as long as there is credit."""
        link = self._link
        while self._ready and link.may_send and not self._is_unread():
            self._deliver(self._ready.popleft())
        self._release_ready()
        if self._ready or self._asked is not None or self._is_ended or self._is_unread():
            return
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
        """Give back messages that the client has taken its credit from: others may have some."""
        if self._ready and self._link.credit <= 0 and self._mode is ReceiveMode.PEEK_LOCK:
            self._give_back([*self._ready], Disposition.RELEASE)
            self._ready.clear()

    def _is_unread(self) -> bool:
        """Whether the client has not read what was delivered: it gets no more until it has."""
        if self._link.session.connection.unread_bytes <= SERVICE_BUS_FETCH_BYTES:
            return False
        self._work.is_stalled = True
        return True

    def _ask(self, wait: timedelta) -> None:
        command = Receive(
            self.path,
            min(self._link.credit, SERVICE_BUS_FETCH_MESSAGES),
            wait,
            self._mode,
            self.session,
            self._work.fetch_bytes,
        )
        self._asked = self._work.ask(self.path, command, self._take_reply)

    def _take_reply(self, value: Any) -> None:
        self._asked = None
        if isinstance(value, MessagingError):
            self.stop(value)
            return
        self._ready.extend(to_messages(value))
        self.pump()

    def _deliver(self, message: BrokeredMessage) -> None:
        tag = message.lock_token.bytes_le if message.lock_token is not None else None
        try:
            self._link.send(write_message(message), tag=tag)
        except MessagingError:  # larger than the client takes: it gets what comes behind
            self._give_back([message], Disposition.ABANDON)

    # -- settling ------------------------------------------------------------------------------

    def take_outcome(self, reported: OutcomeReported) -> None:
        """Settle messages as the client says, and answer with the same outcome."""
        if isinstance(reported.state, TransactionalState):
            self._refuse(reported, NO_TRANSACTIONS)
            return
        try:
            disposition, reason, description = disposition_of(reported.state)
            for part in _parts(reported):
                tokens = tokens_of([UUID(bytes_le=tag) for _, tag in part.deliveries])
                command = Settle(self.path, tokens, disposition, reason, description)
                then = _forget if reported.is_settled else partial(self._answer, part)
                self._work.ask(self.path, command, then)
        except (MessagingError, ValueError) as error:
            wrong = InvalidArgumentError(f"a message cannot be settled so: {error}")
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

    # -- the end -------------------------------------------------------------------------------

    def _drop_asked(self) -> None:
        self._work.drop(self._asked)
        self._asked = None

    def _give_back(self, messages: list[BrokeredMessage], how: Disposition) -> None:
        tokens = [one.lock_token for one in messages if one.lock_token is not None]
        if tokens:
            self._work.ask(self.path, Settle(self.path, tokens_of(tokens), how), _forget)

    def stop(self, error: MessagingError) -> None:
        """End the link, and say why. The client has no part in that: it may never answer."""
        self._link.detach(condition_of(error))
        self.end()

    def end(self) -> None:
        """Give back what the client has not got, and its session."""
        if self._is_ended:
            return
        self._is_ended = True
        self._drop_asked()
        if self.session is not None:
            self._work.ask(self.path, ReleaseSession(self.path, self.session), _forget)
        else:
            self._give_back([*self._ready], Disposition.RELEASE)
        self._ready.clear()


def _parts(reported: OutcomeReported) -> Iterator[OutcomeReported]:
    """Give an outcome in parts so small that an error can name every lock that was lost."""
    for at in range(0, len(reported.deliveries), SHOWN_LOST):
        yield reported._replace(deliveries=reported.deliveries[at : at + SHOWN_LOST])


def disposition_of(
    state: DeliveryState | None,
) -> tuple[Disposition, str | None, str | None]:
    """Return what a client wants done with a message: how, and why."""
    if isinstance(state, Accepted):
        return Disposition.COMPLETE, None, None
    if isinstance(state, Released):
        return Disposition.RELEASE, None, None
    if isinstance(state, Modified):
        how = Disposition.DEFER if state.undeliverable_here else Disposition.ABANDON
        return how, None, None
    if isinstance(state, Rejected):
        return (Disposition.DEAD_LETTER, *_reasons(state.error))
    raise InvalidArgumentError(f"an outcome of the type {type(state).__name__} settles nothing")


def _reasons(error: ErrorCondition | None) -> tuple[str | None, str | None]:
    info = {} if error is None else error.info or {}
    found = [info.get(name) for name in _DEAD_LETTER]
    if error is not None and found[1] is None:
        found[1] = error.description
    reason, description = (
        None if one is None else str(one)[:MAX_REASON_CHARACTERS] for one in found
    )
    return reason, description


def _echo(state: DeliveryState | None) -> DeliveryState:
    """Return the outcome that SDKs expect back; a rejected one with an error would be a failure."""
    if isinstance(state, Rejected):
        return Rejected()
    return state if isinstance(state, Modified | Released) else ACCEPTED


def _forget(_: object) -> None:
    """Take a reply that nobody waits for."""
