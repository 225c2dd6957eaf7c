"""What a send becomes on a link of the SDK: batches, or a request that schedules.

Messages that fit one batch of AMQP are enqueued all or none. More than that go as several batches
in order: when one fails, those before it stay.

An application that uses the SDK hands its own messages over with those of Twinbus (`SdkMessage`).
They go to the service as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from uuid import uuid4

import pyarrow as pa

from twinbus.errors import InvalidArgumentError, MessageSizeExceededError
from twinbus.limits import MAX_BATCH_MESSAGES
from twinbus.message import BrokeredMessage, conform, to_messages
from twinbus.namespace.azure_links import Link
from twinbus.namespace.azure_messages import SdkMessage
from twinbus.namespace.azure_messages import encoded as encode_sdk
from twinbus.namespace.azure_sdk import Payload, batch_limit, batch_of, schedule, send_one
from twinbus.protocol.commands import Origin, Send, SendReceipt
from twinbus.protocol.origins import ORIGIN_PROPERTY, OriginKind, message_id_of, origin_kind
from twinbus.servicebus.messages import write_sent

_ENVELOPE_BYTES = 512  # of a batch, around its messages: an id, a session and a partition key
_ENTRY_BYTES = 8  # of a batch, around one message
Encoded = tuple[BrokeredMessage, Payload]


def send(link: Link, command: Send, timeout_s: float) -> SendReceipt:
    """Send on an open link, with its turn; returns when the messages are durable."""
    messages = command.messages
    if isinstance(messages, list) and len(messages) == 1 and type(messages[0]) is SdkMessage:
        send_one(link.sdk, messages[0].outgoing, timeout_s)  # type: ignore[attr-defined]
        return SendReceipt([0])
    encoded = [(message, _encoded(message)) for message in outgoing(command)]
    limit = batch_limit(link.sdk)
    batches = list(parts(encoded, limit, command.path))
    if all(one.scheduled_enqueue_time_utc is not None for one, _ in encoded):
        numbers = [schedule(link.sdk, batch, timeout_s) for batch in batches]
        return SendReceipt([number for some in numbers for number in some])
    for batch in batches:
        link.sdk.send_messages(batch_of(batch, limit), timeout=timeout_s)
    return SendReceipt([0] * len(encoded))


def _encoded(message: BrokeredMessage) -> Payload:
    if type(message) is SdkMessage:
        return encode_sdk(message.outgoing)  # type: ignore[attr-defined]
    return write_sent(message)


def outgoing(command: Send) -> list[BrokeredMessage]:
    """Return the messages of a send as the service gets them: each with an id."""
    origin, messages = command.origin, command.messages
    if not len(messages):
        raise InvalidArgumentError("a send needs at least one message")
    if len(messages) > MAX_BATCH_MESSAGES:
        raise InvalidArgumentError(
            f"a send has {len(messages)} messages; the limit is {MAX_BATCH_MESSAGES}"
        )
    if isinstance(messages, pa.RecordBatch):
        batch = conform(messages)
        held = batch.column("message_id").to_pylist()
        ready = [
            replace(one, message_id=known or _new_id(origin, at))
            for at, (one, known) in enumerate(zip(to_messages(batch), held, strict=True))
        ]
    else:
        ready = [
            one if one.message_id else replace(one, message_id=_new_id(origin, at))
            for at, one in enumerate(messages)
        ]
    if origin is None or origin_kind(origin.source) is not OriginKind.TRANSFER:
        return ready
    return [_with_origin(one, origin, at) for at, one in enumerate(ready)]


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
    """Cut messages into batches that a link takes, in order."""
    part: list[Encoded] = []
    size = _ENVELOPE_BYTES
    for at, (message, payload) in enumerate(encoded):
        own = len(payload) + _ENTRY_BYTES
        if _ENVELOPE_BYTES + own > limit:
            raise MessageSizeExceededError(
                f"message {at} for {path} has {len(payload)} bytes as AMQP; the service takes "
                f"{limit - _ENVELOPE_BYTES - _ENTRY_BYTES}",
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
