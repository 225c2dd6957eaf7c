"""`twinbus demo`: shows an outage of a paired namespace, with real processes."""

from pathlib import Path

import click

from twinbus.cli.context import ExitCode, Number, examples
from twinbus.extras import require

_PAGE = Path("outage.html")


@click.command(epilog=examples("twinbus demo", "twinbus demo --primary rabbitmq"))
@click.option(
    "--seconds",
    default=8.0,
    show_default=True,
    type=Number(0.1, 3600),
    help="Length of each of the three acts: before, during and after the outage.",
)
@click.option(
    "--primary",
    type=click.Choice(["twinbus", "servicebus", "rabbitmq"]),
    default="twinbus",
    show_default=True,
    help="servicebus: a Twinbus server that applications on the SDK of Azure Service Bus reach at "
    "sb://. rabbitmq: a RabbitMQ broker, which must be installed; there is no report then.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_PAGE,
    show_default=True,
    help="Where the page about the outage is written.",
)
def demo(seconds: float, primary: str, report: Path) -> None:
    """Kill a broker with -9 under paired applications, and bring their messages home.

    Servers are started in a temporary directory and on free ports of this machine. Applications
    send, the primary is killed and started again, and the syphon on Spark brings the diverted
    messages home. At the end every message is accounted for. The exit code is 0 if none was lost
    or doubled.
    """
    if primary == "rabbitmq":
        require("twinbus demo --primary rabbitmq", "rabbitmq")
        from twinbus.demo.rabbitmq_outage import run_rabbitmq_demo  # noqa: PLC0415 - needs it

        is_good = run_rabbitmq_demo(seconds)
    else:
        if primary == "servicebus":
            require("twinbus demo --primary servicebus", "azure")
        from twinbus.demo.outage import run_demo  # noqa: PLC0415 - imports Spark

        is_good = run_demo(seconds, report, on_sdk=primary == "servicebus")
    if not is_good:
        raise click.exceptions.Exit(ExitCode.REFUSED)
