"""What a server logs: everything an operator must know, once, and never a secret."""

import json
import signal
import socket
import sys
from contextlib import suppress

import pytest

from tests.scenarios import server_process
from tests.scenarios.server_process import ORDERS, Server
from tests.waiting import until
from twinbus import MessagingError, UnauthorizedError
from twinbus.connection import ConnectionString
from twinbus.errors import MessageSizeExceededError
from twinbus.limits import MAX_HEALS

JSON = ("--log-format", "json")
WRONG = "wrong" * 8


def test_start_and_stop_are_logged_with_what_was_recovered(server: Server) -> None:
    server.start(ORDERS, *JSON)
    server.send(b"tea", b"coffee")
    server.stop()
    server.start(ORDERS, *JSON)
    server.stop()
    first, second = server.events("started")
    assert (first["level"], first["logger"]) == ("INFO", "twinbus.server")
    assert (first["name"], first["directory"]) == ("shop", str(server.folder / "shop"))
    assert first["address"] == f"127.0.0.1:{server.port}"
    assert first["version"]
    assert first["ledger_max_bytes"] == 10 * 1024**3
    assert (first["messages"], second["messages"]) == (0, 2)
    assert second["records"] > 0
    assert second["seconds"] >= 0
    assert len(server.events("stopped")) == 2


def test_text_is_the_default_and_shows_start_and_stop(server: Server) -> None:
    server.start(ORDERS)
    server.stop()
    started, stopping, stopped = server.log.splitlines()
    assert " INFO twinbus.server The server of namespace shop has started" in started
    assert "Recovered 0 messages" in started
    assert "kept for 90 days and up to 10737418240 bytes" in started
    assert "is stopping" in stopping
    assert "has stopped" in stopped


def test_refused_keys_are_logged_once_and_without_any_secret(server: Server) -> None:
    server.start(ORDERS, *JSON)
    good = ConnectionString.parse(server.connection)
    server.connection = server.connection.replace(good.key, WRONG)
    for _ in range(3):
        with pytest.raises(UnauthorizedError):
            server.take()
    server.stop()
    [line] = server.events("refused_key")
    assert (line["level"], line["key"]) == ("WARNING", good.key_name)
    assert "not signed with a key" in line["reason"]
    for secret in (WRONG, good.key, "SharedAccessSignature", "sig="):
        assert secret not in server.log


def test_a_secret_in_place_of_a_key_name_is_not_logged(server: Server) -> None:
    server.start(ORDERS, *JSON)
    good = ConnectionString.parse(server.connection)
    server.connection = server.connection.replace(good.key_name, good.key)
    with pytest.raises(UnauthorizedError):
        server.take()
    server.stop()
    assert [line["key"] for line in server.events("refused_key")] == ["(not a key name)"]
    assert good.key not in server.log


def test_malformed_requests_of_strangers_are_one_line(server: Server) -> None:
    server.start(ORDERS, *JSON)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
            line.sendall(b"GET / \x00\x01 HTTP/9\r\n\r\n")
            assert line.recv(12) == b"HTTP/1.1 400"
    server.stop()
    lines = [json.loads(line) for line in server.log.splitlines()]
    [warning] = [line for line in lines if line["logger"] == "uvicorn.error"]
    assert "Invalid HTTP request" in warning["message"]


def test_verbose_shows_debug_lines(server: Server) -> None:
    server.start(ORDERS, *JSON, "--verbose")
    assert server.process is not None
    with server.factory() as factory:
        factory.create_message_receiver("orders").peek()
    server.stop()
    levels = {json.loads(line)["level"] for line in server.log.splitlines()}
    assert levels == {"DEBUG", "INFO"}


# -- SIGHUP ----------------------------------------------------------------------------------------


def hang_up(server: Server, event: str, text: str | None = None) -> dict[str, object]:
    """Write a file, send SIGHUP, and return the line that the server logs about it."""
    assert server.process is not None
    if text is not None:
        (server.folder / "entities.toml").write_text(text)
    before = len(server.events(event))
    server.process.send_signal(signal.SIGHUP)
    until(lambda: len(server.events(event)) > before)
    return server.events(event)[-1]


KEY = "[[key]]\nname = 'shop'\nclaims = ['send']\nentity_path = 'orders'\n"


def test_a_hangup_applies_limits_entities_and_keys_of_the_file(server: Server) -> None:
    server.start(ORDERS, *JSON)
    server.send(b"x" * 2000)
    limits = "[limits]\nmax_message_bytes = 1000\nmax_connections = 7\n"
    secrets = f"primary = '{'first' * 8}'\nsecondary = '{'second' * 8}'\n"
    news = "[[queue]]\npath = 'news'\n"
    line = hang_up(server, "reloaded", limits + ORDERS + news + KEY + secrets)
    assert line["applied"] == [
        "limits.max_message_bytes 262144 -> 1000",
        "limits.max_connections 10000 -> 7",
        "queue 'news' created",
        "key 'shop' of 'orders' created",
    ]
    with pytest.raises(MessageSizeExceededError, match="the limit is 1000"):
        server.send(b"x" * 2000)
    with server.manager() as manager:
        assert manager.queue_exists("news")
        assert manager.get_key("shop", "orders").primary == "first" * 8
    assert len(server.take()) == 1
    assert "first" * 8 not in server.log


def test_a_hangup_rotates_a_key_of_the_file_and_refuses_the_old_secret(server: Server) -> None:
    server.start(ORDERS, *JSON)
    key = KEY.replace("'send'", "'send', 'listen'") + f"secondary = '{'other' * 8}'\n"
    hang_up(server, "reloaded", ORDERS + key + f"primary = '{'first' * 8}'\n")
    parsed = ConnectionString.parse(server.connection)
    root, server.connection = (
        server.connection,
        ConnectionString(
            place=parsed.place,
            host=parsed.host,
            port=parsed.port,
            name=parsed.name,
            key_name="shop",
            key="first" * 8,
            entity_path="orders",
        ).to_text(),
    )
    server.send(b"tea")
    line = hang_up(server, "reloaded", ORDERS + key + f"primary = '{'fresh' * 8}'\n")
    assert line["applied"] == ["key 'shop' of 'orders' changed"]
    with pytest.raises(UnauthorizedError):
        server.send(b"coffee")
    server.connection = root
    assert server.take() == [b"tea"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[limits]\nmax_connections = 0\n", "max_connections"),
        ("not toml", "is not a TOML file"),
        ("[[key]]\nname = 'shop'\nclaims = ['all']\n", "claims must be"),
        ("[[key]]\nname = 'shop'\nclaims = ['send']\nprimary = 'too short'\n", "a secret of key"),
    ],
)
def test_a_bad_file_keeps_the_old_settings_and_is_one_error_line(
    server: Server, text: str, named: str
) -> None:
    server.start("[limits]\nmax_message_bytes = 1000\n" + ORDERS, *JSON)
    line = hang_up(server, "reload_failed", text)
    assert line["level"] == "ERROR"
    assert named in str(line["reason"])
    assert "entities.toml" in str(line["reason"])
    assert "too short" not in server.log
    with pytest.raises(MessageSizeExceededError, match="the limit is 1000"):
        server.send(b"x" * 2000)
    hang_up(server, "reloaded", ORDERS)
    server.send(b"x" * 2000)
    assert server.stop() == 0


def test_a_reload_names_the_entities_that_it_cannot_change_and_applies_the_rest(
    server: Server,
) -> None:
    server.start(ORDERS, *JSON)
    wrong = "[[queue]]\npath = 'orders'\nrequires_session = true\n"
    line = hang_up(server, "reload_failed", "[limits]\nmax_connections = 9\n" + wrong)
    assert "queue 'orders'" in str(line["reason"])
    assert line["applied"] == ["limits.max_connections 10000 -> 9"]
    server.send(b"tea")


def test_settings_that_need_a_restart_are_named(server: Server) -> None:
    server.start(ORDERS, *JSON)
    line = hang_up(server, "reloaded", "[ledger]\nis_on = false\nretention = '7d'\n" + ORDERS)
    assert line["applied"] == ["ledger.retention 90 days, 0:00:00 -> 7 days, 0:00:00"]
    assert line["needs_restart"] == ["ledger.is_on True -> False"]


def test_without_a_file_a_hangup_changes_nothing_and_says_so(server: Server) -> None:
    server.start("", *JSON)
    assert "without --config" in str(hang_up(server, "reload_skipped")["message"])
    with server.manager() as manager:
        assert manager.list_queues() == []
    assert server.stop() == 0


def test_a_file_that_is_gone_is_one_error_line_and_the_server_goes_on(server: Server) -> None:
    server.start(ORDERS, *JSON)
    (server.folder / "entities.toml").unlink()
    assert "cannot be read" in str(hang_up(server, "reload_failed")["reason"])
    server.send(b"tea")
    assert server.take() == [b"tea"]


# Every turn fails from the moment when a file is there.
FAULTY = """
from pathlib import Path
from twinbus.broker.turn.namespace import BrokerNamespace
from twinbus.cli import main
reclaim = BrokerNamespace.reclaim
def fail(self):
    if Path({trigger!r}).exists():
        raise RuntimeError("a planted fault")
    reclaim(self)
BrokerNamespace.reclaim = fail
main()
"""


@pytest.mark.parametrize("state", ["restarting", "gave_up"])
def test_sigterm_stops_a_server_whose_broker_restarts_or_gave_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    trigger = server.folder / "trigger"
    program = [sys.executable, "-c", FAULTY.format(trigger=str(trigger)), "serve"]
    monkeypatch.setattr(server_process, "SERVE", program)
    server.start(ORDERS, *JSON)
    server.send(b"tea")
    trigger.touch()

    def poke() -> bool:
        with suppress(MessagingError):
            server.send(b"more")
        restarts = len(server.events("restarting"))
        return restarts >= 2 if state == "restarting" else restarts > MAX_HEALS

    until(poke)  # the broker pauses longer before each restart
    until(lambda: server.get("/health")[0] == 503)
    assert server.stop() == 0
    assert len(server.events("stopped")) == 1
    trigger.unlink()
    monkeypatch.undo()
    server.start(ORDERS, *JSON)
    assert b"tea" in server.take()
    server.stop()
