"""A server as a process: how it starts, what it serves, what it refuses, how it stops."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from tests.scenarios.server_process import NOW, ORDERS, Server
from tests.waiting import until
from twinbus import BrokeredMessage, Claim, MessagingError, RetryPolicy, ServerBusyError
from twinbus.connection import ConnectionString
from twinbus.errors import CommunicationError, InvalidArgumentError, MessageSizeExceededError
from twinbus.protocol.keys import ROOT_KEY
from twinbus.server.certificates import make_certificate

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a queue that the tests that need nothing special share."""
    made = Server(tmp_path_factory.mktemp("running"))
    made.start(ORDERS)
    yield made
    made.stop()


# -- starting --------------------------------------------------------------------------------------


def test_the_first_start_prints_both_connection_strings_and_one_ready_line(server: Server) -> None:
    first, second, ready = server.start()
    parsed = ConnectionString.parse(first)
    assert (parsed.host, parsed.port, parsed.name) == ("127.0.0.1", server.port, "shop")
    assert parsed.key_name == ROOT_KEY
    assert second == (
        f"Endpoint=sb://127.0.0.1:{server.port};SharedAccessKeyName={ROOT_KEY};"
        f"SharedAccessKey={parsed.key};UseDevelopmentEmulator=true"
    )
    assert ready.startswith("shop is ready at twinbus://127.0.0.1:")
    with server.manager() as manager:
        assert manager.list_queues() == []


def test_later_starts_print_the_ready_line_only_and_keys_survive(server: Server) -> None:
    server.start(ORDERS)
    with server.manager() as manager:
        secret = manager.create_key("shop", [Claim.SEND], "orders").primary
    server.stop()
    (only,) = server.start()
    assert "ready" in only
    assert "SharedAccessKey" not in only
    with server.manager() as manager:
        assert manager.get_key("shop", "orders").primary == secret


def test_a_start_that_failed_does_not_swallow_the_root_key(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server.port = taken.getsockname()[1]
        server.refused()
    server.port = 0
    assert server.start()[0].startswith("Endpoint=")


def test_the_name_is_the_given_one_and_part_of_the_connection_string(server: Server) -> None:
    first, _, ready = server.start("", "--name", "contoso")
    assert ready.startswith("contoso is ready")
    assert ConnectionString.parse(first).name == "contoso"
    assert json.loads(server.get("/health")[2])["name"] == "contoso"


def test_entities_of_the_file_are_there_at_the_start(server: Server) -> None:
    server.start(ORDERS + "[[topic]]\npath = 'news'\n")
    with server.manager() as manager:
        assert manager.queue_exists("orders")
        assert manager.topic_exists("news")


def test_a_mistake_in_the_file_stops_the_start_and_is_named(server: Server) -> None:
    path = server.folder / "bad.toml"
    path.write_text("[[queue]]\npath = 'orders'\nlok_duration = '30s'")
    output = server.refused("--config", str(path))
    assert "bad.toml" in output
    assert "lok_duration" in output


def test_only_loopback_is_listened_on(running: Server) -> None:
    assert running.process is not None
    sockets = {
        link.readlink().name
        for link in Path(f"/proc/{running.process.pid}/fd").iterdir()
        if link.is_symlink()
    }
    listening = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{running.process.pid}/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                listening.append(local)
    found = {(host[-8:], int(port, 16)) for host, port in (item.split(":") for item in listening)}
    assert found == {("0100007F", running.port), ("0100007F", running.admin_port)}


def test_files_of_the_directory_are_for_their_owner_only(running: Server) -> None:
    files = [path for path in (running.folder / "shop").rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if path.stat().st_mode & 0o077] == []


def test_an_address_of_the_next_generation_will_do(server: Server) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    server.start(ORDERS, "--host", "::1")
    server.send(b"tea")
    assert server.take() == [b"tea"]


# -- what is refused -------------------------------------------------------------------------------


def test_a_second_server_on_the_directory_is_refused(running: Server) -> None:
    output = Server(running.folder).refused()
    assert str(running.folder / "shop") in output
    assert "is in use by process" in output


@pytest.mark.parametrize("door", ["port", "admin_port"])
def test_a_second_server_on_a_port_is_refused(running: Server, server: Server, door: str) -> None:
    setattr(server, door, getattr(running, door))
    output = server.refused()
    assert str(getattr(running, door)) in output
    assert f"--{door.replace('_', '-')}" in output
    running.send(b"still there")
    assert b"still there" in running.take()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "nonsense.invalid"), "nonsense.invalid"),
        (("--tls-certificate", __file__), "Give both --tls-certificate and --tls-key"),
        (("--tls-certificate", __file__, "--tls-key", __file__), "certificate"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(
    server: Server, options: tuple[str, ...], named: str
) -> None:
    assert named in server.refused(*options)


# -- stopping --------------------------------------------------------------------------------------


MAIN_THREAD_BLOCKS_SIGNALS = """
import signal, threading
from twinbus.cli.serve import _Signals
signals = _Signals()
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM})
print("ready", flush=True)
signals.wait_for_stop([lambda: print("reloaded", flush=True)])
"""


def test_a_signal_that_the_system_hands_to_another_thread_is_heeded(tmp_path: Path) -> None:
    waits = [sys.executable, "-c", MAIN_THREAD_BLOCKS_SIGNALS]
    with subprocess.Popen(waits, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGHUP)
            assert process.stdout.readline() == "reloaded\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_while_clients_wait_and_nothing_acknowledged_is_lost(
    server: Server, number: signal.Signals
) -> None:
    server.start(ORDERS + "[[queue]]\npath = 'empty'\n")
    server.send(b"tea", b"coffee")
    with server.factory() as waiting, server.factory() as idle, ThreadPoolExecutor() as threads:
        idle.create_message_receiver("orders").peek()
        receiver = waiting.create_message_receiver("empty")
        received = threads.submit(receiver.receive, timedelta(minutes=5))
        until(lambda: server.open_receives == 1)
        assert server.stop(number) == 0
        with pytest.raises(CommunicationError):
            received.result(timeout=10)
    server.start(ORDERS)
    assert server.take() == [b"tea", b"coffee"]


def test_a_client_goes_on_when_the_server_is_back(server: Server) -> None:
    server.start(ORDERS)
    patient = RetryPolicy(operation_timeout=timedelta(seconds=30))
    with server.factory(patient) as factory:
        sender = factory.create_message_sender("orders")
        sender.send(BrokeredMessage(b"before"))
        server.stop()
        server.start()
        sender.send(BrokeredMessage(b"after"))
    assert server.take() == [b"before", b"after"]


def test_a_locked_message_is_delivered_after_a_restart(server: Server) -> None:
    server.start(ORDERS)
    server.send(b"tea")
    with server.factory() as factory:
        assert factory.create_message_receiver("orders").receive(NOW) is not None
        server.stop()
    server.start()
    assert server.take() == [b"tea"]


# -- TLS -------------------------------------------------------------------------------------------


def test_tls_from_end_to_end(server: Server) -> None:
    authority, second = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    paths = {name: server.folder / name for name in ("cert.pem", "key.pem", "ca.pem", "other.pem")}
    certificate.cert_chain_pems[0].write_to_path(paths["cert.pem"])
    certificate.private_key_pem.write_to_path(paths["key.pem"])
    authority.cert_pem.write_to_path(paths["ca.pem"])
    second.cert_pem.write_to_path(paths["other.pem"])
    options = ["--tls-certificate", str(paths["cert.pem"]), "--tls-key", str(paths["key.pem"])]
    first, ready = server.start(ORDERS, *options)
    assert first.startswith("Endpoint=twinbus+tls://127.0.0.1:")
    assert "ready at twinbus+tls://" in ready
    server.connection = f"{first};CaFile={paths['ca.pem']}"
    server.send(b"secret tea")
    assert server.take() == [b"secret tea"]
    for connection in (first, f"{first};CaFile={paths['other.pem']}"):
        server.connection = connection
        with pytest.raises(CommunicationError):
            server.take()
    server.connection = first.replace("twinbus+tls://", "twinbus://")
    with pytest.raises(InvalidArgumentError, match="TLS"):
        server.take()


@pytest.mark.parametrize("has_tls", [False, True])
def test_the_health_check_of_the_container_finds_a_server_with_or_without_tls(
    server: Server, has_tls: bool
) -> None:
    options = []
    if has_tls:
        made = make_certificate(server.folder / "made", ("localhost",), datetime.now(UTC))
        options = ["--tls-certificate", str(made.certificate), "--tls-key", str(made.key)]
    server.start(ORDERS, *options)
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", "")
    [words] = re.findall(r"^HEALTHCHECK .+ CMD (\[.+\])$", text, re.MULTILINE)
    program = json.loads(words)[2].replace("4617", str(server.port))
    check = [sys.executable, "-c", program]
    assert subprocess.run(check, timeout=60, check=False).returncode == 0
    server.stop()
    assert subprocess.run(check, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode != 0


# -- health and metrics ----------------------------------------------------------------------------


def test_health_is_reported(running: Server) -> None:
    status, kind, text = running.get("/health")
    assert (status, kind) == (200, "application/json")
    assert json.loads(text) == {"status": "ok", "name": "shop", "restarts": 0}
    assert running.get("/health", "HEAD") == (200, "application/json", "")


def test_readiness_is_reported(running: Server) -> None:
    status, _, text = running.get("/ready")
    assert (status, json.loads(text)) == (200, {"ready": True, "name": "shop"})
    assert running.get("/ready", "HEAD") == (200, "application/json", "")


def test_metrics_are_what_prometheus_reads(running: Server) -> None:
    running.send(b"tea")
    running.take()
    with running.manager() as manager:
        manager.list_queues()
        with pytest.raises(MessagingError):
            manager.get_queue('no "such" \\ queue')
    status, kind, _ = running.get("/metrics")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    found = running.metrics()
    sent = [
        sample.value
        for sample in found["twinbus_messages"].samples
        if sample.labels == {"path": "orders", "operation": "Send", "outcome": "ok"}
    ]
    assert sum(sent) >= 1
    assert {"twinbus_operations", "twinbus_bytes", "twinbus_waiting_messages"} <= set(found)
    assert {"twinbus_connections", "twinbus_spilling", "twinbus_restarts"} <= set(found)
    assert found["twinbus_up"].samples[0].value == 1
    answered = {
        sample.labels["operation"]: sample.value
        for sample in found["twinbus_request_seconds"].samples
        if sample.name == "twinbus_request_seconds_count"
    }
    assert answered["Send"] >= 1
    assert answered["Settle"] >= 1
    assert all(metric.documentation for metric in found.values())


def test_the_message_counts_of_an_entity_are_metrics(running: Server) -> None:
    running.take()
    running.send(b"tea", b"coffee")

    def active() -> float:
        [found] = [
            sample.value
            for sample in running.metrics()["twinbus_waiting_messages"].samples
            if (sample.labels["path"], sample.labels["state"]) == ("orders", "active")
        ]
        return float(found)

    until(lambda: active() == 2)  # a page of metrics may be a second old
    assert len(running.take()) == 2


def test_other_pages_and_methods_are_refused(running: Server) -> None:
    assert running.get("/")[0] == 404
    assert running.get("/keys")[0] == 404
    assert running.get("/health", "POST")[0] >= 400
    assert "Shared" not in running.get("/metrics")[2] + running.get("/")[2]


def test_nonsense_at_a_door_leaves_the_server_well(running: Server) -> None:
    for port in (running.port, running.admin_port):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
            raw.sendall(b"\x00\xff" * 1000 + b"\r\n\r\n")
    running.send(b"tea")
    assert running.take() == [b"tea"]
    assert running.get("/health")[0] == 200


# -- limits ----------------------------------------------------------------------------------------

LIMITS = """
[limits]
max_connections = 2
max_message_bytes = 1000
open_receives = 1
"""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("limited"))
    made.start(LIMITS + ORDERS)
    yield made
    made.stop()


def nobody_is_connected(server: Server) -> bool:
    return server.metrics()["twinbus_open_connections"].samples[0].value == 0


def test_no_more_connections_than_the_file_allows(limited: Server) -> None:
    until(lambda: nobody_is_connected(limited))
    with limited.factory() as first, limited.factory() as second:
        for factory in (first, second):
            factory.create_message_receiver("orders").peek()
        with pytest.raises(ServerBusyError, match="2 connections"):
            limited.take()
    until(lambda: nobody_is_connected(limited))
    assert limited.take() == []
    until(lambda: limited.metrics()["twinbus_refused"].samples[0].value == 1)


def test_no_larger_messages_than_the_file_allows(limited: Server) -> None:
    until(lambda: nobody_is_connected(limited))
    limited.send(b"x" * 900)
    with pytest.raises(MessageSizeExceededError):
        limited.send(b"x" * 1001)
    assert [len(body) for body in limited.take()] == [900]


def test_no_more_waiting_receives_than_the_file_allows(limited: Server) -> None:
    until(lambda: nobody_is_connected(limited))
    with limited.factory() as factory, ThreadPoolExecutor() as threads:
        receiver = factory.create_message_receiver("orders")
        waiting = threads.submit(receiver.receive, timedelta(minutes=5))
        until(lambda: limited.open_receives == 1)
        with pytest.raises(ServerBusyError, match="open_receives"):
            receiver.receive(timedelta(minutes=5))
        limited.send(b"tea")
        assert waiting.result(timeout=10) is not None


def test_no_more_operations_than_the_file_allows(server: Server) -> None:
    server.start("[limits]\noperations_per_second = 3\n" + ORDERS)

    def hurry() -> None:
        with server.factory() as factory:
            receiver = factory.create_message_receiver("orders")
            for _ in range(100):
                receiver.peek()

    with pytest.raises(ServerBusyError, match="operations_per_second") as busy:
        hurry()
    assert busy.value.retry_after_s == 10
