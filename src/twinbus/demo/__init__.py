"""The demo of an outage: `twinbus demo`, and `make demo` in a clone.

outage, rabbitmq_outage    the story, with a primary of either kind
servers, fleet             what takes part: servers, paired applications, a consumer
service_bus                the same on the SDK of Azure Service Bus
audit, page, display       what became of every order; its page; the terminal
"""
