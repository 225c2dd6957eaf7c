"""Dead-letter reasons: many messages share a reason, so rows contain a small number instead."""

from dataclasses import dataclass

from twinbus.broker.store.commit import Entries, Fact
from twinbus.broker.undo import Undo

TTL_EXPIRED = "TTLExpiredException"
MAX_DELIVERY_COUNT_EXCEEDED = "MaxDeliveryCountExceeded"
SESSION_ID_MISSING = "SessionIdIsMissing"
TOO_MANY_FORWARDS = "TooManyForwards"
RULE_FAILED = "RuleFailed"
REASON_LOST = "ReasonLost"


@dataclass(frozen=True, slots=True)
class Death:
    """Why a message was dead-lettered, and by which entity."""

    reason: str | None
    description: str | None
    source: str  # path of the entity

    @property
    def size(self) -> int:
        """The size of its texts for quotas."""
        return sum(len(text.encode()) for text in (self.reason, self.description) if text)


class Deaths:
    """The distinct dead-letter reasons of a namespace, by number."""

    def __init__(self, undo: Undo | None = None) -> None:
        self._undo = undo or Undo()
        self._deaths: dict[int, Death] = {}
        self._numbers: dict[Death, int] = {}
        self._next = 0

    def __getitem__(self, number: int) -> Death:
        return self._deaths[number]

    def number(self, death: Death, entries: Entries) -> int:
        """Return the number of a reason; a new reason is also added to `entries`."""
        known = self._numbers.get(death)
        if known is None:
            known = self._next
            self.learn(known, death)
            self._undo.note(lambda: self.forget(known))
            entries.facts.append(_fact(known, death))
        return known

    def learn(self, number: int, death: Death) -> None:
        """Add a reason with a known number."""
        self._deaths[number] = death
        self._numbers[death] = number
        self._next = max(self._next, number + 1)

    def forget(self, number: int) -> None:
        """Remove a new reason, because its command failed."""
        del self._numbers[self._deaths.pop(number)]

    def keep(self, numbers: set[int]) -> None:
        """Remove all reasons except these, which messages still have."""
        self._deaths = {n: death for n, death in self._deaths.items() if n in numbers}
        self._numbers = {death: n for n, death in self._deaths.items()}

    def replace_lost(self, numbers: set[int]) -> None:
        """Give a reason to messages whose own the log does not contain, because it was damaged."""
        for number in sorted(numbers - self._deaths.keys()):
            if number >= 0:
                text = f"the log is damaged and does not contain reason {number}"
                self.learn(number, Death(REASON_LOST, text, ""))

    def facts(self) -> list[Fact]:
        """Return all reasons in the form of the log."""
        return [_fact(number, death) for number, death in self._deaths.items()]


def _fact(number: int, death: Death) -> Fact:
    return Fact.of("death", number, [death.reason, death.description, death.source])
