"""RabbitMQ as a namespace: queues are quorum queues, topics are exchanges.

An event loop owns every pika connection. A caller that waits for its reply runs the loop, or a
thread of the namespace does. Other callers queue their commands. The modules, from the top down:

    namespace     the contract: queues commands, waits, closes; handles a fork
    driving       the event loop: which thread runs it, and how commands reach it
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
    refusals      which error of Twinbus a report of RabbitMQ or pika becomes

Nothing here retries: the retry policy of the client is the only one.
"""
