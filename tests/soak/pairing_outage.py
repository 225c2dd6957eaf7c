"""Take a primary away under load in every way there is, and hold the pairing to its word.

    python -m tests.soak.pairing_outage --rounds 3 [--way sb] [--seed 7]

Two servers are processes; clients are paired factories, each with threads that send singles,
batches and pipelined. What was acknowledged is on the primary once when the backlog is home; what
raised is there at most once. Clients reach the servers natively, or through the SDK of Azure
Service Bus (`--way sb`): then a message may be there twice, because such a primary recognises no
repetition. Nothing waits for a time to pass, only for something to happen.
"""

import argparse
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

from tests.soak.pairing_site import (
    AT_ONCE,
    BACKLOG_QUEUES,
    CLIENTS,
    HASTY,
    PATIENT,
    PING_INTERVAL,
    POLICY,
    PRIMARY,
    QUEUE,
    Terms,
    Twins,
    Way,
    arrived_at_primary,
    bring_home,
    left_in_backlog,
    sends_to_secondary,
    syphon_at_work,
    twins_at_work,
)
from tests.soak.server_process import ServerProcess
from tests.waiting import until
from twinbus import (
    Claim,
    MessagingError,
    NamespaceManager,
    ServerBusyError,
    SharedAccessKey,
    UnauthorizedError,
)
from twinbus.connection import ConnectionString
from twinbus.entities import EntityStatus, backlog_queue_path
from twinbus.errors import BacklogUnavailableError
from twinbus.pairing.events import BacklogQueuePulled, FailedOver, Returned
from twinbus.pairing.rotation import queue_of
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import PutKey
from twinbus.testing.pausing import resume_process

# -- what came of it -------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of one scenario."""

    name: str
    acknowledged: int = 0
    raised: Counter[str] = field(default_factory=Counter)  # messages, by the kind of error
    raised_and_there: int = 0  # allowed: the outcome was unknown
    moved: int = 0
    recognised: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unheard_of: list[str] = field(default_factory=list)  # nobody sent them
    left: int = 0  # in the backlog, after all
    complaints: list[str] = field(default_factory=list)
    times_s: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in self.times_s.items())
        raised = ", ".join(f"{count} {kind}" for kind, count in self.raised.items()) or "none"
        return (
            f"{self.name}: {self.acknowledged:,} acknowledged, {self.moved:,} by way of the "
            f"backlog ({self.recognised} of them known to the primary), {len(self.lost)} lost, "
            f"{len(self.doubled)} doubled; raised: {raised} ({self.raised_and_there} there all "
            f"the same); {times}"
        )

    def check(self) -> None:
        """Raise when a promise was broken."""
        assert not self.complaints, f"{self.name}: {self.complaints[:5]}"
        assert not self.lost, f"{self.name}: lost {len(self.lost)}: {self.lost[:5]}"
        assert not self.doubled, f"{self.name}: doubled {len(self.doubled)}: {self.doubled[:5]}"
        assert not self.unheard_of, f"{self.name}: nobody sent {self.unheard_of[:5]}"
        assert not self.left, f"{self.name}: {self.left} messages cannot leave the backlog"


def conclude(twins: Twins, outcome: Outcome) -> Outcome:
    """Stop sending, bring the backlog home, and compare what was promised with what is there."""
    twins.stop_sending()
    at_home = arrived_at_primary(twins)
    outcome.complaints += [
        f"{worker.name} still sends to the backlog"
        for worker in twins.workers
        if worker.acknowledged and list(worker.acknowledged)[-1] not in at_home
    ]
    began = time.monotonic()
    home = bring_home(twins)
    outcome.times_s["home after"] = time.monotonic() - began
    outcome.moved, outcome.recognised = home.moved, home.recognised
    arrived = arrived_at_primary(twins)
    acknowledged = {message_id for worker in twins.workers for message_id in worker.acknowledged}
    sent = {message_id for worker in twins.workers for message_id in worker.sent}
    refused = [refusal for worker in twins.workers for refusal in worker.refused]
    outcome.acknowledged = len(acknowledged)
    outcome.raised = Counter(type(refusal.error).__name__ for refusal in refused)
    outcome.raised_and_there = sum(refusal.message_id in arrived for refusal in refused)
    outcome.lost = sorted(acknowledged - set(arrived))
    if Capability.REPEAT_MEMORY in twins.clients[0].factory.courier.namespace.capabilities:
        outcome.doubled = sorted(message_id for message_id, count in arrived.items() if count > 1)
    outcome.unheard_of = sorted(set(arrived) - sent)
    outcome.left = left_in_backlog(twins)
    outcome.complaints += [worker.trouble for worker in twins.workers if worker.trouble]
    return outcome


def note_raised(twins: Twins, outcome: Outcome, *allowed: type[MessagingError]) -> None:
    """Complain of every error but those of a kind that this scenario is about."""
    outcome.complaints += [
        f"{refusal.message_id} raised {refusal.error!r:.200}"
        for worker in twins.workers
        for refusal in worker.refused
        if not isinstance(refusal.error, allowed)
    ]


def note_untouched(twins: Twins, outcome: Outcome, before: list[dict[str, Any]]) -> None:
    """Complain of everything a failover would leave."""
    for client in twins.clients:
        outcome.complaints += [f"there was {event}" for event in client.events]
        outcome.complaints += [f"{status.path} is known" for status in client.pairing.status()]
    after = sends_to_secondary(twins)
    outcome.complaints += [f"sent to the secondary: {row}" for row in after if row not in before]


# -- scenarios -------------------------------------------------------------------------------------

Blow = Callable[[ServerProcess], None]


def freeze(server: ServerProcess) -> None:
    """Let a server hang: it accepts connections and never answers."""
    server.freeze()


def thaw(server: ServerProcess) -> None:
    resume_process(server.pid)


def terminate(server: ServerProcess) -> None:
    """Stop a server in good order."""
    assert server.stop() == 0, f"the server ended badly: {server.complaints()}"


def outage(
    seed: int,
    way: Way,
    interval: timedelta,
    strike: Blow = ServerProcess.kill,
    heal: Blow | None = None,
) -> Outcome:
    """Take the primary away, and give it back."""
    seconds = interval.total_seconds()
    outcome = Outcome(f"{strike.__name__}, failover interval {seconds:g} s, {way.value}://")
    with twins_at_work(seed, way=way) as twins:
        for _ in range(CLIENTS):
            twins.join(Terms(interval))
        twins.await_some_sends()
        struck = time.time()
        strike(twins.primary)
        twins.await_event(FailedOver)
        twins.await_some_sends()
        healed = time.time()
        (heal or ServerProcess.start)(twins.primary)
        _await_return(twins, outcome, healed)
        twins.await_some_sends()
        _note_failover(twins, outcome, struck)
        return conclude(twins, outcome)


def _await_return(twins: Twins, outcome: Outcome, healed: float) -> None:
    """Wait until every client sends to the primary again."""
    twins.await_event(Returned)
    until(lambda: all(c.is_healthy() for c in twins.clients), "every client is back home")
    back = max(client.moment(Returned) for client in twins.clients)
    outcome.times_s["back after"] = back - healed


def _note_failover(twins: Twins, outcome: Outcome, struck: float) -> None:
    """Complain of sends that raised after the failover; at once means that none ever does."""
    firsts = []
    for client in twins.clients:
        over = client.moment(FailedOver)
        at_once = client.pairing.options.failover_interval == AT_ONCE
        outcome.complaints += [
            f"{refusal.message_id} raised after the failover: {refusal.error!r:.200}"
            for worker in client.workers
            for refusal in worker.refused
            if at_once or refusal.began > over
        ]
        acknowledged = [w for worker in client.workers for w in worker.acknowledged.values()]
        firsts.append(min(when for when in acknowledged if when > over))
    outcome.times_s["first diverted after"] = min(firsts) - struck
    outcome.times_s["every client's by"] = max(firsts) - struck


def claim_taken_away(seed: int) -> Outcome:
    """Take Send from the key of the application, and give it back."""
    outcome = Outcome("key without Send")
    with twins_at_work(seed) as twins:
        with NamespaceManager.from_connection_string(twins.primary_string) as manager:
            key = manager.create_key("application", [Claim.SEND])
            terms = Terms(primary=_with_key(twins.primary_string, key))
            for _ in range(CLIENTS):
                twins.join(terms)
            twins.await_some_sends()
            before = sends_to_secondary(twins)
            manager.courier.ask(PutKey(replace(key, claims=(Claim.LISTEN,))))
            twins.await_refusals(UnauthorizedError)
            note_untouched(twins, outcome, before)
            manager.courier.ask(PutKey(key))
            twins.await_some_sends()
        note_raised(twins, outcome, UnauthorizedError)
        note_untouched(twins, outcome, before)
        return conclude(twins, outcome)


def _with_key(connection_string: str, key: SharedAccessKey) -> str:
    parsed = ConnectionString.parse(connection_string)
    return replace(parsed, key_name=key.name, key=key.primary).to_text()


def throttled(seed: int) -> Outcome:
    """Send more than the primary takes: clients with time wait, clients without get an error."""
    outcome = Outcome("busy primary")
    with twins_at_work(seed, "[limits]\nentity_operations_per_second = 40") as twins:
        hasty, patient = twins.join(Terms(policy=HASTY)), twins.join(Terms(policy=PATIENT))
        courier = patient.factory.courier
        now_us = courier.clock.now_us
        before = sends_to_secondary(twins)
        until(
            lambda: courier.busy_until(QUEUE, now_us()) > now_us(),
            "the patient client is told to wait",
        )
        struck_at = time.time()
        until(lambda: any(w.refused for w in hasty.workers), "a hasty send raises")
        twins.stop_sending()
        last = max(when for w in patient.workers for when in w.acknowledged.values())
        outcome.times_s["waited"] = last - struck_at
        outcome.complaints += [
            f"{refusal.message_id} raised {refusal.error!r:.200}, and had the time to wait"
            for worker in patient.workers
            for refusal in worker.refused
        ]
        note_raised(twins, outcome, ServerBusyError)
        note_untouched(twins, outcome, before)
        return conclude(twins, outcome)


def backlog_queue_stopped(seed: int, way: Way) -> Outcome:
    """Stop a backlog queue that is in use while the primary is away."""
    outcome = Outcome(f"backlog queue stopped, {way.value}://")
    with twins_at_work(seed, way=way) as twins:
        for _ in range(CLIENTS):
            twins.join(Terms())
        twins.await_some_sends()
        struck = time.time()
        twins.primary.kill()
        twins.await_event(FailedOver)
        twins.await_some_sends()
        secondary = twins.secondary.connection_string
        with NamespaceManager.from_connection_string(secondary) as manager:
            queues = {queue.path: queue for queue in manager.list_queues()}
            counts = {p: manager.get_runtime_properties(p).active_message_count for p in queues}
            path = max(counts, key=lambda queue: counts[queue])
            stopped = time.time()
            manager.update_queue(replace(queues[path], status=EntityStatus.SEND_DISABLED))
            until(lambda: path in _pulled(twins), f"{path} leaves the rotation")
            twins.await_some_sends()
            manager.update_queue(queues[path])
        pulled = min(
            event.at.timestamp()
            for client in twins.clients
            for event in client.events
            if isinstance(event, BacklogQueuePulled)
        )
        outcome.times_s["pulled after"] = pulled - stopped
        twins.await_some_sends()
        healed = time.time()
        twins.primary.start()
        _await_return(twins, outcome, healed)
        twins.await_some_sends()
        _note_failover(twins, outcome, struck)
        return conclude(twins, outcome)


def _pulled(twins: Twins) -> set[str]:
    return {
        event.queue
        for client in twins.clients
        for event in client.events
        if isinstance(event, BacklogQueuePulled)
    }


def secondary_in_trouble(seed: int, way: Way, strike: Blow, heal: Blow) -> Outcome:
    """Take the secondary away for a moment while the primary is away."""
    outcome = Outcome(f"secondary in trouble: {strike.__name__}, {way.value}://")
    with twins_at_work(seed, way=way) as twins:
        for _ in range(CLIENTS):
            twins.join(Terms())
        twins.await_some_sends()
        twins.primary.kill()
        twins.await_event(FailedOver)
        twins.await_some_sends()
        strike(twins.secondary)
        twins.await_event(BacklogQueuePulled)
        heal(twins.secondary)
        twins.await_some_sends()
        healed = time.time()
        twins.primary.start()
        _await_return(twins, outcome, healed)
        twins.await_some_sends()
        note_raised(twins, outcome, BacklogUnavailableError)
        return conclude(twins, outcome)


def both_killed(seed: int, way: Way) -> Outcome:
    """Kill both; start the secondary again, then the primary."""
    outcome = Outcome(f"both killed, {way.value}://")
    longer_than_a_cool_down = replace(POLICY, operation_timeout=PING_INTERVAL * 1.5)
    with twins_at_work(seed, way=way) as twins:
        for _ in range(CLIENTS):
            twins.join(Terms(backlog_policy=longer_than_a_cool_down))
        twins.await_some_sends()
        struck = time.time()
        twins.primary.kill()
        twins.secondary.kill()
        twins.await_refusals(BacklogUnavailableError)
        outcome.times_s["every thread was told by"] = time.time() - struck
        healed = time.time()
        twins.secondary.start()
        twins.await_sends()
        outcome.times_s["diverted again by"] = time.time() - healed
        healed = time.time()
        twins.primary.start()
        _await_return(twins, outcome, healed)
        twins.await_some_sends()
        note_raised(twins, outcome, BacklogUnavailableError)
        for worker in twins.workers:
            outcome.complaints += [
                f"{refusal.message_id} raised without both causes: {refusal.error.facts}"
                for refusal in worker.refused
                if not all(map(refusal.error.facts.get, ("primary_cause", "backlog_cause")))
            ]
        return conclude(twins, outcome)


def kept_in_order(seed: int, way: Way) -> Outcome:
    """Kill the primary twice and the secondary once, and stop a backlog queue; order is kept."""
    outcome = Outcome(f"kept in order, {way.value}://")
    with twins_at_work(seed, way=way) as twins:
        for _ in range(CLIENTS):
            twins.join(Terms(preserve_order=True))
        twins.await_some_sends()
        with syphon_at_work(twins) as home:
            twins.primary.kill()
            twins.await_event(FailedOver)
            twins.await_some_sends()
            _stop_own_queue(twins, outcome)
            healed = time.time()
            twins.primary.start()
            _await_return(twins, outcome, healed)
            twins.await_some_sends()
            twins.primary.kill()
            until(lambda: all(not c.is_healthy() for c in twins.clients), "all fail over again")
            twins.secondary.kill()
            twins.await_refusals(BacklogUnavailableError)
            twins.secondary.start()
            twins.await_sends()
            twins.primary.start()
            until(lambda: all(c.is_healthy() for c in twins.clients), "all are back again")
            twins.await_some_sends()
            twins.stop_sending()
        note_raised(twins, outcome, BacklogUnavailableError)
        outcome.complaints += [f"{path} was pulled" for path in _pulled(twins)]
        conclude(twins, outcome)
        outcome.moved += home.moved
        _note_overtaken(twins, outcome)
        return outcome


def _stop_own_queue(twins: Twins, outcome: Outcome) -> None:
    """Stop the backlog queue of the entity: sends raise, and none goes to another queue."""
    path = backlog_queue_path(PRIMARY, queue_of(QUEUE, range(BACKLOG_QUEUES)))
    secondary = twins.secondary.connection_string
    with NamespaceManager.from_connection_string(secondary) as manager:
        queue = manager.get_queue(path)
        manager.update_queue(replace(queue, status=EntityStatus.SEND_DISABLED))
        twins.await_refusals(BacklogUnavailableError)
        manager.update_queue(queue)
        twins.await_some_sends()
        others = [q.path for q in manager.list_queues() if q.path != path]
        counts = {other: manager.get_runtime_properties(other) for other in others}
    outcome.complaints += [
        f"{other} has {found.active_message_count} messages"
        for other, found in counts.items()
        if found.active_message_count
    ]


def _note_overtaken(twins: Twins, outcome: Outcome) -> None:
    """Complain of every acknowledged message that a later one of its client overtook."""
    places = {message_id: at for at, message_id in enumerate(arrived_at_primary(twins))}
    for worker in twins.workers:
        known = [
            (places[message_id], message_id)
            for message_id in worker.acknowledged
            if message_id in places
        ]
        outcome.complaints += [
            f"{later} overtook {earlier}"
            for (before, earlier), (after, later) in pairwise(known)
            if after < before
        ]


def scenarios(
    long_interval: timedelta, way: Way = Way.TWINBUS
) -> dict[str, Callable[[int], Outcome]]:
    """Return every scenario by its name; each takes a seed."""
    found: dict[str, Callable[[int], Outcome]] = {
        "kill": lambda seed: outage(seed, way, AT_ONCE),
        "kill_with_interval": lambda seed: outage(seed, way, long_interval),
        "freeze": lambda seed: outage(seed, way, AT_ONCE, freeze, thaw),
        "freeze_with_interval": lambda seed: outage(seed, way, long_interval, freeze, thaw),
        "terminate": lambda seed: outage(seed, way, AT_ONCE, terminate),
        "backlog_queue_stopped": lambda seed: backlog_queue_stopped(seed, way),
        "secondary_frozen": lambda seed: secondary_in_trouble(seed, way, freeze, thaw),
        "secondary_killed": lambda seed: secondary_in_trouble(
            seed, way, ServerProcess.kill, ServerProcess.start
        ),
        "both_killed": lambda seed: both_killed(seed, way),
        "kept_in_order": lambda seed: kept_in_order(seed, way),
    }
    if way is Way.TWINBUS:  # the keys and the limits of a server
        found |= {"claim_taken_away": claim_taken_away, "throttled": throttled}
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--way", choices=[way.value for way in Way], default=Way.TWINBUS.value)
    parser.add_argument("--only", choices=sorted(scenarios(AT_ONCE)), help="one scenario")
    options = parser.parse_args()
    known = scenarios(timedelta(seconds=5), Way(options.way))
    if options.only and options.only not in known:
        parser.error(f"{options.only} is only for --way {Way.TWINBUS.value}")
    logging.disable(logging.WARNING)  # failovers are what this is about
    chosen = [options.only] if options.only else list(known)
    failures = []
    for seed in range(options.seed, options.seed + options.rounds):
        again = f"--rounds 1 --way {options.way} --seed {seed}"
        print(f"seed {seed}: python -m tests.soak.pairing_outage {again}")
        for name in chosen:
            try:
                outcome = known[name](seed)
                print(f"  {outcome}", flush=True)
                outcome.check()
            except (AssertionError, MessagingError) as error:
                failures.append(f"seed {seed}, {name}: {error!r}")
                print(f"  {name} FAILED: {error!r}", flush=True)
    assert not failures, "\n".join(failures)


if __name__ == "__main__":
    main()
