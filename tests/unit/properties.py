"""How properties are checked: the same way in every run, so that a failure replays."""

from hypothesis import settings

replayed = settings(derandomize=True, max_examples=60)
replayed_at_length = settings(replayed, max_examples=300)
