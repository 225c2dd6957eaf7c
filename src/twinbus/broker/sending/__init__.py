"""Sending: checks sends, and stages their messages as rows of queues."""
