"""The Service Bus dialect: what SDKs of Azure Service Bus say over AMQP, and what they expect."""
