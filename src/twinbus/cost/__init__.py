"""Estimates the cost of an outage in advance, and reports it afterwards from the ledgers."""
