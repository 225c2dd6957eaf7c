"""Writes the spans of a process to a file, one JSON object per line, and reads them all.

`TWINBUS_TRACING=span_file:record_spans` lets any process of Twinbus call `record_spans`, and the
workers of Spark as well. An application would set up an exporter of its own here, such as OTLP.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

FILE_VARIABLE = "SPAN_FILE"


class SpanFile(SpanExporter):
    """Appends spans to a file that several processes write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append one line per span; a line is one write, so lines do not mix."""
        with self._path.open("a", encoding="utf-8") as file:
            for span in spans:
                file.write(
                    json.dumps({**json.loads(span.to_json(None)), "pid": os.getpid()}) + "\n"
                )
                file.flush()
        return SpanExportResult.SUCCESS


def record_spans() -> None:
    """Set up the tracer provider of this process."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SpanFile(Path(os.environ[FILE_VARIABLE]))))
    trace.set_tracer_provider(provider)


def read_spans(path: Path) -> list[dict[str, Any]]:
    """Return the spans that all processes wrote, in the order of their end."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda span: str(span["end_time"]))
