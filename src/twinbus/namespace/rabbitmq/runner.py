"""Runs commands on the event loop: decides which part executes which command.

There are three connections, each opened when it is needed. One only publishes, because RabbitMQ
stops reading a publishing connection during a memory or disk alarm: receives and settlements on the
second connection are not affected. The third is for pings.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa

from twinbus import compute as pc
from twinbus.clock import Clock
from twinbus.connection import ConnectionString
from twinbus.entities import DEAD_LETTER_SUFFIX, SUBSCRIPTIONS
from twinbus.errors import (
    NAMESPACE_CLOSED,
    EntityNotFoundError,
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
    NamespaceClosedError,
    UnsupportedCapabilityError,
)
from twinbus.limits import (
    MAX_BATCH_MESSAGES,
    MAX_CLOSE_WAIT,
    MAX_ID_CHARACTERS,
    PING_CONTENT_TYPE,
    SECOND_US,
)
from twinbus.message import (
    APPLICATION_FIELDS,
    BOUNDED_TEXTS,
    BrokeredMessage,
    application_values,
    byte_lengths,
    check_values,
    columns_in_use,
    conform,
    values_of,
)
from twinbus.namespace.rabbitmq.connections import BrokerConnection
from twinbus.namespace.rabbitmq.messages import Publication, published
from twinbus.namespace.rabbitmq.probing import Prober
from twinbus.namespace.rabbitmq.publishing import Dispatch, Publisher, with_accepted
from twinbus.namespace.rabbitmq.receiving import LockKeeper
from twinbus.namespace.rabbitmq.refusals import lost, refusal_of
from twinbus.namespace.rabbitmq.topology import (
    NAME,
    Topology,
    declare_dead_letters,
    get_entity,
)
from twinbus.protocol.capabilities import Capability, unsupported
from twinbus.protocol.commands import (
    CreateEntity,
    DeleteEntity,
    Disposition,
    GetEntity,
    GetRuntimeProperties,
    Origin,
    Receive,
    Send,
    SendReceipt,
    Settle,
    UpdateEntity,
)
from twinbus.protocol.origins import message_id_of
from twinbus.protocol.requests import Request, unanswered
from twinbus.protocol.table import undo_of

CAPABILITIES = frozenset({Capability.MANAGEMENT})


class RabbitJob:
    """A request in progress, with the task or send that executes it; it can be withdrawn."""

    __slots__ = ("dispatch", "is_answered", "on_end", "request", "task", "timer", "value")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.dispatch: Dispatch | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_answered = False
        self.value: Any = None
        self.on_end: Callable[[RabbitJob], None] = _do_nothing

    def answer(self, value: Any) -> None:
        """Complete the request with its reply."""
        self.value = value
        self.end()
        self.request.answer(value)

    def fail(self, error: MessagingError) -> None:
        """Complete the request with an error."""
        self.end()
        self.request.fail(error)

    def with_accepted(self, error: MessagingError) -> MessagingError:
        """Return the error of a request without a reply, with the rows that are accepted so far."""
        if self.dispatch is None or not self.dispatch.accepted:
            return error
        return with_accepted(error, list(self.dispatch.accepted))

    def end(self) -> None:
        """Note that the command is complete, or that nobody waits for it."""
        self.is_answered = True
        if self.timer is not None:
            self.timer.cancel()
        self.on_end(self)


def _do_nothing(_job: RabbitJob) -> None:
    """Do nothing, in place of the loop."""


class CommandRunner:
    """Executes commands; every method is called on the loop."""

    def __init__(self, settings: ConnectionString, clock: Clock) -> None:
        self._clock = clock
        self._sends = BrokerConnection(settings, "sends")
        self._receives = BrokerConnection(settings, "receives and management")
        self._pings = BrokerConnection(settings, "pings")
        self._connections = (self._sends, self._receives, self._pings)
        self._publisher = Publisher(self._sends)
        self._keeper = LockKeeper(self._receives)
        self._topology = Topology(self._receives)
        self._prober = Prober(self._pings)
        self._jobs: set[RabbitJob] = set()  # the jobs that have a task

    # -- from the request to the reply ---------------------------------------------------------

    def begin(self, job: RabbitJob, timeout_s: float | None) -> None:
        """Start a command; it is withdrawn after the timeout."""
        command = job.request.command
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(timeout_s, self._time_out, job, timeout_s)
        try:
            if isinstance(command, Send):
                self._begin_send(job, command)
                return
            handler = _HANDLERS[type(command)]
        except MessagingError as error:
            job.fail(error)
            return
        job.task = asyncio.create_task(self._run(job, lambda: handler(self, command)))

    async def _run(self, job: RabbitJob, carry_out: Callable[[], Any]) -> None:
        self._jobs.add(job)
        try:
            job.answer(await carry_out())
        except asyncio.CancelledError:
            job.fail(NamespaceClosedError(NAMESPACE_CLOSED))  # ignored after a reply
        except Exception as error:  # noqa: BLE001 - pika raises many types; the caller gets it
            path = getattr(job.request.command, "path", "")
            job.fail(refusal_of(error, path if isinstance(path, str) else ""))
        except BaseException:  # the thread that runs the loop was interrupted
            job.fail(lost())
            raise
        finally:
            self._jobs.discard(job)

    def _time_out(self, job: RabbitJob, timeout_s: float) -> None:
        error = unanswered(timeout_s, job.request.command)
        job.request.fail(job.with_accepted(error))
        self.withdraw(job)

    def withdraw(self, job: RabbitJob) -> None:
        """Stop a command whose caller has stopped waiting; requeue messages that it received."""
        if job.is_answered:
            undo = undo_of(job.request.command, job.value)
            if undo is not None:
                self.begin(RabbitJob(Request(undo)), None)
        elif job.dispatch is not None:
            job.end()
            self._publisher.withdraw(job.dispatch)
        elif job.task is not None:
            job.task.cancel()

    # -- sends ---------------------------------------------------------------------------------

    def gather(self) -> None:
        """Keep the frames of sends until `write`."""
        self._sends.gather()

    def write(self) -> None:
        """Write frames that are waiting, without another turn of the loop."""
        for connection in self._connections:
            connection.write()

    def _begin_send(self, job: RabbitJob, command: Send) -> None:
        rows = _rows_of(command)
        path = command.path
        kept = [at for at, row in enumerate(rows) if row[_CONTENT_TYPE] != PING_CONTENT_TYPE]
        for at in kept:
            if rows[at][_SESSION] is not None:
                raise unsupported(NAME, Capability.SESSIONS, "a message with a session_id")
            if rows[at][_SCHEDULE] is not None:
                raise unsupported(NAME, Capability.SCHEDULING, "a scheduled message")
        receipt = SendReceipt([0] * len(rows))
        if not kept:
            job.task = asyncio.create_task(self._run(job, lambda: self._ping(path, receipt)))
            return
        if path.endswith(DEAD_LETTER_SUFFIX) or SUBSCRIPTIONS in path:
            job.task = asyncio.create_task(self._run(job, lambda: self._refuse_send(path)))
            return

        def encode(to_topic: bool) -> list[Publication]:  # noqa: FBT001 - as Publisher calls it
            now_s = self._clock.wall_us() // SECOND_US
            named = _named(rows, command.origin)
            return [published(rows[at], *named[at], now_s, to_topic=to_topic) for at in kept]

        def on_result(error: MessagingError | None) -> None:
            if error is None:
                job.answer(receipt)
            else:
                job.fail(error)

        job.dispatch = Dispatch(path, kept, encode, on_result)
        self._publisher.begin(job.dispatch)

    async def _ping(self, path: str, receipt: SendReceipt) -> SendReceipt:
        await self._prober.ping(path)
        return receipt

    async def _refuse_send(self, path: str) -> None:
        """Refuse a send to a queue that only the broker writes to."""
        await get_entity(self._receives, path)
        is_dead = path.endswith(DEAD_LETTER_SUFFIX)
        kind = EntityNotFoundError if is_dead else InvalidOperationError
        raise kind(f"{path} cannot be sent to directly; send to its queue or topic", path=path)

    # -- everything else -----------------------------------------------------------------------

    async def _settle(self, command: Settle) -> None:
        if command.disposition is Disposition.DEFER:
            raise unsupported(NAME, Capability.DEFERRING, "deferring a message")
        if command.disposition is Disposition.DEAD_LETTER:
            await self._publish_dead_letters(command)
        await self._keeper.settle(command)

    async def _publish_dead_letters(self, command: Settle) -> None:
        """Publish copies to the dead-letter queue; only then may the messages be acknowledged."""
        copies = self._keeper.copies(command)
        if not copies:
            return
        path = command.path
        if not path.endswith(DEAD_LETTER_SUFFIX):  # a dead letter stays in the same queue
            await declare_dead_letters(self._receives, path)
            path += DEAD_LETTER_SUFFIX
        done: asyncio.Future[MessagingError | None] = asyncio.get_running_loop().create_future()

        def on_result(error: MessagingError | None) -> None:
            if not done.done():
                done.set_result(error)

        dispatch = Dispatch(path, range(len(copies)), lambda _to_topic: copies, on_result)
        self._publisher.begin(dispatch)
        try:
            error = await done
        except asyncio.CancelledError:
            self._publisher.withdraw(dispatch)
            raise
        if error is not None:
            raise error

    async def _receive(self, command: Receive) -> pa.RecordBatch:
        if command.session is not None:
            raise unsupported(NAME, Capability.SESSIONS, "receiving from a session")
        return await self._keeper.receive(command)

    async def _create(self, command: CreateEntity) -> Any:
        return await self._topology.create(command.description, command.rule)

    async def _update(self, command: UpdateEntity) -> Any:
        raise UnsupportedCapabilityError(
            f"RabbitMQ cannot change the settings of {command.description.path} after its "
            "creation. Change them by a policy of the broker, or create another entity",
            capability=Capability.UPDATING.name,
            namespace=NAME,
        )

    async def _get(self, command: GetEntity) -> Any:
        return await self._topology.describe(command.path)

    async def _count(self, command: GetRuntimeProperties) -> Any:
        return await self._topology.count(command.path)

    async def _delete(self, command: DeleteEntity) -> None:
        await self._topology.delete(command.path)

    # -- the end -------------------------------------------------------------------------------

    async def close(self) -> None:
        """Finish commands in progress, requeue locked messages, and close the connections."""
        closed = NamespaceClosedError(NAMESPACE_CLOSED)
        waiting = [job for job in self._jobs if isinstance(job.request.command, Receive)]
        for job in waiting:
            if job.task is not None:
                job.task.cancel()
        patience = MAX_CLOSE_WAIT.total_seconds() / 2
        tasks = [job.task for job in self._jobs if job.task is not None]
        try:
            async with asyncio.timeout(patience):
                await asyncio.gather(*tasks, self._publisher.finish(), return_exceptions=True)
        except TimeoutError:
            pass
        self._publisher.fail_all(closed)
        ends = [connection.close() for connection in self._connections]
        try:
            async with asyncio.timeout(patience):
                await asyncio.gather(*ends, return_exceptions=True)
        except TimeoutError:  # the broker does not answer: do not wait any longer
            self.cut()
            await asyncio.sleep(0)  # lets pika close the sockets

    def cut(self) -> None:
        """Abort the connections; the next commands open new ones."""
        for connection in self._connections:
            connection.drop()
            connection.cut()


_HANDLERS: dict[type, Callable[[CommandRunner, Any], Any]] = {
    Receive: CommandRunner._receive,  # noqa: SLF001 - a table of its methods
    Settle: CommandRunner._settle,  # noqa: SLF001
    CreateEntity: CommandRunner._create,  # noqa: SLF001
    UpdateEntity: CommandRunner._update,  # noqa: SLF001
    GetEntity: CommandRunner._get,  # noqa: SLF001
    GetRuntimeProperties: CommandRunner._count,  # noqa: SLF001
    DeleteEntity: CommandRunner._delete,  # noqa: SLF001
}


# -- messages of a send ----------------------------------------------------------------------------


_ID, _SESSION, _CONTENT_TYPE, _SCHEDULE = map(
    APPLICATION_FIELDS.index,
    ("message_id", "session_id", "content_type", "scheduled_enqueue_time_utc"),
)


def _rows_of(command: Send) -> list[tuple[Any, ...]]:
    """Return the values of APPLICATION_FIELDS of each message of a send."""
    messages = command.messages
    count = messages.num_rows if isinstance(messages, pa.RecordBatch) else len(messages)
    if not 0 < count <= MAX_BATCH_MESSAGES:
        raise InvalidArgumentError(
            f"a send has {count} messages; it must have from 1 to {MAX_BATCH_MESSAGES}"
        )
    if command.origin is not None and len(command.origin.numbers) != count:
        raise InvalidArgumentError(
            f"the origin has {len(command.origin.numbers)} numbers for {count} messages. Give one "
            "number per message"
        )
    if isinstance(messages, pa.RecordBatch):
        return _values_of(conform(messages))
    return [application_values(message) for message in messages]


def _values_of(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """Return the rows of a batch; raise the error of BrokeredMessage if a row is invalid."""
    columns = columns_in_use(batch)
    check_values(columns)
    rows = list(values_of(batch))
    if _is_doubtful(columns):
        for row in rows:
            BrokeredMessage(*row)
    return rows


def _is_doubtful(columns: Mapping[str, pa.Array]) -> bool:
    """Whether a value may be outside of the bounds of its field."""
    texts = [columns[name] for name in BOUNDED_TEXTS if name in columns]
    lives = columns.get("time_to_live")
    return any(byte_lengths(text).max() > MAX_ID_CHARACTERS for text in texts) or (
        lives is not None and pc.min(lives.cast(pa.int64())).as_py() <= 0
    )


def _named(rows: Sequence[Sequence[Any]], origin: Origin | None) -> list[tuple[str, str | None]]:
    """Return the id and the origin text of each message."""
    if origin is None:
        return [(row[_ID] or uuid4().hex, None) for row in rows]
    known = origin.best_known
    source, numbers = known.source, known.numbers
    if isinstance(numbers, np.ndarray):
        numbers = numbers.tolist()
    return [
        (row[_ID] or message_id_of(source, number), f"{source}:{number}")
        for row, number in zip(rows, numbers, strict=True)
    ]
