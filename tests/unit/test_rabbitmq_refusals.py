"""Each row of the table from what RabbitMQ and pika report to our errors."""

import pytest

pytest.importorskip("pika")

from pika import exceptions
from pika.adapters.utils.connection_workflow import (
    AMQPConnectionWorkflowFailed,
    AMQPConnectorSocketConnectError,
)

from twinbus.errors import (
    CommunicationError,
    EntityAlreadyExistsError,
    EntityNotFoundError,
    InvalidOperationError,
    MessageLockLostError,
    MessageSizeExceededError,
    MessagingError,
    QuotaExceededError,
    ServerBusyError,
    TransientError,
    UnauthorizedError,
)
from twinbus.namespace.rabbitmq.refusals import (
    blocked,
    blocked_too_long,
    lost,
    not_found,
    of_reply,
    refusal_of,
    refused,
    unreachable,
)
from twinbus.pairing.failures import counts_at_once, says_unavailable

REPLIES = [
    (403, "ACCESS_REFUSED - access to queue 'q' refused", UnauthorizedError, "not accepted"),
    (404, "NOT_FOUND - no queue 'q' in vhost '/'", EntityNotFoundError, "not accepted"),
    (
        404,
        "NOT_FOUND - home node 'a@b' of durable queue 'q' in vhost '/' is down or inaccessible",
        CommunicationError,
        "not accepted",
    ),
    (
        404,
        "NOT_FOUND - queue 'q' in vhost '/' process is stopped by supervisor; its node is down",
        CommunicationError,
        "not accepted",
    ),
    (404, "NOT_FOUND - no process of queue 'q' in vhost '/'", CommunicationError, "not accepted"),
    (
        405,
        "RESOURCE_LOCKED - cannot obtain exclusive access",
        InvalidOperationError,
        "not accepted",
    ),
    (
        406,
        "PRECONDITION_FAILED - message size 200 is larger than configured max size 100",
        MessageSizeExceededError,
        "not accepted",
    ),
    (
        406,
        "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out",
        MessageLockLostError,
        "not accepted",
    ),
    (
        406,
        "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'q'",
        EntityAlreadyExistsError,
        "not accepted",
    ),
    (
        406,
        "PRECONDITION_FAILED - exchange 'x' in vhost '/' in use",
        InvalidOperationError,
        "not accepted",
    ),
    (406, "PRECONDITION_FAILED - something else", MessagingError, "not accepted"),
    (200, "Normal shutdown", TransientError, "unknown"),
    (320, "CONNECTION_FORCED - broker forced connection closure", CommunicationError, "unknown"),
    (530, "NOT_ALLOWED - vhost gone not found", EntityNotFoundError, "not accepted"),
    (530, "NOT_ALLOWED - vhost 'v' is down", CommunicationError, "not accepted"),
    (530, "NOT_ALLOWED - access to vhost 'v' refused", UnauthorizedError, "not accepted"),
    (506, "RESOURCE_ERROR - Stream not found for queue", CommunicationError, "not accepted"),
    (540, "NOT_IMPLEMENTED - whatever", MessagingError, "not accepted"),
    (541, "INTERNAL_ERROR", CommunicationError, "unknown"),
]


@pytest.mark.parametrize(("code", "text", "kind", "outcome"), REPLIES)
def test_a_reply_of_the_broker_becomes_one_of_our_errors(
    code: int, text: str, kind: type[MessagingError], outcome: str
) -> None:
    error = of_reply(code, text, "orders")
    assert type(error) is kind
    assert error.outcome == outcome
    assert error.path == "orders"
    assert text in error.text
    for closed in (exceptions.ChannelClosedByBroker, exceptions.ConnectionClosedByBroker):
        assert type(refusal_of(closed(code, text), "orders")) is kind


@pytest.mark.parametrize(
    "cause",
    [
        exceptions.StreamLostError("gone"),
        exceptions.AMQPHeartbeatTimeout("silent"),
        exceptions.ConnectionWrongStateError("closed"),
        exceptions.ChannelWrongStateError("closed"),
        ConnectionResetError("reset"),
    ],
)
def test_a_connection_that_ends_leaves_the_outcome_unknown(cause: Exception) -> None:
    error = refusal_of(cause, "orders")
    assert isinstance(error, CommunicationError)
    assert error.outcome == "unknown"
    assert error.outcome == lost(cause).outcome


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (ConnectionRefusedError(111, "refused"), CommunicationError),
        (TimeoutError("no answer"), CommunicationError),
        (exceptions.IncompatibleProtocolError("HTTP"), CommunicationError),
        (exceptions.ProbableAuthenticationError("403 ACCESS_REFUSED"), UnauthorizedError),
        (
            exceptions.ProbableAccessDeniedError("(530) NOT_ALLOWED - vhost x not found"),
            EntityNotFoundError,
        ),
        (
            exceptions.ProbableAccessDeniedError("(530) NOT_ALLOWED - access to vhost refused"),
            UnauthorizedError,
        ),
        (exceptions.ConnectionClosedByBroker(530, "vhost x not found"), EntityNotFoundError),
    ],
)
def test_a_connection_that_cannot_be_opened_accepted_nothing(
    cause: Exception, kind: type[MessagingError]
) -> None:
    wrapped = AMQPConnectionWorkflowFailed([AMQPConnectorSocketConnectError(cause)])
    for reported in (cause, wrapped, exceptions.AMQPConnectionError(wrapped)):
        error = unreachable(reported, "host:5672")
        assert type(error) is kind
        assert error.outcome == "not accepted"


def test_a_blocked_connection_is_busy_and_later_an_outage() -> None:
    assert isinstance(blocked("low on memory"), ServerBusyError)
    assert not says_unavailable(blocked("low on memory"))
    assert says_unavailable(blocked_too_long("low on memory", 31))


def test_a_refused_message_counts_as_a_full_queue() -> None:
    assert isinstance(refused("orders"), QuotaExceededError)
    assert says_unavailable(refused("orders"))


def test_an_entity_that_is_not_there_is_the_fault_of_the_caller() -> None:
    assert not says_unavailable(not_found("orders"))


def test_no_channel_left_is_a_quota() -> None:
    assert isinstance(refusal_of(exceptions.NoFreeChannels(), ""), QuotaExceededError)


def test_our_own_errors_stay_what_they_are() -> None:
    error = QuotaExceededError("full")
    assert refusal_of(error, "orders") is error


def test_an_unexpected_failure_is_an_error_of_the_root_kind() -> None:
    error = refusal_of(ValueError("odd"), "orders")
    assert type(error) is MessagingError
    assert error.text.startswith("orders: the RabbitMQ client failed with ValueError('odd'). Check")


def test_a_send_to_another_queue_is_tried_again_when_the_client_leaves_a_silent_host() -> None:
    error = refusal_of(exceptions.ConnectionClosedByClient(200, "Normal shutdown"), "orders")
    assert error.is_transient
    assert not counts_at_once(error)


def test_a_lost_connection_names_the_queue_and_the_reason_once() -> None:
    error = refusal_of(exceptions.ChannelWrongStateError("Channel is closing."), "orders")
    assert error.text.startswith(
        "orders: the connection to RabbitMQ ended before the reply arrived (Channel is closing). "
    )


def test_a_refused_login_names_the_host_and_the_user() -> None:
    cause = exceptions.ConnectionClosedByBroker(403, "ACCESS_REFUSED - Login was refused")
    error = unreachable(exceptions.ProbableAuthenticationError(cause), "host:5672", "app")
    assert error.text.startswith("host:5672, user 'app': RabbitMQ reports 403 ")


def test_a_host_that_does_not_answer_is_reported_in_plain_words() -> None:
    cause = exceptions.AMQPConnectionError("Timeout while setting up AMQP to <AddressFamily>")
    assert unreachable(cause, "host:5672").text == (
        "the broker host:5672 cannot be reached: no answer within 3 s. Start it, or correct the "
        "Endpoint"
    )


def test_a_broker_that_refuses_connections_is_named_with_the_reason_and_the_next_step() -> None:
    refused_by_host = ConnectionRefusedError(111, "Connection refused")
    error = unreachable(AMQPConnectorSocketConnectError(refused_by_host), "host:5672")
    assert str(error) == (
        "the broker host:5672 cannot be reached: Connection refused. Start it, or correct the "
        "Endpoint"
    )
