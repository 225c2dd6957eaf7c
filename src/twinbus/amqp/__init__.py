"""AMQP 1.0 without IO: codec, frames, messages, SASL, and connections of either role."""
