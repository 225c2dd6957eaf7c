"""What precedes the frames of AMQP: protocol headers and SASL.

    layer          expected
    SASL_HEADER    the header of SASL; skipped if no SASL is configured
    SASL           frames of sasl.py
    AMQP_HEADER    the header of AMQP
    FRAMES         the frames of AMQP: the handshake is complete

A server answers an unsupported header with the header that it supports, and closes the connection.
"""

from collections.abc import Callable
from enum import Enum

from twinbus.amqp.composites import Composite, read_composite
from twinbus.amqp.conditions import AmqpError, Condition
from twinbus.amqp.frames import (
    AMQP_HEADER,
    SASL_HEADER,
    AmqpFrameReader,
    FrameType,
    FrameView,
    frame,
)
from twinbus.amqp.performatives import SaslCode, SaslOutcome
from twinbus.amqp.sasl import SaslClient, SaslServer, SaslState


class Layer(Enum):
    """Which bytes come next; see the module docstring."""

    SASL_HEADER = "SASL header"
    SASL = "SASL"
    AMQP_HEADER = "AMQP header"
    FRAMES = "frames"


_HEADERS = {Layer.SASL_HEADER: SASL_HEADER, Layer.AMQP_HEADER: AMQP_HEADER}


class Handshake:
    """One end of a connection until the first AMQP frame."""

    __slots__ = ("_is_client", "_sasl", "_write", "layer")

    def __init__(
        self,
        sasl: SaslServer | SaslClient | None,
        write: Callable[[bytes], None],
        *,
        is_client: bool,
    ) -> None:
        self._sasl = sasl
        self._write = write
        self._is_client = is_client
        self.layer = Layer.AMQP_HEADER if sasl is None else Layer.SASL_HEADER
        if is_client:
            write(_HEADERS[self.layer])

    def take(self, reader: AmqpFrameReader) -> bool:
        """Process bytes that have arrived; return whether the handshake is complete.

        Raises AmqpError if the peer violates the protocol or its credentials are refused.
        """
        while self.layer is not Layer.FRAMES:
            if self.layer is Layer.SASL:
                view = reader.take_frame()
                if view is None:
                    return False
                self._take_sasl(view)
            else:
                header = reader.take_header()
                if header is None:
                    return False
                self._take_header(header, _HEADERS[self.layer])
        return True

    def _take_header(self, header: bytes, expected: bytes) -> None:
        if not self._is_client:
            self._write(expected)
        if header != expected:
            raise AmqpError(
                f"the peer sent the protocol header {header!r}; expected {expected!r}. Use AMQP "
                "1.0, and the same settings of TLS and SASL at both ends",
                Condition.FRAMING_ERROR,
            )
        if self.layer is Layer.AMQP_HEADER:
            self.layer = Layer.FRAMES
            return
        self.layer = Layer.SASL
        if isinstance(self._sasl, SaslServer):
            self._say_sasl(self._sasl.begin())

    def _say_sasl(self, answer: Composite) -> None:
        self._write(frame(0, answer.encode(), FrameType.SASL))

    def _take_sasl(self, view: FrameView) -> None:
        assert self._sasl is not None
        if view.type != FrameType.SASL:
            raise AmqpError(
                "an AMQP frame arrived during SASL; send it after the SASL outcome",
                Condition.FRAMING_ERROR,
            )
        received, end = read_composite(view.data[: view.end], view.begin)
        if end != view.end:
            raise AmqpError(
                f"{view.end - end} unexpected bytes follow {received.NAME} in its frame"
            )
        answer = self._sasl.take(received)
        if answer is not None:
            self._say_sasl(answer)
        if self._sasl.state is not SaslState.DONE:
            return
        outcome = received if self._is_client else answer
        assert isinstance(outcome, SaslOutcome)
        if outcome.code is not SaslCode.OK:
            raise AmqpError(
                f"the server refused the SASL credentials ({outcome.code.name}); check the "
                "mechanism, the user name and the password",
                Condition.UNAUTHORIZED_ACCESS,
            )
        self.layer = Layer.AMQP_HEADER
        if self._is_client:
            self._write(AMQP_HEADER)
