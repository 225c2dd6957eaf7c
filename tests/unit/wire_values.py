"""Values of every kind that travels between client and server, and their way over the wire."""

from datetime import UTC, timedelta
from typing import Any

import numpy as np
from hypothesis import strategies as st

from twinbus.entities import (
    CorrelationFilter,
    EntityStatus,
    FalseFilter,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
)
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_HEAD_BYTES, ROWS_AS_ROWS
from twinbus.message import BrokeredMessage, to_batch, tokens_of
from twinbus.protocol import commands as c
from twinbus.protocol.frames import FrameKind, FrameReader
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.wire import (
    decode_command,
    decode_error,
    decode_value,
    encode_ask,
    with_columns,
)

NUMBER = st.integers(-(2**63) + 1, 2**63 - 1)  # commands take no smaller one
NUMBERS = st.lists(NUMBER, max_size=40)  # both sides of where they become a blob
PRINTED = st.characters(codec="utf-8", exclude_characters="\0")
PATH = st.text(PRINTED, max_size=30)
NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
SPAN = st.timedeltas(timedelta(0), timedelta(days=1000))
WAIT = st.timedeltas(timedelta(0), timedelta(days=1))
LEASE = st.timedeltas(timedelta(microseconds=1), timedelta(hours=1))
MOMENT = st.datetimes(timezones=st.just(UTC))
TOKENS = st.lists(st.uuids(), max_size=5).map(tokens_of)
LOCK = st.builds(c.SessionLock, PATH, st.uuids())
FEW = st.integers(1, 100)
MESSAGE = st.builds(
    BrokeredMessage,
    st.binary(max_size=20),
    subject=st.none() | st.text(st.characters(codec="utf-8"), max_size=9),
    time_to_live=st.none() | st.timedeltas(timedelta(seconds=1), timedelta(days=9)),
    scheduled_enqueue_time_utc=st.none() | MOMENT,
    application_properties=st.dictionaries(NAME, NUMBER | st.booleans() | SPAN, max_size=3),
)


MESSAGES = st.lists(MESSAGE, max_size=4) | st.lists(
    MESSAGE, min_size=ROWS_AS_ROWS, max_size=ROWS_AS_ROWS + 2
)


PARAMETERS = st.dictionaries(NAME, NUMBER | PATH | st.booleans() | MOMENT, max_size=3)
SQL = st.text(PRINTED, min_size=1, max_size=20)
RULE = st.builds(
    RuleDescription,
    NAME,
    st.builds(SqlFilter, SQL, PARAMETERS)
    | st.builds(CorrelationFilter, subject=st.none() | PATH, properties=PARAMETERS)
    | st.builds(TrueFilter)
    | st.builds(FalseFilter),
    st.none() | st.builds(SqlAction, SQL, PARAMETERS),
)


STATUS = st.sampled_from(EntityStatus)
LIFE = st.timedeltas(timedelta(seconds=1)) | st.just(timedelta.max)
ENTITY = (
    st.builds(
        QueueDescription,
        path=NAME,
        status=STATUS,
        default_message_time_to_live=LIFE,
        forward_to=NAME,
        forward_dead_lettered_messages_to=st.none() | NAME,
    )
    | st.builds(TopicDescription, path=NAME, status=STATUS, user_metadata=st.none() | PATH)
    | st.builds(SubscriptionDescription, topic_path=NAME, name=NAME, requires_session=st.booleans())
)


SECRET = st.text(PRINTED, min_size=16, max_size=40)
KEY = st.builds(
    SharedAccessKey,
    name=st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True),
    claims=st.lists(st.sampled_from(Claim), min_size=1).map(tuple),
    primary=SECRET,
    secondary=SECRET,
    entity_path=st.none() | NAME,
)


COUNTS = st.lists(st.integers(0, 2**63 - 1), max_size=40)
SOURCE = st.text(PRINTED, min_size=1, max_size=40).map("queue {}".format)
ORIGIN = st.builds(c.Origin, SOURCE, COUNTS | COUNTS.map(np.array).map(np.int64))
PARTS = st.lists(st.builds(c.DeadLetterPart, NUMBERS, PATH, st.none() | PATH), max_size=3)
MODE = st.sampled_from(c.ReceiveMode)
MAYBE_LOCK = st.none() | LOCK


COMMAND: dict[type[c.Command[Any]], st.SearchStrategy[Any]] = {
    c.Send: st.builds(c.Send, PATH, MESSAGES | MESSAGES.map(to_batch), st.none() | ORIGIN),
    c.CancelScheduled: st.builds(c.CancelScheduled, PATH, NUMBERS),
    c.Receive: st.builds(c.Receive, PATH, FEW, WAIT, MODE, MAYBE_LOCK, NUMBER, st.booleans()),
    c.ReceiveDeferred: st.builds(c.ReceiveDeferred, PATH, NUMBERS, MODE, MAYBE_LOCK),
    c.Peek: st.builds(c.Peek, PATH, NUMBER, FEW, NUMBER, st.none() | PATH),
    c.DeleteMessages: st.builds(c.DeleteMessages, PATH, FEW, st.none() | MOMENT, MAYBE_LOCK),
    c.Settle: st.builds(
        c.Settle, PATH, TOKENS, st.sampled_from(c.Disposition), st.none() | PATH, st.none() | PATH
    ),
    c.RenewLocks: st.builds(c.RenewLocks, PATH, TOKENS),
    c.AcceptSession: st.builds(c.AcceptSession, PATH, st.none() | PATH, WAIT),
    c.RenewSession: st.builds(c.RenewSession, PATH, LOCK),
    c.ReleaseSession: st.builds(c.ReleaseSession, PATH, LOCK),
    c.GetSessionState: st.builds(c.GetSessionState, PATH, LOCK),
    c.SetSessionState: st.builds(c.SetSessionState, PATH, LOCK, st.none() | st.binary()),
    c.ListSessions: st.builds(c.ListSessions, PATH, FEW, FEW, st.none() | MOMENT),
    c.LeaseRange: st.builds(
        lambda path, owner, count, span, duration: c.LeaseRange(
            path, owner, count, span and span[0], span and span[1], duration=duration
        ),
        PATH,
        PATH,
        FEW,
        st.none() | st.tuples(NUMBER, NUMBER).map(sorted),
        LEASE,
    ),
    c.RenewRange: st.builds(c.RenewRange, PATH, NUMBER, LEASE),
    c.ReadRange: st.builds(c.ReadRange, PATH, NUMBER, NUMBER, NUMBER, NUMBER),
    c.SettleRange: st.builds(
        c.SettleRange, PATH, NUMBER, st.lists(st.tuples(NUMBER, NUMBER), max_size=40), PARTS
    ),
    c.ReleaseRange: st.builds(c.ReleaseRange, PATH, NUMBER),
    c.CreateEntity: st.builds(c.CreateEntity, ENTITY, st.none() | RULE),
    c.UpdateEntity: st.builds(c.UpdateEntity, ENTITY),
    c.DeleteEntity: st.builds(c.DeleteEntity, PATH),
    c.GetEntity: st.builds(c.GetEntity, PATH),
    c.ListEntities: st.builds(c.ListEntities, st.sampled_from(c.EntityKind), st.none() | PATH),
    c.GetRuntimeProperties: st.builds(c.GetRuntimeProperties, PATH),
    c.CreateRule: st.builds(c.CreateRule, PATH, RULE),
    c.UpdateRule: st.builds(c.UpdateRule, PATH, RULE),
    c.DeleteRule: st.builds(c.DeleteRule, PATH, PATH),
    c.ListRules: st.builds(c.ListRules, PATH),
    c.ReadMeter: st.builds(c.ReadMeter),
    c.PutKey: st.builds(c.PutKey, KEY),
    c.DeleteKey: st.builds(c.DeleteKey, PATH, st.none() | PATH),
    c.ListKeys: st.builds(c.ListKeys),
}


ANY_COMMAND = st.one_of(*COMMAND.values())


def sent(command: c.Command[Any], number: int = 1) -> bytes:
    """Return the frame that asks for a command."""
    return b"".join(encode_ask(number, command))


def cut(stream: bytes) -> list[tuple[list[Any], memoryview]]:
    """Return the frames of a stream that a client wrote."""
    return list(FrameReader(MAX_HEAD_BYTES).feed(stream))


def as_columns(command: Any) -> Any:
    """Return a command; the messages of a send as columns, however they travelled."""
    return with_columns(command) if isinstance(command, c.Send) else command


def reply_of(head: list[Any], body: memoryview) -> Any:
    """Return the value or the error that a reply brings."""
    is_refusal = head[0] == FrameKind.REFUSAL
    return decode_error(head[2:]) if is_refusal else decode_value(head[2], body)


def read(stream: bytes) -> Any:
    """Return the command of one frame, or why it is refused."""
    try:
        [item] = cut(stream)
        return decode_command(*item)
    except InvalidArgumentError as error:
        return error
