"""Opens sockets to a Twinbus server: TCP, with TLS if the connection string asks for it, or Unix.

Only the thread that leads a link (server_link.py) calls this, and it may block until the deadline.
All addresses of a host share that time, because each of them may be silent. The resolver of the
system has timeouts of its own, which may be longer, so a name is looked up in another thread. The
socket that is returned does not block.
"""

import socket
import ssl
import threading
import time
from concurrent.futures import Future
from typing import Any

from twinbus.connection import ConnectionString
from twinbus.errors import CommunicationError, InvalidArgumentError
from twinbus.limits import CONNECT_TIMEOUT_S, SECOND_US
from twinbus.protocol.requests import unanswered


def now_us() -> int:
    """Return a time of the monotonic clock, in microseconds."""
    return time.monotonic_ns() // 1000


def opened_socket(connection: ConnectionString, deadline: int) -> socket.socket:
    """Return a connected socket; raise if the deadline passes before it is connected."""
    now = now_us()
    peer = f"the server at {connection.address}"
    if deadline <= now:
        raise unanswered(0, peer=peer)
    try:
        connected = _reach(connection, min(deadline, now + int(CONNECT_TIMEOUT_S * SECOND_US)))
    except TimeoutError:
        raise unanswered((now_us() - now) / SECOND_US, peer=peer) from None
    try:
        if connection.socket is None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.tls:
            left_s = min((deadline - now_us()) / SECOND_US, CONNECT_TIMEOUT_S)
            connected.settimeout(max(left_s, 0.001))
            connected = _encrypted(connected, connection)
        connected.setblocking(False)
    except BaseException:
        connected.close()
        raise
    return connected


def _reach(connection: ConnectionString, deadline: int) -> socket.socket:
    """Return a socket connected to the first address of the server that answers."""
    if connection.socket is not None:
        return _connected(socket.AF_UNIX, str(connection.socket), _left_s(deadline))
    addresses = _addresses(connection.host, connection.port, deadline)
    last: OSError | None = None
    for tried, (family, where) in enumerate(addresses):
        try:
            return _connected(family, where, _left_s(deadline) / (len(addresses) - tried))
        except OSError as error:
            last = error
    raise last or OSError(f"the host name {connection.host} has no address")


def _connected(family: int, where: Any, timeout_s: float) -> socket.socket:
    """Return a socket connected to one address."""
    connected = socket.socket(family, socket.SOCK_STREAM)
    try:
        connected.settimeout(timeout_s)
        connected.connect(where)
    except BaseException:
        connected.close()
        raise
    return connected


def _addresses(host: str, port: int, deadline: int) -> list[tuple[int, Any]]:
    """Return all addresses of a host, each with its family; raise at the deadline."""
    try:
        return _resolved(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name: only the resolver knows its addresses
    except UnicodeError as error:
        raise InvalidArgumentError(
            f"The host name {host:.80} is not valid: {error}. Correct the Endpoint."
        ) from error
    found: Future[list[tuple[int, Any]]] = Future()

    def resolve() -> None:
        try:
            found.set_result(_resolved(host, port))
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            found.set_exception(error)

    try:
        threading.Thread(target=resolve, name=f"twinbus-resolve-{host}", daemon=True).start()
    except RuntimeError:  # the interpreter ends, or the process has too many threads
        resolve()
    return found.result(_left_s(deadline))


def _resolved(host: str, port: int, flags: int = 0) -> list[tuple[int, Any]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, where) for family, _, _, _, where in found]


def _left_s(deadline: int) -> float:
    return max(deadline - now_us(), 1000) / SECOND_US


def _encrypted(connected: socket.socket, connection: ConnectionString) -> ssl.SSLSocket:
    try:
        context = ssl.create_default_context(
            cafile=None if connection.ca_file is None else str(connection.ca_file)
        )
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgumentError(
            f"The CaFile {connection.ca_file} cannot be used: {error}. Use a file with "
            "certificates in PEM format."
        ) from error
    name = connection.tls_host_name or connection.host
    return context.wrap_socket(connected, server_hostname=name)


def unreachable(connection: ConnectionString, error: OSError) -> CommunicationError:
    """Return the error for a connection that could not be opened or has failed."""
    text = error.strerror or str(error) or type(error).__name__
    check = "Check that the server runs, and that the Endpoint is correct"
    if isinstance(error, ssl.SSLCertVerificationError):
        check = "Check the CaFile and the TlsHostName of the connection string"
    elif isinstance(error, ssl.SSLError):
        check = (
            "Check that the server uses TLS: the Endpoint of a server without TLS begins with "
            "twinbus://, and Tls is not set"
        )
    return CommunicationError(
        f"the server at {connection.address} cannot be reached or closed the connection: {text}. "
        f"{check}"
    )
