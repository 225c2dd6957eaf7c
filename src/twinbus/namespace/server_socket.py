"""Opens sockets to a Twinbus server: TCP or a socket of the file system, with TLS if it is set.

Only the thread that leads a link (server_link.py) calls this, and it may block until the deadline.
The socket that it returns does not block.
"""

import socket
import ssl
import time

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
    left_s = min((deadline - now) / SECOND_US, CONNECT_TIMEOUT_S)
    if left_s <= 0:
        raise unanswered(0)
    try:
        connected = _reach(connection, left_s)
    except TimeoutError:
        raise unanswered((now_us() - now) / SECOND_US) from None
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


def _reach(connection: ConnectionString, timeout_s: float) -> socket.socket:
    """Return a socket connected to the server."""
    if connection.socket is None:
        where = (connection.host, connection.port)
        return socket.create_connection(where, timeout=timeout_s)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(timeout_s)
        connected.connect(str(connection.socket))
    except BaseException:
        connected.close()
        raise
    return connected


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
