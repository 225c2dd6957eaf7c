"""A pairing over a link that falls silent."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.contracts.pairing_trouble import DEADLINE_S
from tests.contracts.pairing_words import (
    AT_ONCE,
    HOUR,
    INVOICES,
    MINUTE,
    ORDERS,
    Pair,
    message,
    opened,
)
from tests.waiting import until
from twinbus import OperationTimeoutError, RetryPolicy
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace
from twinbus.pairing.events import Returned
from twinbus.protocol import client_conversation
from twinbus.protocol.commands import Peek, Receive


class Proxy:
    """Stands between a client and a server; it can fall silent without hanging up."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self._port = port
        self._silenced = 0  # connections up to this one
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def fall_silent(self) -> None:
        """Forward nothing more on the connections there are; new ones work."""
        self._silenced = self.connections

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self.connections += 1
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    pump = threading.Thread(target=self._pump, args=(*ends, self.connections))
                    self._threads.append(pump)
                    pump.start()

    def _pump(self, source: socket.socket, target: socket.socket, number: int) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if number > self._silenced:
                    target.sendall(data)
            if number > self._silenced:
                target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for line in (self._listener, *self._sockets):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for line in (self._listener, *self._sockets):
            line.close()


@dataclass
class Silenced:
    """A pair of servers whose primary is reached through a proxy."""

    pair: Pair
    proxy: Proxy
    client: Namespace  # of the primary, through the proxy


@pytest.fixture
def silenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Silenced]:
    monkeypatch.setattr(client_conversation, "QUIET_US", 300_000)
    with opened("server", tmp_path) as pair:
        where = pair.primary.where
        assert where is not None
        with closing(Proxy(where.port)) as proxy:
            pair.primary.faults.inner.close()
            client = open_namespace(replace(where, port=proxy.port), pair.clock)
            pair.primary.faults.inner = client
            yield Silenced(pair, proxy, client)
            client.close()


def test_a_ping_over_a_silent_link_fails_and_the_next_brings_the_entity_back(
    silenced: Silenced,
) -> None:
    pair = silenced.pair
    pair.begin(failover_interval=AT_ONCE)
    pair.send("before")
    pair.fail_over()
    pair.heal()
    silenced.proxy.fall_silent()
    pair.pass_time(MINUTE)
    until(lambda: "OperationTimeout" in pair.pairing.status()[0].last_failure)
    pair.pass_time(MINUTE)
    assert pair.wait_for(Returned).by == "ping"
    assert silenced.proxy.connections == 2
    pair.send("after")
    assert pair.primary.take() == ["before", "after"]


def test_pings_over_a_link_that_falls_silent_again_and_again_get_through(
    silenced: Silenced,
) -> None:
    pair = silenced.pair
    pair.begin(failover_interval=AT_ONCE)
    for outage in (1, 2):
        pair.fail_over()
        pair.heal()
        pair.primary.factory.create_message_sender(INVOICES).send(message())
        silenced.proxy.fall_silent()
        pair.pass_time(MINUTE)
        until(lambda: "OperationTimeout" in pair.pairing.status()[0].last_failure)
        pair.pass_time(MINUTE)
        pair.wait_for(Returned, outage)


def test_a_command_that_was_submitted_over_a_link_that_falls_silent_fails(
    silenced: Silenced,
) -> None:
    silenced.client.ask(Peek(ORDERS))
    silenced.proxy.fall_silent()
    asked = [silenced.client.submit(Peek(ORDERS)) for _ in range(5)]
    for command in asked:
        assert isinstance(command.exception(DEADLINE_S), OperationTimeoutError)
    assert silenced.client.ask(Peek(ORDERS)).num_rows == 0
    assert silenced.proxy.connections == 2


def test_a_receive_that_waits_gets_an_error_when_its_link_falls_silent(silenced: Silenced) -> None:
    silenced.client.ask(Peek(ORDERS))
    waiting = silenced.client.submit(Receive(ORDERS, wait=HOUR))
    silenced.proxy.fall_silent()
    silenced.client.submit(Peek(ORDERS))
    assert isinstance(waiting.exception(DEADLINE_S), OperationTimeoutError)


def test_who_waits_for_an_answer_over_a_silent_link_gives_up_without_a_timeout_of_its_own(
    silenced: Silenced,
) -> None:
    silenced.client.ask(Peek(ORDERS))
    silenced.proxy.fall_silent()
    with pytest.raises(OperationTimeoutError):
        silenced.client.ask(Peek(ORDERS))
    assert silenced.client.ask(Peek(ORDERS)).num_rows == 0


def test_a_send_over_a_silent_link_is_diverted(silenced: Silenced) -> None:
    pair = silenced.pair
    once = RetryPolicy.once(timedelta(seconds=1))
    pair.primary.factory.courier.policy = once
    pair.begin(failover_interval=AT_ONCE)
    pair.send("before")
    silenced.proxy.fall_silent()
    pair.send("diverted")
    assert pair.diverted() == ["diverted"]
    pair.pass_time(MINUTE)
    assert pair.wait_for(Returned).by == "ping"
