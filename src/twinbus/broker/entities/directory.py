"""The entities of a namespace, by path and by number."""

from collections.abc import Iterator

from twinbus.broker.entities.entity import Entity
from twinbus.broker.entities.topic import Subscription, Topic
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.shared import QueueContext
from twinbus.entities import (
    DEAD_LETTER_SUFFIX,
    SUBSCRIPTIONS,
    EntityDescription,
    SubscriptionDescription,
    TopicDescription,
    dead_letter_path,
    forward_targets,
)
from twinbus.errors import EntityNotFoundError, InvalidArgumentError
from twinbus.limits import MAX_FORWARD_HOPS, MAX_FOUND_PATHS

_DEAD_LETTER = DEAD_LETTER_SUFFIX.lower()


class Directory:
    """Finds entities and their queues."""

    def __init__(self, shared: QueueContext) -> None:
        self._shared = shared
        self._entities: dict[str, Entity] = {}  # by lower-case path
        self._queues: dict[int, Queue] = {}  # by number in the log
        # By path as clients write it: the entity, and the queue of the path.
        self._found: dict[str, tuple[Entity, Queue]] = {}
        self.next_number = 1
        self.topics = 0  # number of topics

    def __iter__(self) -> Iterator[Entity]:
        return iter(list(self._entities.values()))

    def __len__(self) -> int:
        return len(self._entities)

    def queues(self) -> list[Queue]:
        """Return all queues, including dead-letter queues."""
        return list(self._queues.values())

    def find(self, path: str) -> Entity | None:
        """Return the entity of a path, or None."""
        return self._entities.get(path.lower())

    def entity(self, path: str) -> Entity:
        """Return the entity of a path; raise if there is none."""
        found = self._entities.get(path.lower()) if isinstance(path, str) else None
        if found is None:
            raise EntityNotFoundError(
                f"there is no entity {path!r:.300}; create it first, or check the spelling",
                path=path,
            )
        return found

    def queue(self, path: str) -> tuple[Entity, Queue]:
        """Return the entity of a path, and the queue from which its messages are received."""
        found = self._found.get(path)
        if found is None:
            found = self._search(path)
            if len(self._found) >= MAX_FOUND_PATHS:
                self._found.clear()
            self._found[path] = found
        return found

    def _search(self, path: str) -> tuple[Entity, Queue]:
        if isinstance(path, str) and path.lower().endswith(_DEAD_LETTER):
            entity = self.entity(path[: -len(_DEAD_LETTER)])
            if entity.queue.dead_letter is not None:
                return entity, entity.queue.dead_letter
        else:
            entity = self.entity(path)
            if not isinstance(entity, Topic):
                return entity, entity.queue
        raise InvalidArgumentError(
            f"{entity.description.path} is a topic; only its subscriptions have messages. Use the "
            f"path of a subscription, {entity.description.path}{SUBSCRIPTIONS}name",
            path=path,
        )

    def browsed(self, path: str) -> tuple[Entity, Queue]:
        """Return an entity and its queue to browse; that of a topic has scheduled messages."""
        entity = self.find(path) if isinstance(path, str) else None
        return (entity, entity.queue) if isinstance(entity, Topic) else self.queue(path)

    def metered_path(self, path: str) -> str:
        """Return the path under which operations are metered: an unknown path becomes ""."""
        found = self._found.get(path)
        if found is not None:
            entity, queue = found
            known = entity.description.path
            return known if queue is entity.queue else dead_letter_path(known)
        name = path.lower()
        named = self.find(name.removesuffix(_DEAD_LETTER))
        if named is None:
            return ""
        known = named.description.path
        return dead_letter_path(known) if name.endswith(_DEAD_LETTER) else known

    def queue_numbered(self, number: int) -> Queue | None:
        """Return the queue with this number in the log; None if it was deleted."""
        return self._queues.get(number)

    def make(self, number: int, description: EntityDescription, now: int) -> Entity:
        """Return a new entity; `add` puts it into the directory."""
        kind: type[Entity] = Entity
        if isinstance(description, TopicDescription):
            kind = Topic
        elif isinstance(description, SubscriptionDescription):
            kind = Subscription
        return kind(number, description, self._shared, now)

    def add(self, entity: Entity) -> None:
        """Add an entity and its queues; a subscription is also added to its topic."""
        self._found.clear()
        self._entities[entity.description.path.lower()] = entity
        for queue in entity.queues:
            self._queues[queue.entity] = queue
        self.next_number = max(self.next_number, entity.number + 2)
        self.topics += isinstance(entity, Topic)
        if isinstance(entity, Subscription):
            description = entity.description
            assert isinstance(description, SubscriptionDescription)
            topic = self.entity(description.topic_path)
            assert isinstance(topic, Topic)
            topic.subscriptions[description.name.lower()] = entity

    def remove(self, entity: Entity) -> None:
        """Remove an entity and its queues; a subscription is also removed from its topic."""
        self._found.clear()
        del self._entities[entity.description.path.lower()]
        self.topics -= isinstance(entity, Topic)
        for queue in entity.queues:
            del self._queues[queue.entity]
            queue.waiting.leave_count()
        if entity.history is not None:
            entity.history.leave_count()
        if isinstance(entity.description, SubscriptionDescription):
            topic = self.find(entity.description.topic_path)
            if isinstance(topic, Topic):
                del topic.subscriptions[entity.description.name.lower()]

    def check_forwarding(self, description: EntityDescription) -> None:
        """Raise if a forward target is missing, forms a cycle, or makes a chain too long."""
        targets = forward_targets(description)
        if not targets:
            return
        for target in targets:
            self.entity(target)
        steps = {path: self._targets(entity.description) for path, entity in self._entities.items()}
        steps[description.path.lower()] = self._targets(description)
        if isinstance(description, SubscriptionDescription):
            steps[description.topic_path.lower()].add(description.path.lower())
        for path in steps:
            _check_chain(path, steps, ())

    def _targets(self, description: EntityDescription) -> set[str]:
        """Return the entities to which messages or dead letters of an entity go."""
        if isinstance(description, TopicDescription):
            topic = self.find(description.path)
            subscriptions = topic.subscriptions.values() if isinstance(topic, Topic) else ()
            return {subscription.description.path.lower() for subscription in subscriptions}
        return {target.lower() for target in forward_targets(description)}


def _check_chain(path: str, steps: dict[str, set[str]], chain: tuple[str, ...]) -> None:
    """Follow every chain of forwarding from `path` on; raise for a cycle or too many hops."""
    if path in chain:
        raise InvalidArgumentError(
            f"forwarding {' -> '.join((*chain, path))} contains a cycle. Forward to an entity "
            "outside of this cycle"
        )
    chain = (*chain, path)
    hops = sum(SUBSCRIPTIONS.lower() not in step for step in chain[1:])
    if hops > MAX_FORWARD_HOPS:
        raise InvalidArgumentError(
            f"forwarding {' -> '.join(chain)} takes more than {MAX_FORWARD_HOPS} hops. "
            "Shorten the chain: forward directly to an entity at its end"
        )
    for onward in steps.get(path, ()):
        _check_chain(onward, steps, chain)
