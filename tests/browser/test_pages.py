"""Pages in a real browser: charts are drawn, nothing is fetched, and a phone is wide enough."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from twinbus.cost.answers import (
    DayOperations,
    DelayStep,
    EntityOperations,
    EntityOutage,
    EntityTransfers,
    FlowStep,
    PulledQueue,
    Report,
    StageOperations,
    StatusCount,
    Suspect,
)
from twinbus.cost.estimate import Plan, estimate
from twinbus.cost.estimate_page import estimate_page
from twinbus.cost.prices import MonthlyPrice, load_sheet
from twinbus.cost.report_page import report_page
from twinbus.cost.survey import LeftOut, Survey
from twinbus.demo.audit import Handovers, QueuedOrders, examine
from twinbus.demo.fleet import Recorder, Sample
from twinbus.demo.page import Audit, demo_page
from twinbus.ledger import LedgerKind
from twinbus.locations import Location

STANDARD = load_sheet("azure-standard")
PHONE, DESK = 400, 1200
BEGIN = 1_900_000_000.0


def full_report() -> Report:
    """Return a report with something in every part, and names that are long or would be HTML."""
    files: dict[LedgerKind, dict[str, list[Location]]] = {kind: {} for kind in LedgerKind}
    surveyed = Survey(files, ["contoso", "backup", "<script>alert(1)</script>"])
    surveyed.left_out.append(LeftOut(Path("/ledgers/contoso/broken.parquet"), "damaged: half"))
    path = "orders/europe/with-a-very-long-name-that-does-not-fit/anywhere-at-all"
    outage = EntityOutage(
        primary="contoso",
        process="host:1",
        path=path,
        failing=BEGIN,
        failed_over=BEGIN + 60,
        cause="OperationTimeout: no answer <b>in time</b>",
        returned=BEGIN + 3660,
        returned_by="ping",
        diverted=354_000,
        drained=BEGIN + 4000,
        seconds_to_fail_over=60.0,
        seconds_away=3600.0,
        seconds_to_drain=340.0,
    )
    stages = [
        ("contoso", "send", 1_000_000),
        ("backup", "send to backlog", 354_000),
        ("backup", "receive from backlog", 354_000),
        ("contoso", "send to primary", 353_000),
        ("contoso", "receive from primary", 1_300_000),
        ("contoso", "ping", 60),
        ("backup", "idle poll", 960),
    ]
    transfer = EntityTransfers(
        path=path,
        moved=353_000,
        dead_lettered=700,
        bytes=362_000_000,
        delay_p50=1800.0,
        delay_p90=3300.0,
        delay_p99=3700.0,
        delay_max=3999.0,
        reordered=353_000,
        behind_p50=100,
        behind_p90=2000,
        behind_p99=5000,
        behind_max=9000,
    )
    return Report(
        sheet=STANDARD,
        survey=surveyed,
        begins=BEGIN,
        ends=BEGIN + 7200,
        stages=[
            StageOperations(ledger=a, stage=s, operations=n, messages=n, bytes=n * 1024)
            for a, s, n in stages
        ],
        days=[
            DayOperations(day=date(2030, 3, day), stage="send", operations=1000 * day)
            for day in range(1, 8)
        ],
        entities=[EntityOperations("contoso", path, operations=9, messages=9, bytes=9)],
        money=[
            MonthlyPrice(
                month="2030-03",
                stage=s,
                operations=n,
                price=Decimal(n) / 10**6,
                bytes=1024 * n,
                bandwidth_price=Decimal(n) / 10**7,
            )
            for _, s, n in stages
        ],
        outages=[outage, replace(outage, path="bills", returned=None, diverted=None)],
        pulled=[PulledQueue("contoso/x-servicebus-transfer/3", times=2)],
        transfers=[transfer],
        flow=[
            FlowStep(at=BEGIN + 40 * n, diverted=3540, moved=0 if n < 60 else 8000)
            for n in range(100)
        ],
        delays=[DelayStep(seconds=2.0**n, messages=1000 * (12 - n)) for n in range(12)],
        statuses=[
            StatusCount("contoso", path, status="completed", messages=1_000_000),
            StatusCount("contoso", path, status="missing", messages=1),
        ],
        suspects=[
            Suspect(
                ledger="contoso",
                path=path,
                sequence_number=4711,
                message_id="order <i>4711</i>",
                status="missing",
                accepted=BEGIN,
            )
        ],
        suspect_count=1,
    )


def swept() -> str:
    plans = {text: Plan(rate=500, outage=timedelta(hours=n)) for n, text in ((1, "1h"), (24, "1d"))}
    rows = [(text, estimate(plan, STANDARD)) for text, plan in plans.items()]
    return estimate_page(rows[0][1], "outage", rows)


def demo_of(lost: int) -> str:
    """Return the page of a demo that has lost so many orders."""
    recorder = Recorder()
    for text, mark in (("kill -9", "killed"), ("started", "started"), ("is home", "home")):
        recorder.record(text, mark)
    recorder.samples += [Sample(at, 100 * at, 10 * at, 90 * at, 5 * at) for at in range(9)]
    handovers = Handovers()
    handovers.add(range(1000 - lost), map(str, range(1000 - lost)))
    audit = Audit(
        recorder=recorder,
        findings=examine([str(order) for order in range(1000)], handovers, QueuedOrders()),
        raised=0,
        diverted=10,
        moved=10,
        longest_wait_s=1.0,
    )
    return demo_page(audit, replace(full_report(), suspect_count=0, suspects=[]))


PAGES: dict[str, Callable[[], str]] = {
    "report": lambda: report_page(full_report()),
    "estimate": swept,
    "demo": lambda: demo_of(lost=0),
    "failed demo": lambda: demo_of(lost=60),
}
CHARTS = {"report": 6, "estimate": 3, "demo": 8, "failed demo": 8}


class Visit:
    """A page that was opened, and what it did."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(file.as_uri())

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture
def visit(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    opened = []

    def go(name: str, width: int) -> Visit:
        file = tmp_path / f"{name}.html"
        file.write_text(PAGES[name](), encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 800})
        opened.append(page)
        return Visit(page, file)

    yield go
    for page in opened:
        page.close()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_page_says_nothing_and_asks_for_nothing(visit: Any, name: str, width: int) -> None:
    seen = visit(name, width)
    assert seen.errors == []
    assert len(seen.requests) == 1


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_charts_are_drawn(visit: Any, name: str, width: int) -> None:
    seen = visit(name, width)
    charts = seen.ask(
        """() => [...document.querySelectorAll('svg')].map(svg => ({
            title: svg.getAttribute('aria-label'),
            box: svg.getBoundingClientRect().toJSON(),
            drawn: [...svg.querySelectorAll('rect, polyline, path')].filter(
                shape => shape.getBBox().width > 0 && shape.getBBox().height >= 0).length,
        }))"""
    )
    assert len(charts) == CHARTS[name]
    for chart in charts:
        assert chart["drawn"], chart
        assert 300 <= chart["box"]["width"] <= width, chart
        assert chart["box"]["height"] > 20, chart


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_all_of_it_in_letters_one_can_read(visit: Any, name: str) -> None:
    seen = visit(name, PHONE)
    assert seen.ask("document.documentElement.scrollWidth") <= PHONE
    smallest = seen.ask(
        """() => Math.min(...[...document.querySelectorAll('svg text, p, td, th')].map(text => {
            const svg = text.closest('svg');
            const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
            return parseFloat(getComputedStyle(text).fontSize) * scale;
        }))"""
    )
    assert smallest >= 10
    outside = seen.ask(
        """() => [...document.querySelectorAll('svg text')].filter(text => {
            const box = text.getBoundingClientRect();
            return box.left < 0 || box.right > innerWidth + 1;
        }).map(text => text.textContent)"""
    )
    assert outside == []


@pytest.mark.parametrize("name", PAGES)
def test_a_desk_shows_every_table_whole(visit: Any, name: str) -> None:
    seen = visit(name, DESK)
    cut = seen.ask(
        """() => [...document.querySelectorAll('table')].filter(table => {
            const frame = table.closest('.scroll') || table.parentElement;
            return frame.scrollWidth > frame.clientWidth
                || table.getBoundingClientRect().right > document.documentElement.clientWidth;
        }).map(table => table.innerText.slice(0, 60))"""
    )
    assert cut == []


def test_the_title_and_the_headline_of_the_demo_follow_its_verdict(visit: Any) -> None:
    good, failed = visit("demo", DESK), visit("failed demo", DESK)
    assert good.page.title() == good.page.inner_text("h1") == "An outage nobody noticed"
    assert good.page.inner_text("p.good") == "Nothing was lost and nothing was doubled."
    title = "An outage, and the audit failed"
    assert failed.page.title() == failed.page.inner_text("h1") == title
    headline = "The audit failed: 60 acknowledged order(s) lost."
    assert failed.page.inner_text("p.bad") == headline


def test_names_of_entities_are_text_and_not_html(visit: Any) -> None:
    seen = visit("report", PHONE)
    assert seen.ask("document.querySelectorAll('script, i, b').length") == 0
    assert "order <i>4711</i>" in seen.page.inner_text("body")
