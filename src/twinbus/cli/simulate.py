"""`twinbus simulate`: simulates hours of outages in seconds, and checks the guarantees."""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import click

from twinbus.cli.context import ExitCode, Number
from twinbus.limits import MAX_INT64

_ROWS = {
    "messages sent": "sent",
    "acknowledged": "acknowledged",
    "sends that raised": "raised",
    "diverted to the backlog": "diverted",
    "brought home": "moved",
    "out of order": "reordered",
    "poison set aside": "poisoned",
    "faults": "faults",
}


@contextmanager
def _without_log() -> Iterator[None]:
    """Silence the log inside the block: the simulation prints its own lines."""
    log = logging.getLogger("twinbus")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@click.command(
    epilog="""\b
Examples:
  twinbus simulate
  twinbus simulate --seed 7 --hours 24
  twinbus simulate --seed 7 --quiet
  twinbus simulate --seed 7 --preserve-order"""
)
@click.option(
    "--seed",
    type=click.IntRange(-MAX_INT64, MAX_INT64),
    help="Seed of all random choices; the same seed repeats a run [default: a new one].",
)
@click.option(
    "--hours",
    default=2.0,
    show_default=True,
    type=Number(0.1, 1000),
    help="Simulated time.",
)
@click.option("--quiet", is_flag=True, help="Print only the verdict.")
@click.option("--preserve-order", is_flag=True, help="Pair with preserve_order=True.")
def simulate(seed: int | None, hours: float, quiet: bool, preserve_order: bool) -> None:
    """Simulate outages of paired clients in this process, and audit every message.

    Two namespaces, several paired factories and a mover run on a simulated clock. Entities,
    namespaces, backlog queues, replies and clocks fail at times that depend on the seed. The same
    seed gives the same run.
    """
    from twinbus.testing.outage import OutageSimulation  # noqa: PLC0415 - loads a broker

    seed = secrets.randbelow(10**6) if seed is None else seed
    with _without_log():
        simulation = OutageSimulation(
            seed=seed,
            hours=hours,
            preserve_order=preserve_order,
            report=None if quiet else click.echo,
        )
        click.echo(f"seed {seed}, {hours:g} hours: {simulation.setting}")
        verdict = simulation.run()
    for name, field in _ROWS.items():
        click.echo(f"{getattr(verdict, field):>9,}  {name}")
    if verdict.is_good:
        click.echo("every guarantee held: lost 0, doubled 0")
        return
    for violation in verdict.violations:
        click.echo(f"BROKEN    {violation}")
    option = " --preserve-order" if preserve_order else ""
    click.echo(f"replay it with: twinbus simulate --seed {seed} --hours {hours:g}{option}")
    raise click.exceptions.Exit(ExitCode.REFUSED)
