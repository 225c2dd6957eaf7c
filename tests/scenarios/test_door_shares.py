"""Shares of the connections of a door: of a key, of an address, and a reserve for managers."""

from collections.abc import Callable

import pytest

from tests.namespaces import ROOT
from tests.scenarios.entrance import QUEUE, Entrance, source
from tests.soak.bad_bytes_tools import framed
from tests.waiting import until
from twinbus import Claim
from twinbus.errors import ServerBusyError, UnauthorizedError
from twinbus.protocol.frames import FrameKind

pytestmark = pytest.mark.timeout(60)


def test_a_key_has_no_more_connections_than_its_share(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=10)
    greedy, second = entrance.key("greedy", Claim.SEND), entrance.key("other", Claim.SEND)
    for number in range(8):
        assert entrance.greet(greedy, source=source(number)) is None
    error = entrance.greet(greedy, source=source(9))
    assert isinstance(error, ServerBusyError)
    assert "key greedy has 8 connections" in error.text
    assert entrance.greet(second, source=source(9)) is None


def test_an_address_has_no_more_connections_than_its_share(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=10)
    keys = [entrance.key(f"key{number}", Claim.SEND) for number in range(9)]
    for key in keys[:8]:
        assert entrance.greet(key, source=source(0)) is None
    error = entrance.greet(keys[8], source=source(0))
    assert isinstance(error, ServerBusyError)
    assert f"the address {source(0)} has 8 connections" in error.text
    assert entrance.greet(keys[8], source=source(1)) is None


def test_keys_that_manage_the_namespace_have_a_reserve(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=10)
    keys = [entrance.key(f"key{number}", Claim.SEND) for number in range(5)]
    local = entrance.key("local", Claim.MANAGE, path=QUEUE)
    for number in range(9):
        assert entrance.greet(keys[number % 4], source=source(number)) is None
    for key in (keys[4], local):
        error = entrance.greet(key, source=source(0))
        assert isinstance(error, ServerBusyError)
        assert "reserved" in error.text
    assert entrance.greet(ROOT) is None
    assert isinstance(entrance.greet(ROOT), ServerBusyError)


def test_a_connection_that_ends_gives_its_place_back(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=2)
    key = entrance.key("key", Claim.SEND)
    for _ in range(5):
        exchange = entrance.connect(key)
        assert exchange.frame()[0][0] == FrameKind.WELCOME
        assert isinstance(entrance.greet(key), ServerBusyError)
        exchange.cancel()
        until(lambda: entrance.door.connections == 0)


def test_a_connection_keeps_the_key_that_it_came_with(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=10)
    first, second = entrance.key("first", Claim.LISTEN), entrance.key("second", Claim.LISTEN)
    for _ in range(3):
        exchange = entrance.connect(first)
        exchange.write(framed([FrameKind.TOKEN, entrance.token(second)]))
        assert isinstance(exchange.reply()[1], UnauthorizedError)
        exchange.cancel()
        until(lambda: entrance.door.connections == 0)
    assert not entrance.door.attendance.by_key
    assert not entrance.door.attendance.by_address
