"""The store: what a turn writes, the log it goes to, and where bodies lie."""
