"""The entities of a namespace, their rules, and their management."""
