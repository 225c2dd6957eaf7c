"""Diagnostic bundles: a folder for the operator, written before a restart from the log."""

import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twinbus.broker.lifecycle import State
from twinbus.broker.store.log import Log
from twinbus.broker.turn.namespace import BrokerNamespace
from twinbus.clock import from_us
from twinbus.files import create_private, make_private
from twinbus.limits import KEPT_DIAGNOSTIC_BUNDLES

_README = """\
Twinbus found its state inconsistent and restarted from its log.

When      {when}
What      {what}
Process   {pid}, Python {python}

No acknowledged message was lost: the log contains all of them, and the broker read it again. Locks
were released, so messages that were being processed are delivered again.

  traceback.txt   where it happened
  entities.json   the counts of each queue, and which of them are inconsistent
  log.json        the files of the log and their sizes
  commands.txt    the last commands, newest last, without message contents

What to do: if this happens once, nothing. If it happens again, report it with this folder; it
contains entity names, but neither message bodies nor keys.
"""


def write_bundle(
    directory: Path,
    error: BaseException,
    namespace: BrokerNamespace,
    log: Log,
    recent: Iterable[str],
    now: int,
) -> Path:
    """Write a bundle and return its folder; delete the oldest bundles."""
    written_at = from_us(now)
    make_private(directory)
    folder = directory / written_at.strftime("%Y-%m-%dT%H-%M-%S.%fZ")
    make_private(folder)
    problem = f"{type(error).__name__}: {error}"
    readme = _README.format(
        when=written_at.isoformat(), what=problem, pid=os.getpid(), python=sys.version.split()[0]
    )
    texts = {
        "README.txt": readme,
        "traceback.txt": "".join(traceback.format_exception(error)),
        "entities.json": json.dumps(_entities(namespace), indent=2),
        "log.json": json.dumps(_log(log), indent=2),
        "commands.txt": "\n".join(recent) + "\n",
    }
    for name, text in texts.items():
        with create_private(folder / name) as file:
            file.write(_without_secrets(text, namespace).encode(errors="backslashreplace"))
    for old in sorted(path for path in directory.iterdir() if path.is_dir())[
        :-KEPT_DIAGNOSTIC_BUNDLES
    ]:
        shutil.rmtree(old)
    return folder


def _without_secrets(text: str, namespace: BrokerNamespace) -> str:
    """Return a text without access keys, which an error text may contain."""
    for key in namespace.keys.all():
        for secret in (key.primary, key.secondary):
            text = text.replace(secret, "(a key)")
    return text


def _entities(namespace: BrokerNamespace) -> list[dict[str, Any]]:
    return [
        {
            "path": queue.path,
            "counts": {state.name: int(queue.waiting.counts[state]) for state in State},
            "size_in_bytes": queue.waiting.size_in_bytes,
            "next_sequence_number": queue.next_sequence,
            "waiting_receives": len(queue.waiters),
            "faults": queue.waiting.faults(),
        }
        for queue in namespace.directory.queues()
    ]


def _log(log: Log) -> dict[str, Any]:
    files = [{"file": s.path.name, "bytes": s.size} for s in log.segments.values()]
    return {"directory": str(log.directory), "segments": files, "cut_bytes": log.cut_bytes}
