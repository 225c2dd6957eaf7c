"""Self-healing: a broker that finds itself inconsistent says so, restarts, and loses nothing."""

import json
from collections.abc import Callable
from datetime import timedelta
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
from tests.scenarios.site import Site
from twinbus.broker.commands import Command, EntityKind, ListEntities, Peek, Receive
from twinbus.broker.lifecycle import State
from twinbus.clock import ManualClock
from twinbus.entities import RuleDescription, SqlFilter
from twinbus.errors import BrokerRestartingError, MessagingError
from twinbus.limits import KEPT_DIAGNOSTIC_BUNDLES, SELF_CHECK_INTERVAL_US
from twinbus.namespace.embedded import EmbeddedNamespace

pytestmark = pytest.mark.timeout(5)  # a broker that heals for ever never ends
SELF_CHECK = timedelta(microseconds=SELF_CHECK_INTERVAL_US)
PRIVATE = "the body nobody may read"


def break_next(
    site: Site, kind: type[Command[Any]] = Peek, error: type[BaseException] = RuntimeError
) -> None:
    """Let the next command of a kind fail inside the broker; healing puts things right."""

    def fail(*_: object) -> None:
        raise error("a mistake in the broker")

    site.engine.namespace._handlers[kind] = fail


def lose_count(site: Site) -> None:
    """Make the bookkeeping of the queue wrong."""
    site.queue_of(QUEUE).waiting.counts[State.ACTIVE] += 1


def self_check(site: Site) -> None:
    """Let so much time pass that every queue has been checked."""
    for _ in site.engine.namespace.directory.queues():
        site.clock.advance(SELF_CHECK)


def bundles(site: Site) -> list[Path]:
    return sorted((site.directory / "diagnostics").glob("*"))


def test_a_mistake_in_the_broker_tells_the_caller_to_try_again(site: Site) -> None:
    queue(site)
    break_next(site)
    with pytest.raises(BrokerRestartingError, match="Try again") as caught:
        peek(site)
    assert caught.value.is_transient
    assert Path(str(caught.value.bundle)).is_dir()


def test_an_interrupt_in_the_middle_of_a_turn_reaches_its_caller_and_the_broker_heals(
    site: Site,
) -> None:
    queue(site)
    send(site, "a")
    break_next(site, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        site.embedded.ask(Peek(QUEUE))
    assert bodies(peek(site)) == ["a"]


def test_after_healing_everything_acknowledged_is_there_and_the_broker_works(site: Site) -> None:
    queue(site)
    numbers = send(site, "a", "b", "c")
    complete(site, receive_one(site))
    break_next(site)
    with pytest.raises(BrokerRestartingError):
        peek(site)
    assert [m.sequence_number for m in peek(site)] == numbers[1:]
    send(site, "d")
    assert take(site) == ["b", "c", "d"]


def test_a_message_locked_before_healing_is_delivered_again(site: Site) -> None:
    queue(site)
    send(site, "a")
    receive_one(site)
    break_next(site)
    with pytest.raises(BrokerRestartingError):
        peek(site)
    assert receive_one(site).body == b"a"


def test_waiting_receives_are_told_of_the_restart(site: Site) -> None:
    queue(site)
    waiting = start(site, Receive(QUEUE, wait=timedelta(hours=1)))
    break_next(site)
    with pytest.raises(BrokerRestartingError):
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


def test_a_bundle_tells_a_person_what_happened_and_what_to_do(site: Site) -> None:
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
    with pytest.raises(BrokerRestartingError):
        peek(site)
    [bundle] = bundles(site)
    assert f"Send {QUEUE}" in (bundle / "commands.txt").read_text()
    assert not any(PRIVATE.encode() in file.read_bytes() for file in bundle.iterdir())


def test_only_the_newest_bundles_are_kept(site: Site) -> None:
    queue(site)
    for _ in range(KEPT_DIAGNOSTIC_BUNDLES + 3):
        site.wait(seconds=1)
        break_next(site)
        with pytest.raises(BrokerRestartingError) as caught:
            peek(site)
    assert len(bundles(site)) == KEPT_DIAGNOSTIC_BUNDLES
    assert str(bundles(site)[-1]) == caught.value.bundle


def test_a_send_in_the_turn_that_failed_is_not_half_there(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(site)
    with monkeypatch.context() as broken:
        broken.setattr(site.engine.namespace, "serve", lambda *_: 1 // 0)
        with pytest.raises(BrokerRestartingError):
            send(site, "a")
    assert peek(site) == []
    send(site, "b")
    assert take(site) == ["b"]


def test_healing_during_storage_trouble_keeps_what_was_spilled(site: Site) -> None:
    queue(site)
    site.disk.full = True
    send(site, "a")
    break_next(site)
    with pytest.raises(BrokerRestartingError):
        peek(site)
    send(site, "b")
    site.disk.full = False
    site.wait(seconds=2)
    assert take(site) == ["a", "b"]


def test_settlements_acknowledged_during_storage_trouble_may_repeat_but_lose_nothing(
    site: Site,
) -> None:
    queue(site)
    send(site, "a", "b")
    site.disk.full = True
    complete(site, receive_one(site))
    break_next(site)
    with pytest.raises(BrokerRestartingError):
        peek(site)
    assert "b" in bodies(peek(site))


def test_healing_that_cannot_write_its_report_heals_all_the_same(site: Site) -> None:
    queue(site)
    send(site, "a")
    (site.directory / "diagnostics").write_text("a file where the folder should be")
    break_next(site)
    with pytest.raises(BrokerRestartingError):
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


@pytest.mark.parametrize("way", ["submit", "ask"])
def test_a_broker_that_cannot_heal_says_so_to_everyone_and_stops(site: Site, way: str) -> None:
    queue(site)
    waiting = start(site, Receive("orders/$DeadLetterQueue", wait=timedelta(hours=1)))
    fail_to_heal(site)
    with pytest.raises(MessagingError, match="stopped and must be opened anew"):
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
    with EmbeddedNamespace(tmp_path / "namespace", clock) as namespace:
        writer = namespace._writer
        fail: Callable[..., Any] = lambda *_: 1 // 0  # noqa: E731
        writer.engine.namespace._handlers[Peek] = fail
        with pytest.raises(BrokerRestartingError):
            namespace.submit(Peek(QUEUE)).result(timeout=10)
        assert namespace.ask(ListEntities(EntityKind.QUEUE)) == []
