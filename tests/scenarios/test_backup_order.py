"""Backups of both sides of a pairing: the secondary is copied first, then the primary."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.words import QUEUE, bodies, peek, queue
from tests.scenarios.site import Site
from twinbus.message import BrokeredMessage, to_batch
from twinbus.protocol.commands import Send
from twinbus.testing.mover import Mover

BACKLOG = "contoso/x-servicebus-transfer/0"
HERE = {"x-ms-path": QUEUE}


@pytest.fixture
def home(make_site: Callable[..., Site]) -> Site:
    site = make_site()
    queue(site)
    return site


@pytest.fixture
def away(make_site: Callable[..., Site]) -> Site:
    """A secondary with one diverted message."""
    site = make_site()
    queue(site, BACKLOG)
    site.ask(Send(BACKLOG, to_batch([BrokeredMessage(b"an order", application_properties=HERE)])))
    return site


def copy_of(site: Site) -> Path:
    """Copy the directory of a running namespace, as a backup does."""
    return shutil.copytree(site.directory, site.directory.with_name(f"{site.directory.name}-copy"))


def restore(site: Site, copy: Path) -> None:
    """Lose the directory, and go on with the copy."""
    site.crash()
    site.embedded.close()
    shutil.rmtree(site.directory)
    shutil.copytree(copy, site.directory)
    site.open()


def bring_home(away: Site, home: Site) -> None:
    while Mover(home.embedded, away.embedded).move(BACKLOG):
        pass


def test_a_message_that_came_home_between_the_two_copies_is_there_once(
    away: Site, home: Site
) -> None:
    copy_of_secondary = copy_of(away)
    bring_home(away, home)
    copy_of_primary = copy_of(home)
    restore(away, copy_of_secondary)
    restore(home, copy_of_primary)
    bring_home(away, home)
    assert bodies(peek(home)) == ["an order"]


def test_a_message_that_came_home_between_copies_in_the_other_order_is_in_neither(
    away: Site, home: Site
) -> None:
    copy_of_primary = copy_of(home)
    bring_home(away, home)
    copy_of_secondary = copy_of(away)
    restore(home, copy_of_primary)
    restore(away, copy_of_secondary)
    bring_home(away, home)
    assert bodies(peek(home)) == []
