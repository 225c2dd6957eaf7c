"""A command fails alone: whatever a part of the broker raises, the rest goes on as if it had not.

For each command, timer and waiting receiver, the n-th call of any part of the broker raises, for
every n there is, before or after the part has done its work. Afterwards nothing of the command is
there, others of its turn are answered, the broker has not restarted, and the same command works.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.contracts.words import (
    DEAD,
    QUEUE,
    bodies,
    message,
    peek,
    queue,
    receive_one,
    send,
    settle,
    take,
)
from tests.inside import error_of, value_of
from tests.scenarios.broken_parts import (
    BrokenParts,
    differences,
    late_timers,
    queue_state,
    reopened,
    state_of,
)
from tests.scenarios.command_stories import MINUTE, STORIES, TIMERS, Story
from tests.scenarios.site import Site
from twinbus.broker.sending.routing import Router
from twinbus.broker.store.commit import Commit
from twinbus.broker.store.storage import DiskStorage
from twinbus.errors import CommandFailedError
from twinbus.message import to_messages
from twinbus.protocol import commands as c
from twinbus.protocol.requests import BlockingRequest
from twinbus.protocol.table import ROWS

FULL, EMPTY = "bystander", "bystander-too"
BYSTANDERS = (FULL, EMPTY)
BOTH = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, after: bool) -> BrokenParts:
    return BrokenParts(monkeypatch, after=after)


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Site]]:
    """Make sites, each with two queues of bystanders. No power fails here: syncs take no time."""
    monkeypatch.setattr(DiskStorage, "sync", lambda *_: None)
    monkeypatch.setattr(DiskStorage, "sync_directory", lambda *_: None)
    made: list[Site] = []

    def make() -> Site:
        site = Site(tmp_path / str(len(made)), segment_bytes=100_000)
        made.append(site)
        for path in BYSTANDERS:
            queue(site, path)
        send(site, "x", path=FULL)
        return site

    yield make
    for site in made:
        site.embedded.close()
        shutil.rmtree(site.directory)  # hundreds of them would fill a disk


def together(site: Site, *commands: c.Command[Any]) -> list[BlockingRequest]:
    """Hand commands over at once: they share a turn."""
    calls = [BlockingRequest(command) for command in commands]
    site.embedded.hand_over(calls)
    return calls


def troubles(site: Site) -> list[str]:
    """Return what is wrong with the broker itself."""
    if site.engine.is_healing:
        return [f"the broker is down: {site.engine.trouble}"]
    found = [f"{site.engine.restarts} restarts"] if site.engine.restarts else []
    return [*found, *site.engine.namespace.faults(), *late_timers(site)]


def failed_alone(call: BlockingRequest) -> list[str]:
    error = error_of(call) if call.done else None
    if isinstance(error, CommandFailedError) and "restarts" not in error.text:
        return []
    answer = error if call.done else "no answer"
    return [f"it should have failed alone, but was answered with {answer!r:.100}"]


def succeeded(what: str, call: BlockingRequest) -> list[str]:
    answer = error_of(call) if call.done else "no answer"
    return [] if answer is None else [f"{what}: {answer!r:.100}"]


def state(site: Site) -> dict[str, Any]:
    return state_of(site.engine.namespace, without=BYSTANDERS)


# -- commands --------------------------------------------------------------------------------------


def test_every_command_has_a_story(sites: Callable[[], Site]) -> None:
    assert {type(story(sites())) for story in STORIES.values()} == {row.command for row in ROWS}


def broken_at(at: int, story: Story, site: Site, parts: BrokenParts, folder: Path) -> list[str]:
    """Let the command of a story meet a fault; return what is not as it should be then."""
    command = story(site)
    before, on_disk = state(site), reopened(site, folder, without=BYSTANDERS)
    with parts.breaking(at, lambda meant: _is(meant, command)):
        peeked, failed, received, sent = together(
            site,
            c.Peek(FULL),
            command,
            c.Receive(FULL, mode=c.ReceiveMode.RECEIVE_AND_DELETE),
            c.Send(EMPTY, [message("innocent")]),
        )
    if not parts.met:
        return _finished(site, command, failed)
    found = failed_alone(failed)
    for what, call in (("peek", peeked), ("receive", received), ("send", sent)):
        found += succeeded(f"the {what} of a bystander", call)
    found += troubles(site) + differences(before, state(site))
    found += differences(on_disk, reopened(site, folder, without=BYSTANDERS))
    [repeated] = together(site, command)
    return found + _finished(site, command, repeated)


def _is(meant: Any, command: c.Command[Any]) -> bool:
    """Whether what is decided is this command: alone, or among the sends to one entity."""
    return meant is command or (
        isinstance(meant, list) and any(asked.command is command for asked in meant)
    )


def _finished(site: Site, command: c.Command[Any], call: BlockingRequest) -> list[str]:
    """Return what is wrong with a command that met no fault: it is answered, or waits."""
    if getattr(command, "wait", None) and not call.done:
        return troubles(site)
    return succeeded("the command itself", call) + troubles(site)


@BOTH
@pytest.mark.parametrize("story", STORIES)
def test_a_command_that_meets_a_fault_fails_alone_and_works_when_repeated(
    sites: Callable[[], Site], parts: BrokenParts, story: str, tmp_path: Path
) -> None:
    twin = sites()
    together(twin, STORIES[story](twin))
    expected = soon_and_later(twin)
    found: list[str] = []
    for at in count(1):
        site = sites()
        wrong = broken_at(at, STORIES[story], site, parts, tmp_path / "copy")
        for when, was, now in zip(("soon", "later"), expected, soon_and_later(site), strict=True):
            wrong += [
                f"{when} after it worked, {difference}" for difference in differences(was, now)
            ]
        found += [f"{parts.met or 'no fault'}: {item}" for item in wrong + troubles(site)]
        if not parts.met:
            break
    assert at > 1, "the command met no part that can break"
    assert not found, "\n".join(found)


def soon_and_later(site: Site) -> list[dict[str, Any]]:
    """Return what queues hold now, and after locks and leases have lapsed; without numbers."""
    found = []
    for minutes in (0, 6):
        site.wait(minutes=minutes)
        queues = site.engine.namespace.directory.queues()
        found.append(
            {
                queue.path: queue_state(queue, exactly=False)
                for queue in queues
                if not queue.path.startswith(FULL)
            }
        )
    return found


# -- several sends to one queue --------------------------------------------------------------------

POISON = b"poison"


@pytest.fixture
def poisonous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch that holds a certain message break the broker, after it was taken in."""
    add_batch = Commit.add_batch

    def fail(self: Commit, batch: Any, *target: Any) -> int:
        number = add_batch(self, batch, *target)
        rows = to_messages(batch) if isinstance(batch, pa.RecordBatch) else batch.messages
        if POISON in [message.body for message in rows]:
            raise RuntimeError("a message nobody can store")
        return number

    monkeypatch.setattr(Commit, "add_batch", fail)


@pytest.mark.usefixtures("poisonous")
@pytest.mark.parametrize(
    "settings",
    [{}, {"requires_duplicate_detection": True}, {"requires_session": True}],
    ids=["plain", "duplicates", "sessions"],
)
@pytest.mark.parametrize("origin", [None, "sender/0123456789abcdef", "backlog/0#1.x"])
def test_a_send_that_fails_leaves_the_other_sends_to_its_queue_alone(
    sites: Callable[[], Site], settings: dict[str, Any], origin: str | None
) -> None:
    site = sites()
    queue(site, **settings)
    sent = [
        c.Send(
            QUEUE,
            [message(body, message_id=body, session_id="s")],
            None if origin is None else c.Origin(origin, [number]),
        )
        for number, body in enumerate(["a", "poison", "b"])
    ]
    before, failed, after = together(site, *sent)
    assert failed_alone(failed) == []
    assert succeeded("before", before) + succeeded("after", after) + troubles(site) == []
    assert bodies(peek(site)) == ["a", "b"]
    repeated = c.Send(QUEUE, [message("good", message_id="poison", session_id="s")], sent[1].origin)
    assert list(site.ask(repeated).sequence_numbers) != [0]
    assert bodies(peek(site)) == ["a", "b", "good"]


# -- timers ----------------------------------------------------------------------------------------

TARGET, OTHER = "target", "unharmed"


@BOTH
@pytest.mark.parametrize("timer", TIMERS)
def test_a_timer_that_meets_a_fault_stops_no_other_queue_and_works_when_the_fault_is_gone(
    sites: Callable[[], Site], parts: BrokenParts, timer: str
) -> None:
    found: list[str] = []
    for at in count(1):
        site = sites()
        calls = {path: begun(site, timer, path) for path in (TARGET, OTHER)}
        with parts.breaking(at, named(TARGET)):
            for _ in range(8):
                site.wait(seconds=50)
        twin = sites()
        unharmed = begun(twin, timer, OTHER)
        twin.wait(seconds=400)
        wrong = differences(outcome(twin, OTHER, unharmed), outcome(site, OTHER, calls[OTHER]))
        wrong += troubles(site)
        site.wait(minutes=6)
        after = {path: outcome(site, path, call) for path, call in calls.items()}
        wrong += [
            f"in the end, {difference}" for difference in differences(after[OTHER], after[TARGET])
        ]
        wrong += [f"in the end, {trouble}" for trouble in troubles(site)]
        found += [f"{parts.met or 'no fault'}: {item}" for item in wrong]
        if not parts.met:
            break
    assert at > 1, "the timer met no part that can break"
    assert not found, "\n".join(found)


def named(what: str) -> Callable[[Any], bool]:
    """Return whether something that is decided has this name."""
    return lambda meant: isinstance(meant, str) and meant == what


def begun(site: Site, timer: str, path: str) -> BlockingRequest | None:
    """Set up what a timer is about; return the call that waits for it, if one does."""
    command = TIMERS[timer](site, path)
    return None if command is None else together(site, command)[0]


def outcome(site: Site, path: str, call: BlockingRequest | None) -> dict[str, Any]:
    """Return what became of a path and of what belongs to it, whatever its name."""
    queues = site.engine.namespace.directory.queues()
    found: dict[str, Any] = {
        queue.path.removeprefix(path): queue_state(queue, exactly=False)
        for queue in queues
        if queue.path.startswith(path)
    }
    if call is not None:
        found["answer"] = "none" if not call.done else type(error_of(call) or value_of(call))
    return found


@pytest.mark.parametrize("after", [False])
def test_timers_that_failed_work_again_after_the_wall_clock_was_set(
    sites: Callable[[], Site], parts: BrokenParts
) -> None:
    site = sites()
    begun(site, "lock_lapses", TARGET)
    with parts.breaking(1, named(TARGET)):
        site.wait(seconds=61)
        assert parts.met
        site.clock.set_wall(-MINUTE * 60)
        site.wait(seconds=2)
    site.wait(minutes=6)
    assert [m.delivery_count for m in peek(site, TARGET)] == [1, 1, 0]
    assert troubles(site) == []


# -- requests that wait ----------------------------------------------------------------------------

WAITING: dict[str, c.Receive | c.LeaseRange | c.AcceptSession] = {
    "receive": c.Receive(TARGET, wait=MINUTE),
    "receive_and_delete": c.Receive(TARGET, wait=MINUTE, mode=c.ReceiveMode.RECEIVE_AND_DELETE),
    "lease": c.LeaseRange(TARGET, "me", 1, wait=MINUTE),
    "accept": c.AcceptSession(TARGET, wait=MINUTE),
}


@BOTH
@pytest.mark.parametrize("kind", WAITING)
def test_a_waiting_request_that_meets_a_fault_fails_alone_when_it_is_served(
    sites: Callable[[], Site], parts: BrokenParts, kind: str
) -> None:
    found: list[str] = []
    for at in count(1):
        site = sites()
        for path in (TARGET, OTHER):
            queue(site, path, requires_session=kind.startswith("accept"))
        command = WAITING[kind]
        failed, second = together(site, command, command)
        [third] = together(site, replace(command, path=OTHER))
        with parts.breaking(at, lambda meant, failed=failed: meant is failed):  # type: ignore[misc]
            sends = together(
                site, *(c.Send(path, [message("a", session_id="s")]) for path in (TARGET, OTHER))
            )
        wrong = failed_alone(failed) if parts.met else succeeded("the first", failed)
        wrong += succeeded("the first send", sends[0]) + succeeded("the other send", sends[1])
        wrong += succeeded("one at another queue", third) + troubles(site)
        if parts.met:
            wrong += succeeded("the next one", second)
        found += [f"{parts.met or 'no fault'}: {item}" for item in wrong]
        if not parts.met:
            break
    assert at > 1, "the request met no part that can break"
    assert not found, "\n".join(found)


# -- storage trouble -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False])
def test_a_send_that_meets_a_fault_while_the_disk_is_full_fails_alone(
    sites: Callable[[], Site], parts: BrokenParts
) -> None:
    found: list[str] = []
    for at in count(1):
        site = sites()
        queue(site)
        site.disk.full = True
        together(site, c.Send(EMPTY, [message("full")]))
        with parts.breaking(at, named(f"spilling to {QUEUE}")):
            sent, failed = together(
                site, c.Send(EMPTY, [message("a")]), c.Send(QUEUE, [message("b")])
            )
        wrong = failed_alone(failed) if parts.met else succeeded("the send", failed)
        wrong += succeeded("the other send", sent) + troubles(site)
        site.disk.full = False
        site.wait(seconds=5)
        wrong += [] if bodies(peek(site, EMPTY)) == ["full", "a"] else ["the others are not there"]
        found += [f"{parts.met or 'no fault'}: {item}" for item in wrong]
        if not parts.met:
            break
    assert at > 1, "the send met no part that can break"
    assert not found, "\n".join(found)


@BOTH
def test_a_spilled_send_that_meets_a_fault_is_kept_and_moved_when_the_fault_is_gone(
    sites: Callable[[], Site], parts: BrokenParts
) -> None:
    found: list[str] = []
    for at in count(1):
        site = sites()
        queue(site)
        site.disk.full = True
        sends = [c.Send(path, [message(body)]) for body in "ab" for path in (QUEUE, EMPTY)]
        wrong = [item for call in together(site, *sends) for item in succeeded("a send", call)]
        with parts.breaking(at, named(f"spilled to {QUEUE}")):
            site.disk.full = False
            site.wait(seconds=100)
            wrong += succeeded("a peek", together(site, c.Peek(FULL))[0])
            if bodies(peek(site, EMPTY)) != ["a", "b"]:
                wrong.append("the spilled sends to another queue were not moved meanwhile")
        wrong += troubles(site)
        site.wait(minutes=6)
        for path in (QUEUE, EMPTY):
            left = bodies(peek(site, path))
            wrong += [] if left == ["a", "b"] else [f"{path} holds {left}"]
        wrong += troubles(site)
        found += [f"{parts.met or 'no fault'}: {item}" for item in wrong]
        if not parts.met:
            break
    assert at > 1, "the send met no part that can break"
    assert not found, "\n".join(found)


def test_dead_letters_that_cannot_be_forwarded_because_of_a_fault_stay_in_their_queue(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(site, "graves")
    queue(site, forward_dead_lettered_messages_to="graves")
    send(site, "a", "b")
    with monkeypatch.context() as broken:
        broken.setattr(Router, "stage", lambda *_: 1 / 0)
        settle(site, c.Disposition.DEAD_LETTER, receive_one(site))
    assert bodies(peek(site, DEAD)) == ["a"]
    settle(site, c.Disposition.DEAD_LETTER, receive_one(site))
    assert bodies(peek(site, "graves")) == ["b"]
    assert take(site, DEAD) == ["a"]
    assert site.engine.namespace.failures.total() == 1
    assert troubles(site) == []
