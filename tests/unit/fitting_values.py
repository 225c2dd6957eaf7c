"""Values that fit, field by field, of every kind that a client sends."""

from dataclasses import fields
from datetime import UTC, timedelta
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.unit.odd_values import KEY
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
from twinbus.message import TEXT_COLUMNS, BrokeredMessage, to_batch, tokens_of
from twinbus.protocol import commands as c
from twinbus.protocol.keys import Claim, SharedAccessKey

PRINTED = st.characters(codec="utf-8", exclude_characters="\0")
NUMBER = st.integers(-(2**63), 2**63 - 1)
NUMBERS = (
    st.lists(NUMBER, max_size=40)
    | st.lists(NUMBER, max_size=40).map(lambda value: np.array(value, np.int64))
    | st.builds(
        lambda first, count: range(first, first + count),
        st.integers(-(2**63), 2**61),
        st.integers(0, 50),
    )
)
COUNTS = st.lists(st.integers(0, 2**63 - 1), max_size=40) | st.builds(range, st.integers(0, 99))
PATH = st.text(PRINTED, max_size=30)
NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
TOKENS = st.lists(st.uuids(), max_size=5).map(tokens_of)
WAIT = st.timedeltas(timedelta(0), timedelta(days=1))
LEASE = st.timedeltas(timedelta(microseconds=1), timedelta(hours=1))
LIFE = st.timedeltas(timedelta(seconds=1)) | st.just(timedelta.max)
REASON = st.none() | PATH
MODE = st.sampled_from(c.ReceiveMode)
SESSION_LOCK = st.none() | st.builds(c.SessionLock, PATH, st.uuids())
AWARE = st.datetimes(timezones=st.just(UTC))
PROPERTY = st.one_of(
    *(st.booleans(), NUMBER, st.floats(), PATH, st.binary(max_size=20), AWARE, st.uuids()),
    st.timedeltas(-timedelta(days=10**8), timedelta(days=10**8)),
)
BAG = st.dictionaries(st.text(PRINTED, min_size=1, max_size=20), PROPERTY, max_size=3)
SQL = st.text(PRINTED, min_size=1, max_size=20)
FILTER = (
    st.builds(SqlFilter, SQL, BAG)
    | st.builds(CorrelationFilter, subject=REASON, properties=BAG)
    | st.builds(TrueFilter)
    | st.builds(FalseFilter)
)
RULE = st.builds(RuleDescription, NAME, FILTER, st.none() | st.builds(SqlAction, SQL, BAG))
DESCRIPTION = (
    st.builds(QueueDescription, path=NAME, default_message_time_to_live=LIFE)
    | st.builds(TopicDescription, path=NAME)
    | st.builds(SubscriptionDescription, topic_path=NAME, name=NAME)
)
SOURCE = (
    PATH.map("queue {}".format) | st.just("sender/0123456789abcdef") | PATH.map("//sink/{}".format)
)
ORIGIN = st.builds(c.Origin, SOURCE, COUNTS)
MESSAGE = st.builds(
    BrokeredMessage,
    st.binary(max_size=20),
    subject=REASON,
    time_to_live=st.none() | st.timedeltas(timedelta(microseconds=1)),
    scheduled_enqueue_time_utc=st.none() | AWARE,
    application_properties=BAG,
)
MESSAGES = st.lists(MESSAGE, max_size=3) | st.lists(MESSAGE, max_size=3).map(to_batch)
SECRET = st.text(PRINTED, min_size=16, max_size=40)
SESSION = {"path": PATH, "session": st.builds(c.SessionLock, PATH, st.uuids())}
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "max_size_in_megabytes": st.integers(1, 81_920),
    "max_delivery_count": st.integers(1, 2**31 - 1),
    "default_message_time_to_live": LIFE,
    "auto_delete_on_idle": st.timedeltas(timedelta(minutes=5)),
    "lock_duration": st.timedeltas(timedelta(seconds=1), timedelta(minutes=5)),
    "enable_dead_lettering_on_message_expiration": st.booleans(),
    "enable_dead_lettering_on_filter_evaluation_exceptions": st.booleans(),
    "enable_batched_operations": st.booleans(),
    "enable_partitioning": st.booleans(),
    "enable_express": st.booleans(),
    "support_ordering": st.booleans(),
    "requires_session": st.booleans(),
    "requires_duplicate_detection": st.booleans(),
    "duplicate_detection_history_time_window": st.timedeltas(
        timedelta(seconds=20), timedelta(days=7)
    ),
    "forward_to": st.none() | NAME,
    "forward_dead_lettered_messages_to": st.none() | NAME,
    "status": st.sampled_from(EntityStatus),
    "user_metadata": REASON,
    "path": NAME,
    "topic_path": NAME,
    "name": NAME,
}
FITTING: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    c.Send: {"path": PATH, "messages": MESSAGES, "origin": st.none() | ORIGIN},
    c.CancelScheduled: {
        "path": PATH,
        "sequence_numbers": NUMBERS,
        "origin": st.none() | st.just(c.Origin("sender/00000000000000aa", [7])),
    },
    c.Receive: {
        "path": PATH,
        "max_messages": st.integers(1, 10_000),
        "wait": WAIT,
        "mode": MODE,
        "session": SESSION_LOCK,
        "max_bytes": NUMBER,
        "takes_rows": st.booleans(),
    },
    c.ReceiveDeferred: {
        "path": PATH,
        "sequence_numbers": NUMBERS,
        "mode": MODE,
        "session": SESSION_LOCK,
    },
    c.Peek: {
        "path": PATH,
        "from_sequence_number": NUMBER,
        "max_messages": st.integers(1, 10_000),
        "max_bytes": NUMBER,
        "session_id": REASON,
    },
    c.DeleteMessages: {
        "path": PATH,
        "max_messages": st.integers(1, 100_000),
        "enqueued_before_utc": st.none() | AWARE,
        "session": SESSION_LOCK,
    },
    c.Settle: {
        "path": PATH,
        "lock_tokens": TOKENS,
        "disposition": st.sampled_from(c.Disposition),
        "reason": REASON,
        "description": REASON,
    },
    c.RenewLocks: {"path": PATH, "lock_tokens": TOKENS},
    c.AcceptSession: {"path": PATH, "session_id": REASON, "wait": WAIT},
    c.RenewSession: SESSION,
    c.ReleaseSession: SESSION,
    c.GetSessionState: SESSION,
    c.SetSessionState: SESSION | {"state": st.none() | st.binary(max_size=20)},
    c.ListSessions: {
        "path": PATH,
        "skip": st.integers(0, 2**63 - 1),
        "max_sessions": st.integers(1, 10_000),
        "state_updated_after_utc": st.none() | AWARE,
    },
    c.LeaseRange: {
        "path": PATH,
        "owner": PATH,
        "max_messages": st.integers(1, 1_000_000),
        "first": st.none() | NUMBER,
        "last": st.none() | NUMBER,
        "duration": LEASE,
        "wait": WAIT,
        "past": st.none() | NUMBERS,
        "max_bytes": st.none() | st.integers(1, 2**63 - 1),
    },
    c.RenewRange: {"path": PATH, "epoch": NUMBER, "duration": LEASE},
    c.ReadRange: {
        "path": PATH,
        "epoch": NUMBER,
        "first": NUMBER,
        "last": NUMBER,
        "max_bytes": NUMBER,
    },
    c.SettleRange: {
        "path": PATH,
        "epoch": NUMBER,
        "completed": st.lists(st.tuples(NUMBER, NUMBER), max_size=40),
        "dead_lettered": st.lists(st.builds(c.DeadLetterPart, NUMBERS, PATH, REASON), max_size=3),
        "release": st.booleans(),
    },
    c.ReleaseRange: {"path": PATH, "epoch": NUMBER},
    c.CreateEntity: {"description": DESCRIPTION, "rule": st.none() | RULE},
    c.UpdateEntity: {"description": DESCRIPTION},
    c.DeleteEntity: {"path": PATH},
    c.GetEntity: {"path": PATH},
    c.ListEntities: {"kind": st.sampled_from(c.EntityKind), "topic_path": REASON},
    c.GetRuntimeProperties: {"path": PATH},
    c.CreateRule: {"path": PATH, "rule": RULE},
    c.UpdateRule: {"path": PATH, "rule": RULE},
    c.DeleteRule: {"path": PATH, "name": PATH},
    c.ListRules: {"path": PATH},
    c.ReadMeter: {},
    c.PutKey: {"key": st.just(KEY)},
    c.DeleteKey: {"name": PATH, "entity_path": REASON},
    c.ListKeys: {},
    c.Origin: {"source": SOURCE, "numbers": COUNTS, "also": st.none() | ORIGIN},
    c.SessionLock: {"session_id": PATH, "lock_token": st.uuids()},
    c.DeadLetterPart: {"sequence_numbers": NUMBERS, "reason": PATH, "description": REASON},
    SharedAccessKey: {
        "name": NAME,
        "claims": st.lists(st.sampled_from(Claim), min_size=1).map(tuple),
        "primary": SECRET,
        "secondary": SECRET,
        "entity_path": REASON,
    },
    RuleDescription: {
        "name": NAME,
        "filter": FILTER,
        "action": st.none() | st.builds(SqlAction, SQL, BAG),
    },
    SqlFilter: {"expression": SQL, "parameters": BAG},
    SqlAction: {"expression": SQL, "parameters": BAG},
    CorrelationFilter: dict.fromkeys((f.name for f in fields(CorrelationFilter)), REASON)
    | {"properties": BAG},
    TrueFilter: {},
    FalseFilter: {},
    BrokeredMessage: dict.fromkeys(TEXT_COLUMNS, REASON)
    | {
        "body": st.binary(max_size=20),
        "time_to_live": st.none() | st.timedeltas(timedelta(microseconds=1)),
        "scheduled_enqueue_time_utc": st.none() | AWARE,
        "application_properties": BAG,
        "amqp": st.none() | st.binary(max_size=20),
    },
}
for _kind in (QueueDescription, TopicDescription, SubscriptionDescription):
    FITTING[_kind] = {f.name: SETTINGS[f.name] for f in fields(_kind)}
