"""Commands that RabbitMQ cannot execute are refused before a connection is opened."""

from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("pika")

from twinbus.connection import ConnectionString
from twinbus.errors import UnsupportedCapabilityError
from twinbus.message import tokens_of
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.protocol import commands as c
from twinbus.protocol.capabilities import Capability

NOBODY = ConnectionString.parse("Endpoint=amqp://nobody.example")
LOCK = c.SessionLock("session", UUID(int=1))
TOKENS = tokens_of([UUID(int=1)])
REFUSED: list[tuple[c.Command[Any], Capability]] = [
    (c.AcceptSession("orders"), Capability.SESSIONS),
    (c.GetSessionState("orders", LOCK), Capability.SESSIONS),
    (c.CancelScheduled("orders", [1]), Capability.SCHEDULING),
    (c.ReceiveDeferred("orders", [1]), Capability.DEFERRING),
    (c.Peek("orders"), Capability.BROWSING),
    (c.RenewLocks("orders", TOKENS), Capability.LOCK_RENEWAL),
    (c.DeleteMessages("orders", 1), Capability.BATCH_DELETING),
    (c.LeaseRange("orders", "syphon", 1), Capability.RANGES),
    (c.ListKeys(), Capability.KEYS),
]


@pytest.mark.parametrize(("command", "capability"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_command_that_rabbitmq_cannot_execute_names_the_capability(
    command: c.Command[Any], capability: Capability
) -> None:
    with RabbitNamespace(NOBODY) as namespace:
        with pytest.raises(UnsupportedCapabilityError, match=capability.value) as caught:
            namespace.ask(command, 1)
        assert caught.value.capability == capability.name
        assert "RabbitMQ" in caught.value.text
        assert isinstance(namespace.submit(command).exception(0), UnsupportedCapabilityError)
