"""Other projects' own tests, at Kafka and through the proxy (`make test-foreign`, docs/foreign-tests.md)."""
