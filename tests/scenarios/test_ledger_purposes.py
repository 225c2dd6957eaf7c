"""The ledger of operations: what an operation was for."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.contracts.words import (
    QUEUE,
    message,
    queue,
    send,
    start,
    take,
)
from tests.scenarios.ledger_site import (
    counts,
    work,
)
from tests.scenarios.site import Site
from twinbus.entities import EntityStatus, backlog_queue_path
from twinbus.errors import (
    EntityDisabledError,
    EntityNotFoundError,
    InvalidArgumentError,
)
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.protocol.commands import (
    DeleteEntity,
    LeaseRange,
    Origin,
    ReadMeter,
    ReadRange,
    Receive,
    ReleaseRange,
    RenewRange,
    Send,
    SettleRange,
    UpdateEntity,
)
from twinbus.protocol.requests import BlockingRequest

BACKLOG = backlog_queue_path("home", 0)


def test_commands_of_an_application_count_for_the_application(noted: Site) -> None:
    queue(noted)
    work(noted)
    found = counts(noted)
    asked = {kind: purpose for kind, purpose, _ in found if kind != "CreateEntity"}
    assert asked == dict.fromkeys(("Send", "Receive", "Settle", "Peek"), "application")


def test_managing_is_counted_as_management(noted: Site) -> None:
    made = queue(noted)
    noted.ask(UpdateEntity(made))
    noted.ask(ReadMeter())
    noted.ask(DeleteEntity(QUEUE))
    with pytest.raises(EntityNotFoundError):
        noted.ask(DeleteEntity(QUEUE))
    queue(noted, BACKLOG)
    assert {purpose for _, purpose, _ in counts(noted)} == {"management"}


def test_a_send_to_a_backlog_queue_was_diverted(noted: Site) -> None:
    queue(noted, BACKLOG)
    send(noted, "a", path=BACKLOG.upper())
    with pytest.raises(InvalidArgumentError):
        noted.ask(Send(BACKLOG, []))
    assert counts(noted, path=BACKLOG) == {
        ("Send", "backlog", "ok"): 1,
        ("Send", "backlog", "InvalidArgument"): 1,
    }


@pytest.mark.parametrize("path", [QUEUE, BACKLOG])
def test_a_ping_is_a_ping_wherever_it_goes(noted: Site, path: str) -> None:
    queue(noted, path)
    send(noted, message("", content_type=PING_CONTENT_TYPE), path=path)
    assert counts(noted, path=path) == {("Send", "ping", "ok"): 1}


def test_a_refused_ping_is_a_ping(noted: Site) -> None:
    made = queue(noted)
    noted.ask(UpdateEntity(replace(made, status=EntityStatus.SEND_DISABLED)))
    with pytest.raises(EntityDisabledError):
        send(noted, message("", content_type=PING_CONTENT_TYPE))
    assert counts(noted, path=QUEUE)["Send", "ping", "EntityDisabled"] == 1


def test_a_send_with_a_ping_among_others_is_no_ping(noted: Site) -> None:
    queue(noted)
    send(noted, message("", content_type=PING_CONTENT_TYPE), "a")
    assert counts(noted, path=QUEUE) == {("Send", "application", "ok"): 1}


def test_pings_that_the_spill_store_took_are_pings(noted: Site) -> None:
    queue(noted)
    noted.disk.full = True
    send(noted, "a")
    send(noted, message("", content_type=PING_CONTENT_TYPE))
    noted.disk.full = False
    noted.wait(seconds=5)
    assert counts(noted, path=QUEUE)["Send", "ping", "ok"] == 1


def test_a_look_into_an_empty_backlog_queue_is_an_idle_poll(noted: Site) -> None:
    queue(noted, BACKLOG)
    assert noted.ask(LeaseRange(BACKLOG, "syphon", 10)) is None
    take(noted, BACKLOG)
    assert counts(noted, path=BACKLOG) == {
        ("LeaseRange", "idle_poll", "Empty"): 1,
        ("Receive", "idle_poll", "Empty"): 1,
    }


@pytest.mark.parametrize("kind", ["LeaseRange", "Receive"])
def test_waiting_at_a_backlog_queue_in_vain_is_an_idle_poll(noted: Site, kind: str) -> None:
    queue(noted, BACKLOG)
    wait = timedelta(seconds=30)
    command: Any = Receive(BACKLOG, wait=wait)
    if kind == "LeaseRange":
        command = LeaseRange(BACKLOG, "syphon", 10, wait=wait)
    ran_out = start(noted, command)
    noted.wait(seconds=30)
    assert ran_out.done()
    gone = BlockingRequest(command)
    noted.embedded.hand_over([gone])
    noted.embedded.withdraw([gone])
    found = counts(noted, path=BACKLOG)
    assert found == {(kind, "idle_poll", "Empty"): 1, (kind, "idle_poll", "Withdrawn"): 1}


def test_waiting_at_another_queue_in_vain_is_the_applications(noted: Site) -> None:
    queue(noted)
    start(noted, Receive(QUEUE, wait=timedelta(seconds=30)))
    noted.wait(seconds=30)
    gone = BlockingRequest(Receive(QUEUE, wait=timedelta(seconds=30)))
    noted.embedded.hand_over([gone])
    noted.embedded.withdraw([gone])
    assert counts(noted, path=QUEUE) == {
        ("Receive", "application", "Empty"): 1,
        ("Receive", "application", "Withdrawn"): 1,
    }


def test_emptying_a_backlog_queue_is_the_syphons(noted: Site) -> None:
    queue(noted, BACKLOG)
    waiting = start(noted, LeaseRange(BACKLOG, "syphon", 10, wait=timedelta(seconds=30)))
    send(noted, "a", "b", path=BACKLOG)
    lease: Any = waiting.result(timeout=10)
    noted.ask(ReadRange(BACKLOG, lease.epoch, lease.first, lease.last))
    noted.ask(RenewRange(BACKLOG, lease.epoch))
    noted.ask(SettleRange(BACKLOG, lease.epoch, [(lease.first, lease.first)]))
    noted.ask(ReleaseRange(BACKLOG, lease.epoch))
    take(noted, BACKLOG)
    found = counts(noted, path=BACKLOG)
    del found["Send", "backlog", "ok"]
    kinds = ("LeaseRange", "ReadRange", "RenewRange", "SettleRange", "ReleaseRange", "Receive")
    assert found == {(kind, "syphon", "ok"): 1 for kind in kinds}


def test_sending_home_the_messages_of_a_range_is_the_syphons(noted: Site) -> None:
    queue(noted, BACKLOG)
    queue(noted)
    send(noted, "a", path=BACKLOG)
    lease = noted.ask(LeaseRange(BACKLOG, "syphon", 10))
    for _ in range(2):  # the second time nothing is taken, and it costs as much
        noted.ask(Send(QUEUE, [message("a")], Origin(lease.origin, [lease.first])))
    noted.ask(Send(QUEUE, [message("a")], Origin("sender/0000000000000001", [1])))
    noted.ask(Send(QUEUE, [message("a")], Origin("//sink/of-spark", [1])))
    assert counts(noted, path=QUEUE) == {
        ("Send", "syphon", "ok"): 2,
        ("Send", "application", "ok"): 2,
    }


def test_ranges_of_other_queues_are_the_applications(noted: Site) -> None:
    queue(noted)
    assert noted.ask(LeaseRange(QUEUE, "me", 10)) is None
    assert counts(noted, path=QUEUE) == {("LeaseRange", "application", "Empty"): 1}
