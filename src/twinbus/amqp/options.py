"""The settings and limits of one end of a connection or link."""

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
    MAX_AMQP_KEPT_BYTES,
    MAX_AMQP_LINKS,
    MAX_AMQP_PARTIAL_BYTES,
    MAX_AMQP_SESSION_LINKS,
    MAX_AMQP_SESSIONS,
    MAX_AMQP_UNSETTLED,
    MAX_UNREAD_BYTES,
    MIN_AMQP_FRAME_BYTES,
)


@dataclass(frozen=True, slots=True)
class PeerBounds:
    """The memory that a peer may use at our end; a server raises the bounds for trusted peers."""

    max_sessions: int = MAX_AMQP_SESSIONS
    max_links: int = MAX_AMQP_LINKS
    max_kept_bytes: int = MAX_AMQP_KEPT_BYTES  # of attach frames
    max_partial_bytes: int = MAX_AMQP_PARTIAL_BYTES  # of unfinished deliveries
    max_unread_bytes: int = (
        MAX_UNREAD_BYTES  # bytes that the peer has not read; above it we read no more
    )


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What an end announces about itself, and its limits."""

    container_id: str
    hostname: str | None = None  # of the server, sent by a client
    properties: Fields | None = None
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    max_frame_bytes: int = AMQP_FRAME_BYTES  # the largest frame that the peer may send to us
    idle_timeout_us: int = AMQP_IDLE_US  # how long the peer may be silent; 0: for ever
    max_sessions: int = MAX_AMQP_SESSIONS  # announced to the peer; bounds may allow fewer
    max_session_links: int = MAX_AMQP_SESSION_LINKS
    max_unsettled: int = MAX_AMQP_UNSETTLED  # per session, in each direction
    bounds: PeerBounds = PeerBounds()
    incoming_window: int = AMQP_INCOMING_WINDOW  # of a session, in transfer frames
    tolerates_overrun: bool = False  # accept deliveries beyond the credit: some SDKs ignore credit
    rejects_too_large: bool = False  # if a delivery is too large, reject it and keep the link
    first_number: int = 0  # of our deliveries and transfers; tests set it before a wraparound

    def __post_init__(self) -> None:
        if not MIN_AMQP_FRAME_BYTES <= self.max_frame_bytes < 2**32:
            raise InvalidArgumentError(
                f"max_frame_bytes is {self.max_frame_bytes}; it must be at least "
                f"{MIN_AMQP_FRAME_BYTES} and at most {2**32 - 1}"
            )
        if not (1 <= self.max_sessions <= 65536 and self.max_session_links >= 1):
            raise InvalidArgumentError(
                f"max_sessions is {self.max_sessions} and must be 1 to 65536; max_session_links is "
                f"{self.max_session_links} and must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What our attach says about a link, which we request or accept."""

    source: Source | Described | None = None
    target: Target | Coordinator | Described | None = None
    snd_settle_mode: SenderSettleMode = SenderSettleMode.MIXED
    rcv_settle_mode: ReceiverSettleMode = ReceiverSettleMode.FIRST
    max_message_bytes: int = AMQP_MESSAGE_BYTES  # the largest that we receive; 0: no limit
    desired_capabilities: tuple[str, ...] = ()
    properties: Fields | None = None
