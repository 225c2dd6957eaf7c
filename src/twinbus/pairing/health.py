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
FAILED_OVER    reached         RETURNING     with `preserve_order`: diverted messages are not home
RETURNING      success         RETURNING
RETURNING      failure         RETURNING
RETURNING      marked          RETURNING     the order comes first
RETURNING      looked          RETURNING     the next look follows after a ping interval
RETURNING      look_on         RETURNING     the next look follows at once
RETURNING      caught_up       SWITCHING     the last diverted messages are about to be home
RETURNING      home            HEALTHY
SWITCHING      success         SWITCHING
SWITCHING      failure         SWITCHING
SWITCHING      marked          SWITCHING
SWITCHING      looked          SWITCHING     the next look follows soon
SWITCHING      look_on         SWITCHING
SWITCHING      gave_up         RETURNING     sends have waited long enough
SWITCHING      home            HEALTHY

The last two states exist only with `preserve_order`; the board gives the sign `reached` instead of
one that would end the failover too early.

A pair that is not in the table raises; callers do not report a success of a healthy entity. With a
failover interval of zero the timer runs out at the moment it starts. If a due time is further ahead
than its interval, the clock was set back, and the interval starts again.
"""

from dataclasses import dataclass, replace
from enum import Enum

from twinbus.clock import to_us
from twinbus.limits import NEVER_US, SWITCH_LOOK_US, SWITCH_PAUSE


class HealthState(Enum):
    """Where sends to an entity go."""

    HEALTHY = "healthy"  # to the primary
    SUSPECT = "suspect"  # to the primary; failures are counted and the timer runs
    FAILED_OVER = "failed_over"  # to a backlog queue
    RETURNING = "returning"  # to a backlog queue, until the diverted messages are home
    SWITCHING = "switching"  # nowhere: they wait a moment for the last diverted messages

    @property
    def diverts(self) -> bool:
        """Whether sends in this state do not go to the primary."""
        return self in _DIVERTING


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
    REACHED = "reached"  # the primary is available, and diverted messages are not home
    LOOKED = "looked"  # the pairing looks into the backlog queue
    LOOK_ON = "look_on"  # messages of other entities were in front
    CAUGHT_UP = "caught_up"  # few or young diverted messages are left
    GAVE_UP = "gave_up"  # they did not come home while sends waited
    HOME = "home"  # every diverted message has left the backlog queue


_HEALTHY, _SUSPECT, _FAILED = HealthState.HEALTHY, HealthState.SUSPECT, HealthState.FAILED_OVER
_RETURNING, _SWITCHING = HealthState.RETURNING, HealthState.SWITCHING
_DIVERTING = frozenset({_FAILED, _RETURNING, _SWITCHING})

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
    (_FAILED, Sign.REACHED): _RETURNING,
    (_RETURNING, Sign.SUCCESS): _RETURNING,
    (_RETURNING, Sign.FAILURE): _RETURNING,
    (_RETURNING, Sign.MARKED): _RETURNING,
    (_RETURNING, Sign.LOOKED): _RETURNING,
    (_RETURNING, Sign.LOOK_ON): _RETURNING,
    (_RETURNING, Sign.CAUGHT_UP): _SWITCHING,
    (_RETURNING, Sign.HOME): _HEALTHY,
    (_SWITCHING, Sign.SUCCESS): _SWITCHING,
    (_SWITCHING, Sign.FAILURE): _SWITCHING,
    (_SWITCHING, Sign.MARKED): _SWITCHING,
    (_SWITCHING, Sign.LOOKED): _SWITCHING,
    (_SWITCHING, Sign.LOOK_ON): _SWITCHING,
    (_SWITCHING, Sign.GAVE_UP): _RETURNING,
    (_SWITCHING, Sign.HOME): _HEALTHY,
}
ENDS_FAILOVER = frozenset(
    sign for (state, sign), after in TRANSITIONS.items() if state is _FAILED and after is _HEALTHY
)


@dataclass(frozen=True, slots=True)
class Timing:
    """The intervals of a pairing, in microseconds."""

    failover_us: int
    ping_us: int
    switch_us: int = to_us(SWITCH_PAUSE)  # how long sends wait in SWITCHING


@dataclass(frozen=True, slots=True)
class Health:
    """The health of an entity."""

    state: HealthState = HealthState.HEALTHY
    since: int = 0  # when the entity entered this state
    failures: int = 0  # failures that count, since the entity was last healthy
    due: int = NEVER_US  # when the timer runs out, or the next ping or look is due


def record(health: Health, sign: Sign, now: int, timing: Timing) -> Health:
    """Return the health after a sign."""
    health = verdict(health, now, timing)
    return verdict(_step(health, sign, now, timing), now, timing)


def verdict(health: Health, now: int, timing: Timing) -> Health:
    """Return the health at the time `now`: a timer may have run out."""
    state = health.state
    if state is _HEALTHY:
        return health
    interval = timing.failover_us if state is _SUSPECT else timing.ping_us
    if health.due > now + interval:
        health = replace(health, due=now + interval)
    if state is _SUSPECT and health.due <= now:
        return _step(health, Sign.RAN_OUT, now, timing)
    if state is _SWITCHING:
        health = replace(health, since=min(health.since, now))
        if now - health.since >= timing.switch_us:
            return _step(health, Sign.GAVE_UP, now, timing)
    return health


def _step(health: Health, sign: Sign, now: int, timing: Timing) -> Health:
    try:
        state = TRANSITIONS[health.state, sign]
    except KeyError:
        raise AssertionError(
            f"an entity in state {health.state.value} cannot get the sign {sign.value}"
        ) from None
    if state is _HEALTHY:
        return health if health.state is state else Health(state, now)
    failures = health.failures + (sign is Sign.FAILURE)
    due = _due(health, state, sign, now, timing)
    return Health(state, health.since if state is health.state else now, failures, due)


def _due(before: Health, state: HealthState, sign: Sign, now: int, timing: Timing) -> int:
    """Return when an entity that is not healthy has something to do after a sign."""
    if sign is Sign.LOOK_ON or (state is not before.state and sign in _AT_ONCE):
        return now
    if sign is Sign.LOOKED and state is _SWITCHING:
        return min(now + SWITCH_LOOK_US, before.since + timing.switch_us)
    if state is before.state and sign not in (Sign.PING_SENT, Sign.LOOKED):
        return before.due
    return now + (timing.failover_us if state is _SUSPECT else timing.ping_us)


_AT_ONCE = (Sign.REACHED, Sign.CAUGHT_UP)  # followed by a look
