"""Backlog queues on the secondary: how they are found and made.

Pairing lists the existing queues first, makes those that are missing and checks that each of them
belongs to its primary. A secondary whose engine cannot list its queues is asked for each by name.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from twinbus.client.manager import NamespaceManager
from twinbus.clock import Clock, to_us
from twinbus.entities import QueueDescription, backlog_queue_path
from twinbus.errors import (
    EntityAlreadyExistsError,
    EntityNotFoundError,
    InvalidArgumentError,
    MessagingError,
    UnauthorizedError,
)
from twinbus.limits import (
    BACKLOG_SIZE_MEGABYTES,
    CREATE_PAUSE,
    CREATE_TRIES,
    DEFAULT_LOCK_DURATION,
    MAX_BACKLOG_QUEUES,
    MAX_MAX_DELIVERY_COUNT,
    UNLIMITED,
)
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.capabilities import Capability

_log = logging.getLogger("twinbus.pairing")
_INDEX = re.compile("0|[1-9][0-9]{0,8}")


def describe_backlog_queue(primary: PrimaryIdentity, index: int) -> QueueDescription:
    """Return a backlog queue as pairing makes it: large, without expiry, with its primary."""
    return QueueDescription(
        path=backlog_queue_path(primary.name, index),
        max_size_in_megabytes=BACKLOG_SIZE_MEGABYTES,
        max_delivery_count=MAX_MAX_DELIVERY_COUNT,
        default_message_time_to_live=UNLIMITED,
        auto_delete_on_idle=UNLIMITED,
        lock_duration=DEFAULT_LOCK_DURATION,
        enable_dead_lettering_on_message_expiration=True,
        enable_batched_operations=True,
        user_metadata=primary.to_metadata(),
    )


@dataclass(frozen=True, slots=True)
class BacklogQueues:
    """The backlog queues of a primary on its secondary."""

    paths: Mapping[int, str]  # by index: those below the count that a pairing asked for
    extra: Mapping[int, str]  # those with a higher index: neither filled nor drained


def find_backlog_queues(
    manager: NamespaceManager, primary: PrimaryIdentity, count: int
) -> BacklogQueues:
    """Return the backlog queues of a primary; raise if one of them names another primary.

    Extra queues of another primary are nobody's concern here: they are left out.
    """
    found = _existing_queues(manager, primary, count)
    used = {index: found[index] for index in sorted(found) if index < count}
    for queue in used.values():
        primary.check_owns(queue)
        if PrimaryIdentity.of_queue(queue) is None:
            _log.warning("%s names no primary; it is taken for one of %s", queue.path, primary)
    extra = {
        index: found[index].path
        for index in sorted(found)
        if index >= count and primary.owns(found[index])
    }
    return BacklogQueues({index: queue.path for index, queue in used.items()}, extra)


def _existing_queues(
    manager: NamespaceManager, primary: PrimaryIdentity, count: int
) -> dict[int, QueueDescription]:
    """Return the backlog queues that exist under the name of a primary, by index.

    Without a list, queues with an index of `count` or more are found up to the first gap.
    """
    if Capability.LISTING not in manager.courier.namespace.capabilities:
        return dict(_queues_by_name(manager, primary, count))
    prefix = backlog_queue_path(primary.name, 0).removesuffix("0").lower()
    found: dict[int, QueueDescription] = {}
    for queue in manager.list_queues():
        index = queue.path.lower().removeprefix(prefix)
        if queue.path.lower().startswith(prefix) and _INDEX.fullmatch(index):
            found[int(index)] = queue
    return found


def _queues_by_name(
    manager: NamespaceManager, primary: PrimaryIdentity, count: int
) -> Iterator[tuple[int, QueueDescription]]:
    for index in range(MAX_BACKLOG_QUEUES):
        try:
            yield index, manager.get_queue(backlog_queue_path(primary.name, index))
        except EntityNotFoundError:
            if index >= count:
                return


@dataclass(frozen=True, slots=True)
class PreparedBacklog:
    """The backlog queues that a pairing uses, and why some that it asked for are missing."""

    paths: dict[int, str]  # by index
    missing: Mapping[int, str]  # index -> cause


def prepare_backlog(
    manager: NamespaceManager, primary: PrimaryIdentity, count: int, clock: Clock
) -> PreparedBacklog:
    """Return the backlog queues of a primary; those that do not exist are made.

    Raises if none could be made, or if one of them belongs to another primary.
    """
    wanted = {index: describe_backlog_queue(primary, index) for index in range(count)}
    existing = _existing_queues(manager, primary, count)
    found = {index: existing[index] for index in wanted if index in existing}
    for queue in found.values():
        primary.check_owns(queue)
        _adopt(manager, primary, queue)
    missing = {
        index: "it requires sessions, which diverted messages do not have"
        for index, queue in found.items()
        if queue.requires_session
    }
    to_make = {index: queue for index, queue in wanted.items() if index not in found}
    failures = _create(manager, primary, to_make, clock)
    missing |= {index: str(error) for index, error in failures.items()}
    for index, cause in sorted(missing.items()):
        _log.warning("the backlog queue %s is not used: %s", wanted[index].path, cause)
    paths = {index: queue.path for index, queue in wanted.items() if index not in missing}
    if not paths and failures:
        raise next(iter(failures.values()))
    if not paths:
        raise InvalidArgumentError(
            f"every backlog queue of {primary.name} requires sessions, which diverted messages do "
            "not have. Delete these queues: pairing makes new ones"
        )
    return PreparedBacklog(paths, missing)


def _adopt(manager: NamespaceManager, primary: PrimaryIdentity, queue: QueueDescription) -> None:
    """Let a queue that names no primary name this one, so that no other takes it for its own."""
    if PrimaryIdentity.of_queue(queue) is not None:
        return
    metadata = primary.to_metadata(queue.user_metadata)
    try:
        manager.update_queue(replace(queue, user_metadata=metadata))
    except MessagingError as error:
        _log.warning("%s names no primary, and cannot be made to: %s", queue.path, error)


def _create(
    manager: NamespaceManager,
    primary: PrimaryIdentity,
    missing: Mapping[int, QueueDescription],
    clock: Clock,
) -> dict[int, MessagingError]:
    """Make queues, trying each three times; return why some could not be made."""
    failures: dict[int, MessagingError] = {}
    for tried in range(CREATE_TRIES):
        left = failures if tried else missing
        if tried and left:
            clock.sleep_us(to_us(CREATE_PAUSE))
        for index in list(left):
            try:
                manager.create_queue(missing[index])
            except (UnauthorizedError, InvalidArgumentError):
                raise
            except EntityAlreadyExistsError as error:
                try:  # another process was faster
                    primary.check_owns(manager.get_queue(missing[index].path))
                    failures.pop(index, None)
                except EntityNotFoundError:  # a topic has that path
                    failures[index] = error
            except MessagingError as error:
                failures[index] = error
            else:
                failures.pop(index, None)
    return failures
