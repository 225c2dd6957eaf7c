"""The options of the `twinbus` data source: the namespace, the entity, and the batch sizes.

    connection | connectionFile | connectionEnv   a connection string, or where to find it
    queue | topic | topic and subscription        the entity
    deadLetter                                    read its dead-letter queue (false)
    maxRowsPerBatch, maxBytesPerBatch             limits of a micro-batch (100000; 256 MiB)
    partitions                                    tasks of a read (by messages and parallelism)
    columns                                       the columns to read, comma-separated (all)
    pushFilters                                   browse only what a query's conditions need (false)
    txnAppId, txnVersion                          identify a batch write, so that it is made once
    leaseSeconds                                  time until others read rows of a dead query (60)

Spark does not show the options in plans, logs or pages. Each process reads the file or the
variable with the connection string itself, so it must exist on every machine of a cluster.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from twinbus.client.courier import Courier
from twinbus.connection import ConnectionString, Place
from twinbus.datasource.columns import READ_COLUMNS
from twinbus.entities import dead_letter_path, subscription_path
from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    DEFAULT_LEASE_DURATION,
    MAX_LEASE_DURATION,
    MAX_LEASE_MESSAGES,
    MAX_TRANSACTION_VERSION,
    STREAM_BATCH_BYTES,
    STREAM_BATCH_MESSAGES,
    STREAM_PARTITIONS,
    STREAM_TASK_MESSAGES,
)
from twinbus.namespace.contract import Namespace
from twinbus.spark.connections import courier_of, namespace_of

_KNOWN = {
    "connection": "connection",
    "connectionfile": "connectionFile",
    "connectionenv": "connectionEnv",
    "queue": "queue",
    "topic": "topic",
    "subscription": "subscription",
    "deadletter": "deadLetter",
    "maxrowsperbatch": "maxRowsPerBatch",
    "maxbytesperbatch": "maxBytesPerBatch",
    "partitions": "partitions",
    "columns": "columns",
    "pushfilters": "pushFilters",
    "txnappid": "txnAppId",
    "txnversion": "txnVersion",
    "leaseseconds": "leaseSeconds",
}
_IN_SQL = (
    "In SQL: CREATE TEMPORARY VIEW orders USING twinbus OPTIONS (connectionEnv 'NAME', queue "
    "'orders'). Spark does not pass SELECT ... WITH (...) on to this data source"
)
_SPARKS_OWN = {"checkpointlocation", "path", "querytype"}  # options that Spark adds


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The validated options."""

    connection: str = field(default="", repr=False)
    connection_file: str = ""
    connection_env: str = ""
    path: str  # of the entity
    is_readable: bool  # false for a topic
    is_writable: bool  # false for a subscription and a dead-letter queue
    max_rows: int = STREAM_BATCH_MESSAGES
    max_bytes: int = STREAM_BATCH_BYTES
    partitions: int | None = None  # None: as `tasks_for` says
    parallelism: int = STREAM_PARTITIONS  # tasks that the cluster runs at once
    columns: tuple[str, ...] = READ_COLUMNS
    push_filters: bool = False
    transaction: tuple[str, int] | None = None  # of a batch write: application and version
    lease: timedelta = DEFAULT_LEASE_DURATION

    @classmethod
    def of(cls, given: Mapping[str, str], parallelism: int = STREAM_PARTITIONS) -> "SourceOptions":
        """Return the options of a data source; raise if they are not valid."""
        options = {name.lower(): value for name, value in given.items()}
        unknown = sorted(set(options) - set(_KNOWN) - _SPARKS_OWN)
        if unknown:
            raise InvalidArgumentError(
                f"unknown option {', '.join(unknown)}; the options are {', '.join(_KNOWN.values())}"
            )
        places = [
            name for name in ("connection", "connectionfile", "connectionenv") if options.get(name)
        ]
        if len(places) != 1:
            raise InvalidArgumentError(
                "the namespace is missing or set twice: set exactly one of the options connection, "
                "connectionFile (a file with the connection string) and connectionEnv (an "
                "environment variable). "
                f"{_IN_SQL}"
            )
        path, is_topic, is_inner = _path(options)
        lease_s = _number(options, "leaseseconds", 1, int(MAX_LEASE_DURATION.total_seconds()))
        found = cls(
            connection=options.get("connection", ""),
            connection_file=options.get("connectionfile", ""),
            connection_env=options.get("connectionenv", ""),
            path=path,
            is_readable=not is_topic,
            is_writable=not is_inner,
            max_rows=_number(options, "maxrowsperbatch", 1, MAX_LEASE_MESSAGES)
            or STREAM_BATCH_MESSAGES,
            max_bytes=_number(options, "maxbytesperbatch", 1, 2**40) or STREAM_BATCH_BYTES,
            partitions=_number(options, "partitions", 1, 10_000) or None,
            parallelism=parallelism,
            columns=_columns(options.get("columns")),
            push_filters=_flag(options, "pushfilters"),
            transaction=_transaction(options),
            lease=timedelta(seconds=lease_s) if lease_s else DEFAULT_LEASE_DURATION,
        )
        found._check_connection()
        return found

    def _check_connection(self) -> None:
        if ConnectionString.parse(self._connection()).place is Place.EMBEDDED:
            raise InvalidArgumentError(
                "an embedded namespace is open in one process only, and Spark has several; serve "
                "it with `twinbus serve` and use the connection string of the server"
            )

    def _connection(self) -> str:
        if self.connection:
            return self.connection
        if self.connection_file:
            try:
                return Path(self.connection_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                cause = error.strerror if isinstance(error, OSError) else "it is not valid UTF-8"
                raise InvalidArgumentError(
                    f"connectionFile cannot be read on this machine: {cause}. Put the file on "
                    "every machine of the cluster, at the same path"
                ) from error
        found = os.environ.get(self.connection_env, "")
        if not found:
            raise InvalidArgumentError(
                f"connectionEnv names {self.connection_env}, which is not set in this process. Set "
                "it where Spark starts its driver and its workers"
            )
        return found

    def tasks_for(self, messages: int) -> int:
        """Return into how many tasks to divide a read of this number of messages.

        There are at least as many tasks as the cluster ran at once when the data source was
        registered. A large read has more, so that no task has too many messages and a cluster that
        has grown since then is used.
        """
        return self.partitions or max(self.parallelism, -(-messages // STREAM_TASK_MESSAGES))

    def namespace(self) -> Namespace:
        """Return the namespace, in any process."""
        return namespace_of(self._connection())

    def courier(self) -> Courier:
        """Return a courier to the namespace, with the default retry policy."""
        return courier_of(self._connection())


def _path(options: Mapping[str, str]) -> tuple[str, bool, bool]:
    """Return the path, whether it is a topic, and whether it can only be read."""
    queue, topic = options.get("queue", ""), options.get("topic", "")
    subscription = options.get("subscription", "")
    if bool(queue) == bool(topic) or (subscription and not topic):
        raise InvalidArgumentError(
            "the entity is missing or set twice: set either the option queue, or topic to write, "
            f"or topic and subscription to read. {_IN_SQL}"
        )
    is_dead = _flag(options, "deadletter")
    path = queue or (subscription_path(topic, subscription) if subscription else topic)
    is_topic = bool(topic) and not subscription
    if is_dead and is_topic:
        raise InvalidArgumentError("a topic has no dead-letter queue; set subscription as well")
    return dead_letter_path(path) if is_dead else path, is_topic, is_dead or bool(subscription)


def _columns(given: str | None) -> tuple[str, ...]:
    """Return the columns to read."""
    if given is None:
        return READ_COLUMNS
    names = tuple(name.strip() for name in given.split(","))
    unknown = sorted(set(names) - set(READ_COLUMNS))
    if unknown or len(set(names)) != len(names):
        raise InvalidArgumentError(
            f"columns is {given!r}; it must be a list of different column names out of "
            f"{', '.join(READ_COLUMNS)}"
        )
    return names


def _transaction(options: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the identity of a batch write; None if it has none."""
    application = options.get("txnappid", "")
    if bool(application) != ("txnversion" in options):
        raise InvalidArgumentError(
            "txnAppId and txnVersion must be set together: a name of the application, and a number "
            "that increases with each of its writes, such as the batch id of foreachBatch"
        )
    if not application:
        return None
    return application, _number(options, "txnversion", 0, MAX_TRANSACTION_VERSION)


def _flag(options: Mapping[str, str], name: str) -> bool:
    """Return whether an option is true; False if it is not given."""
    text = options.get(name, "false")
    if text.lower() not in ("true", "false"):
        raise InvalidArgumentError(f"{_KNOWN[name]} is {text!r}; it must be true or false")
    return text.lower() == "true"


def _number(options: Mapping[str, str], name: str, low: int, high: int) -> int:
    """Return a whole number; 0 if it is not given."""
    text = options.get(name)
    if text is None:
        return 0
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InvalidArgumentError(
            f"{_KNOWN[name]} is {text!r}; it must be a whole number from {low} to {high}"
        )
    return value
