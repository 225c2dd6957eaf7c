"""What one end of a connection, or of a link, says about itself and takes from its peer."""

from dataclasses import dataclass

from twinbus.amqp.performatives import (
    Coordinator,
    Fields,
    ReceiverSettleMode,
    SenderSettleMode,
    Source,
    Target,
)
from twinbus.amqp.types import Described
from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    AMQP_FRAME_BYTES,
    AMQP_IDLE_US,
    AMQP_INCOMING_WINDOW,
    AMQP_MESSAGE_BYTES,
    MAX_AMQP_LINKS,
    MAX_AMQP_PARTIAL_BYTES,
    MAX_AMQP_SESSION_LINKS,
    MAX_AMQP_SESSIONS,
    MAX_AMQP_UNSETTLED,
    MIN_AMQP_FRAME_BYTES,
)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What one end says about itself, and how much it takes."""

    container_id: str
    hostname: str | None = None  # of the server, said by a client
    properties: Fields | None = None
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    max_frame_bytes: int = AMQP_FRAME_BYTES  # that the peer may send
    idle_timeout_us: int = AMQP_IDLE_US  # that the peer may be silent; 0: for ever
    max_sessions: int = MAX_AMQP_SESSIONS
    max_session_links: int = MAX_AMQP_SESSION_LINKS
    max_links: int = MAX_AMQP_LINKS
    max_unsettled: int = MAX_AMQP_UNSETTLED  # of one session, in each direction
    max_partial_bytes: int = MAX_AMQP_PARTIAL_BYTES
    incoming_window: int = AMQP_INCOMING_WINDOW
    tolerates_overrun: bool = False  # deliveries beyond the credit: some SDKs ignore it
    rejects_too_large: bool = False  # a delivery alone: by the standard, it ends its link
    first_number: int = 0  # where our counting begins; tests begin before the numbers wrap around

    def __post_init__(self) -> None:
        if not MIN_AMQP_FRAME_BYTES <= self.max_frame_bytes < 2**32:
            raise InvalidArgumentError(
                f"max_frame_bytes is {self.max_frame_bytes}; AMQP needs at least "
                f"{MIN_AMQP_FRAME_BYTES}"
            )
        if not (1 <= self.max_sessions <= 65536 and self.max_session_links >= 1):
            raise InvalidArgumentError("max_sessions is 1 to 65536, max_session_links at least 1")


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What a link that we ask for shall be like."""

    source: Source | Described | None = None
    target: Target | Coordinator | Described | None = None
    snd_settle_mode: SenderSettleMode = SenderSettleMode.MIXED
    rcv_settle_mode: ReceiverSettleMode = ReceiverSettleMode.FIRST
    max_message_bytes: int = AMQP_MESSAGE_BYTES  # that we receive; 0: the link sets no limit
    desired_capabilities: tuple[str, ...] = ()
    properties: Fields | None = None
