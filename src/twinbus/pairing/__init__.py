"""Pairing two namespaces so that sends keep succeeding while the primary is unavailable."""
