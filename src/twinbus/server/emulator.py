"""Reads the configuration file of the official Service Bus emulator, which a server can replace.

    {"UserConfig": {"Namespaces": [{
        "Name": "sbemulatorns",
        "Queues": [{"Name": "orders", "Properties": {"LockDuration": "PT1M", ...}}],
        "Topics": [{"Name": "news", "Properties": {...}, "Subscriptions": [
            {"Name": "sport", "Properties": {...}, "Rules": [{"Name": "red", "Properties": {
                "FilterType": "Sql", "SqlFilter": {"SqlExpression": "colour = 'red'"},
                "Action": {"SqlExpression": "SET seen = 1"}}}]}]}]
    }]}}

Properties have the names and value formats of the administration API (entity_documents.py). An
unknown name is an error, which shows the name. Each namespace gets the emulator's fixed root key,
which is publicly known: a server with this key listens on loopback addresses only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twinbus.broker.entities.filters import compile_action, compile_filter
from twinbus.entities import (
    CorrelationFilter,
    FalseFilter,
    QueueDescription,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
)
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_MESSAGE_BYTES
from twinbus.protocol.keys import EMULATOR_SECRET, ROOT_KEY, Claim
from twinbus.server.config import Config, DeclaredEntity, DeclaredKey, text_of
from twinbus.servicebus.entity_documents import read_setting
from twinbus.servicebus.rule_documents import CORRELATION_FIELDS
from twinbus.values import shown

_ROOT: Final = DeclaredKey(ROOT_KEY, (Claim.MANAGE,), primary=EMULATOR_SECRET)


@dataclass(frozen=True, slots=True)
class EmulatedNamespace:
    """A namespace of the file."""

    name: str
    config: Config


def read_emulator_config(path: Path) -> list[EmulatedNamespace]:
    """Return the namespaces of a file, or raise an error that says what is wrong and where."""
    try:
        root = json.loads(text_of(path), object_pairs_hook=_without_repeats)
        user = _Table(_Table(root, "the file").table("UserConfig", required=True), "UserConfig")
        user.only("Namespaces", "Logging")
        found = [_namespace(path, table) for table in user.tables("Namespaces")]
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.text}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{path} is not a JSON file: {error}. Correct that line"
        ) from error
    names = [namespace.name.lower() for namespace in found]
    if not found or len(set(names)) < len(names):
        raise InvalidArgumentError(
            f"{path}: UserConfig.Namespaces has {shown(names)}; it must have at least one "
            "namespace, and no name twice"
        )
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(f"{shown(twice)} is given twice in one object; remove one")
    return table


class _Table:
    """An object of the file, with its position for error texts."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise InvalidArgumentError(
                f"{where} is {shown(values)}; it must be an object in braces"
            )
        self.values: Mapping[str, Any] = values
        self.where = where

    def only(self, *known: str) -> None:
        """Refuse unknown names."""
        unknown = [shown(name) for name in self.values if name not in known]
        if unknown:
            raise InvalidArgumentError(
                f"{self.where} has the unknown name {', '.join(unknown)}. The names are "
                f"{', '.join(known)}"
            )

    def table(self, name: str, *, required: bool = False) -> Any:
        """Return the object with a name, or an empty one if it is missing."""
        if required and name not in self.values:
            raise InvalidArgumentError(f"{self.where} has no {name}. Add it")
        return self.values.get(name, {})

    def text(self, name: str) -> str:
        """Return the text with a name."""
        value = self.values.get(name)
        if not isinstance(value, str) or not value:
            raise InvalidArgumentError(f"{self.where} needs a {name}, a text that is not empty")
        return value

    def tables(self, name: str) -> list["_Table"]:
        """Return the objects of a list, or none if it is missing or null."""
        values = self.values.get(name) or []
        if not isinstance(values, list):
            raise InvalidArgumentError(
                f"{name} of {self.where} is {shown(values)}; it must be a list"
            )
        kind = name.removesuffix("s").lower()
        return [_Table(value, f"{kind} {at} of {self.where}") for at, value in enumerate(values, 1)]

    def named(self) -> str:
        """Return the object's own name, and use that name in later error texts."""
        name = self.text("Name")
        kind, _, rest = self.where.partition(" ")
        self.where = f"{kind} {shown(name)} {rest.partition(' ')[2]}".strip()
        return name


def _namespace(path: Path, table: _Table) -> EmulatedNamespace:
    name = table.named()
    table.only("Name", "Queues", "Topics")
    entities = [_entity(QueueDescription, queue) for queue in table.tables("Queues")]
    for topic in table.tables("Topics"):
        made = _entity(TopicDescription, topic, "Subscriptions")
        entities.append(made)
        path_of_topic = made.description.path
        entities.extend(
            _subscription(path_of_topic, table) for table in topic.tables("Subscriptions")
        )
    return EmulatedNamespace(name, Config(tuple(entities), keys=(_ROOT,), file=path))


def _settings(table: _Table, kind: type[Any]) -> dict[str, Any]:
    """Return the settings of an entity by their names in Twinbus."""
    properties = _Table(table.table("Properties") or {}, f"Properties of {table.where}")
    settings: dict[str, Any] = {}
    for name, value in properties.values.items():
        if value is None or value == "":
            continue
        if not isinstance(value, str | int):
            raise InvalidArgumentError(
                f"{name} of {properties.where} is {shown(value)}; it must be text, a whole number, "
                "true or false"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        try:
            settings |= read_setting(kind, name, text, MAX_MESSAGE_BYTES)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{properties.where}: {error.text}") from error
    return settings


def _entity(
    kind: type[QueueDescription] | type[TopicDescription], table: _Table, *more: str
) -> DeclaredEntity:
    path = table.named()
    table.only("Name", "Properties", *more)
    return DeclaredEntity(_made(kind, table, path=path))


def _made(kind: type[Any], table: _Table, **names: str) -> Any:
    try:
        return kind(**names, **_settings(table, kind))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{table.where}: {error.text}") from error


def _subscription(topic: str, table: _Table) -> DeclaredEntity:
    name = table.named()
    table.only("Name", "Properties", "Rules")
    made = _made(SubscriptionDescription, table, topic_path=topic, name=name)
    return DeclaredEntity(made, tuple(_rule(rule) for rule in table.tables("Rules")))


def _rule(table: _Table) -> RuleDescription:
    name = table.named()
    table.only("Name", "Properties")
    properties = _Table(table.table("Properties") or {}, f"Properties of {table.where}")
    properties.only("FilterType", "SqlFilter", "CorrelationFilter", "Action")
    try:
        chosen = _filter(properties)
        compile_filter(chosen)
        action = None
        if properties.table("Action"):
            action = SqlAction(*_sql(properties, "Action"))
            compile_action(action)
        return RuleDescription(name, chosen, action)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{table.where}: {error.text}") from error


def _filter(properties: _Table) -> RuleFilter:
    kind = properties.values.get("FilterType")
    if kind == "Sql":
        return SqlFilter(*_sql(properties, "SqlFilter"))
    if kind == "Correlation":
        return _correlation(_Table(properties.table("CorrelationFilter"), "CorrelationFilter"))
    if kind in ("True", None):
        return TrueFilter()
    if kind == "False":
        return FalseFilter()
    raise InvalidArgumentError(
        f"FilterType is {shown(kind)}; it must be Sql, Correlation, True or False"
    )


def _sql(properties: _Table, name: str) -> tuple[str, Mapping[str, Any]]:
    """Return a SQL expression, and the values of its parameters."""
    table = _Table(properties.table(name), name)
    table.only("SqlExpression", "Parameters", "CompatibilityLevel", "RequiresPreprocessing")
    parameters = _Table(table.values.get("Parameters") or {}, f"Parameters of {name}").values
    for key, value in parameters.items():
        if not isinstance(value, str | int | float):
            raise InvalidArgumentError(
                f"Parameters of {name}: {shown(key)} is {shown(value)}; it must be text, a number, "
                "true or false"
            )
    return table.text("SqlExpression"), parameters


def _correlation(table: _Table) -> CorrelationFilter:
    table.only(*CORRELATION_FIELDS, "Properties")
    fields = {
        field: table.values[name]
        for name, field in CORRELATION_FIELDS.items()
        if table.values.get(name)
    }
    return CorrelationFilter(**fields, properties=table.table("Properties") or {})
