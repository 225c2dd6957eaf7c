"""The client library that applications import: factories, clients, senders, receivers, manager."""
