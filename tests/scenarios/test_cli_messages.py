"""The command line: messages and dead letters."""

import itertools
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.scenarios.cli_words import (
    ok,
    queue,
    taken,
    topic,
)
from tests.scenarios.command_line import PYTHON, run, run_on_terminal
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
)
from twinbus.cli.context import CONNECTION
from twinbus.message import PropertyValue

pytestmark = pytest.mark.usefixtures("environment")


def kill_messages(connection: str, path: str, count: int) -> None:
    """Have messages of a path refused by their reader."""
    with (
        MessagingFactory.from_connection_string(connection) as factory,
        factory.create_message_receiver(path) as receiver,
    ):
        left = count
        while left:
            messages = receiver.receive_batch(min(left, 1000))
            receiver.dead_letter(messages, "bad table")
            left -= len(messages)


# -- messages --------------------------------------------------------------------------------------


def test_an_update_changes_what_is_given_and_nothing_else() -> None:
    name = queue("--lock-duration", "30s", "--user-metadata", "mine")
    target = queue()
    done = ok("queue", "update", name, "--status", "send_disabled", "--forward-to", target)
    assert done.code == 0
    shown = ok("queue", "show", name, "--json").json["description"]
    found = [shown[item] for item in ("status", "forward_to", "lock_duration", "user_metadata")]
    assert found[:2] == ["send_disabled", target]
    assert found[3] == "mine"
    ok("queue", "update", name, "--forward-dead-lettered-messages-to", target)
    both = ok("queue", "show", name, "--json").json["description"]
    assert (both["forward_to"], both["forward_dead_lettered_messages_to"]) == (target, target)
    ok("queue", "update", name, "--forward-to", "", "--no-enable-batched-operations")
    changed = ok("queue", "show", name, "--json").json["description"]
    assert (changed["forward_to"], changed["enable_batched_operations"]) == (None, False)
    assert changed["lock_duration"] == shown["lock_duration"]
    assert run("queue", "update", name).code == 2
    assert run("queue", "update", name, "--lock-duration", "9h").code == 2
    assert run("queue", "update", "nothing", "--status", "active").code == 3


def test_topics_subscriptions_and_rules_are_updated() -> None:
    name = topic()
    ok("subscription", "create", name, "sport")
    ok("topic", "update", name, "--user-metadata", "new")
    assert ok("topic", "show", name, "--json").json["description"]["user_metadata"] == "new"
    ok("subscription", "update", name, "sport", "--max-delivery-count", 3)
    shown = ok("subscription", "show", name, "sport", "--json").json["description"]
    assert shown["max_delivery_count"] == 3
    ok("rule", "update", name, "sport", "$Default", "--sql", "colour = 'red'")
    ok("send", name, "blue", "--property", "colour=blue")
    ok("send", name, "red", "--property", "colour=red")
    assert taken(f"{name}/Subscriptions/sport") == ["red"]
    assert run("rule", "update", name, "sport", "none").code == 3


def test_a_queue_is_purged() -> None:
    name = queue()
    for text in "abcd":
        ok("send", name, text)
    assert ok("purge", name, "--max", 1, "--yes", "--json").json == {"purged": 1}
    assert run("purge", name, stdin="n\n").code == 1
    assert ok("purge", name, "--yes").err == "purged 3\n"
    assert taken(name) == []


def test_sessions_are_listed() -> None:
    name = queue("--requires-session")
    for session in ("b", "a"):
        ok("send", name, "text", "--session-id", session)
    assert sorted(ok("sessions", name, "--json").json) == ["a", "b"]
    assert "a" in ok("sessions", name).out


def test_a_message_arrives_as_it_was_sent() -> None:
    name = queue()
    properties = ("table=7", "price=2.5", "paid=true", "note=a=b")
    options = itertools.chain.from_iterable(("--property", item) for item in properties)
    texts = ("--subject", "s", "--correlation-id", "c", "--content-type", "t", "--message-id", "m")
    done = ok("send", name, "two coffees ☕", *options, *texts, "--time-to-live", "1h")
    assert (done.out, done.err) == ("", f"sent 1 to {name}\n")
    found = ok("peek", name, "--json").json
    expected = {"table": 7, "price": 2.5, "paid": True, "note": "a=b"}
    assert found["application_properties"] == expected
    assert (found["body"], found["subject"], found["message_id"]) == ("two coffees ☕", "s", "m")
    assert (found["correlation_id"], found["content_type"]) == ("c", "t")
    assert found["time_to_live"] == "1h"


@pytest.mark.parametrize("value", ["nan", "inf", "-Infinity"])
def test_json_output_is_json_whatever_the_properties(value: str) -> None:
    name = queue()
    ok("send", name, "tea", "--property", f"value={value}")
    assert "value" in ok("peek", name, "--json").json["application_properties"]


def test_bytes_that_are_not_text_are_printed(tmp_path: Path) -> None:
    name = queue()
    file = tmp_path / "body"
    file.write_bytes(b"\x00\xff\n\x1b[31m[bold]")
    ok("send", name, "--file", file)
    assert ok("peek", name, "--json").json["body"] == "\x00\\xff\n\x1b[31m[bold]"
    assert "[bold]" in ok("peek", name).out


def test_a_table_shows_a_body_letter_by_letter() -> None:
    name = queue()
    ok("send", name, ":warning: [b]x[/b] \\[y]")
    assert ":warning: [b]x[/b] \\[y]" in ok("peek", name).out


PROPERTIES: dict[str, PropertyValue] = {
    "table": 7,
    "price": 2.5,
    "paid": True,
    "note": "7",
    "seal": b"wax",
    "at": datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
    "within": timedelta(minutes=5),
    "order": UUID(int=7),
}
SHOWN_PROPERTIES = [
    "table=7 (int)",
    "price=2.5 (float)",
    "paid=true (bool)",
    "note=7 (str)",
    "seal=wax (bytes)",
    "at=2030-01-02T03:04:05+00:00 (datetime)",
    "within=5m (timedelta)",
    "order=00000000-0000-0000-0000-000000000007 (UUID)",
]


def send_with_properties(connection: str, path: str, **fields: Any) -> None:
    """Send a message with a property of every type."""
    with (
        MessagingFactory.from_connection_string(connection) as factory,
        factory.create_message_sender(path) as sender,
    ):
        sender.send(BrokeredMessage(b"tea", application_properties=PROPERTIES, **fields))


def test_a_table_shows_properties_with_their_types(connection: str) -> None:
    name = queue()
    send_with_properties(connection, name)
    assert ", ".join(SHOWN_PROPERTIES) in ok("peek", name).out
    assert ", ".join(SHOWN_PROPERTIES) in ok("receive", name).out


@pytest.mark.parametrize("command", ["peek", "receive"])
def test_a_terminal_of_80_columns_shows_one_field_per_line(connection: str, command: str) -> None:
    name = queue()
    send_with_properties(connection, name, session_id="s" * 70, message_id="m" * 64)
    done = run_on_terminal(command, name)
    lines = [tuple(row.split(maxsplit=1)) for row in done.out.splitlines()]
    assert done.code == 0
    assert ("id", "m" * 64) in lines
    assert ("body", "tea") in lines
    assert [text for name, text in lines if name == "property"] == SHOWN_PROPERTIES
    assert f"session     {'s' * 70}\r\n" in done.out, "an id longer than a line is not broken"


def test_a_terminal_that_is_wide_enough_shows_a_table() -> None:
    name = queue()
    ok("send", name, "tea", "--message-id", "m", "--property", "table=7")
    heads, row = run_on_terminal("peek", name).rows
    assert heads == ["number", "enqueued", "id", "failures", "properties", "body"]
    assert row[3:] == ["m", "0", "table=7", "(int)", "tea"]


def test_a_message_cannot_move_the_cursor_of_a_terminal(tmp_path: Path) -> None:
    name = queue()
    file = tmp_path / "body"
    file.write_bytes(b"tea\n\x1b[2Jtwo")
    ok("send", name, "--file", file)
    assert "tea\\n\\x1b[2Jtwo" in ok("peek", name).out


def test_an_argument_that_is_no_text_is_sent_or_refused(connection: str) -> None:
    command = [*map(os.fsencode, PYTHON), b"send", os.fsencode(queue()), b"\xff"]
    environment = {**os.environ, CONNECTION: connection}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode in (0, 2)
    assert b"Traceback" not in done.stderr


def test_a_message_can_be_sent_many_times() -> None:
    name = queue()
    assert ok("send", name, "tea", "--count", 2500, "--json").json == {"sent": 2500}
    assert taken(name) == ["tea"] * 2500


def test_every_line_of_a_file_becomes_a_message(tmp_path: Path) -> None:
    name = queue()
    file = tmp_path / "lines"
    file.write_bytes(b"one\r\ntwo\n\nfour without an end")
    assert ok("send", name, "--lines", file).err == f"sent 4 to {name}\n"
    assert taken(name) == ["one", "two", "", "four without an end"]


def test_lines_come_from_standard_input_in_bulk() -> None:
    name = queue()
    lines = [f"line {at}" for at in range(2345)]
    assert ok("send", name, "--lines", "-", "--json", stdin="\n".join(lines)).json == {"sent": 2345}
    assert taken(name) == lines


def test_large_messages_are_sent_in_bulk(tmp_path: Path) -> None:
    name = queue()
    file = tmp_path / "body"
    file.write_bytes(b"x" * 250_000)
    assert ok("send", name, "--file", file, "--count", 270, "--json").json == {"sent": 270}
    assert ok("queue", "show", name, "--json").json["runtime"]["active_message_count"] == 270


def test_a_scheduled_message_appears_later() -> None:
    name = queue()
    ok("send", name, "tea", "--in", "1h")
    assert taken(name) == []
    assert ok("peek", name, "--json").json["state"] == "scheduled"
    assert ok("queue", "list").rows[0][4] == "scheduled"


def test_receiving_takes_the_message() -> None:
    name = queue()
    ok("send", name, "tea")
    heads, row = ok("receive", name).rows
    assert heads == ["number", "enqueued", "id", "failures", "body"]
    assert row[-1] == "tea"
    assert taken(name) == []


def test_receiving_takes_no_more_than_was_asked_for() -> None:
    name = queue()
    ok("send", name, "tea", "--count", 2300)
    done = ok("receive", name, "--max", 2100, "--json")
    numbers = [line["sequence_number"] for line in done.lines]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 2100
    assert len(taken(name)) == 200


def test_an_empty_queue_is_reported_when_the_wait_is_over() -> None:
    done = ok("receive", queue(), "--wait", "10ms")
    assert done.out == ""


def test_what_is_kept_is_given_back_at_once() -> None:
    name = queue()
    ok("send", name, "tea", "--count", 1200)
    assert len(ok("receive", name, "--max", 1200, "--keep", "--json").lines) == 1200
    assert len(taken(name)) == 1200


def test_looking_at_a_message_often_does_not_kill_it() -> None:
    name = queue("--max-delivery-count", "2")
    ok("send", name, "tea")
    for _ in range(3):
        ok("receive", name, "--keep", "--wait", "0s")
    assert taken(name) == ["tea"]


def test_peeking_leaves_messages_where_they_are() -> None:
    name = queue()
    ok("send", name, "--lines", "-", stdin="a\nb\nc\n")
    assert [line["body"] for line in ok("peek", name, "--json").lines] == ["a", "b", "c"]
    second = ok("peek", name, "--json").lines[1]["sequence_number"]
    assert [
        line["body"] for line in ok("peek", name, "--from", second, "--max", 1, "--json").lines
    ] == ["b"]
    assert taken(name) == ["a", "b", "c"]


def test_peek_shows_the_scheduled_messages_of_a_topic() -> None:
    name = topic()
    assert f"Peek a subscription for the others: {name}/Subscriptions/name" in ok("peek", name).err
    ok("send", name, "later", "--in", "1h")
    assert "later" in ok("peek", name).out


@pytest.mark.parametrize("command", [("peek",), ("receive", "--wait", "0s")], ids=" ".join)
def test_showing_nothing_says_so(command: tuple[str, ...]) -> None:
    name = queue()
    done = ok(*command, name)
    assert (done.out, done.err) == ("", "no messages\n")
    assert ok(*command, name, "--json").err == ""


def test_a_session_is_received_by_its_name() -> None:
    name = queue("--requires-session")
    for session in ("a", "b"):
        ok("send", name, f"for {session}", "--session-id", session)
    done = ok("receive", name, "--session-id", "b", "--max", 5, "--wait", "1s", "--json")
    assert [(line["body"], line["session_id"]) for line in done.lines] == [("for b", "b")]


# -- dead letters ----------------------------------------------------------------------------------


def test_dead_messages_are_listed_with_their_reason(connection: str) -> None:
    name = queue()
    ok("send", name, "tea")
    kill_messages(connection, name, 1)
    assert ok("dead-letter", "list", name, "--json").json["dead_letter_reason"] == "bad table"
    assert "bad table" in ok("dead-letter", "list", name).out
    assert ok("queue", "show", name, "--json").json["runtime"]["dead_letter_message_count"] == 1


def test_dead_messages_of_a_queue_are_sent_again(connection: str) -> None:
    name = queue()
    ok("send", name, "tea", "--count", 1500, "--property", "table=7")
    kill_messages(connection, name, 1500)
    assert ok("dead-letter", "resubmit", name, "--max", 1, "--json").json == {"resubmitted": 1}
    assert ok("dead-letter", "resubmit", name).err == "resubmitted 1499\n"
    assert ok("peek", name, "--json").lines[0]["application_properties"] == {"table": 7}
    assert taken(name) == ["tea"] * 1500
    assert ok("dead-letter", "list", name).err == "no messages\n"


def test_dead_messages_of_a_subscription_are_sent_to_its_topic_again(connection: str) -> None:
    name = topic()
    path = f"{name}/Subscriptions/s"
    ok("subscription", "create", name, "s")
    ok("send", name, "tea")
    kill_messages(connection, path, 1)
    assert ok("dead-letter", "resubmit", path.lower(), "--json").json == {"resubmitted": 1}
    assert taken(path) == ["tea"]


def test_a_resubmitted_message_is_not_lost_where_duplicates_are_dropped(connection: str) -> None:
    name = queue("--requires-duplicate-detection")
    ok("send", name, "tea")
    kill_messages(connection, name, 1)
    ok("dead-letter", "resubmit", name)
    dead = [line["body"] for line in ok("dead-letter", "list", name, "--json").lines]
    assert taken(name) + dead == ["tea"]


def test_dead_messages_are_thrown_away_when_that_is_confirmed(connection: str) -> None:
    name = queue()
    ok("send", name, "tea", "--count", 1100)
    kill_messages(connection, name, 1100)
    assert run("dead-letter", "purge", name, stdin="n\n").code != 0
    assert len(ok("dead-letter", "list", name, "--max", 1000, "--json").lines) == 1000
    assert ok("dead-letter", "purge", name, "--yes", "--json").json == {"purged": 1100}
    assert ok("dead-letter", "purge", name, "--yes").err == "purged 0\n"
