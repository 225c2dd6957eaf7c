"""Sending: from a send to the rows of queues."""
