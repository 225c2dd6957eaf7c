"""Accounts: the metered operations of a namespace, and the trail of its messages."""
