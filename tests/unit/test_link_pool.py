"""The pool of links to a Service Bus: how many there may be, and which is closed for a new one."""

from collections.abc import Callable

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from twinbus.errors import OperationTimeoutError
from twinbus.namespace import azure_links
from twinbus.namespace.azure_links import AzureLink, LinkKey, LinkPool, LinkPurpose

ORDERS, BILLS = (LinkKey(path, LinkPurpose.SEND) for path in ("orders", "bills"))


class SdkSender:
    """A sender of the SDK that is not connected."""

    _running = False
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Crew:
    """Carries out work at once."""

    def submit(self, work: Callable[[], None]) -> None:
        work()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> LinkPool:
    monkeypatch.setattr(azure_links, "AZURE_LINKS", 2)
    return LinkPool(lambda key: AzureLink(key, SdkSender()), Crew())  # type: ignore[arg-type]


def test_no_more_links_are_opened_than_the_bound(pool: LinkPool) -> None:
    for _ in range(2):
        pool.take(ORDERS, 0.0)
    with pytest.raises(OperationTimeoutError, match="2 links to the namespace are in use"):
        pool.take(BILLS, 0.0)


def test_a_discarded_link_makes_room_for_another(pool: LinkPool) -> None:
    first, _ = (pool.take(ORDERS, 0.0) for _ in range(2))
    pool.discard(first)
    assert first.sdk.is_closed
    assert pool.take(BILLS, 0.0).key == BILLS


def test_the_link_that_was_idle_for_longest_is_closed_for_a_new_one(pool: LinkPool) -> None:
    older, newer = (pool.take(ORDERS, 0.0) for _ in range(2))
    for link in (newer, older):
        pool.give_back(link)
    older.used_at, newer.used_at = 1.0, 2.0
    pool.take(BILLS, 0.0)
    assert (older.sdk.is_closed, newer.sdk.is_closed) == (True, False)
    assert pool.take(ORDERS, 0.0) is newer
