"""Entities: which there are, their rules, and how they are managed."""
