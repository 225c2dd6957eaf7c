"""Ledgers after a kill: nothing acknowledged is missing in them."""

import os
import signal
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.contracts.words import MANY, QUEUE, complete, peek, queue, receive_one, send
from tests.inside import trail_ledger
from tests.scenarios.ledger_site import (
    LEDGER,
    Place,
    closed,
    counts,
    number_of,
    places,
    read_trail,
    roll,
)
from tests.scenarios.site import Site
from twinbus.clock import ManualClock

WORKER = textwrap.dedent("""
    import sys
    from datetime import timedelta
    from pathlib import Path

    from twinbus.protocol.commands import CreateEntity, Disposition, Receive, Send, Settle
    from twinbus.broker.turn.engine import EngineSettings
    from twinbus.entities import QueueDescription
    from twinbus.ledger import LedgerSettings
    from twinbus.message import BrokeredMessage
    from twinbus.namespace.embedded import EmbeddedNamespace

    ledger = LedgerSettings(roll_interval=timedelta(seconds=int(sys.argv[2])))
    namespace = EmbeddedNamespace(EngineSettings(directory=Path(sys.argv[1]), ledger=ledger))
    namespace.ask(CreateEntity(QueueDescription(path="orders")))
    for turn in range(10**9):
        ids = [f"{turn}-{row}" for row in range(3)]
        print("sending", *ids, flush=True)
        batch = [BrokeredMessage(body=b"a", message_id=one) for one in ids]
        print("sent", *namespace.ask(Send("orders", batch)).sequence_numbers, flush=True)
        got = namespace.ask(Receive("orders", 2))
        numbers = got.column("sequence_number").to_pylist()
        print("completing", *numbers, flush=True)
        namespace.ask(Settle("orders", got.column("lock_token"), Disposition.COMPLETE))
        print("completed", *numbers, flush=True)
""")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("roll_s", [60, 1], ids=["before the first file", "after a file"])
def test_after_a_real_kill_the_trail_has_every_acknowledged_message(
    tmp_path: Path, roll_s: int
) -> None:
    directory = tmp_path / "namespace"
    lines: list[list[str]] = []

    def has_file() -> bool:
        return any(directory.glob("ledger/messages/day=*/[!.]*"))

    with subprocess.Popen(
        [sys.executable, "-c", WORKER, str(directory), str(roll_s)],
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            lines.append(line.split())
            if len(lines) >= 1500 and (roll_s > 1 or has_file()):
                os.kill(worker.pid, signal.SIGKILL)
    assert has_file() == (roll_s == 1)
    site = Site.__new__(Site)
    site.directory, site.settings = directory, {"ledger": LEDGER}
    site.clock = ManualClock(datetime.now(UTC))
    site.open()
    shown = {place: i for place, i in all_peeked(site).items() if place[0] == number_of(site)}
    found = closed(site)
    sending = [item for what, *ids in lines if what == "sending" for item in ids]
    sent = [int(number) for what, *numbers in lines if what == "sent" for number in numbers]
    completing = [
        int(number) for what, *numbers in lines if what == "completing" for number in numbers
    ]
    done = [[int(number) for number in numbers] for what, *numbers in lines if what == "completed"]
    surely = {number for numbers in done[:-1] for number in numbers}  # the last may miss its sync
    assert len(sent) > 500
    assert places(site, sent) <= set(found.accepted)
    assert [found.accepted[number_of(site), n] for n in sent] == sending[: len(sent)]
    assert set(found.accepted.values()) <= set(sending)
    assert len(set(found.accepted.values())) == len(found.accepted)
    assert places(site, surely) <= found.by("completed") <= places(site, completing)
    assert {place: found.accepted[place] for place in found.standing} == shown
    assert found.gaps == []


def all_peeked(site: Site) -> dict[Place, str]:
    """Return what peek shows, page by page."""
    found: dict[Place, str] = {}
    while page := peek(site, QUEUE, max((n for _, n in found), default=0) + 1):
        found |= {
            (number_of(site), m.sequence_number or 0): m.message_id or "" for m in page[:MANY]
        }
    return found


def test_a_kill_between_the_file_and_its_mark_changes_no_row(
    noted: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(noted)
    send(noted, "a", "b")
    complete(noted, receive_one(noted))

    def fail(_: int) -> None:
        raise OSError(5, "killed here")

    monkeypatch.setattr(trail_ledger(noted.engine), "put_mark", fail)
    roll(noted)
    before = read_trail(noted)
    noted.crash()
    after = closed(noted)
    assert before.standing == places(noted, [2])
    assert (after.accepted, after.ended) == (before.accepted, before.ended)


def test_a_crash_loses_of_the_counts_only_what_was_not_written(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    roll(noted)
    send(noted, "b")
    noted.crash()
    send(noted, "c")
    assert counts(noted, path=QUEUE) == {("Send", "application", "ok"): 2}
