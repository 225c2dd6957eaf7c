"""Counts the resources that commands use; the turn and the throttle compare them with limits."""


class ResourceCount:
    """The totals of a namespace; queues and histories of message ids add to them."""

    __slots__ = ("looked_at", "memory_bytes")

    def __init__(self) -> None:
        self.looked_at = 0  # number of rows that searches have read since the start
        self.memory_bytes = 0  # of waiting messages and remembered ids
