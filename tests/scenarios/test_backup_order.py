"""The order of copies in a backup: the secondary before the primary, `spill/` before `log/`."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.words import QUEUE, bodies, peek, queue, send
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


def copy_in_order(site: Site, first: str, second: str) -> Path:
    """Copy two folders; the disk trouble ends, and the spilled sends are moved, in between."""
    copy = site.directory.with_name(f"{site.directory.name}-copy")
    shutil.copytree(site.directory / first, copy / first)
    site.disk.full = False
    site.wait(seconds=2)
    shutil.copytree(site.directory / second, copy / second)
    return copy


def test_a_spilled_send_is_in_a_copy_that_has_the_spill_store_before_the_log(home: Site) -> None:
    home.disk.full = True
    send(home, "an order")
    restore(home, copy_in_order(home, "spill", "log"))
    home.wait(seconds=2)
    assert set(bodies(peek(home))) == {"an order"}


def test_a_spilled_send_may_be_missing_in_a_copy_that_has_the_log_first(home: Site) -> None:
    home.disk.full = True
    send(home, "an order")
    restore(home, copy_in_order(home, "log", "spill"))
    home.wait(seconds=2)
    assert bodies(peek(home)) == []
