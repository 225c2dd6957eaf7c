"""Programs written for the official emulator run against a server with its configuration file."""

import http.client
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.interop.bus import body, take, take_one
from tests.scenarios.emulator import CONNECTION, config, namespace
from tests.scenarios.server_process import SERVE, Server
from twinbus import NamespaceManager
from twinbus.limits import EMULATOR_PORTS

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.management import ServiceBusAdministrationClient

_READY = re.compile(r"(\S+) is ready at \S+:(\d+), .*:(\d+)")


class Emulator:
    """A server that stands in for the emulator: the ports of its namespaces, by name."""

    def __init__(
        self, folder: Path, text: str, ports: Sequence[str] = ("--port", "0", "--admin-port", "0")
    ) -> None:
        self.folder = folder
        file = folder / "Config.json"
        file.write_text(text)
        self.command = [
            *(*SERVE, str(folder / "bus"), "--emulator-config", str(file)),
            *(*ports, "--tls", str(folder / "certificate")),
        ]
        self.ports: dict[str, int] = {}
        self.http_ports: dict[str, int] = {}
        self.native: dict[str, str] = {}
        self.process: subprocess.Popen[str] | None = None

    def start(self, count: int) -> None:
        with (self.folder / "stderr.txt").open("w") as errors:
            self.process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        native = ""
        for line in self.process.stdout:
            native = line.strip() if line.startswith("Endpoint=twinbus") else native
            ready = _READY.match(line)
            if ready:
                self.ports[ready[1]], self.http_ports[ready[1]] = int(ready[2]), int(ready[3])
                self.native[ready[1]] = native
            if len(self.ports) == count:
                return
        raise AssertionError((self.folder / "stderr.txt").read_text())

    def stop(self) -> int:
        assert self.process is not None
        with self.process as process:
            process.terminate()
            return process.wait(30)

    def connection(self, name: str) -> str:
        return CONNECTION.format(port=self.ports[name])


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    made = Emulator(
        tmp_path_factory.mktemp("emulator"), config(namespace("sbemulatorns"), namespace("second"))
    )
    made.start(2)
    yield made
    assert made.stop() == 0


def test_a_program_for_the_emulator_runs_unchanged(emulator: Emulator) -> None:
    text = emulator.connection("sbemulatorns")
    with ServiceBusClient.from_connection_string(text) as client:
        with client.get_queue_sender("relay") as sender:
            sender.send_messages(ServiceBusMessage("an order"))
        with client.get_queue_receiver("orders") as receiver:
            message = take_one(receiver)
            assert body(message) == b"an order"
            receiver.complete_message(message)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server has it
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


def test_a_server_with_the_ports_of_the_emulator_needs_no_port_in_the_connection_string(
    tmp_path: Path,
) -> None:
    if not all(map(is_free, EMULATOR_PORTS.values())):
        pytest.skip(f"one of the ports {EMULATOR_PORTS} is in use on this machine")
    server = Emulator(tmp_path, config(namespace("sbemulatorns")), ("--emulator-ports",))
    server.start(1)
    try:
        assert server.ports["sbemulatorns"] == EMULATOR_PORTS["port"]
        assert server.http_ports["sbemulatorns"] == EMULATOR_PORTS["admin_port"]
        text = CONNECTION.replace(":{port}", "")
        with (
            ServiceBusClient.from_connection_string(text) as client,
            client.get_queue_sender("orders") as sender,
            client.get_queue_receiver("orders") as receiver,
        ):
            sender.send_messages(ServiceBusMessage("hello"))
            assert [str(message) for message in receiver.receive_messages(max_wait_time=10)] == [
                "hello"
            ]
    finally:
        assert server.stop() == 0


def test_rules_of_the_file_choose_messages(emulator: Emulator) -> None:
    text = emulator.connection("sbemulatorns")
    united: dict[str | bytes, Any] = {"club": "united", "rank": 1}
    with ServiceBusClient.from_connection_string(text) as client:
        with client.get_topic_sender("news") as sender:
            sender.send_messages(
                [
                    ServiceBusMessage("a", application_properties={"urgent": True}),
                    ServiceBusMessage(
                        "b",
                        subject="sport",
                        content_type="text/plain",
                        application_properties=united,
                    ),
                    ServiceBusMessage("c"),
                ]
            )
        with client.get_subscription_receiver("news", "sport") as receiver:
            assert sorted(body(item) for item in take(receiver, 2)) == [b"a", b"b"]
        with client.get_subscription_receiver("news", "all") as receiver:
            assert len(take(receiver, 3)) == 3


def test_the_administration_client_sees_the_entities_of_the_file(emulator: Emulator) -> None:
    text = emulator.connection("sbemulatorns")
    ca = str(emulator.folder / "certificate" / "ca.pem")
    with ServiceBusAdministrationClient.from_connection_string(
        text, connection_verify=ca
    ) as client:
        assert [queue.name for queue in client.list_queues()] == ["carts", "orders", "relay"]
        assert client.get_queue("orders").max_delivery_count == 3
        assert client.get_namespace_properties().name == "sbemulatorns"
    second = text.replace(
        str(emulator.ports["sbemulatorns"]), str(emulator.http_ports["sbemulatorns"])
    )
    with ServiceBusAdministrationClient.from_connection_string(
        second, connection_verify=ca
    ) as client:
        assert client.get_topic("news").name == "news"


def test_namespaces_of_one_file_are_apart(emulator: Emulator) -> None:
    text = emulator.connection("second")
    with (
        ServiceBusClient.from_connection_string(text) as client,
        client.get_queue_sender("orders") as sender,
    ):
        sender.send_messages(ServiceBusMessage("only here"))
    counts = []
    for name in ("sbemulatorns", "second"):
        with NamespaceManager.from_connection_string(emulator.native[name]) as manager:
            counts.append(manager.get_runtime_properties("orders").active_message_count)
    assert counts == [0, 1]


def test_a_server_with_the_public_key_stays_on_its_machine(tmp_path: Path) -> None:
    made = Emulator(tmp_path, config())
    made.start(1)
    assert made.stop() == 0
    emulated = ["--emulator-config", str(tmp_path / "Config.json")]
    for where, options in (("--host", []), ("--host", emulated), ("--admin-host", emulated)):
        folder = tmp_path / "bus" if options else tmp_path / "bus" / "sbemulatorns"
        everywhere = [where, "0.0.0.0"]  # noqa: S104 - it must be refused
        command = [*SERVE, str(folder), "--port", "0", "--admin-port", "0", *everywhere, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert "which is public" in done.stderr


def test_a_page_of_another_host_has_no_access_to_the_public_key(emulator: Emulator) -> None:
    """A browser on this machine can reach the server; the page it shows must not."""
    [port] = list(emulator.ports.values())[:1]
    page = {"Origin": "https://evil.example"}
    for verb, target, headers in (
        ("GET", "/$Resources/queues", {"Host": f"localhost:{port}", **page}),
        ("GET", "/$Resources/queues", {"Host": "evil.example"}),
        ("GET", "/$servicebus/websocket", {**_HANDSHAKE, "Host": f"localhost:{port}", **page}),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(verb, target, headers=headers)
        assert connection.getresponse().status in (401, 403)
        connection.close()


_HANDSHAKE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "AAECAwQFBgcICQoLDA0ODw==",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Protocol": "AMQPWSB10",
}


def test_a_mistake_in_the_file_is_one_line(tmp_path: Path) -> None:
    wrong = namespace()
    wrong["Queues"][0]["Properties"]["Colour"] = "red"
    file = tmp_path / "Config.json"
    file.write_text(config(wrong))
    server = Server(tmp_path)
    output = server.refused("--emulator-config", str(file))
    assert "queue 'orders'" in output
    assert "'Colour'" in output
    assert not (tmp_path / "shop").exists()
