"""The command line against a real server: every command, both outputs, every exit code."""

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import click
import pytest

from tests.scenarios.command_line import PYTHON, Done, commands, run, run_on_terminal
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    RetryPolicy,
    UnauthorizedError,
)
from twinbus.cli.context import CONNECTION
from twinbus.connection import ConnectionString
from twinbus.message import PropertyValue

NAMES = itertools.count(1)
URGENT = ("--sql", "priority > 5")


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a namespace; give the connection string of its root key."""
    place = tmp_path_factory.mktemp("cli") / "shop"
    command = [*PYTHON, "serve", str(place), "--port", "0", "--admin-port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0
        server.stdout.close()


@pytest.fixture(autouse=True)
def _environment(connection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTION, connection)


def ok(*arguments: object, stdin: str | bytes = "") -> Done:
    done = run(*arguments, stdin=stdin)
    assert done.code == 0, done.err
    return done


def queue(*options: str) -> str:
    name = f"queue-{next(NAMES)}"
    ok("queue", "create", name, *options)
    return name


def topic() -> str:
    name = f"topic-{next(NAMES)}"
    ok("topic", "create", name)
    return name


def taken(path: str) -> list[str]:
    """Receive all there is; return the bodies."""
    return [
        one["body"] for one in ok("receive", path, "--max", 9999, "--wait", "0s", "--json").lines
    ]


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


# -- help ------------------------------------------------------------------------------------------


EVERY = [
    pytest.param(path, command, id=" ".join(path) or "twinbus") for path, command in commands()
]
LEAVES = [one for one in EVERY if not isinstance(one.values[1], click.Group)]


def test_the_commands_are_those_of_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    assert all(f"`{word}" in page for path, _ in commands() for word in path)


@pytest.mark.parametrize(("path", "command"), EVERY)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_a_command_says_what_it_does(
    path: tuple[str, ...], command: click.Command, flag: str
) -> None:
    done = ok(*path, flag)
    assert done.out.startswith(f"Usage: {' '.join(('twinbus', *path))} ")
    assert (command.help or "").partition("\n")[0].split()[0] in done.out


@pytest.mark.parametrize(("path", "command"), LEAVES)
def test_help_shows_examples(path: tuple[str, ...], command: click.Command) -> None:
    assert command.epilog, "--help after any command shows its options and examples"
    assert f"twinbus {' '.join(path)} " in ok(*path, "--help").out.partition("Example")[2]


@pytest.mark.parametrize(("path", "command"), LEAVES)
def test_every_option_is_explained(path: tuple[str, ...], command: click.Command) -> None:
    options = [one for one in command.params if isinstance(one, click.Option)]
    assert [f"{' '.join(path)} {one.opts[0]}" for one in options if not one.help] == []


def test_the_version_is_told() -> None:
    assert ok("--version").out.startswith("twinbus, version ")


def test_without_a_command_the_commands_are_listed() -> None:
    assert "dead-letter" in run().err + run().out


# -- where the namespace is ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("queue", "list"),
        ("queue", "show", "from-stdin"),
        ("topic", "list"),
        ("keys", "list"),
        ("keys", "create", "from-stdin", "--claim", "send"),
        ("keys", "show", "RootManageSharedAccessKey"),
        ("peek", "from-stdin"),
        ("send", "from-stdin", "tea"),
    ],
    ids=" ".join,
)
def test_the_connection_comes_from_a_line_of_standard_input(
    command: tuple[str, ...], connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("queue", "create", "from-stdin")
    monkeypatch.delenv(CONNECTION)
    done = run(*command, "--connection-file", "-", stdin=f"{connection}\n")
    assert (done.code, done.err.replace("sent 1 to from-stdin\n", "")) in [
        (0, ""),
        (0, "no messages\n"),
        (0, "there are none\n"),
    ]


def test_the_connection_comes_from_an_option_a_file_or_the_environment_in_this_order(
    connection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(f"{connection}\n")
    bad.write_text("nonsense")
    monkeypatch.setenv(CONNECTION, "nonsense")
    ok("queue", "list", "--connection-file", good)
    ok("queue", "list", "--connection", connection, "--connection-file", bad)
    ok("queue", "list", "-c", connection)
    assert run("queue", "list").code == 2


def test_without_a_connection_it_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONNECTION)
    done = run("queue", "list")
    assert done.code == 2
    assert CONNECTION in done.err


@pytest.mark.parametrize("path", ["missing", "."])
def test_a_connection_file_that_cannot_be_read_is_wrong_usage(tmp_path: Path, path: str) -> None:
    assert run("queue", "list", "--connection-file", tmp_path / path).code == 2


def test_no_error_shows_a_key(connection: str, tmp_path: Path) -> None:
    key = ConnectionString.parse(connection).key
    file = tmp_path / "connection"
    file.write_bytes(b"\xff" + connection.encode())
    wrong = [
        connection.replace("Endpoint=twinbus", "Endpoint=teleport"),
        connection.replace("SharedAccessKey=", ""),
        connection.replace(";", ""),
        connection.replace("SharedAccessKeyName", "KeyName"),
        connection.replace("RootManage", "Root"),
        connection.replace("127.0.0.1:", f"127.0.0.1:{key}"),
        connection + ";Tls=maybe",
        connection + f";{key}",
        key,
    ]
    done = [run("queue", "list", "-c", text) for text in wrong]
    done += [run("queue", "list", "--connection-file", file)]
    assert [one.code for one in done if one.code not in (2, 4)] == []
    assert not any(key[:10] in one.out + one.err for one in done)


def test_a_connection_string_in_the_place_of_its_file_is_not_shown(connection: str) -> None:
    done = run("queue", "list", "--connection-file", connection)
    assert done.code == 2
    assert ConnectionString.parse(connection).key not in done.err


# -- exit codes ------------------------------------------------------------------------------------


def test_what_is_refused_exits_with_1() -> None:
    name = queue()
    done = run("queue", "create", name)
    assert (done.code, done.err) == (1, f"twinbus: {name} exists already\n")
    assert run("receive", name, "--session-id", "s").code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["queue", "nonsense"],
        ["queue", "create"],
        ["queue", "create", "a b"],
        ["queue", "create", "a", "--lock-duration", "soon"],
        ["queue", "create", "a", "--lock-duration", "1h"],
        ["queue", "create", "a", "--max-delivery-count", "many"],
        ["queue", "create", "a", "--max-delivery-count", "0"],
        ["queue", "create", "a", "--status", "asleep"],
        ["queue", "create", "a", "--nonsense"],
        ["queue", "list", "--timeout", "0s"],
        ["queue", "list", "--timeout", "soon"],
        ["send", "a"],
        ["send", "a", "text", "--lines", "-"],
        ["send", "a", "text", "--file", "/dev/null"],
        ["send", "a", "--file", "/does/not/exist"],
        ["send", "a", "text", "--count", "0"],
        ["send", "a", "text", "--count", "2", "--message-id", "m"],
        ["send", "a", "text", "--property", "table"],
        ["send", "a", "text", "--property", "=7"],
        ["send", "a", "text", "--property", "n=99999999999999999999"],
        ["send", "a", "text", "--time-to-live", "0s"],
        ["send", "a", "text", "--in", "soon"],
        ["send", "a", "text", "--in", "unlimited"],
        ["send", "a", "text", "--message-id", "m" * 129],
        ["receive", "a", "--max", "0"],
        ["receive", "a", "--wait", "unlimited"],
        ["peek", "a", "--max", "100000"],
        ["peek", "a", "--from", "here"],
        ["rule", "create", "t", "s", "r", "--sql", "a = 1", "--match", "a=1"],
        ["rule", "create", "t", "s", "r", "--match", "a"],
        ["keys", "create", "k"],
        ["keys", "create", "k", "--claim", "everything"],
        ["keys", "create", "", "--claim", "send"],
        ["keys", "regenerate", "k", "tertiary"],
        ["dead-letter", "resubmit", "a", "--max", "0"],
        ["serve"],
        ["serve", __file__],
        ["serve", "a", "--port", "65536"],
        ["serve", "a", "--admin-port", "-1"],
        ["serve", "a", "--name", "a b"],
        ["serve", "a", "--name", ""],
        ["serve", "a", "--config", "/does/not/exist"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("queue", "create", "a")
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "Error:" in done.err or done.err.startswith("twinbus: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["queue", "show", "missing"],
        ["queue", "delete", "missing", "--yes"],
        ["topic", "show", "missing"],
        ["topic", "delete", "missing", "--yes"],
        ["subscription", "create", "missing", "s"],
        ["subscription", "list", "missing"],
        ["subscription", "show", "missing", "s"],
        ["subscription", "delete", "missing", "s", "--yes"],
        ["rule", "create", "missing", "s", "r"],
        ["rule", "list", "missing", "s"],
        ["rule", "show", "missing", "s", "r"],
        ["rule", "delete", "missing", "s", "r"],
        ["send", "missing", "text"],
        ["receive", "missing"],
        ["peek", "missing"],
        ["dead-letter", "list", "missing"],
        ["dead-letter", "resubmit", "missing"],
        ["dead-letter", "purge", "missing", "--yes"],
        ["keys", "show", "missing"],
        ["keys", "create", "k", "--claim", "send", "--on", "missing"],
        ["keys", "regenerate", "missing", "primary"],
        ["keys", "delete", "missing"],
    ],
    ids=" ".join,
)
def test_what_is_not_there_exits_with_3(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("twinbus: ")
    assert "missing" in done.err


def test_a_topic_is_no_queue_and_a_queue_no_topic() -> None:
    assert run("topic", "show", queue()).code == run("queue", "show", topic()).code == 3


def test_what_is_not_allowed_exits_with_4(connection: str) -> None:
    name = queue()
    sender = ok("keys", "create", "sender", "--claim", "send", "--on", name).out.strip()
    assert run("receive", name, "-c", sender).code == 4
    assert run("queue", "list", "-c", sender).code == 4
    assert run("queue", "list", "-c", connection.replace("RootManage", "Nobody")).code == 4
    assert run("queue", "list", "-c", connection.partition(";")[0]).code == 4


def test_a_server_that_is_not_there_exits_with_5() -> None:
    where = "Endpoint=twinbus://127.0.0.1:1;SharedAccessKeyName=a;SharedAccessKey=b"
    done = run("queue", "list", "-c", where, "--timeout", "200ms")
    assert done.code == 5
    assert done.err.startswith("twinbus: ")


def test_a_session_that_somebody_has_exits_with_5(connection: str) -> None:
    name = queue("--requires-session")
    with (
        MessagingFactory.from_connection_string(connection) as factory,
        factory.accept_message_session(name, "mine"),
    ):
        assert run("receive", name, "--session-id", "mine", "--wait", "0s").code == 5


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_what_was_not_confirmed_is_not_done(answer: str) -> None:
    name = queue()
    assert run("queue", "delete", name, stdin=answer).code != 0
    ok("queue", "show", name)
    ok("queue", "delete", name, stdin="y\n")
    assert run("queue", "show", name).code == 3


def test_a_reader_that_has_seen_enough_is_no_failure(connection: str) -> None:
    name = queue()
    ok("send", name, "x" * 200, "--count", "2000")
    command = [*PYTHON, "peek", name, "--max", "1000", "--json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, CONNECTION: connection},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.wait(timeout=30), process.stderr.read()) == (0, "")


# -- entities --------------------------------------------------------------------------------------


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
    assert name in [one["description"]["path"] for one in listed]


def test_topics_are_created_listed_shown_and_deleted() -> None:
    name = topic()
    assert name in [row[0] for row in ok("topic", "list").rows]
    listed = ok("topic", "list", "--json").json
    assert name in [one["description"]["path"] for one in listed]
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
    assert [one["name"] for one in listed] == ["$Default", "all", "match", "sql"]
    shown = ok("rule", "show", name, "s", "sql", "--json").json
    assert shown["filter"]["expression"] == "priority > 5"
    ok("rule", "delete", name, "s", "sql")
    assert run("rule", "show", name, "s", "sql").code == 3


# -- messages --------------------------------------------------------------------------------------


def test_an_update_changes_what_is_given_and_nothing_else() -> None:
    name = queue("--lock-duration", "30s", "--user-metadata", "mine")
    target = queue()
    done = ok("queue", "update", name, "--status", "send_disabled", "--forward-to", target)
    assert done.code == 0
    shown = ok("queue", "show", name, "--json").json["description"]
    found = [shown[one] for one in ("status", "forward_to", "lock_duration", "user_metadata")]
    assert found[:2] == ["send_disabled", target]
    assert found[3] == "mine"
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
    options = itertools.chain.from_iterable(("--property", one) for one in properties)
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


def test_bytes_that_are_no_text_are_printed_all_the_same(tmp_path: Path) -> None:
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
    assert ok("receive", name, "--wait", "0s").err == "no messages\n" or taken(name) == []
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
    numbers = [one["sequence_number"] for one in done.lines]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 2100
    assert len(taken(name)) == 200


def test_an_empty_queue_is_told_when_the_wait_is_over() -> None:
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
    assert [one["body"] for one in ok("peek", name, "--json").lines] == ["a", "b", "c"]
    second = ok("peek", name, "--json").lines[1]["sequence_number"]
    assert [
        one["body"] for one in ok("peek", name, "--from", second, "--max", 1, "--json").lines
    ] == ["b"]
    assert taken(name) == ["a", "b", "c"]


def test_peeking_at_nothing_says_so() -> None:
    done = ok("peek", queue())
    assert (done.out, done.err) == ("", "no messages\n")


def test_a_session_is_received_by_its_name() -> None:
    name = queue("--requires-session")
    for session in ("a", "b"):
        ok("send", name, f"for {session}", "--session-id", session)
    done = ok("receive", name, "--session-id", "b", "--max", 5, "--wait", "1s", "--json")
    assert [(one["body"], one["session_id"]) for one in done.lines] == [("for b", "b")]


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
    dead = [one["body"] for one in ok("dead-letter", "list", name, "--json").lines]
    assert taken(name) + dead == ["tea"]


def test_dead_messages_are_thrown_away_when_that_is_confirmed(connection: str) -> None:
    name = queue()
    ok("send", name, "tea", "--count", 1100)
    kill_messages(connection, name, 1100)
    assert run("dead-letter", "purge", name, stdin="n\n").code != 0
    assert len(ok("dead-letter", "list", name, "--max", 1000, "--json").lines) == 1000
    assert ok("dead-letter", "purge", name, "--yes", "--json").json == {"purged": 1100}
    assert ok("dead-letter", "purge", name, "--yes").err == "purged 0\n"


# -- keys ------------------------------------------------------------------------------------------


def can_manage(connection: str) -> bool:
    policy = RetryPolicy.once()
    try:
        with NamespaceManager.from_connection_string(connection, retry_policy=policy) as manager:
            manager.list_queues()
    except UnauthorizedError:
        return False
    return True


def test_a_key_opens_what_it_is_for_and_no_more() -> None:
    name = queue()
    shop = ok("keys", "create", "shop", "--claim", "send", "--on", name).out.strip()
    both = ok("keys", "create", "both", "--claim", "send", "--claim", "listen").out.strip()
    ok("send", name, "tea", "-c", shop)
    assert run("peek", name, "-c", shop).code == 4
    ok("receive", name, "-c", both)
    assert run("queue", "show", name, "-c", both).code == 4


def test_keys_are_listed_without_their_secrets(connection: str) -> None:
    name = queue()
    made = ok("keys", "create", "listed", "--claim", "listen", "--on", name, "--json").json
    assert ["listed", name, "listen"] in ok("keys", "list").rows
    done = ok("keys", "list", "--json")
    assert {"name": "listed", "entity_path": name, "claims": ["listen"]} in done.json
    secrets = [made["secondary"], ConnectionString.parse(made["connection_string"]).key]
    secrets.append(ConnectionString.parse(connection).key)
    assert not any(secret in done.out + ok("keys", "list").out for secret in secrets)


def test_a_key_is_shown_as_it_was_made() -> None:
    made = ok("keys", "create", "shown", "--claim", "manage", "--json").json
    assert ok("keys", "show", "shown", "--json").json == made
    assert ok("keys", "show", "SHOWN").out.strip() == made["connection_string"]
    assert run("keys", "create", "shown", "--claim", "send").code == 1


def test_a_regenerated_secret_replaces_the_old_one_and_leaves_the_other() -> None:
    old = ok("keys", "create", "rotated", "--claim", "manage", "--json").json
    primary = ConnectionString.parse(old["connection_string"])
    secondary = old["connection_string"].replace(primary.key, old["secondary"])
    new = ok("keys", "regenerate", "rotated", "primary", "--json").json
    assert new["secondary"] == old["secondary"]
    assert can_manage(new["connection_string"])
    assert can_manage(secondary)
    assert not can_manage(old["connection_string"])
    ok("keys", "regenerate", "rotated", "secondary")
    assert not can_manage(secondary)


def test_a_deleted_key_opens_nothing() -> None:
    made = ok("keys", "create", "deleted", "--claim", "manage").out.strip()
    assert can_manage(made)
    ok("keys", "delete", "deleted")
    assert not can_manage(made)
    assert run("keys", "show", "deleted").code == 3


@pytest.mark.parametrize("name", ["a;b", " a ", "a=b", "ä", "a&skn=b"])
def test_the_connection_string_of_any_key_that_can_be_made_is_good(name: str) -> None:
    done = run("keys", "create", name, "--claim", "manage")
    assert done.code == 2 or can_manage(done.out.strip())


def test_the_key_of_a_stopped_server_is_shown_from_its_directory(tmp_path: Path) -> None:
    where = f"Endpoint=embedded://{tmp_path / 'namespace'}"
    ok("keys", "create", "root", "--claim", "manage", "-c", where)
    shown = ok("keys", "show", "root", "-c", where).out
    assert shown.startswith("SharedAccessKeyName=root;SharedAccessKey=")
    assert ok("keys", "list", "-c", where).rows == [["key", "claims"], ["root", "manage"]]
