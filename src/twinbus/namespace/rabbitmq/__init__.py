"""RabbitMQ as a namespace: queues are quorum queues, topics are exchanges.

One thread of ours runs an event loop that owns every pika connection. Callers hand commands over
to it and wait for a reply. From the top down:

    namespace     the contract: hands commands over, waits, closes; survives a fork
    broker        runs on the loop: which part carries out which command
    publishing    sends: one channel per entity, publisher confirms, a bounded window
    receiving     receives and settlements: consumers that take no more than was asked for
    probing       pings: the path and the entity, without a message
    topology      queues, exchanges and bindings, and the descriptions they were created with
    connections   connections over a list of hosts, and channels whose calls can be awaited
    messages      a message as properties and headers, and back
    refusals      the table from what RabbitMQ and pika report to our errors

There is no retry in here: the retry policy of the client is the only one.
"""
