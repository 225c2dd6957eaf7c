"""The configuration file of the official emulator: what it says, and what is wrong with it."""

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.emulator import config, namespace
from twinbus.entities import (
    CorrelationFilter,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
)
from twinbus.errors import InvalidArgumentError
from twinbus.protocol.keys import ROOT_KEY, Claim
from twinbus.server.emulator import EmulatedNamespace, read_emulator_config

Change = Callable[[dict[str, Any]], object]


def read(folder: Path, text: str) -> list[EmulatedNamespace]:
    path = folder / "Config.json"
    path.write_text(text)
    return read_emulator_config(path)


def test_every_entity_and_property_of_the_file_is_read(tmp_path: Path) -> None:
    [found] = read(tmp_path, config())
    entities = {entity.description.path: entity for entity in found.config.entities}
    assert found.name == "sbemulatorns"
    assert entities["orders"].description == QueueDescription(
        path="orders",
        enable_dead_lettering_on_message_expiration=True,
        default_message_time_to_live=timedelta(hours=1),
        duplicate_detection_history_time_window=timedelta(seconds=20),
        lock_duration=timedelta(seconds=30),
        max_delivery_count=3,
        requires_duplicate_detection=True,
    )
    assert entities["carts"].description == QueueDescription(path="carts", requires_session=True)
    assert entities["relay"].description == QueueDescription(path="relay", forward_to="orders")
    sport = entities["news/Subscriptions/sport"]
    assert isinstance(sport.description, SubscriptionDescription)
    assert sport.description.max_delivery_count == 5
    fields = CorrelationFilter(
        content_type="text/plain", subject="sport", properties={"club": "united", "rank": 1}
    )
    assert sport.rules == (
        RuleDescription("by-fields", fields),
        RuleDescription("by-sql", SqlFilter("urgent = TRUE"), SqlAction("SET seen = 1")),
    )
    assert entities["news/Subscriptions/all"].rules == ()


def test_rules_may_have_parameters(tmp_path: Path) -> None:
    file = namespace()
    values = {"@text": "red", "@number": 2, "@ratio": 0.5, "@flag": True}
    rule(file)["SqlFilter"] = {"SqlExpression": "a = @text AND b = @flag", "Parameters": values}
    rule(file)["Action"] = {"SqlExpression": "SET n = @number", "Parameters": {"@number": 2}}
    [found] = read(tmp_path, config(file))
    [sport] = [
        entity for entity in found.config.entities if entity.description.path.endswith("sport")
    ]
    assert sport.rules[1].filter == SqlFilter("a = @text AND b = @flag", values)
    assert sport.rules[1].action == SqlAction("SET n = @number", {"@number": 2})


def test_a_namespace_gets_the_key_of_the_emulator(tmp_path: Path) -> None:
    [found] = read(tmp_path, config())
    [key] = found.config.keys
    assert (key.name, key.claims, key.primary) == (ROOT_KEY, (Claim.MANAGE,), "SAS_KEY_VALUE")


def test_a_file_may_have_several_namespaces(tmp_path: Path) -> None:
    found = read(tmp_path, config(namespace("one"), namespace("two")))
    assert [item.name for item in found] == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not a JSON file"),
        ("[]", "must be an object"),
        ("{}", "no UserConfig"),
        ('{"UserConfig": {"Namespaces": []}}', "at least one namespace"),
        ('{"UserConfig": {"Namespaces": {}}}', "at least one namespace"),
        ('{"UserConfig": {"Namespaces": 1}}', "must be a list"),
        ('{"UserConfig": {"Namespaces": [1]}}', "must be an object"),
        ('{"UserConfig": {"Namespaces": [{}]}}', "needs a Name"),
        ('{"UserConfig": {"Colours": []}}', "unknown name 'Colours'"),
        ('{"UserConfig": 1, "UserConfig": 2}', "twice"),
        (config(namespace("one"), namespace("ONE")), "no name twice"),
        ("[" * 100_000, "not a JSON file"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Config.json.*{error}"):
        read(tmp_path, text)


def queue(found: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = found["Queues"][0]["Properties"]
    return properties


def test_the_target_of_dead_letters_is_read(tmp_path: Path) -> None:
    changed = namespace()
    queue(changed)["ForwardDeadLetteredMessagesTo"] = "carts"
    [found] = read(tmp_path, config(changed))
    descriptions = {entity.description.path: entity.description for entity in found.config.entities}
    orders = descriptions["orders"]
    assert isinstance(orders, QueueDescription)
    assert orders.forward_dead_lettered_messages_to == "carts"


def rule(found: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = found["Topics"][0]["Subscriptions"][0]["Rules"][1]["Properties"]
    return properties


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda value: value.update(Relays=[]), "namespace 'sbemulatorns'.*unknown name 'Relays'"),
        (
            lambda value: queue(value).update(Colour="red", X=1),
            "queue 'orders'.*no setting 'Colour'",
        ),
        (lambda value: queue(value).update(LockDuration="soon"), "LockDuration.*'soon'"),
        (lambda value: queue(value).update(LockDuration=[1]), "LockDuration"),
        (lambda value: queue(value).update(MaxDeliveryCount="many"), "MaxDeliveryCount.*'many'"),
        (
            lambda value: queue(value).update(MaxDeliveryCount=0),
            "queue 'orders'.*max_delivery_count",
        ),
        (lambda value: queue(value).update(RequiresSession="maybe"), "RequiresSession.*'maybe'"),
        (
            lambda value: queue(value).update(ForwardDeadLetteredMessagesTo="two words"),
            "queue 'orders'.*forward_dead_lettered_messages_to 'two words'",
        ),
        (
            lambda value: value["Queues"][0].update(Name="two words"),
            "queue 'two words'.*not a valid",
        ),
        (lambda value: value["Queues"][0].update(Extra=1), "queue 'orders'.*unknown name 'Extra'"),
        (lambda value: value["Topics"][0].pop("Name"), "topic 1.*needs a Name"),
        (
            lambda value: rule(value).update(FilterType="Xml"),
            "rule 'by-sql'.*FilterType is 'Xml'; it must be Sql, Correlation, True or False",
        ),
        (lambda value: rule(value)["SqlFilter"].update(SqlExpression="a ="), "rule 'by-sql'"),
        (lambda value: rule(value)["Action"].update(SqlExpression="SET"), "rule 'by-sql'"),
        (
            lambda value: rule(value)["SqlFilter"].update(Parameters=["@a"]),
            "Parameters of SqlFilter",
        ),
        (lambda value: rule(value)["SqlFilter"].update(Parameters={"@a": [1]}), "'@a' is \\[1\\]"),
        (
            lambda value: rule(value)["SqlFilter"].update(SqlExpression="a = @b"),
            "rule 'by-sql'.*@b",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Change, error: str) -> None:
    wrong = copy.deepcopy(namespace())
    change(wrong)
    with pytest.raises(InvalidArgumentError, match=error):
        read(tmp_path, config(wrong))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_emulator_config(tmp_path / "none.json")
