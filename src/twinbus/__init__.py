"""Twinbus keeps applications sending when their message broker is down."""
