"""`twinbus estimate`: what an outage costs, and whether its messages fit the backlog queues."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from twinbus.cli.context import Span, prices_by, print_json, print_table, write_page
from twinbus.cost.estimate import Estimate, Plan, estimate
from twinbus.cost.estimate_page import SWEEP_COLUMNS, estimate_page, figures, sweep_row
from twinbus.cost.prices import load_sheet
from twinbus.errors import InvalidArgumentError
from twinbus.spans import format_span, parse_span

_DEFAULTS = Plan()
_SPANS = {"outage", "failover_interval", "try_timeout", "ping_interval"}
_NUMBERS = {"rate": float, "drain_rate": float}
_SWEPT = (
    *("processes", "entities", "rate", "size", "queues", "syphons", "drain_rate"),
    *sorted(_SPANS),
)


def _sweep(
    _: click.Context, __: click.Parameter, given: str | None
) -> tuple[str, list[tuple[str, Any]]] | None:
    """Parse NAME=VALUE,VALUE,...; return the name, and each value as text and converted."""
    if given is None:
        return None
    name, equals, values = given.partition("=")
    name = name.strip().replace("-", "_")
    texts = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or name not in _SWEPT or not texts:
        names = ", ".join(known.replace("_", "-") for known in _SWEPT)
        raise click.BadParameter(
            f"{given!r:.60} cannot be swept; write NAME=VALUE,VALUE,... with a NAME of {names}"
        )
    try:
        return name, [(text, _value(name, text)) for text in texts]
    except InvalidArgumentError as error:
        raise click.BadParameter(error.text) from error


def _value(name: str, text: str) -> Any:
    """Return one value of a sweep; `Plan` checks its range."""
    if name in _SPANS:
        return parse_span(text)
    kind = _NUMBERS.get(name, int)
    try:
        return kind(text)
    except ValueError:  # Python also raises it for integers of thousands of digits
        wanted = "a number" if kind is float else "a whole number"
        raise InvalidArgumentError(f"{name} is {text!r:.40}; it must be {wanted}") from None


@click.command(
    epilog="""\b
Examples:
  twinbus estimate --rate 500 --size 2048 --outage 2h --prices azure-standard
  twinbus estimate --rate 500 --sweep outage=10m,1h,4h,1d --page outage.html
  twinbus estimate --queues 20 --rate 5000 --used 50000000 --prices ./our-prices.toml"""
)
@click.option(
    "--processes",
    default=_DEFAULTS.processes,
    show_default=True,
    help="Paired applications, each with a factory.",
)
@click.option(
    "--entities", default=_DEFAULTS.entities, show_default=True, help="Entities that fail."
)
@click.option(
    "--rate",
    default=_DEFAULTS.rate,
    show_default=True,
    help="Messages a second to all of these entities together.",
)
@click.option(
    "--size", default=_DEFAULTS.size, show_default=True, help="Bytes of a message with properties."
)
@click.option("--queues", default=_DEFAULTS.queues, show_default=True, help="Backlog queues.")
@click.option(
    "--syphons",
    default=_DEFAULTS.syphons,
    show_default=True,
    help="Processes that run a syphon; each polls every backlog queue.",
)
@click.option(
    "--outage",
    type=Span(),
    default=format_span(_DEFAULTS.outage),
    show_default=True,
    help="How long the entities do not answer.",
)
@click.option(
    "--failover-interval",
    type=Span(),
    default=format_span(_DEFAULTS.failover_interval),
    show_default=True,
    help="How long failures are tolerated before sends are diverted.",
)
@click.option(
    "--try-timeout",
    type=Span(),
    default=format_span(_DEFAULTS.try_timeout),
    show_default=True,
    help="Timeout of one try: if the primary does not answer, a failure counts after this time.",
)
@click.option(
    "--ping-interval",
    type=Span(),
    default=format_span(_DEFAULTS.ping_interval),
    show_default=True,
    help="How often each process pings each failed entity.",
)
@click.option(
    "--drain-rate",
    default=_DEFAULTS.drain_rate,
    show_default=True,
    help="Messages a second that the syphon brings home.",
)
@click.option(
    "--queue-megabytes",
    default=_DEFAULTS.queue_megabytes,
    show_default=True,
    help="Maximum size of each backlog queue.",
)
@prices_by("azure-standard")
@click.option("--used", default=0, show_default=True, help="Operations already used in this month.")
@click.option(
    "--sweep",
    callback=_sweep,
    metavar="NAME=V,V,...",
    help="Repeat the estimate with these values of an option.",
)
@click.option(
    "--page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with charts."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def estimate_command(
    prices: str,
    bill_completions: bool | None,
    used: int,
    sweep: tuple[str, list[tuple[str, Any]]] | None,
    page: Path | None,
    as_json: bool,
    **plan: Any,
) -> None:
    """Estimate what an outage will cost, and whether the backlog queues can hold its messages."""
    sheet = load_sheet(prices).with_completions(bill_completions)
    base = Plan(**plan)
    found = estimate(base, sheet, used)
    swept, values = sweep or ("", [])
    rows = [
        (text, estimate(replace(base, **{swept: value}), sheet, used)) for text, value in values
    ]
    if as_json:
        for result in [found, *(swept_result for _, swept_result in rows)]:
            print_json(_plain(result))
    else:
        print_table(["", "estimate"], figures(found), "")
        if rows:
            click.echo()
            name = swept.replace("_", "-")
            print_table([name, *SWEEP_COLUMNS], [(text, *sweep_row(e)) for text, e in rows], "")
        click.echo(f"\nprices: {sheet.name}, as of {sheet.as_of}, from {sheet.source}")
    if page is not None:
        write_page(page, estimate_page(found, swept.replace("_", "-"), rows))
        click.echo(f"page: {page}", err=True)


def _plain(found: Estimate) -> dict[str, Any]:
    """Return an estimate for JSON."""
    plan = found.plan
    spans = {name: getattr(plan, name).total_seconds() for name in _SPANS}
    return {
        "plan": {
            **{name: getattr(plan, name) for name in _SWEPT if name not in _SPANS},
            **{f"{name}_s": seconds for name, seconds in spans.items()},
        },
        "prices": found.sheet.name,
        "currency": found.sheet.currency,
        "diverted": found.diverted,
        "refused": found.refused,
        "failed": found.failed,
        "pings": found.pings,
        "operations": {stage.value: count for stage, count in found.operations.items()},
        "bytes": {stage.value: size for stage, size in found.carried.items()},
        "bandwidth_price": str(found.bandwidth_price),
        "price": str(found.price),
        "price_by_stage": {stage.value: str(price) for stage, price in found.prices.items()},
        "idle_polls_a_month": found.idle_operations,
        "idle_price_a_month": str(found.idle_price),
        "base_price_a_month": str(found.base_price),
        "backlog_bytes": found.backlog_bytes,
        "capacity_bytes": found.capacity_bytes,
        "fits": found.fits,
        "full_after_s": _seconds(found.full_after),
        "drain_s": _seconds(found.drain),
    }


def _seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()
