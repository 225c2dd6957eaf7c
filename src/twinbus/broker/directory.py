"""The entities of a namespace, by path and by number."""

from collections.abc import Iterator

from twinbus.broker.entity import Entity
from twinbus.broker.queue import Queue, Shared
from twinbus.broker.topic import Subscription, Topic
from twinbus.entities import (
    DEAD_LETTER_SUFFIX,
    SUBSCRIPTIONS,
    EntityDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import EntityNotFoundError, InvalidArgumentError
from twinbus.limits import MAX_FORWARD_HOPS

_DEAD_LETTER = DEAD_LETTER_SUFFIX.lower()


class Directory:
    """Finds entities and their queues."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._entities: dict[str, Entity] = {}  # by lower-case path
        self._queues: dict[int, Queue] = {}  # by number in the log
        self.next_number = 1

    def __iter__(self) -> Iterator[Entity]:
        return iter(list(self._entities.values()))

    def queues(self) -> list[Queue]:
        """Return every queue there is, dead-letter queues too."""
        return list(self._queues.values())

    def find(self, path: str) -> Entity | None:
        """Return the entity of a path, if there is one."""
        return self._entities.get(path.lower())

    def entity(self, path: str) -> Entity:
        """Return the entity of a path."""
        found = self.find(path) if isinstance(path, str) else None
        if found is None:
            raise EntityNotFoundError(
                f"there is no entity {path!r:.300}; create it first, or check the spelling",
                path=path,
            )
        return found

    def queue(self, path: str) -> tuple[Entity, Queue]:
        """Return the queue messages of a path are received from, and its entity."""
        if isinstance(path, str) and path.lower().endswith(_DEAD_LETTER):
            entity = self.entity(path[: -len(_DEAD_LETTER)])
            if entity.queue.dead_letter is not None:
                return entity, entity.queue.dead_letter
        else:
            entity = self.entity(path)
            if not isinstance(entity, Topic):
                return entity, entity.queue
        raise InvalidArgumentError(
            f"{path} is a topic; receive from one of its subscriptions, "
            f"{entity.description.path}{SUBSCRIPTIONS}name",
            path=path,
        )

    def queue_numbered(self, number: int) -> Queue | None:
        """Return the queue the log calls by this number."""
        return self._queues.get(number)

    def make(self, number: int, description: EntityDescription, now: int) -> Entity:
        """Return a new entity that is not in the directory yet."""
        kind: type[Entity] = Entity
        if isinstance(description, TopicDescription):
            kind = Topic
        elif isinstance(description, SubscriptionDescription):
            kind = Subscription
        return kind(number, description, self._shared, now)

    def add(self, entity: Entity) -> None:
        """Put an entity in."""
        self._entities[entity.description.path.lower()] = entity
        for queue in entity.queues:
            self._queues[queue.entity] = queue
        self.next_number = max(self.next_number, entity.number + 2)
        if isinstance(entity, Subscription):
            description = entity.description
            assert isinstance(description, SubscriptionDescription)
            topic = self.entity(description.topic_path)
            assert isinstance(topic, Topic)
            topic.subscriptions[description.name.lower()] = entity

    def remove(self, entity: Entity) -> None:
        """Take an entity out."""
        del self._entities[entity.description.path.lower()]
        for queue in entity.queues:
            del self._queues[queue.entity]
        if isinstance(entity.description, SubscriptionDescription):
            topic = self.find(entity.description.topic_path)
            if isinstance(topic, Topic):
                del topic.subscriptions[entity.description.name.lower()]

    def check_forwarding(self, description: EntityDescription) -> None:
        """Refuse a forward target that is missing, leads back, or is too far."""
        seen = [description.path.lower()]
        forward_to = getattr(description, "forward_to", None)
        while forward_to is not None:
            target = self.entity(forward_to)
            seen.append(target.description.path.lower())
            if seen[-1] in seen[:-1] or len(seen) > MAX_FORWARD_HOPS + 1:
                raise InvalidArgumentError(
                    f"forwarding {' -> '.join(seen)} leads back or takes more than "
                    f"{MAX_FORWARD_HOPS} steps",
                    path=description.path,
                )
            forward_to = target.forward_to
