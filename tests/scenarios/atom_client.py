"""An HTTP client of the administration API that sends any request, right or wrong."""

import http.client
import time
from dataclasses import dataclass

from tests.scenarios.server_process import Server
from twinbus.connection import ConnectionString, sign_token

ATOM = "http://www.w3.org/2005/Atom"
SERVICE_BUS = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
INSTANCE = "http://www.w3.org/2001/XMLSchema-instance"
VERSION = "?api-version=2021-05"


@dataclass(frozen=True)
class Reply:
    status: int
    text: str
    headers: dict[str, str]


class AtomClient:
    """Asks a server with the root key, or with tokens of other keys."""

    def __init__(self, server: Server) -> None:
        self._native = ConnectionString.parse(server.connection)
        self._port = server.port

    def token(
        self, path: str = "", name: str = "", key: str = "", seconds: float = 600, host: str = "x"
    ) -> str:
        native = self._native
        expires = int(time.time() + seconds)
        resource = f"http://{host}/{path}"
        return sign_token(resource, name or native.key_name, key or native.key, expires)

    def ask(
        self,
        verb: str,
        target: str,
        body: str | bytes | None = None,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """Send a request; `token` is the root key's unless given, and empty means none."""
        sent = {"Host": f"localhost:{self._port}", **(headers or {})}
        token = self.token() if token is None else token
        if token:
            sent["Authorization"] = token
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request(verb, target, body, sent)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, reply.read().decode(), found)
        finally:
            connection.close()

    def put(self, path: str, description: str, **options: dict[str, str] | str | None) -> Reply:
        """Create an entity, or update it where headers say so."""
        return self.ask("PUT", f"/{path}{VERSION}", entry(description), **options)  # type: ignore[arg-type]

    def get(self, path: str, token: str | None = None) -> Reply:
        return self.ask("GET", f"/{path}{VERSION}", token=token)


def entry(description: str, namespace: str = ATOM) -> str:
    return (
        f'<entry xmlns="{namespace}"><content type="application/xml">{description}</content>'
        "</entry>"
    )


def queue(
    content: str = "", *, name: str = "QueueDescription", namespace: str = SERVICE_BUS
) -> str:
    return f'<{name} xmlns="{namespace}" xmlns:i="{INSTANCE}">{content}</{name}>'
