"""The audit of the demo is exact: what it reports as lost or doubled is lost or doubled."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.scenarios.command_line import run
from tests.soak.demo_kills import Outcome
from twinbus import (
    BrokeredMessage,
    MessageReceiver,
    MessagingFactory,
    NamespaceManager,
    OperationTimeoutError,
)
from twinbus.cost.answers import Report
from twinbus.cost.prices import load_sheet
from twinbus.cost.survey import Survey
from twinbus.demo import outage
from twinbus.demo.audit import Findings, Handovers, QueuedOrders, browse_queues, examine
from twinbus.demo.fleet import Consumer, Recorder
from twinbus.demo.page import Audit, DemoVerdict
from twinbus.demo.servers import QUEUE
from twinbus.ledger import LedgerKind

ORDERS = [f"app0.{number}" for number in range(20)]


def handed(*pairs: tuple[int, str]) -> Handovers:
    """Return what was handed over, as pairs of sequence number and order."""
    handovers = Handovers()
    for number, order in pairs:
        handovers.add([number], [order])
    return handovers


def test_an_order_that_nobody_was_handed_and_no_queue_holds_is_lost() -> None:
    found = examine(["a", "b"], handed((1, "a")), QueuedOrders())
    assert (found.lost, found.late, found.doubled) == (("b",), (), ())


def test_an_order_that_came_again_from_the_same_place_is_redelivered_and_not_doubled() -> None:
    found = examine(["a"], handed((1, "a"), (1, "a")), QueuedOrders())
    assert (found.delivered, found.redelivered, found.doubled) == (1, 1, ())


def test_an_order_at_two_places_is_doubled_and_not_redelivered() -> None:
    found = examine(["a"], handed((1, "a"), (2, "a")), QueuedOrders())
    assert (found.delivered, found.redelivered, found.doubled) == (1, 0, ("a",))


def test_a_second_copy_that_waits_on_the_primary_is_doubled() -> None:
    assert examine(["a"], handed((1, "a")), QueuedOrders({2: "a"})).doubled == ("a",)


def test_an_order_that_was_handed_over_and_not_completed_is_not_doubled() -> None:
    assert examine(["a"], handed((1, "a")), QueuedOrders({1: "a"})).doubled == ()


@pytest.mark.parametrize(
    "queued", [QueuedOrders({7: "a"}), QueuedOrders(in_other_queues=frozenset("a"))]
)
def test_an_order_that_a_queue_holds_is_late_and_not_lost(queued: QueuedOrders) -> None:
    found = examine(["a"], Handovers(), queued)
    assert (found.lost, found.late, found.doubled) == ((), ("a",), ())


def test_two_orders_at_one_place_are_a_fault_of_the_broker() -> None:
    assert examine([], handed((1, "a"), (1, "b")), QueuedOrders()).renumbered == 1


# -- the verdict -----------------------------------------------------------------------------------


def verdict(
    *acknowledged: str, stored: QueuedOrders | None = None, not_reconciled: int = 0, **changes: Any
) -> DemoVerdict:
    """Judge a demo that was handed one order, a."""
    found: Findings = examine(acknowledged, handed((1, "a")), stored or QueuedOrders())
    numbers = {"raised": 0, "diverted": 1, "moved": 1, "longest_wait_s": 0.0, **changes}
    return DemoVerdict.of(Audit(Recorder(), found, **numbers), not_reconciled)


def test_a_demo_without_problems_is_an_outage_nobody_noticed() -> None:
    assert verdict("a") == DemoVerdict(
        is_good=True,
        title="An outage nobody noticed",
        headline="Nothing was lost and nothing was doubled.",
    )


def test_a_send_that_raised_was_noticed() -> None:
    noticed = verdict("a", raised=2)
    assert noticed.is_good
    assert noticed.title == "An outage that lost nothing"
    assert noticed.headline.endswith("2 send(s) raised.")


@pytest.mark.parametrize(
    ("failed", "problem"),
    [
        (verdict("a", "b"), "1 acknowledged order(s) lost"),
        (verdict("a", stored=QueuedOrders({2: "a"})), "1 order(s) enqueued twice"),
        (verdict("a", "b", stored=QueuedOrders({2: "b"})), "1 order(s) not delivered in time"),
        (verdict("a", diverted=0, moved=0), "no order was diverted"),
        (verdict("a", diverted=3), "2 diverted order(s) not brought home"),
        (verdict("a", not_reconciled=4), "4 message(s) not accounted for by the ledgers"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_every_problem_fails_the_audit_and_is_named(failed: DemoVerdict, problem: str) -> None:
    assert failed == DemoVerdict(
        is_good=False,
        title="An outage, and the audit failed",
        headline=f"The audit failed: {problem}.",
    )


@pytest.fixture
def _same_log() -> Iterator[None]:
    """Restore the log of Twinbus, which the demo silences."""
    log = logging.getLogger("twinbus")
    level = log.level
    yield
    log.setLevel(level)


class NoSpark:
    """In the place of Spark, which a verdict does not need."""

    session = None

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.usefixtures("_same_log")
@pytest.mark.parametrize(
    ("acknowledged", "code", "title"),
    [
        (["a"], 0, "An outage nobody noticed"),
        (["a", "b"], 1, "An outage, and the audit failed"),
    ],
)
def test_the_exit_code_and_the_page_follow_the_verdict(
    acknowledged: list[str],
    code: int,
    title: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = examine(acknowledged, handed((1, "a")), QueuedOrders())
    audit = Audit(Recorder(), found, raised=0, diverted=1, moved=1, longest_wait_s=0.0)
    sheet = load_sheet("zero")
    empty = Survey({kind: {} for kind in LedgerKind}, [])
    report = Report(sheet=sheet, survey=empty)
    monkeypatch.setattr(outage, "BorrowedSession", NoSpark)
    monkeypatch.setattr(outage, "silence_py4j", lambda: None)
    monkeypatch.setattr(outage, "_play", lambda *_: audit)
    monkeypatch.setattr(outage, "make_report", lambda *_: report)
    done = run("demo", "--report", str(tmp_path / "page.html"))
    assert done.code == code
    assert f"<title>{title}</title>" in (tmp_path / "page.html").read_text(encoding="utf-8")


# -- the soak --------------------------------------------------------------------------------------


def outcome(*acknowledged: str, not_reconciled: int = 0) -> Outcome:
    """Return the outcome of a soak with one kill, which was handed one order, a."""
    found = examine(acknowledged, handed((1, "a")), QueuedOrders())
    made = Outcome(not_reconciled=not_reconciled)
    made.add(Audit(Recorder(), found, raised=0, diverted=1, moved=1, longest_wait_s=0.0))
    return made


def test_an_audit_that_fails_while_the_ledgers_account_for_all_is_a_false_alarm() -> None:
    alarmed = outcome("a", "b")
    assert (alarmed.lost, alarmed.false_alarms) == ({"b"}, 1)
    with pytest.raises(AssertionError, match="lost 1"):
        alarmed.check()


def test_an_audit_that_fails_as_the_ledgers_do_is_no_false_alarm() -> None:
    assert outcome("a", "b", not_reconciled=1).false_alarms == 0


def test_ledgers_that_do_not_account_for_a_message_fail_the_soak() -> None:
    with pytest.raises(AssertionError, match="1 messages are not accounted for"):
        outcome("a", not_reconciled=1).check()


def test_a_soak_without_problems_passes() -> None:
    outcome("a").check()


# -- the consumer ----------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[str]:
    """Return the connection string of a namespace with all orders in its queue."""
    connection = f"Endpoint=embedded://{tmp_path / 'shop'}"
    with (
        NamespaceManager.from_connection_string(connection) as manager,
        MessagingFactory.from_connection_string(connection) as factory,
        factory.create_message_sender(QUEUE) as sender,
    ):
        manager.create_queue(QUEUE)
        sender.send_batch([BrokeredMessage(b"tea", message_id=order) for order in ORDERS])
        yield connection


def test_a_lost_reply_to_a_completion_hides_no_order(
    shop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, is_settled = MessageReceiver.settle_columns, threading.Event()

    def settle_and_lose_the_reply(receiver: MessageReceiver, *arguments: Any) -> None:
        settle(receiver, *arguments)
        is_settled.set()
        raise OperationTimeoutError("the reply was lost")

    monkeypatch.setattr(MessageReceiver, "settle_columns", settle_and_lose_the_reply)
    with Consumer(shop) as consumer:
        assert is_settled.wait(30)
        consumer.stop()
        found = examine(ORDERS, consumer.handovers, browse_queues(shop, shop, QUEUE, ()))
    assert (found.lost, found.late, found.doubled) == ((), (), ())
    assert found.delivered == len(ORDERS)


def test_orders_that_wait_in_queues_are_found_there(shop: str) -> None:
    found = browse_queues(shop, shop, QUEUE, (QUEUE,))
    assert sorted(found.on_primary.values()) == sorted(ORDERS)
    assert found.in_other_queues == frozenset(ORDERS)


def test_the_demo_of_rabbitmq_says_how_to_install_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rabbitmq = pytest.importorskip("twinbus.testing.rabbitmq")
    monkeypatch.setattr(rabbitmq, "SERVER", tmp_path / "rabbitmq-server")
    done = run("demo", "--primary", "rabbitmq")
    assert done.code
    assert "apt-get install rabbitmq-server" in done.err
