"""The audit of the demo, and its page."""

from dataclasses import dataclass
from pathlib import Path

from demo_fleet import Consumer, Fleet, Recorder

from twinbus.charts import Mark, Series, line_chart, page, rates, table
from twinbus.pipeline.desk import SyphonProgress
from twinbus.pipeline.report import Report
from twinbus.pipeline.report_page import report_parts

_GREEN, _AMBER, _PURPLE, _BLUE, _RED = "#12723c", "#c77700", "#7a3fb5", "#1769aa", "#b3261e"


@dataclass(frozen=True, slots=True)
class Audit:
    """What became of every order."""

    recorder: Recorder
    sent: int
    raised: int
    delivered: int
    lost: int
    doubled: int
    redelivered: int
    diverted: int
    moved: int
    longest_wait_s: float

    @classmethod
    def of(
        cls, recorder: Recorder, fleet: Fleet, consumer: Consumer, progress: SyphonProgress
    ) -> "Audit":
        """Count."""
        found = consumer.deliveries
        return cls(
            recorder=recorder,
            sent=len(fleet.acknowledged),
            raised=fleet.raised,
            delivered=len(found),
            lost=sum(order not in found for order in fleet.acknowledged),
            doubled=sum(count > 1 for count in found.values()),
            redelivered=consumer.redelivered,
            diverted=fleet.diverted,
            moved=progress.moved,
            longest_wait_s=fleet.longest_wait_s,
        )

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost or doubled, and the outage was one."""
        return not self.lost and not self.doubled and 0 < self.diverted <= self.moved

    @property
    def drain_s(self) -> float:
        """How long the syphon took, from the primary's return to the last order."""
        return max(self.recorder.at("home") - self.recorder.at("started"), 0.001)

    def rows(self) -> list[tuple[str, str]]:
        """Return the audit as names and values."""
        return [
            ("sent and acknowledged", f"{self.sent:,}"),
            ("delivered", f"{self.delivered:,}"),
            ("lost", f"{self.lost}"),
            ("doubled", f"{self.doubled}"),
            ("delivered once more, completion lost", f"{self.redelivered:,}"),
            ("sends that raised", f"{self.raised}"),
            ("diverted", f"{self.diverted:,}"),
            ("brought home by the syphon", f"{self.moved:,}"),
            ("longest send", f"{self.longest_wait_s:.2f} s"),
            ("from the primary's start to all home", f"{self.drain_s:.1f} s"),
            ("drained", f"{self.moved / self.drain_s:,.0f} orders/s"),
        ]


def stage_rows(report: Report) -> list[tuple[str, str]]:
    """Return what was billed, by stage, as names and values."""
    return [(f"operations: {row['stage']}", f"{row['operations']:,}") for row in report.money]


def write_page(audit: Audit, report: Report, file: Path) -> None:
    """Write the page: what was watched, and what the ledgers tell."""
    samples = audit.recorder.samples
    marks = [
        Mark(one.at, one.mark, _RED if one.mark == "killed" else "#6b7a89")
        for one in audit.recorder.told
        if one.mark
    ]

    def total(name: str) -> list[tuple[float, float]]:
        return [(sample.at, float(getattr(sample, name))) for sample in samples]

    backlog = [(one.at, float(max(one.diverted - one.moved, 0))) for one in samples]
    flow = [
        Series("acknowledged", _GREEN, rates(total("acknowledged"))),
        Series("diverted", _AMBER, rates(total("diverted"))),
        Series("delivered", _BLUE, rates(total("delivered"))),
    ]
    verdict = (
        '<p class="good">Nothing was lost and nothing was doubled.</p>'
        if audit.is_good
        else f'<p class="bad">lost {audit.lost}, doubled {audit.doubled}</p>'
    )
    story = [(f"{one.at:.1f} s", one.text) for one in audit.recorder.told]
    parts = [
        "<p>The primary was killed with -9 while a fleet of paired applications sent orders.</p>",
        verdict,
        line_chart("Orders a second", "orders/s", flow, marks),
        line_chart("Waiting in the backlog", "orders", [Series("orders", _PURPLE, backlog)], marks),
        "<h2>What happened</h2>",
        table(story),
        "<h2>Every order, counted</h2>",
        table(audit.rows()),
        "<h2>What the ledgers tell</h2>",
        *report_parts(report),
    ]
    file.write_text(page("An outage nobody noticed", parts), encoding="utf-8")
