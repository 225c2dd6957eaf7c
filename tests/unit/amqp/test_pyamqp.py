"""The AMQP client inside the Azure Service Bus SDK as an oracle: its codec, and real clients of it.

It is a third implementation, and the one that the Service Bus dialect is made for. It reads fields
by position and ignores credit, so it finds what a lenient peer would not.
"""

from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.amqp.loopback import LoopbackServer
from tests.unit.amqp.values import PRIMITIVES, are_same
from tests.unit.properties import replayed_at_length
from twinbus.amqp.composites import read_composite
from twinbus.amqp.decoder import decode_only
from twinbus.amqp.encoder import encode
from twinbus.amqp.events import (
    AttachRequested,
    CreditGiven,
    Delivery,
    Event,
    LinkDetached,
    OutcomeReported,
)
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    AttachFrame,
    BeginFrame,
    CloseFrame,
    DispositionFrame,
    ErrorCondition,
    FlowFrame,
    Header,
    Modified,
    OpenFrame,
    Properties,
    ReceiverSettleMode,
    Rejected,
    SaslInit,
    SaslMechanisms,
    SenderSettleMode,
    Source,
    Target,
    TransferFrame,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sasl import ANONYMOUS, MECHANISMS
from twinbus.amqp.types import (
    Array,
    Byte,
    Char,
    Float,
    Int,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)

pytest.importorskip(
    "azure.servicebus", reason="azure-servicebus is not installed; `make setup` installs it"
)


def part(name: str) -> Any:
    """Return a module of the client inside the SDK."""
    return import_module(f"azure.servicebus._pyamqp.{name}")


pyamqp_decode, pyamqp_encode = part("_decode"), part("_encode")
performatives, pyamqp_types = part("performatives"), part("types")
WHY = ErrorCondition(condition="com.microsoft:server-busy", description="later", info={})


# -- codec -----------------------------------------------------------------------------------------

TYPE_NAMES = {
    bool: "boolean",
    UByte: "ubyte",
    UShort: "ushort",
    UInt: "uint",
    ULong: "ulong",
    Byte: "byte",
    Short: "short",
    Int: "int",
    int: "long",
    Float: "float",
    float: "double",
    Timestamp: "timestamp",
    bytes: "binary",
    str: "string",
    Symbol: "symbol",
}
KNOWN = [kind for kind in PRIMITIVES if kind is not Char]  # it has no char
SCALARS = st.sampled_from(KNOWN).flatmap(lambda kind: PRIMITIVES[kind])
KEYS = st.text("abcdef", max_size=5).map(Symbol)
READABLE = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        st.lists(children, max_size=5), st.dictionaries(KEYS, children, max_size=4)
    ),
    max_leaves=10,
)


def as_pyamqp_reads(value: Any) -> Any:
    """Return a value as pyamqp decodes it: without wrappers, and text as bytes."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list | tuple):
        return [as_pyamqp_reads(item) for item in value]
    if isinstance(value, dict):
        return {as_pyamqp_reads(key): as_pyamqp_reads(item) for key, item in value.items()}
    return value


def decoded_by_pyamqp(encoded: bytes) -> Any:
    """Return a value that pyamqp decodes."""
    rest, value = pyamqp_decode._DECODE_BY_CONSTRUCTOR[encoded[0]](memoryview(encoded)[1:])
    assert not bytes(rest)
    return value


@given(READABLE)
@replayed_at_length
def test_pyamqp_reads_what_we_write(value: Any) -> None:
    assert decoded_by_pyamqp(encode(value)) == as_pyamqp_reads(value)


@given(st.sampled_from(KNOWN).flatmap(lambda kind: st.lists(PRIMITIVES[kind], min_size=1)))
@replayed_at_length
def test_pyamqp_reads_our_arrays(items: list[Any]) -> None:
    array = Array(type(items[0]), tuple(items))
    assert decoded_by_pyamqp(encode(array)) == as_pyamqp_reads(items)


@given(st.sampled_from(list(TYPE_NAMES)).flatmap(lambda kind: PRIMITIVES[kind]))
@replayed_at_length
def test_we_read_what_pyamqp_writes(value: Any) -> None:
    output = bytearray()
    kind = getattr(pyamqp_types.AMQPTypes, TYPE_NAMES[type(value)])
    plain = value.encode() if isinstance(value, str) else value
    pyamqp_encode.encode_value(output, {"TYPE": kind, "VALUE": plain})
    assert are_same(decode_only(bytes(output)), value)


def test_we_read_the_frames_that_pyamqp_writes() -> None:
    opening = performatives.OpenFrame(
        container_id="sb",
        hostname="localhost",
        max_frame_size=1048576,
        channel_max=65535,
        idle_timeout=None,
        outgoing_locales=None,
        incoming_locales=None,
        offered_capabilities=None,
        desired_capabilities=["a", "b"],
        properties={"product": "x"},
    )
    _, body = pyamqp_encode.encode_frame(opening)
    assert read_composite(bytes(body), 0)[0] == OpenFrame(
        container_id="sb",
        hostname="localhost",
        max_frame_size=1048576,
        desired_capabilities=("a", "b"),
        properties={"product": "x"},
    )
    _, body = pyamqp_encode.encode_frame(performatives.SASLInit("ANONYMOUS", b"", "localhost"))
    assert read_composite(bytes(body), 0)[0] == SaslInit(
        mechanism=ANONYMOUS, initial_response=b"", hostname="localhost"
    )


def fields_read_by_pyamqp(encoded: bytes) -> tuple[int, list[Any]]:
    """Return the code and the fields of a frame body that pyamqp decodes."""
    code, fields = pyamqp_decode.decode_frame(memoryview(encoded))
    return code, list(fields)


def test_pyamqp_reads_the_frames_that_we_write() -> None:
    opening = OpenFrame(container_id="us", max_frame_size=65536, idle_time_out=120_000)
    assert fields_read_by_pyamqp(opening.encode())[1][:5] == [b"us", None, 65536, 65535, 120_000]
    beginning = BeginFrame(
        remote_channel=1, next_outgoing_id=0, incoming_window=2048, outgoing_window=2048
    )
    assert fields_read_by_pyamqp(beginning.encode())[1][:5] == [1, 0, 2048, 2048, 4294967295]
    mechanisms = SaslMechanisms(sasl_server_mechanisms=MECHANISMS)
    assert fields_read_by_pyamqp(mechanisms.encode())[1] == [[name.encode() for name in MECHANISMS]]
    attaching = AttachFrame(
        name="n",
        handle=0,
        role=RECEIVER,
        snd_settle_mode=SenderSettleMode.UNSETTLED,
        rcv_settle_mode=ReceiverSettleMode.SECOND,
        source=Source(address="s"),
        target=Target(address="t"),
        max_message_size=1000,
    )
    fields = fields_read_by_pyamqp(attaching.encode())[1]
    assert fields[:5] == [b"n", 0, True, 0, 1]
    assert (fields[5][0], fields[6][0], fields[10]) == (b"s", b"t", 1000)
    flowing = FlowFrame(
        next_incoming_id=1, incoming_window=2, next_outgoing_id=3, outgoing_window=4, handle=0
    )
    assert fields_read_by_pyamqp(flowing.encode())[1][:5] == [1, 2, 3, 4, 0]
    moving = TransferFrame(handle=0, delivery_id=5, delivery_tag=b"t", message_format=0)
    code, fields = fields_read_by_pyamqp(moving.encode() + b"payload")
    assert (code, fields[:4], bytes(fields[-1])) == (0x14, [0, 5, b"t", 0], b"payload")
    rejecting = DispositionFrame(
        role=RECEIVER, first=7, settled=True, state=Rejected(error=ErrorCondition(condition="a:b"))
    )
    fields = fields_read_by_pyamqp(rejecting.encode())[1]
    assert fields[:4] == [True, 7, None, True]
    assert fields[4] == {"rejected": [[b"a:b", None, None]]}
    closing = CloseFrame(error=WHY)
    assert fields_read_by_pyamqp(closing.encode())[1][0][2] == {}


def test_messages_are_read_in_both_directions() -> None:
    message = part("message")
    of_the_sdk = message.Message(
        header=message.Header(durable=True, priority=4, ttl=5000),
        delivery_annotations={"d": "x"},
        message_annotations={"x-opt-partition-key": "k"},
        properties=message.Properties(message_id="m", group_id="g"),
        application_properties={"n": 7, "wet": True},
        data=[b"one", b"two"],
    )
    output = bytearray()
    pyamqp_encode.encode_payload(output, of_the_sdk)
    found = AmqpMessage(bytes(output))
    assert found.header is not None
    assert (found.header.durable, found.header.ttl) == (True, 5000)
    assert found.properties == Properties(message_id="m", group_id="g")
    assert found.application_properties is not None
    assert {str(key): value for key, value in found.application_properties.items()} == {
        "n": 7,
        "wet": True,
    }
    assert [bytes(content) for content in found.data_sections] == [b"one", b"two"]
    assert found.delivery_annotations == {"d": "x"}
    back = pyamqp_decode.decode_payload(memoryview(b"".join(found.spliced({}))))
    assert back.data == [b"one", b"two"]
    own_bytes = encode_message(
        {
            SectionKind.HEADER: Header(delivery_count=0),
            SectionKind.PROPERTIES: Properties(message_id="m"),
            SectionKind.VALUE: {"a": [1]},
        }
    )
    read = pyamqp_decode.decode_payload(memoryview(own_bytes))
    assert (read.header.delivery_count, read.properties.message_id) == (0, b"m")
    assert read.value == {b"a": [1]}


# -- real clients ----------------------------------------------------------------------------------


class Anonymous:
    """Credentials for a client without tokens."""

    auth_type = "anonymous"

    def __init__(self) -> None:
        self.sasl = part("sasl").SASLAnonymousCredential()


def client(kind: str, port: int, address: str, **options: Any) -> Any:
    """Return a client of the SDK."""
    made = getattr(part("client"), kind)
    return made(
        f"127.0.0.1:{port}",
        address,
        auth=Anonymous(),
        use_tls=False,
        retry_policy=part("error").RetryPolicy(retry_total=0),
        **options,
    )


class Queue:
    """What a server does with one queue: it keeps messages and gives them to receivers."""

    def __init__(self, messages: int = 0) -> None:
        self.arrived: list[Delivery] = []
        self.waiting = [encode_message({SectionKind.DATA: b"%d" % n}) for n in range(messages)]
        self.outcomes: list[Any] = []
        self.detached = 0
        self.refusal: ErrorCondition | None = None
        self.rejection: ErrorCondition | None = None

    def act(self, event: Event) -> None:
        if isinstance(event, AttachRequested):
            if self.refusal is not None:
                event.link.refuse(self.refusal)
            elif event.link.accept(max_message_bytes=1024 * 1024) and isinstance(
                event.link, ReceiverLink
            ):
                event.link.grant(1)
        elif isinstance(event, Delivery):
            self.arrived.append(event)
            state = ACCEPTED if self.rejection is None else Rejected(error=self.rejection)
            event.link.settle(event.number, state, is_settled=True)
        elif isinstance(event, CreditGiven):
            while self.waiting and event.link.may_send:
                event.link.send(self.waiting.pop(0), tag=b"lock-%d" % len(self.waiting))
            event.link.drained()
        elif isinstance(event, OutcomeReported):
            self.outcomes.append((event.state, event.is_settled, len(event.deliveries)))
            for number, _ in event.deliveries:
                event.link.settle(number, event.state)
        elif isinstance(event, LinkDetached):
            self.detached += 1


@pytest.mark.parametrize("max_frame_bytes", [512, 65536])
def test_a_client_of_the_sdk_sends(max_frame_bytes: int) -> None:
    queue = Queue()
    message = part("message").Message
    bodies = [b"small", bytes(range(256)) * 800, b""]
    with LoopbackServer(
        queue.act, MECHANISMS, tolerates_overrun=True, max_frame_bytes=max_frame_bytes
    ) as server:
        sender = client("SendClient", server.port, "q")
        try:
            for body in bodies:
                sender.send_message(message(data=[body]), timeout=20)
        finally:
            sender.close()
    assert server.failures == []
    found = [AmqpMessage(delivery.payload).data_sections for delivery in queue.arrived]
    assert [[bytes(content) for content in contents] for contents in found] == [
        [body] for body in bodies
    ]
    assert queue.detached == 1


def test_a_client_of_the_sdk_gets_the_reason_why_its_message_is_rejected() -> None:
    queue = Queue()
    queue.rejection = WHY
    errors = part("error")
    with LoopbackServer(queue.act, MECHANISMS, tolerates_overrun=True) as server:
        sender = client("SendClient", server.port, "q")
        try:
            with pytest.raises(errors.MessageException) as raised:
                sender.send_message(part("message").Message(data=[b"x"]), timeout=20)
        finally:
            sender.close()
    assert raised.value.condition == WHY.condition.encode()
    assert server.failures == []


def test_a_client_of_the_sdk_gets_the_reason_why_its_link_is_refused() -> None:
    queue = Queue()
    queue.refusal = WHY
    errors = part("error")
    with LoopbackServer(queue.act, MECHANISMS) as server:
        sender = client("SendClient", server.port, "q")
        try:
            with pytest.raises(errors.AMQPLinkError) as raised:
                sender.send_message(part("message").Message(data=[b"x"]), timeout=20)
        finally:
            sender.close()
    assert raised.value.condition in {WHY.condition, WHY.condition.encode()}
    assert server.failures == []


@pytest.mark.parametrize(
    ("outcome", "options", "state"),
    [
        ("accepted", {}, ACCEPTED),
        (
            "modified",
            {"delivery_failed": True, "undeliverable_here": False},
            Modified(delivery_failed=True, undeliverable_here=False),
        ),
    ],
)
def test_a_client_of_the_sdk_receives_and_waits_until_its_outcome_is_settled(
    outcome: str, options: dict[str, Any], state: Any
) -> None:
    queue = Queue(messages=25)
    with LoopbackServer(queue.act, MECHANISMS) as server:
        receiver = client("ReceiveClient", server.port, "q", link_credit=10)
        received: list[bytes] = []
        try:
            receiver.open()
            while len(received) < 25:
                receiver.do_work(batch=5)
                while not receiver._received_messages.empty():
                    frame, message = receiver._received_messages.get()
                    received.append(b"".join(message.data))
                    receiver.settle_messages(
                        frame[1], bytes(frame[2]), outcome, await_outcome=True, **options
                    )
        finally:
            receiver.close()
    assert server.failures == []
    assert received == [b"%d" % number for number in range(25)]
    assert queue.outcomes == [(state, False, 1)] * 25
    assert queue.detached == 1


def test_a_client_of_the_sdk_settles_a_range_at_once() -> None:
    queue = Queue(messages=5)
    with LoopbackServer(queue.act, MECHANISMS) as server:
        receiver = client("ReceiveClient", server.port, "q", link_credit=5)
        frames: list[Any] = []
        try:
            receiver.open()
            while len(frames) < 5:
                receiver.do_work(batch=5)
                while not receiver._received_messages.empty():
                    frames.append(receiver._received_messages.get()[0])
            ids = frames[0][1], frames[-1][1]
            receiver.settle_messages(ids, bytes(frames[0][2]), "accepted")
        finally:
            receiver.close()
    assert server.failures == []
    assert queue.outcomes == [(ACCEPTED, True, 5)]
