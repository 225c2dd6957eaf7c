"""RabbitMQ as a namespace: queues are quorum queues, topics are exchanges.

A thread of the namespace runs an event loop that owns every pika connection. Callers queue commands
for the loop and wait for the replies. The modules, from the top down:

    namespace     the contract: queues commands, waits, closes; handles a fork
    runner        runs on the loop: which part executes which command
    publishing    sends: one channel per entity, publisher confirms, a bounded window
    receiving     receives and settlements: consumers that fetch no more than a receive wants
    probing       pings: the path and the entity, without a message
    topology      queues, exchanges and bindings, and the descriptions they were created with
    connections   connections over a list of hosts, and channels whose calls can be awaited
    framing       frames of messages and confirms, read and written without pika's objects
    columns       deliveries as columns
    layouts       properties with the same layout, read together
    messages      a message as properties and headers
    properties    properties and headers as bytes
    refusals      maps what RabbitMQ and pika report to our errors

Nothing here retries: the retry policy of the client is the only one.
"""
