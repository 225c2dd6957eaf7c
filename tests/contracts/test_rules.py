"""Rules: SQL filters, correlation filters, true and false filters, and SQL actions."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    QUEUE,
    TOPIC,
    message,
    queue,
    receive_one,
    send,
    subscription,
    take,
    topic,
)
from twinbus.entities import (
    DEFAULT_RULE,
    CorrelationFilter,
    FalseFilter,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.errors import (
    EntityAlreadyExistsError,
    EntityNotFoundError,
    InvalidArgumentError,
    InvalidOperationError,
)
from twinbus.limits import MAX_SQL_CHARACTERS
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import CreateRule, DeleteRule, ListRules, UpdateRule

SAMPLE = message(
    message_id="m-1",
    session_id="s-1",
    correlation_id="c-1",
    content_type="text/plain",
    subject="invoice",
    to="paris",
    reply_to="london",
    reply_to_session_id="rs-1",
    application_properties={
        "color": "red",
        "count": 5,
        "price": 2.5,
        "urgent": True,
        "gift": False,
        "code": "50%_off",
        "owner's name": "O'Hara",
        "two words": "yes",
        "key": UUID(int=7),
        "due": datetime(2030, 1, 1, tzinfo=UTC),
        "span": timedelta(hours=2),
    },
)


def subscribe(world: World, condition: RuleFilter, action: SqlAction | None = None) -> str:
    """Make a topic with one subscription of one rule."""
    topic(world)
    return subscription(world, "chosen", RuleDescription("rule", condition, action))


def is_selected(world: World, condition: RuleFilter, sent: BrokeredMessage = SAMPLE) -> bool:
    path = subscribe(world, condition)
    send(world, sent, path=TOPIC)
    return bool(take(world, path))


def altered(world: World, action: str, **parameters: Any) -> BrokeredMessage:
    """Return what a subscription with this action makes of the sample."""
    path = subscribe(world, TrueFilter(), SqlAction(action, parameters))
    send(world, SAMPLE, path=TOPIC)
    return receive_one(world, path)


# -- SQL filters -------------------------------------------------------------------------------

SELECTING = [
    "color = 'red'",
    "color <> 'blue'",
    "color != 'blue'",
    "count > 4 AND count < 6",
    "count >= 5 and count <= 5",
    "price = 2.5",
    "price > 2",
    "count = 5.0",
    "urgent = TRUE",
    "urgent",
    "NOT gift",
    "gift = false",
    "color = 'blue' OR count = 5",
    "NOT color = 'blue'",
    "(color = 'blue' OR color = 'red') AND NOT (count = 4)",
    "color IN ('green', 'red')",
    "count IN (1, 5)",
    "color NOT IN ('green', 'blue')",
    "color LIKE 'r%'",
    "color LIKE 'r_d'",
    "color NOT LIKE 'b%'",
    "code LIKE '50\\%%' ESCAPE '\\'",
    "code LIKE '%!_off' ESCAPE '!'",
    "missing IS NULL",
    "color IS NOT NULL",
    "EXISTS(color)",
    "NOT EXISTS(missing)",
    "count + 1 = 6",
    "count * 2 - 4 = price + 3.5",
    "count % 2 = 1",
    "count / 2.0 = price",
    "-count = -5",
    "color + 'dish' = 'reddish'",
    "[two words] = 'yes'",
    "\"two words\" = 'yes'",
    "[owner's name] = 'O''Hara'",
    "user.color = 'red'",
    "sys.MessageId = 'm-1'",
    "sys.SessionId = 's-1'",
    "sys.CorrelationId = 'c-1'",
    "sys.ContentType = 'text/plain'",
    "sys.Label = 'invoice'",
    "sys.Subject = 'invoice'",
    "sys.To = 'paris'",
    "sys.ReplyTo = 'london'",
    "sys.ReplyToSessionId = 'rs-1'",
    "sys.Label LIKE 'inv%' AND color = 'red'",
    "1 = 1",
]

NOT_SELECTING = [
    "color = 'blue'",
    "color = 'RED'",
    "color <> 'red'",
    "count > 5",
    "count < 5",
    "gift",
    "NOT urgent",
    "color IN ('green', 'blue')",
    "color LIKE 'b%'",
    "color LIKE 'r'",
    "code LIKE '50!%' ESCAPE '!'",
    "missing IS NOT NULL",
    "color IS NULL",
    "EXISTS(missing)",
    "sys.Label = 'order'",
    "1 = 0",
]

UNKNOWN = [
    "missing = 'red'",
    "missing <> 'red'",
    "NOT missing = 'red'",
    "missing = missing",
    "missing > 1",
    "missing IN ('red')",
    "missing NOT IN ('red')",
    "missing LIKE '%'",
    "missing + 1 = 1",
    "color = 'red' AND missing = 1",
]

MIXED_TYPES = ["color = 5", "color > 5", "count = 'red'", "urgent = 'yes'", "count LIKE '5'"]


@pytest.mark.parametrize("expression", SELECTING)
def test_a_sql_filter_selects_what_it_describes(world: World, expression: str) -> None:
    assert is_selected(world, SqlFilter(expression))


@pytest.mark.parametrize("expression", NOT_SELECTING)
def test_a_sql_filter_leaves_out_what_it_does_not_describe(world: World, expression: str) -> None:
    assert not is_selected(world, SqlFilter(expression))


@pytest.mark.parametrize("expression", UNKNOWN)
def test_a_comparison_with_a_missing_property_is_not_true(world: World, expression: str) -> None:
    assert not is_selected(world, SqlFilter(expression))


@pytest.mark.parametrize("expression", MIXED_TYPES)
def test_values_of_different_types_are_not_equal(world: World, expression: str) -> None:
    assert not is_selected(world, SqlFilter(expression))


def test_unknown_or_true_is_true(world: World) -> None:
    assert is_selected(world, SqlFilter("missing = 1 OR color = 'red'"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("color", "red"),
        ("count", 5),
        ("price", 2.5),
        ("urgent", True),
        ("key", UUID(int=7)),
        ("due", datetime(2030, 1, 1, tzinfo=UTC)),
        ("span", timedelta(hours=2)),
    ],
)
def test_a_filter_takes_parameters(world: World, name: str, value: Any) -> None:
    assert is_selected(world, SqlFilter(f"{name} = @wanted", {"wanted": value}))


def test_a_parameter_may_be_named_with_its_sign(world: World) -> None:
    assert is_selected(world, SqlFilter("color = @wanted", {"@wanted": "red"}))


def test_moments_are_compared_with_parameters(world: World) -> None:
    deadline = datetime(2029, 1, 1, tzinfo=UTC)
    assert is_selected(world, SqlFilter("due > @deadline", {"deadline": deadline}))


def test_each_message_of_a_batch_is_judged_by_itself(world: World) -> None:
    path = subscribe(world, SqlFilter("n > 2"))
    send(world, *(message(str(n), application_properties={"n": n}) for n in range(6)), path=TOPIC)
    assert take(world, path) == ["3", "4", "5"]


def test_a_batch_may_hold_one_property_in_several_types(world: World) -> None:
    path = subscribe(world, SqlFilter("n = 1"))
    values: list[Any] = [1, "1", 1.0, True, None]
    bags = [{} if value is None else {"n": value} for value in values]
    batch = [message(str(bag), application_properties=bag) for bag in bags]
    send(world, *batch, path=TOPIC)
    assert take(world, path) == ["{'n': 1}", "{'n': 1.0}"]


@pytest.mark.parametrize(
    "expression",
    ["color = ", "= 'red'", "color == == 'red'", "(color = 'red'", "color = 'red", "DROP TABLE x"],
)
def test_a_filter_that_is_no_condition_is_refused(world: World, expression: str) -> None:
    topic(world)
    path = subscription(world, "sport")
    with pytest.raises(InvalidArgumentError) as refused:
        world.ask(CreateRule(path, RuleDescription("bad", SqlFilter(expression))))
    assert "<class" not in refused.value.text
    assert [rule.name for rule in world.ask(ListRules(path))] == [DEFAULT_RULE]


@pytest.mark.parametrize(
    "expression", ["sys.Nonsense = 1", "color = (SELECT 1)", "sleep(10) = 1", "color = @missing"]
)
def test_a_filter_beyond_the_language_is_refused(world: World, expression: str) -> None:
    topic(world)
    path = subscription(world, "sport")
    with pytest.raises(InvalidArgumentError):
        world.ask(CreateRule(path, RuleDescription("bad", SqlFilter(expression))))


def test_a_subscription_with_a_bad_filter_is_not_created(world: World) -> None:
    topic(world)
    with pytest.raises(InvalidArgumentError):
        subscription(world, "sport", RuleDescription("bad", SqlFilter("color = ")))
    with pytest.raises(EntityNotFoundError):
        world.ask(ListRules("news/Subscriptions/sport"))


@pytest.mark.parametrize("expression", ["", "x" * (MAX_SQL_CHARACTERS + 1)])
def test_the_text_of_a_filter_has_bounds(expression: str) -> None:
    with pytest.raises(InvalidArgumentError):
        SqlFilter(expression)


# -- correlation, true and false filters -------------------------------------------------------


@pytest.mark.parametrize(
    "condition",
    [
        CorrelationFilter(message_id="m-1"),
        CorrelationFilter(session_id="s-1"),
        CorrelationFilter(correlation_id="c-1"),
        CorrelationFilter(content_type="text/plain"),
        CorrelationFilter(subject="invoice"),
        CorrelationFilter(to="paris"),
        CorrelationFilter(reply_to="london"),
        CorrelationFilter(reply_to_session_id="rs-1"),
        CorrelationFilter(properties={"color": "red", "count": 5, "urgent": True}),
        CorrelationFilter(properties={"key": UUID(int=7)}),
        CorrelationFilter(subject="invoice", to="paris", properties={"price": 2.5}),
    ],
    ids=str,
)
def test_a_correlation_filter_selects_what_equals_all_its_fields(
    world: World, condition: CorrelationFilter
) -> None:
    assert is_selected(world, condition)


@pytest.mark.parametrize(
    "condition",
    [
        CorrelationFilter(subject="order"),
        CorrelationFilter(subject="INVOICE"),
        CorrelationFilter(subject="invoice", to="rome"),
        CorrelationFilter(properties={"color": "blue"}),
        CorrelationFilter(properties={"color": "red", "missing": 1}),
        CorrelationFilter(properties={"count": "5"}),
        CorrelationFilter(subject="invoice", properties={"count": 6}),
    ],
    ids=str,
)
def test_a_correlation_filter_leaves_out_what_differs_in_one_field(
    world: World, condition: CorrelationFilter
) -> None:
    assert not is_selected(world, condition)


def test_a_correlation_filter_without_any_field_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgumentError):
        subscribe(world, CorrelationFilter())


def test_a_true_filter_selects_every_message(world: World) -> None:
    assert is_selected(world, TrueFilter())


def test_a_false_filter_selects_no_message(world: World) -> None:
    assert not is_selected(world, FalseFilter())


# -- actions -----------------------------------------------------------------------------------


def test_an_action_sets_a_property(world: World) -> None:
    assert altered(world, "SET priority = 'high'").application_properties["priority"] == "high"


def test_an_action_changes_a_property(world: World) -> None:
    assert altered(world, "SET color = 'blue'").application_properties["color"] == "blue"


def test_an_action_removes_a_property(world: World) -> None:
    properties = altered(world, "REMOVE color").application_properties
    assert "color" not in properties
    assert properties["count"] == 5


def test_an_action_computes_with_properties(world: World) -> None:
    properties = altered(world, "SET total = count * price").application_properties
    assert properties["total"] == 12.5


def test_an_action_has_several_steps_in_order(world: World) -> None:
    steps = "SET a = 1; SET b = a + 1; REMOVE a"
    properties = altered(world, steps).application_properties
    assert properties["b"] == 2
    assert "a" not in properties


def test_an_action_sets_a_field_of_the_message(world: World) -> None:
    assert altered(world, "SET sys.Label = 'changed'").subject == "changed"


def test_an_action_takes_parameters(world: World) -> None:
    got = altered(world, "SET key = @key", key=UUID(int=9))
    assert got.application_properties["key"] == UUID(int=9)


def test_an_action_leaves_the_rest_alone(world: World) -> None:
    got = altered(world, "SET priority = 'high'")
    wanted = {**SAMPLE.application_properties, "priority": "high"}
    assert dict(got.application_properties) == wanted
    assert (got.body, got.message_id, got.subject) == (SAMPLE.body, "m-1", "invoice")


def test_an_action_changes_only_the_copy_of_its_subscription(world: World) -> None:
    topic(world)
    action = SqlAction("SET color = 'blue'")
    changed = subscription(world, "changed", RuleDescription("r", TrueFilter(), action))
    plain = subscription(world, "plain")
    send(world, SAMPLE, path=TOPIC)
    assert receive_one(world, changed).application_properties["color"] == "blue"
    assert receive_one(world, plain).application_properties["color"] == "red"


def test_an_action_is_for_selected_messages_only(world: World) -> None:
    topic(world)
    dyed = RuleDescription("dye", SqlFilter("color = 'blue'"), SqlAction("SET dyed = TRUE"))
    path = subscription(world, "sport", dyed)
    world.ask(CreateRule(path, RuleDescription("red", SqlFilter("color = 'red'"))))
    send(world, SAMPLE, path=TOPIC)
    assert "dyed" not in receive_one(world, path).application_properties


@pytest.mark.parametrize("action", ["color = 'red'", "SET", "SET color", "DELETE color"])
def test_an_action_that_is_none_is_refused(world: World, action: str) -> None:
    topic(world)
    path = subscription(world, "sport")
    bad = RuleDescription("bad", TrueFilter(), SqlAction(action))
    with pytest.raises(InvalidArgumentError):
        world.ask(CreateRule(path, bad))


# -- the rules of a subscription ---------------------------------------------------------------


def test_a_new_subscription_starts_with_a_catch_all_rule(world: World) -> None:
    topic(world)
    path = subscription(world, "sport")
    assert world.ask(ListRules(path)) == [RuleDescription(DEFAULT_RULE, TrueFilter())]


def test_a_subscription_can_start_with_a_rule_of_its_own(world: World) -> None:
    topic(world)
    rule = RuleDescription("red", SqlFilter("color = @c", {"c": "red"}), SqlAction("REMOVE x"))
    path = subscription(world, "sport", rule)
    assert world.ask(ListRules(path)) == [rule]


def test_rules_are_listed_by_name(world: World) -> None:
    topic(world)
    path = subscription(world, "sport")
    rules = [RuleDescription(name, FalseFilter()) for name in ("zebra", "ant", "mule")]
    for rule in rules:
        world.ask(CreateRule(path, rule))
    assert [r.name for r in world.ask(ListRules(path))] == ["$Default", "ant", "mule", "zebra"]


def test_every_kind_of_filter_is_listed_as_it_was_made(world: World) -> None:
    topic(world)
    path = subscription(world, "sport", RuleDescription("a", FalseFilter()))
    properties = {"when": datetime(2030, 1, 1, tzinfo=UTC), "key": UUID(int=1), "raw": b"\x00"}
    rule = RuleDescription("b", CorrelationFilter(subject="s", properties=properties))
    world.ask(CreateRule(path, rule))
    assert world.ask(ListRules(path)) == [RuleDescription("a", FalseFilter()), rule]


def test_a_message_selected_by_several_rules_comes_once(world: World) -> None:
    topic(world)
    path = subscription(world, "sport")
    world.ask(CreateRule(path, RuleDescription("red", SqlFilter("color = 'red'"))))
    send(world, SAMPLE, path=TOPIC)
    assert take(world, path) == ["order"]


def test_a_message_selected_by_any_rule_comes(world: World) -> None:
    path = subscribe(world, SqlFilter("color = 'blue'"))
    world.ask(CreateRule(path, RuleDescription("count", SqlFilter("count = 5"))))
    send(world, SAMPLE, path=TOPIC)
    assert take(world, path) == ["order"]


def test_a_new_rule_is_for_messages_sent_later(world: World) -> None:
    path = subscribe(world, FalseFilter())
    send(world, "before", path=TOPIC)
    world.ask(CreateRule(path, RuleDescription("all")))
    send(world, "after", path=TOPIC)
    assert take(world, path) == ["after"]


def test_a_deleted_rule_selects_nothing_more(world: World) -> None:
    topic(world)
    path = subscription(world, "sport")
    send(world, "before", path=TOPIC)
    world.ask(DeleteRule(path, DEFAULT_RULE))
    send(world, "after", path=TOPIC)
    assert world.ask(ListRules(path)) == []
    assert take(world, path) == ["before"]


def test_an_updated_rule_selects_by_its_new_filter(world: World) -> None:
    path = subscribe(world, SqlFilter("color = 'red'"))
    [rule] = world.ask(ListRules(path))
    changed = RuleDescription(rule.name.upper(), TrueFilter())
    world.ask(UpdateRule(path, changed))
    assert world.ask(ListRules(path)) == [RuleDescription(rule.name, TrueFilter())]
    send(world, "any", path=TOPIC)
    assert take(world, path) == ["any"]


def test_a_rule_that_cannot_be_updated_stays_as_it_is(world: World) -> None:
    path = subscribe(world, TrueFilter())
    before = world.ask(ListRules(path))
    with pytest.raises(EntityNotFoundError):
        world.ask(UpdateRule(path, RuleDescription("none")))
    with pytest.raises(InvalidArgumentError):
        world.ask(UpdateRule(path, RuleDescription(before[0].name, SqlFilter("color ="))))
    assert world.ask(ListRules(path)) == before


def test_a_rule_of_a_name_exists_once(world: World) -> None:
    topic(world)
    path = subscription(world, "sport")
    world.ask(CreateRule(path, RuleDescription("red", FalseFilter())))
    with pytest.raises(EntityAlreadyExistsError):
        world.ask(CreateRule(path, RuleDescription("red", TrueFilter())))


def test_an_unknown_rule_cannot_be_deleted(world: World) -> None:
    topic(world)
    path = subscription(world, "sport")
    with pytest.raises(EntityNotFoundError):
        world.ask(DeleteRule(path, "none"))


@pytest.mark.parametrize("path", [QUEUE, TOPIC])
def test_only_subscriptions_have_rules(world: World, path: str) -> None:
    queue(world)
    topic(world)
    with pytest.raises(InvalidOperationError):
        world.ask(CreateRule(path, RuleDescription("red")))
    with pytest.raises(InvalidOperationError):
        world.ask(ListRules(path))
    with pytest.raises(InvalidOperationError):
        world.ask(DeleteRule(path, "red"))


def test_rules_of_an_unknown_subscription_are_refused(world: World) -> None:
    topic(world)
    with pytest.raises(EntityNotFoundError):
        world.ask(CreateRule("news/Subscriptions/none", RuleDescription("red")))


@pytest.mark.parametrize("name", ["", "two words", "x" * 51, "a/b"])
def test_a_rule_needs_a_proper_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError):
        RuleDescription(name)


def test_a_sql_filter_selects_by_session(world: World) -> None:
    path = subscribe(world, SqlFilter("sys.SessionId = 's-1'"))
    send(world, message("other", session_id="s-2"), SAMPLE, path=TOPIC)
    assert take(world, path) == ["order"]
