"""`twinbus restored`: checks a directory that was restored, or that lost a part of its log.

The command imports the broker when it runs, so that other commands do not wait for that import.
"""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from twinbus import compute as pc
from twinbus.cli.context import examples
from twinbus.ledger import ACCEPTED, DELETED, ENDED, ENDINGS, FOLDER, LedgerKind

if TYPE_CHECKING:
    from twinbus.namespace.embedded import Lineage


@click.command(
    epilog=examples("twinbus restored ./contoso", "twinbus restored ./contoso --accept-damage")
)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--accept-damage",
    is_flag=True,
    help="Start without records and files that are missing or damaged; their content is lost.",
)
def restored(directory: Path, accept_damage: bool) -> None:
    """Check DIRECTORY after its log was restored from a backup or lost a part.

    Stop the server first. The command reads the whole log, records the lost records in the ledger,
    and prints a summary. The server does the same at its next start. Run the command to get the
    summary before that, or with --accept-damage when the server refuses to start.
    """
    from twinbus.namespace.embedded import EmbeddedNamespace, EngineSettings  # noqa: PLC0415

    settings = EngineSettings(directory=directory, accept_damage=accept_damage)
    with EmbeddedNamespace(settings) as namespace:
        entities = namespace.snapshot().entities
        lineage = namespace.lineage
    messages = sum(e.active_message_count + e.scheduled_message_count for e in entities)
    dead = sum(e.dead_letter_message_count for e in entities)
    click.echo(
        f"{directory} is in order: {len(entities)} entities, {messages} messages, {dead} dead "
        "letters."
    )
    if lineage.lost_until == lineage.last_record:
        click.echo("No record is known to be missing.")
        return
    click.echo(
        f"The log ended with record {lineage.last_record}; record {lineage.lost_until} had been "
        "written. What came in between is lost."
    )
    if not lineage.last_record:
        click.echo("The log was empty: entities, keys and session states are lost, too.")
    for path, count in sorted(_lost(directory, lineage).items()):
        click.echo(f"  {path}: {count} accepted messages are lost")
    click.echo("`twinbus report` names them, as far as the ledger knows them.")


def _lost(directory: Path, lineage: "Lineage") -> Counter[str]:
    """Return by path how many messages the lost records accepted and did not settle."""
    folder = directory / FOLDER / LedgerKind.MESSAGES.value
    if not folder.is_dir():
        return Counter()
    import pyarrow.dataset as ds  # noqa: PLC0415 - other commands do not need it

    rows = ds.dataset(folder, format="parquet", exclude_invalid_files=True).filter(
        (pc.field("record") > lineage.last_record) & (pc.field("record") <= lineage.lost_until)
    )
    is_accepted = pc.field("event") == ACCEPTED
    is_end = pc.field("event").isin([*ENDINGS, ENDED, DELETED])
    ends: dict[int, list[tuple[int, int]]] = {}
    for row in rows.filter(is_end).to_table(columns=["number", "first", "last"]).to_pylist():
        ends.setdefault(row["number"], []).append((row["first"], row["last"]))
    accepted = rows.filter(is_accepted).to_table(columns=["path", "number", "first"])
    lost: Counter[str] = Counter()
    for number in pc.unique(accepted.column("number")).to_pylist():
        of_queue = accepted.filter(pc.field("number") == number)
        sequence = np.unique(of_queue.column("first").to_numpy())
        remains = np.ones(len(sequence), bool)
        for first, last in ends.get(number, ()):
            remains[np.searchsorted(sequence, first) : np.searchsorted(sequence, last, "right")] = (
                False
            )
        lost[of_queue.column("path")[-1].as_py()] += int(remains.sum())
    return +lost
