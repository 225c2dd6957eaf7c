"""A street of neighbours: one namespace, and keys that may use only their own part of it.

A neighbour's commands take the way that they take behind a server's door: the admission of the key
checks each command, and the broker carries it out under the key's name. Commands that are asked
together share one turn, as the commands do that a server reads together.
"""

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from tests.scenarios.site import Site
from twinbus.connection import Token
from twinbus.entities import (
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
    subscription_path,
)
from twinbus.errors import MessagingError
from twinbus.message import BrokeredMessage, to_messages
from twinbus.protocol.access import Admission, Principal
from twinbus.protocol.commands import Command, CreateEntity, PutKey, Receive, ReceiveMode, Send
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.requests import Request

JUNK, VICTIM, NEWS = "junk", "victim", "news"
SPORT = subscription_path(NEWS, "sport")


class Question(Request):
    """A command of a neighbour, and the reply to it."""

    def __init__(self, command: Command[Any], principal: Principal) -> None:
        super().__init__(command, principal)
        self.value: Any = None
        self.error: MessagingError | None = None
        self.is_answered = False
        self.on_reply: Callable[[Question], None] = lambda _: None

    def answer(self, value: Any) -> None:
        self.value, self.is_answered = value, True
        self.on_reply(self)

    def fail(self, error: MessagingError) -> None:
        self.error, self.is_answered = error, True
        self.on_reply(self)

    @property
    def result(self) -> Any:
        """The reply; an error is raised."""
        assert self.is_answered, f"nobody answered {self.command!r:.200}"
        if self.error is not None:
            raise self.error
        return self.value


class Neighbour:
    """A client with one key."""

    def __init__(self, site: Site, key: SharedAccessKey) -> None:
        self._site = site
        expires_s = 2**40
        self.admission = Admission(Token("", key.entity_path or "", key.name, expires_s, b""), key)

    def question(self, command: Command[Any]) -> Question:
        """Return a command as the door hands it over, or raise what the door refuses it for."""
        self.admission.check(command)
        return Question(command, self.admission)

    def together(self, *commands: Command[Any]) -> list[Question]:
        """Ask several commands in one turn."""
        questions = [self.question(command) for command in commands]
        self._site.embedded.hand_over(questions)
        return questions

    def ask(self, command: Command[Any]) -> Any:
        """Ask one command; return its reply, or raise its error."""
        [question] = self.together(command)
        return question.result


class Street:
    """A junk queue, a topic with one subscription, and a victim that must not notice any of it."""

    def __init__(self, site: Site, **settings: Any) -> None:
        self.site = site
        site.ask(CreateEntity(QueueDescription(path=JUNK, **settings)))
        site.ask(CreateEntity(QueueDescription(path=VICTIM)))
        site.ask(CreateEntity(TopicDescription(path=NEWS)))
        site.ask(CreateEntity(SubscriptionDescription(topic_path=NEWS, name="sport")))
        self.hog = self.move_in("hog", JUNK, Claim.SEND, Claim.LISTEN)
        self.sender = self.move_in("sender", JUNK, Claim.SEND)
        self.editor = self.move_in("editor", NEWS, Claim.MANAGE)
        self.victim = self.move_in("victim", VICTIM, Claim.SEND, Claim.LISTEN)

    def move_in(self, name: str, path: str | None, *claims: Claim) -> Neighbour:
        """Make a key."""
        key = SharedAccessKey(
            name=name, claims=claims, primary="1" * 20, secondary="2" * 20, entity_path=path
        )
        self.site.ask(PutKey(key))
        return Neighbour(self.site, key)

    def assert_unharmed(self) -> None:
        """The victim sends and receives, and the broker met no internal error."""
        self.victim.ask(Send(VICTIM, [BrokeredMessage(b"honest")]))
        assert bodies(self.victim, VICTIM) == [b"honest"]
        engine = self.site.engine
        assert engine.restarts == 0
        assert dict(engine.namespace.failures) == {}
        assert list(self.site.directory.glob("diagnostics/*")) == []


def bodies(who: Neighbour, path: str) -> list[bytes]:
    """Receive and delete what a queue has now; return the bodies."""
    batch = who.ask(Receive(path, 1000, mode=ReceiveMode.RECEIVE_AND_DELETE))
    return [message.body for message in to_messages(batch)]


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions of Python and C some work calls: what it costs on any machine."""
    count = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def messages(count: int, **fields: Any) -> list[BrokeredMessage]:
    return [BrokeredMessage(**fields)] * count


def answered(questions: Iterable[Question]) -> list[Any]:
    """Return the replies, errors too."""
    return [question.error or question.value for question in questions]
