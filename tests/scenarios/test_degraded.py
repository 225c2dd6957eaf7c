"""What a namespace says about its store: trouble, slow flushes, and sends that wait too long."""

import logging
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.contracts.words import QUEUE, peek, queue, send, take
from tests.scenarios.admin_site import admin_of
from tests.scenarios.site import Site
from twinbus.entities import QueueDescription
from twinbus.errors import StoreUnavailableError
from twinbus.limits import LOG_INTERVAL_US, SLOW_FLUSH_US, SPILL_BOUND_US
from twinbus.protocol.commands import CreateEntity

BOUND = timedelta(microseconds=SPILL_BOUND_US)
SECOND = timedelta(seconds=1)
INTERVAL = timedelta(microseconds=LOG_INTERVAL_US)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the events of the warnings that the broker logged."""
    return [
        getattr(line, "facts", {}).get("event", line.getMessage())
        for line in caplog.records
        if line.name == "twinbus.broker" and line.levelno >= logging.WARNING
    ]


def spill_for(site: Site, span: timedelta) -> None:
    """Fill the disk, send, and let time pass as a broker that retries sees it."""
    queue(site)
    site.disk.full = True
    assert send(site, "a") == [0]
    site.clock.advance(span - SECOND)
    site.clock.advance(SECOND)


def mend(site: Site) -> None:
    site.disk.full = False
    site.wait(seconds=2)


# -- the log of the process ------------------------------------------------------------------------


def test_storage_trouble_is_logged_when_it_begins_and_when_it_ends(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue(site)
    site.disk.full = True
    send(site, "a")
    for _ in range(30):
        site.wait(seconds=1)
        send(site, "more")
    assert events(caplog) == ["storage_trouble"]
    mend(site)
    assert events(caplog) == ["storage_trouble", "storage_trouble_ended"]


def test_trouble_without_spilled_sends_ends_when_the_log_takes_a_record(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.disk.full = True
    with pytest.raises(StoreUnavailableError):
        site.ask(CreateEntity(QueueDescription(path=QUEUE)))
    for _ in range(30):
        site.wait(seconds=1)
    assert events(caplog) == ["storage_trouble"]
    assert site.embedded.vitals().is_spilling
    mend(site)
    assert events(caplog) == ["storage_trouble", "storage_trouble_ended"]
    assert not site.embedded.vitals().is_spilling


def test_slow_flushes_are_logged_once_per_interval_with_a_count(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue(site)
    site.disk.delay_us = SLOW_FLUSH_US
    for _ in range(3):
        send(site, "slow")
    assert events(caplog) == ["slow_flush"]
    site.clock.advance(INTERVAL)
    send(site, "slow")
    assert events(caplog) == ["slow_flush"] * 2
    assert caplog.records[-1].facts["suppressed"] == 2  # type: ignore[attr-defined]


def test_quick_flushes_are_not_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    queue(site)
    site.disk.delay_us = SLOW_FLUSH_US - 1
    send(site, "quick")
    assert events(caplog) == []


# -- sends that wait too long ----------------------------------------------------------------------


def test_sends_that_wait_for_over_fifteen_minutes_make_the_namespace_degraded_until_they_appear(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    spill_for(site, BOUND)
    assert site.embedded.vitals().degradation is None
    site.clock.advance(SECOND)
    degradation = site.embedded.vitals().degradation
    assert degradation is not None
    assert "1 sends wait in the spill store, the oldest for more than 15 min" in degradation.reason
    site.wait(hours=3)
    later = site.embedded.vitals().degradation
    assert later is not None
    assert later.since == degradation.since
    assert events(caplog) == ["storage_trouble", "degraded"]
    mend(site)
    assert site.embedded.vitals().degradation is None
    assert events(caplog)[2:] == ["storage_trouble_ended", "degraded_ended"]
    assert take(site) == ["a"]


def test_how_long_a_send_has_waited_survives_a_restart(site: Site) -> None:
    spill_for(site, BOUND - SECOND)
    site.embedded.close()
    site.open()
    site.disk.full = True
    site.clock.advance(3 * SECOND)
    assert peek(site) == []
    assert site.embedded.vitals().degradation is not None
    mend(site)
    assert site.embedded.vitals().degradation is None


def test_setting_the_clock_does_not_make_a_namespace_degraded(site: Site) -> None:
    spill_for(site, SECOND)
    site.clock.set_wall(timedelta(hours=5))
    for _ in range(5):
        site.clock.advance(SECOND)
    assert site.embedded.vitals().degradation is None
    site.clock.advance(BOUND)
    assert site.embedded.vitals().degradation is not None


def test_health_and_metrics_say_degraded_and_since_when_while_sends_are_still_taken(
    site: Site,
) -> None:
    began = site.clock.now()
    spill_for(site, BOUND)
    with admin_of(site) as admin:
        before = admin.ask("/health")
        assert before.json["status"] == "storage trouble: sends are spilled"
        assert admin.metric("twinbus_degraded") == 0
        site.clock.advance(SECOND)
        answer = admin.ask("/health")
        assert (answer.status, answer.json["status"]) == (200, "degraded")
        assert "spill store" in answer.json["reason"]
        assert answer.json["since"] == (began + BOUND).isoformat()
        assert admin.metric("twinbus_degraded") == 1
        assert admin.metric("twinbus_spilled_sends") == 1
        assert send(site, "b") == [0]
        mend(site)
        assert admin.ask("/health").json == {"status": "ok", "name": "shop", "restarts": 0}
        assert admin.metric("twinbus_degraded") == 0
    assert take(site) == ["a", "b"]


# -- readiness -------------------------------------------------------------------------------------


def test_a_namespace_whose_log_refuses_records_is_not_ready_until_it_takes_one(site: Site) -> None:
    queue(site)
    with admin_of(site) as admin:
        assert admin.ask("/ready").json == {"ready": True, "name": "shop"}
        site.disk.full = True
        send(site, "a")
        answer = admin.ask("/ready")
        assert answer.status == 503
        assert answer.json["ready"] is False
        assert "cannot be written" in answer.json["reason"]
        assert admin.ask("/health").status == 200
        head = admin.ask("/ready", "HEAD")
        assert (head.status, head.body) == (503, b"")
        mend(site)
        assert admin.ask("/ready").status == 200


def test_a_namespace_that_starts_with_spilled_sends_is_ready_when_its_log_takes_them(
    site: Site,
) -> None:
    spill_for(site, SECOND)
    site.embedded.close()
    site.open()
    site.disk.full = True
    site.clock.advance(SECOND)
    with admin_of(site) as admin:
        assert admin.ask("/ready").status == 503
        mend(site)
        assert admin.ask("/ready").status == 200


def test_a_namespace_that_restarts_is_not_ready(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(site)

    def fail(*_: object) -> None:
        raise RuntimeError("a mistake in the broker")

    for _ in range(2):  # the second restart waits
        with monkeypatch.context() as patched:
            patched.setattr(site.engine.namespace, "serve", fail)
            site.clock.advance(timedelta(minutes=1))
    assert site.embedded.vitals().is_healing
    with admin_of(site) as admin:
        answer = admin.ask("/ready")
        assert (answer.status, admin.ask("/health").status) == (503, 503)
        assert "is restarting from its log" in answer.json["reason"]
        site.wait(seconds=2)
        assert admin.ask("/ready").status == 200


@pytest.mark.parametrize("page", ["/health", "/ready"])
def test_head_is_answered_like_get_without_a_body(site: Site, page: str) -> None:
    with admin_of(site) as admin:
        assert (admin.ask(page).status, admin.ask(page).json["name"]) == (200, "shop")
        head = admin.ask(page, "HEAD")
        assert (head.status, head.body) == (200, b"")


# -- metrics ---------------------------------------------------------------------------------------


def test_the_age_of_the_oldest_message_is_a_metric_of_each_entity(site: Site) -> None:
    queue(site)
    queue(site, "empty")
    send(site, "old")
    site.wait(minutes=10)
    send(site, "young")
    site.wait(minutes=1)
    with admin_of(site) as admin:
        assert admin.metric("twinbus_oldest_message_seconds", path=QUEUE) == 11 * 60
        assert admin.metric("twinbus_oldest_message_seconds", path="empty") == 0
        take(site)
        assert admin.metric("twinbus_oldest_message_seconds", path=QUEUE) == 0


def test_the_storage_metric_counts_every_file_of_the_namespace(
    make_site: Callable[..., Site],
) -> None:
    site = make_site()
    outside = site.directory.parent / "spill elsewhere"
    site.reopen(spill_directory=outside)
    spill_for(site, SECOND)
    for name in (
        "diagnostics/one/README.txt",
        "log/cut/1.bytes",
        "ledger/messages/day=2030-01-01/x",
    ):
        path = site.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
    files = [*site.directory.rglob("*"), *outside.rglob("*")]
    size = sum(path.stat().st_size for path in files if path.is_file())
    with admin_of(site) as admin:
        assert admin.metric("twinbus_storage_bytes") == size
        assert admin.metric("twinbus_ledger_bytes") == 1000
