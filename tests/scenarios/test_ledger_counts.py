"""The ledger of operations: counts that add up exactly."""

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.contracts.words import (
    QUEUE,
    bodies,
    outcome,
    peek,
    queue,
    send,
    start,
)
from tests.scenarios.ledger_site import (
    OPERATIONS,
    MakeSite,
    added_up,
    counts,
    files,
    heal,
    metered,
    roll,
    rows_of,
    work,
)
from tests.scenarios.site import Site
from twinbus.ledger import LedgerSettings
from twinbus.protocol.commands import (
    ReadMeter,
    Receive,
)


def test_the_files_add_up_to_the_meter_over_rolls_days_and_restarts(noted: Site) -> None:
    queue(noted)
    expected: Counter[tuple[str, ...]] = Counter()
    for _ in range(3):
        for span in ({"seconds": 20}, {"minutes": 3}, {"hours": 13}, {"days": 2}):
            work(noted)
            noted.wait(**span)
        noted.embedded.close()
        expected += metered(noted)
        noted.clock.advance(timedelta(seconds=1))
        noted.open()
    noted.embedded.close()
    assert added_up(rows_of(noted, OPERATIONS)) == expected + metered(noted)
    assert len({path.parent for path in files(noted, OPERATIONS)}) >= 4


def test_the_files_say_what_read_meter_says(noted: Site) -> None:
    queue(noted)
    work(noted)
    roll(noted)
    work(noted)
    output = added_up(noted.ask(ReadMeter()).to_pylist())
    noted.embedded.close()
    reading = ("", "ReadMeter", "management", "ok")
    output += Counter({(*reading, "count"): 1, (*reading, "units"): 1})
    assert added_up(rows_of(noted, OPERATIONS)) == output


def test_the_meter_counts_on_whatever_was_written(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    roll(noted)
    send(noted, "b")
    noted.wait(days=1)
    send(noted, "c")
    [sent] = [row for row in noted.ask(ReadMeter()).to_pylist() if row["operation"] == "Send"]
    assert (sent["count"], sent["messages"]) == (3, 3)


def test_a_request_that_waited_is_counted_once(noted: Site) -> None:
    queue(noted)
    served = start(noted, Receive(QUEUE, wait=timedelta(hours=2)))
    noted.wait(hours=1)
    send(noted, "a")
    assert outcome(served) == ["a"]
    assert counts(noted, path=QUEUE) == {
        ("Receive", "application", "ok"): 1,
        ("Send", "application", "ok"): 1,
    }


def test_messages_of_the_spill_store_are_counted_once(noted: Site) -> None:
    queue(noted)
    noted.disk.full = True
    send(noted, "a")
    send(noted, "b")
    noted.disk.full = False
    noted.wait(seconds=5)
    assert bodies(peek(noted)) == ["a", "b"]
    assert counts(noted, path=QUEUE)["Send", "application", "ok"] == 2
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)


def test_the_counts_go_on_after_the_broker_healed_itself(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    heal(noted)
    send(noted, "b")
    assert counts(noted, path=QUEUE)["Send", "application", "ok"] == 2
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)


def sends_by_bucket(site: Site) -> dict[datetime, int]:
    site.embedded.close()
    found: Counter[datetime] = Counter()
    for row in rows_of(site, OPERATIONS):
        if row["operation"] == "Send":
            found[row["bucket"]] += row["count"]
    return dict(found)


def test_operations_stand_under_the_beginning_of_their_bucket(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(bucket=timedelta(minutes=5)))
    began = site.clock.now()
    queue(site)
    for _ in range(14):
        send(site, "a")
        roll(site)
    five = timedelta(minutes=5)
    assert sends_by_bucket(site) == {began: 5, began + five: 5, began + 2 * five: 4}


def test_a_bucket_never_reaches_over_midnight(noted: Site) -> None:
    noted.wait(hours=23, minutes=59, seconds=30)
    queue(noted)
    send(noted, "a")
    noted.wait(seconds=30)
    noted.wait(seconds=30)
    send(noted, "b")
    midnight = noted.clock.now().replace(hour=0, minute=0, second=0)
    assert sends_by_bucket(noted) == {midnight - timedelta(minutes=1): 1, midnight: 1}


@pytest.mark.parametrize(
    "settings",
    [{"bucket": timedelta(seconds=1)}, {"roll_interval": timedelta(hours=1)}],
    ids=["small buckets", "the default bucket"],
)
def test_the_first_operation_after_a_pause_stands_in_its_own_bucket(
    make_site: MakeSite, settings: dict[str, Any]
) -> None:
    site = make_site(ledger=LedgerSettings(**settings))
    site.wait(seconds=30)
    site.reopen()
    queue(site)
    send(site, "a")
    before = site.clock.now()
    site.wait(seconds=45)
    send(site, "b")
    [first, second] = sends_by_bucket(site)
    assert first <= before < second <= site.clock.now()
