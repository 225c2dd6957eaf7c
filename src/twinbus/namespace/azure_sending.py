"""Sends messages on links of the SDK: as batches, or as requests that schedule messages.

Messages that fit into one AMQP batch are enqueued all or none. More messages are sent as several
batches in order: if a batch fails, the batches before it stay enqueued, and the error names them.
One timeout bounds all batches.

An application that uses the SDK sends `SdkMessage`s, which contain the SDK's own messages. These
are sent unchanged.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from uuid import uuid4

import pyarrow as pa

from twinbus.errors import (
    InvalidArgumentError,
    MessageSizeExceededError,
    OperationTimeoutError,
)
from twinbus.limits import MAX_BATCH_MESSAGES
from twinbus.message import BrokeredMessage, conform, to_messages
from twinbus.namespace.azure_errors import to_messaging_error
from twinbus.namespace.azure_links import AzureLink
from twinbus.namespace.azure_messages import SdkMessage
from twinbus.namespace.azure_messages import encoded as encode_sdk
from twinbus.namespace.azure_sdk import (
    Payload,
    batch_limit,
    batch_of,
    schedule,
    send_message,
    send_payload,
)
from twinbus.protocol.commands import Origin, Send, SendReceipt
from twinbus.protocol.origins import ORIGIN_PROPERTY, OriginKind, message_id_of, origin_kind
from twinbus.protocol.remainder import ACCEPTED
from twinbus.servicebus.encoding import write_sent

_ENVELOPE_BYTES = 512  # of a batch, in addition to its messages: an id, session and partition key
_ENTRY_BYTES = 8  # of a batch, in addition to the bytes of each message
Encoded = tuple[BrokeredMessage, Payload]


def send(link: AzureLink, command: Send, timeout_s: float) -> SendReceipt:
    """Send on an open link, whose `turn` the caller holds; return when all are durable."""
    deadline = time.monotonic() + timeout_s
    messages = command.messages
    if isinstance(messages, list) and len(messages) == 1 and type(messages[0]) is SdkMessage:
        _send_unchanged(link, messages[0], timeout_s)
        return SendReceipt([0])
    encoded = [(message, _encoded(message)) for message in outgoing(command)]
    limit = batch_limit(link.sdk)
    batches = list(parts(encoded, limit, command.path))
    is_scheduled = all(message.scheduled_enqueue_time_utc is not None for message, _ in encoded)
    numbers: list[int] = []
    try:
        for batch in batches:
            left_s = _time_left(deadline, command.path, len(numbers))
            if is_scheduled:
                numbers += schedule(link.sdk, batch, left_s)
            elif len(batch) == 1:
                send_payload(link.sdk, batch[0][1], left_s)
                numbers.append(0)
            else:
                link.sdk.send_messages(batch_of(batch, limit), timeout=left_s)
                numbers += [0] * len(batch)
    except Exception as failure:
        if not numbers:
            raise
        error = to_messaging_error(failure, command.path)
        error.facts = {**error.facts, ACCEPTED: dict(enumerate(numbers))}
        raise error from failure
    return SendReceipt(numbers)


def _time_left(deadline: float, path: str, sent: int) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise OperationTimeoutError(
            f"the time for a send to {path} was over after {sent} messages. Send fewer messages at "
            "once, or allow more time",
            path=path,
        )
    return left_s


def _send_unchanged(link: AzureLink, message: BrokeredMessage, timeout_s: float) -> None:
    """Send a message of the SDK; if the SDK fails to encode it, the message is at fault."""
    outgoing_message = message.outgoing  # type: ignore[attr-defined]
    try:
        send_message(link.sdk, outgoing_message, timeout_s)
    except Exception:
        try:
            encode_sdk(outgoing_message)
        except InvalidArgumentError:
            link.has_failed = True  # the SDK would try to send this message again with the next
            raise
        raise


def _encoded(message: BrokeredMessage) -> Payload:
    if type(message) is SdkMessage:
        return encode_sdk(message.outgoing)  # type: ignore[attr-defined]
    return write_sent(message)


def outgoing(command: Send) -> list[BrokeredMessage]:
    """Return the messages of a send in the form for the service: each with an id."""
    origin, messages = command.origin, command.messages
    if not len(messages):
        raise InvalidArgumentError("a send has no messages; give it at least one")
    if len(messages) > MAX_BATCH_MESSAGES:
        raise InvalidArgumentError(
            f"a send has {len(messages)} messages; at most {MAX_BATCH_MESSAGES} are allowed. Split "
            "it into several sends"
        )
    if isinstance(messages, pa.RecordBatch):
        batch = conform(messages)
        message_ids = batch.column("message_id").to_pylist()
        ready = [
            replace(message, message_id=known or _new_id(origin, at))
            for at, (message, known) in enumerate(zip(to_messages(batch), message_ids, strict=True))
        ]
    else:
        ready = [
            message if message.message_id else replace(message, message_id=_new_id(origin, at))
            for at, message in enumerate(messages)
        ]
    if origin is None or origin_kind(origin.source) is not OriginKind.TRANSFER:
        return ready
    return [_with_origin(message, origin, at) for at, message in enumerate(ready)]


def _new_id(origin: Origin | None, at: int) -> str:
    if origin is None:
        return uuid4().hex
    known = origin.best_known
    return message_id_of(known.source, int(known.numbers[at]))


def _with_origin(message: BrokeredMessage, origin: Origin, at: int) -> BrokeredMessage:
    known = origin.best_known
    named = {ORIGIN_PROPERTY: f"{known.source}:{int(known.numbers[at])}"}
    properties = {**message.application_properties, **named}
    return replace(message, application_properties=properties)


def parts(encoded: Sequence[Encoded], limit: int, path: str) -> Iterator[list[Encoded]]:
    """Split messages into batches that the link accepts, in order."""
    part: list[Encoded] = []
    size = _ENVELOPE_BYTES
    for at, (message, payload) in enumerate(encoded):
        own = len(payload) + _ENTRY_BYTES
        if _ENVELOPE_BYTES + own > limit:
            raise MessageSizeExceededError(
                f"message {at} for {path} has {len(payload)} bytes as AMQP; the service accepts "
                f"at most {limit - _ENVELOPE_BYTES - _ENTRY_BYTES}. Put large content elsewhere "
                "and send a reference",
                limit=limit - _ENVELOPE_BYTES - _ENTRY_BYTES,
                path=path,
            )
        if part and size + own > limit:
            yield part
            part, size = [], _ENVELOPE_BYTES
        part.append((message, payload))
        size += own
    if part:
        yield part
