"""The administration API of Service Bus: entities, rules and keys over HTTP.

    GET               /$namespaceinfo
    GET               /$Resources/queues, /$Resources/topics          $skip, $top
    PUT GET DELETE    /{queue or topic}
    GET               /{topic}/subscriptions                          $skip, $top
    PUT GET DELETE    /{topic}/subscriptions/{name}
    GET               /{topic}/subscriptions/{name}/rules             $skip, $top
    PUT GET DELETE    /{topic}/subscriptions/{name}/rules/{rule}

A PUT creates an entity; with the header If-Match it updates one. Each request carries a token of a
key with the claim manage. The server translates a request into commands for the broker, which
checks and executes them as for every other client. Everything runs in the event loop of the server
(door.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twinbus.client.manager import new_secret
from twinbus.entities import (
    EntityDescription,
    RuleDescription,
    RuntimeProperties,
    SubscriptionDescription,
    subscription_path,
)
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    UnauthorizedError,
)
from twinbus.limits import ADMINISTRATION_PAGE, MAX_ADMINISTRATION_BYTES
from twinbus.protocol import commands as c
from twinbus.protocol.access import Admission, Principal
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.requests import Request as BrokerRequest
from twinbus.server.addresses import is_local_origin, is_loopback
from twinbus.server.client_connection import now_us
from twinbus.servicebus.atom import (
    AtomEntry,
    entry_document,
    error_document,
    feed_document,
    moment,
    read_description,
)
from twinbus.servicebus.conditions import mapped
from twinbus.servicebus.entity_documents import (
    RequestedEntity,
    read_entity,
    write_entity,
    write_namespace,
)
from twinbus.servicebus.rule_documents import read_rule, write_rule
from twinbus.values import shown

if TYPE_CHECKING:
    from twinbus.server.door import Door

VERSIONS: Final = ("2017-04", "2021-05", "2024-05")
_TYPE: Final = "application/atom+xml;type=entry;charset=utf-8"
_FEED_TYPE: Final = "application/atom+xml;type=feed;charset=utf-8"
_ERROR_TYPE: Final = "application/xml;charset=utf-8"
_QUEUE_OR_TOPIC: Final = "QueueDescription or a TopicDescription"
_RESOURCES: Final = {"queues": c.EntityKind.QUEUE, "topics": c.EntityKind.TOPIC}
_SUPPLEMENTS: Final = {  # header with a second token: the setting that names its target entity
    "servicebussupplementaryauthorization": "forward_to",
    "servicebusdlqsupplementaryauthorization": "forward_dead_lettered_messages_to",
}


class _WrongVerbError(MessagingError):
    """The path of a request does not support its HTTP verb."""

    def __init__(self, path: str, verbs: Sequence[str]) -> None:
        super().__init__(f"/{shown(path)} does not support this verb; use {', '.join(verbs)}")
        self.verbs = verbs


class _AdministrationRequest(BrokerRequest):
    """A command whose reply completes a future of the event loop."""

    __slots__ = ("_door", "_read_at", "future")

    def __init__(self, door: "Door", command: c.Command[Any], principal: Principal) -> None:
        super().__init__(command, principal)
        self._door = door
        self._read_at = now_us()
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answer(self, value: Any) -> None:
        """Accept the reply; the thread that ran the turn calls this."""
        turns = self._door.turns
        if get_ident() == turns.thread:
            self._take(value)
        else:
            turns.call_in_loop(partial(self._take, value))

    def fail(self, error: MessagingError) -> None:
        """Accept the error as the reply."""
        self.answer(error)

    def _take(self, value: Any) -> None:
        self._door.latencies.observe(self.command, now_us() - self._read_at)
        if not self.future.done():
            self.future.set_result(self._door.presentable(value))


@dataclass(frozen=True, slots=True)
class _ForwardingPrincipal:
    """The principal of a request that also carries tokens for the targets of forwarding."""

    admission: Admission
    senders: tuple[Admission, ...]  # of all tokens of the request, as they were signed

    @property
    def id(self) -> str:
        """The identity of the key that signed the main token."""
        return self.admission.id

    def may(self, claim: Claim, path: str | None) -> bool:
        """Return whether one of the tokens grants the claim on the path."""
        if claim is Claim.SEND:
            return any(sender.may(claim, path) for sender in self.senders)
        return self.admission.may(claim, path)


@dataclass(frozen=True, slots=True)
class _Call:
    """A request of a client, with its verified token."""

    request: Request
    path: str
    version: str
    admission: Admission  # for commands about the entity of the request; see `_about`
    signed: Admission  # as the token was signed
    base: str  # the address of the namespace

    @property
    def is_update(self) -> bool:
        """Whether the request updates an entity, which must then exist."""
        return "if-match" in self.request.headers

    def url(self, path: str, **query: object) -> str:
        """Return the URL of an entity or page; some SDKs read the entity's name from it."""
        name = quote(path, safe="/$")
        return f"{self.base}/{name}?{urlencode({**query, 'api-version': self.version})}"

    def number(self, name: str, default: int) -> int:
        """Return the number that the query string gives for a name."""
        text = self.request.query_params.get(name, str(default))
        if not text.isdecimal() or not text.isascii() or len(text) > 9:
            raise InvalidArgumentError(f"{name} is {shown(text)}; it must be a whole number")
        return int(text)


Answer = Callable[[_Call], Any]


class AdministrationApi:
    """Answers the requests of administration clients."""

    def __init__(self, door: "Door", name: str) -> None:
        self._door = door
        self._name = name
        self._started_at = datetime.now(UTC)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application."""
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except _WrongVerbError as error:
            response = _refusal(HTTPStatus.METHOD_NOT_ALLOWED, error.text)
            response.headers["Allow"] = ", ".join(error.verbs)
        except MessageSizeExceededError as error:
            response = _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error.text)
        except MessagingError as error:
            response = _refusal(mapped(error).status, error.text)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"].strip("/")
        self._check_origin(request)
        version = self._version(request)
        signed = self._admit(request.headers.get("authorization", ""))
        self._door.attendance.note_reader(request.state.connection, signed)
        base = f"{request.url.scheme}://{request.url.netloc}"
        call = _Call(request, path, version, _about(signed, path), signed, base)
        verbs = self._verbs(path)
        method = verbs.get(request.method)
        if method is None:
            raise _WrongVerbError(path, list(verbs))
        response: Response = await method(call)
        return response

    def _check_origin(self, request: Request) -> None:
        """Refuse web pages of other hosts while the server accepts a publicly known key."""
        if not self._door.has_public_key:
            return
        is_local = is_local_origin(request.headers.get("origin", ""))
        if not is_local or not is_loopback(request.url.hostname or ""):
            raise UnauthorizedError(
                "this server accepts the public key of the emulator, so it answers only requests "
                "for localhost and refuses web pages of other hosts"
            )

    def _version(self, request: Request) -> str:
        address = request.client.host if request.client is not None else ""
        if request.url.scheme != "https" and not self._door.may_be_plain(address):
            raise InvalidArgumentError("this server requires TLS; use https://")
        version = request.query_params.get("api-version", VERSIONS[-1])
        if version not in VERSIONS:
            raise InvalidArgumentError(
                f"api-version is {shown(version)}; it must be one of {', '.join(VERSIONS)}"
            )
        return version

    def _admit(self, token: str) -> Admission:
        """Check the token of a request."""
        if not token:
            raise UnauthorizedError(
                "the request has no token; send a SharedAccessSignature in the header Authorization"
            )
        return self._door.admit(token)

    def _verbs(self, path: str) -> dict[str, Answer]:
        """Return the functions that serve a path, by HTTP verb."""
        parts = path.split("/")
        names = [part.lower() for part in parts]
        if names == ["$namespaceinfo"]:
            return {"GET": self._get_namespace}
        if names[0] == "$resources" and len(names) == 2 and names[1] in _RESOURCES:
            return {"GET": partial(self._list, title=parts[1], kind=_RESOURCES[names[1]])}
        if "subscriptions" not in names[1:]:
            return {
                "GET": partial(self._get, path=path),
                "PUT": partial(self._put, path=path),
                "DELETE": partial(self._delete, path=path),
            }
        at = names.index("subscriptions", 1)
        return self._verbs_of_topic("/".join(parts[:at]), parts[at + 1 :])

    def _verbs_of_topic(self, topic: str, parts: list[str]) -> dict[str, Answer]:
        """Return the functions that serve subscriptions and rules of a topic, by HTTP verb."""
        if not parts:
            kind = c.EntityKind.SUBSCRIPTION
            return {"GET": partial(self._list, title="subscriptions", kind=kind, topic=topic)}
        path = subscription_path(topic, parts[0])
        if len(parts) == 1:
            return {
                "GET": partial(self._get, path=path),
                "PUT": partial(self._put, path=path, topic=topic, name=parts[0]),
                "DELETE": partial(self._delete, path=path),
            }
        if parts[1].lower() == "rules" and len(parts) == 2:
            return {"GET": partial(self._list_rules, path=path)}
        if parts[1].lower() == "rules" and len(parts) == 3:
            return {
                "GET": partial(self._get_rule, path=path, rule=parts[2]),
                "PUT": partial(self._put_rule, path=path, rule=parts[2]),
                "DELETE": partial(self._delete_rule, path=path, rule=parts[2]),
            }
        raise EntityNotFoundError(
            f"there is nothing at {shown(f'{path}/{parts[1]}')}. Below a subscription there are "
            "only /rules and /rules/{rule}"
        )

    # -- asking the broker ---------------------------------------------------------------------

    async def _ask(
        self, call: _Call, command: c.Command[Any], principal: Principal | None = None
    ) -> Any:
        [value] = await self._ask_all(call, [command], principal)
        if isinstance(value, MessagingError):
            raise value
        return value

    async def _ask_all(
        self, call: _Call, commands: Sequence[c.Command[Any]], principal: Principal | None = None
    ) -> list[Any]:
        """Have commands executed in one turn; return their replies, which may be errors."""
        try:
            for command in commands:
                call.admission.check(command)
        except MessagingError as error:
            self._door.note_refusal(call.admission, error)
            raise
        asked = principal or call.admission
        requests = [_AdministrationRequest(self._door, command, asked) for command in commands]
        self._door.turns.add(requests)
        return await asyncio.gather(*(request.future for request in requests))

    # -- entities ------------------------------------------------------------------------------

    async def _get_namespace(self, call: _Call) -> Response:
        if not call.admission.may(Claim.MANAGE, None):
            raise UnauthorizedError(
                f"key {call.admission.key.name} lacks the claim manage. Use a key that has it"
            )
        content = write_namespace(self._name, moment(self._started_at))
        times = {"published": self._started_at, "updated": self._started_at}
        url = call.url("$namespaceinfo")
        return self._entry_page(AtomEntry(title=self._name, url=url, content=content, **times))

    async def _get(self, call: _Call, path: str) -> Response:
        replies = await self._ask_all(call, [c.GetEntity(path), c.GetRuntimeProperties(path)])
        for reply in replies:
            if isinstance(reply, MessagingError):
                raise reply
        return self._entry_page(self._entry(call, *replies))

    async def _put(self, call: _Call, path: str, topic: str = "", name: str = "") -> Response:
        wanted = read_entity(
            read_description(await _body(call.request)),
            self._door.namespace.max_message_bytes,
            new_secret,
        )
        if (wanted.kind is SubscriptionDescription) != bool(topic):
            raise InvalidArgumentError(
                f"the document is a {wanted.kind.__name__}, but {path} is the path of another kind "
                f"of entity; send a {'SubscriptionDescription' if topic else _QUEUE_OR_TOPIC}"
            )
        principal = self._principal_of(call, wanted)
        if call.is_update:
            current = await self._ask(call, c.GetEntity(path))
            described = wanted.update(current)
            await self._ask(call, c.UpdateEntity(described), principal)
            await self._put_keys(call, current.path, wanted)
        else:
            names = {"topic_path": topic, "name": name} if topic else {"path": path}
            described = wanted.create(**names)
            await self._ask(call, c.CreateEntity(described, wanted.rule), principal)
            try:
                await self._put_keys(call, path, wanted)
            except MessagingError:
                await self._ask(call, c.DeleteEntity(path))
                raise
        response = await self._get(call, path)
        response.status_code = HTTPStatus.OK if call.is_update else HTTPStatus.CREATED
        return response

    async def _delete(self, call: _Call, path: str) -> Response:
        await self._ask(call, c.DeleteEntity(path))
        return Response()

    async def _list(
        self, call: _Call, title: str, kind: c.EntityKind, topic: str | None = None
    ) -> Response:
        found = await self._ask(call, c.ListEntities(kind, topic))
        page = self._page(call, found)
        commands = [c.GetRuntimeProperties(description.path) for description in page]
        runtimes = await self._ask_all(call, commands)
        entries = [
            self._entry(call, description, runtime)
            for description, runtime in zip(page, runtimes, strict=True)
            if not isinstance(runtime, MessagingError)  # an error: it was deleted after the listing
        ]
        return self._feed_page(call, title, entries, len(found))

    def _entry(
        self, call: _Call, description: EntityDescription, runtime: RuntimeProperties
    ) -> AtomEntry:
        keys = None
        if call.admission.may(Claim.MANAGE, None):
            keys = self._keys_of(description.path)
        limit = self._door.namespace.max_message_bytes if call.version > VERSIONS[0] else None
        return AtomEntry(
            title=getattr(description, "name", description.path),
            url=call.url(description.path),
            published=runtime.created_at_utc,
            updated=runtime.updated_at_utc,
            content=write_entity(description, runtime, keys, limit),
        )

    # -- keys ----------------------------------------------------------------------------------

    def _keys_of(self, path: str) -> list[SharedAccessKey]:
        wanted = path.lower()
        return [key for key in self._door.keys.all() if (key.entity_path or "").lower() == wanted]

    async def _put_keys(self, call: _Call, path: str, wanted: RequestedEntity) -> None:
        """Replace all keys of an entity by those of the request."""
        if wanted.keys is None:
            return
        existing = {key.name.lower(): key for key in self._keys_of(path)}
        for key in wanted.keys:
            current = existing.pop(key.name.lower(), None)
            claims = key.claims
            if current is not None and Claim.TRANSFER in current.claims:
                claims = (*claims, Claim.TRANSFER)  # the API has no name for this claim; keep it
            changed = replace(key, entity_path=path, claims=claims)
            if changed != current:
                await self._ask(call, c.PutKey(changed))
        for key in existing.values():
            await self._ask(call, c.DeleteKey(key.name, key.entity_path))

    def _principal_of(self, call: _Call, wanted: RequestedEntity) -> Principal:
        """Return the principal of a request, with its tokens for the targets of forwarding."""
        senders = [call.signed]
        for header, setting in _SUPPLEMENTS.items():
            token = call.request.headers.get(header)
            target = wanted.settings.get(setting)
            if token is None or target is None:
                continue
            admission = self._door.admit(token)
            if not admission.may(Claim.SEND, target):
                raise UnauthorizedError(
                    f"the token in the header {header} does not allow sending to {shown(target)}. "
                    "Sign one with a key that has the claim send there",
                    claim=Claim.SEND.value,
                    path=target,
                )
            senders.append(admission)
        return _ForwardingPrincipal(call.admission, tuple(senders))

    # -- rules ---------------------------------------------------------------------------------

    async def _rules(self, call: _Call, path: str) -> tuple[list[RuleDescription], datetime]:
        """Return the rules of a subscription, and the time of its creation."""
        replies = await self._ask_all(call, [c.ListRules(path), c.GetRuntimeProperties(path)])
        for reply in replies:
            if isinstance(reply, MessagingError):
                raise reply
        return replies[0], replies[1].created_at_utc

    async def _list_rules(self, call: _Call, path: str) -> Response:
        rules, created_at = await self._rules(call, path)
        page = self._page(call, rules)
        entries = [_rule_entry(call, path, rule, created_at) for rule in page]
        return self._feed_page(call, "rules", entries, len(rules))

    async def _get_rule(self, call: _Call, path: str, rule: str) -> Response:
        rules, created_at = await self._rules(call, path)
        for found in rules:
            if found.name.lower() == rule.lower():
                return self._entry_page(_rule_entry(call, path, found, created_at))
        raise EntityNotFoundError(
            f"{path} has no rule {shown(rule)}. List the rules of the subscription"
        )

    async def _put_rule(self, call: _Call, path: str, rule: str) -> Response:
        found = read_description(await _body(call.request))
        described = replace(read_rule(found, name=rule), name=rule)
        if call.is_update:
            await self._ask(call, c.UpdateRule(path, described))
        else:
            await self._ask(call, c.CreateRule(path, described))
        response = await self._get_rule(call, path, rule)
        response.status_code = HTTPStatus.OK if call.is_update else HTTPStatus.CREATED
        return response

    async def _delete_rule(self, call: _Call, path: str, rule: str) -> Response:
        await self._ask(call, c.DeleteRule(path, rule))
        return Response()

    # -- documents -----------------------------------------------------------------------------

    def _page(self, call: _Call, found: Sequence[Any]) -> Sequence[Any]:
        first = call.number("$skip", 0)
        return found[first : first + _page_size(call)]

    def _entry_page(self, entry: AtomEntry) -> Response:
        return Response(entry_document(entry, self._name), media_type=_TYPE)

    def _feed_page(
        self, call: _Call, title: str, entries: Sequence[AtomEntry], total: int
    ) -> Response:
        first, size = call.number("$skip", 0), _page_size(call)
        onward = None
        if first + size < total:
            onward = call.url(call.path, **{"$skip": first + size, "$top": size})
        document = feed_document(title, call.url(call.path), onward, entries, self._name)
        return Response(document, media_type=_FEED_TYPE)


def _about(signed: Admission, path: str) -> Admission:
    """Return the admission for the commands of a request about a path.

    If the token was signed for this path, or for its topic, the token does not limit the commands:
    to create an entity, a command needs an admission to the namespace. The key still limits them.
    """
    scope, wanted = signed.token.path.lower(), path.lower()
    if wanted == scope or f"{wanted}/".startswith(f"{scope}/subscriptions/"):
        return replace(signed, token=replace(signed.token, path=""))
    return signed


def _page_size(call: _Call) -> int:
    return min(max(call.number("$top", ADMINISTRATION_PAGE), 1), ADMINISTRATION_PAGE)


def _rule_entry(call: _Call, path: str, rule: RuleDescription, created_at: datetime) -> AtomEntry:
    return AtomEntry(
        title=rule.name,
        url=call.url(f"{path}/Rules/{rule.name}"),
        published=created_at,
        updated=created_at,
        content=write_rule(rule, created_at),
    )


def _refusal(status: int, detail: str) -> Response:
    return Response(error_document(status, detail), status, media_type=_ERROR_TYPE)


async def _body(request: Request) -> bytes:
    """Return the body of a request; refuse one that is too large before all of it is read."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_ADMINISTRATION_BYTES:
            raise MessageSizeExceededError(
                f"the body has more than {MAX_ADMINISTRATION_BYTES} bytes, the maximum for the "
                "description of an entity; shorten the description"
            )
        pieces.append(piece)
    return b"".join(pieces)
