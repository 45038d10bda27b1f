"""Runs other projects' test suites at Kafka and through the proxy (`make test-foreign`, docs/foreign-tests.md)."""
