"""What a broker does: for each command and each timer a state in which it does real work."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.contracts.words import (
    DEAD,
    QUEUE,
    TOPIC,
    accept,
    later,
    message,
    queue,
    receive,
    receive_one,
    send,
    subscription,
    tokens,
    topic,
)
from tests.scenarios.site import Site
from twinbus.entities import (
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.protocol import commands as c
from twinbus.protocol.keys import Claim, SharedAccessKey

Story = Callable[[Site], c.Command[Any]]
Timer = Callable[[Site, str], c.Command[Any] | None]
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
RED = RuleDescription("red", SqlFilter("colour = 'red'"), SqlAction("SET seen = 1"))


def key(name: str, *claims: Claim) -> SharedAccessKey:
    return SharedAccessKey(name=name, claims=claims, primary="p" * 16, secondary="s" * 16)


# -- sending ---------------------------------------------------------------------------------------


def send_plain(site: Site) -> c.Command[Any]:
    queue(site)
    send(site, "old")
    return c.Send(QUEUE, [message("a"), message("b")])


def send_with_time_to_live(site: Site) -> c.Command[Any]:
    queue(site, default_message_time_to_live=HOUR)
    return c.Send(QUEUE, [message("a", time_to_live=timedelta(minutes=3))])


def send_scheduled(site: Site) -> c.Command[Any]:
    queue(site)
    soon = later(site, minutes=3)
    return c.Send(QUEUE, [message("now"), message("soon", scheduled_enqueue_time_utc=soon)])


def send_new_ids(site: Site) -> c.Command[Any]:
    queue(site, requires_duplicate_detection=True)
    send(site, message("old", message_id="1"))
    return c.Send(QUEUE, [message("again", message_id="1"), message("new", message_id="2")])


def send_to_sessions(site: Site) -> c.Command[Any]:
    queue(site, requires_session=True)
    send(site, message("old", session_id="s"))
    return c.Send(QUEUE, [message("a", session_id="s"), message("b", session_id="new")])


def send_transferred(site: Site) -> c.Command[Any]:
    queue(site)
    site.ask(c.Send(QUEUE, [message("1")], c.Origin("backlog/0#1.x", [1])))
    known = c.Origin("sender/0123456789abcdef", range(5, 7))
    return c.Send(QUEUE, [message("1"), message("2")], c.Origin("backlog/0#1.x", [1, 2], known))


def send_to_topic(site: Site) -> c.Command[Any]:
    topic(site, requires_duplicate_detection=True)
    subscription(site, "all", requires_session=True)
    subscription(site, "red", RED)
    subscription(site, "bad", RuleDescription("bad", SqlFilter("sys.Label = 'x'")))
    red = {"colour": "red"}
    sent = message("red", session_id="s", subject="x", application_properties=red)
    return c.Send(TOPIC, [sent, message("no session")])


def send_forwarded(site: Site) -> c.Command[Any]:
    queue(site, "home")
    queue(site, forward_to="home")
    return c.Send(QUEUE, [message("a")])


def send_parked(site: Site) -> c.Command[Any]:
    queue(site, "home", status=EntityStatus.DISABLED)
    queue(site, forward_to="home")
    return c.Send(QUEUE, [message("a")])


def cancel(site: Site) -> c.Command[Any]:
    queue(site)
    soon = later(site, minutes=3)
    numbers = send(site, *(message(b, scheduled_enqueue_time_utc=soon) for b in "abc"))
    return c.CancelScheduled(QUEUE, numbers[:2])


# -- receiving -------------------------------------------------------------------------------------


def receive_locked(site: Site) -> c.Command[Any]:
    queue(site)
    send(site, "a", "b", "c")
    receive_one(site)
    return c.Receive(QUEUE, 2)


def receive_and_delete(site: Site) -> c.Command[Any]:
    queue(site)
    send(site, "a", "b")
    return c.Receive(QUEUE, 2, mode=c.ReceiveMode.RECEIVE_AND_DELETE)


def receive_in_session(site: Site) -> c.Command[Any]:
    queue(site, requires_session=True)
    send(site, *(message(b, session_id="s") for b in "ab"))
    return c.Receive(QUEUE, session=accept(site, "s"))


def receive_and_wait(site: Site) -> c.Command[Any]:
    queue(site)
    return c.Receive(QUEUE, wait=MINUTE)


def deferred(site: Site, **settings: Any) -> list[int]:
    queue(site, **settings)
    numbers = send(site, "a", "b", "c")
    site.ask(c.Settle(QUEUE, tokens(*receive(site)), c.Disposition.DEFER))
    return numbers


def receive_deferred(site: Site) -> c.Command[Any]:
    return c.ReceiveDeferred(QUEUE, deferred(site)[:2])


def receive_deferred_in_session(site: Site) -> c.Command[Any]:
    queue(site, requires_session=True)
    numbers = send(site, message("a", session_id="s"))
    lock = accept(site, "s")
    locked = receive(site, session=lock)
    site.ask(c.Settle(QUEUE, tokens(*locked), c.Disposition.DEFER))
    return c.ReceiveDeferred(QUEUE, numbers, session=lock)


def peek(site: Site) -> c.Command[Any]:
    queue(site)
    send(site, "a", "b")
    return c.Peek(QUEUE, 0, 10)


def peek_in_session(site: Site) -> c.Command[Any]:
    sessions(site)
    return c.Peek(QUEUE, 0, 10, session_id="t")


def delete_messages(site: Site) -> c.Command[Any]:
    queue(site)
    send(site, "a", "b", "c")
    receive_one(site)
    return c.DeleteMessages(QUEUE, 10, later(site, seconds=1))


def delete_in_session(site: Site) -> c.Command[Any]:
    return c.DeleteMessages(QUEUE, 10, session=sessions(site))


def settled(disposition: c.Disposition, **settings: Any) -> Story:
    def story(site: Site) -> c.Command[Any]:
        queue(site, **settings)
        send(site, "a", "b", "c")
        locked = tokens(*receive(site, count=2))
        reason = "bad" if disposition is c.Disposition.DEAD_LETTER else None
        return c.Settle(QUEUE, locked, disposition, reason)

    return story


def settle_deferred(site: Site) -> c.Command[Any]:
    batch = site.ask(c.ReceiveDeferred(QUEUE, deferred(site)[:2]))
    return c.Settle(QUEUE, batch.column("lock_token"), c.Disposition.ABANDON)


def settle_in_session(site: Site) -> c.Command[Any]:
    queue(site, requires_session=True, max_delivery_count=1)
    send(site, *(message(b, session_id="s") for b in "ab"))
    locked = receive(site, session=accept(site, "s"))
    return c.Settle(QUEUE, tokens(*locked), c.Disposition.ABANDON)


def settle_dead_letters(site: Site) -> c.Command[Any]:
    queue(site, max_delivery_count=1)
    send(site, "a")
    site.ask(c.Settle(QUEUE, tokens(receive_one(site)), c.Disposition.ABANDON))
    return c.Settle(DEAD, tokens(receive_one(site, DEAD)), c.Disposition.COMPLETE)


def renew_locks(site: Site) -> c.Command[Any]:
    queue(site)
    send(site, "a", "b")
    locked = tokens(*receive(site))
    site.wait(seconds=10)
    return c.RenewLocks(QUEUE, locked)


# -- sessions --------------------------------------------------------------------------------------


def sessions(site: Site) -> c.SessionLock:
    """Make a queue with sessions, and hold one of which a message is locked."""
    queue(site, requires_session=True)
    send(site, *(message(b, session_id=name) for name in "st" for b in "ab"))
    lock = accept(site, "s")
    receive_one(site, session=lock)
    site.ask(c.SetSessionState(QUEUE, lock, b"before"))
    site.wait(seconds=10)
    return lock


def accept_named(site: Site) -> c.Command[Any]:
    sessions(site)
    return c.AcceptSession(QUEUE, "t")


def accept_new(site: Site) -> c.Command[Any]:
    sessions(site)
    return c.AcceptSession(QUEUE, "never seen")


def accept_next(site: Site) -> c.Command[Any]:
    sessions(site)
    return c.AcceptSession(QUEUE)


def accept_and_wait(site: Site) -> c.Command[Any]:
    sessions(site)
    return c.AcceptSession(QUEUE, "s", MINUTE)


def renew_session(site: Site) -> c.Command[Any]:
    return c.RenewSession(QUEUE, sessions(site))


def release_session(site: Site) -> c.Command[Any]:
    return c.ReleaseSession(QUEUE, sessions(site))


def release_empty_session(site: Site) -> c.Command[Any]:
    sessions(site)
    return c.ReleaseSession(QUEUE, accept(site, "never seen"))


def get_session_state(site: Site) -> c.Command[Any]:
    return c.GetSessionState(QUEUE, sessions(site))


def set_session_state(site: Site) -> c.Command[Any]:
    return c.SetSessionState(QUEUE, sessions(site), b"after")


def list_sessions(site: Site) -> c.Command[Any]:
    sessions(site)
    return c.ListSessions(QUEUE)


# -- ranges ----------------------------------------------------------------------------------------


def leased(site: Site, count: int = 3) -> c.RangeLease:
    queue(site)
    send(site, *"abcdef")
    lease: c.RangeLease = site.ask(c.LeaseRange(QUEUE, "me", count))
    site.wait(seconds=10)
    return lease


def lease_next(site: Site) -> c.Command[Any]:
    leased(site)
    return c.LeaseRange(QUEUE, "you", 2)


def lease_again(site: Site) -> c.Command[Any]:
    leased(site, 2)
    site.ask(c.LeaseRange(QUEUE, "me", 2))
    return c.LeaseRange(QUEUE, "me", 10, 1, 6)


def lease_and_wait(site: Site) -> c.Command[Any]:
    leased(site, 6)
    return c.LeaseRange(QUEUE, "you", 1, wait=MINUTE)


def renew_range(site: Site) -> c.Command[Any]:
    return c.RenewRange(QUEUE, leased(site).epoch)


def read_range(site: Site) -> c.Command[Any]:
    return c.ReadRange(QUEUE, leased(site).epoch, 1, 2)


def settle_range(site: Site) -> c.Command[Any]:
    epoch = leased(site, 5).epoch
    parts = [c.DeadLetterPart([3], "bad"), c.DeadLetterPart([4], "worse", "text")]
    return c.SettleRange(QUEUE, epoch, [(1, 2)], parts, release=True)


def release_range(site: Site) -> c.Command[Any]:
    return c.ReleaseRange(QUEUE, leased(site).epoch)


# -- managing --------------------------------------------------------------------------------------


def create_queue(site: Site) -> c.Command[Any]:
    queue(site)
    return c.CreateEntity(QueueDescription(path="new", forward_to=QUEUE))


def create_topic(_: Site) -> c.Command[Any]:
    return c.CreateEntity(TopicDescription(path="new"))


def create_subscription(site: Site) -> c.Command[Any]:
    topic(site)
    return c.CreateEntity(SubscriptionDescription(topic_path=TOPIC, name="new"), RED)


def update_entity(site: Site) -> c.Command[Any]:
    queue(site, "home", status=EntityStatus.DISABLED)
    queue(site, forward_to="home")
    send(site, "parked")
    return c.UpdateEntity(QueueDescription(path=QUEUE, lock_duration=timedelta(seconds=9)))


def delete_queue(site: Site) -> c.Command[Any]:
    queue(site, requires_session=True)
    site.ask(c.PutKey(key("root", Claim.MANAGE)))
    site.ask(c.PutKey(key("of-it", Claim.SEND)))
    send(site, message("a", session_id="s"))
    return c.DeleteEntity(QUEUE)


def delete_topic(site: Site) -> c.Command[Any]:
    topic(site)
    subscription(site, "all")
    subscription(site, "red", RED)
    send(site, "a", path=TOPIC)
    return c.DeleteEntity(TOPIC)


def about(kind: Callable[[str], c.Command[Any]]) -> Story:
    def story(site: Site) -> c.Command[Any]:
        queue(site)
        return kind(QUEUE)

    return story


def list_entities(site: Site) -> c.Command[Any]:
    topic(site)
    return c.ListEntities(c.EntityKind.TOPIC)


def create_rule(site: Site) -> c.Command[Any]:
    topic(site)
    return c.CreateRule(subscription(site, "all"), RED)


def update_rule(site: Site) -> c.Command[Any]:
    topic(site)
    return c.UpdateRule(subscription(site, "red", RED), RuleDescription("red"))


def delete_rule(site: Site) -> c.Command[Any]:
    topic(site)
    return c.DeleteRule(subscription(site, "red", RED), "red")


def list_rules(site: Site) -> c.Command[Any]:
    topic(site)
    return c.ListRules(subscription(site, "red", RED))


def put_key(site: Site) -> c.Command[Any]:
    site.ask(c.PutKey(key("root", Claim.MANAGE)))
    return c.PutKey(key("new", Claim.SEND))


def delete_key(site: Site) -> c.Command[Any]:
    site.ask(c.PutKey(key("root", Claim.MANAGE)))
    site.ask(c.PutKey(key("old", Claim.SEND)))
    return c.DeleteKey("old")


def read_meter(_: Site) -> c.Command[Any]:
    return c.ReadMeter()


def list_keys(site: Site) -> c.Command[Any]:
    site.ask(c.PutKey(key("root", Claim.MANAGE)))
    return c.ListKeys()


STORIES: dict[str, Story] = {
    story.__name__: story
    for story in (
        *(send_plain, send_with_time_to_live, send_scheduled, send_new_ids, send_to_sessions),
        *(send_transferred, send_to_topic, send_forwarded, send_parked, cancel),
        *(receive_locked, receive_and_delete, receive_in_session, receive_and_wait),
        *(receive_deferred, receive_deferred_in_session, peek, settle_deferred),
        *(peek_in_session, delete_messages, delete_in_session, list_sessions),
        *(settle_in_session, settle_dead_letters, renew_locks),
        *(accept_named, accept_new, accept_next, accept_and_wait, renew_session),
        *(release_session, release_empty_session, get_session_state, set_session_state),
        *(lease_next, lease_again, lease_and_wait, renew_range, read_range, settle_range),
        *(release_range, create_queue, create_topic, create_subscription, update_entity),
        *(delete_queue, delete_topic, list_entities, create_rule, update_rule),
        *(delete_rule, list_rules),
        *(put_key, delete_key, read_meter, list_keys),
    )
} | {
    **{item.value: settled(item) for item in c.Disposition},
    "abandon_for_good": settled(c.Disposition.ABANDON, max_delivery_count=1),
    "get_entity": about(c.GetEntity),
    "get_runtime_properties": about(c.GetRuntimeProperties),
}


# -- timers ----------------------------------------------------------------------------------------


def lock_lapses(site: Site, path: str) -> None:
    queue(site, path)
    send(site, "a", "b", "c", path=path)
    receive(site, path, 2)


def lock_lapses_for_good(site: Site, path: str) -> None:
    queue(site, path, max_delivery_count=1)
    send(site, "a", "b", "c", path=path)
    receive(site, path, 2)


def deferred_lock_lapses(site: Site, path: str) -> None:
    queue(site, path)
    numbers = send(site, "a", "b", path=path)
    site.ask(c.Settle(path, tokens(*receive(site, path)), c.Disposition.DEFER))
    site.ask(c.ReceiveDeferred(path, numbers))


def session_lapses(site: Site, path: str) -> None:
    queue(site, path, requires_session=True, max_delivery_count=2)
    send(site, *(message(b, session_id=name) for name in "stu" for b in "ab"), path=path)
    receive(site, path, session=accept(site, "s", path))
    receive(site, path, session=accept(site, "t", path))


def empty_session_lapses(site: Site, path: str) -> None:
    queue(site, path, requires_session=True)
    accept(site, "s", path)


def lease_lapses(site: Site, path: str) -> None:
    queue(site, path)
    send(site, *"abcd", path=path)
    site.ask(c.LeaseRange(path, "me", 2))
    site.ask(c.LeaseRange(path, "you", 1, duration=timedelta(seconds=50)))


def schedule_is_up(site: Site, path: str) -> None:
    queue(site, path)
    soon = later(site, minutes=1)
    send(site, *(message(b, scheduled_enqueue_time_utc=soon) for b in "ab"), path=path)


def schedule_in_session_is_up(site: Site, path: str) -> None:
    queue(site, path, requires_session=True)
    soon = later(site, minutes=1)
    send(site, message("a", session_id="s", scheduled_enqueue_time_utc=soon), path=path)


def schedule_in_topic_is_up(site: Site, path: str) -> None:
    topic(site, path)
    for name in "st":
        site.ask(c.CreateEntity(SubscriptionDescription(topic_path=path, name=name)))
    soon = later(site, minutes=1)
    send(site, message("a", scheduled_enqueue_time_utc=soon), path=path)


def message_expires(site: Site, path: str) -> None:
    queue(site, path)
    send(site, message("a", time_to_live=MINUTE), message("b"), path=path)


def message_expires_for_good(site: Site, path: str) -> None:
    queue(site, path, enable_dead_lettering_on_message_expiration=True)
    send(site, message("a", time_to_live=MINUTE), message("b"), path=path)


def forward_is_tried_again(site: Site, path: str) -> None:
    queue(site, f"{path}-home", status=EntityStatus.DISABLED)
    queue(site, path, forward_to=f"{path}-home")
    send(site, "a", "b", path=path)
    site.ask(c.UpdateEntity(QueueDescription(path=f"{path}-home")))


def forwarding_is_switched_off(site: Site, path: str) -> None:
    queue(site, f"{path}-home", status=EntityStatus.DISABLED)
    queue(site, path, forward_to=f"{path}-home")
    send(site, "a", "b", path=path)
    site.ask(c.UpdateEntity(QueueDescription(path=path)))


def entity_is_idle(site: Site, path: str) -> None:
    queue(site, path, auto_delete_on_idle=timedelta(minutes=5))
    send(site, "a", path=path)


def receive_gives_up(site: Site, path: str) -> c.Command[Any]:
    queue(site, path)
    return c.Receive(path, wait=MINUTE)


def accept_gives_up(site: Site, path: str) -> c.Command[Any]:
    queue(site, path, requires_session=True)
    return c.AcceptSession(path, wait=MINUTE)


def lease_gives_up(site: Site, path: str) -> c.Command[Any]:
    queue(site, path)
    return c.LeaseRange(path, "me", 1, wait=MINUTE)


def everything_is_due(site: Site, path: str) -> c.Command[Any]:
    lock_lapses_for_good(site, path)
    schedule = later(site, minutes=1)
    send(site, message("later", scheduled_enqueue_time_utc=schedule), path=path)
    send(site, message("short", time_to_live=MINUTE), path=path)
    site.ask(c.LeaseRange(path, "me", 1))
    return c.Receive(path, wait=MINUTE, mode=c.ReceiveMode.RECEIVE_AND_DELETE)


TIMERS: dict[str, Timer] = {
    timer.__name__: timer
    for timer in (
        *(lock_lapses, lock_lapses_for_good, deferred_lock_lapses, session_lapses),
        *(empty_session_lapses, lease_lapses, schedule_is_up, schedule_in_session_is_up),
        *(schedule_in_topic_is_up, message_expires, message_expires_for_good),
        *(forward_is_tried_again, forwarding_is_switched_off, entity_is_idle),
        *(receive_gives_up, accept_gives_up, lease_gives_up, everything_is_due),
    )
}
