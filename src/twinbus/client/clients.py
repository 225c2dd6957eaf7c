"""Clients of queues, topics and subscriptions: senders and receivers under their API names."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from twinbus.client.courier import Courier
from twinbus.client.receiver import (
    MessageReceiver,
    MessageSession,
    ReceiveOptions,
)
from twinbus.client.sender import MessageSender
from twinbus.entities import RuleDescription, subscription_path
from twinbus.limits import DEFAULT_WAIT, MAX_LISTED_SESSIONS
from twinbus.protocol.commands import (
    AcceptSession,
    CreateRule,
    DeleteRule,
    ListRules,
    ListSessions,
)


class TopicClient(MessageSender):
    """Sends to a topic."""


class SessionfulReceiver(MessageReceiver):
    """A receiver whose entity may have sessions."""

    def accept_message_session(
        self, session_id: str | None = None, wait: timedelta = DEFAULT_WAIT
    ) -> MessageSession:
        """Lock a session: the named one, or the next one that has messages."""
        self._check()
        return accept_session(self._courier, self.path, session_id, wait, self._options)

    def list_sessions(self, state_updated_after_utc: datetime | None = None) -> list[str]:
        """Return the sessions that have messages or a state.

        With `state_updated_after_utc`, return the sessions whose state was set after this time.
        Sessions that begin or end during the call may be missing.
        """
        self._check()
        found: dict[str, None] = {}
        page: Sequence[str] = ()
        skip = 0
        while not skip or len(page) == MAX_LISTED_SESSIONS:
            command = ListSessions(self.path, skip, MAX_LISTED_SESSIONS, state_updated_after_utc)
            page = self._courier.ask(command)
            found.update(dict.fromkeys(page))
            skip += MAX_LISTED_SESSIONS
        return list(found)


class SubscriptionClient(SessionfulReceiver):
    """Receives from a subscription, and manages its rules."""

    def __init__(
        self, courier: Courier, topic_path: str, name: str, options: ReceiveOptions | None = None
    ) -> None:
        super().__init__(courier, subscription_path(topic_path, name), options)
        self.topic_path = topic_path
        self.name = name

    def add_rule(self, rule: RuleDescription) -> None:
        """Add a rule to the existing ones; it is in effect from the next send to the topic on."""
        self._check()
        self._courier.ask(CreateRule(self.path, rule))

    def remove_rule(self, name: str) -> None:
        """Remove a rule."""
        self._check()
        self._courier.ask(DeleteRule(self.path, name))

    def get_rules(self) -> Sequence[RuleDescription]:
        """Return the rules, ordered by name."""
        self._check()
        return self._courier.ask(ListRules(self.path))


class QueueClient(MessageSender, SessionfulReceiver):
    """Sends to a queue and receives from it."""


def accept_session(
    courier: Courier,
    path: str,
    session_id: str | None,
    wait: timedelta,
    options: ReceiveOptions | None,
) -> MessageSession:
    """Lock a session of an entity."""
    grant = courier.ask(AcceptSession(path, session_id, wait))
    return MessageSession(courier, path, grant, options)
