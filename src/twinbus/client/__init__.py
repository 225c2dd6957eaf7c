"""What applications import: factories, clients, senders, receivers, the manager."""
