"""Applies the configuration file of a running server again, after SIGHUP.

Limits, ledger settings, entities and keys of the file take effect at once; TLS files, addresses and
the settings in FIXED_SETTINGS need a restart. If `read_config` finds a mistake in the file, nothing
changes. If the namespace then refuses an entity or a key, the reload stops there, and the log lists
what was applied. The server keeps running in every case, and logs one line per reload. A separate
thread reloads, because a command may wait for the disk and the process must still react to SIGTERM.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twinbus.broker.accounts.ledgers import FIXED_SETTINGS
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.errors import MessagingError
from twinbus.loglines import facts
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.server.config import Config, apply, read_config
from twinbus.server.door import Door

_log = logging.getLogger("twinbus.server")


class Reloader:
    """Reloads in its own thread; requests during a reload are combined into one more reload."""

    def __init__(
        self, file: Path | None, config: Config, namespace: EmbeddedNamespace, door: Door
    ) -> None:
        self._file = file
        self._config = config  # the configuration in effect
        self._namespace = namespace
        self._door = door
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="twinbus-reload", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Request a reload of the file; returns at once."""
        self._wanted.set()

    def close(self) -> None:
        """Stop reloading; a reload in progress finishes its commands."""
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            try:
                self.reload()
            except Exception:  # noqa: BLE001 - a failed reload must not stop the server
                _log.exception("The configuration was not reloaded because of an internal error")

    def reload(self) -> None:
        """Read the file and apply what has changed."""
        if self._file is None:
            _log.warning(
                "The configuration was not reloaded: the server was started without --config",
                extra=facts(event="reload_skipped"),
            )
            return
        try:
            wanted = read_config(self._file)
        except MessagingError as error:
            _log.error(
                "The configuration was not reloaded, and the old settings stay in effect: %s",
                error.text,
                extra=facts(event="reload_failed", reason=error.text),
            )
            return
        changes, restarts = self._apply_settings(wanted)
        try:
            apply(wanted, self._namespace, changes.append)
        except MessagingError as error:
            _log.error(
                "The configuration was reloaded only in part: %s. Applied: %s. Correct the file "
                "and send SIGHUP again",
                error.text,
                _listed(changes),
                extra=facts(event="reload_failed", reason=error.text, applied=changes),
            )
            return
        _log.info(
            "The configuration was reloaded from %s. Applied: %s. Needs a restart: %s",
            self._file,
            _listed(changes),
            _listed(restarts),
            extra=facts(event="reloaded", applied=changes, needs_restart=restarts),
        )

    def _apply_settings(self, wanted: Config) -> tuple[list[str], list[str]]:
        """Apply limits and ledger settings; return what changed, and what needs a restart."""
        before, after = _settings_of(self._config), _settings_of(wanted)
        changes: list[str] = []
        restarts: list[str] = []
        for name, value in after.items():
            if value == before[name]:
                continue
            is_fixed = name in (f"ledger.{fixed}" for fixed in FIXED_SETTINGS)
            (restarts if is_fixed else changes).append(f"{name} {before[name]} -> {value}")
        limits = NamespaceSettings(
            max_message_bytes=wanted.max_message_bytes, thresholds=wanted.thresholds
        )
        self._namespace.reconfigure(limits, wanted.ledger)
        self._door.limit_connections(wanted.max_connections)
        self._config = wanted.with_ledger(self._namespace.settings.ledger)
        return changes, restarts


def _settings_of(config: Config) -> Mapping[str, Any]:
    """Return the limits and ledger settings by their names in the file."""
    limits = {
        "max_message_bytes": config.max_message_bytes,
        "max_connections": config.max_connections,
        **asdict(config.thresholds),
    }
    ledger = asdict(config.ledger)
    return {f"limits.{name}": value for name, value in limits.items()} | {
        f"ledger.{name}": value for name, value in ledger.items()
    }


def _listed(texts: list[str]) -> str:
    return "; ".join(texts) or "nothing"
