"""How long opening a connection may take: no longer than the try that needs it."""

import socket
import threading
from typing import Any

import pytest

from twinbus import OperationTimeoutError
from twinbus.connection import ConnectionString, Place
from twinbus.errors import InvalidArgumentError
from twinbus.limits import SECOND_US
from twinbus.namespace import server_socket
from twinbus.namespace.server_socket import now_us, opened_socket

SHOP = ConnectionString(place=Place.SERVER, host="shop.example", port=4617)
SILENT = ("192.0.2.1", "192.0.2.2", "192.0.2.3")
TRY_US = 5 * SECOND_US


class Network:
    """Hosts that answer no packet, or refuse, on a clock of its own."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.now = 7_000_000
        self.tried: list[str] = []

    def resolve(self, host: str, port: int, *_: int, flags: int = 0, **__: int) -> list[Any]:
        if flags:
            raise socket.gaierror("not a number")
        assert host == SHOP.host
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in self.addresses]

    def connect(self, connecting: socket.socket, where: tuple[str, int]) -> None:
        self.tried.append(where[0])
        if where[0] in SILENT:
            timeout_s = connecting.gettimeout()
            assert timeout_s is not None
            self.now += int(timeout_s * SECOND_US)
            raise TimeoutError
        if where[0] != "127.0.0.1":
            raise ConnectionRefusedError


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr(server_socket, "now_us", lambda: made.now)
    monkeypatch.setattr(socket, "getaddrinfo", made.resolve)

    def connect(connecting: socket.socket, where: tuple[str, int]) -> None:
        made.connect(connecting, where)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return made


def test_all_addresses_of_a_silent_host_share_the_time_of_one_try(network: Network) -> None:
    network.addresses = SILENT
    began = network.now
    with pytest.raises(OperationTimeoutError):
        opened_socket(SHOP, began + TRY_US)
    assert network.tried == [*SILENT]
    assert network.now - began <= TRY_US


def test_an_address_that_answers_is_found_behind_silent_ones(network: Network) -> None:
    network.addresses = (*SILENT[:2], "127.0.0.1")
    began = network.now
    with opened_socket(SHOP, began + TRY_US) as connected:
        assert not connected.getblocking()
    assert network.now - began < TRY_US


def test_behind_an_address_that_refuses_the_next_one_has_the_whole_try(network: Network) -> None:
    network.addresses = ("192.0.2.9", SILENT[0])
    began = network.now
    with pytest.raises(OperationTimeoutError):
        opened_socket(SHOP, began + TRY_US)
    assert network.now - began == TRY_US


def test_a_resolver_that_does_not_answer_costs_no_more_than_the_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()

    def wait(*_: Any, flags: int = 0, **__: Any) -> list[Any]:
        if not flags:
            answer.wait(30)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    with pytest.raises(OperationTimeoutError):
        opened_socket(SHOP, now_us() + SECOND_US // 20)
    answer.set()


@pytest.mark.parametrize("host", ["shop..example", "x" * 64])
def test_a_host_name_that_cannot_be_looked_up_is_the_callers_error(host: str) -> None:
    with pytest.raises(InvalidArgumentError, match="Correct the Endpoint"):
        opened_socket(ConnectionString(place=Place.SERVER, host=host), now_us() + TRY_US)
