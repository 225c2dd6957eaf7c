"""Hundreds of random outages on a simulated clock, and an auditor that would notice."""

import functools
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from twinbus.cli import main
from twinbus.message import to_batch, to_messages
from twinbus.pairing import homing, lifecycle, pinger, sender
from twinbus.pairing.backlog import restored
from twinbus.pairing.health import TRANSITIONS, HealthState, Sign
from twinbus.syphon import carrier
from twinbus.testing import Fault, Mover, Outage, OutageSimulation, Setting, Verdict, Where

SEEDS = range(100)
SETTING = Setting(
    factories=1,
    clients=3,
    backlog_queues=2,
    failover_interval=timedelta(0),
    ping_interval=timedelta(minutes=1),
    operation_timeout=timedelta(seconds=15),
    move_interval=timedelta(seconds=30),
    sends=120,
)
RETURN_PAIRS = {
    pair
    for pair, after in TRANSITIONS.items()
    if {pair[0], after} & {HealthState.RETURNING, HealthState.SWITCHING}
}  # met only with preserve_order
NOON = Outage(at=timedelta(minutes=10), lasts=timedelta(minutes=30))  # the primary is down


@functools.cache
def verdict_of(seed: int) -> Verdict:
    return OutageSimulation(seed=seed, hours=1).run()


@functools.cache
def ordered_verdict_of(seed: int) -> Verdict:
    return OutageSimulation(seed=seed, hours=1, preserve_order=True).run()


def scripted(*script: Outage, setting: Setting = SETTING) -> Verdict:
    return OutageSimulation(seed=1, hours=1, script=script, setting=setting).run()


@pytest.mark.parametrize("first", SEEDS[::20])
def test_every_guarantee_holds_through_random_outages(first: int) -> None:
    broken = {
        seed: v.violations
        for seed in range(first, first + 20)
        if not (v := verdict_of(seed)).is_good
    }
    assert not broken, f"replay with: twinbus simulate --hours 1 --seed {min(broken)}"


def test_every_pair_of_the_health_table_was_met() -> None:
    met: Counter[tuple[HealthState, Sign]] = Counter()
    for seed in SEEDS:
        met.update(verdict_of(seed).signs)
    # A simulated pairing has its backlog queues from its first moment; test_pairing_unprotected.py
    # has one that has none yet.
    never_met = {(HealthState.FAILED_OVER, Sign.PASSED)}
    assert set(met) == set(TRANSITIONS) - never_met - RETURN_PAIRS


@pytest.mark.parametrize("first", SEEDS[::20])
def test_with_preserve_order_no_message_overtakes_another(first: int) -> None:
    seeds = range(first, first + 20)
    broken = {seed: v.violations for seed in seeds if not (v := ordered_verdict_of(seed)).is_good}
    assert not broken, f"replay: twinbus simulate --preserve-order --hours 1 --seed {min(broken)}"
    out_of_order = [(v.reordered, v.reordered_in_sessions) for v in map(ordered_verdict_of, seeds)]
    assert out_of_order == [(0, 0)] * len(seeds)


def test_without_preserve_order_messages_of_the_same_seeds_overtake_each_other() -> None:
    verdicts = [verdict_of(seed) for seed in SEEDS]
    assert sum(verdict.reordered for verdict in verdicts) > 0
    assert sum(verdict.reordered_in_sessions for verdict in verdicts) > 0


def test_with_preserve_order_entities_were_diverted_and_returned() -> None:
    met: Counter[tuple[HealthState, Sign]] = Counter()
    for seed in SEEDS:
        met.update(ordered_verdict_of(seed).signs)
    in_flight = {Sign.SUCCESS, Sign.FAILURE}  # of sends that began before the failover: too rare
    seconds_only = {(HealthState.SWITCHING, Sign.MARKED), (HealthState.SWITCHING, Sign.LOOK_ON)}
    wanted = {pair for pair in RETURN_PAIRS if pair[1] not in in_flight} - seconds_only
    assert wanted <= set(met)
    assert sum(ordered_verdict_of(seed).diverted for seed in SEEDS) > 0


def test_rare_things_really_happened() -> None:
    verdicts = [verdict_of(seed) for seed in SEEDS]
    for name in ("faults", "raised", "diverted", "moved", "poisoned", "reordered"):
        assert sum(getattr(verdict, name) for verdict in verdicts), name


def test_the_same_seed_gives_the_same_story() -> None:
    stories: list[list[str]] = [[], []]
    for story in stories:
        OutageSimulation(seed=18, hours=3, report=story.append).run()
    assert stories[0] == stories[1]
    assert any("FailedOver" in line for line in stories[0])


def test_outages_can_be_scripted() -> None:
    verdict = scripted(NOON)
    assert verdict.is_good, verdict
    assert verdict.acknowledged == verdict.sent
    assert verdict.diverted > 0
    assert verdict.signs[HealthState.FAILED_OVER, Sign.PING_PASSED] > 0


def test_without_outages_nothing_is_diverted() -> None:
    verdict = scripted()
    assert verdict.is_good, verdict
    assert (verdict.diverted, verdict.raised, verdict.faults) == (0, 0, 0)


def test_lost_replies_double_nothing() -> None:
    lost = Outage(at=timedelta(minutes=5), lasts=timedelta(minutes=50), fault=Fault.REPLY_LOST)
    verdict = scripted(
        lost, Outage(at=lost.at, lasts=lost.lasts, fault=lost.fault, where=Where.SECONDARY)
    )
    assert verdict.is_good, verdict


# -- the auditor notices ---------------------------------------------------------------------------


def broken_guarantees(*script: Outage) -> set[str]:
    return {violation.partition(":")[0] for violation in scripted(*script).violations}


def test_it_notices_a_message_that_stays_in_the_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    original = carrier.Carrier.pieces

    def forgetful(*given: Any) -> Any:
        return (batch.slice(1) for batch in original(*given))

    monkeypatch.setattr(carrier.Carrier, "pieces", forgetful)
    assert "G7" in broken_guarantees(NOON)


def test_it_notices_a_message_that_is_settled_before_it_is_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Mover, "primary", property(lambda _: _Deaf(), lambda *_: None), raising=False
    )
    assert "G1" in broken_guarantees(NOON)


class _Deaf:
    """A primary that acknowledges and forgets."""

    def submit(self, _: Any) -> "Future[None]":
        """Say yes."""
        reply: Future[None] = Future()
        reply.set_result(None)
        return reply


def test_it_notices_a_double(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless(*_: Any) -> None:
        return None

    monkeypatch.setattr(carrier, "Origin", nameless)
    lost = Outage(at=timedelta(minutes=5), lasts=timedelta(minutes=50), fault=Fault.REPLY_LOST)
    assert "G2" in broken_guarantees(lost)


def test_it_notices_messages_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # the syphon is made to err, to see that the auditor notices
    original = carrier._runs_of

    def reverse(*given: Any) -> list[carrier.Run]:
        runs = list(original(*given))
        return [run.slice(at, at + 1) for run in runs for at in reversed(range(len(run)))]

    monkeypatch.setattr(carrier, "_runs_of", reverse)
    assert "G3" in broken_guarantees(NOON)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("is_empty", property(lambda _: True)),  # everything is always home
        ("finding", lambda *_: homing.Finding.HOME),  # everything is home at the first look
    ],
)
def test_it_notices_a_message_that_was_overtaken_in_spite_of_preserve_order(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(homing.Diversions, name, wrong)
    slow = timedelta(minutes=5)
    ordered = replace(SETTING, preserve_order=True, sends=600, move_interval=slow)
    verdict = scripted(NOON, setting=ordered)
    assert "G3" in {violation.partition(":")[0] for violation in verdict.violations}


def test_it_notices_a_changed_field(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(batch: Any) -> Any:
        found = restored(batch)
        changed = [replace(m, subject="changed") for m in to_messages(found.batch)]
        return replace(found, batch=to_batch(changed))

    monkeypatch.setattr(carrier, "restored", careless)
    assert "G4" in broken_guarantees(NOON)


def test_it_notices_an_entity_that_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinger.Pinger, "_end", lambda *_: None)
    assert "G5" in broken_guarantees(NOON)


def test_it_notices_a_failover_for_mere_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "says_unavailable", lambda _: True)
    busy = Outage(at=timedelta(minutes=5), lasts=timedelta(minutes=50), fault=Fault.SERVER_BUSY)
    assert "G5" in broken_guarantees(busy)


def test_it_notices_a_healthy_send_that_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    original = sender.PairedRoute.send

    def wasteful(self: sender.PairedRoute, command: Any, lane: Any, **rest: Any) -> Any:
        original(self, command, lane, **rest)
        return original(self, command, lane, **rest)

    monkeypatch.setattr(sender.PairedRoute, "send", wasteful)
    assert "G6" in broken_guarantees()


def test_it_notices_factories_that_do_not_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "after_state", lambda partnership, *_: partnership)
    ending = "twinbus.pairing.pairing.SendAvailabilityPairing._end"
    monkeypatch.setattr(ending, lambda *_, **__: None)
    assert "G8" in broken_guarantees()


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_the_story_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", "--seed", "18", "--hours", "3"])
    reported = capsys.readouterr().out
    assert "seed 18, 3 hours" in reported
    assert "FailedOver" in reported
    assert "every guarantee held: lost 0, doubled 0" in reported


def test_the_command_says_how_to_replay_a_broken_guarantee(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sender, "says_unavailable", lambda _: True)
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--seed", "18", "--hours", "3", "--quiet"])
    assert end.value.code == 1
    assert "twinbus simulate --seed 18 --hours 3" in capsys.readouterr().out
