"""A RabbitMQ broker as the contract suite sees it: every test has a virtual host of its own.

No test deletes a queue that another test creates again under the same name: a node under load can
fail to declare such a queue, and then fails for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.rabbitmq.conftest import broker, tls
from twinbus.connection import ConnectionString
from twinbus.namespace.contract import Namespace
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.testing.rabbitmq import RabbitBroker

__all__ = ["broker", "tls", "virtual_hosts"]  # fixtures

_AT_ONCE = 50  # virtual hosts: rabbitmqctl takes a second, whatever it does
_CREATE = """
lists:foreach(
  fun(Number) ->
    Name = <<"contract-", (integer_to_binary(Number))/binary>>,
    rabbit_vhost:add(Name, <<"guest">>),
    All = <<".*">>,
    rabbit_auth_backend_internal:set_permissions(<<"guest">>, Name, All, All, All, <<"guest">>)
  end,
  lists:seq({first}, {last})).
"""


class VirtualHosts:
    """Gives each test a virtual host that no test has used."""

    def __init__(self, broker: RabbitBroker) -> None:
        self._broker = broker
        self._used = self._created = 0

    @contextmanager
    def namespace(self) -> Iterator[Namespace]:
        """Open a namespace on an unused virtual host."""
        if self._used == self._created:
            first, last = self._created + 1, self._created + _AT_ONCE
            self._broker.node.evaluate(_CREATE.format(first=first, last=last))
            self._created = last
        self._used += 1
        text = self._broker.connection_string(vhost=f"contract-{self._used}")
        with RabbitNamespace(ConnectionString.parse(text)) as namespace:
            yield namespace


@pytest.fixture(scope="session")
def virtual_hosts(broker: RabbitBroker) -> VirtualHosts:
    return VirtualHosts(broker)
