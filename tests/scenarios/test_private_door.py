"""A private door: only this user, only with its key, only as long as the namespace is open."""

import logging
import os
import secrets
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.inside import door_of_socket
from tests.namespaces import ROOT, embedded
from tests.scenarios.test_fork import in_child
from tests.waiting import until
from twinbus import BrokeredMessage, Claim, MessagingFactory, QueueDescription, UnauthorizedError
from twinbus.clock import SystemClock
from twinbus.connection import ConnectionString, Place
from twinbus.entities import backlog_folder, backlog_queue_path
from twinbus.errors import CommunicationError, InvalidArgumentError, NamespaceClosedError
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.opening import find_embedded, open_namespace
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import (
    Command,
    CreateEntity,
    EntityKind,
    LeaseRange,
    ListEntities,
    Origin,
    Peek,
    PutKey,
    Receive,
    Send,
)
from twinbus.server.door import Door
from twinbus.server.private import Access, PrivateDoor
from twinbus.syphon.doors import WorkerDoors, check_master

pytestmark = pytest.mark.timeout(60)
QUEUE = "orders"
BACKLOG = backlog_queue_path("contoso", 0)
ALL = Access((Claim.MANAGE,))
SENDING = Access((Claim.SEND, Claim.TRANSFER))
READING = Access((Claim.LISTEN,), backlog_folder("contoso"))
SECONDS = 10.0  # what has not happened by then never does


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(opened: ExitStack, tmp_path: Path) -> Callable[..., EmbeddedNamespace]:
    def make(name: str = "namespace") -> EmbeddedNamespace:
        namespace = opened.enter_context(embedded(tmp_path / name))
        for path in (QUEUE, BACKLOG):
            namespace.ask(CreateEntity(QueueDescription(path=path)))
        return namespace

    return make


@pytest.fixture
def namespace(make: Callable[..., EmbeddedNamespace]) -> EmbeddedNamespace:
    return make()


@pytest.fixture
def door(namespace: EmbeddedNamespace, opened: ExitStack) -> PrivateDoor:
    return opened.enter_context(PrivateDoor(namespace, ALL))


def ask(connection: ConnectionString, command: Command[object]) -> object:
    """Ask through a door, as another process would."""
    with ServerNamespace(connection) as client:
        return client.ask(command, SECONDS)


def assert_serves(door: PrivateDoor) -> None:
    assert ask(door.connection, Peek(QUEUE)) is not None


def assert_is_gone(door: PrivateDoor) -> None:
    with pytest.raises(CommunicationError):
        ask(door.connection, Peek(QUEUE))


def socket_of(door: PrivateDoor) -> Path:
    assert door.connection.socket is not None
    return door.connection.socket


# -- who gets in -----------------------------------------------------------------------------------


def test_clients_send_and_receive_through_it_like_through_a_server(door: PrivateDoor) -> None:
    with MessagingFactory.from_connection_string(door.connection.to_text()) as factory:
        orders = factory.create_queue_client(QUEUE)
        orders.send(BrokeredMessage(b"two coffees"))
        message = orders.receive(timedelta(seconds=SECONDS))
        assert message is not None
        assert message.body == b"two coffees"
        message.complete()


@pytest.mark.parametrize("key", [ROOT.primary, "x" * 44, secrets.token_urlsafe(32)])
def test_another_key_is_refused(door: PrivateDoor, key: str) -> None:
    with pytest.raises(UnauthorizedError, match="not signed with a key"):
        ask(replace(door.connection, key=key), Peek(QUEUE))


def test_no_key_at_all_is_refused(door: PrivateDoor) -> None:
    with pytest.raises(UnauthorizedError):
        ask(replace(door.connection, key="", key_name=""), Peek(QUEUE))


def test_the_keys_of_the_namespace_do_not_open_it_and_its_key_opens_no_other_door(
    namespace: EmbeddedNamespace, door: PrivateDoor
) -> None:
    namespace.ask(PutKey(ROOT))
    with pytest.raises(UnauthorizedError):
        ask(replace(door.connection, key_name=ROOT.name, key=ROOT.primary), Peek(QUEUE))
    with closing(Door(namespace, SystemClock())) as public:
        where = replace(door.connection, socket=None, host="127.0.0.1", port=public.port)
        with pytest.raises(UnauthorizedError):
            ask(where, Peek(QUEUE))
    assert [key.name for key in namespace.keys.all()] == [ROOT.name]


def test_only_this_user_gets_to_the_socket(door: PrivateDoor) -> None:
    found = socket_of(door).lstat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    folder = socket_of(door).parent.lstat()
    assert stat.S_IMODE(folder.st_mode) == 0o700
    assert found.st_uid == folder.st_uid == os.geteuid()


def test_the_modes_do_not_depend_on_the_umask(namespace: EmbeddedNamespace) -> None:
    before = os.umask(0)
    try:
        with PrivateDoor(namespace, ALL) as door:
            modes = [stat.S_IMODE(at.stat().st_mode) for at in (socket_of(door).parent,)]
            modes.append(stat.S_IMODE(socket_of(door).stat().st_mode))
    finally:
        os.umask(before)
    assert modes == [0o700, 0o600]


def test_two_namespaces_have_two_doors_and_the_key_of_one_does_not_open_the_other(
    make: Callable[..., EmbeddedNamespace],
) -> None:
    with PrivateDoor(make("one"), ALL) as first, PrivateDoor(make("other"), ALL) as second:
        assert socket_of(first) != socket_of(second)
        with pytest.raises(UnauthorizedError):
            ask(replace(second.connection, key=first.connection.key), Peek(QUEUE))
        ask(first.connection, Send(QUEUE, [BrokeredMessage(b"to one")]))
        assert_serves(second)
        first.close()
        assert_is_gone(first)
        assert_serves(second)


def test_a_worker_at_the_primary_may_bring_messages_home_and_nothing_else(
    namespace: EmbeddedNamespace,
) -> None:
    with PrivateDoor(namespace, SENDING) as door:
        origin = Origin(f"{BACKLOG}#1.birth", range(1))
        ask(door.connection, Send(QUEUE, [BrokeredMessage(b"x")], origin))
        for command in (Receive(QUEUE), Peek(QUEUE), ListEntities(EntityKind.QUEUE), PutKey(ROOT)):
            with pytest.raises(UnauthorizedError, match="lacks the claim"):
                ask(door.connection, command)


def test_a_worker_at_the_secondary_may_read_the_backlog_and_nothing_else(
    namespace: EmbeddedNamespace,
) -> None:
    namespace.ask(Send(BACKLOG, [BrokeredMessage(b"x")]))
    with PrivateDoor(namespace, READING) as door:
        assert ask(door.connection, LeaseRange(BACKLOG, "syphon", 10)) is not None
        for command in (
            Peek(QUEUE),
            Send(BACKLOG, [BrokeredMessage(b"x")]),
            ListEntities(EntityKind.QUEUE),
        ):
            with pytest.raises(UnauthorizedError):
                ask(door.connection, command)


def test_it_shows_no_pages(door: PrivateDoor) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as line:
        line.settimeout(SECONDS)
        line.connect(str(socket_of(door)))
        line.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            assert line.recv(100) == b""
        except ConnectionResetError:  # it hung up before it read everything
            return


# -- nobody sees the key ---------------------------------------------------------------------------


def test_the_key_is_in_no_file_no_log_and_nothing_that_other_processes_can_read(
    namespace: EmbeddedNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with PrivateDoor(namespace, ALL) as door:
        key = door.connection.key
        assert len(key) >= 40
        ask(door.connection, Send(QUEUE, [BrokeredMessage(b"x")]))
        with pytest.raises(UnauthorizedError):
            ask(replace(door.connection, key="x" * 44), Peek(QUEUE))
        command_lines = subprocess.run(
            ["ps", "-e", "-ww", "-o", "args"],  # noqa: S607 - wherever it is
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert sys.executable in command_lines or "python" in command_lines
        assert key not in command_lines
        assert key.encode() not in Path("/proc/self/environ").read_bytes()
        assert key not in str(dict(os.environ))
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert files
        assert not [file for file in files if key.encode() in file.read_bytes()]
        keys = door_of_socket(door).keys.all()
        seen = f"{door!r} {door.connection!r} {keys!r} {threading.enumerate()!r}"
        assert key not in seen
    assert "A request with key private-door was refused" in caplog.text
    assert key not in caplog.text


def test_each_door_has_a_key_of_its_own(namespace: EmbeddedNamespace) -> None:
    keys = set()
    for _ in range(3):
        with PrivateDoor(namespace, ALL) as door:
            keys.add(door.connection.key)
    assert len(keys) == 3


# -- its end ---------------------------------------------------------------------------------------


def test_it_closes_with_the_namespace_and_its_clients_get_an_error(
    namespace: EmbeddedNamespace, door: PrivateDoor
) -> None:
    with ServerNamespace(door.connection) as client:
        waiting = client.submit(Receive(QUEUE, wait=timedelta(hours=1)))
        client.ask(Peek(QUEUE), SECONDS)
        namespace.close()
        with pytest.raises(CommunicationError):
            waiting.result(SECONDS)
    assert not door.is_open
    assert not socket_of(door).parent.exists()
    assert_is_gone(door)
    assert "twinbus-door" not in [thread.name for thread in threading.enumerate()]


def test_a_door_that_was_closed_leaves_the_namespace_open(
    namespace: EmbeddedNamespace, door: PrivateDoor
) -> None:
    door.close()
    door.close()
    assert not socket_of(door).parent.exists()
    assert namespace.ask(Peek(QUEUE)).num_rows == 0
    with PrivateDoor(namespace, ALL) as another:
        assert_serves(another)


def test_a_closed_namespace_gets_no_door(
    namespace: EmbeddedNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(NamespaceClosedError):
        PrivateDoor(namespace, ALL)
    assert not list(tmp_path.glob("twinbus-door-*"))


def test_a_process_that_ends_without_closing_it_leaves_no_folder(tmp_path: Path) -> None:
    program = f"""
from twinbus import Claim
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.server.private import Access, PrivateDoor
door = PrivateDoor(EmbeddedNamespace({str(tmp_path / "namespace")!r}), Access((Claim.SEND,)))
print(door.connection.socket)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not Path(done.stdout.strip()).parent.exists()


# -- where it can be -------------------------------------------------------------------------------


def test_where_the_usual_folder_has_a_long_path_the_socket_is_elsewhere(
    namespace: EmbeddedNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with PrivateDoor(namespace, ALL) as door:
        assert not socket_of(door).is_relative_to(long)
        assert stat.S_IMODE(socket_of(door).parent.stat().st_mode) == 0o700
        assert_serves(door)


@pytest.mark.parametrize("descriptors", [200, 1024])
def test_it_needs_neither_the_web_nor_more_files_than_the_application_may_open(
    tmp_path: Path, descriptors: int
) -> None:
    program = f"""
import resource, sys
for name in ("starlette", "uvicorn", "h11", "anyio", "prometheus_client"):
    sys.modules[name] = None  # an import of it fails
before = {descriptors}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, before)
from twinbus import Claim, QueueDescription
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import CreateEntity, EntityKind, ListEntities
from twinbus.server.private import Access, PrivateDoor
with EmbeddedNamespace({str(tmp_path / "namespace")!r}) as namespace:
    namespace.ask(CreateEntity(QueueDescription(path="orders")))
    with PrivateDoor(namespace, Access((Claim.MANAGE,))) as door:
        with ServerNamespace(door.connection) as client:
            print(*(entity.path for entity in client.ask(ListEntities(EntityKind.QUEUE), 10)))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "orders\n"), done.stderr


# -- forks -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # this is what is tested
def test_a_forked_process_that_closes_everything_takes_nothing_from_the_parent(
    namespace: EmbeddedNamespace, door: PrivateDoor
) -> None:
    with ServerNamespace(door.connection) as client:
        client.ask(Peek(QUEUE), SECONDS)

        def close_in_child() -> None:
            assert not door.is_open
            door.close()
            namespace.close()

        assert in_child(close_in_child) == 0
        client.ask(Peek(QUEUE), SECONDS)
    assert socket_of(door).is_socket()
    assert_serves(door)


def test_a_forked_process_that_ends_in_good_order_leaves_the_socket(tmp_path: Path) -> None:
    program = f"""
import os, sys
from twinbus import Claim
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.server.private import Access, PrivateDoor
door = PrivateDoor(EmbeddedNamespace({str(tmp_path / "namespace")!r}), Access((Claim.SEND,)))
child = os.fork()
if not child:
    sys.exit(3)  # Python removes what is temporary
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
print(door.connection.socket.is_socket(), door.is_open)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True True\n"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_keeps_no_copy_of_the_sockets(
    namespace: EmbeddedNamespace, door: PrivateDoor
) -> None:
    """Else clients of a door that is closed would wait for the end of the child."""
    with closing(socket.socket(socket.AF_UNIX)) as line, ServerNamespace(door.connection) as client:
        client.ask(Peek(QUEUE), SECONDS)  # one that is let in
        line.connect(str(socket_of(door)))  # and a stranger
        until(lambda: door_of_socket(door).attendance.strangers)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(writing)
            select.select([reading], [], [], 2 * SECONDS)  # lives until the parent is done
            os._exit(0)
        try:
            namespace.close()
            line.settimeout(SECONDS)
            assert line.recv(1) == b""
            with pytest.raises(CommunicationError):
                client.ask(Peek(QUEUE), SECONDS)
            with closing(socket.socket(socket.AF_UNIX)) as late, pytest.raises(OSError, match="No"):
                late.connect(str(socket_of(door)))
        finally:
            os.close(writing)
            os.waitpid(child, 0)
            os.close(reading)


# -- for workers of Spark --------------------------------------------------------------------------


def connection_to(folder: Path) -> str:
    return f"Endpoint=embedded://{folder}"


def test_a_server_needs_no_door() -> None:
    with WorkerDoors() as doors:
        text = "Endpoint=twinbus://shop:4617"
        assert doors.connection_for(text, SENDING) == text


def test_a_namespace_that_the_application_has_open_stays_its_own(tmp_path: Path) -> None:
    text = connection_to(tmp_path / "namespace")
    share = open_namespace(ConnectionString.parse(text))
    share.ask(CreateEntity(QueueDescription(path=QUEUE)))
    with WorkerDoors() as doors:
        where = ConnectionString.parse(doors.connection_for(text, ALL))
        assert where.place is Place.SERVER
        assert where.namespace_id == share.id
        ask(where, Peek(QUEUE))
        share.close()
        assert find_embedded(tmp_path / "namespace") is None
        with pytest.raises(CommunicationError):
            ask(where, Peek(QUEUE))


def test_a_namespace_that_nobody_has_open_is_opened_and_closed_with_the_doors(
    tmp_path: Path,
) -> None:
    with WorkerDoors() as doors:
        where = doors.connection_for(connection_to(tmp_path / "namespace"), ALL)
        assert ask(ConnectionString.parse(where), ListEntities(EntityKind.QUEUE)) == []
        assert find_embedded(tmp_path / "namespace") is not None
    assert find_embedded(tmp_path / "namespace") is None


def test_a_worker_that_finds_the_door_of_another_namespace_gets_an_error(tmp_path: Path) -> None:
    with WorkerDoors() as doors:
        first, second = (
            ConnectionString.parse(doors.connection_for(connection_to(tmp_path / name), ALL))
            for name in ("one", "other")
        )
        with pytest.raises(UnauthorizedError, match="is for the namespace with the id"):
            ask(replace(second, namespace_id=first.namespace_id), ListEntities(EntityKind.QUEUE))


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://https://host"])
def test_workers_on_other_machines_are_refused_only_if_they_need_a_door(master: str) -> None:
    servers = "Endpoint=twinbus://shop:4617", "Endpoint=twinbus://backup:4617"
    check_master(master, *servers)
    check_master("local[2,4]", servers[0], connection_to(Path("/var/lib/outbox")))
    with pytest.raises(InvalidArgumentError, match="outbox is embedded"):
        check_master(master, servers[0], connection_to(Path("/var/lib/outbox")))
