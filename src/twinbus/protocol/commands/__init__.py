"""The commands of a namespace. A command is a value; its type parameter is the type of its reply.

sending      Send, CancelScheduled
receiving    Receive, ReceiveDeferred, Peek, Settle, RenewLocks, DeleteMessages
sessions     AcceptSession, RenewSession, ReleaseSession, GetSessionState, SetSessionState,
             ListSessions
ranges       LeaseRange, RenewRange, ReadRange, SettleRange, ReleaseRange
managing     CreateEntity, UpdateEntity, DeleteEntity, GetEntity, ListEntities,
             GetRuntimeProperties, CreateRule, UpdateRule, DeleteRule, ListRules, ReadMeter
keys         PutKey, DeleteKey, ListKeys

These names are public: other packages import them from here, never from the modules.
"""

from twinbus.protocol.commands.command import (
    NO_WAIT,
    Command,
    EntityCommand,
)
from twinbus.protocol.commands.managing import (
    CreateEntity,
    CreateRule,
    DeleteEntity,
    DeleteKey,
    DeleteRule,
    EntityKind,
    GetEntity,
    GetRuntimeProperties,
    ListEntities,
    ListKeys,
    ListRules,
    PutKey,
    ReadMeter,
    UpdateEntity,
    UpdateRule,
)
from twinbus.protocol.commands.ranges import (
    DeadLetterPart,
    LeaseRange,
    RangeLease,
    ReadRange,
    ReleaseRange,
    RenewRange,
    SettleRange,
)
from twinbus.protocol.commands.receiving import (
    DeleteMessages,
    Disposition,
    Peek,
    Receive,
    ReceiveDeferred,
    ReceiveMode,
    RenewLocks,
    Settle,
)
from twinbus.protocol.commands.sending import (
    CancelScheduled,
    Origin,
    Send,
    SendReceipt,
)
from twinbus.protocol.commands.sessions import (
    AcceptSession,
    GetSessionState,
    ListSessions,
    ReleaseSession,
    RenewSession,
    SessionCommand,
    SessionGrant,
    SessionLock,
    SetSessionState,
)

__all__ = [
    "NO_WAIT",
    "AcceptSession",
    "CancelScheduled",
    "Command",
    "CreateEntity",
    "CreateRule",
    "DeadLetterPart",
    "DeleteEntity",
    "DeleteKey",
    "DeleteMessages",
    "DeleteRule",
    "Disposition",
    "EntityCommand",
    "EntityKind",
    "GetEntity",
    "GetRuntimeProperties",
    "GetSessionState",
    "LeaseRange",
    "ListEntities",
    "ListKeys",
    "ListRules",
    "ListSessions",
    "Origin",
    "Peek",
    "PutKey",
    "RangeLease",
    "ReadMeter",
    "ReadRange",
    "Receive",
    "ReceiveDeferred",
    "ReceiveMode",
    "ReleaseRange",
    "ReleaseSession",
    "RenewLocks",
    "RenewRange",
    "RenewSession",
    "Send",
    "SendReceipt",
    "SessionCommand",
    "SessionGrant",
    "SessionLock",
    "SetSessionState",
    "Settle",
    "SettleRange",
    "UpdateEntity",
    "UpdateRule",
]
