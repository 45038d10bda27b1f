"""Our own Kafka client: connections to brokers, and the proxy's questions to Kafka."""
