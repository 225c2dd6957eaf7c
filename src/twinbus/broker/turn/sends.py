"""Sends: executes the sends of a turn, entity by entity, and the sends that were spilled before.

All sends of a turn to one entity are executed together, as one batch of the intake
(sending/intake.py). If an error makes them fail together, they are executed one by one, so that
only the send that causes the error fails. A send is refused if its entity does not accept messages,
if memory or storage is full, or if a rate is exceeded. Spilled sends were acknowledged before, so
they are not refused for these reasons.

The namespace calls this in a turn, after all other commands of the turn; spilling.py calls it for
spilled sends.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from twinbus.broker.entities.directory import Directory
from twinbus.broker.entities.entity import Entity
from twinbus.broker.entities.topic import Subscription
from twinbus.broker.sending.intake import Intake, SendRequest
from twinbus.broker.store.commit import Commit
from twinbus.broker.turn.isolation import Isolation, drop_frames
from twinbus.broker.turn.overload import OverloadGuard
from twinbus.errors import InvalidOperationError, MessagingError, ServerBusyError
from twinbus.message import sizes
from twinbus.protocol import commands as c
from twinbus.protocol.keys import Claim
from twinbus.protocol.meter import (
    SEND,
    Meter,
    Metered,
    load_of_settled,
    load_of_sizes,
    purpose_of_send,
)
from twinbus.protocol.operations import Load, Operation
from twinbus.protocol.requests import Request


class Sends:
    """Executes sends, and the command that cancels scheduled messages."""

    def __init__(
        self,
        directory: Directory,
        intake: Intake,
        overload: OverloadGuard,
        isolation: Isolation,
        meter: Meter,
    ) -> None:
        self._directory = directory
        self._intake = intake
        self._overload = overload
        self._isolation = isolation
        self._meter = meter

    def execute(self, requests: list[SendRequest], now: int, commit: Commit) -> None:
        """Execute the sends of a turn to one entity."""
        path = requests[0].command.path
        try:
            entity = self.sendable(path)
            self._overload.check_room(now)
        except Exception as error:  # noqa: BLE001 - an error must not affect the rest of the turn
            refusal = self._isolation.report(error, f"a send to {path}")
            for request in requests:
                self._intake.refuse(request, refusal, commit)
            return
        if self._overload.throttle.limits_rates:
            requests = [
                request for request in requests if self._is_within_rate(request, now, commit)
            ]
        if requests:
            entity.note_use(now)
            self._take(entity, requests, now, commit)

    def _take(self, entity: Entity, requests: list[SendRequest], now: int, commit: Commit) -> None:
        """Execute sends together; if an exception is raised, execute them one by one."""
        failure = self._isolation.attempt(
            partial(self._intake.take, entity, requests, now, commit), commit
        )
        if failure is None:
            return
        if len(requests) == 1:
            error = self._isolation.report(failure, f"a send to {entity.description.path}")
            self._intake.refuse(requests[0], error, commit)
            return
        drop_frames(failure)
        for request in requests:
            self._take(entity, [request], now, commit)

    def _is_within_rate(self, request: SendRequest, now: int, commit: Commit) -> bool:
        """Return whether a send is below the thresholds of rates; refuse it if not."""
        try:
            self._overload.check_rate(request.command.path, request.principal, now)
        except ServerBusyError as error:
            self._intake.refuse(request, error, commit)
            return False
        return True

    def sendable(self, path: str) -> Entity:
        """Return the entity of a path; raise if it does not accept messages."""
        entity = self._directory.entity(path)
        if entity.accepts_sends:
            return entity
        if isinstance(entity, Subscription):
            raise InvalidOperationError(
                f"{path} is a subscription, which accepts no sends; send to its topic", path=path
            )
        entity.check_send()
        return entity

    def check_send(self, command: c.Send) -> pa.RecordBatch:
        """Return the messages of a send as a batch; raise if the send must be refused."""
        return self._intake.check(self.sendable(command.path), command)

    def meter_refused(self, send: c.Send, error: MessagingError) -> None:
        """Meter a send that neither the log nor the spill store accepted."""
        purpose = purpose_of_send(send)
        self._meter.count(
            Operation(self._directory.metered_path(send.path), SEND, purpose, error.code, Load())
        )

    def meter_spilled(self, send: c.Send, batch: pa.RecordBatch) -> None:
        """Meter a send that the spill store accepted."""
        path, load = self._directory.metered_path(send.path), load_of_sizes(sizes(batch))
        self._meter.count(Operation(path, SEND, purpose_of_send(send), "ok", load))

    def take_spilled(self, command: c.Send, owner: str, now: int, commit: Commit) -> None:
        """Execute a spilled send: it was acknowledged, so neither throttling nor quota applies.

        `owner` is the id of the key that sent it.
        """
        entity = self._directory.find(command.path)
        if entity is not None:  # otherwise it was deleted, with its messages
            entity.note_use(now)
            request = Request(command, _Sender(owner))
            self._intake.take_acknowledged(entity, request, now, commit)

    def cancel_scheduled(
        self, command: c.CancelScheduled, request: Request, now: int, commit: Commit
    ) -> Any:
        """Cancel scheduled messages; a repetition of the same command succeeds, too."""
        entity = self._directory.entity(command.path)
        entity.note_use(now)
        if not self._intake.repeats.was_done_before(command.origin, request, commit):
            entity.queue.cancel(np.asarray(command.sequence_numbers, np.int64), commit)
            self._intake.repeats.note_done(command.origin, request, commit)
        return Metered(None, load_of_settled(len(command.sequence_numbers)))


@dataclass(frozen=True, slots=True)
class _Sender:
    """The principal of a spilled send: it has the id of the key that sent it, but no claims."""

    id: str

    def may(self, claim: Claim, path: str | None) -> bool:  # noqa: ARG002
        """Return False."""
        return False
