"""The table of composite types: performatives, delivery states, termini, SASL, sections.

Each class is a row, in the order of the specification: the descriptor, and the fields in the order
of the wire with their types and defaults. A field without a default is mandatory. composites.py
derives the encoder and the decoder. Classes of frames are named after their performative.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any, Final

from twinbus.amqp.composites import (
    Composite,
    any_id,
    any_of,
    binary,
    boolean,
    choice,
    composite,
    mapping,
    nested,
    string,
    symbol,
    symbols,
    tag,
    timestamp,
    ubyte,
    uint,
    ulong,
    ushort,
)
from twinbus.amqp.types import Described

SENDER: Final = False  # the values of `role` in attach and disposition
RECEIVER: Final = True
MAX_UINT: Final = 2**32 - 1

Fields = Mapping[Any, Any]


class SenderSettleMode(IntEnum):
    """Whether a sender settles deliveries before it sends them."""

    UNSETTLED = 0
    SETTLED = 1
    MIXED = 2


class ReceiverSettleMode(IntEnum):
    """Whether a receiver settles at once, or after the sender has."""

    FIRST = 0
    SECOND = 1


class TerminusExpiry(StrEnum):
    """When the expiry of a terminus begins."""

    LINK_DETACH = "link-detach"
    SESSION_END = "session-end"
    CONNECTION_CLOSE = "connection-close"
    NEVER = "never"


class SaslCode(IntEnum):
    """The outcome of authentication."""

    OK = 0
    AUTH = 1  # the credentials are wrong
    SYS = 2
    SYS_PERM = 3
    SYS_TEMP = 4


@composite(0x1D, "amqp:error:list", explicit=True)  # SDKs read all three fields by position
class ErrorCondition(Composite):
    """Why a message was rejected, or why a link, session or connection ended."""

    condition: str = symbol()
    description: str | None = string(default=None)
    info: Fields | None = mapping(default=None)


# -- delivery states -------------------------------------------------------------------------------


@composite(0x23, "amqp:received:list")
class Received(Composite):
    """How much of a delivery has arrived; not an outcome."""

    section_number: int = uint()
    section_offset: int = ulong()


@composite(0x24, "amqp:accepted:list")
class Accepted(Composite):
    """The receiver has accepted the message."""


@composite(0x25, "amqp:rejected:list")
class Rejected(Composite):
    """The message is invalid or cannot be processed."""

    error: ErrorCondition | None = nested(ErrorCondition, default=None)


@composite(0x26, "amqp:released:list")
class Released(Composite):
    """The message was not and will not be acted upon."""


@composite(0x27, "amqp:modified:list")
class Modified(Composite):
    """The message was not processed, and is to be modified."""

    delivery_failed: bool | None = boolean(default=None)
    undeliverable_here: bool | None = boolean(default=None)
    message_annotations: Fields | None = mapping(default=None)


@composite(0x33, "amqp:declared:list")
class DeclaredTransaction(Composite):
    """The outcome of `Declare`: the id of the transaction."""

    txn_id: bytes = binary()


OUTCOMES: Final = (Accepted, Rejected, Released, Modified, DeclaredTransaction)
Outcome = Accepted | Rejected | Released | Modified | DeclaredTransaction | Described


@composite(0x34, "amqp:transactional-state:list")
class TransactionalState(Composite):
    """The state of a delivery within a transaction."""

    txn_id: bytes = binary()
    outcome: Outcome | None = any_of(*OUTCOMES, default=None)


DELIVERY_STATES: Final = (Received, *OUTCOMES, TransactionalState)
DeliveryState = Received | Outcome | TransactionalState

ACCEPTED: Final = Accepted()
RELEASED: Final = Released()


# -- termini ---------------------------------------------------------------------------------------


@composite(0x28, "amqp:source:list")
class Source(Composite):
    """Where messages of a link come from."""

    address: str | None = string(default=None)
    durable: int = uint(default=0)  # 0: nothing, 1: configuration, 2: unsettled state
    expiry_policy: TerminusExpiry = choice(TerminusExpiry, default=TerminusExpiry.SESSION_END)
    timeout: int = uint(default=0)  # seconds
    dynamic: bool = boolean(default=False)
    dynamic_node_properties: Fields | None = mapping(default=None)
    distribution_mode: str | None = symbol(default=None)
    filter: Fields | None = mapping(default=None)
    default_outcome: Outcome | None = any_of(*OUTCOMES, default=None)
    outcomes: tuple[str, ...] = symbols(default=())
    capabilities: tuple[str, ...] = symbols(default=())


@composite(0x29, "amqp:target:list")
class Target(Composite):
    """Where messages of a link go to."""

    address: str | None = string(default=None)
    durable: int = uint(default=0)  # 0: nothing, 1: configuration, 2: unsettled state
    expiry_policy: TerminusExpiry = choice(TerminusExpiry, default=TerminusExpiry.SESSION_END)
    timeout: int = uint(default=0)  # seconds
    dynamic: bool = boolean(default=False)
    dynamic_node_properties: Fields | None = mapping(default=None)
    capabilities: tuple[str, ...] = symbols(default=())


@composite(0x30, "amqp:coordinator:list")
class Coordinator(Composite):
    """The target of a link that controls transactions."""

    capabilities: tuple[str, ...] = symbols(default=())


@composite(0x31, "amqp:declare:list")
class Declare(Composite):
    """Asks a coordinator for a transaction; the body of a message."""

    global_id: bytes | None = binary(default=None)


@composite(0x32, "amqp:discharge:list")
class Discharge(Composite):
    """Asks a coordinator to commit or roll back a transaction; the body of a message."""

    txn_id: bytes = binary()
    fail: bool = boolean(default=False)


# -- performatives ---------------------------------------------------------------------------------


@composite(0x10, "amqp:open:list")
class OpenFrame(Composite):
    """Begins a connection."""

    container_id: str = string()
    hostname: str | None = string(default=None)
    max_frame_size: int = uint(default=MAX_UINT)
    channel_max: int = ushort(default=65535)
    idle_time_out: int | None = uint(default=None)  # milliseconds
    outgoing_locales: tuple[str, ...] = symbols(default=())
    incoming_locales: tuple[str, ...] = symbols(default=())
    offered_capabilities: tuple[str, ...] = symbols(default=())
    desired_capabilities: tuple[str, ...] = symbols(default=())
    properties: Fields | None = mapping(default=None)


@composite(0x11, "amqp:begin:list")
class BeginFrame(Composite):
    """Begins a session."""

    remote_channel: int | None = ushort(default=None)
    next_outgoing_id: int = uint()
    incoming_window: int = uint()
    outgoing_window: int = uint()
    handle_max: int = uint(default=MAX_UINT)
    offered_capabilities: tuple[str, ...] = symbols(default=())
    desired_capabilities: tuple[str, ...] = symbols(default=())
    properties: Fields | None = mapping(default=None)


@composite(0x12, "amqp:attach:list")
class AttachFrame(Composite):
    """Attaches a link to a session."""

    name: str = string()
    handle: int = uint()
    role: bool = boolean()
    snd_settle_mode: SenderSettleMode = choice(SenderSettleMode, default=SenderSettleMode.MIXED)
    rcv_settle_mode: ReceiverSettleMode = choice(
        ReceiverSettleMode, default=ReceiverSettleMode.FIRST
    )
    source: Source | Described | None = any_of(Source, default=None)
    target: Target | Coordinator | Described | None = any_of(Target, Coordinator, default=None)
    unsettled: Fields | None = mapping(default=None)
    incomplete_unsettled: bool = boolean(default=False)
    initial_delivery_count: int | None = uint(default=None)
    max_message_size: int = ulong(default=0)  # 0: no limit
    offered_capabilities: tuple[str, ...] = symbols(default=())
    desired_capabilities: tuple[str, ...] = symbols(default=())
    properties: Fields | None = mapping(default=None)


@composite(0x13, "amqp:flow:list")
class FlowFrame(Composite):
    """The windows of a session; with a handle, also the credit of a link."""

    next_incoming_id: int | None = uint(default=None)
    incoming_window: int = uint()
    next_outgoing_id: int = uint()
    outgoing_window: int = uint()
    handle: int | None = uint(default=None)
    delivery_count: int | None = uint(default=None)
    link_credit: int | None = uint(default=None)
    available: int | None = uint(default=None)
    drain: bool = boolean(default=False)
    echo: bool = boolean(default=False)
    properties: Fields | None = mapping(default=None)


@composite(0x14, "amqp:transfer:list")
class TransferFrame(Composite):
    """Carries a delivery or a part of it; its bytes follow in the frame."""

    handle: int = uint()
    delivery_id: int | None = uint(default=None)
    delivery_tag: bytes | None = tag(default=None)
    message_format: int | None = uint(default=None)
    settled: bool | None = boolean(default=None)
    more: bool = boolean(default=False)
    rcv_settle_mode: ReceiverSettleMode | None = choice(ReceiverSettleMode, default=None)
    state: DeliveryState | None = any_of(*DELIVERY_STATES, default=None)
    resume: bool = boolean(default=False)
    aborted: bool = boolean(default=False)
    batchable: bool = boolean(default=False)


@composite(0x15, "amqp:disposition:list")
class DispositionFrame(Composite):
    """The state of the deliveries in a range."""

    role: bool = boolean()  # of the end that sends it
    first: int = uint()
    last: int | None = uint(default=None)
    settled: bool = boolean(default=False)
    state: DeliveryState | None = any_of(*DELIVERY_STATES, default=None)
    batchable: bool = boolean(default=False)


@composite(0x16, "amqp:detach:list")
class DetachFrame(Composite):
    """Detaches a link."""

    handle: int = uint()
    closed: bool = boolean(default=False)
    error: ErrorCondition | None = nested(ErrorCondition, default=None)


@composite(0x17, "amqp:end:list")
class EndFrame(Composite):
    """Ends a session."""

    error: ErrorCondition | None = nested(ErrorCondition, default=None)


@composite(0x18, "amqp:close:list")
class CloseFrame(Composite):
    """Closes a connection."""

    error: ErrorCondition | None = nested(ErrorCondition, default=None)


# -- SASL ------------------------------------------------------------------------------------------


@composite(0x40, "amqp:sasl-mechanisms:list")
class SaslMechanisms(Composite):
    """The mechanisms that a server offers."""

    sasl_server_mechanisms: tuple[str, ...] = symbols()


@composite(0x41, "amqp:sasl-init:list")
class SaslInit(Composite):
    """The mechanism that a client chooses, and its first response."""

    mechanism: str = symbol()
    initial_response: bytes | None = binary(default=None)
    hostname: str | None = string(default=None)


@composite(0x42, "amqp:sasl-challenge:list")
class SaslChallenge(Composite):
    """A challenge of the server."""

    challenge: bytes = binary()


@composite(0x43, "amqp:sasl-response:list")
class SaslResponse(Composite):
    """The response of the client."""

    response: bytes = binary()


@composite(0x44, "amqp:sasl-outcome:list")
class SaslOutcome(Composite):
    """The result of the authentication."""

    code: SaslCode = choice(SaslCode)
    additional_data: bytes | None = binary(default=None)


# -- sections of a message that are lists ----------------------------------------------------------


@composite(0x70, "amqp:header:list", explicit=True)  # SDKs show a missing delivery count as None
class Header(Composite):
    """How a message is to be delivered."""

    durable: bool = boolean(default=False)
    priority: int = ubyte(default=4)
    ttl: int | None = uint(default=None)  # milliseconds
    first_acquirer: bool = boolean(default=False)
    delivery_count: int = uint(default=0)


@composite(0x73, "amqp:properties:list")
class Properties(Composite):
    """The properties of a message that AMQP defines."""

    message_id: Any = any_id(default=None)
    user_id: bytes | None = binary(default=None)
    to: str | None = string(default=None)
    subject: str | None = string(default=None)
    reply_to: str | None = string(default=None)
    correlation_id: Any = any_id(default=None)
    content_type: str | None = symbol(default=None)
    content_encoding: str | None = symbol(default=None)
    absolute_expiry_time: int | None = timestamp(default=None)  # milliseconds since 1970
    creation_time: int | None = timestamp(default=None)  # milliseconds since 1970
    group_id: str | None = string(default=None)
    group_sequence: int | None = uint(default=None)
    reply_to_group_id: str | None = string(default=None)
