"""Errors of threads are raised, and so is that one does not end."""

from __future__ import annotations

import threading

import pytest

from tests.kit.threads import Worker, working


class Example(Worker):
    def __init__(self, *, fails: bool = False, hangs: bool = False) -> None:
        super().__init__("example")
        self._fails, self._hangs = fails, hangs

    def work(self) -> None:
        if self._fails:
            raise ValueError("an error")
        self.over.wait()
        if self._hangs:
            threading.Event().wait(1.0)


@pytest.mark.parametrize(("fails", "hangs"), [(False, False), (True, False), (False, True)])
def test_join_raises_what_is_wrong(fails: bool, hangs: bool) -> None:
    worker = Example(fails=fails, hangs=hangs)
    worker.start()
    worker.stop()
    if fails or hangs:
        with pytest.raises(AssertionError, match="example has ended: ValueError" if fails else "example does not end"):
            worker.join(0.2)
    else:
        worker.join(0.2)


def test_workers_run_until_the_end_and_their_error_is_raised() -> None:
    ended: list[str] = []

    def works(over: threading.Event) -> None:
        over.wait()
        ended.append("works")

    def fails(over: threading.Event) -> None:
        raise ValueError("an error")

    with pytest.raises(ValueError, match="an error"), working(works, fails):
        assert not ended
    assert ended == ["works"]
