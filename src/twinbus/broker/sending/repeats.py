"""Recognises repeated messages by their numbers, and by their ids, so that each is enqueued once.

A send may have origins, which say who numbered its messages. The broker remembers which numbers of
each origin it accepted (transfers.py), and writes them in the same record as the messages.

An entity with duplicate detection also remembers message ids (duplicates.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinbus.broker.entities.duplicates import DuplicateHistory
from twinbus.broker.entities.entity import Entity
from twinbus.broker.sending.transfers import ANY_KEY, Transfers
from twinbus.broker.store.commit import (
    Commit,
    Effect,
    Transferred,
    owner_fact,
    transferred_fact,
)
from twinbus.intervals import runs
from twinbus.limits import KNOWN_GAPS
from twinbus.protocol.commands import Origin
from twinbus.protocol.keys import Claim
from twinbus.protocol.origins import OriginKind, origin_kind
from twinbus.protocol.requests import Request

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)  # not frozen, which would take three times as long: one is made per send
class _Taken(Effect):
    """Numbers of an origin that a send contains."""

    transfers: Transfers
    taken: Transferred

    def durable(self) -> None:
        """Remember the numbers."""
        self.transfers.take(self.taken.source, self.taken.intervals, self.taken.owner)


@dataclass(slots=True)
class _Done(_Taken):
    """The number of a command whose effect stays even if the log refuses this record.

    An example is the cancellation of scheduled messages, which is a kept entry.
    """

    commit: Commit

    def refused(self) -> None:
        """Remember the number anyway, and write it with the next record."""
        taken, facts = self.taken, self.commit.kept.facts
        if taken.is_new:
            facts.append(owner_fact(taken.source, taken.owner))
        facts.append(transferred_fact(taken.source, taken.intervals))
        self.durable()


class Repeats:
    """Knows which numbers earlier turns and this turn have accepted."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def own_origins(self, request: Request, commit: Commit) -> list[Origin]:
        """Return the origins of a send that its principal may use; ignore the others.

        A sender belongs to the key that used it first. Only messages that are brought home may have
        a sender of another key: the primary may have accepted them from that sender before.
        """
        origins = list(origins_of(request.command.origin))
        if is_brought_home(request.command.origin):
            return origins
        user = request.principal.id
        return [origin for origin in origins if self.may_use(origin, user, commit)]

    def may_use(self, origin: Origin, user: str, commit: Commit) -> bool:
        """Return whether an origin is new or belongs to this key."""
        return self._owner(origin.source, commit) in (None, ANY_KEY, user)

    def _owner(self, source: str, commit: Commit) -> str | None:
        owner = self._transfers.owner(source)
        return commit.staged_owner(source) if owner is None else owner

    def continued(self, origin: Origin, user: str, commit: Commit) -> Transferred | None:
        """Return the numbers of a send if they continue those of a known sender; otherwise None.

        This fast check serves nearly every send. It combines `is_ahead`, `may_use` and `taken`.
        """
        numbers = origin.numbers
        if commit.transferred or type(numbers) is not range:
            return None
        if not self._transfers.goes_on(origin.source, numbers.start, user):
            return None
        return Transferred(origin.source, user, False, ((numbers.start, numbers.stop - 1),))

    def leave_out(self, origins: Sequence[Origin], wanted: Mask, commit: Commit) -> None:
        """Clear the rows in `wanted` that were accepted from one of these origins before."""
        for origin in origins:
            if not self.is_ahead(origin, commit):
                wanted &= self.untaken(origin, commit)

    def is_ahead(self, origin: Origin, commit: Commit) -> bool:
        """Return True if all numbers are above the accepted ones, and therefore new.

        This check is cheap and nearly always True. After False, `untaken` must decide.
        """
        if not isinstance(origin.numbers, range):
            return False
        staged = commit.staged(origin.source)
        if staged is not None and not staged.ends_before(origin.numbers.start):
            return False
        return self._transfers.end_before(origin.source, origin.numbers.start)

    def untaken(self, origin: Origin, commit: Commit) -> Mask:
        """Return which rows were not accepted from their origin, neither before nor in this turn.

        Of rows with equal numbers, only the first counts.
        """
        staged = commit.staged(origin.source)
        numbers = np.asarray(origin.numbers, np.int64)
        fresh = np.zeros(len(numbers), bool)
        fresh[np.unique(numbers, return_index=True)[1]] = True
        fresh &= ~self._transfers.taken(origin.source, numbers)
        return fresh if staged is None else fresh & ~staged.contains(numbers)

    def note_send(self, origin: Origin, request: Request, commit: Commit) -> None:
        """Remember all numbers of an origin of a send, when the commit is durable."""
        is_home = is_brought_home(request.command.origin)
        user = ANY_KEY if is_home else request.principal.id
        self.note(self.taken(origin, user, commit, bounded_key(request)), commit)

    def note(self, taken: Transferred, commit: Commit) -> None:
        """Remember numbers when the commit is durable."""
        commit.note_transferred(taken)
        commit.effects.append(_Taken(self._transfers, taken))

    def taken(self, origin: Origin, user: str, commit: Commit, first_user: str = "") -> Transferred:
        """Return the numbers of an origin with its owner.

        A new sender or sink belongs to `user`. A new queue counts for `first_user`, the access key
        of the request. `first_user` is empty if the memory of this key has no bound
        (see `bounded_key`).
        """
        source, numbers = origin.source, origin.numbers
        if isinstance(numbers, range):
            intervals = [(numbers[0], numbers[-1])]
        else:
            intervals = runs(np.unique(np.asarray(numbers, np.int64)))
        kind, known = origin_kind(source), self._owner(source, commit)
        if kind is OriginKind.TRANSFER:
            is_new = bool(first_user) and known is None and not self._transfers.knows(source)
            return Transferred(source, first_user if is_new else "", is_new, intervals)
        owner = ""
        if kind in (OriginKind.SENDER, OriginKind.SINK):
            owner = user if known is None else known
        return Transferred(source, owner, known is None and bool(owner), intervals)

    # -- numbered commands ---------------------------------------------------------------------

    def was_done_before(self, origin: Origin | None, request: Request, commit: Commit) -> bool:
        """Return whether the broker has executed the command with this origin before."""
        if origin is None or not self.may_use(origin, request.principal.id, commit):
            return False
        return not self.untaken(origin, commit).any()

    def note_done(self, origin: Origin | None, request: Request, commit: Commit) -> None:
        """Remember a numbered command whose effect stays even if the log refuses this record."""
        if origin is None or not self.may_use(origin, request.principal.id, commit):
            return
        taken = self.taken(origin, request.principal.id, commit)
        commit.note_transferred(taken)
        commit.effects.append(_Done(self._transfers, taken, commit))


def origins_of(origin: Origin | None) -> Iterator[Origin]:
    """Yield an origin and the further origins of the same messages."""
    while origin is not None:
        yield origin
        origin = origin.also


def is_brought_home(origin: Origin | None) -> bool:
    """Return whether messages come from a backlog queue or a spill store."""
    return origin is not None and origin_kind(origin.source) in (
        OriginKind.TRANSFER,
        OriginKind.SPILL,
    )


def bounded_key(request: Request) -> str:
    """Return the key of a request if its memory of transfers is bounded; otherwise ""."""
    principal = request.principal
    return "" if principal.may(Claim.TRANSFER, None) else principal.id


def has_many_gaps(origin: Origin) -> bool:
    """Return whether the numbers have more gaps than the broker remembers of a sender."""
    if isinstance(origin.numbers, range) or len(origin.numbers) <= KNOWN_GAPS:
        return False
    return run_count(origin) > KNOWN_GAPS + 1


def run_count(origin: Origin) -> int:
    """Return how many intervals the numbers need in their order; sorted, they may need fewer."""
    if isinstance(origin.numbers, range):
        return 1
    return 1 + int(np.count_nonzero(np.diff(np.asarray(origin.numbers)) != 1))


# -- duplicate detection ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _IdsNoted(Effect):
    """Message ids that duplicate detection has added."""

    history: DuplicateHistory
    ids: Sequence[str]

    def refused(self) -> None:
        """Remove the ids."""
        self.history.withdraw(self.ids)


def fresh_ids(entity: Entity, ids: Sequence[str | None], now: int, commit: Commit) -> list[bool]:
    """Return which message ids are new for duplicate detection, and remember these."""
    history = entity.history
    assert history is not None
    fresh = history.fresh(ids, now)
    noted = [
        message_id
        for message_id, is_new in zip(ids, fresh, strict=True)
        if is_new and message_id is not None
    ]
    if noted:
        commit.history.append((entity.number, noted, now))
        commit.effects.append(_IdsNoted(history, noted))
    return fresh
