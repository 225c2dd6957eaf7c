"""Queues: the waiting messages of an entity, their locks and leases, and waiting requests."""
