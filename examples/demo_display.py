"""What the demo shows while it runs: counters and a timeline, or plain lines where no one looks."""

import itertools
import sys
import threading
from typing import Self

from demo_fleet import Consumer, Fleet, Recorder, Sample
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from twinbus.syphon.syphon import Syphon

_SAMPLE_S = 0.5
_LINE_EVERY = 6  # samples
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60  # samples of a picture


class Display:
    """Samples the run, and shows it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._live = Live(refresh_per_second=4) if sys.stdout.isatty() else None
        self._fleet: Fleet | None = None
        self._consumer: Consumer | None = None
        self._syphon: Syphon | None = None
        self._told = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def watch(self, fleet: Fleet, consumer: Consumer, syphon: Syphon | None = None) -> None:
        """Take these into the picture."""
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
        for one in self._recorder.told[self._told :]:
            print(f"{one.at:6.1f} s  {one.text}", flush=True)
        self._told = len(self._recorder.told)
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
        story = [Text(f"{one.at:6.1f} s  {one.text}") for one in self._recorder.told]
        return Group(*story, Text(""), table)


def _counters(sample: Sample) -> str:
    return (
        f"acknowledged {sample.acknowledged:,}   diverted {sample.diverted:,}   "
        f"moved {sample.moved:,}   delivered {sample.delivered:,}"
    )


def _bars(steps: list[int]) -> str:
    top = max([*steps, 1])
    return "".join(_BARS[min(round(max(step, 0) / top * 8), 8)] for step in steps)
