"""The configuration file of a server: which entities there shall be, and how much it takes.

    [limits]
    max_message_bytes = 262144
    max_connections = 1000
    open_receives = 10000
    operations_per_second = 5000

    [ledger]
    retention = "90d"
    roll_interval = "1m"

    [[queue]]
    path = "orders"
    lock_duration = "30s"

    [[topic]]
    path = "news"

    [[subscription]]
    topic_path = "news"
    name = "sport"
    rules = [{ name = "sport", sql = "category = 'sport'" }]

Entities of the file are made when they are missing and get its settings when they differ; rules are
added when they are missing. What the file does not name is left alone.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from twinbus.broker.commands import CreateEntity, CreateRule, GetEntity, ListRules, UpdateEntity
from twinbus.broker.throttle import Thresholds
from twinbus.entities import (
    EntityDescription,
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import EntityNotFoundError, InvalidArgumentError
from twinbus.ledger import LedgerSettings
from twinbus.limits import MAX_CONNECTIONS, MAX_MESSAGE_BYTES
from twinbus.namespace.contract import Namespace
from twinbus.spans import parse_span

_KINDS: Mapping[str, type[EntityDescription]] = {
    "queue": QueueDescription,
    "topic": TopicDescription,
    "subscription": SubscriptionDescription,
}
_D = TypeVar("_D")


@dataclass(frozen=True, slots=True)
class Declared:
    """An entity of the file."""

    description: EntityDescription
    rules: tuple[RuleDescription, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """What the file says."""

    entities: tuple[Declared, ...] = ()
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_connections: int = MAX_CONNECTIONS
    thresholds: Thresholds = field(default_factory=Thresholds)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)


def read_config(path: Path) -> Config:
    """Read a configuration file, or say what is wrong with it and where."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgumentError(f"the configuration {path} cannot be read: {error}") from error
    try:
        return _config(found)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.text}") from error


def _config(found: Mapping[str, Any]) -> Config:
    unknown = sorted(set(found) - {"limits", "ledger", *_KINDS})
    if unknown:
        raise InvalidArgumentError(
            f"there is no section {unknown[0]!r}; there are: limits, ledger, {', '.join(_KINDS)}"
        )
    declared = []
    for kind in _KINDS:
        tables = found.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise InvalidArgumentError(f"write [[{kind}]], with two brackets, for each {kind}")
        declared += [_declared(kind, table) for table in tables]
    limits = found.get("limits", {})
    own = {"max_message_bytes", "max_connections"}
    names = own | {f.name for f in fields(Thresholds)}
    if not isinstance(limits, dict):
        raise InvalidArgumentError("write the limits under [limits]")
    for name, value in limits.items():
        if name not in names:
            raise InvalidArgumentError(
                f"there is no limit {name!r}; there are: {', '.join(sorted(names))}"
            )
        if type(value) not in (int, float) or not value > 0:
            raise InvalidArgumentError(f"limits.{name} is {value!r}; it must be a number above 0")
    thresholds = {name: value for name, value in limits.items() if name not in own}
    return Config(
        tuple(declared),
        limits.get("max_message_bytes", MAX_MESSAGE_BYTES),
        limits.get("max_connections", MAX_CONNECTIONS),
        Thresholds(**thresholds),
        _ledger(found.get("ledger", {})),
    )


def _ledger(table: Any) -> LedgerSettings:
    if not isinstance(table, dict):
        raise InvalidArgumentError("write the settings of the ledger under [ledger]")
    for name in ("is_on", "messages"):
        if not isinstance(table.get(name, True), bool):
            raise InvalidArgumentError(f"ledger.{name} is {table[name]!r}; write true or false")
    return settings_from(LedgerSettings, table)


def _declared(kind: str, table: dict[str, Any]) -> Declared:
    settings = dict(table)
    rules = settings.pop("rules", [])
    if rules and kind != "subscription":
        raise InvalidArgumentError(f"a {kind} has no rules; only a subscription has")
    if not isinstance(rules, list):
        raise InvalidArgumentError(
            "write rules as a list; a rule has a name, a sql condition and maybe an action"
        )
    try:
        return Declared(settings_from(_KINDS[kind], settings), tuple(map(_rule, rules)))
    except InvalidArgumentError as error:
        name = table.get("path") or table.get("name") or "without a name"
        raise InvalidArgumentError(f"{kind} {name!r:.80}: {error.text}") from error


def settings_from(kind: type[_D], settings: Mapping[str, Any]) -> _D:
    """Return a description from settings as people write them."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            raise InvalidArgumentError(
                f"there is no setting {name!r}; there are: {', '.join(known)}"
            )
        if known[name].type is timedelta and isinstance(value, str):
            values[name] = parse_span(value)
        elif known[name].type is EntityStatus:
            values[name] = _status(value)
        else:
            values[name] = value
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidArgumentError(f"a setting is missing: {error}") from error


def _status(value: Any) -> EntityStatus:
    try:
        return EntityStatus(value)
    except ValueError:
        names = ", ".join(status.value for status in EntityStatus)
        raise InvalidArgumentError(f"status is {value!r}; use one of {names}") from None


def _rule(table: Any) -> RuleDescription:
    if not isinstance(table, dict) or not {"name", "sql"} <= set(table) <= {
        "name",
        "sql",
        "action",
    }:
        raise InvalidArgumentError("a rule has a name, a sql condition and maybe an action")
    action = SqlAction(table["action"]) if "action" in table else None
    return RuleDescription(table["name"], SqlFilter(table["sql"]), action)


def apply(config: Config, namespace: Namespace) -> None:
    """Make the entities of the file, and give those that exist its settings."""
    left = list(config.entities)
    while left:
        postponed = []
        for declared in left:
            try:
                _apply_one(declared, namespace)
            except EntityNotFoundError:  # it forwards to one that comes later in the file
                postponed.append(declared)
        if len(postponed) == len(left):
            _apply_one(left[0], namespace)  # raises what is wrong
        left = postponed


def _apply_one(declared: Declared, namespace: Namespace) -> None:
    wanted = declared.description
    try:
        found = namespace.ask(GetEntity(wanted.path))
    except EntityNotFoundError:
        first = declared.rules[0] if declared.rules else None
        namespace.ask(CreateEntity(wanted, first))
    else:
        if type(found) is not type(wanted) or found != _same_case(wanted, found):
            namespace.ask(UpdateEntity(wanted))
    if declared.rules:
        there = {rule.name.lower() for rule in namespace.ask(ListRules(wanted.path))}
        for rule in declared.rules:
            if rule.name.lower() not in there:
                namespace.ask(CreateRule(wanted.path, rule))


def _same_case(wanted: Any, found: Any) -> Any:
    """Return a description under the name it was made with: case does not matter."""
    if isinstance(found, SubscriptionDescription):
        return replace(wanted, topic_path=found.topic_path, name=found.name)
    return replace(wanted, path=found.path)
