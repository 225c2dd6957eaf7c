"""The store: what a turn writes, the log, and the positions of message bodies."""
