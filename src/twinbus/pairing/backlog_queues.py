"""Finds and creates the backlog queues of a primary on its secondary.

Pairing lists the existing queues first, checks that each of them belongs to its primary, and
creates the missing ones. If the engine of the secondary cannot list queues, pairing looks each
queue up by name. Pairing calls this module from the thread that sets it up; the syphon calls
`find_backlog_queues` from its planner.
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
    """Return the description of a new backlog queue; its metadata names the primary."""
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

    paths: Mapping[int, str]  # by index: the queues below the count that the pairing asked for
    extra: Mapping[int, str]  # by index: the others; the pairing does not send to them


def find_backlog_queues(
    manager: NamespaceManager, primary: PrimaryIdentity, count: int
) -> BacklogQueues:
    """Return the backlog queues of a primary.

    Raises if a queue with an index below `count` names another primary. Queues with higher indices
    that name another primary are left out.
    """
    found = _existing_queues(manager, primary, count)
    used = {index: found[index] for index in sorted(found) if index < count}
    for queue in used.values():
        primary.check_owns(queue)
        if PrimaryIdentity.of_queue(queue) is None:
            _log.warning(
                "the backlog queue %s names no primary in its user_metadata; it is treated as a "
                "queue of %s",
                queue.path,
                primary,
            )
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

    If the engine cannot list queues, queues from index `count` on are found up to the first gap.
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
    """The backlog queues that a pairing uses, and why it cannot use the others."""

    paths: dict[int, str]  # by index
    missing: Mapping[int, str]  # index -> why the queue cannot be used


def prepare_backlog(
    manager: NamespaceManager, primary: PrimaryIdentity, count: int, clock: Clock
) -> PreparedBacklog:
    """Create the missing backlog queues of a primary, and return those that can be used.

    Raises if none can be used, or if one of them belongs to another primary.
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
        _log.warning("the pairing does not use the backlog queue %s: %s", wanted[index].path, cause)
    paths = {index: queue.path for index, queue in wanted.items() if index not in missing}
    if not paths and failures:
        raise next(iter(failures.values()))
    if not paths:
        raise InvalidArgumentError(
            f"every backlog queue of {primary.name} requires sessions, and diverted messages have "
            "no session. Delete these queues; the next pairing creates new ones"
        )
    return PreparedBacklog(paths, missing)


def _adopt(manager: NamespaceManager, primary: PrimaryIdentity, queue: QueueDescription) -> None:
    """Write this primary into the metadata of a queue without one, so that no other uses it."""
    if PrimaryIdentity.of_queue(queue) is not None:
        return
    metadata = primary.to_metadata(queue.user_metadata)
    try:
        manager.update_queue(replace(queue, user_metadata=metadata))
    except MessagingError as error:
        _log.warning(
            "the backlog queue %s names no primary in its user_metadata, and the update that adds "
            "%s failed: %s",
            queue.path,
            primary,
            error,
        )


def _create(
    manager: NamespaceManager,
    primary: PrimaryIdentity,
    missing: Mapping[int, QueueDescription],
    clock: Clock,
) -> dict[int, MessagingError]:
    """Create queues, trying each three times; return the last error of each that failed."""
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
                try:  # another process created it first
                    primary.check_owns(manager.get_queue(missing[index].path))
                    failures.pop(index, None)
                except EntityNotFoundError:  # a topic has that path
                    failures[index] = error
            except MessagingError as error:
                failures[index] = error
            else:
                failures.pop(index, None)
    return failures
