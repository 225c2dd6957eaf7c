"""The command line: help, where the namespace is, exit codes."""

import os
import subprocess
from pathlib import Path

import click
import pytest

from tests.scenarios.cli_words import (
    ok,
    queue,
    topic,
)
from tests.scenarios.command_line import PYTHON, commands, run, run_process
from twinbus import (
    MessagingFactory,
    NamespaceManager,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.cli.context import CONNECTION
from twinbus.connection import ConnectionString

pytestmark = pytest.mark.usefixtures("environment")

# -- help ------------------------------------------------------------------------------------------


EVERY = [
    pytest.param(path, command, id=" ".join(path) or "twinbus") for path, command in commands()
]
LEAVES = [item for item in EVERY if not isinstance(item.values[1], click.Group)]


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
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert [f"{' '.join(path)} {option.opts[0]}" for option in options if not option.help] == []


def test_the_version_is_printed() -> None:
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


def test_the_error_for_a_wrong_connection_string_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONNECTION, "nonsense")
    bad = tmp_path / "bad"
    bad.write_text("nonsense")
    assert f"{CONNECTION}: Part 1" in run("queue", "list").err
    assert "--connection-file: Part 1" in run("queue", "list", "--connection-file", bad).err
    assert "--connection: Part 1" in run("queue", "list", "--connection", "nonsense").err


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


def test_a_connection_file_may_be_the_whole_output_of_a_server(
    connection: str, tmp_path: Path
) -> None:
    output = tmp_path / "shop.txt"
    output.write_text(f"{connection}\nEndpoint=sb://127.0.0.1:4617\nshop is ready\n")
    ok("queue", "list", "--connection-file", output)


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
    assert [item.code for item in done if item.code not in (2, 4)] == []
    assert not any(key[:10] in item.out + item.err for item in done)


def test_a_connection_string_in_the_place_of_its_file_is_not_shown(connection: str) -> None:
    done = run("queue", "list", "--connection-file", connection)
    assert done.code == 2
    assert ConnectionString.parse(connection).key not in done.err


# -- exit codes ------------------------------------------------------------------------------------


def test_a_refused_command_exits_with_1() -> None:
    name = queue()
    done = run("queue", "create", name)
    assert (done.code, done.err) == (
        1,
        f"twinbus: {name} exists already. Choose another path, or update the entity\n",
    )
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
def test_a_missing_entity_exits_with_3(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("twinbus: ")
    assert "missing" in done.err


def test_a_topic_is_no_queue_and_a_queue_no_topic() -> None:
    assert run("topic", "show", queue()).code == run("queue", "show", topic()).code == 3


def test_a_forbidden_command_exits_with_4(connection: str) -> None:
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


def test_a_session_that_another_client_has_locked_exits_with_5(connection: str) -> None:
    name = queue("--requires-session")
    with (
        MessagingFactory.from_connection_string(connection) as factory,
        factory.accept_message_session(name, "mine"),
    ):
        assert run("receive", name, "--session-id", "mine", "--wait", "0s").code == 5


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_a_command_that_was_not_confirmed_does_nothing(answer: str) -> None:
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


# -- whose backlog it is ---------------------------------------------------------------------------


def test_a_syphon_does_not_create_the_directory_of_a_missing_outbox(tmp_path: Path) -> None:
    away = f"Endpoint=embedded://{tmp_path}/outbxo"
    home = "Endpoint=twinbus://127.0.0.1:1;Name=contoso"
    done = run("syphon", "--once", "--primary", home, "--secondary", away)
    assert done.code == 2
    assert f"the directory {tmp_path}/outbxo of the secondary does not exist" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_syphon_refuses_the_backlog_of_another_primary_with_the_same_name(tmp_path: Path) -> None:
    first, second, away = (
        f"Endpoint=embedded://{tmp_path / name}" for name in ("eu/shop", "us/shop", "backup")
    )
    with MessagingFactory.from_connection_string(first) as primary:
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager.from_connection_string(away),
            MessagingFactory.from_connection_string(away),
            1,
        )
        primary.pair_namespace(options)
    done = run_process("syphon", "--once", "--primary", second, "--secondary", away)
    assert (done.code, done.out) == (1, "")
    assert "belongs to another primary" in done.err
    assert str(tmp_path / "eu/shop") in done.err


@pytest.mark.parametrize("host", ["10.0.0.1", "[::1]"])
def test_a_syphon_of_an_ip_address_says_that_it_needs_a_name(host: str, tmp_path: Path) -> None:
    away = f"Endpoint=embedded://{tmp_path / 'backup'}"
    where = f"Endpoint=twinbus://{host}:4617"
    done = run_process("syphon", "--once", "--primary", where, "--secondary", away)
    assert done.code == 2
    assert "Put Name=... into its connection string" in done.err
