"""Queues: what may happen to waiting messages, and who waits for them."""
