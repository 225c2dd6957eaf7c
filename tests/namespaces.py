"""How tests open a namespace: in this process, and behind a door for clients.

Every world, site and server of the tests that lives in this process is built from these functions.
A server that is a process of its own is `tests/scenarios/server_process.py`. Two kinds of tests
open a namespace as an application does: the soaks, and tests of a directory that is refused.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinbus.broker.turn.engine import EngineSettings, Storages
from twinbus.clock import Clock, SystemClock
from twinbus.connection import ConnectionString, Place
from twinbus.ledger import NO_LEDGER
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import PutKey
from twinbus.protocol.keys import ROOT_KEY, Claim, SharedAccessKey
from twinbus.server.door import Door

ROOT = SharedAccessKey(
    name=ROOT_KEY, claims=(Claim.MANAGE,), primary="first" * 8, secondary="second" * 8
)


def embedded(
    directory: Path | EngineSettings,
    clock: Clock | None = None,
    storages: Storages | None = None,
    *,
    threaded: bool = True,
    **settings: Any,
) -> EmbeddedNamespace:
    """Open a namespace in this process.

    Without settings of an engine there are no ledgers, unless `settings` names some.
    """
    if isinstance(directory, Path):
        directory = engine_settings(directory, **settings)
    return EmbeddedNamespace(directory, clock, storages, threaded=threaded)


def engine_settings(directory: Path, **settings: Any) -> EngineSettings:
    return EngineSettings(directory=directory, **{"ledger": NO_LEDGER, **settings})


@contextmanager
def door_of(
    namespace: EmbeddedNamespace, clock: Clock | None = None, **options: Any
) -> Iterator[Door]:
    """Open a door, which admits the bearer of `ROOT`."""
    namespace.ask(PutKey(ROOT))
    with closing(Door(namespace, clock or SystemClock(), **options)) as door:
        yield door


def address_of(door: Door, key: SharedAccessKey | None = ROOT, /, **parts: Any) -> ConnectionString:
    """Return where the bearer of a key finds a door."""
    where = ConnectionString(place=Place.SERVER, host="127.0.0.1", port=door.port)
    if key is not None:
        where = replace(where, key_name=key.name, key=key.primary, entity_path=key.entity_path)
    return replace(where, **parts)
