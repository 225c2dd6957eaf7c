"""Displays the running demo: counters and a timeline on a terminal, plain lines elsewhere."""

import itertools
import sys
import threading
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from twinbus.demo.fleet import Consumer, Fleet, Recorder, Sample
from twinbus.syphon.syphon import Syphon

_SAMPLE_S = 0.5
_LINE_EVERY = 6  # samples
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60  # samples in a chart


class Display:
    """Samples the counters of the run in a thread, and shows them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._live = Live(refresh_per_second=4) if sys.stdout.isatty() else None
        self._fleet: Fleet | None = None
        self._consumer: Consumer | None = None
        self._syphon: Syphon | None = None
        self._printed = 0  # entries of the timeline
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def watch(self, fleet: Fleet, consumer: Consumer, syphon: Syphon | None = None) -> None:
        """Show the counters of these objects from now on."""
        self._fleet, self._consumer, self._syphon = fleet, consumer, syphon

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._show(len(self._recorder.samples))
        if self._live is not None:
            self._live.stop()

    def _run(self) -> None:
        count = 0
        while not self._ended.wait(_SAMPLE_S):
            self._sample()
            count += 1
            self._show(count)

    def _sample(self) -> None:
        if self._fleet is None or self._consumer is None:
            return
        moved = self._syphon.progress.moved if self._syphon is not None else 0
        self._recorder.samples.append(
            Sample(
                self._recorder.now,
                len(self._fleet.acknowledged),
                self._fleet.diverted,
                len(self._consumer.handovers.places),
                moved,
            )
        )

    def _show(self, count: int) -> None:
        if self._live is not None:
            self._live.update(self._picture())
            return
        for entry in self._recorder.timeline[self._printed :]:
            print(f"{entry.at:6.1f} s  {entry.text}", flush=True)
        self._printed = len(self._recorder.timeline)
        if self._recorder.samples and count % _LINE_EVERY == 0:
            print(f"{'':8}  {_counters(self._recorder.samples[-1])}", flush=True)

    def _picture(self) -> Group:
        samples = self._recorder.samples[-_WIDTH:]
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, color in (
            ("acknowledged", "green"),
            ("diverted", "yellow"),
            ("moved", "magenta"),
            ("delivered", "cyan"),
        ):
            totals = [getattr(sample, name) for sample in samples]
            steps = [after - before for before, after in itertools.pairwise(totals)]
            last = f"{totals[-1]:,}" if totals else "0"
            table.add_row(name, last, Text(_bars(steps), style=color))
        timeline = [Text(f"{e.at:6.1f} s  {e.text}") for e in self._recorder.timeline]
        return Group(*timeline, Text(""), table)


def _counters(sample: Sample) -> str:
    return (
        f"acknowledged {sample.acknowledged:,}   diverted {sample.diverted:,}   "
        f"moved {sample.moved:,}   delivered {sample.delivered:,}"
    )


def _bars(steps: list[int]) -> str:
    top = max([*steps, 1])
    return "".join(_BARS[min(round(max(step, 0) / top * 8), 8)] for step in steps)
