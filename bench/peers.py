"""Two peers, RabbitMQ and NATS JetStream, each with a server of its own while it is used.

    python bench/peers.py

A peer starts its server on free loopback ports in a temporary folder, and ends it by process id.
Every send returns when the server has acknowledged all messages. RabbitMQ confirms a persistent
message after it has synced it; NATS does so only from 2.10 on, where it can be told to, and its
name says when it does not. The clients are the usual Python ones, driven without a thread per
message: pika by callbacks, nats-py by counting acknowledgements on one inbox.
"""

import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from measure import timed

QUEUE = "orders"
NODE = "bench@localhost"  # each RabbitMQ has an epmd of its own, so the name may repeat
LOOPBACK = "127.0.0.1"
START_S = 60
STOP_S = 20
SEND_S = 300  # far beyond any send here: a lost acknowledgement is an error, not a wait for ever
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))


def optional(module: str) -> Any:
    """Return a module, or None: a peer's client need not be installed, nor be seen by mypy."""
    return import_module(module) if find_spec(module) else None


pika = optional("pika")
nats = optional("nats")


class Peer(Protocol):
    """A message broker to measure against."""

    name: str
    """What it is and, once started, which version; says so when an ack does not mean synced."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @classmethod
    def missing(cls) -> str | None:
        """Return how to install it, or None when everything is there."""
        ...

    def send_one_by_one(self, count: int, body: bytes) -> None:
        """Send messages, each after the acknowledgement of the one before."""
        ...

    def send_pipelined(self, count: int, body: bytes, window: int = 256) -> None:
        """Send messages with at most a window of them unacknowledged."""
        ...

    def send_batches(self, count: int, body: bytes, batch: int = 1000) -> None:
        """Send a batch, wait for all its acknowledgements, then send the next."""
        ...

    def purge(self) -> None:
        """Drop everything that was sent."""
        ...


def free_ports(count: int) -> list[int]:
    """Return loopback ports nobody listens on; all are held until all are known."""
    with ExitStack() as found:
        taken = [found.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in taken]


def start(
    stack: ExitStack, command: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server that the stack will end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us; we end the server
        )
    stack.callback(stop, process)
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server, by force when it does not end by itself."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when a port can be connected to; raise with the log when its server has ended."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection((LOOPBACK, port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text(errors='replace')}")


class RabbitMQ:
    """A durable classic queue, persistent messages, publisher confirms.

    The server runs as whoever runs this and reads nothing in /etc. Its epmd is started here, so
    that it can be ended here; otherwise Erlang leaves one behind.
    """

    SERVER: ClassVar = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

    def __init__(self, folder: Path | None = None, plugins: Sequence[str] = ()) -> None:
        self.name = "RabbitMQ"
        self.port = 0  # known once started
        self._parent = folder
        self._plugins = plugins
        self._environment: Mapping[str, str] = {}
        self._stack = ExitStack()
        self._failure: str | None = None
        self._published = 0
        self._unconfirmed: set[int] = set()
        self._lowest = 1  # every delivery tag below is confirmed
        self._on_confirm: Callable[[], None] = lambda: None
        self._loop: Any = None

    @classmethod
    def missing(cls) -> str | None:
        """Return how to install it, or None when everything is there."""
        if not cls.SERVER.exists() or not shutil.which("epmd", path=SYSTEM_PATH):
            return "apt-get install rabbitmq-server"
        return None if pika else "pip install pika"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="twinbus-bench-", dir=self._parent)
                )
            )
            self.port = self._start_server(stack, folder)
            self._connect(stack, self.port)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def send_one_by_one(self, count: int, body: bytes) -> None:
        """Send messages, each after the acknowledgement of the one before."""
        self._send(count, body, 1, 0)

    def send_pipelined(
        self, count: int, body: bytes, window: int = 256, queue: str = QUEUE
    ) -> None:
        """Send messages with at most a window of them unacknowledged."""
        self._send(count, body, window, window - 1, queue)

    def send_batches(self, count: int, body: bytes, batch: int = 1000) -> None:
        """Send a batch, wait for all its acknowledgements, then send the next."""
        self._send(count, body, batch, 0)

    def purge(self, queue: str = QUEUE) -> None:
        """Drop everything that was sent."""
        self._ask(lambda done: self._channel.queue_purge(queue, callback=done))

    def count(self, queue: str) -> int:
        """Return how many messages wait in a queue of any type."""
        found = self._ask(
            lambda done: self._channel.queue_declare(queue, passive=True, callback=done)
        )
        return int(found.method.message_count)

    def declare(self, queue: str) -> int:
        """Make a durable queue if it is not there; return how many messages wait in it."""
        declared = self._ask(
            lambda done: self._channel.queue_declare(queue, durable=True, callback=done)
        )
        return int(declared.method.message_count)

    def evaluate(self, expression: str) -> None:
        """Have the server evaluate Erlang: one call, where `rabbitmqctl` would take ten."""
        control = str(self.SERVER.with_name("rabbitmqctl"))
        command = [control, "--node", NODE, "eval", expression]
        subprocess.run(command, env=self._environment, check=True, capture_output=True)

    def _start_server(self, stack: ExitStack, folder: Path) -> int:
        port, between_nodes, epmd_port = free_ports(3)
        (folder / "rabbitmq.conf").write_text(f"listeners.tcp.1 = {LOOPBACK}:{port}\n")
        (folder / "plugins").write_text(f"[{','.join(self._plugins)}].\n")
        epmd = shutil.which("epmd", path=SYSTEM_PATH)
        assert epmd
        start(stack, [epmd, "-address", LOOPBACK, "-port", str(epmd_port)], folder / "epmd.log")
        only_loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
        self._environment = {
            "PATH": SYSTEM_PATH,
            "HOME": str(folder),  # the Erlang cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "ERL_EPMD_PORT": str(epmd_port),
            "RABBITMQ_NODENAME": NODE,
            "RABBITMQ_DIST_PORT": str(between_nodes),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"-start_epmd false {only_loopback}",
            "RABBITMQ_CTL_ERL_ARGS": f"-start_epmd false {only_loopback}",
            # The script then becomes the server, so that our child is the one to end.
            "RUNNING_UNDER_SYSTEMD": "true",
        }
        log = folder / "server.log"
        process = start(stack, [str(self.SERVER)], log, self._environment)
        wait_until_listening(process, port, log)
        return port

    def _connect(self, stack: ExitStack, port: int) -> None:
        # No heartbeats: between two sends nobody turns the loop.
        where = pika.ConnectionParameters(LOOPBACK, port, heartbeat=0)
        self._connection = pika.SelectConnection(
            where,
            on_open_callback=lambda _: self._loop.stop(),
            on_open_error_callback=lambda _, error: self._fail(f"no connection: {error!r}"),
            on_close_callback=lambda _, error: self._fail(f"connection lost: {error!r}"),
        )
        self._loop = self._connection.ioloop
        stack.callback(self._disconnect)
        self._turn_loop()
        self.name = f"RabbitMQ {self._connection.server_properties['version']}"
        self._channel = self._ask(lambda done: self._connection.channel(on_open_callback=done))
        self._channel.add_on_close_callback(lambda _, error: self._fail(f"closed: {error!r}"))
        self._ask(lambda done: self._channel.confirm_delivery(self._confirmed, callback=done))
        self.declare(QUEUE)

    def _disconnect(self) -> None:
        if self._connection.is_open:
            self._connection.close()
            self._loop.call_later(STOP_S, self._loop.stop)
            self._loop.start()  # until the callback for a closed connection stops it
        self._loop.close()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._loop.stop()

    def _turn_loop(self) -> None:
        late = self._loop.call_later(SEND_S, lambda: self._fail("no answer"))
        self._loop.start()
        self._loop.remove_timeout(late)
        if self._failure:
            raise RuntimeError(f"RabbitMQ: {self._failure}")

    def _ask(self, begin: Callable[[Callable[[object], None]], object]) -> Any:
        answers: list[object] = []

        def done(answer: object) -> None:
            answers.append(answer)
            self._loop.stop()

        begin(done)
        self._turn_loop()
        return answers[0]

    def _send(
        self, count: int, body: bytes, window: int, refill_at: int, queue: str = QUEUE
    ) -> None:
        """Fill the window each time no more than refill_at messages in it are unconfirmed."""
        last = self._published + count
        persistent = pika.BasicProperties(delivery_mode=2)
        publish, unconfirmed = self._channel.basic_publish, self._unconfirmed

        def fill() -> None:
            if len(unconfirmed) > refill_at:
                return
            while self._published < last and len(unconfirmed) < window:
                publish("", queue, body, persistent)
                self._published += 1
                unconfirmed.add(self._published)
            if not unconfirmed:
                self._loop.stop()

        self._on_confirm = fill
        if count:
            fill()
            self._turn_loop()

    def _confirmed(self, frame: Any) -> None:
        if not isinstance(frame.method, pika.spec.Basic.Ack):
            self._fail(f"refused: {frame.method!r}")
            return
        tag = frame.method.delivery_tag
        if frame.method.multiple:
            self._unconfirmed.difference_update(range(self._lowest, tag + 1))
            self._lowest = tag + 1
        else:
            self._unconfirmed.discard(tag)
        self._on_confirm()


class Nats:
    """A JetStream stream in files, told to sync every write where the server can (2.10 on).

    An older server, such as 2.9 in Debian 12, acknowledges what it has written but not synced and
    syncs every two minutes; its name then says so, and its figures are not those of a durable ack.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.name = "NATS JetStream"
        self.syncs = False  # whether an acknowledged message is synced; known once started
        self._parent = folder
        self._stack = ExitStack()
        self._unacknowledged = 0
        self._refill_at = 0
        self._failure: str | None = None

    @classmethod
    def missing(cls) -> str | None:
        """Return how to install it, or None when everything is there."""
        if not shutil.which("nats-server", path=SYSTEM_PATH):
            return "apt-get install nats-server"
        return None if nats else "pip install nats-py"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="twinbus-bench-", dir=self._parent)
                )
            )
            port = self._start_server(stack, folder)
            self._runner = stack.enter_context(asyncio.Runner())
            self._runner.run(self._connect(port))
            stack.callback(lambda: self._runner.run(self._client.close()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def send_one_by_one(self, count: int, body: bytes) -> None:
        """Send messages, each after the acknowledgement of the one before."""
        self._run(count, body, 1, 0)

    def send_pipelined(
        self, count: int, body: bytes, window: int = 256, queue: str = QUEUE
    ) -> None:
        """Send messages with at most a window of them unacknowledged."""
        self._run(count, body, window, window - 1, queue)

    def send_batches(self, count: int, body: bytes, batch: int = 1000) -> None:
        """Send a batch, wait for all its acknowledgements, then send the next."""
        self._run(count, body, batch, 0)

    def purge(self) -> None:
        """Drop everything that was sent."""
        self._runner.run(self._stream.purge_stream(QUEUE))

    def _start_server(self, stack: ExitStack, folder: Path) -> int:
        (port,) = free_ports(1)
        server = shutil.which("nats-server", path=SYSTEM_PATH)
        assert server
        command = [server, "-c", str(folder / "nats.conf")]
        for sync in ("sync_interval: always", ""):
            # No pings: between two sends nobody turns the loop.
            (folder / "nats.conf").write_text(
                f"listen: {LOOPBACK}:{port}\n"
                'ping_interval: "24h"\n'
                f'jetstream {{\n  store_dir: "{folder}"\n  {sync}\n}}\n'
            )
            checked = subprocess.run([*command, "-t"], check=False, capture_output=True, text=True)
            if checked.returncode == 0:
                self.syncs = bool(sync)
                break
        else:
            raise RuntimeError(f"nats-server refuses its settings: {checked.stderr}")
        log = folder / "server.log"
        process = start(stack, command, log)
        wait_until_listening(process, port, log)
        return port

    async def _connect(self, port: int) -> None:
        self._room = asyncio.Event()
        self._client = await nats.connect(
            f"nats://{LOOPBACK}:{port}",
            allow_reconnect=False,
            ping_interval=86_400,
            closed_cb=self._closed,
        )
        version = self._client.connected_server_version
        self.name = f"NATS JetStream {version.major}.{version.minor}.{version.patch}"
        self.name += "" if self.syncs else ", ack without fsync"
        self._stream = self._client.jetstream()
        await self._stream.add_stream(name=QUEUE, subjects=[QUEUE], storage="file")
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(self._inbox, cb=self._acknowledged)

    async def _closed(self) -> None:
        self._failure = "connection lost"
        self._room.set()

    async def _acknowledged(self, message: Any) -> None:
        if b'"error"' in message.data or b'"seq"' not in message.data:
            self._failure = f"refused: {message.data!r}"
        self._unacknowledged -= 1
        if self._unacknowledged <= self._refill_at or self._failure:
            self._room.set()

    def add_stream(self, name: str, sources: Sequence[str] = ()) -> None:
        """Make a stream in files, with a subject of its name; or one that copies others."""
        origins = [nats.js.api.StreamSource(name=source) for source in sources]
        where = {"sources": origins} if origins else {"subjects": [name]}
        self._runner.run(self._stream.add_stream(name=name, storage="file", **where))

    def count(self, stream: str) -> int:
        """Return how many messages a stream holds."""
        return int(self._runner.run(self._stream.stream_info(stream)).state.messages)

    def _run(
        self, count: int, body: bytes, window: int, refill_at: int, queue: str = QUEUE
    ) -> None:
        sending = self._send(count, body, window, refill_at, queue)
        self._runner.run(asyncio.wait_for(sending, SEND_S))

    async def _send(self, count: int, body: bytes, window: int, refill_at: int, queue: str) -> None:
        """Fill the window each time no more than refill_at messages in it are unacknowledged."""
        self._refill_at = refill_at
        while count or self._unacknowledged:
            while count and self._unacknowledged < window:
                count -= 1
                self._unacknowledged += 1
                await self._client.publish(queue, body, self._inbox)
            if not count:
                self._refill_at = 0
            self._room.clear()
            if self._unacknowledged > self._refill_at and not self._failure:
                await self._room.wait()
            if self._failure:
                raise RuntimeError(f"NATS: {self._failure}")


PEERS: tuple[type[RabbitMQ | Nats], ...] = (RabbitMQ, Nats)


def measure(peer: Peer, rounds: int) -> None:
    """Print the messages per second of each way to send, the median over rounds."""
    body = os.urandom(1024)
    ways: tuple[tuple[str, Callable[[int, bytes], None], int], ...] = (
        ("one by one", peer.send_one_by_one, 200),
        ("256 in flight", peer.send_pipelined, 5_000),
        ("batches of 1000", peer.send_batches, 5_000),
    )
    for way, send, count in ways:
        seconds = []
        for _ in range(rounds + 1):
            seconds.append(timed(partial(send, count, body)))
            peer.purge()
        rate = count / statistics.median(seconds[1:])  # the first one warms up
        print(f"{peer.name + ', ' + way:<58} {rate:>12,.0f} messages/s", flush=True)


def main() -> None:
    """Measure every peer that is installed; fail when one is not."""
    advice = {kind.__name__: kind.missing() for kind in PEERS}
    for kind in PEERS:
        if not advice[kind.__name__]:
            with kind() as peer:
                measure(peer, rounds=5)
    absent = [f"{name} is not here: {how}" for name, how in advice.items() if how]
    sys.exit("\n".join(absent) or 0)


if __name__ == "__main__":
    main()
