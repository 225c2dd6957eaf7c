"""Self-healing: a broker that finds itself inconsistent says so, restarts, and loses nothing."""

import json
import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.words import (
    QUEUE,
    TOPIC,
    bodies,
    complete,
    message,
    peek,
    queue,
    receive_one,
    send,
    start,
    subscription,
    take,
    topic,
)
from tests.inside import turn_taken
from tests.namespaces import embedded
from tests.scenarios.site import Site
from twinbus.broker.lifecycle import State
from twinbus.broker.store.commit import Commit
from twinbus.broker.turn.namespace import BrokerNamespace
from twinbus.clock import ManualClock
from twinbus.entities import RuleDescription, SqlFilter
from twinbus.errors import BrokerRestartingError, CommandFailedError, MessagingError
from twinbus.limits import KEPT_DIAGNOSTIC_BUNDLES, MAX_HEALS, SELF_CHECK_INTERVAL_US
from twinbus.protocol.commands import EntityKind, ListEntities, Peek, Receive
from twinbus.protocol.requests import BlockingRequest

pytestmark = pytest.mark.timeout(30)  # a broker that heals for ever never ends
SELF_CHECK = timedelta(microseconds=SELF_CHECK_INTERVAL_US)
PRIVATE = "the body nobody may read"


def break_next(site: Site, error: type[BaseException] = RuntimeError) -> None:
    """Let the next turn fail outside of any command; healing puts things right."""

    def fail(*_: object) -> None:
        raise error("a mistake in the broker")

    site.engine.namespace.serve = fail  # type: ignore[assignment, method-assign]


def lose_count(site: Site) -> None:
    """Make the bookkeeping of the queue wrong."""
    site.queue_of(QUEUE).waiting.counts[State.ACTIVE] += 1


def self_check(site: Site) -> None:
    """Let so much time pass that every queue has been checked."""
    for _ in site.engine.namespace.directory.queues():
        site.clock.advance(SELF_CHECK)


def bundles(site: Site) -> list[Path]:
    return sorted((site.directory / "diagnostics").glob("*"))


def test_a_command_that_breaks_a_turn_of_its_own_is_not_to_be_repeated(site: Site) -> None:
    queue(site)
    break_next(site)
    with pytest.raises(CommandFailedError, match="Do not repeat the command") as caught:
        peek(site)
    assert not caught.value.is_transient
    assert Path(str(caught.value.bundle)).is_dir()


def test_commands_that_share_a_broken_turn_get_a_transient_error(site: Site) -> None:
    queue(site)
    break_next(site)
    calls = [BlockingRequest(Peek(QUEUE)) for _ in range(3)]
    site.embedded.hand_over(calls)
    for call in calls:
        with pytest.raises(BrokerRestartingError, match="Try again") as caught:
            call.result(1)
        assert caught.value.is_transient


def test_after_a_restart_commands_run_one_at_a_time_so_that_the_cause_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(site)
    serve = BrokerNamespace.serve

    def fail_for_the_bad_one(self: BrokerNamespace, now: int, commit: Commit) -> None:
        if any(value.num_rows for _, value in commit.replies if hasattr(value, "num_rows")):
            raise RuntimeError("the command that reads a message breaks the turn")
        serve(self, now, commit)

    send(site, "a")
    monkeypatch.setattr(BrokerNamespace, "serve", fail_for_the_bad_one)
    for expected in (BrokerRestartingError, CommandFailedError):
        calls = [BlockingRequest(Peek(QUEUE)), BlockingRequest(ListEntities(EntityKind.QUEUE))]
        site.embedded.hand_over(calls)
        with pytest.raises(expected):
            calls[0].result(1)
        site.wait(seconds=1)
    assert len(site.ask(ListEntities(EntityKind.QUEUE))) == 1
    assert site.engine.restarts == 2


def test_a_broker_that_restarts_again_and_again_for_one_cause_backs_off_and_gives_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(site)
    monkeypatch.setattr(BrokerNamespace, "reclaim", lambda _: 1 // 0)
    began: dict[int, int] = {}  # by number of restarts: when the last one began
    with suppress(MessagingError):
        for _ in range(1000):
            site.wait(seconds=1)
            began.setdefault(site.engine.restarts, site.clock.now_us())
            with suppress(BrokerRestartingError, CommandFailedError):
                peek(site)
    pauses = [later - earlier for earlier, later in pairwise(began.values())]
    assert site.engine.restarts == MAX_HEALS
    assert pauses[-1] > min(pauses)
    vitals = site.embedded.vitals()
    assert not vitals.is_open
    assert "ZeroDivisionError" in vitals.trouble
    with pytest.raises(MessagingError, match="too often for the same cause"):
        peek(site)
    monkeypatch.undo()
    site.embedded.close()
    site.open()
    assert peek(site) == []


def test_the_state_before_a_restart_is_not_kept_in_memory(site: Site) -> None:
    queue(site)
    before = weakref.ref(site.engine.namespace)
    break_next(site)
    with pytest.raises(CommandFailedError):
        peek(site)
    assert before() is None


def test_the_vitals_are_known_while_a_turn_hangs(site: Site) -> None:
    with turn_taken(site.embedded):
        vitals = site.embedded.vitals()
    assert (vitals.is_open, vitals.is_healing, vitals.trouble) == (True, False, "")


def test_an_interrupt_in_the_middle_of_a_turn_reaches_its_caller_and_the_broker_heals(
    site: Site,
) -> None:
    queue(site)
    send(site, "a")
    break_next(site, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        site.embedded.ask(Peek(QUEUE))
    assert bodies(peek(site)) == ["a"]


def test_after_healing_everything_acknowledged_is_there_and_the_broker_works(site: Site) -> None:
    queue(site)
    numbers = send(site, "a", "b", "c")
    complete(site, receive_one(site))
    break_next(site)
    with pytest.raises(CommandFailedError):
        peek(site)
    assert [m.sequence_number for m in peek(site)] == numbers[1:]
    send(site, "d")
    assert take(site) == ["b", "c", "d"]


def test_a_message_locked_before_healing_is_delivered_again(site: Site) -> None:
    queue(site)
    send(site, "a")
    receive_one(site)
    break_next(site)
    with pytest.raises(CommandFailedError):
        peek(site)
    assert receive_one(site).body == b"a"


def test_waiting_receives_fail_at_the_restart(site: Site) -> None:
    queue(site)
    waiting = start(site, Receive(QUEUE, wait=timedelta(hours=1)))
    break_next(site)
    with pytest.raises(CommandFailedError):
        peek(site)
    with pytest.raises(BrokerRestartingError):
        waiting.result(timeout=1)


def test_the_self_check_finds_a_wrong_count_and_heals_it(site: Site) -> None:
    queue(site)
    send(site, "a")
    lose_count(site)
    self_check(site)
    assert site.engine.restarts == 1
    assert site.engine.namespace.faults() == []
    assert take(site) == ["a"]


def test_a_healthy_broker_is_checked_without_being_restarted(site: Site) -> None:
    queue(site)
    send(site, "a")
    for _ in range(5):
        self_check(site)
    assert site.engine.restarts == 0


def test_a_bundle_says_what_happened_and_what_to_do(site: Site) -> None:
    queue(site)
    lose_count(site)
    self_check(site)
    [bundle] = bundles(site)
    readme = (bundle / "README.txt").read_text()
    assert "What to do" in readme
    assert "counts" in readme
    [entity] = [e for e in json.loads((bundle / "entities.json").read_text()) if e["faults"]]
    assert entity["path"] == QUEUE
    assert json.loads((bundle / "log.json").read_text())["segments"]
    assert "InvariantError" in (bundle / "traceback.txt").read_text()


def test_a_bundle_holds_no_message_bodies(site: Site) -> None:
    queue(site)
    send(site, message(PRIVATE, application_properties={"note": PRIVATE}))
    break_next(site)
    with pytest.raises(CommandFailedError):
        peek(site)
    [bundle] = bundles(site)
    assert f"Send {QUEUE}" in (bundle / "commands.txt").read_text()
    assert not any(PRIVATE.encode() in file.read_bytes() for file in bundle.iterdir())


def test_only_the_newest_bundles_are_kept(site: Site) -> None:
    queue(site)
    for _ in range(KEPT_DIAGNOSTIC_BUNDLES + 3):
        site.wait(hours=1)
        break_next(site)
        with pytest.raises(CommandFailedError) as caught:
            peek(site)
    assert len(bundles(site)) == KEPT_DIAGNOSTIC_BUNDLES
    assert str(bundles(site)[-1]) == caught.value.bundle


def test_a_send_in_the_turn_that_failed_is_not_half_there(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(site)
    with monkeypatch.context() as broken:
        broken.setattr(site.engine.namespace, "serve", lambda *_: 1 // 0)
        with pytest.raises(CommandFailedError):
            send(site, "a")
    assert peek(site) == []
    send(site, "b")
    assert take(site) == ["b"]


def test_healing_during_storage_trouble_keeps_what_was_spilled(site: Site) -> None:
    queue(site)
    site.disk.full = True
    send(site, "a")
    break_next(site)
    with pytest.raises(CommandFailedError):
        peek(site)
    send(site, "b")
    site.disk.full = False
    site.wait(seconds=2)
    assert take(site) == ["a", "b"]


def test_settlements_acknowledged_during_storage_trouble_survive_healing(
    site: Site,
) -> None:
    queue(site)
    send(site, "a", "b")
    site.disk.full = True
    complete(site, receive_one(site))
    break_next(site)
    with pytest.raises(CommandFailedError):
        peek(site)
    assert bodies(peek(site)) == ["b"]


def test_healing_that_cannot_write_its_report_still_heals(site: Site) -> None:
    queue(site)
    send(site, "a")
    (site.directory / "diagnostics").write_text("a file where the folder should be")
    break_next(site)
    with pytest.raises(CommandFailedError):
        peek(site)
    assert take(site) == ["a"]


def test_no_value_of_a_message_makes_the_broker_restart(site: Site) -> None:
    topic(site)
    rule = RuleDescription("large", SqlFilter("amount > 1.5"))
    large = subscription(site, "large", rule)
    send(site, message("a", application_properties={"amount": 2**60}), path=TOPIC)
    assert site.engine.restarts == 0
    assert take(site, large) == ["a"]


def fail_to_heal(site: Site) -> None:
    """Damage the log under the running broker, so that it cannot read it anew."""
    for body in ("a", "b"):
        send(site, body)
    content = bytearray(site.last_segment.read_bytes())
    content[0] ^= 1
    site.last_segment.write_bytes(content)
    break_next(site)


def test_the_error_of_a_stopped_namespace_is_text_with_the_next_step(site: Site) -> None:
    queue(site)
    fail_to_heal(site)
    with pytest.raises(MessagingError) as stopped:
        peek(site)
    assert "Error(" not in str(stopped.value), "the representation of an object"
    assert str(stopped.value).endswith("Repair the cause, then open it again or restart the server")


@pytest.mark.parametrize("way", ["submit", "ask"])
def test_a_broker_that_cannot_heal_says_so_to_everyone_and_stops(site: Site, way: str) -> None:
    queue(site)
    waiting = start(site, Receive("orders/$DeadLetterQueue", wait=timedelta(hours=1)))
    fail_to_heal(site)
    with pytest.raises(MessagingError, match="the namespace has stopped"):
        peek(site) if way == "submit" else site.embedded.ask(Peek(QUEUE))
    with pytest.raises(MessagingError, match="stopped"):
        waiting.result(timeout=1)
    with pytest.raises(MessagingError, match="stopped"):
        send(site, "c")


def test_a_broker_that_stopped_lets_go_of_its_directory(site: Site) -> None:
    queue(site)
    fail_to_heal(site)
    with pytest.raises(MessagingError):
        peek(site)
    site.embedded.close()
    content = bytearray(site.last_segment.read_bytes())
    content[0] ^= 1
    site.last_segment.write_bytes(content)
    site.open()
    assert bodies(peek(site)) == ["a", "b"]


def test_a_threaded_broker_heals_too(tmp_path: Path) -> None:
    clock = ManualClock()
    with embedded(tmp_path / "namespace", clock) as namespace:
        fail: Callable[..., Any] = lambda *_: 1 // 0  # noqa: E731
        namespace.engine.namespace.serve = fail  # type: ignore[method-assign]
        with pytest.raises(CommandFailedError):
            namespace.submit(Peek(QUEUE)).result(timeout=10)
        assert namespace.ask(ListEntities(EntityKind.QUEUE)) == []


def test_a_restart_is_logged_with_what_was_recovered(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue(site)
    send(site, "a", "b")
    caplog.set_level(logging.INFO, "twinbus.broker")
    break_next(site)
    with pytest.raises(CommandFailedError):
        peek(site)
    reported = [getattr(line, "facts", {}) for line in caplog.records]
    events = {item.get("event"): item for item in reported}
    assert "RuntimeError" in events["restarting"]["cause"]
    assert (events["restarted"]["messages"], events["restarted"]["restarts"]) == (2, 1)
    assert events["restarted"]["records"] > 0
