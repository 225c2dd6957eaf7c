"""Waking a thread that sleeps for a bounded time: no wake-up is lost, no sleep lasts for ever."""

import threading

from twinbus.wakeup import Inbox, Wakeup

SHORT_S = 0.00001  # passes between any two steps of a thread now and then
LONG_S = 20.0  # never passes in a good run


def test_a_sleeper_is_woken() -> None:
    wakeup = Wakeup()
    threading.Timer(0.01, wakeup.send).start()
    assert wakeup.wait(LONG_S)


def test_one_that_was_sent_before_ends_the_next_sleep_at_once() -> None:
    wakeup = Wakeup()
    wakeup.send()
    assert wakeup.wait(LONG_S)


def test_several_that_were_sent_before_end_one_sleep() -> None:
    wakeup = Wakeup()
    wakeup.send()
    wakeup.send()
    assert wakeup.wait(LONG_S)
    assert not wakeup.wait(SHORT_S)


def test_nobody_sleeps_longer_than_he_wants_to() -> None:
    wakeup = Wakeup()
    assert not wakeup.wait(SHORT_S)
    assert not wakeup.wait(0)


def test_a_short_sleep_ends_however_busy_the_machine_is() -> None:
    inbox: Inbox[int] = Inbox()

    def sleep_often() -> None:
        for number in range(50_000):
            inbox.put(number)
            assert inbox.get(LONG_S) == number
            inbox.get(SHORT_S)

    sleeper = threading.Thread(target=sleep_often, daemon=True)
    sleeper.start()
    sleeper.join(60)
    assert not sleeper.is_alive()


def test_an_inbox_gives_everything_in_order() -> None:
    inbox: Inbox[int] = Inbox()

    def put_all() -> None:
        for number in range(1000):
            inbox.put(number)

    threading.Thread(target=put_all).start()
    assert [inbox.get(LONG_S) for _ in range(1000)] == list(range(1000))
    assert inbox.get(SHORT_S) is None
