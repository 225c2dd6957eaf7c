"""The doors of a namespace process."""
