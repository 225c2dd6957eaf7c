"""Commands that need a capability fail with an error that names it where the engine lacks it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.namespaces import embedded
from twinbus import BrokeredMessage, QueueDescription
from twinbus.errors import FaultOwner, UnsupportedCapabilityError
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.protocol.commands import (
    AcceptSession,
    Command,
    CreateEntity,
    LeaseRange,
    ListKeys,
    Origin,
    Peek,
    Receive,
    Send,
)
from twinbus.protocol.origins import sender_source
from twinbus.protocol.table import ROWS
from twinbus.testing import LimitedNamespace


@pytest.fixture
def full(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    with embedded(tmp_path / "namespace") as namespace:
        namespace.ask(CreateEntity(QueueDescription(path="orders")))
        yield namespace


def test_a_twinbus_namespace_has_every_capability(full: EmbeddedNamespace) -> None:
    assert full.capabilities == EVERY_CAPABILITY


@pytest.mark.parametrize(
    ("capability", "command"),
    [
        (Capability.RANGES, LeaseRange("orders", "owner", 1)),
        (Capability.SESSIONS, AcceptSession("orders")),
        (Capability.BROWSING, Peek("orders")),
        (Capability.KEYS, ListKeys()),
    ],
)
def test_a_missing_capability_is_named(
    full: EmbeddedNamespace, capability: Capability, command: Command[object]
) -> None:
    namespace = LimitedNamespace(full, [capability])
    with pytest.raises(UnsupportedCapabilityError, match=capability.value) as caught:
        namespace.ask(command)
    assert caught.value.capability == capability.name
    assert caught.value.fault is FaultOwner.CALLER
    assert isinstance(namespace.submit(command).exception(), UnsupportedCapabilityError)


def test_sends_and_receives_need_no_capability(full: EmbeddedNamespace) -> None:
    namespace = LimitedNamespace(full, EVERY_CAPABILITY)
    namespace.ask(Send("orders", [BrokeredMessage(b"one")]))
    assert namespace.ask(Receive("orders")).num_rows == 1


def test_without_a_memory_of_repeats_a_repeated_send_is_enqueued_again(
    full: EmbeddedNamespace,
) -> None:
    namespace = LimitedNamespace(full, [Capability.REPEAT_MEMORY, Capability.TRANSFER_MEMORY])
    send = Send("orders", [BrokeredMessage(b"one")], Origin(sender_source(7), [0]))
    for place in (namespace, namespace, full, full):
        place.ask(send)
    assert full.ask(Peek("orders", max_messages=10)).num_rows == 3


def test_every_command_but_sends_receives_and_settlements_says_what_it_needs() -> None:
    assert {row.kind for row in ROWS if row.needs is None} == {"Send", "Receive", "Settle"}
