"""The commands of a namespace and their encoding; clients and servers use it."""
