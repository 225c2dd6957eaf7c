"""A quick constructor for a frozen dataclass with many fields.

A frozen dataclass sets each field through `object.__setattr__`, which takes 0.2 microseconds. That
is 5 microseconds for a message, and every send creates messages. Python sets a field of an ordinary
object twenty times as fast. So the class gets a *draft*: a dataclass with the same fields that is
not frozen. An object has the class of the draft while its fields are set, and the frozen class
before the constructor checks them, so no other code can see a draft.
"""

from collections.abc import Callable
from dataclasses import Field, field, fields, make_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def quick(cls: type[T]) -> type[T]:
    """Give a frozen dataclass with slots a quick constructor; subclasses keep the usual one."""
    own: Any = cls
    draft: Any = make_dataclass(
        cls.__name__,
        [(defined.name, defined.type, _copy(defined)) for defined in fields(own)],
        slots=True,
    )
    usual, check = own.__init__, own.__post_init__
    fill: Callable[..., None] = draft.__init__
    become = object.__setattr__

    def __init__(self: Any, *values: Any, **named: Any) -> None:  # noqa: N807 - it becomes that of the class
        if type(self) is not cls:
            usual(self, *values, **named)
            return
        become(self, "__class__", draft)
        try:
            fill(self, *values, **named)
        finally:
            self.__class__ = cls
        check(self)

    __init__.__wrapped__ = usual  # type: ignore[attr-defined]  # for `inspect.signature`
    own.__init__ = __init__
    return cls


def _copy(defined: "Field[Any]") -> Any:
    """Return the definition of a field for another class."""
    return field(
        default=defined.default, default_factory=defined.default_factory, kw_only=defined.kw_only
    )
