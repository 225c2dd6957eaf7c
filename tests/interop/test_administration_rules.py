"""Rules of subscriptions, managed by the administration client of the SDK."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.interop.bus import Bus, named

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.management import (
    CorrelationRuleFilter,
    FalseRuleFilter,
    ServiceBusAdministrationClient,
    SqlRuleAction,
    SqlRuleFilter,
    TrueRuleFilter,
)

VALUES: dict[str, Any] = {
    "text": "a <b> & c",
    "small": -3,
    "large": 2**40,
    "real": 2.5,
    "yes": True,
    "moment": datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC),
    "span": timedelta(hours=1, minutes=30),
}


CORRELATION: dict[str, Any] = {
    "correlation_id": "c",
    "message_id": "m",
    "to": "t",
    "reply_to": "r",
    "label": "l",
    "session_id": "s",
    "reply_to_session_id": "rs",
    "content_type": "text/plain",
}


def test_a_subscription_begins_with_a_rule_that_takes_everything(
    admin: ServiceBusAdministrationClient, subscription: str
) -> None:
    rule = admin.get_rule(subscription, "rules", "$Default")
    assert isinstance(rule.filter, TrueRuleFilter)
    assert rule.action is None
    assert rule.created_at_utc <= datetime.now(UTC)  # type: ignore[operator]


def test_a_sql_rule_keeps_its_parameters_and_their_types(
    admin: ServiceBusAdministrationClient, subscription: str
) -> None:
    parameters = {f"@{name}": value for name, value in VALUES.items()}
    chosen = SqlRuleFilter("a < @small AND b = @text", parameters)
    action = SqlRuleAction("SET c = @text", {"@text": "x"})
    admin.create_rule(subscription, "rules", "sql", filter=chosen, action=action)
    rule = admin.get_rule(subscription, "rules", "sql")
    assert isinstance(rule.filter, SqlRuleFilter)
    assert (rule.filter.sql_expression, rule.filter.parameters) == (
        chosen.sql_expression,
        parameters,
    )
    assert isinstance(rule.action, SqlRuleAction)
    assert (rule.action.sql_expression, rule.action.parameters) == ("SET c = @text", {"@text": "x"})


def test_a_correlation_rule_keeps_its_fields_and_properties(
    admin: ServiceBusAdministrationClient, subscription: str
) -> None:
    chosen = CorrelationRuleFilter(**CORRELATION, properties=VALUES)
    admin.create_rule(subscription, "rules", "correlation", filter=chosen)
    found = admin.get_rule(subscription, "rules", "correlation").filter
    assert isinstance(found, CorrelationRuleFilter)
    assert named(found, CORRELATION) == CORRELATION
    assert found.properties == VALUES


@pytest.mark.parametrize("kind", [TrueRuleFilter, FalseRuleFilter])
def test_true_and_false_rules(
    admin: ServiceBusAdministrationClient,
    subscription: str,
    kind: Callable[[], TrueRuleFilter | FalseRuleFilter],
) -> None:
    name = kind.__name__
    admin.create_rule(subscription, "rules", name, filter=kind())
    assert type(admin.get_rule(subscription, "rules", name).filter) is kind


def test_a_rule_that_is_updated_selects_other_messages(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    topic = bus.name()
    admin.create_topic(topic)
    admin.create_subscription(topic, "s")
    rule = admin.get_rule(topic, "s", "$Default")
    admin.update_rule(topic, "s", rule, filter=SqlRuleFilter("colour = 'red'"))
    sender = bus.keep(bus.sdk.get_topic_sender(topic))
    for colour in ("red", "blue"):
        message = ServiceBusMessage(colour, application_properties={"colour": colour})
        sender.send_messages(message)
    assert admin.get_subscription_runtime_properties(topic, "s").active_message_count == 1
    admin.delete_rule(topic, "s", "$Default")
    assert list(admin.list_rules(topic, "s")) == []
    with pytest.raises(ResourceNotFoundError):
        admin.update_rule(topic, "s", rule)


def test_bad_sql_is_refused_with_its_reason(
    admin: ServiceBusAdministrationClient, subscription: str
) -> None:
    with pytest.raises(HttpResponseError, match=r"(?i)sql") as refused:
        admin.create_rule(subscription, "rules", "bad", filter=SqlRuleFilter("colour = "))
    assert refused.value.status_code == 400
