"""Decides where each of a few messages goes, and stages them one by one, without columns.

The row path of sends (row_intake.py) calls this when each message needs a decision: because of a
time to live, a schedule, a session, duplicate detection, or the rules of a topic. The column path
(routing.py) makes the same decisions for whole batches. It handles every case that is not in the
table below, and every message that must be refused or dead-lettered.

    to a queue             one place: active, or scheduled
    to a topic             one place in each subscription that selects the message; a scheduled
                           message waits in the queue of the topic
"""

from collections.abc import Sequence

from twinbus.broker.entities.entity import Entity
from twinbus.broker.entities.topic import Topic
from twinbus.broker.lifecycle import TABLE, Cause, State
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.staging import PlannedPlace, stage_row
from twinbus.broker.store.commit import BatchTarget, Commit
from twinbus.broker.store.entry_rows import PlaceRow
from twinbus.broker.store.message_rows import MessageRows
from twinbus.clock import moment_us, to_us
from twinbus.limits import NEVER_US, PING_CONTENT_TYPE, ROWS_IN_LOG
from twinbus.message import LAST_MOMENT_US, BrokeredMessage, to_batch

_ENQUEUED, _SCHEDULED = Cause.ENQUEUED, Cause.SCHEDULED
_STATES = {cause: TABLE[State.PENDING, cause].value for cause in (_ENQUEUED, _SCHEDULED)}


def places_of(
    entity: Entity, message: BrokeredMessage, size: int, now: int
) -> list[PlannedPlace] | None:
    """Return the places of a message; None if the column path must decide.

    The caller has checked that the entity has no `forward_to`, and that the message fits into it.
    """
    if message.content_type == PING_CONTENT_TYPE or _is_refused(entity, message):
        return None
    queue, life = entity.queue, entity.queue.settings.time_to_live_us
    if message.time_to_live is not None:
        life = min(to_us(message.time_to_live), life)
    if message.scheduled_enqueue_time_utc is not None:
        due = moment_us(message.scheduled_enqueue_time_utc)
        if due > now:
            return [_place(queue, _SCHEDULED, due, life, message, size)]
    if isinstance(entity, Topic):
        return _copies(entity, message, size, life, now)
    return [_place(queue, _ENQUEUED, now, life, message, size)]


def _is_refused(entity: Entity, message: BrokeredMessage) -> bool:
    """Return whether the message must be refused.

    It lacks the session id that the entity requires, or its partition key is not its session id.
    """
    session_id, partition_key = message.session_id, message.partition_key
    if session_id is None:
        return entity.queue.settings.requires_session
    return partition_key is not None and partition_key != session_id


def _copies(
    topic: Topic, message: BrokeredMessage, size: int, life: int, now: int
) -> list[PlannedPlace] | None:
    """Return a place in each subscription that selects the message.

    Return None if the column path must decide.
    """
    places = []
    for subscription in topic.subscriptions.values():
        if not subscription.description.status.allows_send:
            continue
        rules, queue = subscription.selects, subscription.queue
        if rules is None or subscription.forward_to is not None:
            return None
        if not any(selects(message) for selects in rules):
            continue
        if message.session_id is None and queue.settings.requires_session:
            return None
        own_life = min(life, queue.settings.time_to_live_us)
        places.append(_place(queue, _ENQUEUED, now, own_life, message, size))
    return places


def _place(
    queue: Queue, cause: Cause, begins: int, life: int, message: BrokeredMessage, size: int
) -> PlannedPlace:
    expires = begins + life
    if expires > LAST_MOMENT_US:  # unlimited, or beyond the range of datetime
        expires = NEVER_US
    return PlannedPlace(queue, cause, begins, expires, size, message.session_id or "")


def stage_places(
    messages: Sequence[BrokeredMessage], places: Sequence[Sequence[PlannedPlace]], commit: Commit
) -> list[list[int]]:
    """Stage messages at their places; return the sequence numbers of each message.

    Scheduled messages get their numbers before the others, as on the column path.
    """
    numbers: list[list[int]] = [[] for _ in messages]
    stored = [index for index, found in enumerate(places) if found]
    if not stored:
        return numbers
    kept = [messages[index] for index in stored]
    content = MessageRows(kept) if len(kept) <= ROWS_IN_LOG else to_batch(kept)
    planned = [(row, place) for row, index in enumerate(stored) for place in places[index]]
    if len(planned) > 1:
        planned.sort(key=lambda item: item[1].cause is not _SCHEDULED)
    batch = commit.next_batch
    for row, place in planned:
        numbers[stored[row]].append(stage_row(place.queue, place, batch, row, commit))
    first = planned[0][1]
    if all(place.queue is first.queue and _is_active_for_ever(place) for _, place in planned):
        target = BatchTarget(first.queue.entity, numbers[stored[0]][0], first.enqueued)
        commit.add_batch(content, target)
        return numbers
    for row, index in enumerate(stored):
        for place, number in zip(places[index], numbers[index], strict=True):
            commit.tentative.places.append(_place_row(place, number, batch, row))
    commit.add_batch(content)
    return numbers


def _is_active_for_ever(place: PlannedPlace) -> bool:
    """Return whether the message is deliverable at once and never expires.

    The log needs no PlaceRow for such a message.
    """
    return place.cause is _ENQUEUED and place.expires == NEVER_US


def _place_row(place: PlannedPlace, number: int, batch: int, row: int) -> PlaceRow:
    queue, cause, begins, expires, size, _ = place
    due = begins if cause is _SCHEDULED else NEVER_US
    state = _STATES[cause]
    return PlaceRow(queue.entity, number, state, 0, begins, expires, due, size, -1, batch, row)
