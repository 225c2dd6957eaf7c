"""Commands that manage a namespace: entities, rules of subscriptions, access keys, the meter."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import get_args

import pyarrow as pa

from twinbus.entities import EntityDescription, RuleDescription, RuntimeProperties
from twinbus.limits import (
    MAX_ADDRESS_CHARACTERS,
    MAX_ID_CHARACTERS,
)
from twinbus.protocol.commands.command import Command, EntityCommand
from twinbus.protocol.keys import SharedAccessKey
from twinbus.values import check_optional_text, check_text, check_type


class EntityKind(Enum):
    """The kinds of entities that can be listed."""

    QUEUE = "queue"
    TOPIC = "topic"
    SUBSCRIPTION = "subscription"


@dataclass(frozen=True, slots=True)
class CreateEntity(Command[EntityDescription]):
    """Create a queue, topic or subscription."""

    description: EntityDescription
    rule: RuleDescription | None = None  # of a subscription, instead of the catch-all rule

    def __post_init__(self) -> None:
        check_type("description", self.description, *get_args(EntityDescription))
        check_type("rule", self.rule, RuleDescription, NoneType)


@dataclass(frozen=True, slots=True)
class UpdateEntity(Command[EntityDescription]):
    """Change those settings of an entity that are not fixed at its creation."""

    description: EntityDescription

    def __post_init__(self) -> None:
        check_type("description", self.description, *get_args(EntityDescription))


@dataclass(frozen=True, slots=True)
class DeleteEntity(EntityCommand[None]):
    """Delete an entity with all its messages."""


@dataclass(frozen=True, slots=True)
class GetEntity(EntityCommand[EntityDescription]):
    """Return the description of an entity."""


@dataclass(frozen=True, slots=True)
class ListEntities(Command[Sequence[EntityDescription]]):
    """List entities of a kind, ordered by path."""

    kind: EntityKind
    topic_path: str | None = None  # for subscriptions

    def __post_init__(self) -> None:
        check_type("kind", self.kind, EntityKind)
        check_optional_text("topic_path", self.topic_path, MAX_ADDRESS_CHARACTERS)


@dataclass(frozen=True, slots=True)
class GetRuntimeProperties(EntityCommand[RuntimeProperties]):
    """Return the counts and sizes of an entity."""


@dataclass(frozen=True, slots=True)
class CreateRule(EntityCommand[None]):
    """Add a rule to a subscription."""

    rule: RuleDescription

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_type("rule", self.rule, RuleDescription)


@dataclass(frozen=True, slots=True)
class UpdateRule(EntityCommand[None]):
    """Replace the filter and the action of a subscription's rule."""

    rule: RuleDescription

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_type("rule", self.rule, RuleDescription)


@dataclass(frozen=True, slots=True)
class DeleteRule(EntityCommand[None]):
    """Remove a rule from a subscription."""

    name: str

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_text("name", self.name, MAX_ADDRESS_CHARACTERS)


@dataclass(frozen=True, slots=True)
class ListRules(EntityCommand[Sequence[RuleDescription]]):
    """List the rules of a subscription, ordered by name."""


@dataclass(frozen=True, slots=True)
class ReadMeter(Command[pa.RecordBatch]):
    """Read the metered operations: a row per entity, kind of operation, purpose and outcome.

    The counts begin with the start of the broker.
    """


@dataclass(frozen=True, slots=True)
class PutKey(Command[None]):
    """Add a key, or replace the existing key that has the same name and entity path."""

    key: SharedAccessKey

    def __post_init__(self) -> None:
        check_type("key", self.key, SharedAccessKey)


@dataclass(frozen=True, slots=True)
class DeleteKey(Command[None]):
    """Remove a key; the tokens that were signed with it become invalid."""

    name: str
    entity_path: str | None = None  # None: a key of the namespace

    def __post_init__(self) -> None:
        check_text("name", self.name, MAX_ID_CHARACTERS)
        check_optional_text("entity_path", self.entity_path, MAX_ADDRESS_CHARACTERS)


@dataclass(frozen=True, slots=True)
class ListKeys(Command[Sequence[SharedAccessKey]]):
    """List all keys with their secrets, those of the namespace first."""
