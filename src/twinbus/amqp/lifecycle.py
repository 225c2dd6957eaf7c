"""The states of connections, sessions and links: one table for all three.

Each end sends an opening frame (open, begin, attach) and a closing frame (close, end, detach) once.
It may send both before the other end has answered.

    state        we have sent    the peer has sent
    NEW          nothing         nothing
    OPENING      open            nothing
    OFFERED      nothing         open
    ACTIVE       open            open
    CLOSING      open, close     open
    ABANDONED    open, close     nothing
    WITHDRAWN    nothing         open, close
    CLOSED       open            open, close         we must answer, and do so at once
    ENDED        open, close     open, close

A frame that the state does not allow is the peer's error if the peer sends it, and a bug in this
package if we send it.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from twinbus.amqp.conditions import AmqpError, Condition, Scope


class EndpointState(Enum):
    """The state of a connection, session or link; see the module docstring."""

    NEW = "new"
    OPENING = "opening"
    OFFERED = "offered"
    ACTIVE = "active"
    CLOSING = "closing"
    ABANDONED = "abandoned"
    WITHDRAWN = "withdrawn"
    CLOSED = "closed"
    ENDED = "ended"


class Saying(Enum):
    """A frame that opens or closes, by sender."""

    OUR_OPEN = "our open"
    OUR_CLOSE = "our close"
    PEER_OPEN = "the peer's open"
    PEER_CLOSE = "the peer's close"


_S, _Y = EndpointState, Saying

TRANSITIONS: Final[Mapping[tuple[EndpointState, Saying], EndpointState]] = {
    (_S.NEW, _Y.OUR_OPEN): _S.OPENING,
    (_S.NEW, _Y.PEER_OPEN): _S.OFFERED,
    (_S.OPENING, _Y.PEER_OPEN): _S.ACTIVE,
    (_S.OPENING, _Y.OUR_CLOSE): _S.ABANDONED,
    (_S.OFFERED, _Y.OUR_OPEN): _S.ACTIVE,
    (_S.OFFERED, _Y.PEER_CLOSE): _S.WITHDRAWN,
    (_S.ACTIVE, _Y.OUR_CLOSE): _S.CLOSING,
    (_S.ACTIVE, _Y.PEER_CLOSE): _S.CLOSED,
    (_S.CLOSING, _Y.PEER_CLOSE): _S.ENDED,
    (_S.ABANDONED, _Y.PEER_OPEN): _S.CLOSING,
    (_S.WITHDRAWN, _Y.OUR_OPEN): _S.CLOSED,
    (_S.CLOSED, _Y.OUR_CLOSE): _S.ENDED,
}


def after(state: EndpointState, saying: Saying) -> EndpointState:
    """Return the state after a frame; raise AmqpError if the peer must not send it now."""
    found = TRANSITIONS.get((state, saying))
    if found is None:
        assert saying in {Saying.PEER_OPEN, Saying.PEER_CLOSE}, (state, saying)
        raise AmqpError(
            f"received {saying.value} in the state {state.value}; each end opens a connection, "
            "session or link once, and closes it once after that",
            Condition.ILLEGAL_STATE,
            Scope.CONNECTION,
        )
    return found
