"""The administration API refuses what it should, whatever a client sends."""

import http.client
import socket
from collections.abc import Iterator
from itertools import count

import pytest

from tests.scenarios.atom_client import SERVICE_BUS, VERSION, AtomClient, entry, queue
from tests.scenarios.server_process import Server
from twinbus import Claim, NamespaceManager

_numbers = count(1)
UPDATE = {"If-Match": "*"}
BOMB = (
    '<?xml version="1.0"?><!DOCTYPE entry [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 10}">' for n in range(9))
    + "]>"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("administration"))
    made.start()
    yield made
    assert made.stop() == 0
    assert "Traceback" not in made.log


@pytest.fixture(scope="module")
def client(server: Server) -> AtomClient:
    return AtomClient(server)


@pytest.fixture(scope="module")
def manager(server: Server) -> Iterator[NamespaceManager]:
    with server.manager() as manager:
        yield manager


@pytest.fixture
def path() -> str:
    return f"queue-{next(_numbers)}"


# -- documents -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", "not an XML document"),
        ("{}", "not an XML document"),
        ("<entry", "not an XML document"),
        (b"\xff\xfe\x00", "not an XML document"),
        (BOMB + entry(queue("<UserMetadata>&j;</UserMetadata>")), "declares a type or entities"),
        (
            '<!DOCTYPE e [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
            + entry(queue("<UserMetadata>&x;</UserMetadata>")),
            "declares a type or entities",
        ),
        ('<!DOCTYPE e SYSTEM "http://127.0.0.1:1/x">' + entry(queue()), "declares a type"),
        (queue(), "must be an entry"),
        (entry(queue(), namespace="urn:other"), "must be an entry"),
        (entry(""), "one content element with one description"),
        (entry(queue() + queue()), "one content element with one description"),
        (entry(queue(namespace="urn:other")), "must be in the XML namespace"),
        (
            entry(queue('<LockDuration xmlns="">PT1M</LockDuration>')),
            "must be in the XML namespace",
        ),
        (entry(queue(name="Other")), "is not expected here"),
        (entry(queue(name="RuleDescription")), "is not expected here"),
        (
            entry(queue(name="SubscriptionDescription")),
            "another kind of entity; send a QueueDescription or a TopicDescription",
        ),
        (entry(queue("<Colour>red</Colour>")), "has no setting 'Colour'"),
        (entry(queue("<Status>Active</Status>" * 2)), "twice"),
        (entry(queue("<LockDuration>a while</LockDuration>")), "not a length of time"),
        (entry(queue("<LockDuration>P1Y</LockDuration>")), "not a length of time"),
        (entry(queue("<LockDuration>P" + "9" * 40 + "D</LockDuration>")), "lock_duration"),
        (entry(queue("<MaxDeliveryCount>many</MaxDeliveryCount>")), "whole number"),
        (entry(queue("<MaxDeliveryCount>" + "9" * 5000 + "</MaxDeliveryCount>")), "whole number"),
        (entry(queue("<MaxDeliveryCount>-1</MaxDeliveryCount>")), "max_delivery_count"),
        (entry(queue("<RequiresSession>perhaps</RequiresSession>")), "true or false"),
        (entry(queue("<Status>Sleeping</Status>")), "must be one of Active"),
        (
            entry(
                queue(
                    "<FilteringMessagesBeforePublishing>true</FilteringMessagesBeforePublishing>",
                    name="TopicDescription",
                )
            ),
            "FilteringMessagesBeforePublishing is true",
        ),
        (entry(queue("<AuthorizationRules><X/></AuthorizationRules>")), "AuthorizationRule"),
    ],
)
def test_a_bad_document_is_refused_and_nothing_is_created(
    client: AtomClient, manager: NamespaceManager, path: str, body: str | bytes, text: str
) -> None:
    reply = client.ask("PUT", f"/{path}{VERSION}", body)
    assert reply.status == 400
    assert reply.text.startswith("<Error><Code>400</Code><Detail>")
    assert text in reply.text.replace("&#x27;", "'")
    assert not manager.queue_exists(path)


def test_a_document_nested_deep_is_refused(client: AtomClient, path: str) -> None:
    reply = client.ask("PUT", f"/{path}{VERSION}", entry("<a>" * 50_000 + "</a>" * 50_000))
    assert reply.status == 400


def test_a_huge_body_is_refused_before_it_is_read(
    server: Server, client: AtomClient, path: str
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        head = (
            f"PUT /{path}{VERSION} HTTP/1.1\r\nHost: x\r\nAuthorization: {client.token()}\r\n"
            "Content-Length: 10000000000\r\n\r\n"
        )
        raw.sendall(head.encode() + b" " * 600_000)
        assert b" 413 " in raw.recv(1000).partition(b"\r\n")[0]
    assert client.get("$namespaceinfo").status == 200


def test_characters_that_xml_cannot_have_are_replaced(
    client: AtomClient, manager: NamespaceManager
) -> None:
    made = f"odd-{next(_numbers)}"
    from twinbus import QueueDescription  # noqa: PLC0415

    manager.create_queue(QueueDescription(path=made, user_metadata="a\x01<b>&\u2028"))
    assert "<UserMetadata>a\ufffd&lt;b&gt;&amp;\u2028</UserMetadata>" in client.get(made).text


# -- addresses and verbs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "..",
        "../orders",
        "a/../b",
        "%2e%2e/b",
        "..%2F..%2Fetc%2Fpasswd",
        "a%00b",
        "a%0d%0ab",
        "a%2F%2Fb",
        "%ff%fe",
        "a%252Fb",
        "a b".replace(" ", "%20"),
        "$management",
        "a/$DeadLetterQueue",
        "a/subscriptions/b/c",
        "a/subscriptions/b/rules/c/d",
        "a/Subscriptions/b%2Frules",
        "subscriptions/b",
        "$Resources/everything",
        "x" * 300,
    ],
)
def test_a_path_that_nothing_can_have_creates_nothing(
    client: AtomClient, manager: NamespaceManager, target: str
) -> None:
    before = [entity.path for entity in manager.list_queues()]
    assert client.ask("PUT", f"/{target}{VERSION}", entry(queue())).status in (400, 404, 405)
    assert client.ask("GET", f"/{target}{VERSION}").status in (400, 404)
    assert client.ask("DELETE", f"/{target}{VERSION}").status in (400, 404, 405)
    assert [entity.path for entity in manager.list_queues()] == before


@pytest.mark.parametrize(
    ("verb", "target", "allowed"),
    [
        ("POST", "orders", "GET, PUT, DELETE"),
        ("PATCH", "orders", "GET, PUT, DELETE"),
        ("HEAD", "orders", "GET, PUT, DELETE"),
        ("OPTIONS", "orders", "GET, PUT, DELETE"),
        ("DELETE", "$namespaceinfo", "GET"),
        ("PUT", "$Resources/queues", "GET"),
        ("DELETE", "news/subscriptions", "GET"),
        ("PUT", "news/subscriptions/sport/rules", "GET"),
    ],
)
def test_a_wrong_verb_is_refused(client: AtomClient, verb: str, target: str, allowed: str) -> None:
    reply = client.ask(verb, f"/{target}{VERSION}", entry(queue()))
    assert (reply.status, reply.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("query", ["$skip=-1", "$skip=x", "$top=1e3", "$top=" + "9" * 30])
def test_a_bad_page_is_refused(client: AtomClient, query: str) -> None:
    assert client.ask("GET", f"/$Resources/queues{VERSION}&{query}").status == 400


def test_an_unknown_version_is_refused(client: AtomClient) -> None:
    reply = client.ask("GET", "/orders?api-version=1999-01")
    assert reply.status == 400
    assert "2021-05" in reply.text


def test_a_host_name_cannot_leave_its_element(client: AtomClient, path: str) -> None:
    client.put(path, queue())
    reply = client.ask("GET", f"/{path}{VERSION}", headers={"Host": 'x"><evil/>'})
    assert "<evil" not in reply.text


# -- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["orders", "$namespaceinfo", "$Resources/queues", "a/b/../c"])
def test_without_a_good_token_nothing_is_disclosed(client: AtomClient, target: str) -> None:
    good = client.token()
    for token in (
        "",
        "Bearer abc",
        good[:-3] + "x",
        good.replace("sig=", "sig=AAAA"),
        client.token(key="k" * 32),
        client.token(name="nobody"),
        client.token(seconds=-1),
        "SharedAccessSignature " + "x" * 10_000
        if target == "a/b/../c"
        else "SharedAccessSignature",
    ):
        reply = client.ask("GET", f"/{target}{VERSION}", token=token)
        assert reply.status in (400, 401), token


def test_a_token_for_another_entity_opens_nothing(client: AtomClient, path: str) -> None:
    client.put(path, queue())
    second = client.token("another")
    assert client.get(path, token=second).status == 401
    assert client.ask("DELETE", f"/{path}{VERSION}", token=second).status == 401
    assert client.get("$Resources/queues", token=second).status == 401
    assert client.put("new", queue(), token=second).status == 401
    assert client.get(path, token=client.token(f"{path}2")).status == 401
    assert client.get(path, token=client.token(path[:-1])).status == 401


def test_a_token_of_a_topic_opens_its_subscriptions_and_no_path_that_begins_alike(
    client: AtomClient, path: str
) -> None:
    of_topic = client.token(path)
    assert client.put(f"{path}/subscriptionsold", queue()).status == 201
    assert client.put(path, queue(name="TopicDescription")).status == 201
    assert client.get(f"{path}/Subscriptions", token=of_topic).status == 200
    assert client.get(f"{path}/subscriptionsold", token=of_topic).status == 401


def test_a_token_may_be_for_the_address_of_the_request(client: AtomClient, path: str) -> None:
    assert client.put(path, queue(), token=client.token(path)).status == 201
    assert client.get(path, token=client.token(path.upper())).status == 200
    assert client.get("$Resources/queues", token=client.token("$Resources/queues")).status == 200
    assert client.ask("DELETE", f"/{path}{VERSION}", token=client.token(path)).status == 200


def test_a_key_of_one_entity_manages_that_entity_alone(
    client: AtomClient, manager: NamespaceManager, path: str
) -> None:
    client.put(path, queue())
    client.put(f"{path}-other", queue())
    key = manager.create_key("own", [Claim.MANAGE], path)
    token = client.token(path, key.name, key.primary)
    found = client.get(path, token=token)
    assert found.status == 200
    assert "AuthorizationRules" not in found.text  # keys are for those who manage the namespace
    smaller = queue("<MaxDeliveryCount>2</MaxDeliveryCount>")
    assert client.put(path, smaller, token=token, headers=UPDATE).status == 200
    assert manager.get_queue(path).max_delivery_count == 2
    assert client.get(f"{path}-other", token=token).status == 401
    foreign = client.token(f"{path}-other", key.name, key.primary)
    assert client.get(f"{path}-other", token=foreign).status == 401
    rules = queue("<AuthorizationRules></AuthorizationRules>")
    assert client.put(path, rules, token=token, headers=UPDATE).status == 401
    assert manager.get_key("own", path) == key


def test_a_token_for_one_entity_does_not_reach_queues_below_it(
    client: AtomClient, manager: NamespaceManager, path: str
) -> None:
    client.put(path, queue())
    client.put(f"{path}/other", queue())
    narrow = client.token(path)  # of a key for the whole namespace
    assert client.ask("DELETE", f"/{path}/other{VERSION}", token=narrow).status == 401
    assert manager.queue_exists(f"{path}/other")


def test_a_token_for_one_entity_cannot_forward_to_others_whatever_its_key_may(
    client: AtomClient, manager: NamespaceManager, path: str
) -> None:
    target = f"{path}-target"
    client.put(path, queue())
    client.put(target, queue())
    forwards = queue(f"<ForwardTo>sb://localhost/{target}</ForwardTo>")
    narrow = client.token(path)  # of a key for the whole namespace
    assert client.put(path, forwards, token=narrow, headers=dict(UPDATE)).status == 401
    assert manager.get_queue(path).forward_to is None
    assert client.put(path, forwards, token=client.token(), headers=dict(UPDATE)).status == 200


@pytest.mark.parametrize(
    ("element", "header", "setting"),
    [
        ("ForwardTo", "ServiceBusSupplementaryAuthorization", "forward_to"),
        (
            "ForwardDeadLetteredMessagesTo",
            "ServiceBusDlqSupplementaryAuthorization",
            "forward_dead_lettered_messages_to",
        ),
    ],
)
def test_forwarding_needs_a_token_that_may_send_to_the_target(
    client: AtomClient,
    manager: NamespaceManager,
    path: str,
    element: str,
    header: str,
    setting: str,
) -> None:
    target = f"{path}-target"
    client.put(path, queue())
    client.put(target, queue())
    key = manager.create_key("editor", [Claim.MANAGE], path)
    sender = manager.create_key("sender", [Claim.SEND], target)
    reader = manager.create_key("reader", [Claim.LISTEN], target)
    token = client.token(path, key.name, key.primary)
    forwards = queue(f"<{element}>sb://localhost/{target}</{element}>")

    def update(supplement: str | None) -> int:
        headers = dict(UPDATE)
        if supplement is not None:
            headers[header] = supplement
        return client.put(path, forwards, token=token, headers=headers).status

    assert update(None) == 401
    assert update(token) == 401
    assert update("nonsense") == 401
    assert update(client.token(target, reader.name, reader.primary)) == 401
    assert update(client.token(path, sender.name, sender.primary)) == 401
    assert getattr(manager.get_queue(path), setting) is None
    assert update(client.token(target, sender.name, sender.primary)) == 200
    assert getattr(manager.get_queue(path), setting) == target


# -- manners -------------------------------------------------------------------------------------


def test_a_client_that_hangs_up_harms_nobody(server: Server, client: AtomClient, path: str) -> None:
    for part in (0.2, 0.5, 0.9):
        body = entry(queue()).encode()
        head = (
            f"PUT /{path}{VERSION} HTTP/1.1\r\nHost: x\r\nAuthorization: {client.token()}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall((head + body)[: int(part * len(head + body))])
    assert client.get(path).status == 404


def test_one_connection_takes_many_requests(server: Server, client: AtomClient) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    headers = {"Authorization": client.token()}
    try:
        for number in range(20):
            body = entry(queue())
            connection.request("PUT", f"/many-{number}{VERSION}", body, headers)
            reply = connection.getresponse()
            assert reply.status == 201
            reply.read()
    finally:
        connection.close()


def test_requests_without_a_version_get_pages(client: AtomClient) -> None:
    reply = client.ask("GET", "/health", token="")
    assert (reply.status, '"status":"ok"' in reply.text) == (200, True)
    assert client.ask("PUT", "/orders", entry(queue()), token="").status == 404


def test_a_reply_names_the_namespaces_that_sdks_look_for(client: AtomClient, path: str) -> None:
    text = client.put(path, queue()).text
    assert f'<QueueDescription xmlns="{SERVICE_BUS}"' in text
    assert "<d2p1:ActiveMessageCount>0</d2p1:ActiveMessageCount>" in text
