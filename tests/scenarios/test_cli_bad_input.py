"""The command line with values that cannot be: one clear error and an exit code, no traceback."""

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest

from tests.scenarios.command_line import PYTHON, Done, commands, run, run_process
from tests.soak.server_process import ServerProcess
from twinbus import MessagingFactory, NamespaceManager
from twinbus.cli.context import CONNECTION, Span, Text
from twinbus.limits import MAX_MESSAGE_BYTES
from twinbus.namespace.server import ServerNamespace

NOT_UTF_8 = b"caf\xe9"
NOT_UTF_8_AS_TEXT = os.fsdecode(NOT_UTF_8)
KEY = "NobodyShallSeeIt42"
QUEUE = "orders"
LINES = 2500


@pytest.fixture(autouse=True)
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a namespace that is embedded in each command, and a directory to write to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CONNECTION, f"Endpoint=embedded://{tmp_path}/shop")
    return tmp_path / "shop"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """Use a namespace on a server."""
    process = ServerProcess(tmp_path, f"[[queue]]\npath = '{QUEUE}'")
    process.start()
    monkeypatch.setenv(CONNECTION, process.connection_string)
    yield process
    process.kill()


def is_clear(done: Done) -> bool:
    """Whether a command was refused as wrong usage, in a few words."""
    last = done.err.splitlines()[-1]
    return done.code == 2 and ("Error: " in last or last.startswith("twinbus: "))


# -- numbers ---------------------------------------------------------------------------------------


VALUE = "{value}"


def parameters(*kinds: type[click.ParamType[Any]]) -> list[object]:
    """Return a command line for every parameter of these types, with VALUE in its place."""
    return [
        pytest.param(_with_value(path, command, each), id=f"{' '.join(path)} {each.name}")
        for path, command in commands()
        for each in command.params
        if isinstance(each.type, kinds)
    ]


def _with_value(path: tuple[str, ...], command: click.Command, wanted: click.Parameter) -> str:
    """Return a command line with everything that is required, and VALUE for one parameter."""
    words = [*path]
    for each in command.params:
        if each is wanted:
            is_option = isinstance(each, click.Option)
            words.append(f"{max(each.opts, key=len)}={VALUE}" if is_option else VALUE)
        elif isinstance(each, click.Argument) and each.required:
            choices = each.type.choices if isinstance(each.type, click.Choice) else ()
            words.append(next(iter(choices), "." if isinstance(each.type, click.Path) else "a"))
    return " ".join(words)


def run_with(line: str, value: str) -> Done:
    return run(*(word.replace(VALUE, value) for word in line.split()))


@pytest.mark.parametrize("value", ["nan", "-inf", "1e300", "", "9" * 30, "9" * 5000])
@pytest.mark.parametrize("line", parameters(click.types.IntParamType, click.types.FloatParamType))
def test_a_number_that_cannot_be_is_wrong_usage(line: str, value: str) -> None:
    done = run_with(line, value)
    assert is_clear(done), done.err


@pytest.mark.parametrize("value", ["nan", "-1s", "1e300s", "9" * 30 + "d", "9" * 5000 + "s"])
@pytest.mark.parametrize("line", parameters(Span))
def test_a_length_of_time_that_cannot_be_is_wrong_usage(line: str, value: str) -> None:
    done = run_with(line, value)
    assert is_clear(done), done.err
    assert len(done.err) < 1000


@pytest.mark.parametrize(
    "arguments",
    [
        ["queue", "list", "--timeout"],
        ["receive", "a", "--wait"],
        ["send", "a", "text", "--in"],
        ["syphon", "--lease"],
        ["syphon", "--retry-interval"],
        ["estimate", "--outage"],
        ["estimate", "--failover-interval"],
        ["estimate", "--ping-interval"],
        ["queue", "create", "b", "--lock-duration"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("value", ["unlimited", "99999999d"])
def test_a_time_that_must_end_cannot_be_unlimited(arguments: list[str], value: str) -> None:
    run("queue", "create", "a")
    assert is_clear(run(*arguments, value))


@pytest.mark.parametrize("hours", ["nan", "inf", "-1", "1e300"])
def test_a_simulation_needs_a_finite_number_of_hours(hours: str) -> None:
    done = run_process("simulate", f"--hours={hours}")
    assert is_clear(done)
    assert "'--hours'" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("value", ["1e400", "-1e400", "9" * 30, "9" * 5000])
def test_a_property_never_becomes_infinite_because_its_number_is_too_large(value: str) -> None:
    run("queue", "create", QUEUE)
    assert is_clear(run("send", QUEUE, "tea", "--property", f"price={value}"))


@pytest.mark.parametrize("sweep", ["size=nan", "size=1.5", "size=", "rate=x", "size=" + "9" * 5000])
def test_a_value_of_a_sweep_that_is_no_number_is_named_in_short(sweep: str) -> None:
    done = run("estimate", "--sweep", sweep)
    assert is_clear(done)
    assert len(done.err) < 500


@pytest.mark.parametrize("option", ["--since", "--until"])
def test_a_report_begins_and_ends_on_a_day_that_a_ledger_can_have(option: str) -> None:
    assert is_clear(run("report", ".", option, "0001-01-01"))


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NOT_UTF_8_AS_TEXT, "caf\0"], ids=["not UTF-8", "NUL"])
@pytest.mark.parametrize("line", parameters(Text))
def test_a_text_that_cannot_be_is_wrong_usage_and_not_shown(line: str, value: str) -> None:
    done = run_with(line, value)
    assert is_clear(done), done.err
    assert "is not valid UTF-8 at character 4" in done.err or "NUL" in done.err
    assert "caf" not in done.err


def test_no_text_parameter_is_unchecked() -> None:
    unchecked = [
        f"{' '.join(path)} {each.name}"
        for path, command in commands()
        for each in command.params
        if isinstance(each.type, click.types.StringParamType)
    ]
    assert unchecked == []


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("environment", f"Endpoint=twinbus://{KEY}"),
        ("environment", f"Endpoint=embedded:///tmp/{KEY}"),
        ("environment", KEY),
        ("option", f"Endpoint=twinbus://127.0.0.1:1;SharedAccessKeyName=a;SharedAccessKey={KEY}"),
        ("file", f"Endpoint=twinbus://127.0.0.1:1;SharedAccessKeyName=a;SharedAccessKey={KEY}"),
    ],
)
def test_a_connection_string_that_is_not_utf_8_is_refused_and_not_shown(
    place: str, text: str
) -> None:
    given = text.encode() + b"\xe9"
    Path("connection").write_bytes(given)
    options: dict[str, tuple[str | bytes, ...]] = {
        "option": ("--connection", given),
        "file": ("--connection-file", "connection"),
    }
    environment = {CONNECTION: given} if place == "environment" else {}
    done = run_process("queue", "list", *options.get(place, ()), environment=environment)
    assert is_clear(done)
    assert "not valid UTF-8" in done.err
    assert KEY not in done.err


def test_a_body_is_sent_as_the_bytes_that_were_typed() -> None:
    run("queue", "create", QUEUE)
    done = run_process("send", QUEUE, NOT_UTF_8)
    assert (done.code, done.err) == (0, f"sent 1 to {QUEUE}\n")
    assert run("peek", QUEUE, "--json").json["body"] == "caf\\xe9"


def test_a_body_that_no_shell_could_pass_is_wrong_usage() -> None:
    assert is_clear(run("send", QUEUE, "\ud800"))


def test_a_file_name_may_be_any_bytes(tmp_path: Path) -> None:
    done = run_process("estimate", "--page", os.fsencode(tmp_path) + b"/" + NOT_UTF_8)
    assert done.code == 0, done.err
    assert (tmp_path / NOT_UTF_8_AS_TEXT).exists()


def test_output_that_the_terminal_cannot_show_is_escaped() -> None:
    run("queue", "create", QUEUE)
    run("send", QUEUE, "☕")
    done = run_process("peek", QUEUE, environment={"PYTHONIOENCODING": "ascii:strict"})
    assert done.code == 0, done.err
    assert "\\u2615" in done.out


# -- files -----------------------------------------------------------------------------------------


def test_a_deeply_nested_configuration_is_refused_by_its_name(namespace: Path) -> None:
    Path("deep.toml").write_text(f"a = {'[' * 5000}{']' * 5000}")
    done = run_process("serve", str(namespace), "--config", "deep.toml")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("twinbus: deep.toml has values that are nested too deeply")
    assert not namespace.exists()


@pytest.mark.parametrize("command", [("estimate",), ("report", ".")], ids=" ".join)
def test_a_deeply_nested_price_sheet_is_refused_by_its_name(command: tuple[str, ...]) -> None:
    Path("deep.toml").write_text(f"a = {'[' * 5000}{']' * 5000}")
    Path("ledger").mkdir()
    done = run(*command, "--prices", "./deep.toml")
    assert is_clear(done)
    assert "deep.toml" in done.err


def test_a_bad_rule_of_a_configuration_is_named_before_anything_is_created(namespace: Path) -> None:
    Path("entities.toml").write_text(
        "[[topic]]\npath = 'news'\n[[subscription]]\ntopic_path = 'news'\nname = 'sport'\n"
        "rules = [{ name = 'good', sql = 'x = 1' }, { name = 'bad', sql = 'x = = 1' }]\n"
    )
    done = run_process("serve", str(namespace), "--config", "entities.toml")
    assert done.code == 2
    assert done.err.startswith("twinbus: entities.toml: subscription 'sport': rule 'bad': ")
    assert not namespace.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("send", QUEUE, "--lines", "/dev/zero"),
        ("send", QUEUE, "--file", "/dev/zero"),
        ("queue", "list", "--connection-file", "/dev/zero"),
        ("serve", "a", "--config", "/dev/zero"),
    ],
    ids=" ".join,
)
def test_a_file_that_never_ends_is_refused_with_little_memory(arguments: tuple[str, ...]) -> None:
    run("queue", "create", QUEUE)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, before[1]))
    try:
        done = run_process(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert is_clear(done), done.err[-500:]
    assert "has more than" in done.err


@pytest.mark.parametrize("file", ["--lines", "--file"])
def test_a_file_that_cannot_be_read_is_wrong_usage(file: str) -> None:
    run("queue", "create", QUEUE)
    assert is_clear(run("send", QUEUE, file, "/proc/self/mem"))


def test_a_line_that_is_too_long_is_named_and_what_was_sent_before_is_reported() -> None:
    run("queue", "create", QUEUE)
    Path("lines").write_text("tea\n" * 1500 + "x" * MAX_MESSAGE_BYTES + "\ntea\n")
    done = run("send", QUEUE, "--lines", "lines")
    assert done.code == 2
    assert done.err.startswith("sent 1000 to orders\ntwinbus: line 1501 of --lines has ")
    assert len(run("peek", QUEUE, "--max", 1000, "--json").lines) == 1000


def test_a_line_as_long_as_a_message_may_be_is_sent() -> None:
    run("queue", "create", QUEUE)
    Path("lines").write_text("x" * (MAX_MESSAGE_BYTES - 1000) + "\r\ntea")
    assert run("send", QUEUE, "--lines", "lines", "--json").json == {"sent": 2}


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["click", "numpy", "pyarrow", "rich"])
def test_an_interrupt_during_the_imports_is_one_line(module: str, tmp_path: Path) -> None:
    interrupting = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / f"{module}.py").write_text(interrupting)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_process("queue", "list", environment={"PYTHONPATH": path})
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


def test_an_interrupted_bulk_send_reports_what_was_sent(server: ServerProcess) -> None:
    command = [*PYTHON, "send", QUEUE, "--lines", "-"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        NamespaceManager.from_connection_string(server.connection_string) as manager,
    ):
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"tea\n" * LINES)
        process.stdin.flush()  # and more may come
        while manager.get_runtime_properties(QUEUE).active_message_count < LINES - 500:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        # The reply to the second thousand may still be on its way.
        known = (b"sent 1000 to orders\ninterrupted\n", b"sent 2000 to orders\ninterrupted\n")
        assert process.stderr.read() in known


@pytest.mark.parametrize("command", [("queue", "list"), ("receive", QUEUE, "--session-id", "s")])
def test_an_interrupt_does_not_wait_for_a_silent_server(
    command: tuple[str, ...], silent_port: int
) -> None:
    where = f"Endpoint=twinbus://127.0.0.1:{silent_port}"
    arguments = [*PYTHON, *command, "-c", where, "--timeout", "5m"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        _wait_for_connection(process.pid, silent_port)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == b"interrupted\n"


def _wait_for_connection(pid: int, port: int) -> None:
    """Return when a process has connected to a port of this machine."""
    wanted = f":{port:04X} 01"  # the remote address, established
    while True:
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines():
            if wanted in line:
                return


# -- servers that do not answer --------------------------------------------------------------------

IMPATIENT = ("--timeout", "1s")
SOON_S = 20  # a second, and the start of a process on a busy machine
COMMANDS = [
    ("queue", "list"),
    ("send", QUEUE, "tea"),
    ("receive", QUEUE),
    ("receive", QUEUE, "--session-id", "mine"),
]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Return a port where connections are accepted and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_ends_with_its_timeout_where_nobody_listens(command: tuple[str, ...]) -> None:
    where = "Endpoint=twinbus://127.0.0.1:1"
    done = run_process(*command, "-c", where, *IMPATIENT, timeout_s=SOON_S)
    assert done.code == 5
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_ends_with_its_timeout_where_nobody_answers(
    command: tuple[str, ...], silent_port: int
) -> None:
    where = f"Endpoint=twinbus://127.0.0.1:{silent_port}"
    done = run_process(*command, "-c", where, *IMPATIENT, timeout_s=SOON_S)
    assert done.code == 5
    assert len(done.err.splitlines()) == 1


def test_a_command_that_tries_for_long_says_so_at_its_first_failure() -> None:
    where = "Endpoint=twinbus://127.0.0.1:1"
    done = run_process("queue", "list", "-c", where, "--timeout", "3s", timeout_s=SOON_S)
    first, last = done.err.splitlines()
    assert first.endswith("Trying again for up to 3 s")
    assert "cannot be reached" in first
    assert "tried" in last


@pytest.fixture
def passed_down(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Note what a command passes down to its client, and how often it closes one."""
    noted: dict[str, list[Any]] = {"timeouts": [], "waits": [], "closes": []}
    ask, submit = ServerNamespace.ask, ServerNamespace.submit

    def note(command: Any) -> None:
        if hasattr(command, "wait"):
            noted["waits"].append(command.wait)

    def ask_and_note(self: Any, command: Any, timeout_s: float | None = None) -> Any:
        note(command)
        noted["timeouts"].append(timeout_s)
        return ask(self, command, timeout_s)

    def submit_and_note(self: Any, command: Any) -> Any:
        note(command)
        return submit(self, command)

    monkeypatch.setattr(ServerNamespace, "ask", ask_and_note)
    monkeypatch.setattr(ServerNamespace, "submit", submit_and_note)
    for client in (MessagingFactory, NamespaceManager):

        def close_and_note(self: Any, close: Any = client.close) -> None:
            noted["closes"].append(self)
            close(self)

        monkeypatch.setattr(client, "close", close_and_note)
    return noted


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_that_got_no_reply_waits_for_nothing_else(
    command: tuple[str, ...], silent_port: int, passed_down: dict[str, list[Any]]
) -> None:
    where = f"Endpoint=twinbus://127.0.0.1:{silent_port}"
    waiting = ("--wait", "3s") if command[0] == "receive" else ()
    done = run(*command, *waiting, "-c", where, *IMPATIENT)
    assert done.code == 5, done.err
    assert passed_down["timeouts"], "the request has a timeout"
    assert all(0 < timeout_s <= 1 for timeout_s in passed_down["timeouts"])
    assert set(passed_down["waits"]) <= {timedelta(0)}, "the server is not asked to wait first"
    assert passed_down["closes"] == [], "to close means another request to a server that hangs"


@pytest.mark.usefixtures("server")
def test_a_command_that_got_its_reply_closes_its_client(passed_down: dict[str, list[Any]]) -> None:
    assert run("queue", "list", *IMPATIENT).code == 0
    assert len(passed_down["closes"]) == 1


def test_a_command_ends_with_its_timeout_where_the_server_is_stopped(
    server: ServerProcess,
) -> None:
    server.freeze()
    for command in COMMANDS:
        done = run_process(*command, *IMPATIENT, timeout_s=SOON_S)
        assert done.code == 5
        assert len(done.err.splitlines()) == 1
