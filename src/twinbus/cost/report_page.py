"""The report as a page: one HTML file with charts, for phone and desktop, without network."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from html import escape

from twinbus.cost.answers import Report, StageOperations
from twinbus.cost.charts import (
    Bar,
    FlowLink,
    FlowNode,
    LaneSpan,
    Series,
    TimelineLane,
    bar_chart,
    duration,
    flow_chart,
    grid,
    line_chart,
    page,
    table,
    timeline,
)
from twinbus.cost.prices import MonthlyPrice
from twinbus.cost.stages import COMPLETIONS, DIVERTED, Stage
from twinbus.entities import DEAD_LETTER_SUFFIX, is_backlog_path
from twinbus.limits import CHART_LANES

_GREEN, _AMBER, _PURPLE, _BLUE, _RED, _GREY = (
    "#12723c",
    "#c77700",
    "#7a3fb5",
    "#1769aa",
    "#b3261e",
    "#5b6977",
)
_COLORS = {
    Stage.SEND: _GREEN,
    **dict.fromkeys(DIVERTED, _AMBER),
    **dict.fromkeys(COMPLETIONS, _PURPLE),
    Stage.RECEIVE_FROM_PRIMARY: _BLUE,
}


def report_page(report: Report) -> str:
    """Return the page."""
    return page("What pairing did, and what it cost", report_parts(report))


def report_parts(report: Report) -> list[str]:
    """Return the parts of the page, for pages with further content."""
    parts = [
        _verdict(report),
        _left_out(report),
        table(list(_key_figures(report))),
        _timeline(report),
        _waiting(report),
        _flow(report),
        _cost(report),
        _days(report),
        _delays(report),
        _outages(report),
        _transfers(report),
        _reconciliation(report),
        _busiest(report),
        _footer(report),
    ]
    return [part for part in parts if part]


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _money(amount: Decimal, report: Report) -> str:
    return report.sheet.text_of(amount)


def _price(amount: Decimal, report: Report) -> str:
    """Return the price of operations; included operations are free."""
    if not amount and report.sheet.included:
        return "within the included operations"
    return _money(amount, report)


def stage_costs(report: Report) -> list[tuple[str, str, str, str, str]]:
    """Return rows of stage, operations, price, bytes and bandwidth price, with a total row.

    Each row adds up all months. The values are formatted as on the page.
    """
    sums: dict[str, MonthlyPrice] = {}
    for row in report.money:
        for stage in (row.stage, "all stages"):
            known = sums.pop(stage, MonthlyPrice("", stage, 0, Decimal(0), 0, Decimal(0)))
            sums[stage] = replace(
                known,
                operations=known.operations + row.operations,
                price=known.price + row.price,
                bytes=known.bytes + row.bytes,
                bandwidth_price=known.bandwidth_price + row.bandwidth_price,
            )
    order = [stage.value for stage in Stage if stage.value in sums]
    return [
        (
            stage,
            f"{sums[stage].operations:,}",
            _price(sums[stage].price, report),
            f"{sums[stage].bytes:,}",
            _money(sums[stage].bandwidth_price, report),
        )
        for stage in [*order, *(["all stages"] if sums else [])]
    ]


def _operations_of(report: Report, stage: Stage) -> int:
    return sum(row.operations for row in report.stages if row.stage == stage.value)


def _messages_of(report: Report, stage: Stage) -> int:
    return sum(row.messages for row in report.stages if row.stage == stage.value)


def _status_total(report: Report, statuses: Iterable[str], *, backlog: bool) -> int:
    wanted = set(statuses)
    return sum(
        row.messages
        for row in report.statuses
        if row.status in wanted
        and is_backlog_path(row.path) is backlog
        and not row.path.endswith(DEAD_LETTER_SUFFIX)
    )


# -- the parts ---------------------------------------------------------------------------------


def _verdict(report: Report) -> str:
    span = f"{_moment(report.begins)} to {_moment(report.ends)} (UTC)"
    ledgers = ", ".join(report.survey.ledgers)
    about = f"<p>{escape(span)}, ledgers: {escape(ledgers)}</p>"
    for row in report.lost_logs:
        lost = f"The complete log of {row.ledger} was lost, with its records 1 to {row.last}."
        about += f'<p class="bad">{escape(lost)}</p>'
    if not report.statuses:
        return f"{about}<p>There is no ledger of messages, so messages cannot be reconciled.</p>"
    if report.is_reconciled:
        return f'{about}<p class="good">Every message is accounted for.</p>'
    count = report.suspect_count
    if not count:
        return f"{about}<p>Every message in the ledgers is accounted for.</p>"
    return f'{about}<p class="bad">{count:,} message(s) are not accounted for: see below.</p>'


def _left_out(report: Report) -> str:
    rows = [(str(skipped.path), skipped.why) for skipped in report.survey.left_out]
    if not rows:
        return ""
    return f"<h2>Files that were left out</h2>{grid(('file', 'why'), rows)}"


def _key_figures(report: Report) -> Iterable[tuple[str, str]]:
    moved = sum(row.moved for row in report.transfers)
    dead = sum(row.dead_lettered for row in report.transfers)
    yield "diverted", f"{_messages_of(report, Stage.SEND_TO_BACKLOG):,}"
    yield "brought home", f"{moved:,}"
    yield "could not go home, dead-lettered", f"{dead:,}"
    yield "waiting in the backlog", f"{_status_total(report, ['waiting'], backlog=True):,}"
    yield "outages of entities", f"{len({(o.path, o.failed_over) for o in report.outages}):,}"
    outages = report.outages
    yield "longest time to fail over", _longest(o.seconds_to_fail_over for o in outages)
    yield "longest time until return", _longest(o.seconds_away for o in outages)
    yield "longest time to drain after return", _longest(o.seconds_to_drain for o in outages)
    slowest = max((row.delay_p99 or 0 for row in report.transfers), default=None)
    yield "delay in the backlog, 99th percentile", "-" if slowest is None else duration(slowest)
    yield "billed operations", f"{sum(row.operations for row in report.stages):,}"
    price = sum((row.price for row in report.money), Decimal(0))
    yield f"their price, {report.sheet.name}", _price(price, report)
    bandwidth = sum((row.bandwidth_price for row in report.money), Decimal(0))
    yield "price of their bandwidth", _money(bandwidth, report)


def _longest(times: Iterable[float | None]) -> str:
    return _lasted(max((time for time in times if time is not None), default=None))


def _timeline(report: Report) -> str:
    """Draw the outages of each entity; those of several processes are drawn over each other."""
    if not report.outages:
        return ""
    begins = min(outage.failing for outage in report.outages)
    moments = [
        value
        for outage in report.outages
        for value in (outage.failed_over, outage.returned, outage.drained)
        if value is not None
    ]
    last = max([*moments, report.ends or begins])
    lanes: dict[str, list[LaneSpan]] = {}
    for outage in report.outages:
        spans = lanes.setdefault(outage.path.lower(), [])
        failing, over = outage.failing - begins, outage.failed_over - begins
        back = (outage.returned or last) - begins
        spans.append(LaneSpan(failing, over, "failing", _RED))
        spans.append(LaneSpan(over, back, "sends go to the backlog", _AMBER))
        if outage.drained and outage.returned and outage.drained > outage.returned:
            spans.append(LaneSpan(back, outage.drained - begins, "backlog is drained", _BLUE))
    shown = [TimelineLane(name, spans) for name, spans in sorted(lanes.items())][:CHART_LANES]
    note = f"<p>Time 0 is {_moment(begins)} (UTC).</p>"
    return timeline("Timeline of the outage", shown, last - begins) + note


def _waiting(report: Report) -> str:
    if not report.flow:
        return ""
    begins = report.flow[0].at
    diverted = moved = 0
    points: dict[str, list[tuple[float, float]]] = {"diverted": [], "home": [], "waiting": []}
    for row in report.flow:
        diverted, moved = diverted + row.diverted, moved + row.moved
        at = row.at - begins
        points["diverted"].append((at, diverted))
        points["home"].append((at, moved))
        points["waiting"].append((at, diverted - moved))
    colors = {"diverted": _AMBER, "home": _BLUE, "waiting": _PURPLE}
    series = [Series(name, colors[name], line) for name, line in points.items()]
    return line_chart("Into the backlog and home again", "messages", series)


def _flow(report: Report) -> str:
    direct = _messages_of(report, Stage.SEND)
    diverted = _messages_of(report, Stage.SEND_TO_BACKLOG)
    if not direct + diverted:
        return ""
    moved = sum(row.moved for row in report.transfers)
    dead = sum(row.dead_lettered for row in report.transfers)
    waiting = max(diverted - moved - dead, 0)
    received = min(
        _status_total(report, ["completed"], backlog=False) or direct + moved, direct + moved
    )
    nodes = [
        FlowNode("sent", 0, _GREEN),
        FlowNode("backlog", 1, _AMBER),
        FlowNode("primary", 2, _BLUE),
        FlowNode("dead-lettered", 2, _RED),
        FlowNode("in backlog", 2, _PURPLE),
        FlowNode("received", 3, _GREEN),
        FlowNode("waiting", 3, _GREY),
    ]
    links = [
        FlowLink("sent", "backlog", diverted),
        FlowLink("backlog", "primary", min(moved, diverted)),
        FlowLink("sent", "primary", direct),
        FlowLink("backlog", "dead-lettered", min(dead, diverted)),
        FlowLink("backlog", "in backlog", waiting),
        FlowLink("primary", "received", received),
        FlowLink("primary", "waiting", direct + moved - received),
    ]
    return flow_chart("Flow through the stages, messages", nodes, links)


def _cost(report: Report) -> str:
    operations = {
        stage: _operations_of(report, stage) for stage in Stage if _operations_of(report, stage)
    }
    if not operations:
        return ""
    prices: dict[str, Decimal] = {}
    for row in report.money:
        prices[row.stage] = prices.get(row.stage, Decimal(0)) + row.price
    bars = [
        Bar(
            stage.value,
            count,
            f"{count:,}   {_price(prices.get(stage.value, Decimal(0)), report)}",
            _COLORS.get(stage, _GREY),
        )
        for stage, count in operations.items()
    ]
    rows = [
        (
            row.ledger,
            row.stage,
            f"{row.operations:,}",
            f"{row.messages:,}",
            f"{row.bytes:,}",
        )
        for row in _ordered(report.stages)
    ]
    months = [
        (
            row.month,
            row.stage,
            f"{row.operations:,}",
            _price(row.price, report),
            f"{row.bytes:,}",
            _money(row.bandwidth_price, report),
        )
        for row in report.money
    ]
    return (
        bar_chart("Cost by stage: operations and their price", bars)
        + grid(("ledger", "stage", "operations", "messages", "bytes"), rows)
        + "<h2>Price by month</h2>"
        + grid(("month", "stage", "operations", "price", "bytes", "bandwidth"), months)
    )


def _ordered(rows: Sequence[StageOperations]) -> list[StageOperations]:
    order = {stage.value: at for at, stage in enumerate(Stage)}
    return sorted(rows, key=lambda row: (row.ledger, order[row.stage]))


def _days(report: Report) -> str:
    totals: dict[date, int] = {}
    for row in report.days:
        totals[row.day] = totals.get(row.day, 0) + row.operations
    if len(totals) < 2:
        return ""
    bars = [Bar(str(day), count, f"{count:,}", _BLUE) for day, count in sorted(totals.items())]
    return bar_chart("Billed operations by day", bars[-31:])


def _delays(report: Report) -> str:
    if not report.delays:
        return ""
    bars = [
        Bar(
            f"{duration(row.seconds)} to {duration(2 * row.seconds)}",
            row.messages,
            f"{row.messages:,}",
            _PURPLE,
        )
        for row in report.delays
    ]
    return bar_chart("Delay of diverted messages until they were home", bars)


def _outages(report: Report) -> str:
    if not report.outages:
        return ""
    rows = [
        (
            outage.path,
            outage.process,
            _moment(outage.failing),
            _lasted(outage.seconds_to_fail_over),
            _lasted(outage.seconds_away),
            _lasted(outage.seconds_to_drain),
            "-" if outage.diverted is None else f"{outage.diverted:,}",
            outage.cause or "",
        )
        for outage in report.outages
    ]
    header = ("entity", "process", "failing since", "to fail over", "away", "to drain", "diverted")
    pulled = ""
    if report.pulled:
        queues = [(row.path, f"{row.times:,}") for row in report.pulled]
        pulled = "<h2>Backlog queues that were removed from the rotation</h2>" + grid(
            ("queue", "times"), queues
        )
    return f"<h2>Outages</h2>{grid((*header, 'cause'), rows)}{pulled}"


def _lasted(seconds: float | None) -> str:
    return "-" if seconds is None else duration(round(seconds, 1))


def _transfers(report: Report) -> str:
    if not report.transfers:
        return ""
    rows = [
        (
            row.path or "(none)",
            f"{row.moved:,}",
            f"{row.dead_lettered:,}",
            f"{row.bytes:,}",
            *map(_lasted, (row.delay_p50, row.delay_p90, row.delay_p99, row.delay_max)),
            *map(_places, (row.reordered, row.behind_p50, row.behind_p99, row.behind_max)),
        )
        for row in report.transfers
    ]
    header = ("entity", "moved", "dead-lettered", "bytes", "delay 50 %", "90 %", "99 %", "max")
    more = ("came late", "places late 50 %", "99 %", "max")
    return (
        f"<h2>Diverted messages by entity</h2>{grid((*header, *more), rows)}"
        "<p>A message is late by the number of messages that were accepted after it and arrived "
        "before it.</p>"
    )


def _places(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _reconciliation(report: Report) -> str:
    if not report.statuses:
        return ""
    rows = [
        (row.ledger, row.path or "(deleted queue)", row.status, f"{row.messages:,}")
        for row in report.statuses
    ]
    found = f"<h2>Reconciliation</h2>{grid(('ledger', 'entity', 'status', 'messages'), rows)}"
    if not report.suspect_count:
        return found
    names = [
        (
            row.status,
            row.message_id or "(no id)",
            row.ledger,
            row.path or "",
            "-" if row.sequence_number is None else f"{row.sequence_number}",
            _moment(row.accepted),
        )
        for row in report.suspects
    ]
    header = ("what", "message id", "ledger", "entity", "number", "accepted")
    more = report.suspect_count - len(names)
    rest = f"<p>and {more:,} more: see the table of suspects.</p>" if more > 0 else ""
    return f"{found}<h2>Not accounted for</h2>{grid(header, names)}{rest}"


def _busiest(report: Report) -> str:
    if not report.entities:
        return ""
    rows = [
        (
            row.ledger,
            row.path,
            f"{row.operations:,}",
            f"{row.messages:,}",
            f"{row.bytes:,}",
        )
        for row in sorted(report.entities, key=lambda row: -row.operations)
    ]
    header = ("ledger", "entity", "operations", "messages", "bytes")
    return f"<h2>Busiest entities</h2>{grid(header, rows)}"


def _footer(report: Report) -> str:
    sheet = report.sheet
    billed = "is" if sheet.bill_completions else "is not"
    return (
        f"<p>Prices: {escape(sheet.name)}, as of {sheet.as_of}, from {escape(sheet.source)}. A "
        f"completion {billed} counted as an operation of its own. An operation is 64 KB or part of "
        "it. The base charge of a namespace is not in these prices.</p>"
    )
