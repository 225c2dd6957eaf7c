"""The health of one entity as a state table. Pure: `now` is an argument, nothing reads a clock.

state          sign            next
HEALTHY        failure         SUSPECT       the failover timer starts
HEALTHY        marked          HEALTHY
SUSPECT        success         HEALTHY       the timer is cleared
SUSPECT        failure         SUSPECT       the timer goes on
SUSPECT        marked          HEALTHY
SUSPECT        ran_out         FAILED_OVER   pings start
FAILED_OVER    success         FAILED_OVER   a send in flight succeeded: only a ping ends this state
FAILED_OVER    failure         FAILED_OVER
FAILED_OVER    passed          HEALTHY       without a backlog queue, the primary accepted a send
FAILED_OVER    ping_sent       FAILED_OVER   the next one follows after an interval
FAILED_OVER    ping_failed     FAILED_OVER
FAILED_OVER    ping_passed     HEALTHY
FAILED_OVER    ping_answered   HEALTHY       the entity does not exist: callers must get that error
FAILED_OVER    marked          HEALTHY

A pair that is not in the table raises; callers do not report a success of a healthy entity. With a
failover interval of zero the timer runs out at the moment it starts. A due time is never further
ahead than its interval: if it is, the clock was set back, and the interval starts again.
"""

from dataclasses import dataclass, replace
from enum import Enum

from twinbus.limits import NEVER_US


class HealthState(Enum):
    """Where sends to an entity go."""

    HEALTHY = "healthy"  # to the primary
    SUSPECT = "suspect"  # to the primary; failures are counted and the timer runs
    FAILED_OVER = "failed_over"  # to a backlog queue


class Sign(Enum):
    """An observation that may change the health of an entity."""

    SUCCESS = "success"  # the primary accepted a send
    FAILURE = "failure"  # a send failed with an error that counts
    RAN_OUT = "ran_out"  # the failover timer ran out without a success
    PASSED = "passed"  # the primary accepted a send after the failover, as there was no backlog
    PING_SENT = "ping_sent"
    PING_PASSED = "ping_passed"
    PING_FAILED = "ping_failed"
    PING_ANSWERED = "ping_answered"  # the primary answered that the entity does not exist
    MARKED = "marked"  # the application called mark_path_healthy


_HEALTHY, _SUSPECT, _FAILED = HealthState.HEALTHY, HealthState.SUSPECT, HealthState.FAILED_OVER

TRANSITIONS: dict[tuple[HealthState, Sign], HealthState] = {
    (_HEALTHY, Sign.FAILURE): _SUSPECT,
    (_HEALTHY, Sign.MARKED): _HEALTHY,
    (_SUSPECT, Sign.SUCCESS): _HEALTHY,
    (_SUSPECT, Sign.FAILURE): _SUSPECT,
    (_SUSPECT, Sign.MARKED): _HEALTHY,
    (_SUSPECT, Sign.RAN_OUT): _FAILED,
    (_FAILED, Sign.SUCCESS): _FAILED,
    (_FAILED, Sign.FAILURE): _FAILED,
    (_FAILED, Sign.PASSED): _HEALTHY,
    (_FAILED, Sign.PING_SENT): _FAILED,
    (_FAILED, Sign.PING_FAILED): _FAILED,
    (_FAILED, Sign.PING_PASSED): _HEALTHY,
    (_FAILED, Sign.PING_ANSWERED): _HEALTHY,
    (_FAILED, Sign.MARKED): _HEALTHY,
}


@dataclass(frozen=True, slots=True)
class Timing:
    """The two intervals of a pairing, in microseconds."""

    failover_us: int
    ping_us: int


@dataclass(frozen=True, slots=True)
class Health:
    """The health of an entity."""

    state: HealthState = HealthState.HEALTHY
    since: int = 0  # when the entity entered this state
    failures: int = 0  # failures that count, since the entity was last healthy
    due: int = NEVER_US  # SUSPECT: when the timer runs out; FAILED_OVER: when the next ping is due


def record(health: Health, sign: Sign, now: int, timing: Timing) -> Health:
    """Return the health after a sign."""
    health = verdict(health, now, timing)
    return verdict(_step(health, sign, now, timing), now, timing)


def verdict(health: Health, now: int, timing: Timing) -> Health:
    """Return the health at the time `now`: the failover timer may have run out."""
    if health.state is HealthState.HEALTHY:
        return health
    interval = timing.failover_us if health.state is HealthState.SUSPECT else timing.ping_us
    if health.due > now + interval:
        health = replace(health, due=now + interval)
    if health.state is HealthState.SUSPECT and health.due <= now:
        return _step(health, Sign.RAN_OUT, now, timing)
    return health


def _step(health: Health, sign: Sign, now: int, timing: Timing) -> Health:
    try:
        state = TRANSITIONS[health.state, sign]
    except KeyError:
        raise AssertionError(
            f"an entity in state {health.state.value} cannot get the sign {sign.value}"
        ) from None
    if state is HealthState.HEALTHY:
        return health if health.state is state else Health(state, now)
    failures = health.failures + (sign is Sign.FAILURE)
    if state is health.state:
        due = now + timing.ping_us if sign is Sign.PING_SENT else health.due
        return Health(state, health.since, failures, due)
    interval = timing.failover_us if state is HealthState.SUSPECT else timing.ping_us
    return Health(state, now, failures, now + interval)
