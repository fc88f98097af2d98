"""Where events go by themselves: webhooks and MQTT, at least once each, by way of the outbox in the store."""
