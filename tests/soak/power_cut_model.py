"""What a broker acknowledged, as an exact small model, and what a disk may hold after a power cut.

Each copy of a message (one per queue or subscription) has a set of fates it may have on the disk.
An acknowledged send or settlement leaves one fate. A request without an answer adds a fate that
stays until somebody looks at the disk. What is seen in memory is on the disk when the log has
written a record since.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from twinbus.entities import DEAD_LETTER_SUFFIX
from twinbus.message import APPLICATION_FIELDS, BrokeredMessage, MessageState
from twinbus.protocol.commands import Send


class BrokenPromiseError(AssertionError):
    """The broker did not keep what it acknowledged."""


class KnownLimitError(Exception):
    """What happened is known to be possible, and the model cannot follow it."""


class Fate(Enum):
    """Where a copy of a message is."""

    ABSENT = "absent"
    ACTIVE = "active"  # or locked or leased
    DEFERRED = "deferred"
    SCHEDULED = "scheduled"
    DEAD = "dead"  # in the dead-letter queue


@dataclass(eq=False, slots=True)
class Copy:
    """One message in one queue, with its dead-letter queue."""

    message: BrokeredMessage
    path: str
    due_us: int = 0  # of a scheduled one
    possible: set[Fate] = field(default_factory=lambda: {Fate.ABSENT})  # on the disk
    latest: Fate = Fate.ABSENT  # in the broker's memory
    is_sure: bool = True  # the broker's memory is known
    since: int = 0  # the last record when `latest` became so
    is_enqueued: bool | None = False  # None: nobody knows
    may_double: bool = False  # it was spilled after a sync failed: the record may be there as well

    def fates(self, now_us: int) -> set[Fate]:
        """Return what may be seen of it now: what was scheduled and is due has become active."""
        if self.due_us > now_us or Fate.SCHEDULED not in self.possible:
            return self.possible
        return self.possible - {Fate.SCHEDULED} | {Fate.ACTIVE}

    @property
    def first_fate(self) -> Fate:
        """Where it is when it was sent."""
        return Fate.SCHEDULED if self.due_us else Fate.ACTIVE


@dataclass(eq=False, slots=True)
class Lease:
    """An acknowledged lease and the messages it was given for."""

    path: str
    epoch: int
    until_us: int
    ids: dict[int, str]  # by sequence number
    is_sure: bool = True  # False: another client may have released it


class Register:
    """Values by key: the last acknowledged one, or others of which nobody knows."""

    def __init__(self) -> None:
        self._possible: dict[Any, list[Any]] = {}

    def put(self, key: Any, value: Any) -> None:
        """Note an acknowledged value; None: there is none."""
        self._possible[key] = [value]

    def may_be(self, key: Any, value: Any) -> None:
        """Note a value whose request was not answered."""
        self._possible[key] = [*self._possible.get(key, [None]), value]

    def check(self, what: str, found: Mapping[Any, Any]) -> None:
        """Compare with what is there; from then on that is certain."""
        for key in self._possible.keys() | found.keys():
            value, possible = found.get(key), self._possible.get(key, [None])
            if value not in possible:
                raise BrokenPromiseError(f"{what} {key}: found {value!r}, expected {possible!r}")
            self._possible[key] = [value]

    def known(self) -> list[Any]:
        """Return every key that ever had a value."""
        return list(self._possible)

    def latest(self) -> dict[Any, Any]:
        """Return the values that are there for certain."""
        single = {key: values[0] for key, values in self._possible.items() if len(values) == 1}
        return {key: value for key, value in single.items() if value is not None}


class Model:
    """Everything that was acknowledged since the first start."""

    def __init__(self) -> None:
        self.copies: dict[tuple[str, str], Copy] = {}  # by path and message id
        self.entities, self.keys, self.states = Register(), Register(), Register()
        self.leases: dict[int, Lease] = {}
        self.transfers: list[Send] = []  # acknowledged
        self.unanswered: list[Send] = []  # sends that may be repeated
        self.loose: Counter[str] = Counter()  # messages that unanswered requests may have deleted
        self._numbers: dict[str, dict[int, str]] = {}  # path -> sequence number -> message id
        self._origins: dict[tuple[str, int], str] = {}
        self._pending: set[Copy] = set()
        self.acknowledged = self.settled = 0

    # -- what happens --------------------------------------------------------------------------

    def add(self, message: BrokeredMessage, path: str, due_us: int) -> Copy:
        """Return a copy that is about to be sent, or that was before."""
        return self.copies.setdefault(
            (path, message.message_id), Copy(message, path, due_us=due_us)
        )

    def is_durable(self, copy: Copy, fate: Fate) -> None:
        """Note a fate that was acknowledged from the disk."""
        copy.possible, copy.latest, copy.is_sure = {fate}, fate, True
        self._pending.discard(copy)

    def taken_in(self, copy: Copy) -> None:
        """Note an acknowledged send; a repeated one changes nothing."""
        self.acknowledged += 1
        if not copy.is_enqueued:
            self.is_durable(copy, copy.first_fate)
        copy.is_enqueued = True

    def may_be_taken_in(self, copy: Copy) -> None:
        """Note a send without an answer."""
        if not copy.is_enqueued:
            copy.is_enqueued = None
            self.may_be(copy, copy.first_fate)

    def moves(self, copy: Copy, fate: Fate) -> None:
        """Note an acknowledged settlement."""
        self.is_durable(copy, fate)
        self.settled += 1

    def may_be(self, copy: Copy, fate: Fate) -> None:
        """Note a request without an answer."""
        copy.possible = copy.possible | {fate}
        copy.is_sure = False

    def written(self, record: int) -> None:
        """Note that the log holds everything up to this record, and memory is not ahead of it."""
        for copy in [copy for copy in self._pending if copy.is_sure and copy.since < record]:
            self.is_durable(copy, copy.latest)

    def forget_memory(self) -> None:
        """Note that the broker ended: what it answered before it was written may not be."""
        for copy in self._pending:
            copy.is_sure = False
        self._pending.clear()

    # -- what is seen --------------------------------------------------------------------------

    def delivered(self, path: str, message: BrokeredMessage, record: int, now_us: int) -> Copy:
        """Check a message that the broker delivers or shows; return its copy."""
        copy = self._known(path, message)
        fate = _fate_of(path, message)
        assert message.sequence_number is not None
        self.check_number(path, message.sequence_number, message.message_id)
        if copy.is_sure and fate not in {copy.latest, *copy.fates(now_us)}:
            _check_limit(copy)
            raise BrokenPromiseError(
                f"{path}: {message.message_id} is {fate.value}, expected {_names(copy.possible)}"
            )
        copy.is_enqueued = True
        if not copy.is_sure:
            copy.latest, copy.is_sure, copy.since = fate, True, record
            self._pending.add(copy)
        return copy

    def _known(self, path: str, message: BrokeredMessage) -> Copy:
        copy = self.copies.get((_home(path), message.message_id))
        if copy is None:
            raise BrokenPromiseError(f"{path} has a message that nobody sent: {message}")
        for name in APPLICATION_FIELDS:
            sent, found = getattr(copy.message, name), getattr(message, name)
            if sent != found:
                raise BrokenPromiseError(
                    f"{path}: {name} of {message.message_id} is {found!r:.80}, not {sent!r:.80}"
                )
        return copy

    def check_number(self, path: str, number: int, message_id: str) -> None:
        """Check that a sequence number belongs to one message."""
        known = self._numbers.setdefault(path, {}).setdefault(number, message_id)
        if known != message_id:
            raise BrokenPromiseError(f"{path}: number {number} was {known}, now {message_id}")

    def check_origin(self, origin: str, number: int, message_id: str) -> None:
        """Check that a queue, as an origin of transfers, names one message by a number."""
        known = self._origins.setdefault((origin, number), message_id)
        if known != message_id:
            raise BrokenPromiseError(f"{origin}: number {number} was {known}, now {message_id}")

    def highest(self, path: str) -> int:
        """Return the highest number that a message of a path is known to have had."""
        return max(self._numbers.get(path, {}), default=0)

    def check(self, found: Mapping[str, Iterable[BrokeredMessage]], now_us: int) -> None:
        """Compare with all messages on a disk, by path; from then on their fates are certain."""
        seen: dict[tuple[str, str], list[Fate]] = {}
        for path, messages in found.items():
            for message in messages:
                self._known(path, message)
                fates = seen.setdefault((_home(path), message.message_id), [])
                fates.append(_fate_of(path, message))
        lost: Counter[str] = Counter()
        for (path, message_id), copy in self.copies.items():
            fates = seen.get((path, message_id), [Fate.ABSENT])
            if len(fates) > 1:
                _check_limit(copy)
                raise BrokenPromiseError(f"{path}: {message_id} is there {len(fates)} times")
            if fates[0] not in copy.fates(now_us):
                lost[path] += 1
                if fates[0] is not Fate.ABSENT or lost[path] > self.loose[path]:
                    raise BrokenPromiseError(
                        f"{path}: {message_id} is {fates[0].value}, expected "
                        f"{_names(copy.fates(now_us))}"
                    )
            if copy.is_enqueued is None or fates[0] is not Fate.ABSENT:
                copy.is_enqueued = fates[0] is not Fate.ABSENT
            is_due = Fate.SCHEDULED in copy.possible and fates[0] is Fate.ACTIVE
            self.is_durable(copy, fates[0])
            if is_due:  # on the disk it may still wait for its time
                copy.possible = {Fate.SCHEDULED, Fate.ACTIVE}
        self.loose.clear()


def _check_limit(copy: Copy) -> None:
    if copy.may_double:
        raise KnownLimitError(f"{copy.path}: {copy.message.message_id} is in the log and spilled")


def _home(path: str) -> str:
    return path.removesuffix(DEAD_LETTER_SUFFIX)


def _fate_of(path: str, message: BrokeredMessage) -> Fate:
    if path.endswith(DEAD_LETTER_SUFFIX):
        return Fate.DEAD
    if message.state is MessageState.DEFERRED:
        return Fate.DEFERRED
    return Fate.SCHEDULED if message.state is MessageState.SCHEDULED else Fate.ACTIVE


def _names(fates: Iterable[Fate]) -> str:
    return " or ".join(sorted(fate.value for fate in fates))
