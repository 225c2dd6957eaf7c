"""How a client reaches a namespace: one small contract, several implementations."""
