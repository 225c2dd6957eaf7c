"""The verdict of the demo, and its page."""

from dataclasses import dataclass
from html import escape

from twinbus.cost.answers import Report
from twinbus.cost.charts import Mark, Series, grid, line_chart, page, rates, table
from twinbus.cost.report_page import report_parts
from twinbus.demo.audit import Findings
from twinbus.demo.fleet import Recorder

_GREEN, _AMBER, _PURPLE, _BLUE, _RED = "#12723c", "#c77700", "#7a3fb5", "#1769aa", "#b3261e"


@dataclass(frozen=True, slots=True)
class Audit:
    """The findings about every order, and the numbers of the outage."""

    recorder: Recorder
    findings: Findings
    raised: int
    diverted: int
    moved: int
    longest_wait_s: float

    @property
    def problems(self) -> list[str]:
        """The guarantees that were broken, and the parts of the demo that did not happen."""
        found = self.findings
        counts = [
            (len(found.lost), "acknowledged order(s) lost"),
            (len(found.doubled), "order(s) enqueued twice"),
            (len(found.late), "order(s) not delivered in time"),
            (found.renumbered, "sequence number(s) given to two orders"),
            (max(self.diverted - self.moved, 0), "diverted order(s) not brought home"),
        ]
        problems = [f"{count:,} {what}" for count, what in counts if count]
        return problems if self.diverted else [*problems, "no order was diverted"]

    @property
    def drain_s(self) -> float:
        """How long the syphon took, from the restart of the primary to the last diverted order."""
        return max(self.recorder.at("home") - self.recorder.at("started"), 0.001)

    def rows(self) -> list[tuple[str, str]]:
        """Return the audit as names and values."""
        found = self.findings
        return [
            ("sent and acknowledged", f"{found.acknowledged:,}"),
            ("delivered", f"{found.delivered:,}"),
            ("lost", f"{len(found.lost)}"),
            ("doubled", f"{len(found.doubled)}"),
            ("not delivered in time", f"{len(found.late)}"),
            ("delivered again after a lost completion", f"{found.redelivered:,}"),
            ("sends that raised", f"{self.raised}"),
            ("diverted", f"{self.diverted:,}"),
            ("brought home by the syphon", f"{self.moved:,}"),
            ("longest send", f"{self.longest_wait_s:.2f} s"),
            ("from the primary's start to all home", f"{self.drain_s:.1f} s"),
            ("drained", f"{self.moved / self.drain_s:,.0f} orders/s"),
        ]


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """The result of the demo, with the texts of its page."""

    is_good: bool
    title: str
    headline: str

    @classmethod
    def of(cls, audit: Audit, not_reconciled: int) -> "DemoVerdict":
        """Return the verdict on an audit and the number of messages the ledgers cannot explain."""
        problems = audit.problems
        if not_reconciled:
            problems.append(f"{not_reconciled:,} message(s) not accounted for by the ledgers")
        if problems:
            text = ", ".join(problems)
            return cls(False, "An outage, and the audit failed", f"The audit failed: {text}.")
        if audit.raised:
            text = f"Nothing was lost and nothing was doubled. {audit.raised:,} send(s) raised."
            return cls(True, "An outage that lost nothing", text)
        text = "Nothing was lost and nothing was doubled."
        return cls(True, "An outage nobody noticed", text)


def stage_rows(report: Report) -> list[tuple[str, str]]:
    """Return the billed operations of each stage, as names and values."""
    return [(f"operations: {row.stage}", f"{row.operations:,}") for row in report.money]


def demo_page(audit: Audit, report: Report) -> str:
    """Return the page: the verdict, the charts of the run, and the report from the ledgers."""
    samples = audit.recorder.samples
    marks = [
        Mark(entry.at, entry.mark, _RED if entry.mark == "killed" else "#6b7a89")
        for entry in audit.recorder.timeline
        if entry.mark
    ]

    def total(name: str) -> list[tuple[float, float]]:
        return [(sample.at, float(getattr(sample, name))) for sample in samples]

    backlog = [(sample.at, float(max(sample.diverted - sample.moved, 0))) for sample in samples]
    flow = [
        Series("acknowledged", _GREEN, rates(total("acknowledged"))),
        Series("diverted", _AMBER, rates(total("diverted"))),
        Series("delivered", _BLUE, rates(total("delivered"))),
    ]
    verdict = DemoVerdict.of(audit, report.suspect_count)
    style = "good" if verdict.is_good else "bad"
    timeline = [(f"{entry.at:.1f}\u00a0s", entry.text) for entry in audit.recorder.timeline]
    parts = [
        "<p>The primary was killed with -9 while a fleet of paired applications sent orders.</p>",
        f'<p class="{style}">{escape(verdict.headline)}</p>',
        line_chart("Orders a second", "orders/s", flow, marks),
        line_chart("Waiting in the backlog", "orders", [Series("orders", _PURPLE, backlog)], marks),
        "<h2>What happened</h2>",
        grid(("after", "what"), timeline),
        "<h2>Every order, counted</h2>",
        table(audit.rows()),
        "<h2>What the ledgers show</h2>",
        *report_parts(report),
    ]
    return page(verdict.title, parts)
