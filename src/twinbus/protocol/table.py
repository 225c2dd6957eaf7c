"""All facts about each command, in one table.

A new command needs a row here, a dataclass in `commands` and a handler in the broker. Access checks
use the claim, the meter uses the kind, the writer uses `changes_directory` and `work`, connections
use `may_wait` and `undo`, the wire uses the codec, the namespace uses the handler, and namespaces
on other engines use `needs`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pyarrow as pa

from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    LISTING_WORK,
    MAX_MESSAGE_BYTES,
    SMALL_WORK,
    WORK_BYTES,
    WORK_MESSAGES,
)
from twinbus.message import BrokeredMessage, content_bytes
from twinbus.protocol import commands as c
from twinbus.protocol.capabilities import Capability, unsupported
from twinbus.protocol.keys import Claim
from twinbus.protocol.operations import Load
from twinbus.protocol.rows import DeliveryRows
from twinbus.values import shown

Undo = Callable[[Any, Any], c.Command[None] | None]


class Reach(Enum):
    """Which keys may use a command, in addition to keys of the namespace."""

    ENTITY = "entity"  # keys of the command's entity
    FOLDER = "folder"  # keys of a folder of backlog queues, for entities in it
    NAMESPACE = "namespace"  # no other keys


class Codec(Enum):
    """How a command is encoded."""

    FIELDS = "fields"  # field by field
    MESSAGES = "messages"  # its messages as rows or columns, the other fields one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRow:
    """The facts about a command."""

    command: type[c.Command[Any]]
    claim: Claim
    handler: str  # a method of the part of the broker that has the commands of this claim
    reach: Reach = Reach.ENTITY
    is_managing: bool = False  # manages entities, rules, keys or the meter
    may_wait: bool = False  # may wait at a queue for its reply
    fetches: bool = False  # its reply contains messages
    changes_directory: bool = False  # gets a separate turn
    work: int = 1  # how many ordinary commands it counts as; see `work_of`, `work_of_load`
    undo: Undo | None = None  # returns the command that releases the locks in its reply
    codec: Codec = Codec.FIELDS
    needs: Capability | None = None  # the capability that the namespace must have

    @property
    def kind(self) -> str:
        """The name of the command in the meter, in reports and on the wire."""
        return self.command.__name__

    def path_of(self, command: c.Command[Any]) -> str:
        """Return the path of a command's entity; empty for the namespace."""
        about: Any = getattr(command, "description", command) if self.is_managing else command
        return str(getattr(about, "path", ""))


def _release_messages(command: c.Receive | c.ReceiveDeferred, value: Any) -> c.Command[None] | None:
    if command.mode is not c.ReceiveMode.PEEK_LOCK:
        return None
    if isinstance(value, DeliveryRows):
        tokens = value.lock_tokens()
    elif isinstance(value, pa.RecordBatch) and value.num_rows:
        tokens = value.column("lock_token")
    else:
        return None
    return c.Settle(command.path, tokens, c.Disposition.RELEASE)


def _release_session(command: c.AcceptSession, value: Any) -> c.Command[None] | None:
    if not isinstance(value, c.SessionGrant):
        return None
    return c.ReleaseSession(command.path, value.lock)


def _release_range(command: c.LeaseRange, value: Any) -> c.Command[None] | None:
    if not isinstance(value, c.RangeLease):
        return None
    return c.ReleaseRange(command.path, value.epoch)


def _listening(command: type[c.Command[Any]], handler: str, **facts: Any) -> CommandRow:
    return CommandRow(command=command, claim=Claim.LISTEN, handler=handler, **facts)


def _managing(command: type[c.Command[Any]], handler: str, **facts: Any) -> CommandRow:
    facts = {"reach": Reach.NAMESPACE, "needs": Capability.MANAGEMENT, **facts}
    return CommandRow(
        command=command, claim=Claim.MANAGE, handler=handler, is_managing=True, **facts
    )


_OF_ENTITY = {"reach": Reach.ENTITY}
_CHANGES = {"changes_directory": True}
_OF_SESSION = {"needs": Capability.SESSIONS}
_OF_RANGE = {"needs": Capability.RANGES}
_OF_RULE = {"needs": Capability.RULES}
_OF_KEY = {"needs": Capability.KEYS}
_LISTS = {"work": LISTING_WORK}

ROWS: tuple[CommandRow, ...] = (
    CommandRow(command=c.Send, claim=Claim.SEND, handler="send", codec=Codec.MESSAGES),
    CommandRow(
        command=c.CancelScheduled,
        claim=Claim.SEND,
        handler="cancel_scheduled",
        needs=Capability.SCHEDULING,
    ),
    _listening(c.Receive, "receive", may_wait=True, fetches=True, undo=_release_messages),
    _listening(
        c.ReceiveDeferred,
        "receive_deferred",
        fetches=True,
        undo=_release_messages,
        needs=Capability.DEFERRING,
    ),
    _listening(c.Peek, "peek", fetches=True, needs=Capability.BROWSING),
    _listening(c.Settle, "settle"),
    _listening(c.RenewLocks, "renew_locks", needs=Capability.LOCK_RENEWAL),
    _listening(c.DeleteMessages, "delete_messages", needs=Capability.BATCH_DELETING),
    _listening(
        c.AcceptSession, "accept_session", may_wait=True, undo=_release_session, **_OF_SESSION
    ),
    _listening(c.RenewSession, "renew_session", **_OF_SESSION),
    _listening(c.ReleaseSession, "release_session", **_OF_SESSION),
    _listening(c.GetSessionState, "get_session_state", **_OF_SESSION),
    _listening(c.SetSessionState, "set_session_state", **_OF_SESSION),
    _listening(c.ListSessions, "list_sessions", **_OF_SESSION, **_LISTS),
    _listening(c.LeaseRange, "lease_range", may_wait=True, undo=_release_range, **_OF_RANGE),
    _listening(c.RenewRange, "renew_range", **_OF_RANGE),
    _listening(c.ReadRange, "read_range", fetches=True, **_OF_RANGE),
    _listening(c.SettleRange, "settle_range", **_OF_RANGE),
    _listening(c.ReleaseRange, "release_range", **_OF_RANGE),
    _managing(c.CreateEntity, "create_entity", reach=Reach.FOLDER, **_CHANGES),
    _managing(c.UpdateEntity, "update_entity", **_OF_ENTITY, **_CHANGES),
    _managing(c.DeleteEntity, "delete_entity", **_OF_ENTITY, **_CHANGES),
    _managing(c.GetEntity, "get_entity", **_OF_ENTITY),
    _managing(
        c.ListEntities, "list_entities", reach=Reach.FOLDER, needs=Capability.LISTING, **_LISTS
    ),
    _managing(c.GetRuntimeProperties, "get_runtime_properties", work=SMALL_WORK, **_OF_ENTITY),
    _managing(c.CreateRule, "create_rule", **_OF_ENTITY, **_CHANGES, **_OF_RULE),
    _managing(c.UpdateRule, "update_rule", **_OF_ENTITY, **_CHANGES, **_OF_RULE),
    _managing(c.DeleteRule, "delete_rule", **_OF_ENTITY, **_CHANGES, **_OF_RULE),
    _managing(c.ListRules, "list_rules", **_OF_ENTITY, **_OF_RULE, **_LISTS),
    _managing(c.ReadMeter, "read_meter", needs=Capability.METERING, **_LISTS),
    _managing(c.PutKey, "put_key", **_CHANGES, **_OF_KEY),
    _managing(c.DeleteKey, "delete_key", **_CHANGES, **_OF_KEY),
    _managing(c.ListKeys, "list_keys", **_OF_KEY, **_LISTS),
)
_BY_TYPE: Mapping[type, CommandRow] = {row.command: row for row in ROWS}
_WORK: Mapping[type, int] = {row.command: row.work for row in ROWS}
CHANGES_DIRECTORY = frozenset(row.command for row in ROWS if row.changes_directory)


def row_of(command: c.Command[Any]) -> CommandRow:
    """Return the row of a command."""
    row = _BY_TYPE.get(type(command))
    if row is None:
        raise unknown_command(command)
    return row


def unknown_command(command: object) -> InvalidArgumentError:
    """Return the error for something that is not in the table."""
    return InvalidArgumentError(
        f"a namespace has no command {shown(command)}. Use a class of twinbus.protocol.commands; "
        "if a newer client sent the command, update the server"
    )


def check_supported(
    command: c.Command[Any], namespace: str, capabilities: frozenset[Capability]
) -> None:
    """Refuse a command that needs a capability which the namespace lacks."""
    row = row_of(command)
    if row.needs is not None and row.needs not in capabilities:
        raise unsupported(namespace, row.needs, row.kind)


def waits(command: c.Command[Any]) -> bool:
    """Return whether a command may wait at a queue for its reply."""
    return row_of(command).may_wait and bool(getattr(command, "wait", None))


def undo_of(command: c.Command[Any], value: object) -> c.Command[None] | None:
    """Return the command that releases the locks in a reply which its caller did not get."""
    undo = row_of(command).undo
    return None if undo is None else undo(command, value)


def size_of(command: c.Command[Any]) -> int:
    """Return the approximate size of a command's messages: bodies, properties, AMQP sections."""
    if type(command) is not c.Send:
        return 0
    messages = command.messages
    if isinstance(messages, pa.RecordBatch):
        return content_bytes(messages)
    if len(messages) == 1:
        return _size_of_message(messages[0])
    return sum([_size_of_message(message) for message in messages])


def _size_of_message(message: BrokeredMessage) -> int:
    if message.application_properties or message.amqp is not None:
        return message.size
    return len(message.body)


def work_of(command: c.Command[Any]) -> int:
    """Return how many ordinary commands a command counts as, before it is executed."""
    if type(command) is c.Send:
        return 1 + len(command.messages) // WORK_MESSAGES
    return _WORK.get(type(command), 1)


def work_of_load(load: Load) -> int:
    """Return the work of the messages that a command delivered or settled."""
    return load.messages // WORK_MESSAGES + load.size // WORK_BYTES


def largest_reply(command: c.Command[Any]) -> int:
    """Return the maximum size of the messages in the reply to a command."""
    if not row_of(command).fetches:
        return 0
    count: int | None = getattr(command, "max_messages", None)
    most = max(int(getattr(command, "max_bytes", MAX_MESSAGE_BYTES)), MAX_MESSAGE_BYTES)
    return most if count is None else min(most, count * MAX_MESSAGE_BYTES)


def is_small(command: c.Command[Any]) -> bool:
    """Return whether a command takes little of a turn, whatever the queue has."""
    return (
        work_of(command) <= SMALL_WORK
        and size_of(command) <= MAX_MESSAGE_BYTES
        and largest_reply(command) <= MAX_MESSAGE_BYTES
    )
