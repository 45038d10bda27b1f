"""Conformance cases: Kafka behavior that the promises depend on. `fencepost verify-broker` and `tests/conformance` run
them."""
