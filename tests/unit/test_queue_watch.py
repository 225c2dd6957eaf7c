"""When a syphon lists the backlog queues again, and what that costs."""

from datetime import timedelta

import pytest

from twinbus.errors import CommunicationError
from twinbus.limits import SYPHON_POLL
from twinbus.syphon.queue_watch import QueueWatch

HOUR_S = 3600
POLL_S = int(SYPHON_POLL.total_seconds())


class Secondary:
    """A namespace that counts how often its queues are listed."""

    def __init__(self, *queues: str) -> None:
        self.queues = list(queues)
        self.looks: list[int] = []
        self.now_s = 0

    def find(self) -> list[str]:
        self.looks.append(self.now_s)
        return self.queues

    def play(self, watch: QueueWatch, until_s: int) -> list[str]:
        """Ask the watch once a second; return the queues it found."""
        found: list[str] = []
        while self.now_s < until_s:
            self.now_s += 1
            found += watch.new_queues(self.now_s)
        return found


def test_a_complete_list_of_queues_is_never_read_again() -> None:
    secondary = Secondary("a", "b")
    watch = QueueWatch(["a", "b"], 2, secondary.find)
    assert secondary.play(watch, 24 * HOUR_S) == []
    assert secondary.looks == []


def test_queues_that_a_pairing_creates_a_moment_later_are_found_within_seconds() -> None:
    secondary = Secondary("a")
    watch = QueueWatch(["A"], 3, secondary.find)
    secondary.play(watch, 2)
    secondary.queues += ["b"]
    assert secondary.play(watch, 10) == ["b"]
    secondary.queues += ["c"]
    assert secondary.play(watch, 20) == ["c"]
    assert watch.is_complete


def test_looks_for_a_queue_that_never_appears_cost_less_than_its_polls_would() -> None:
    secondary = Secondary("a")
    watch = QueueWatch(["a"], 2, secondary.find)
    secondary.play(watch, HOUR_S)
    before = len(secondary.looks)
    secondary.play(watch, 25 * HOUR_S)
    polls_of_one_queue = timedelta(days=1) // SYPHON_POLL
    assert len(secondary.looks) - before <= polls_of_one_queue


def test_a_secondary_that_cannot_be_reached_is_asked_less_and_less_often() -> None:
    def fail() -> list[str]:
        raise CommunicationError("down")

    watch = QueueWatch([], 1, fail)
    failures = 0
    for now_s in range(POLL_S):
        try:
            watch.new_queues(now_s)
        except CommunicationError:
            failures += 1
    assert 2 <= failures <= 10


@pytest.mark.parametrize("wanted", [1, 3])
def test_more_queues_than_wanted_are_complete(wanted: int) -> None:
    assert QueueWatch(["a", "b", "c"], wanted, list).is_complete
