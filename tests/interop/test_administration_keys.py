"""Keys of entities, managed by the administration client of the SDK."""

import pytest

from tests.interop.bus import Bus, take
from twinbus import Claim

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.core.exceptions import ClientAuthenticationError, HttpResponseError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusAuthenticationError, ServiceBusAuthorizationError
from azure.servicebus.management import (
    AccessRights,
    AuthorizationRule,
    ServiceBusAdministrationClient,
)


def rule_of(name: str, *rights: AccessRights, primary: str = "p" * 32) -> AuthorizationRule:
    return AuthorizationRule(
        type="SharedAccessAuthorizationRule",
        claim_type="SharedAccessKey",
        claim_value="None",
        rights=list(rights),
        key_name=name,
        primary_key=primary,
        secondary_key="s" * 32,
    )


def test_authorization_rules_are_keys_of_the_entity(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    rules = [rule_of("writer", AccessRights.SEND), rule_of("reader", AccessRights.LISTEN)]
    queue = admin.create_queue(path, authorization_rules=rules)
    found = {rule.key_name: rule for rule in queue.authorization_rules or []}
    assert found["writer"].rights == ["Send"]
    assert found["reader"].primary_key == "p" * 32
    writer = bus.client("writer", "p" * 32, retry_total=0)
    bus.sender(path, writer).send_messages(ServiceBusMessage("a"))
    with pytest.raises(ServiceBusAuthorizationError):
        bus.receiver(path, writer).receive_messages(max_wait_time=10)
    assert len(take(bus.receiver(path, bus.client("reader", "s" * 32)))) == 1


def test_an_update_replaces_the_keys_of_an_entity(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    rules = [rule_of("old", AccessRights.SEND), rule_of("kept", AccessRights.LISTEN)]
    queue = admin.create_topic(path, authorization_rules=rules)
    queue.authorization_rules = [
        rule_of("kept", AccessRights.MANAGE, AccessRights.SEND, AccessRights.LISTEN),
        AuthorizationRule(key_name="drawn", rights=[AccessRights.SEND]),
    ]
    admin.update_topic(queue)
    keys = {key.name: key for key in bus.manager.list_keys() if key.entity_path == path}
    assert set(keys) == {"kept", "drawn"}
    assert keys["kept"].has(Claim.MANAGE)
    assert len(keys["drawn"].primary) > 30
    with pytest.raises((ServiceBusAuthenticationError, ServiceBusAuthorizationError)):
        bus.sender(path, bus.client("old", "p" * 32, retry_total=0)).send_messages(
            ServiceBusMessage("a")
        )
    queue = admin.get_topic(path)
    queue.authorization_rules = []
    admin.update_topic(queue)
    assert not any(key.entity_path == path for key in bus.manager.list_keys())


def test_an_entity_whose_keys_are_refused_is_not_created(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    with pytest.raises(HttpResponseError, match="secret of key short"):
        admin.create_queue(
            path, authorization_rules=[rule_of("short", AccessRights.SEND, primary="x")]
        )
    assert not bus.manager.queue_exists(path)


def test_a_key_without_the_claim_manages_nothing(bus: Bus) -> None:
    path = bus.queue()
    key = bus.manager.create_key(f"{path}-sender", [Claim.SEND, Claim.LISTEN])
    refused = bus.administration(key.name, key.primary)
    for use in (
        lambda: refused.get_queue(path),
        lambda: refused.create_queue(bus.name()),
        lambda: refused.delete_queue(path),
        lambda: list(refused.list_queues()),
        refused.get_namespace_properties,
    ):
        with pytest.raises(ClientAuthenticationError):
            use()
    with pytest.raises(ClientAuthenticationError):
        bus.administration(key="wrong" * 8).get_queue(path)
    assert bus.manager.queue_exists(path)
