"""The server of a namespace: connections, protocols, configuration and administration."""
