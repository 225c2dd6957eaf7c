"""The command line: entities."""

import pytest

from tests.scenarios.cli_words import (
    NAMES,
    ok,
    queue,
    taken,
    topic,
)
from tests.scenarios.command_line import run

pytestmark = pytest.mark.usefixtures("environment")

URGENT = ("--sql", "priority > 5")


def test_a_queue_is_created_with_its_settings() -> None:
    name = f"queue-{next(NAMES)}"
    options = ("--lock-duration", "30s", "--requires-session", "--status", "receive_disabled")
    made = ok("queue", "create", name, *options, "--no-enable-batched-operations", "--json").json
    assert made["lock_duration"] == "30s"
    assert (made["requires_session"], made["enable_batched_operations"]) == (True, False)
    assert ok("queue", "show", name, "--json").json["description"] == made


def test_with_exist_ok_what_exists_is_shown_as_it_is() -> None:
    name, news = queue("--max-delivery-count", "3"), topic()
    again = ok("queue", "create", name, "--max-delivery-count", "5", "--exist-ok", "--json")
    assert again.json["max_delivery_count"] == 3
    assert ok("topic", "create", news, "--exist-ok", "--json").json["path"] == news
    for _ in range(2):
        made = ok("subscription", "create", news, "all", "--exist-ok", "--json").json
        assert made["name"] == "all"
    refused = run("topic", "create", name, "--exist-ok")
    assert refused.code == 1
    assert f"{name} exists already, as a queue" in refused.err


def test_a_queue_is_shown_with_what_it_holds() -> None:
    name = queue()
    ok("send", name, "tea")
    assert ok("queue", "show", name, "--json").json["runtime"]["active_message_count"] == 1
    shown = ok("queue", "show", name).rows
    assert ["path", name] in shown
    assert ["active_message_count", "1"] in shown


def test_queues_are_listed_with_what_they_hold() -> None:
    name = queue()
    ok("send", name, "tea", "--count", "3")
    heads, *rows = ok("queue", "list").rows
    assert heads == ["path", "status", "active", "dead-letter", "scheduled", "bytes"]
    assert [name, "active", "3", "0", "0"] in [row[:5] for row in rows]
    listed = ok("queue", "list", "--json").json
    assert name in [item["description"]["path"] for item in listed]


def test_topics_are_created_listed_shown_and_deleted() -> None:
    name = topic()
    assert name in [row[0] for row in ok("topic", "list").rows]
    listed = ok("topic", "list", "--json").json
    assert name in [item["description"]["path"] for item in listed]
    assert ok("topic", "show", name, "--json").json["runtime"]["subscription_count"] == 0
    ok("topic", "delete", name, "--yes")
    assert run("topic", "show", name).code == 3


def test_subscriptions_are_created_listed_shown_and_deleted() -> None:
    name = topic()
    made = ok("subscription", "create", name, "s", "--max-delivery-count", 3, "--json").json
    assert (made["topic_path"], made["name"], made["max_delivery_count"]) == (name, "s", 3)
    assert ok("subscription", "list", name).rows[1][0] == f"{name}/Subscriptions/s"
    shown = ok("subscription", "show", name, "s", "--json").json
    assert shown["description"] == made
    ok("subscription", "delete", name, "s", "--yes")
    assert ok("subscription", "list", name).err == "there are none\n"
    assert ok("subscription", "list", name, "--json").json == []


def test_a_subscription_gets_what_its_condition_selects() -> None:
    name = topic()
    ok("subscription", "create", name, "urgent", *URGENT)
    for priority in (3, 9):
        ok("send", name, f"number {priority}", "--property", f"priority={priority}")
    assert taken(f"{name}/Subscriptions/urgent") == ["number 9"]


def test_rules_are_created_listed_shown_and_deleted() -> None:
    name = topic()
    ok("subscription", "create", name, "s")
    ok("rule", "create", name, "s", "sql", *URGENT, "--action", "SET seen = 1")
    ok("rule", "create", name, "s", "match", "--match", "subject=red", "--match", "size=big")
    ok("rule", "create", name, "s", "all")
    table = ok("rule", "list", name, "s").out
    assert "priority > 5" in table
    assert "SET seen = 1" in table
    assert "subject = 'red' and size = 'big'" in table
    listed = ok("rule", "list", name, "s", "--json").json
    assert [item["name"] for item in listed] == ["$Default", "all", "match", "sql"]
    shown = ok("rule", "show", name, "s", "sql", "--json").json
    assert shown["filter"]["expression"] == "priority > 5"
    ok("rule", "delete", name, "s", "sql")
    assert run("rule", "show", name, "s", "sql").code == 3
