"""Manages entities, rules and access keys. A change takes effect when it is durable.

The namespace calls this in a turn, each command isolated from the others (turn/isolation.py).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from twinbus.broker.entities.directory import Directory
from twinbus.broker.entities.entity import Entity
from twinbus.broker.entities.topic import Rule, Subscription, Topic
from twinbus.broker.queue.answers import refuse_waiting
from twinbus.broker.store.commit import Commit, Effect, Fact
from twinbus.entities import (
    BACKLOG_INFIX,
    DEFAULT_RULE,
    FORWARDING,
    EntityDescription,
    QueueDescription,
    RuleDescription,
    RuntimeProperties,
    SubscriptionDescription,
    TopicDescription,
    is_backlog_folder,
)
from twinbus.errors import (
    EntityAlreadyExistsError,
    EntityNotFoundError,
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
    QuotaExceededError,
    UnauthorizedError,
)
from twinbus.limits import (
    BACKLOG_SIZE_MEGABYTES,
    LIKE_OPERATORS,
    MAX_BACKLOG_QUEUES,
    MAX_ENTITIES,
    MAX_KEYS,
    MAX_RULES,
    MAX_SUBSCRIPTION_OPERATORS,
    MAX_SUBSCRIPTIONS,
    MAX_TOPIC_OPERATORS,
    PARTITION_COUNT,
)
from twinbus.plain import Kinds, Plain
from twinbus.protocol import commands as c
from twinbus.protocol.access import AccessKeys, Principal
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.meter import Meter
from twinbus.protocol.requests import Request

_FIXED = ("requires_session", "requires_duplicate_detection", "enable_partitioning")
_KINDS: dict[c.EntityKind, type] = {
    c.EntityKind.QUEUE: QueueDescription,
    c.EntityKind.TOPIC: TopicDescription,
    c.EntityKind.SUBSCRIPTION: SubscriptionDescription,
}
_KEYS = Plain(Kinds([SharedAccessKey, Claim]))
_LIST_RULES = "List its rules with list_rules or `twinbus rule list`"
_LIST_KEYS = "List the keys with list_keys or `twinbus keys list`"


@dataclass(frozen=True, slots=True)
class _Created(Effect):
    """A new entity."""

    management: "Management"
    entity: Entity

    def durable(self) -> None:
        """Add the entity to the directory."""
        self.management.directory.add(self.entity)
        self.management.adopt(self.entity)


@dataclass(frozen=True, slots=True)
class _Updated(Effect):
    """An entity with new settings."""

    management: "Management"
    entity: Entity
    description: EntityDescription
    now: int
    commit: Commit

    def durable(self) -> None:
        """Apply the settings; refuse waiting requests if the entity no longer allows receives."""
        self.entity.update(self.description, self.now)
        self.management.adopt(self.entity)
        try:
            self.entity.check_receive()
        except MessagingError as error:
            refuse_waiting(self.entity.queue, error, self.commit)


@dataclass(frozen=True, slots=True)
class _Removed(Effect):
    """Entities that are deleted, and the keys of these entities."""

    management: "Management"
    entities: Sequence[Entity]
    keys: Sequence[SharedAccessKey]
    commit: Commit

    def durable(self) -> None:
        """Remove the entities and keys; drop the messages, and refuse waiting requests."""
        for key in self.keys:
            self.management.keys.remove(key)
        directory = self.management.directory
        for entity in self.entities:
            if directory.find(entity.description.path) is entity:  # no other command removed it
                directory.remove(entity)
                for queue in entity.queues:
                    queue.dissolve(self.commit)


@dataclass(frozen=True, slots=True)
class _RulesChanged(Effect):
    """A subscription with changed rules."""

    subscription: Subscription
    rules: dict[str, Rule]
    now: int

    def durable(self) -> None:
        """Apply the rules."""
        self.subscription.use_rules(self.rules)
        self.subscription.updated_us = self.now


@dataclass(frozen=True, slots=True)
class _KeyPut(Effect):
    """A key that is added or replaced."""

    keys: AccessKeys
    key: SharedAccessKey

    def durable(self) -> None:
        """Accept the key."""
        self.keys.put(self.key)


@dataclass(frozen=True, slots=True)
class _KeyRemoved(Effect):
    """A key that is removed."""

    keys: AccessKeys
    key: SharedAccessKey

    def durable(self) -> None:
        """Stop accepting the key."""
        self.keys.remove(self.key)


class Management:
    """Executes the commands that need the claim manage; protocol/table.py names their methods."""

    def __init__(
        self,
        directory: Directory,
        keys: AccessKeys,
        meter: Meter,
        adopt: Callable[[Entity], None],
        nonce: Callable[[], str],
    ) -> None:
        self._meter = meter
        self.directory = directory
        self.keys = keys
        self.adopt = adopt  # called for each entity that is new or has new settings
        self._nonce = nonce

    # -- entities ------------------------------------------------------------------------------

    def create_entity(
        self, command: c.CreateEntity, request: Request, now: int, commit: Commit
    ) -> EntityDescription:
        """Create a queue, topic or subscription."""
        description = command.description
        self._check_forward(description, None, request.principal)
        if self.directory.find(description.path) is not None:
            raise EntityAlreadyExistsError(
                f"{description.path} exists already. Choose another path, or update the entity",
                path=description.path,
            )
        if isinstance(description, SubscriptionDescription):
            topic = self.directory.entity(description.topic_path)
            if not isinstance(topic, Topic):
                raise InvalidArgumentError(
                    f"{description.topic_path} is not a topic, and only topics have subscriptions; "
                    "set topic_path to the path of a topic"
                )
            if len(topic.subscriptions) >= MAX_SUBSCRIPTIONS:
                raise QuotaExceededError(
                    f"{topic.description.path} has {MAX_SUBSCRIPTIONS} subscriptions, the maximum; "
                    "delete some first"
                )
            description = replace(description, topic_path=topic.description.path)
        elif command.rule is not None:
            raise InvalidArgumentError(
                f"{description.path} cannot have a rule: only a subscription can be created with a "
                "rule. Omit the rule"
            )
        self._check_folder(description, request.principal)
        if len(self.directory) >= MAX_ENTITIES:
            raise QuotaExceededError(
                f"the namespace has {MAX_ENTITIES} entities, the maximum; delete some first"
            )
        self.directory.check_forwarding(description)
        entity = self.directory.make(self.directory.next_number, description, now)
        entity.birth = self._nonce()
        if isinstance(entity, Subscription):
            rule = Rule.compile(command.rule or RuleDescription(DEFAULT_RULE))
            entity.use_rules({rule.description.name.lower(): rule})
            self._check_operators(entity, 0)
        self._stage_fact(entity, commit)
        commit.effects.append(_Created(self, entity))
        return description

    def _check_folder(self, description: EntityDescription, principal: Principal) -> None:
        """Raise if a key of a backlog folder creates more or larger entities than a pairing needs.

        A key that manages the namespace has no such bounds.
        """
        if principal.may(Claim.MANAGE, None):
            return
        stores = PARTITION_COUNT if getattr(description, "enable_partitioning", False) else 1
        size = getattr(description, "max_size_in_megabytes", 0) * stores
        if size > BACKLOG_SIZE_MEGABYTES:
            raise UnauthorizedError(
                f"{description.path} would have {size} megabytes over all its message stores; a "
                f"key of a folder of backlog queues may use at most {BACKLOG_SIZE_MEGABYTES}. Use "
                "a key that manages the whole namespace",
                claim=Claim.MANAGE.value,
                path=description.path,
            )
        folder = description.path.lower().partition(BACKLOG_INFIX)[0] + BACKLOG_INFIX
        count = sum(e.description.path.lower().startswith(folder) for e in self.directory)
        if count >= MAX_BACKLOG_QUEUES:
            raise QuotaExceededError(
                f"the folder {folder.rstrip('/')} has {count} entities, and a key of the folder "
                f"may create at most {MAX_BACKLOG_QUEUES}. Delete some, or use a key that manages "
                "the whole namespace",
                path=description.path,
            )

    def _stage_fact(self, entity: Entity, commit: Commit) -> None:
        """Add the current state of an entity to the commit."""
        commit.tentative.facts.append(Fact("entity", str(entity.number), entity.to_fact()))
        commit.must_sync = True

    def _check_forward(
        self,
        description: EntityDescription,
        current: EntityDescription | None,
        principal: Principal,
    ) -> None:
        """Raise if a forward target is new and the principal may not send to it.

        The error is the same whether or not the target exists.
        """
        for setting in FORWARDING:
            target = getattr(description, setting, None)
            if target is None or target == getattr(current, setting, None):
                continue
            if not principal.may(Claim.SEND, target):
                raise UnauthorizedError(
                    f"forwarding to {target} needs the claim send there; use a key that has it",
                    claim=Claim.SEND.value,
                    path=target,
                )

    def _check_growth(
        self, description: EntityDescription, current: EntityDescription, principal: Principal
    ) -> None:
        """Raise if a principal that cannot manage the namespace raises a quota.

        All entities share the disk.
        """
        name = "max_size_in_megabytes"
        grows = getattr(description, name, 0) > getattr(current, name, 0)
        if grows and not principal.may(Claim.MANAGE, None):
            raise UnauthorizedError(
                f"raising {name} of {current.path} needs a key that manages the whole namespace",
                claim=Claim.MANAGE.value,
                path=current.path,
            )

    def update_entity(
        self, command: c.UpdateEntity, request: Request, now: int, commit: Commit
    ) -> EntityDescription:
        """Change the settings that are not fixed at creation."""
        description, principal = command.description, request.principal
        entity = self.directory.entity(description.path)
        current = entity.description
        self._check_forward(description, current, principal)
        if type(current) is not type(description):
            raise InvalidArgumentError(
                f"{current.path} cannot be updated with a {type(description).__name__}. Use a "
                f"{type(current).__name__}"
            )
        self._check_growth(description, current, principal)
        for name in _FIXED:
            if getattr(current, name, None) != getattr(description, name, None):
                raise InvalidArgumentError(
                    f"{name} of {current.path} is fixed at creation; to change it, delete the "
                    "entity with its messages and create it again"
                )
        if isinstance(current, SubscriptionDescription):
            assert isinstance(description, SubscriptionDescription)
            description = replace(description, topic_path=current.topic_path, name=current.name)
        elif not isinstance(description, SubscriptionDescription):
            description = replace(description, path=current.path)
        self.directory.check_forwarding(description)
        changed = self.directory.make(entity.number, description, entity.created_us)
        changed.updated_us, changed.birth = now, entity.birth
        if isinstance(entity, Subscription) and isinstance(changed, Subscription):
            changed.use_rules(entity.rules)
        self._stage_fact(changed, commit)
        commit.effects.append(_Updated(self, entity, description, now, commit))
        return description

    def delete_entity(self, command: c.DeleteEntity, _: Request, __: int, commit: Commit) -> None:
        """Delete an entity by its path."""
        self.delete(self.directory.entity(command.path), commit)

    def get_entity(self, command: c.GetEntity, *_: object) -> EntityDescription:
        """Return the description of an entity."""
        return self.directory.entity(command.path).description

    def get_runtime_properties(
        self, command: c.GetRuntimeProperties, *_: object
    ) -> RuntimeProperties:
        """Return the counts and sizes of an entity."""
        return self.directory.entity(command.path).runtime()

    def delete(self, entity: Entity, commit: Commit) -> None:
        """Delete an entity and its keys; a topic is deleted with its subscriptions."""
        doomed: list[Entity] = [entity]
        if isinstance(entity, Topic):
            doomed = [*entity.subscriptions.values(), entity]
        for gone in doomed:
            commit.tentative.facts.append(Fact("entity", str(gone.number), None))
        keys = [key for key in self.keys.all() if key.entity_path == entity.description.path]
        commit.tentative.facts.extend(Fact("key", key.id, None) for key in keys)
        commit.must_sync = True
        commit.effects.append(_Removed(self, doomed, keys, commit))

    def list_entities(
        self, command: c.ListEntities, request: Request, *_: object
    ) -> Sequence[EntityDescription]:
        """List the entities of a kind that the principal may manage, ordered by path."""
        principal = request.principal
        kind = _KINDS[command.kind]
        found = [e.description for e in self.directory if isinstance(e.description, kind)]
        if not principal.may(Claim.MANAGE, None):  # a key of a folder sees only its entities
            found = [d for d in found if principal.may(Claim.MANAGE, d.path)]
        elif command.topic_path is not None:
            topic = self.directory.entity(command.topic_path)
            found = [d for d in found if getattr(d, "topic_path", None) == topic.description.path]
        return sorted(found, key=lambda description: description.path.lower())

    # -- rules ---------------------------------------------------------------------------------

    def _subscription(self, path: str) -> Subscription:
        entity = self.directory.entity(path)
        if not isinstance(entity, Subscription):
            raise InvalidOperationError(
                f"{path} is not a subscription, and only subscriptions have rules; use a path such "
                "as news/Subscriptions/sport"
            )
        return entity

    def create_rule(self, command: c.CreateRule, _: Request, now: int, commit: Commit) -> None:
        """Add a rule to a subscription."""
        subscription = self._subscription(command.path)
        key = command.rule.name.lower()
        if key in subscription.rules:
            raise EntityAlreadyExistsError(
                f"{command.path} has a rule {command.rule.name} already; update or delete this "
                "rule, or choose another name"
            )
        if len(subscription.rules) >= MAX_RULES:
            raise QuotaExceededError(
                f"{command.path} has {MAX_RULES} rules, the maximum; delete some first"
            )
        rule = Rule.compile(command.rule)
        self._change_rules(subscription, subscription.rules | {key: rule}, now, commit)

    def update_rule(self, command: c.UpdateRule, _: Request, now: int, commit: Commit) -> None:
        """Replace a rule; each message is evaluated with either the old or the new rule."""
        subscription = self._subscription(command.path)
        key = command.rule.name.lower()
        current = subscription.rules.get(key)
        if current is None:
            raise EntityNotFoundError(
                f"{command.path} has no rule {command.rule.name}. {_LIST_RULES}"
            )
        rule = Rule.compile(replace(command.rule, name=current.description.name))
        self._change_rules(subscription, subscription.rules | {key: rule}, now, commit)

    def delete_rule(self, command: c.DeleteRule, _: Request, now: int, commit: Commit) -> None:
        """Remove a rule from a subscription."""
        subscription = self._subscription(command.path)
        key = command.name.lower()
        if key not in subscription.rules:
            raise EntityNotFoundError(f"{command.path} has no rule {command.name}. {_LIST_RULES}")
        left = {name: rule for name, rule in subscription.rules.items() if name != key}
        self._change_rules(subscription, left, now, commit)

    def list_rules(self, command: c.ListRules, *_: object) -> Sequence[RuleDescription]:
        """List the rules of a subscription, ordered by name."""
        rules = self._subscription(command.path).rules
        return [rules[name].description for name in sorted(rules)]

    def _change_rules(
        self, subscription: Subscription, rules: dict[str, Rule], now: int, commit: Commit
    ) -> None:
        """Give a subscription these rules when the commit is durable."""
        number, description = subscription.number, subscription.description
        changed = self.directory.make(number, description, subscription.created_us)
        assert isinstance(changed, Subscription)
        changed.updated_us, changed.birth = now, subscription.birth
        changed.use_rules(rules)
        self._check_operators(changed, subscription.operators)
        self._stage_fact(changed, commit)
        commit.effects.append(_RulesChanged(subscription, rules, now))

    def _check_operators(self, changed: Subscription, before: int) -> None:
        """Raise if the rules of a subscription or of its topic would have too many operators.

        `before` is the current number of operators of the subscription. A change that does not
        raise this number is always allowed.
        """
        if changed.operators <= before:
            return
        path = changed.description.path
        assert isinstance(changed.description, SubscriptionDescription)
        topic = self.directory.entity(changed.description.topic_path)
        assert isinstance(topic, Topic)
        of_topic = topic.operators - before + changed.operators
        for name, count, most in (
            (path, changed.operators, MAX_SUBSCRIPTION_OPERATORS),
            (topic.description.path, of_topic, MAX_TOPIC_OPERATORS),
        ):
            if count > most:
                raise QuotaExceededError(
                    f"the rules of {name} would have {count} operators; at most {most} are "
                    "allowed, because all of them are evaluated for every message. LIKE counts as "
                    f"{LIKE_OPERATORS}. Simplify rules, or delete some",
                    path=name,
                )

    # -- keys ----------------------------------------------------------------------------------

    def put_key(self, command: c.PutKey, _: Request, __: int, commit: Commit) -> None:
        """Add a key, or replace the key that has the same name."""
        key = command.key
        if key.entity_path is not None and not is_backlog_folder(key.entity_path):
            entity = self.directory.entity(key.entity_path)
            if isinstance(entity, Subscription):
                raise InvalidArgumentError(
                    f"{key.entity_path} is a subscription; create a key of its topic instead"
                )
            key = replace(key, entity_path=entity.description.path)
        if len(self.keys) >= MAX_KEYS and self.keys.get(key.name, key.entity_path) is None:
            raise QuotaExceededError(
                f"the namespace has {MAX_KEYS} keys, the maximum; delete some first"
            )
        if not key.has(Claim.MANAGE):
            self._check_not_last(self.keys.get(key.name, key.entity_path))
        commit.tentative.facts.append(key_fact(key))
        commit.must_sync = True
        commit.effects.append(_KeyPut(self.keys, key))

    def delete_key(self, command: c.DeleteKey, _: Request, __: int, commit: Commit) -> None:
        """Remove a key."""
        key = self.keys.get(command.name, command.entity_path)
        where = command.entity_path or "the namespace"
        if key is None:
            raise EntityNotFoundError(f"{where} has no key {command.name}. {_LIST_KEYS}")
        self._check_not_last(key)
        commit.tentative.facts.append(Fact("key", key.id, None))
        commit.must_sync = True
        commit.effects.append(_KeyRemoved(self.keys, key))

    def list_keys(self, *_: object) -> list[SharedAccessKey]:
        """List all keys; the keys of the namespace are first."""
        return self.keys.all()

    def read_meter(self, *_: object) -> pa.RecordBatch:
        """Return the operations metered since the start."""
        return self._meter.table()

    def _check_not_last(self, key: SharedAccessKey | None) -> None:
        """Raise if this is the last key that can manage the namespace; None is no key."""
        managing = [k for k in self.keys.all() if k.entity_path is None and k.has(Claim.MANAGE)]
        if key is not None and managing == [key]:
            raise InvalidOperationError(
                f"{key.name} is the last key that can manage the namespace; create another first"
            )


def key_fact(key: SharedAccessKey) -> Fact:
    """Return a key in the form of the log; only the owner of the log's files can read them."""
    return Fact.of("key", key.id, _KEYS.dump(key))


def key_of(fact: bytes) -> SharedAccessKey:
    """Return the key in the value of a fact."""
    key: SharedAccessKey = _KEYS.load(json.loads(fact))
    return key
