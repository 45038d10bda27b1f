"""Our own Kafka client: connections to brokers, and the proxy's own requests to Kafka."""
