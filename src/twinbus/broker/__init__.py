"""One namespace: pure decisions and a durable log. No network, no Spark."""
