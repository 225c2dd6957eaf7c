"""Connection strings and tokens: where a namespace lives, and how clients prove who they are."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.properties import replayed, replayed_at_length
from twinbus.connection import ConnectionString, Place, Token, sign_token, token_for
from twinbus.errors import InvalidArgumentError, UnauthorizedError
from twinbus.limits import DEFAULT_PORT, MAX_TOKEN_CHARACTERS, SECOND_US

KEY = "NobodyShallSeeIt42c2VjcmV0+/c2VjcmV0="
SERVER = "Endpoint=twinbus://contoso.example:4617"
CREDENTIALS = f"SharedAccessKeyName=Root;SharedAccessKey={KEY}"
RESOURCE = "twinbus://contoso/orders"
EXPIRES_S = 2_000_000_000

NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=20)
KEYS = st.text("ABCDEFGHIJabcdefghij0123456789+/", min_size=16, max_size=44).map(lambda k: k + "=")
PARTS = st.sampled_from(
    ["Endpoint", "SharedAccessKeyName", "Tls", "CaFile", "Name", "EntityPath", "Nonsense"]
)


def refusal(text: str) -> str:
    """Return what is said about a connection string that is refused."""
    with pytest.raises(InvalidArgumentError) as caught:
        ConnectionString.parse(text)
    return f"{caught.value} {caught.value!r} {caught.value.facts}"


def shown(text: str) -> str:
    """Return what people may see of a connection string: its value, or why it was refused."""
    try:
        return repr(ConnectionString.parse(text))
    except InvalidArgumentError as error:
        return f"{error} {error!r} {error.facts}"


# -- where a namespace lives -----------------------------------------------------------------------


def test_an_embedded_namespace_lives_in_a_directory_and_is_called_after_it() -> None:
    connection = ConnectionString.parse("Endpoint=embedded:///var/lib/orders")
    assert connection.place is Place.EMBEDDED
    assert connection.directory == Path("/var/lib/orders")
    assert connection.name == "orders"


def test_an_embedded_namespace_can_be_given_a_name() -> None:
    connection = ConnectionString.parse("Endpoint=embedded:///var/lib/orders;Name=contoso")
    assert connection.name == "contoso"


def test_a_server_is_a_host_and_a_port_and_called_after_the_first_label_of_its_host() -> None:
    connection = ConnectionString.parse("Endpoint=twinbus://contoso.example:1234")
    assert connection.place is Place.SERVER
    assert (connection.host, connection.port) == ("contoso.example", 1234)
    assert connection.name == "contoso"
    assert not connection.tls


def test_a_server_without_a_port_is_at_the_default_one() -> None:
    assert ConnectionString.parse("Endpoint=twinbus://contoso").port == DEFAULT_PORT


def test_a_server_can_be_given_a_name() -> None:
    assert ConnectionString.parse(f"{SERVER};Name=fabrikam").name == "fabrikam"


def test_a_host_may_be_an_address_of_ip_version_6() -> None:
    connection = ConnectionString.parse("Endpoint=twinbus://[::1]:1234")
    assert (connection.host, connection.port) == ("::1", 1234)


def test_the_key_and_its_name_are_taken_as_they_stand() -> None:
    connection = ConnectionString.parse(f"{SERVER};{CREDENTIALS}")
    assert (connection.key_name, connection.key) == ("Root", KEY)


def test_a_signature_may_stand_in_place_of_the_key() -> None:
    token = sign_token(RESOURCE, "Root", KEY, EXPIRES_S)
    connection = ConnectionString.parse(f"{SERVER};SharedAccessSignature={token}")
    assert (connection.token, connection.key) == (token, "")


@pytest.mark.parametrize(
    "text", ["Endpoint=twinbus+tls://contoso", "Endpoint=twinbus://contoso;Tls=true"]
)
def test_tls_is_asked_for_by_the_scheme_or_by_a_part(text: str) -> None:
    assert ConnectionString.parse(text).tls


def test_tls_can_be_given_what_to_trust_and_which_name_to_expect() -> None:
    connection = ConnectionString.parse(
        "Endpoint=twinbus+tls://contoso;CaFile=/etc/ca.pem;TlsHostName=broker.example"
    )
    assert connection.ca_file == Path("/etc/ca.pem")
    assert connection.tls_host_name == "broker.example"


def test_a_key_of_one_entity_comes_with_its_path() -> None:
    connection = ConnectionString.parse(f"{SERVER};{CREDENTIALS};EntityPath=orders/new")
    assert connection.entity_path == "orders/new"


def test_parts_may_come_in_any_case_and_order_with_spaces_around_them() -> None:
    text = f" sharedaccesskey = {KEY} ;SHAREDACCESSKEYNAME=Root; endpoint=TWINBUS://contoso; "
    connection = ConnectionString.parse(text)
    assert (connection.host, connection.key_name, connection.key) == ("contoso", "Root", KEY)


def test_a_door_on_this_machine_is_a_socket_in_the_file_system() -> None:
    text = f"Endpoint=twinbus+unix:///run/orders/door;NamespaceId=5f0c;{CREDENTIALS};EntityPath=o/x"
    connection = ConnectionString.parse(text)
    assert connection.place is Place.SERVER
    assert connection.socket == Path("/run/orders/door")
    assert (connection.name, connection.namespace_id) == ("", "5f0c")
    assert (connection.key_name, connection.key, connection.entity_path) == ("Root", KEY, "o/x")
    assert connection.address == "/run/orders/door"
    assert ConnectionString.parse(connection.to_text()) == connection
    assert ConnectionString.parse(f"{text};Name=contoso").name == "contoso"


@pytest.mark.parametrize("where", ["run/door", "", "/", "/run/"])
def test_a_socket_is_named_by_its_absolute_path(where: str) -> None:
    assert "absolute path" in refusal(f"Endpoint=twinbus+unix://{where}")


@pytest.mark.parametrize("part", ["Tls=true", "CaFile=/etc/ca.pem", "TlsHostName=contoso"])
def test_a_socket_in_the_file_system_has_no_tls(part: str) -> None:
    output = refusal(f"Endpoint=twinbus+unix:///run/door;{part}")
    assert f"cannot have `{part.partition('=')[0]}`" in output


# -- Azure Service Bus -----------------------------------------------------------------------------

CONTOSO = "Endpoint=sb://contoso.servicebus.windows.net/"


def test_a_service_bus_is_named_by_the_first_label_of_its_host() -> None:
    parsed = ConnectionString.parse(f"{CONTOSO};{CREDENTIALS}")
    assert parsed.place is Place.SERVICE_BUS
    assert (parsed.name, parsed.address) == ("contoso", "contoso.servicebus.windows.net:5671")
    assert (parsed.key, parsed.tls, parsed.uses_entra) == (KEY, True, False)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("UseDevelopmentEmulator=true", {"tls": False, "port": 5672}),
        ("TransportType=AmqpOverWebsocket", {"uses_websockets": True}),
        ("TransportType=Amqp", {"uses_websockets": False}),
        ("CustomEndpoint=sb://gateway.example:443", {"custom_endpoint": "gateway.example:443"}),
        ("CaFile=/etc/ca.pem", {"ca_file": Path("/etc/ca.pem")}),
        ("EntityPath=orders", {"entity_path": "orders"}),
        ("Name=shop;NamespaceId=1-2", {"name": "shop", "namespace_id": "1-2"}),
    ],
)
def test_each_part_of_a_service_bus_is_understood_and_written_again(
    parts: str, expected: dict[str, Any]
) -> None:
    parsed = ConnectionString.parse(f"{CONTOSO};{CREDENTIALS};{parts}")
    assert {name: getattr(parsed, name) for name in expected} == expected
    assert ConnectionString.parse(parsed.to_text()) == parsed


def test_an_identity_of_entra_opens_a_service_bus_without_a_key() -> None:
    parsed = ConnectionString.parse(f"{CONTOSO};Authentication=Entra")
    assert parsed.uses_entra
    assert ConnectionString.parse(parsed.to_text()) == parsed


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("", "Give exactly one"),
        (f"{CREDENTIALS};Authentication=Entra", "Give exactly one"),
        ("Authentication=Password", "must be Entra"),
        (f"{CREDENTIALS};UseDevelopmentEmulator=yes", "must be true or false"),
        (f"{CREDENTIALS};TransportType=Udp", "must be Amqp or AmqpOverWebsocket"),
        (f"{CREDENTIALS};CustomEndpoint=a:b", "not an address"),
        (f"{CREDENTIALS};Tls=true", "cannot have `Tls`"),
    ],
)
def test_a_connection_string_that_no_service_bus_has_is_refused(parts: str, words: str) -> None:
    output = refusal(f"{CONTOSO};{parts}")
    assert words in output
    assert KEY not in output


def test_only_a_service_bus_has_the_parts_of_its_sdk() -> None:
    output = refusal(f"Endpoint=twinbus://host;{CREDENTIALS};UseDevelopmentEmulator=true")
    assert "cannot have `UseDevelopmentEmulator`" in output


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "orders",
        "Endpoint",
        "Endpoint=",
        CREDENTIALS,
        "Endpoint=http://contoso",
        "Endpoint=contoso:4617",
        "Endpoint=embedded://orders",
        "Endpoint=embedded:///",
        "Endpoint=embedded://",
        f"Endpoint=embedded:///var/lib/orders;{CREDENTIALS}",
        "Endpoint=twinbus://",
        "Endpoint=twinbus://:4617",
        "Endpoint=twinbus://contoso:port",
        "Endpoint=twinbus://contoso:99999",
        "Endpoint=twinbus://[::1",
        "Endpoint=twinbus://contoso/orders",
        "Endpoint=twinbus://contoso?orders",
        f"{SERVER};{SERVER}",
        f"{SERVER};Nonsense=1",
        f"{SERVER};Tls=perhaps",
        f"{SERVER};=1",
        f"{SERVER};{CREDENTIALS};SharedAccessSignature=SharedAccessSignature sr=",
    ],
)
def test_a_malformed_connection_string_is_an_invalid_argument(text: str) -> None:
    assert KEY not in refusal(text)


def test_a_key_without_its_name_and_a_name_without_its_key_are_refused() -> None:
    assert "no `SharedAccessKeyName`" in refusal(f"{SERVER};SharedAccessKey={KEY}")
    assert "no `SharedAccessKey`" in refusal(f"{SERVER};SharedAccessKeyName=Root")


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must be a str, not NoneType"):
        ConnectionString.parse(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("character", [chr(0xDCE9), chr(0xD800), chr(0xDFFF), "\0"])
@pytest.mark.parametrize(
    "text",
    [
        "Endpoint=embedded:///var/lib/{}",
        "Endpoint=embedded:///var/lib/orders;Name={}",
        "Endpoint=twinbus://{}",
        f"{SERVER};Name={{}}",
        f"{SERVER};EntityPath={{}}",
        f"{SERVER};SharedAccessKeyName={{}};SharedAccessKey={KEY}",
        f"{SERVER};SharedAccessKeyName=Root;SharedAccessKey={KEY}{{}}",
        f"{SERVER};SharedAccessSignature={KEY}{{}}",
        f"{SERVER};CaFile=/etc/{{}}",
        f"{SERVER};TlsHostName={{}}",
        f"{SERVER};{KEY}{{}}",
        "{}",
    ],
)
def test_text_that_is_not_utf_8_or_has_a_nul_is_refused_wherever_it_is(
    text: str, character: str
) -> None:
    output = refusal(text.format(character))
    assert "not valid UTF-8" in output or "NUL" in output
    assert KEY[:12] not in output
    assert character not in output


def test_a_part_that_is_there_twice_is_named() -> None:
    output = refusal(f"{SERVER};{CREDENTIALS};{CREDENTIALS}")
    assert "sets `SharedAccessKeyName` twice. Remove one." in output


def test_an_unknown_part_that_is_there_twice_is_not_named_because_it_may_be_a_key() -> None:
    key = "NobodyShallSeeIt"
    assert key not in refusal(f"{SERVER};{key}=;{key}=")


def test_a_part_that_belongs_to_a_server_is_named_when_the_namespace_is_embedded() -> None:
    output = refusal("Endpoint=embedded:///var/lib/orders;CaFile=/etc/ca.pem")
    assert "cannot have `CaFile`" in output


# -- nobody sees the key ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"{SERVER};SharedAccessKey={KEY}",
        f"{SERVER};SharedAccessKeyName=Root;{KEY}",
        f"{SERVER};{CREDENTIALS};{CREDENTIALS}",
        f"{SERVER};{CREDENTIALS};Nonsense=1",
        f"{SERVER};Tls={KEY}",
        f"{SERVER},{CREDENTIALS.replace(';', ',')}",
        f"{SERVER} {CREDENTIALS.replace(';', ' ')}",
        f"{SERVER}\n{CREDENTIALS}",
        f"Endpoint=twinbus://Root:{KEY}@contoso",
        f"Endpoint=twinbus://Root:{KEY}",
        f"Endpoint=twinbus://contoso/{KEY}",
        f"Endpoint={KEY}",
        KEY,
    ],
)
def test_a_refusal_never_shows_the_key_wherever_it_was_put(text: str) -> None:
    output = refusal(text)
    assert KEY not in output
    assert KEY[:12] not in output


def test_neither_value_shows_a_secret_in_its_repr() -> None:
    token = sign_token(RESOURCE, "Root", KEY, EXPIRES_S)
    with_key = ConnectionString.parse(f"{SERVER};{CREDENTIALS}")
    with_token = ConnectionString.parse(f"{SERVER};SharedAccessSignature={token}")
    signature = Token.parse(token).signature
    seen = f"{with_key!r} {with_key} {with_token!r} {with_token} {Token.parse(token)!r}"
    assert KEY not in seen
    assert token not in seen
    assert repr(signature) not in seen


@replayed_at_length
@given(st.text(max_size=60), st.text(max_size=60), KEYS)
def test_any_text_is_taken_apart_or_refused_without_showing_the_key(
    before: str, after: str, key: str
) -> None:
    assume(key not in before + after)
    assert key not in shown(f"{before}SharedAccessKey={key}{after}")


@replayed_at_length
@given(
    st.lists(st.tuples(PARTS, st.text(max_size=20)), max_size=4),
    st.sampled_from([";", "; ", ",", " ", "\n", "&"]),
    KEYS,
)
def test_any_parts_with_any_separator_are_taken_apart_or_refused_without_showing_the_key(
    parts: list[tuple[str, str]], separator: str, key: str
) -> None:
    named = [("Endpoint", "twinbus://contoso:4617"), *parts, ("SharedAccessKey", key)]
    assert key not in shown(separator.join(f"{name}={value}" for name, value in named))


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Endpoint=embedded:///var/lib/orders",
        "Endpoint=embedded:///var/lib/orders;Name=contoso",
        "Endpoint=twinbus://contoso",
        "Endpoint=twinbus://[::1]:1234",
        f"{SERVER};Name=fabrikam;{CREDENTIALS};EntityPath=orders",
        f"{SERVER};Tls=true;CaFile=/etc/ca.pem;TlsHostName=broker.example",
        f"{SERVER};SharedAccessSignature={sign_token(RESOURCE, 'Root', KEY, EXPIRES_S)}",
    ],
)
def test_a_parsed_connection_string_can_be_written_again(text: str) -> None:
    connection = ConnectionString.parse(text)
    assert ConnectionString.parse(connection.to_text()) == connection


@replayed
@given(NAMES, st.integers(1, 65535), NAMES, NAMES, KEYS, st.booleans())
def test_any_connection_to_a_server_survives_being_written_down(
    host: str, port: int, name: str, key_name: str, key: str, tls: bool
) -> None:
    connection = ConnectionString(
        place=Place.SERVER, host=host, port=port, name=name, key_name=key_name, key=key, tls=tls
    )
    assert ConnectionString.parse(connection.to_text()) == connection


# -- tokens ----------------------------------------------------------------------------------------


def signed(key: str = KEY) -> Token:
    return Token.parse(sign_token(RESOURCE, "Root", key, EXPIRES_S))


def test_a_token_has_the_form_service_bus_gave_it() -> None:
    text = sign_token(RESOURCE, "Root Key", "k" * 32, EXPIRES_S)
    assert text == (
        "SharedAccessSignature sr=twinbus%3A%2F%2Fcontoso%2Forders"
        "&sig=UpE7dRGRwrZsKD1mD1Cg3V%2BgjqCj3Bq4xV%2FdqF26rLg%3D&se=2000000000&skn=Root+Key"
    )


def test_a_token_says_who_signed_it_for_what_and_until_when() -> None:
    token = signed()
    assert (token.key_name, token.path, token.expires_s) == ("Root", "orders", EXPIRES_S)


def test_a_token_for_the_management_node_of_an_entity_is_for_the_entity() -> None:
    text = sign_token("sb://localhost/orders/$management", "Root", KEY, EXPIRES_S)
    token = Token.parse(text)
    assert token.path == "orders"
    assert token.is_signed_with(KEY)


def test_a_token_is_verified_by_the_key_that_signed_it_and_by_no_other() -> None:
    assert signed().is_signed_with(KEY)
    assert not signed().is_signed_with(KEY + "x")
    assert not signed("another key").is_signed_with(KEY)


def test_a_token_never_holds_the_key() -> None:
    assert KEY not in sign_token(RESOURCE, "Root", KEY, EXPIRES_S)


def test_a_token_expires_at_its_second_and_not_before() -> None:
    assert not signed().is_expired(EXPIRES_S * SECOND_US - 1)
    assert signed().is_expired(EXPIRES_S * SECOND_US)


@pytest.mark.parametrize(
    ("honest", "forged"),
    [("orders", "payments"), (f"se={EXPIRES_S}", f"se={EXPIRES_S + 1}"), ("%2Forders", "")],
)
def test_a_token_whose_words_were_changed_is_not_signed_any_more(honest: str, forged: str) -> None:
    text = sign_token(RESOURCE, "Root", KEY, EXPIRES_S)
    assert not Token.parse(text.replace(honest, forged)).is_signed_with(KEY)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SharedAccessSignature ",
        "SharedAccessSignature sr=a&sig=&se=1",
        "SharedAccessSignature sr=a&se=1&skn=Root",
        "SharedAccessSignature sr=a&sig=not base64!&se=1&skn=Root",
        "SharedAccessSignature sr=a&sig=AAAA&se=tomorrow&skn=Root",
        f"SharedAccessSignature sr=a&sig=AAAA&se={'9' * 3000}0000&skn={'R' * 2000}",
        "Bearer " + KEY,
        "SharedAccessSignature " + "x" * MAX_TOKEN_CHARACTERS,
    ],
)
def test_a_malformed_token_is_unauthorized(text: str) -> None:
    with pytest.raises(UnauthorizedError) as caught:
        Token.parse(text)
    assert KEY not in str(caught.value)


def test_the_token_of_a_connection_is_for_its_entity_or_for_all() -> None:
    everything = ConnectionString.parse(f"{SERVER};{CREDENTIALS}")
    connection = ConnectionString.parse(f"{SERVER};{CREDENTIALS};EntityPath=orders/new")
    assert Token.parse(token_for(everything, EXPIRES_S)).path == ""
    assert Token.parse(token_for(connection, EXPIRES_S)).path == "orders/new"
    assert Token.parse(token_for(connection, EXPIRES_S)).is_signed_with(KEY)


@replayed_at_length
@given(st.text(max_size=100))
def test_any_text_is_a_token_or_unauthorized(text: str) -> None:
    for presented in (text, f"SharedAccessSignature {text}"):
        with pytest.raises(UnauthorizedError):
            Token.parse(presented)


@replayed_at_length
@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=10), st.text(max_size=10))
def test_any_words_in_a_token_are_read_or_unauthorized(
    resource: str, signature: str, expires: str, name: str
) -> None:
    try:
        token = Token.parse(
            f"SharedAccessSignature sr={resource}&sig={signature}&se={expires}&skn={name}"
        )
    except UnauthorizedError:
        return
    assert not token.is_signed_with(KEY)


@replayed
@given(
    st.sampled_from(["", "[", "[x]", "//[", "http://[::1", "twinbus://contoso/orders"]),
    st.text(max_size=20),
)
def test_the_path_of_any_resource_is_text_or_unauthorized(start: str, rest: str) -> None:
    try:
        token = Token.parse(sign_token(start + rest, "Root", KEY, EXPIRES_S))
    except UnauthorizedError:
        return
    assert isinstance(token.path, str)


@replayed
@given(st.text(max_size=40), st.text(max_size=40), st.text(min_size=1), st.integers(0, 2**40))
def test_whatever_is_signed_is_verified(resource: str, name: str, key: str, expires_s: int) -> None:
    token = Token.parse(sign_token(f"twinbus://contoso/{resource}", name, key, expires_s))
    assert token.is_signed_with(key)
    assert (token.key_name, token.expires_s) == (name, expires_s)
