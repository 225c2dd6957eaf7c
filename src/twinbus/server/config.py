"""The configuration file of a server: limits, ledgers, entities and keys.

    [limits]
    max_message_bytes = 262144
    max_connections = 10000
    open_receives = 10000
    operations_per_second = 5000

    [ledger]
    retention = "90d"
    max_bytes = 10737418240
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

    [[key]]
    name = "shop"
    claims = ["send", "listen"]
    entity_path = "orders"

The server creates entities and keys that are missing, updates those whose settings differ from the
file, and adds rules that are missing. It does not change entities, rules and keys that the file
does not name. An existing key without `primary` and `secondary` keeps its secrets; a new key gets
random secrets.

`read_config` checks everything that can be checked without a namespace, so that a server with a bad
file fails before it creates anything. Each error names the file, the entity and the value.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from twinbus.broker.accounts.throttle import Thresholds
from twinbus.broker.entities.filters import compile_action, compile_filter
from twinbus.client.manager import new_secret
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
from twinbus.errors import EntityNotFoundError, InvalidArgumentError, MessagingError
from twinbus.ledger import LedgerSettings
from twinbus.limits import MAX_CONFIG_BYTES, MAX_CONNECTIONS, MAX_MESSAGE_BYTES, MAX_RECEIVE_BYTES
from twinbus.namespace.contract import Namespace
from twinbus.protocol.commands import (
    CreateEntity,
    CreateRule,
    GetEntity,
    ListKeys,
    ListRules,
    PutKey,
    UpdateEntity,
)
from twinbus.protocol.keys import Claim, SharedAccessKey, is_key_name, key_id
from twinbus.spans import parse_span
from twinbus.values import shown

_KINDS: Mapping[str, type[EntityDescription]] = {
    "queue": QueueDescription,
    "topic": TopicDescription,
    "subscription": SubscriptionDescription,
}
_D = TypeVar("_D")


@dataclass(frozen=True, slots=True)
class LimitRange:
    """The values that a limit may have: whole numbers, or any finite numbers, above zero."""

    most: int
    is_integer: bool = True

    def check(self, name: str, value: object) -> None:
        """Refuse a value of a wrong type or outside of the range."""
        kinds = (int,) if self.is_integer else (int, float)
        if type(value) in kinds and 0 < value <= self.most:  # type: ignore[operator]
            return  # isinstance would accept true, which is an int; nan fails every comparison
        wanted = "whole number from 1 to" if self.is_integer else "number above 0 and at most"
        raise InvalidArgumentError(
            f"limits.{name} is {shown(value)}; it must be a {wanted} {self.most}"
        )


_LIMITS: Mapping[str, LimitRange] = {
    "max_message_bytes": LimitRange(MAX_RECEIVE_BYTES),  # a larger one could not be received
    "max_connections": LimitRange(1_000_000),  # a process has no more file descriptors
    "operations_per_second": LimitRange(10**9, is_integer=False),
    "entity_operations_per_second": LimitRange(10**9, is_integer=False),
    "memory_bytes": LimitRange(2**63 - 1),
    "storage_bytes": LimitRange(2**63 - 1),
    "open_receives": LimitRange(10**9),
}


@dataclass(frozen=True, slots=True)
class DeclaredEntity:
    """An entity that the file declares."""

    description: EntityDescription
    rules: tuple[RuleDescription, ...] = ()

    @property
    def label(self) -> str:
        """The entity as errors name it, such as: queue 'orders'."""
        kind = type(self.description).__name__.removesuffix("Description").lower()
        return f"{kind} {self.description.path!r}"


@dataclass(frozen=True, slots=True)
class DeclaredKey:
    """A key that the file declares. Its secrets never appear in texts."""

    name: str
    claims: tuple[Claim, ...]
    entity_path: str | None = None  # None: a key of the namespace
    primary: str | None = field(default=None, repr=False)  # None: keep the secret, or create one
    secondary: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.over(None)

    @property
    def label(self) -> str:
        """The key as errors name it, such as: key 'shop' of 'orders'."""
        return f"key {self.name!r}" + (f" of {self.entity_path!r}" if self.entity_path else "")

    def over(self, existing: SharedAccessKey | None) -> SharedAccessKey:
        """Return the key as declared, with secrets of the existing key where the file has none."""
        return SharedAccessKey(
            name=self.name,
            claims=self.claims,
            primary=self.primary or (existing.primary if existing else new_secret()),
            secondary=self.secondary or (existing.secondary if existing else new_secret()),
            entity_path=existing.entity_path if existing else self.entity_path,
        )


@dataclass(frozen=True, slots=True)
class Config:
    """The content of a configuration file."""

    entities: tuple[DeclaredEntity, ...] = ()
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_connections: int = MAX_CONNECTIONS
    thresholds: Thresholds = field(default_factory=Thresholds)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)
    file: Path | None = field(default=None, compare=False)  # for errors
    keys: tuple[DeclaredKey, ...] = ()

    def with_ledger(self, ledger: LedgerSettings) -> "Config":
        """Return the same configuration with other settings of the ledger."""
        return replace(self, ledger=ledger)


def read_config(path: Path) -> Config:
    """Read a configuration file, or raise an error that says what is wrong and where."""
    try:
        return replace(_config(tomllib.loads(text_of(path))), file=path)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.text}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(
            f"{path} is not a TOML file: {error}. Correct that line"
        ) from error
    except RecursionError:
        raise InvalidArgumentError(
            f"{path} has values that are nested too deeply. Use at most three levels"
        ) from None
    except ValueError:  # Python refuses to parse numbers of thousands of digits
        raise InvalidArgumentError(
            f"{path} has a number of thousands of digits. Write a shorter number"
        ) from None


def text_of(path: Path) -> str:
    """Return the text of a configuration file, or raise an error with the reason."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(
            f"the file cannot be read: {error.strerror}. Check its path and permissions"
        ) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise InvalidArgumentError(f"the file has more than {MAX_CONFIG_BYTES} bytes; shorten it")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"the file cannot be read: it is not valid UTF-8 at byte {error.start + 1}. Save "
            "it as UTF-8"
        ) from None


def _config(found: Mapping[str, Any]) -> Config:
    unknown = sorted(set(found) - {"limits", "ledger", "key", *_KINDS})
    if unknown:
        raise InvalidArgumentError(
            f"there is no section {shown(unknown[0])}. The sections are limits, ledger, "
            + ", ".join((*_KINDS, "key"))
        )
    declared = [_declared(kind, table) for kind in _KINDS for table in _tables(found, kind)]
    keys = tuple(_key(table) for table in _tables(found, "key"))
    limits = _limits(found.get("limits", {}))
    own = {"max_message_bytes", "max_connections"}
    return Config(
        tuple(declared),
        limits.get("max_message_bytes", MAX_MESSAGE_BYTES),
        limits.get("max_connections", MAX_CONNECTIONS),
        Thresholds(**{name: value for name, value in limits.items() if name not in own}),
        _ledger(found.get("ledger", {})),
        keys=keys,
    )


def _tables(found: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    tables = found.get(kind, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidArgumentError(f"declare each {kind} under [[{kind}]], with two brackets")
    return tables


def _key(table: dict[str, Any]) -> DeclaredKey:
    """Return a key of the file; errors do not show values that may be secrets."""
    name = table.get("name")
    named = f"key {name!r}" if isinstance(name, str) and is_key_name(name) else "a key"
    settings = dict(table)
    claims = settings.pop("claims", [])
    try:
        settings["claims"] = tuple(Claim(claim) for claim in claims)
    except (TypeError, ValueError):
        known = ", ".join(claim.value for claim in Claim)
        raise InvalidArgumentError(f"{named}: claims must be a list of some of {known}") from None
    try:
        return settings_from(DeclaredKey, settings)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{named}: {error.text}") from error


def _limits(table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise InvalidArgumentError(
            f"limits is {shown(table)}; write the limits under [limits], each as name = number"
        )
    for name, value in table.items():
        if name not in _LIMITS:
            raise InvalidArgumentError(
                f"there is no limit {shown(name)}. The limits are {', '.join(_LIMITS)}"
            )
        _LIMITS[name].check(name, value)
    return table


def _ledger(table: Any) -> LedgerSettings:
    if not isinstance(table, dict):
        raise InvalidArgumentError(
            f"ledger is {shown(table)}; write the settings of the ledger under [ledger]"
        )
    for name in ("is_on", "messages"):
        if not isinstance(table.get(name, True), bool):
            raise InvalidArgumentError(
                f"ledger.{name} is {shown(table[name])}; it must be true or false"
            )
    try:
        return settings_from(LedgerSettings, table)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"ledger: {error.text}") from error


def _declared(kind: str, table: dict[str, Any]) -> DeclaredEntity:
    settings = dict(table)
    rules = settings.pop("rules", [])
    try:
        return DeclaredEntity(settings_from(_KINDS[kind], settings), _rules(kind, rules))
    except InvalidArgumentError as error:
        name = table.get("path") or table.get("name")
        named = f"{kind} {shown(name)}" if name else f"a {kind} without a name"
        raise InvalidArgumentError(f"{named}: {error.text}") from error


def settings_from(kind: type[_D], settings: Mapping[str, Any]) -> _D:
    """Return a value of a dataclass from the settings of a table."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            raise InvalidArgumentError(
                f"there is no setting {shown(name)}. The settings are {', '.join(known)}"
            )
        if known[name].type is timedelta:
            values[name] = _span(name, value)
        elif known[name].type is EntityStatus:
            values[name] = _status(value)
        else:
            values[name] = value
    missing = [
        repr(name)
        for name, setting in known.items()
        if name not in values and setting.default is MISSING and setting.default_factory is MISSING
    ]
    if missing:
        raise InvalidArgumentError(f"the setting {' and '.join(missing)} is missing; add it")
    return kind(**values)


def _span(name: str, value: Any) -> timedelta:
    if not isinstance(value, str):
        raise InvalidArgumentError(
            f"{name} is {shown(value)}; write a length of time as text, such as '30s' or '7d'"
        )
    try:
        return parse_span(value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name}: {error.text}") from error


def _status(value: Any) -> EntityStatus:
    try:
        return EntityStatus(value)
    except ValueError:
        names = ", ".join(status.value for status in EntityStatus)
        raise InvalidArgumentError(f"status is {shown(value)}; it must be one of {names}") from None


_RULE_SHAPE = (
    "write rules as a list of tables: a rule has a name and a sql condition, and may have an "
    "action, as in rules = [{ name = 'sport', sql = \"category = 'sport'\" }]"
)


def _rules(kind: str, rules: Any) -> tuple[RuleDescription, ...]:
    if rules and kind != "subscription":
        raise InvalidArgumentError(f"a {kind} cannot have rules; only a subscription can")
    if not isinstance(rules, list):
        raise InvalidArgumentError(_RULE_SHAPE)
    return tuple(_rule(at, table) for at, table in enumerate(rules, 1))


def _rule(at: int, table: Any) -> RuleDescription:
    """Return a rule of a subscription; compile its SQL to find mistakes before the server opens."""
    is_table = isinstance(table, dict)
    named = f"rule {shown(table['name'])}" if is_table and "name" in table else f"rule {at}"
    if not is_table or not {"name", "sql"} <= set(table) <= {"name", "sql", "action"}:
        raise InvalidArgumentError(f"{named}: {_RULE_SHAPE}")
    try:
        condition = SqlFilter(table["sql"])
        compile_filter(condition)
        action = SqlAction(table["action"]) if "action" in table else None
        if action is not None:
            compile_action(action)
        return RuleDescription(table["name"], condition, action)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{named}: {error.text}") from error


def apply(
    config: Config, namespace: Namespace, note: Callable[[str], None] = lambda _: None
) -> None:
    """Create the entities and keys of a file, and update those whose settings differ.

    `note` is called with a text after each change.
    """
    _apply_entities(config, namespace, note)
    keys = {key.id: key for key in namespace.ask(ListKeys())} if config.keys else {}
    for declared in config.keys:
        existing = keys.get(key_id(declared.name, declared.entity_path))
        wanted = declared.over(existing)
        if existing is not None and _is_same_key(existing, wanted):
            continue
        try:
            namespace.ask(PutKey(wanted))
        except MessagingError as error:
            raise _located(error, config, declared.label) from error
        note(f"{declared.label} {'created' if existing is None else 'changed'}")


def _is_same_key(first: SharedAccessKey, second: SharedAccessKey) -> bool:
    secrets = (first.primary, first.secondary) == (second.primary, second.secondary)
    return secrets and set(first.claims) == set(second.claims)


def _apply_entities(config: Config, namespace: Namespace, note: Callable[[str], None]) -> None:
    left = list(config.entities)
    while left:
        postponed = []
        reasons = []
        for declared in left:
            try:
                _apply_entity(declared, namespace, note)
            except EntityNotFoundError as error:  # it may forward to an entity later in the file
                postponed.append(declared)
                reasons.append(_located(error, config, declared.label))
            except MessagingError as error:
                raise _located(error, config, declared.label) from error
        if len(postponed) == len(left):
            raise reasons[0]
        left = postponed


def _located(error: MessagingError, config: Config, label: str) -> MessagingError:
    """Return the error with the names of the file and of the entity or key added."""
    file = f"{config.file}: " if config.file else ""
    return type(error)(f"{file}{label}: {error.text}", **error.facts)


def _apply_entity(
    declared: DeclaredEntity, namespace: Namespace, note: Callable[[str], None]
) -> None:
    wanted = declared.description
    try:
        found = namespace.ask(GetEntity(wanted.path))
    except EntityNotFoundError:
        first = declared.rules[0] if declared.rules else None
        namespace.ask(CreateEntity(wanted, first))
        note(f"{declared.label} created")
    else:
        if type(found) is not type(wanted) or found != _same_case(wanted, found):
            namespace.ask(UpdateEntity(wanted))
            note(f"{declared.label} updated")
    if declared.rules:
        existing = {rule.name.lower() for rule in namespace.ask(ListRules(wanted.path))}
        for rule in declared.rules:
            if rule.name.lower() not in existing:
                namespace.ask(CreateRule(wanted.path, rule))
                note(f"rule {rule.name!r} of {declared.label} created")


def _same_case(wanted: Any, found: Any) -> Any:
    """Return the wanted description with the path of the entity, whose case may differ."""
    if isinstance(found, SubscriptionDescription):
        return replace(wanted, topic_path=found.topic_path, name=found.name)
    return replace(wanted, path=found.path)
