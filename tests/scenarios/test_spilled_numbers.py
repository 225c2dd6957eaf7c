"""Numbers of a spilled send: all it may be known by is kept with it, and survives a restart."""

import pytest

from tests.contracts.words import QUEUE, message, queue, take
from tests.scenarios.site import Site
from twinbus.protocol.commands import Origin, Send
from twinbus.protocol.origins import sender_source

pytestmark = pytest.mark.timeout(5)  # a broker that tries again without a pause never ends
BACKLOG = "contoso/x-servicebus-transfer/0"
SENDER, OTHER = sender_source(7), sender_source(8)
TRIED = Origin(SENDER, range(5, 7))  # by a client, before it was diverted
FOUND = Origin(BACKLOG, [1, 2], TRIED)
ENDINGS = ["reopen", "crash"]


def send(site: Site, origin: Origin) -> list[bool]:
    """Send two messages; return which were enqueued at once."""
    receipt = site.ask(Send(QUEUE, [message("a"), message("b")], origin))
    return [bool(number) for number in receipt.sequence_numbers]


def spill(site: Site, origin: Origin) -> None:
    queue(site)
    site.disk.full = True
    assert send(site, origin) == [False, False]


def mend(site: Site) -> None:
    """The disk works again, and the broker has had time to notice."""
    site.disk.full = False
    site.wait(seconds=2)


@pytest.mark.parametrize("again", [FOUND, TRIED, Origin(BACKLOG, [1, 2])], ids=str)
def test_a_spilled_send_is_known_by_all_its_origins(site: Site, again: Origin) -> None:
    spill(site, FOUND)
    mend(site)
    assert send(site, again) == [False, False]
    assert take(site) == ["a", "b"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("again", [FOUND, TRIED, Origin(BACKLOG, [1, 2])], ids=str)
def test_a_send_spilled_before_a_restart_is_known_by_all_its_origins(
    site: Site, again: Origin, ending: str
) -> None:
    spill(site, FOUND)
    getattr(site, ending)()
    mend(site)
    assert send(site, again) == [False, False]
    assert take(site) == ["a", "b"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("again", [FOUND, TRIED], ids=str)
def test_origins_of_a_spilled_send_are_known_after_another_restart(
    site: Site, again: Origin, ending: str
) -> None:
    spill(site, FOUND)
    mend(site)
    getattr(site, ending)()
    assert send(site, again) == [False, False]
    assert take(site) == ["a", "b"]


def test_a_send_spilled_twice_by_different_origins_appears_once(site: Site) -> None:
    spill(site, TRIED)
    send(site, FOUND)
    mend(site)
    assert take(site) == ["a", "b"]


def test_origins_in_a_chain_are_spilled_to_the_last(site: Site) -> None:
    spill(site, Origin(BACKLOG, [1, 2], Origin(SENDER, [5, 6], Origin(OTHER, [8, 9]))))
    site.reopen()
    mend(site)
    assert send(site, Origin(OTHER, [8, 9])) == [False, False]
    assert take(site) == ["a", "b"]


def test_only_the_numbers_of_a_spilled_send_are_known(site: Site) -> None:
    spill(site, FOUND)
    site.reopen()
    mend(site)
    assert send(site, Origin(SENDER, range(7, 9))) == [True, True]
    assert take(site) == ["a", "b", "a", "b"]


def test_a_message_known_from_before_is_not_spilled_again_under_a_new_origin(site: Site) -> None:
    queue(site)
    assert all(send(site, TRIED))
    site.disk.full = True
    send(site, FOUND)
    mend(site)
    assert take(site) == ["a", "b"]
