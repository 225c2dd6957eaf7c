"""Parts of the broker that raise on demand, and what must be the same after they did."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.inside import armed_alarm, known_message_ids, now_of
from tests.namespaces import embedded
from tests.scenarios.site import Site
from twinbus.broker.accounts.throttle import Throttle
from twinbus.broker.entities.directory import Directory
from twinbus.broker.entities.duplicates import DuplicateHistory
from twinbus.broker.entities.topic import Subscription
from twinbus.broker.lifecycle import State
from twinbus.broker.queue import answers as answers_module
from twinbus.broker.queue import leasing as leasing_module
from twinbus.broker.queue import queue as queue_module
from twinbus.broker.queue.dead_letter import Deaths
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.ranges import Leases
from twinbus.broker.queue.session import GrantedLock, Sessions
from twinbus.broker.queue.tokens import LockNumbers
from twinbus.broker.queue.waiters import Waiters
from twinbus.broker.queue.waiting import Waiting
from twinbus.broker.sending import intake as intake_module
from twinbus.broker.sending import placing as placing_module
from twinbus.broker.sending import routing as routing_module
from twinbus.broker.sending import row_intake as row_intake_module
from twinbus.broker.sending.repeats import Repeats
from twinbus.broker.sending.routing import Router
from twinbus.broker.store.bodies import Bodies
from twinbus.broker.store.commit import Commit, Entries
from twinbus.broker.turn import queue_commands as queue_commands_module
from twinbus.broker.turn.namespace import BrokerNamespace
from twinbus.broker.turn.sends import Sends
from twinbus.clock import ManualClock, from_us
from twinbus.limits import NEVER_US
from twinbus.protocol.access import AccessKeys

PARTS: list[tuple[Any, str]] = [  # whatever changes the state of a namespace, or reads a message
    *((Waiting, name) for name in ("step", "put", "add", "add_one", "set_due", "due")),
    (Waiting, "expired"),
    *((Sessions, name) for name in ("grant", "release", "add", "expect", "number_of", "renew")),
    (Sessions, "expired"),
    *((Leases, name) for name in ("put", "remove", "renew")),
    *((Waiters, name) for name in ("add", "leave")),
    *((Commit, name) for name in ("reply", "add_batch", "note_transferred")),
    *((Entries, name) for name in ("change", "gone")),
    *((Queue, name) for name in ("allocate", "touch")),
    *((row_intake_module, name) for name in ("stage", "stage_one")),
    *((routing_module, name) for name in ("stage", "note_staged")),
    *((placing_module, "stage_row"), (leasing_module, "end_lease")),
    *((Router, name) for name in ("route", "stage", "resend")),
    *((AccessKeys, "all"), (Directory, "make"), (Directory, "entity"), (Subscription, "copies")),
    (Throttle, "check_room"),
    *((Deaths, "number"), (Bodies, "release"), (Bodies, "fetch"), (DuplicateHistory, "fresh")),
    *((LockNumbers, "next"), (Repeats, "note"), (queue_module, "delivered")),
    (answers_module, "lease_range"),
    *((queue_commands_module, name) for name in ("lease_range", "settle_range", "renew_range")),
    (queue_commands_module, "end_lease"),
    *((intake_module, name) for name in ("to_batch", "sizes_of", "check_values")),
]


class BrokenPartError(RuntimeError):
    """What a broken part raises: nothing the broker could know of."""


class BrokenParts:
    """Lets the n-th call of any part raise, while one thing of the broker is decided."""

    def __init__(self, patch: pytest.MonkeyPatch, *, after: bool) -> None:
        self._after = after  # the part has done its work when it raises
        self._is_meant: Callable[[Any], bool] = lambda _: False
        self._at = 0
        self._calls = 0
        self._depth = 0
        self.met = ""  # the part that raised
        for owner, name in PARTS:
            patch.setattr(owner, name, self._breaking(name, getattr(owner, name)))
        self._arm(patch, BrokerNamespace, "_execute_one", lambda args: args[0].command)
        self._arm(patch, Sends, "execute", lambda args: args[0])
        self._arm(patch, BrokerNamespace, "_tick_one", lambda args: args[0].path)
        self._arm(patch, BrokerNamespace, "_serve_one", lambda args: args[3].request)
        self._arm(patch, Sends, "check_send", lambda args: f"spilling to {args[0].path}")
        self._arm(patch, Sends, "take_spilled", lambda args: f"spilled to {args[0].path}")

    def _breaking(self, name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if not self._depth:
                return part(*args, **named)
            self._calls += 1
            raises = self._calls == self._at
            if raises:
                self.met = name
                if not self._after:
                    raise BrokenPartError(name)
            result = part(*args, **named)
            if raises:
                raise BrokenPartError(name)
            return result

        return call

    def _arm(
        self,
        patch: pytest.MonkeyPatch,
        owner: type,
        method: str,
        about: Callable[[tuple[Any, ...]], Any],
    ) -> None:
        """Let parts raise while this method of the broker decides what is meant."""
        decide = getattr(owner, method)

        def call(part: Any, *args: Any) -> Any:
            if not self._is_meant(about(args)):
                return decide(part, *args)
            self._calls = 0
            self._depth += 1
            try:
                return decide(part, *args)
            finally:
                self._depth -= 1

        patch.setattr(owner, method, call)

    @contextmanager
    def breaking(self, at: int, is_meant: Callable[[Any], bool]) -> Iterator[None]:
        """Let the n-th call raise, as long as this lasts."""
        self._at, self._is_meant, self.met = at, is_meant, ""
        try:
            yield
        finally:
            self._is_meant = lambda _: False


# -- what there is ---------------------------------------------------------------------------------


def locks_of(sessions: Sessions) -> Iterator[tuple[str, GrantedLock]]:
    """Yield the name and the lock of each locked session."""
    for session in sessions.by_number.values():
        lock = sessions.lock_of(session.name)
        if lock is not None:
            yield session.name, lock


def queue_state(queue: Queue, *, exactly: bool = True) -> dict[str, Any]:
    """Return everything one queue holds; not exactly: without numbers and moments."""
    waiting, sessions, shared = queue.waiting, queue.sessions, queue.shared
    at = waiting.all()
    bodies = (
        shared.bodies.fetch(waiting.get("batch", at), waiting.get("row", at)) if len(at) else None
    )
    rows = {
        "body": [] if bodies is None else bodies.column("body").to_pylist(),
        "state": [State(state).name for state in waiting.get("state", at)],
        "failures": waiting.get("failures", at).tolist(),
        "size": waiting.get("size", at).tolist(),
        "death": [
            None if number < 0 else shared.deaths[number].reason
            for number in waiting.get("death", at).tolist()
        ],
    }
    states = waiting.get("state", at)
    stored = (states == State.LOCKED) | (states == State.LEASED) | (states == State.DEFERRED_LOCKED)
    timed = stored | (states == State.SCHEDULED)
    found: dict[str, Any] = {
        "rows": list(zip(*rows.values(), strict=True)),
        "session states": dict(sessions.states),
        "locked sessions": sorted(name for name, _ in locks_of(sessions)),
        "leases": sorted(lease.owner for lease in queue.leases),
        "waiters": len(queue.waiters),
    }
    if exactly:
        names = ("sequence", "enqueued", "expires")
        found |= {name: waiting.get(name, at).tolist() for name in names}
        found["lock"] = waiting.get("lock", at)[stored].tolist()
        found["due"] = waiting.get("due", at)[timed].tolist()
        found["locks"] = {name: (lock.number, lock.until) for name, lock in locks_of(sessions)}
        found["exact leases"] = sorted((x.epoch, x.intervals, x.until) for x in queue.leases)
        found["sessions"] = {each.name: each.expected for each in sessions.by_number.values()}
    return found


def state_of(namespace: BrokerNamespace, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return everything a namespace holds, the queues of some entities apart."""
    found: dict[str, Any] = {
        "keys": namespace.keys.all(),
        "transfers": sorted(namespace.transfers.origins()),
        "open receives": namespace.shared.open_receives,
        "waits": dict(namespace.shared.waits),
    }
    for entity in namespace.directory:
        path = entity.description.path
        if path in without:
            continue
        found[path] = (entity.description, entity.updated_us)
        if entity.history is not None:
            found[f"{path} ids"] = known_message_ids(entity.history)
        if isinstance(entity, Subscription):
            found[f"{path} rules"] = sorted(rule.saved for rule in entity.rules.values())
        for queue in entity.queues:
            found[f"messages of {queue.path}"] = queue_state(queue)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what two states do not have in common."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            found += [f"{name}: {difference}" for difference in differences(was, now)]
        else:
            found.append(f"{name}: {was!r} became {now!r}")
    return found


def late_timers(site: Site) -> list[str]:
    """Return the queues that will not wake when their next timer is due."""
    namespace, found = site.engine.namespace, []
    for queue in namespace.directory.queues():
        at = queue.waiting.all()
        states, due = queue.waiting.get("state", at), queue.waiting.get("due", at)
        timed = (states == State.LOCKED) | (states == State.DEFERRED_LOCKED)
        timed |= states == State.SCHEDULED
        expiring = (states == State.ACTIVE) | (states == State.DEFERRED)
        moments = [
            *due[timed].tolist(),
            *queue.waiting.get("expires", at)[expiring].tolist(),
            *(lock.until for _, lock in locks_of(queue.sessions)),
            *(lease.until for lease in queue.leases),
            *(waiter.deadline for waiter in queue.waiters),
        ]
        first = min(moments, default=NEVER_US)
        alarm = armed_alarm(site.engine, queue.entity)
        if first < NEVER_US and alarm > max(first, now_of(site.engine) + queue.pause):
            found.append(f"{queue.path} is due at {first}, but its alarm is at {alarm}")
        if first < queue.next_event:
            found.append(f"{queue.path} is due at {first}, and believes {queue.next_event}")
    return found


def reopened(site: Site, folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a broker shows that is opened on a copy of the directory."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(site.directory, folder, ignore=shutil.ignore_patterns("reserve", "lock"))
    clock = ManualClock(from_us(site.clock.now_us()))
    with embedded(folder, clock, threaded=False) as copy:
        engine = copy.engine
        assert engine.namespace.faults() == []
        return state_of(engine.namespace, without=without)
