"""Turns: which thread runs them, what happens in a turn, and the start from the log."""
