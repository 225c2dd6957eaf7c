"""The documents of the administration API: entries, feeds and errors as XML, without IO.

    request    entry > content > a description (QueueDescription, RuleDescription ...)
    reply      the same entry with id, title and times; a feed of entries; an Error

Some SDKs ignore XML namespaces and compare prefixed names, so every name is written with the prefix
that Service Bus uses. Documents of clients are parsed by defusedxml, which refuses entities and
document types.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Any, Final
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from twinbus.errors import InvalidArgumentError

ATOM: Final = "http://www.w3.org/2005/Atom"
SERVICE_BUS: Final = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
COUNTS: Final = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
INSTANCE: Final = "http://www.w3.org/2001/XMLSchema-instance"
SCHEMA: Final = "http://www.w3.org/2001/XMLSchema"
_UNWRITABLE: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SHOWN: Final = 60


# -- writing -----------------------------------------------------------------------------------


def text_of(value: object) -> str:
    """Return a value as the text of an element; characters that XML forbids are replaced."""
    return escape(_UNWRITABLE.sub("\ufffd", str(value)))


def element(name: str, value: object, attributes: str = "") -> str:
    """Return an element that contains a text."""
    return f"<{name}{attributes}>{text_of(value)}</{name}>"


def moment(value: datetime) -> str:
    """Return a time in the format of Service Bus."""
    return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomEntry:
    """A described entity, rule or namespace, with its URL."""

    title: str
    url: str
    published: datetime
    updated: datetime
    content: str  # the XML of its description

    def to_xml(self, author: str, *, namespace: str = "") -> str:
        """Return the entry as an element."""
        return (
            f"<entry{namespace}>"
            + element("id", self.url)
            + element("title", self.title, ' type="text"')
            + element("published", moment(self.published))
            + element("updated", moment(self.updated))
            + f"<author>{element('name', author)}</author>"
            + f'<link rel="self" href="{text_of(self.url)}"/>'
            + f'<content type="application/xml">{self.content}</content></entry>'
        )


_DEFAULT = f' xmlns="{ATOM}"'


def entry_document(entry: AtomEntry, author: str) -> bytes:
    """Return the document with a single entry."""
    return entry.to_xml(author, namespace=_DEFAULT).encode()


def feed_document(
    title: str, url: str, next_url: str | None, entries: Iterable[AtomEntry], author: str
) -> bytes:
    """Return the document with a page of entries; `next_url` is None on the last page."""
    page = list(entries)
    links = f'<link rel="self" href="{text_of(url)}"/>'
    if next_url is not None:
        links += f'<link rel="next" href="{text_of(next_url)}"/>'
    updated = max((entry.updated for entry in page), default=None)
    return (
        f"<feed{_DEFAULT}>"
        + element("title", title, ' type="text"')
        + element("id", url)
        + (element("updated", moment(updated)) if updated else "")
        + links
        + "".join(entry.to_xml(author) for entry in page)
        + "</feed>"
    ).encode()


def error_document(status: int, detail: str) -> bytes:
    """Return the document of an error."""
    return f"<Error>{element('Code', status)}{element('Detail', detail)}</Error>".encode()


def description_element(name: str, content: str) -> str:
    """Return the element of a description with its namespaces."""
    return f'<{name} xmlns="{SERVICE_BUS}" xmlns:i="{INSTANCE}">{content}</{name}>'


# -- reading -----------------------------------------------------------------------------------


def read_description(document: bytes) -> Element:
    """Return the description in the document of a request."""
    try:
        root: Any = fromstring(document, forbid_dtd=True)
    except DefusedXmlException:
        raise InvalidArgumentError(
            "the document declares a type or entities, which are not accepted; send XML without "
            "a DOCTYPE"
        ) from None
    except (ParseError, ValueError, LookupError) as error:
        raise InvalidArgumentError(f"the body is not an XML document: {error}") from None
    if root.tag != f"{{{ATOM}}}entry":
        raise InvalidArgumentError(
            f"the document is {_shown(root.tag)}; it must be an entry of the namespace {ATOM}"
        )
    contents = root.findall(f"{{{ATOM}}}content")
    descriptions = [child for content in contents for child in content]
    if len(descriptions) != 1:
        raise InvalidArgumentError(
            f"the entry has {len(contents)} content elements with {len(descriptions)} "
            "descriptions; it must have one content element with one description"
        )
    name_of(descriptions[0])
    described: Element = descriptions[0]
    return described


def name_of(found: Element) -> str:
    """Return the name of a Service Bus element; refuse an element of another XML namespace."""
    namespace, _, name = found.tag.rpartition("}")
    if namespace != f"{{{SERVICE_BUS}":
        raise InvalidArgumentError(
            f"the element {_shown(found.tag)} must be in the XML namespace {SERVICE_BUS}"
        )
    return name


def children_of(parent: Element) -> Iterator[tuple[str, Element]]:
    """Yield the child elements with their names; refuse a name that occurs twice."""
    seen = set()
    for child in parent:
        name = name_of(child)
        if name in seen:
            raise InvalidArgumentError(
                f"{name_of(parent)} has the element {_shown(name)} twice; remove one"
            )
        seen.add(name)
        yield name, child


def type_of(found: Element) -> str:
    """Return the value of an element's type attribute, without its prefix."""
    return found.get(f"{{{INSTANCE}}}type", "").rpartition(":")[2]


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}...")
