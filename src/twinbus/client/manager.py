"""Manages a namespace: entities, rules, runtime properties and access keys."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from os import urandom
from random import Random
from typing import Literal, Self, TypeVar

import pyarrow as pa

from twinbus.client.courier import NamespaceUser
from twinbus.client.retry import RetryPolicy
from twinbus.clock import Clock
from twinbus.connection import ConnectionString
from twinbus.entities import (
    EntityDescription,
    QueueDescription,
    RuleDescription,
    RuntimeProperties,
    SubscriptionDescription,
    TopicDescription,
    subscription_path,
)
from twinbus.errors import EntityAlreadyExistsError, EntityNotFoundError, InvalidArgumentError
from twinbus.limits import KEY_BYTES
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace
from twinbus.protocol.commands import (
    Command,
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
from twinbus.protocol.keys import Claim, SharedAccessKey, key_id

D = TypeVar("D", bound=EntityDescription)
R = TypeVar("R")


def new_secret() -> str:
    """Return a random secret for a key."""
    return base64.b64encode(urandom(KEY_BYTES)).decode()


def _kind(description: type[object]) -> str:
    """Return the word for a kind of entity: queue, topic or subscription."""
    return description.__name__.removesuffix("Description").lower()


class NamespaceManager(NamespaceUser):
    """Creates, describes, lists, changes and deletes entities, rules and keys of a namespace.

    With `exist_ok=True` a create method returns an existing entity unchanged: its settings and
    rules may differ from the requested ones. An existing entity of another kind is an error.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        address: str = "",
        retry_policy: RetryPolicy | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        super().__init__(namespace, retry_policy, clock, address=address, random=random)

    @classmethod
    def from_connection_string(
        cls, text: str, *, retry_policy: RetryPolicy | None = None, clock: Clock | None = None
    ) -> Self:
        """Return a manager of the namespace a connection string names."""
        connection = ConnectionString.parse(text)
        namespace = open_namespace(connection, clock)
        return cls(namespace, address=connection.address, retry_policy=retry_policy, clock=clock)

    def _ask(self, command: Command[R]) -> R:
        return self._courier.ask(command)

    def _get(self, path: str, kind: type[D]) -> D:
        found = self._ask(GetEntity(path))
        if not isinstance(found, kind):
            raise EntityNotFoundError(
                f"there is no {_kind(kind)} {path}: {path} is a {_kind(type(found))}. Use the "
                f"methods for a {_kind(type(found))}",
                path=path,
            )
        return found

    def _exists(self, path: str, kind: type[D]) -> bool:
        try:
            self._get(path, kind)
        except EntityNotFoundError:
            return False
        return True

    def _create(self, description: D, rule: RuleDescription | None = None, *, exist_ok: bool) -> D:
        try:
            self._ask(CreateEntity(description, rule))
        except EntityAlreadyExistsError:
            if not exist_ok:
                raise
            return self._get_existing(description)
        return self._get(description.path, type(description))

    def _get_existing(self, wanted: D) -> D:
        """Return the existing entity at the wanted path; raise if it is of another kind."""
        found = self._ask(GetEntity(wanted.path))
        if not isinstance(found, type(wanted)):
            raise EntityAlreadyExistsError(
                f"{found.path} exists already, as a {_kind(type(found))}. Choose another path for "
                f"the {_kind(type(wanted))}",
                path=found.path,
            )
        return found

    def _update(self, description: D) -> D:
        self._ask(UpdateEntity(description))
        return self._get(description.path, type(description))

    def _delete(self, path: str, kind: type[EntityDescription]) -> None:
        self._get(path, kind)
        self._ask(DeleteEntity(path))

    # -- queues --------------------------------------------------------------------------------

    def create_queue(
        self, queue: str | QueueDescription, *, exist_ok: bool = False
    ) -> QueueDescription:
        """Create a queue by its path, or as described."""
        wanted = QueueDescription(path=queue) if isinstance(queue, str) else queue
        return self._create(wanted, exist_ok=exist_ok)

    def get_queue(self, path: str) -> QueueDescription:
        """Describe a queue."""
        return self._get(path, QueueDescription)

    def update_queue(self, description: QueueDescription) -> QueueDescription:
        """Change the settings of a queue that are not fixed at creation."""
        return self._update(description)

    def delete_queue(self, path: str) -> None:
        """Delete a queue and its messages."""
        self._delete(path, QueueDescription)

    def queue_exists(self, path: str) -> bool:
        """Whether there is such a queue."""
        return self._exists(path, QueueDescription)

    def list_queues(self) -> list[QueueDescription]:
        """Return all queues, ordered by path."""
        found = self._ask(ListEntities(EntityKind.QUEUE))
        return [queue for queue in found if isinstance(queue, QueueDescription)]

    # -- topics --------------------------------------------------------------------------------

    def create_topic(
        self, topic: str | TopicDescription, *, exist_ok: bool = False
    ) -> TopicDescription:
        """Create a topic by its path, or as described."""
        wanted = TopicDescription(path=topic) if isinstance(topic, str) else topic
        return self._create(wanted, exist_ok=exist_ok)

    def get_topic(self, path: str) -> TopicDescription:
        """Describe a topic."""
        return self._get(path, TopicDescription)

    def update_topic(self, description: TopicDescription) -> TopicDescription:
        """Change the settings of a topic that are not fixed at creation."""
        return self._update(description)

    def delete_topic(self, path: str) -> None:
        """Delete a topic, its subscriptions and their messages."""
        self._delete(path, TopicDescription)

    def topic_exists(self, path: str) -> bool:
        """Whether there is such a topic."""
        return self._exists(path, TopicDescription)

    def list_topics(self) -> list[TopicDescription]:
        """Return all topics, ordered by path."""
        found = self._ask(ListEntities(EntityKind.TOPIC))
        return [topic for topic in found if isinstance(topic, TopicDescription)]

    # -- subscriptions -------------------------------------------------------------------------

    def create_subscription(
        self,
        topic_path: str,
        subscription: str | SubscriptionDescription,
        rule: RuleDescription | None = None,
        *,
        exist_ok: bool = False,
    ) -> SubscriptionDescription:
        """Subscribe to a topic; a given rule replaces the catch-all rule."""
        if isinstance(subscription, str):
            subscription = SubscriptionDescription(topic_path=topic_path, name=subscription)
        wanted = replace(subscription, topic_path=topic_path)
        return self._create(wanted, rule, exist_ok=exist_ok)

    def get_subscription(self, topic_path: str, name: str) -> SubscriptionDescription:
        """Describe a subscription."""
        return self._get(subscription_path(topic_path, name), SubscriptionDescription)

    def update_subscription(self, description: SubscriptionDescription) -> SubscriptionDescription:
        """Change the settings of a subscription that are not fixed at creation."""
        return self._update(description)

    def delete_subscription(self, topic_path: str, name: str) -> None:
        """Delete a subscription and its messages."""
        self._delete(subscription_path(topic_path, name), SubscriptionDescription)

    def subscription_exists(self, topic_path: str, name: str) -> bool:
        """Whether there is such a subscription."""
        return self._exists(subscription_path(topic_path, name), SubscriptionDescription)

    def list_subscriptions(self, topic_path: str) -> list[SubscriptionDescription]:
        """Return the subscriptions of a topic, ordered by name."""
        found = self._ask(ListEntities(EntityKind.SUBSCRIPTION, topic_path))
        return [entity for entity in found if isinstance(entity, SubscriptionDescription)]

    # -- rules ---------------------------------------------------------------------------------

    def create_rule(self, topic_path: str, name: str, rule: RuleDescription) -> None:
        """Add a rule to a subscription."""
        self._ask(CreateRule(subscription_path(topic_path, name), rule))

    def update_rule(self, topic_path: str, name: str, rule: RuleDescription) -> None:
        """Replace the filter and the action of the rule of that name."""
        self._ask(UpdateRule(subscription_path(topic_path, name), rule))

    def get_rule(self, topic_path: str, name: str, rule_name: str) -> RuleDescription:
        """Describe a rule of a subscription."""
        for rule in self.list_rules(topic_path, name):
            if rule.name.lower() == rule_name.lower():
                return rule
        raise EntityNotFoundError(
            f"the subscription {subscription_path(topic_path, name)} has no rule {rule_name}. List "
            "its rules with list_rules or `twinbus rule list`"
        )

    def delete_rule(self, topic_path: str, name: str, rule_name: str) -> None:
        """Remove a rule from a subscription."""
        self._ask(DeleteRule(subscription_path(topic_path, name), rule_name))

    def rule_exists(self, topic_path: str, name: str, rule_name: str) -> bool:
        """Whether a subscription has such a rule."""
        rules = self.list_rules(topic_path, name)
        return any(rule.name.lower() == rule_name.lower() for rule in rules)

    def list_rules(self, topic_path: str, name: str) -> Sequence[RuleDescription]:
        """Return the rules of a subscription, ordered by name."""
        return self._ask(ListRules(subscription_path(topic_path, name)))

    # -- runtime -------------------------------------------------------------------------------

    def get_runtime_properties(self, path: str) -> RuntimeProperties:
        """Return the current message counts, size and times of a queue, topic or subscription."""
        return self._ask(GetRuntimeProperties(path))

    def read_meter(self) -> pa.RecordBatch:
        """Return the operations since the start, one row per entity, kind and outcome."""
        return self._ask(ReadMeter())

    # -- keys ----------------------------------------------------------------------------------

    def create_key(
        self, name: str, claims: Sequence[Claim], entity_path: str | None = None
    ) -> SharedAccessKey:
        """Create a key with new secrets, for the namespace or for one queue or topic."""
        if any(key.id == key_id(name, entity_path) for key in self.list_keys()):
            raise EntityAlreadyExistsError(
                f"{entity_path or 'the namespace'} already has a key {name}. Choose another name, "
                "or regenerate the secrets of that key"
            )
        key = SharedAccessKey(
            name=name,
            claims=tuple(claims),
            primary=new_secret(),
            secondary=new_secret(),
            entity_path=entity_path,
        )
        self._ask(PutKey(key))
        return key

    def get_key(self, name: str, entity_path: str | None = None) -> SharedAccessKey:
        """Return a key with its secrets."""
        for key in self.list_keys():
            if key.id == key_id(name, entity_path):
                return key
        raise EntityNotFoundError(
            f"{entity_path or 'the namespace'} has no key {name}. List the keys with list_keys or "
            "`twinbus keys list`"
        )

    def list_keys(self) -> Sequence[SharedAccessKey]:
        """Return every key with its secrets; the keys of the namespace come first."""
        return self._ask(ListKeys())

    def regenerate_key(
        self, name: str, secret: Literal["primary", "secondary"], entity_path: str | None = None
    ) -> SharedAccessKey:
        """Replace one secret of a key; tokens signed with the other secret stay valid."""
        if secret not in ("primary", "secondary"):
            raise InvalidArgumentError(
                f"secret must be 'primary' or 'secondary', to say which secret of {name} to replace"
            )
        key = self.get_key(name, entity_path)
        if secret == "primary":  # noqa: S105 - which of the two, not a secret
            key = replace(key, primary=new_secret())
        else:
            key = replace(key, secondary=new_secret())
        self._ask(PutKey(key))
        return key

    def delete_key(self, name: str, entity_path: str | None = None) -> None:
        """Delete a key; its tokens are no longer valid."""
        self._ask(DeleteKey(name, entity_path))
