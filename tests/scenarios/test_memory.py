"""Memory that clients make a server take has a bound, and is given back when they are done."""

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.contracts.words import QUEUE, queue, send
from tests.scenarios.server_process import ORDERS, Server
from tests.scenarios.site import Site
from tests.soak.bad_bytes_tools import Exchange, frames_of, good_token
from tests.soak.server_process import footprint
from tests.waiting import until
from twinbus import BrokeredMessage
from twinbus.connection import ConnectionString
from twinbus.errors import EntityNotFoundError
from twinbus.limits import MAX_UNREAD_BYTES
from twinbus.protocol.commands import DeleteEntity, GetRuntimeProperties, Peek

MB = 1024 * 1024
REPLIES = 40
GIVEN_BACK_KB = 40 * 1024  # a server has this much more after large requests than before any
COPIES = 4  # of what a client has not read: columns, the frame, the socket's buffer, and slack


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Run without Python's garbage collector: what only it frees stays for a long time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def peak_kb(pid: int) -> int:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def browse_much(server: Server) -> None:
    """Ask at once for many replies of 8 MB, and read all of them."""
    connection = ConnectionString.parse(server.connection)
    with Exchange(server.port, good_token(connection)) as exchange:
        exchange.frame()  # the welcome
        exchange.write(frames_of(*[Peek("orders", 0, 1000)] * REPLIES))
        sizes = [len(exchange.frame()[1]) for _ in range(REPLIES)]
    assert min(sizes) > 8 * MB


def test_large_replies_take_memory_within_a_bound_and_give_it_back(server: Server) -> None:
    server.start(ORDERS)
    assert server.process is not None
    pid = server.process.pid
    with server.factory() as factory:
        sender = factory.create_message_sender("orders")
        for _ in range(64):  # one by one: a reply is then a copy of many records
            sender.send(BrokeredMessage(bytes(128 * 1024)))
    before_kb, peak_before_kb = footprint(pid).memory_kb, peak_kb(pid)
    browse_much(server)
    assert peak_kb(pid) - peak_before_kb < COPIES * MAX_UNREAD_BYTES // 1024
    until(lambda: footprint(pid).memory_kb - before_kb < GIVEN_BACK_KB)


def test_clients_that_vanish_leave_nothing_large_behind(server: Server) -> None:
    server.start(ORDERS)
    assert server.process is not None
    pid = server.process.pid
    server.send(*[bytes(128 * 1024)] * 64)
    connection = ConnectionString.parse(server.connection)
    before_kb = footprint(pid).memory_kb
    for _ in range(8):
        with Exchange(server.port, good_token(connection)) as exchange:
            exchange.frame()  # the welcome
            exchange.write(frames_of(*[Peek("orders", 0, 1000)] * 4))
            assert exchange.line.recv(1)  # the first reply is under way
    until(lambda: footprint(pid).memory_kb - before_kb < GIVEN_BACK_KB)


@pytest.mark.usefixtures("without_collector")
def test_a_deleted_queue_is_freed_at_once(site: Site) -> None:
    queue(site)
    send(site, *map(str, range(100)))
    columns = weakref.ref(site.queue_of(QUEUE).waiting)
    site.embedded.ask(DeleteEntity(QUEUE))
    assert columns() is None


@pytest.mark.usefixtures("without_collector")
def test_the_error_of_a_refused_command_does_not_keep_its_turn(site: Site) -> None:
    refused: Future[object] = site.embedded.submit(GetRuntimeProperties("missing"))
    error = refused.exception()
    assert isinstance(error, EntityNotFoundError)
    assert error.__traceback__ is None
