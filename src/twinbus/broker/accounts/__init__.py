"""Accounts: what was asked of a namespace, and what became of each message."""
