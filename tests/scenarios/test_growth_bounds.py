"""What a client can make grow has a bound: at the bound it is accepted, beyond it refused."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from tests.inside import alarm_entries
from tests.scenarios.neighbours import JUNK, NEWS, SPORT, Neighbour, Street, messages
from tests.scenarios.site import Site
from twinbus.broker.entities import duplicates, management
from twinbus.broker.queue import leasing, queue
from twinbus.entities import (
    CorrelationFilter,
    QueueDescription,
    RuleDescription,
    SqlFilter,
    SubscriptionDescription,
)
from twinbus.errors import InvalidArgumentError, QuotaExceededError, ServerBusyError
from twinbus.limits import (
    MAX_ADDRESS_CHARACTERS,
    MAX_ORIGIN_DEPTH,
    MAX_OWNER_CHARACTERS,
    MAX_REASON_CHARACTERS,
    MAX_RULE_VALUE_BYTES,
    MAX_RULE_VALUES,
    MAX_STALE_ALARMS,
)
from twinbus.message import BrokeredMessage, to_batch, tokens_of
from twinbus.protocol.commands import (
    AcceptSession,
    Command,
    CreateEntity,
    CreateRule,
    DeadLetterPart,
    Disposition,
    LeaseRange,
    Origin,
    Peek,
    PutKey,
    Receive,
    ReceiveMode,
    Send,
    Settle,
    SettleRange,
)
from twinbus.protocol.keys import Claim, SharedAccessKey

NO_TOKENS = tokens_of([])


def nested(depth: int) -> Origin:
    """Return an origin with this many sources, one in the other."""
    origin = Origin(f"sender/{0:016x}", [1])
    for number in range(1, depth):
        origin = Origin(f"sender/{number:016x}", [1], origin)
    return origin


def properties(count: int) -> dict[str, object]:
    return {f"p{number}": 1 for number in range(count)}


VALUES: dict[str, tuple[Callable[[int], Any], int]] = {
    "the path of a command": (lambda size: Peek("x" * size), MAX_ADDRESS_CHARACTERS),
    "the owner of a lease": (lambda size: LeaseRange(JUNK, "x" * size, 1), MAX_OWNER_CHARACTERS),
    "the reason of a dead letter": (
        lambda size: Settle(JUNK, NO_TOKENS, Disposition.DEAD_LETTER, "x" * size),
        MAX_REASON_CHARACTERS,
    ),
    "the description of a dead letter": (
        lambda size: Settle(JUNK, NO_TOKENS, Disposition.DEAD_LETTER, "poison", "x" * size),
        MAX_REASON_CHARACTERS,
    ),
    "the reason in a range": (
        lambda size: SettleRange(JUNK, 1, dead_lettered=[DeadLetterPart([1], "x" * size)]),
        MAX_REASON_CHARACTERS,
    ),
    "the sources of an origin": (nested, MAX_ORIGIN_DEPTH),
    "the parameters of a filter": (lambda n: SqlFilter("a = 1", properties(n)), MAX_RULE_VALUES),
    "the properties of a filter": (
        lambda count: CorrelationFilter(properties=properties(count)),
        MAX_RULE_VALUES,
    ),
    "a parameter of a filter": (
        lambda size: SqlFilter("a = @a", {"a": "x" * size}),
        MAX_RULE_VALUE_BYTES,
    ),
    "a text of a filter": (
        lambda size: CorrelationFilter(subject="x" * size),
        MAX_RULE_VALUE_BYTES,
    ),
}


@pytest.mark.parametrize(("make", "most"), VALUES.values(), ids=VALUES)
def test_a_value_has_a_largest_size(make: Callable[[int], Any], most: int) -> None:
    assert make(most)
    with pytest.raises(InvalidArgumentError):
        make(most + 1)


# -- what the broker keeps -------------------------------------------------------------------------

BOUND = 3  # in place of thousands


@dataclass(frozen=True)
class Growth:
    """Commands that each make the broker keep one more thing."""

    module: ModuleType
    bound: str
    who: Callable[[Street], Neighbour]
    command: Callable[[int], Command[Any]]
    refusal: type[Exception]
    before: int = 0  # things that are there from the beginning


def editor(street: Street) -> Neighbour:
    return street.editor


def hog(street: Street) -> Neighbour:
    return street.hog


def root(street: Street) -> Neighbour:
    return street.move_in("root", None, Claim.MANAGE)


def subscribe(number: int) -> Command[Any]:
    return CreateEntity(SubscriptionDescription(topic_path=NEWS, name=f"s{number}"))


def put_key(number: int) -> Command[Any]:
    key = SharedAccessKey(
        name=f"key{number}", claims=(Claim.SEND,), primary="3" * 20, secondary="4" * 20
    )
    return PutKey(key)


GROWTHS = {
    "leases of a queue": Growth(
        leasing,
        "MAX_LEASES",
        hog,
        lambda number: LeaseRange(JUNK, f"o{number}", 1),
        ServerBusyError,
    ),
    "locked sessions of a queue": Growth(
        queue,
        "MAX_LOCKED_SESSIONS",
        root,
        lambda number: AcceptSession("sessions", str(number)),
        ServerBusyError,
    ),
    "rules of a subscription": Growth(
        management,
        "MAX_RULES",
        editor,
        lambda number: CreateRule(SPORT, RuleDescription(f"r{number}")),
        QuotaExceededError,
        before=1,
    ),
    "subscriptions of a topic": Growth(
        management, "MAX_SUBSCRIPTIONS", root, subscribe, QuotaExceededError, before=1
    ),
    "entities of a namespace": Growth(
        management,
        "MAX_ENTITIES",
        root,
        lambda number: CreateEntity(QueueDescription(path=f"q{number}")),
        QuotaExceededError,
        before=6,
    ),
    "keys of a namespace": Growth(
        management, "MAX_KEYS", root, put_key, QuotaExceededError, before=5
    ),
    "ids of duplicate detection": Growth(
        duplicates,
        "MAX_REMEMBERED_IDS",
        root,
        lambda number: Send("ids", messages(1, message_id=f"m{number}")),
        ServerBusyError,
    ),
}


@pytest.fixture
def street(site: Site) -> Street:
    street = Street(site)
    for description in (
        QueueDescription(path="sessions", requires_session=True),
        QueueDescription(path="ids", requires_duplicate_detection=True),
    ):
        site.ask(CreateEntity(description))
    street.hog.ask(Send(JUNK, messages(20)))
    return street


CASES = [
    pytest.param(growth, together, id=f"{name}, {'in one turn' if together else 'one by one'}")
    for name, growth in GROWTHS.items()
    for together in (False, True)
]


@pytest.mark.parametrize(("growth", "together"), CASES)
def test_everything_that_the_broker_keeps_has_a_bound(
    street: Street, monkeypatch: pytest.MonkeyPatch, growth: Growth, together: bool
) -> None:
    who = growth.who(street)
    monkeypatch.setattr(growth.module, growth.bound, growth.before + BOUND)
    commands = [growth.command(number) for number in range(2 * BOUND)]
    if together:
        questions = who.together(*commands)
    else:
        questions = [question for command in commands for question in who.together(command)]
    errors = [question.error for question in questions]
    assert errors[:BOUND] == [None] * BOUND
    assert [type(error) for error in errors[BOUND:]] == [growth.refusal] * BOUND
    street.assert_unharmed()


@pytest.mark.parametrize("form", [list, to_batch], ids=["objects", "columns"])
def test_a_send_with_more_new_ids_than_the_broker_may_remember_is_refused(
    street: Street, monkeypatch: pytest.MonkeyPatch, form: Callable[..., Any]
) -> None:
    monkeypatch.setattr(duplicates, "MAX_REMEMBERED_IDS", 5)
    who = root(street)
    first, second, third = (
        Send("ids", form([BrokeredMessage(message_id=f"m{number}") for number in numbers]))
        for numbers in ((0, 1, 2), (2, 3, 4, 5), (1, 2, 3, 4, 4))
    )
    questions = who.together(first, second, third)
    assert [type(question.error) for question in questions] == [
        type(None),
        ServerBusyError,
        type(None),
    ]
    [history] = [
        entity.history for entity in street.site.engine.namespace.directory if entity.history
    ]
    assert len(history) == 5
    assert [question.error for question in who.together(first)] == [None]  # it has no new id


def test_a_lease_of_many_gaps_ends_where_its_intervals_end(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "MAX_LEASE_INTERVALS", BOUND)
    batch = street.hog.ask(Receive(JUNK, 20))
    tokens = batch.column("lock_token")
    street.hog.ask(Settle(JUNK, tokens.take(list(range(0, 20, 2))), Disposition.COMPLETE))
    street.site.wait(minutes=2)  # the locks of the others expire
    lease = street.hog.ask(LeaseRange(JUNK, "hog", 20))
    assert (lease.message_count, lease.first, lease.last) == (BOUND, 2, 2 * BOUND)


def test_timers_that_were_replaced_are_not_kept(site: Site) -> None:
    site.ask(CreateEntity(QueueDescription(path=JUNK)))
    for number in range(2 * MAX_STALE_ALARMS):
        life = timedelta(days=300) - timedelta(seconds=number)
        site.ask(Send(JUNK, [BrokeredMessage(b"x", time_to_live=life)]))
        site.ask(Receive(JUNK, 1, mode=ReceiveMode.RECEIVE_AND_DELETE))
    assert alarm_entries(site.engine) <= MAX_STALE_ALARMS + 2
