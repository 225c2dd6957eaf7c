"""A client that cannot reach its server keeps nothing open for the connections that failed."""

import gc
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until
from twinbus.connection import ConnectionString, Place
from twinbus.errors import CommunicationError
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import Peek

TRIES, CALLERS = 40, 4


@pytest.fixture
def unreachable() -> Iterator[ServerNamespace]:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    where = ConnectionString(place=Place.SERVER, host="127.0.0.1", port=port)
    gc.disable()  # garbage collection would close what is left open, but much later
    with ServerNamespace(where) as namespace:
        yield namespace
    gc.enable()


def ask_in_vain(namespace: ServerNamespace) -> None:
    with pytest.raises(CommunicationError):
        namespace.ask(Peek("orders"), 5)


def open_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def assert_closed(before: int) -> None:
    """Wait for the threads of the failed links, which close what they polled after the error."""
    until(lambda: open_descriptors() <= before, "the failed links have closed everything")


def test_failed_connections_leave_no_descriptors_open(unreachable: ServerNamespace) -> None:
    ask_in_vain(unreachable)
    before = open_descriptors()
    for _ in range(TRIES):
        ask_in_vain(unreachable)
    assert_closed(before)


def test_failed_connections_of_several_callers_leave_no_descriptors_open(
    unreachable: ServerNamespace,
) -> None:
    ask_in_vain(unreachable)
    before = open_descriptors()

    def ask_often() -> None:
        for _ in range(TRIES):
            ask_in_vain(unreachable)

    threads = [threading.Thread(target=ask_often) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_closed(before)


def test_failed_submissions_leave_no_descriptors_open(unreachable: ServerNamespace) -> None:
    ask_in_vain(unreachable)
    before = open_descriptors()
    for _ in range(TRIES):
        with pytest.raises(CommunicationError):
            unreachable.submit(Peek("orders")).result(5)
    assert_closed(before)
