"""Queues: the waiting messages of an entity, what may happen to them, and waiting receivers."""
