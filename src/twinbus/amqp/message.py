"""A message as the bytes of its sections; a section is decoded only when it is used.

    code   section                   value        how often
    0x70   header                    list         once at most
    0x71   delivery annotations      map          once at most
    0x72   message annotations       map          once at most
    0x73   properties                list         once at most
    0x74   application properties    map          once at most
    0x75   body: data                binary       any number
    0x76   body: sequence            list         any number
    0x77   body: value               any          once at most
    0x78   footer                    map          once at most

A body has one kind of sections. Sections may arrive in any order, because some SDKs do not follow
the order of the specification. `spliced` writes them in this order; sections that it does not
replace stay byte for byte the same. A message that violates these rules raises AmqpError. The
connection does not decode messages, so the caller decides whether to reject the message or to end
the link.
"""

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

from twinbus.amqp import decoder, encoder
from twinbus.amqp.composites import Composite, read_composite
from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.decoder import Buffer
from twinbus.amqp.performatives import Header, Properties
from twinbus.amqp.types import Symbol
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AMQP_SECTION_BYTES, MAX_AMQP_SECTIONS


class SectionKind(IntEnum):
    """The sections, by the code of their descriptor."""

    HEADER = 0x70
    DELIVERY_ANNOTATIONS = 0x71
    MESSAGE_ANNOTATIONS = 0x72
    PROPERTIES = 0x73
    APPLICATION_PROPERTIES = 0x74
    DATA = 0x75
    SEQUENCE = 0x76
    VALUE = 0x77
    FOOTER = 0x78


_LISTS: Final = frozenset((0x45, 0xC0, 0xD0))
_MAPS: Final = frozenset((0xC1, 0xD1))
_BINARIES: Final = frozenset((0xA0, 0xB0))
_CONSTRUCTORS: Final[Mapping[int, frozenset[int]]] = {  # by the code of the section
    0x70: _LISTS,
    0x71: _MAPS,
    0x72: _MAPS,
    0x73: _LISTS,
    0x74: _MAPS,
    0x75: _BINARIES,
    0x76: _LISTS,
    0x77: frozenset(range(256)),
    0x78: _MAPS,
}
_CODES: Final[Mapping[int | str, int]] = {  # by descriptor
    **{code: code for code in _CONSTRUCTORS},
    "amqp:header:list": 0x70,
    "amqp:delivery-annotations:map": 0x71,
    "amqp:message-annotations:map": 0x72,
    "amqp:properties:list": 0x73,
    "amqp:application-properties:map": 0x74,
    "amqp:data:binary": 0x75,
    "amqp:amqp-sequence:list": 0x76,
    "amqp:amqp-value:*": 0x77,
    "amqp:footer:map": 0x78,
}
_SYMBOL_KEYS: Final = frozenset((0x71, 0x72, 0x78))
_BODY: Final = range(0x75, 0x78)


class SectionView(NamedTuple):
    """The position of a section in the bytes of its message."""

    begin: int
    value_at: int
    end: int


class AmqpMessage:
    """The sections of an encoded message; each is decoded when it is first used."""

    __slots__ = ("_body", "_sections", "body_kind", "data")

    def __init__(self, data: Buffer) -> None:
        self.data = data
        self.body_kind: SectionKind | None = None
        self._body: list[SectionView] = []
        self._sections: dict[int, SectionView] = {}
        at, size = 0, len(data)
        while at < size:
            at = self._scan(data, at)

    def _scan(self, data: Buffer, at: int) -> int:
        code, value_at = _section_at(data, at)
        if data[value_at] not in _CONSTRUCTORS[code]:
            raise AmqpError(
                f"the section 0x{code:02x} cannot have the constructor 0x{data[value_at]:02x}"
            )
        view = SectionView(at, value_at, decoder.skip(data, value_at))
        if code in _BODY:
            self._add_body(code, view)
        elif code in self._sections:
            raise AmqpError(f"the section 0x{code:02x} occurs twice")
        else:
            self._sections[code] = view
        return view.end

    def _add_body(self, code: int, view: SectionView) -> None:
        if self.body_kind is None:
            self.body_kind = SectionKind(code)
        elif code != self.body_kind or code == SectionKind.VALUE:
            raise AmqpError("a body must be one value, or data sections, or sequence sections")
        if len(self._body) >= MAX_AMQP_SECTIONS:
            raise AmqpError(f"a body has more than {MAX_AMQP_SECTIONS} sections")
        self._body.append(view)

    # -- sections ------------------------------------------------------------------------------

    def has(self, kind: SectionKind) -> bool:
        """Return whether the message has this section."""
        return kind in self._sections or (kind is self.body_kind)

    def raw(self, kind: SectionKind) -> bytes | None:
        """Return the bytes of a section other than the body; None if it is missing."""
        view = self._sections.get(kind)
        return None if view is None else bytes(self.data[view.begin : view.end])

    @property
    def header(self) -> Header | None:
        """The header."""
        found = self._composite(SectionKind.HEADER)
        assert found is None or isinstance(found, Header)
        return found

    @property
    def properties(self) -> Properties | None:
        """The properties that AMQP defines."""
        found = self._composite(SectionKind.PROPERTIES)
        assert found is None or isinstance(found, Properties)
        return found

    @property
    def delivery_annotations(self) -> dict[Any, Any] | None:
        """Annotations for the next hop."""
        return self._map(SectionKind.DELIVERY_ANNOTATIONS)

    @property
    def message_annotations(self) -> dict[Any, Any] | None:
        """Annotations that stay with the message."""
        return self._map(SectionKind.MESSAGE_ANNOTATIONS)

    @property
    def application_properties(self) -> dict[Any, Any] | None:
        """The properties of the application."""
        return self._map(SectionKind.APPLICATION_PROPERTIES)

    @property
    def footer(self) -> dict[Any, Any] | None:
        """Values that are computed from the body, such as hashes."""
        return self._map(SectionKind.FOOTER)

    def _bounded(self, kind: SectionKind) -> SectionView | None:
        view = self._sections.get(kind)
        if view is not None and view.end - view.begin > MAX_AMQP_SECTION_BYTES:
            raise AmqpError(
                f"the section {kind.name} has {view.end - view.begin} bytes; at most "
                f"{MAX_AMQP_SECTION_BYTES} are decoded"
            )
        return view

    def _composite(self, kind: SectionKind) -> Composite | None:
        view = self._bounded(kind)
        return None if view is None else read_composite(self.data, view.begin)[0]

    def _map(self, kind: SectionKind) -> dict[Any, Any] | None:
        view = self._bounded(kind)
        if view is None:
            return None
        found: dict[Any, Any] = decoder.decode(self.data, view.value_at)[0]
        return found

    def entries_of(self, kind: SectionKind) -> int:
        """Return the number of entries of a map section, without decoding them."""
        view = self._sections.get(kind)
        if view is None:
            return 0
        return decoder.read_extent(self.data[view.value_at], self.data, view.value_at + 1)[2] // 2

    def decode_all(self) -> None:
        """Decode every section; raise the error of the first one that is malformed."""
        _ = self.header, self.properties, self.application_properties
        _ = self.delivery_annotations, self.message_annotations, self.footer
        if self.body_kind is SectionKind.VALUE:
            _ = self.value
        elif self.body_kind is SectionKind.SEQUENCE:
            _ = self.sequences

    # -- body ----------------------------------------------------------------------------------

    @property
    def data_sections(self) -> list[memoryview]:
        """The contents of the data sections."""
        self._expect(SectionKind.DATA)
        data = memoryview(self.data)
        contents = []
        for view in self._body:
            head = 2 if self.data[view.value_at] == 0xA0 else 5
            contents.append(data[view.value_at + head : view.end])
        return contents

    @property
    def sequences(self) -> list[list[Any]]:
        """The lists of the sequence sections."""
        self._expect(SectionKind.SEQUENCE)
        return [decoder.decode(self.data, view.value_at)[0] for view in self._body]

    @property
    def value(self) -> Any:
        """The value of a body of kind VALUE; only the link limits its size."""
        self._expect(SectionKind.VALUE)
        return decoder.decode(self.data, self._body[0].value_at)[0]

    def _expect(self, kind: SectionKind) -> None:
        if self.body_kind is not kind:
            found = "no body" if self.body_kind is None else f"a body of kind {self.body_kind.name}"
            raise AmqpError(f"the message has {found}; expected a body of kind {kind.name}")

    # -- writing -------------------------------------------------------------------------------

    def spliced(self, replaced: Mapping[SectionKind, bytes | None]) -> list[Buffer]:
        """Return the message in pieces, with some sections replaced, added or removed (None).

        Body sections cannot be replaced.
        """
        if not replaced.keys().isdisjoint(_BODY):
            raise InvalidArgumentError("body sections cannot be replaced")
        pieces: list[Buffer] = []
        for kind in SectionKind:
            if kind in replaced:
                section = replaced[kind]
                if section:
                    pieces.append(section)
            elif kind is self.body_kind:
                pieces += [self.data[view.begin : view.end] for view in self._body]
            elif kind in self._sections:
                view = self._sections[kind]
                pieces.append(self.data[view.begin : view.end])
        return pieces

    def extended(self, kind: SectionKind, entries: Mapping[Any, Any]) -> bytes:
        """Return a map section with entries added or replaced.

        Other entries stay byte for byte the same. If the section may contain one of the keys, or a
        key is not text, all entries are decoded and encoded again.
        """
        if _CONSTRUCTORS[kind] is not _MAPS:
            raise InvalidArgumentError(f"the section {kind.name} is not a map")
        view = self._bounded(kind)
        if view is None:
            return encode_section(kind, entries)
        data = self.data
        begin, end, count = decoder.read_extent(data[view.value_at], data, view.value_at + 1)
        content = bytes(data[begin:end])
        if any(type(key) not in {str, Symbol} or key.encode() in content for key in entries):
            return encode_section(kind, (self._map(kind) or {}) | dict(entries))
        added = [encoder.encode(part) for pair in _keyed(kind, entries).items() for part in pair]
        encoded = encoder.write_compound(0xC1, count + len(added), content + b"".join(added))
        return bytes((0x00, 0x53, kind)) + encoded


def _section_at(data: Buffer, at: int) -> tuple[int, int]:
    """Return the code of the section at an offset, and the offset of its value."""
    try:
        if data[at] == 0x00 and data[at + 1] == 0x53 and data[at + 2] in _CONSTRUCTORS:
            code, at = data[at + 2], at + 3
        else:
            code, at = _long_descriptor(data, at)
        data[at]  # raises IndexError if the value is missing
    except (IndexError, struct.error) as error:
        raise decoder.truncated() from error
    except UnicodeDecodeError as error:
        raise AmqpError("the descriptor of a section is not ASCII") from error
    return code, at


def _long_descriptor(data: Buffer, at: int) -> tuple[int, int]:
    if data[at] != 0x00:
        raise AmqpError(f"a section must begin with 0x00, not with 0x{data[at]:02x}")
    descriptor, at = decoder.read_descriptor(data, at + 1)
    code = _CODES.get(descriptor)
    if code is None:
        raise AmqpError(f"there is no section with the descriptor {descriptor!r:.60}")
    return code, at


def _keyed(kind: SectionKind, entries: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return entries with keys of the right type: symbols in annotations, text elsewhere."""
    if kind not in _SYMBOL_KEYS:
        return entries
    return {Symbol(key) if type(key) is str else key: value for key, value in entries.items()}


def encode_section(kind: SectionKind, value: Any) -> bytes:
    """Return an encoded section; pass a header or properties as an object of its class."""
    if isinstance(value, Composite) and kind == value.CODE:
        return value.encode()
    if isinstance(value, Mapping):
        value = dict(_keyed(kind, value))
    encoded = encoder.encode(value)
    if encoded[0] not in _CONSTRUCTORS[kind] or kind in {0x70, 0x73}:
        raise InvalidArgumentError(f"a {type(value).__name__} cannot be the section {kind.name}")
    return bytes((0x00, 0x53, kind)) + encoded


def encode_message(sections: Mapping[SectionKind, Any]) -> bytes:
    """Return a message with these sections; pass several data or sequence sections as a tuple."""
    pieces = []
    for kind in SectionKind:
        if kind in sections:
            value = sections[kind]
            many: Sequence[Any] = value if type(value) is tuple and kind in _BODY else (value,)
            pieces += [encode_section(kind, section) for section in many]
    return b"".join(pieces)
