"""The Service Bus dialect: what SDKs of Azure Service Bus send over AMQP, and what they expect."""
