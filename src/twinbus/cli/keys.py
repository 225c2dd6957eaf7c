"""`twinbus keys`: manages the access keys of a namespace."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import click

from twinbus.cli.context import Settings, examples, print_json, print_table, talks_to_namespace
from twinbus.connection import ConnectionString, Place
from twinbus.protocol.keys import Claim, SharedAccessKey

_CLAIM = click.Choice([claim.value for claim in Claim])


@click.group()
def keys() -> None:
    """Create, list, show, rotate and delete access keys."""


def _print(settings: Settings, found: Sequence[SharedAccessKey], *, secrets: bool) -> None:
    """Print keys; the secrets only for a single key."""
    if settings.as_json:
        printed = [
            {
                "name": key.name,
                "entity_path": key.entity_path,
                "claims": [claim.value for claim in key.claims],
                **({"connection_string": _connection(settings, key)} if secrets else {}),
                **({"secondary": key.secondary} if secrets else {}),
            }
            for key in found
        ]
        print_json(printed[0] if secrets else printed)
    elif secrets:
        click.echo(_connection(settings, found[0]))
    else:
        rows = ((k.name, k.entity_path, ", ".join(c.value for c in k.claims)) for k in found)
        print_table(["key", "entity", "claims"], rows, "there are none")


def _connection(settings: Settings, key: SharedAccessKey) -> str:
    """Return the connection string of a key; of an embedded namespace, its name and secret."""
    connection = ConnectionString.parse(settings.connection_string)
    if connection.place is Place.EMBEDDED:
        return f"SharedAccessKeyName={key.name};SharedAccessKey={key.primary}"
    return replace(
        connection,
        key_name=key.name,
        key=key.primary,
        token="",
        entity_path=key.entity_path,
    ).to_text()


@keys.command("list", epilog=examples("twinbus keys list --json"))
@talks_to_namespace
def list_keys(settings: Settings) -> None:
    """List the keys of the namespace and its entities, without secrets."""
    with settings.manager() as manager:
        _print(settings, manager.list_keys(), secrets=False)


@keys.command("create", epilog=examples("twinbus keys create shop --claim send --on orders"))
@click.argument("name")
@click.option(
    "--claim",
    "claims",
    type=_CLAIM,
    multiple=True,
    required=True,
    help="A right of the key; may be given several times.",
)
@click.option(
    "--on",
    "entity_path",
    metavar="PATH",
    help="Limit the key to this queue or topic [default: the whole namespace].",
)
@talks_to_namespace
def create_key(
    settings: Settings, name: str, claims: Sequence[str], entity_path: str | None
) -> None:
    """Create a key and print its connection string."""
    with settings.manager() as manager:
        made = manager.create_key(name, [Claim(claim) for claim in claims], entity_path)
    _print(settings, [made], secrets=True)


@keys.command("show", epilog=examples("twinbus keys show shop --on orders"))
@click.argument("name")
@click.option("--on", "entity_path", metavar="PATH", help="The queue or topic of the key.")
@talks_to_namespace
def show_key(settings: Settings, name: str, entity_path: str | None) -> None:
    """Print the connection string of a key."""
    with settings.manager() as manager:
        found = manager.get_key(name, entity_path)
    _print(settings, [found], secrets=True)


@keys.command(
    "regenerate",
    epilog=examples("twinbus keys regenerate shop primary --on orders")
    + "\n\nTo rotate without an outage: move clients to the secondary, regenerate the primary, "
    "move them back, regenerate the secondary.",
)
@click.argument("name")
@click.argument("secret", type=click.Choice(["primary", "secondary"]))
@click.option("--on", "entity_path", metavar="PATH", help="The queue or topic of the key.")
@talks_to_namespace
def regenerate_key(
    settings: Settings,
    name: str,
    secret: Literal["primary", "secondary"],
    entity_path: str | None,
) -> None:
    """Replace one of the two secrets of a key; tokens signed with the other stay valid."""
    with settings.manager() as manager:
        made = manager.regenerate_key(name, secret, entity_path)
    _print(settings, [made], secrets=True)


@keys.command("delete", epilog=examples("twinbus keys delete shop --on orders"))
@click.argument("name")
@click.option("--on", "entity_path", metavar="PATH", help="The queue or topic of the key.")
@talks_to_namespace
def delete_key(settings: Settings, name: str, entity_path: str | None) -> None:
    """Delete a key; its tokens are no longer valid."""
    with settings.manager() as manager:
        manager.delete_key(name, entity_path)
