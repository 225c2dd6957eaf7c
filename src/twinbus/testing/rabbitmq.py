"""Real RabbitMQ nodes as plain processes on loopback: one broker, or a cluster.

For tests and demos that kill or pause nodes. It needs the package rabbitmq-server. A broker has its
own epmd, cookie, ports and folders, so that it neither finds nor disturbs another one on the
machine. It ends every process that it started, by process id.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from twinbus.testing.pausing import pause_process, resume_process

LOOPBACK = "127.0.0.1"
START_S = 90
TICK_S = 8  # after which nodes give up a node that hangs; RabbitMQ's default is 60
STOP_S = 20
SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
GUEST = "guest"  # user and password of every new broker
# RabbitMQ 3.10 never restarts the supervisor of its dead-letter workers. The supervisor gives up
# when a worker starts after its queue was deleted, which can happen on a busy machine. From then on
# the node closes the connection (541, without a text) of everyone who declares a queue with
# at-least-once dead-lettering. So every node here restarts it.
GUARD = """
spawn(fun Guard() ->
    timer:sleep(200),
    case is_pid(whereis(rabbit_sup)) andalso whereis(rabbit_fifo_dlx_sup) of
        undefined -> catch supervisor:restart_child(rabbit_sup, rabbit_fifo_dlx_sup);
        _ -> ok
    end,
    Guard()
end).
"""


def missing() -> str | None:
    """Return why no broker can be started here; None: one can."""
    if not SERVER.exists() or not shutil.which("epmd", path=SYSTEM_PATH):
        return "there is no RabbitMQ here: apt-get install rabbitmq-server"
    return None


def free_ports(count: int) -> list[int]:
    """Return free loopback ports. All are bound until the last is found, so that they differ."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for reserved in taken:
            reserved.bind((LOOPBACK, 0))
        return [reserved.getsockname()[1] for reserved in taken]


def _start_epmd(stack: ExitStack, port: int) -> None:
    epmd = shutil.which("epmd", path=SYSTEM_PATH)
    assert epmd
    process = subprocess.Popen(  # noqa: S603 - a program of the package
        [epmd, "-address", LOOPBACK, "-port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        process.kill()  # SIGTERM may be ignored, as the parent set it; no data is kept
        process.wait()

    stack.callback(end)


def _is_about_a_crash(line: str) -> bool:
    """Whether lines are about a crash; refused operations, which tests cause often, are not."""
    return "[error]" in line and "Channel error on" not in line and "channel exception" not in line


class Node:
    """One RabbitMQ node."""

    def __init__(self, name: str, folder: Path, epmd_port: int, settings: Sequence[str]) -> None:
        self.name = f"{name}@localhost"
        self.port, dist_port = free_ports(2)
        self._log = folder / f"{name}.log"
        self._reports = folder / "log" / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        config = folder / f"{name}.conf"
        lines = (f"listeners.tcp.1 = {LOOPBACK}:{self.port}", "log.console = false", *settings)
        config.write_text("\n".join(lines) + "\n")
        plugins = folder / "plugins"
        plugins.write_text("[].\n")
        guard = folder / "guard"
        guard.write_text(GUARD)
        # Other nodes detect a hanging node within 30 s; with RabbitMQ's default, within 75 s.
        loopback = "-kernel inet_dist_use_interface {127,0,0,1} -kernel net_ticktime 20"
        self._environment: Mapping[str, str] = {
            "PATH": SYSTEM_PATH,
            "HOME": str(folder),  # the Erlang cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "ERL_EPMD_PORT": str(epmd_port),
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_DIST_PORT": str(dist_port),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            # Few schedulers, and none that spins: several nodes share few cores here.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                f"-start_epmd false {loopback} -kernel net_ticktime {TICK_S} "
                f"+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none -run file eval {guard}"
            ),
            "RABBITMQ_CTL_ERL_ARGS": f"-start_epmd false {loopback}",
            # `exec` replaces the script by the server: killing the child kills the server.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def launch(self) -> None:
        """Start the process."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - as above
                [str(SERVER)],
                env=self._environment,
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when the node accepts connections."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            with suppress(OSError), socket.create_connection((LOOPBACK, self.port), 1) as probe:
                probe.settimeout(1)
                probe.sendall(b"AMQP\x00\x00\x09\x01")
                if probe.recv(1):
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text(errors='replace')}")

    def start(self) -> None:
        """Start the process, and return when the node accepts connections."""
        self.launch()
        self.wait()

    def kill(self) -> None:
        """End the process at once, as a power cut does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process without ending it: peers and clients get no answer, and no error."""
        assert self._process is not None
        pause_process(self._process.pid)

    def resume(self) -> None:
        """Let the process continue."""
        if self._process is not None:
            resume_process(self._process.pid)

    def evaluate(self, expression: str) -> str:
        """Have the node evaluate Erlang: one call, and nothing that needs the management plugin."""
        return self.control("eval", expression)

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` against the node."""
        command = [str(SERVER.with_name("rabbitmqctl")), "--node", self.name, *arguments]
        done = subprocess.run(  # noqa: S603 - as above
            command, env=self._environment, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {arguments[0]}: {done.stdout}{done.stderr}")
        return done.stdout

    def crash_reports(self) -> str:
        """Return the crash reports in the node's log, the newest last."""
        if not self._reports.exists():
            return ""
        lines = self._reports.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if _is_about_a_crash(line))

    def stop(self) -> None:
        """Stop the node; kill its process if it does not end."""
        if self._process is None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


class RabbitBroker:
    """A broker of one node, or a cluster of several."""

    def __init__(self, nodes: int = 1, settings: Sequence[str] = ()) -> None:
        self._count = nodes
        self._settings = settings
        self._stack = ExitStack()
        self.nodes: list[Node] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinbus-mq-")))
            (epmd_port,) = free_ports(1)
            _start_epmd(stack, epmd_port)
            names = [f"rabbit{at}" for at in range(self._count)]
            settings = [
                "cluster_keepalive_interval = 1000",
                "vm_memory_high_watermark.relative = 0.8",
                "disk_free_limit.absolute = 1MB",
                *self._settings,
            ]
            if self._count > 1:
                settings += [
                    f"cluster_formation.classic_config.nodes.{at} = {name}@localhost"
                    for at, name in enumerate(names, 1)
                ]
                settings.append("cluster_formation.peer_discovery_backend = classic_config")
                settings.append("cluster_formation.randomized_startup_delay_range.min = 0")
                settings.append("cluster_formation.randomized_startup_delay_range.max = 1")
            self.nodes = [Node(name, folder, epmd_port, settings) for name in names]
            for node in self.nodes:
                stack.callback(node.stop)
            self.nodes[0].start()
            for node in self.nodes[1:]:
                node.launch()
            for node in self.nodes[1:]:
                node.wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def node(self) -> Node:
        """The first node."""
        return self.nodes[0]

    def connection_string(
        self, *, name: str = "rabbit", vhost: str = "", user: str = "guest", password: str = GUEST
    ) -> str:
        """Return the connection string of the broker, with all its nodes."""
        hosts = ",".join(f"{LOOPBACK}:{node.port}" for node in self.nodes)
        return f"Endpoint=amqp://{hosts}/{vhost};Name={name};UserName={user};Password={password}"
