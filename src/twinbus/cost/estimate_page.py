"""An estimate as a page: the cost of an outage, and how it depends on one parameter."""

from collections.abc import Sequence
from decimal import Decimal
from html import escape

from twinbus.cost.charts import Bar, bar_chart, duration, grid, page, table
from twinbus.cost.estimate import Estimate

_AMBER, _BLUE, _PURPLE, _RED = "#c77700", "#1769aa", "#7a3fb5", "#b3261e"
SWEEP_COLUMNS = ("diverted", "operations", "price", "backlog", "fits", "full after", "drain")


def figures(found: Estimate) -> list[tuple[str, str]]:
    """Return an estimate as pairs of name and value."""
    sheet = found.sheet
    stages = [
        (f"operations: {stage.value}", f"{count:,}   {_price(found.prices[stage], found)}")
        for stage, count in found.operations.items()
    ]
    carried = sum(found.carried.values())
    return [
        ("the first send is diverted after", duration(found.plan.until_diverted.total_seconds())),
        ("sends are diverted for", duration(found.away.total_seconds())),
        ("messages diverted", f"{found.diverted:,}"),
        ("messages that fail or wait before the failover", f"{found.failed:,}"),
        ("messages that find the backlog full", f"{found.refused:,}"),
        *stages,
        ("bandwidth", f"{carried:,} bytes   {sheet.text_of(found.bandwidth_price)}"),
        ("price of the outage", _price(found.price, found)),
        ("backlog", f"{found.backlog_bytes:,} of {found.capacity_bytes:,} bytes"),
        ("the backlog is full after", _full(found)),
        ("drained in", duration(found.drain.total_seconds())),
        (f"idle polls a month, {found.plan.syphons} syphon(s)", f"{found.idle_operations:,}"),
        ("their price a month", _price(found.idle_price, found)),
        ("base charge a month, two namespaces", f"{found.base_price:,.2f} {sheet.currency}"),
    ]


def _price(amount: Decimal, found: Estimate) -> str:
    """Return an amount of money; operations within the included ones are free."""
    if not amount and found.sheet.included:
        return "within the included operations"
    return found.sheet.text_of(amount)


def sweep_row(found: Estimate) -> tuple[str, ...]:
    """Return an estimate as a table row, for SWEEP_COLUMNS."""
    return (
        f"{found.diverted:,}",
        f"{sum(found.operations.values()):,}",
        _price(found.price, found),
        f"{found.backlog_bytes:,}",
        "yes" if found.fits else "no",
        _full(found),
        duration(found.drain.total_seconds()),
    )


def _full(found: Estimate) -> str:
    return "it fits" if found.full_after is None else duration(found.full_after.total_seconds())


def estimate_page(
    found: Estimate, swept: str = "", sweep: Sequence[tuple[str, Estimate]] = ()
) -> str:
    """Return the page."""
    sheet = found.sheet
    colors = (_AMBER if found.fits else _RED, _BLUE, _PURPLE)
    operations = [
        Bar(stage.value, count, f"{count:,}", colors[0])
        for stage, count in found.operations.items()
    ]
    parts = [table(figures(found)), bar_chart("Operations by stage", operations)]
    if sweep:
        prices = [
            Bar(f"{swept} {value}", float(variant.price), f"{variant.price:,.2f}", colors[1])
            for value, variant in sweep
        ]
        backlogs = [
            Bar(
                f"{swept} {value}",
                variant.backlog_bytes,
                f"{100 * variant.backlog_bytes / variant.capacity_bytes:.0f} % of the capacity",
                colors[2] if variant.fits else _RED,
            )
            for value, variant in sweep
        ]
        rows = [(value, *sweep_row(variant)) for value, variant in sweep]
        parts += [
            bar_chart(f"Price of the outage, {sheet.currency}", prices),
            bar_chart("Backlog", backlogs),
            grid((swept, *SWEEP_COLUMNS), rows),
        ]
    parts.append(
        f"<p>Prices: {escape(sheet.name)}, as of {sheet.as_of}, from {escape(sheet.source)}.</p>"
    )
    return page("What an outage will cost", parts)
