"""Turns: who has the turn, what happens in one, and the start from the log."""
