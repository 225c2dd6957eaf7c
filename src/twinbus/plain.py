"""Encodes values as JSON for the log and the wire. Only the types in a table can be decoded.

text, numbers, booleans, None     themselves
lists and tuples                  a list
a dataclass or enum of the table  {"$": its name, ...its fields or its value}
timedelta, datetime, UUID, bytes  {"$": ..., one field}
a mapping of texts                {"$": "map", "items": {...}}
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

from twinbus.clock import MICROSECOND, from_us, moment_us
from twinbus.errors import InvalidArgumentError, MessagingError
from twinbus.values import shown


class Kinds:
    """The dataclasses and enums that may be stored or sent."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self.types = {kind.__name__: kind for kind in kinds}
        self.fields = {
            kind: tuple(f.name for f in fields(kind))  # type: ignore[arg-type]
            for kind in self.types.values()
            if not issubclass(kind, Enum)
        }


class Plain:
    """Turns values into what JSON can hold, and back into equal values."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds

    def dump(self, value: Any) -> Any:
        """Return a value as JSON can hold it."""
        kind = type(value)
        if value is None or kind in (str, int, bool, float):
            return value
        names = self._kinds.fields.get(kind)
        if names is not None:
            content = {name: self.dump(getattr(value, name)) for name in names}
            return {"$": kind.__name__, **content}
        if kind.__name__ in self._kinds.types:
            return {"$": kind.__name__, "value": value.value}
        if kind in (list, tuple):
            return [self.dump(item) for item in value]
        if isinstance(value, Mapping):
            return {"$": "map", "items": {name: self.dump(v) for name, v in value.items()}}
        return self._dump_scalar(value)

    def _dump_scalar(self, value: Any) -> Any:
        if isinstance(value, timedelta):
            return {"$": "timedelta", "us": value // MICROSECOND}
        if isinstance(value, datetime):
            return {"$": "datetime", "us": moment_us(value)}
        if isinstance(value, UUID):
            return {"$": "uuid", "hex": value.hex}
        if isinstance(value, bytes):
            return {"$": "bytes", "hex": value.hex()}
        for kind in (str, int, float):  # of a class of its own, such as a StrEnum
            if isinstance(value, kind):
                return kind(value.value if isinstance(value, Enum) else value)
        raise InvalidArgumentError(
            f"a {type(value).__name__} cannot be stored or sent. Use text, numbers, bytes, times, "
            "UUIDs, or lists and dicts of these"
        )

    def load(self, plain: Any) -> Any:
        """Return the value; raise if the fields do not match its type."""
        if not isinstance(plain, list | dict):
            return plain
        try:
            if isinstance(plain, list):
                return [self.load(item) for item in plain]
            return self._load_kind(plain["$"], plain)
        except MessagingError:
            raise
        except RecursionError:
            raise InvalidArgumentError(
                "a value is nested too deeply to be decoded. Use fewer levels of lists and maps"
            ) from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            kind = plain.get("$", "a value") if isinstance(plain, dict) else "a list"
            raise InvalidArgumentError(
                f"the fields of {shown(kind)} do not fit its type: {shown(error)}. Correct "
                "them, or use the version of Twinbus that wrote them"
            ) from error

    def _load_kind(self, kind: Any, plain: dict[str, Any]) -> Any:
        known = self._kinds.types.get(kind)
        if known in self._kinds.fields:
            return known(**{name: self.load(v) for name, v in plain.items() if name != "$"})
        if known is not None:
            return known(plain["value"])
        if kind == "map":
            return {name: self.load(value) for name, value in plain["items"].items()}
        return self._load_scalar(kind, plain)

    def _load_scalar(self, kind: Any, plain: dict[str, Any]) -> Any:
        if kind == "timedelta":
            return timedelta(microseconds=plain["us"])
        if kind == "datetime":
            return from_us(plain["us"])
        if kind == "uuid":
            return UUID(hex=plain["hex"])
        if kind == "bytes":
            return bytes.fromhex(plain["hex"])
        raise InvalidArgumentError(
            f"this Twinbus has no values of kind {shown(kind)}. If a newer version wrote this one, "
            "update Twinbus"
        )
