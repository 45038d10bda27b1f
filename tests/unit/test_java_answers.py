"""The answers of Java's producers, without a JVM."""

from __future__ import annotations

from concurrent.futures import Future

from tests.kit.java import JavaError, JavaProducers


def test_only_the_first_answer_of_a_send_counts() -> None:
    future: Future[list[int]] = Future()
    java = JavaProducers.__new__(JavaProducers)
    java._waiting = {"1": future}
    java._answered("1\terror\tTimeoutException\tfirst")
    java._answered("1\terror\tClusterAuthorizationException\tsecond")
    error = future.exception(0)
    assert isinstance(error, JavaError)
    assert error.kind == "TimeoutException"
