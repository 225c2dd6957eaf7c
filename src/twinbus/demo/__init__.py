"""The demo of an outage: `twinbus demo`, and `make demo` in a clone.

outage, rabbitmq_outage    the sequence of events, with a Twinbus or a RabbitMQ primary
servers, fleet             the participants: servers, paired applications, a consumer
service_bus                applications and a consumer that use the SDK of Azure Service Bus
audit, page, display       the audit of every order; the HTML page; the terminal output
"""
