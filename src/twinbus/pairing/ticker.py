"""Calls a function when it is due: in a thread on real time, inline when a manual clock moves.

The first due time starts the thread, so a pairing that never fails has no thread. Any thread may
call `expect` and `nudge`. At most one call of the function runs at a time.
"""

import logging
import threading
from collections.abc import Callable

from twinbus.clock import Clock, passes_by_itself
from twinbus.limits import NEVER_US, TICK_RETRY_US

_log = logging.getLogger("twinbus.pairing")


class Ticker:
    """Calls `tick(now)`, one call at a time; `tick` returns when it must be called next."""

    def __init__(self, clock: Clock, tick: Callable[[int], int]) -> None:
        self._clock = clock
        self._tick = tick
        self._due = NEVER_US
        self._is_wanted = False
        self._turn = threading.Lock()  # the thread that ticks has it
        self._changing = threading.Lock()  # guards the due time and the thread
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._time_passes = passes_by_itself(clock)
        self._stop_listening = clock.on_advance(self._run)

    def expect(self, due: int) -> None:
        """Tick at that moment, or earlier."""
        with self._changing:
            if due >= self._due or self._is_closed:
                return
            self._due = due
            if self._thread is None and self._time_passes:
                self._thread = threading.Thread(
                    target=self._live, name="twinbus-pairing", daemon=True
                )
                self._thread.start()
        self._wake.set()

    def nudge(self) -> None:
        """Tick soon; without a thread, at once."""
        if self._thread is None:
            self._run()
        else:
            self._due = 0
            self._wake.set()

    def _live(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._clock.seconds_until(self._due))
            self._wake.clear()
            if self._due <= self._clock.now_us():
                self._run()

    def _run(self) -> None:
        """Tick; if another thread is ticking, make that thread tick once more."""
        self._is_wanted = True
        while self._is_wanted and not self._is_closed and self._turn.acquire(blocking=False):
            try:
                self._is_wanted = False
                self._due = NEVER_US
                self.expect(self._tick(self._clock.now_us()))
            except Exception:  # noqa: BLE001 - no error may stop later ticks
                _log.exception("a tick of a pairing failed; the next tick follows")
                self.expect(self._clock.now_us() + TICK_RETRY_US)
            finally:
                self._turn.release()

    def close(self) -> None:
        """Stop; return when the last tick has ended, unless a tick itself calls this."""
        with self._changing:
            if self._is_closed:
                return
            self._is_closed = True
        self._stop_listening()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
