"""Retired words are not used again: tests/plain_language.py."""

from __future__ import annotations

import re

import pytest

from tests import plain_language


def test_no_retired_word_is_used() -> None:
    found = plain_language.findings()
    new = [each for each in found if not each.left]
    assert not new, "\n".join(map(str, new))
    left = {(row, phrase) for row in plain_language.LEFT for phrase in row.phrases.split(", ")}
    used = {
        (row, each.phrase)
        for row in plain_language.LEFT
        for each in found
        if each.left and re.search(row.files, each.file)
    }
    assert left <= used, "no longer used there: remove it from LEFT"


@pytest.mark.parametrize(
    ("file", "text", "phrase"),
    [
        ("proxy/a.py", "def f(): self._gate.read()", "gate"),
        ("proxy/a.py", "class GateReads: pass", "gate"),
        ("proxy/a.py", "f(tail_end=1)", "tail"),
        ("proxy/a.py", "def f(who): pass", "who"),
        ("proxy/a.py", "a = 'landed_at'", "landed"),
        ("proxy/a.py", "raise ValueError(f'no {thing} was told')", "told"),
        ("proxy/a.py", "'''Nobody knows.'''", "nobody"),
        ("proxy/a.py", "# the short\n# way", "short way"),
        ("proxy/door.py", "", "door"),
        ("docs/a.md", "Reading\nonce more.", "once more"),
        ("docs/a.md", "The key `limits.doubt_seconds` is", "doubt"),
        ("docs/a.md", "Who writes waits.", "who"),
        ("deploy/a.yaml", "# Whoever scrapes it", "whoever"),
        ("client/fencepost/spark/a.py", "chunk = 1", "chunk"),
        ("native/a.rs", "fn door_of(&self) {}", "door"),
        ("native/a.rs", "/// Once\n/// more.", "once more"),
        ("native/a.rs", 'f("it was \\"told\\"")', "told"),
        ("tests/a.py", "# no client was told", "told"),
    ],
)
def test_retired_word_is_found(file: str, text: str, phrase: str) -> None:
    assert [each.phrase for each in plain_language.findings_in(text, file)] == [phrase]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("proxy/a.py", "in_doubt = commit_tag = keep_alive = investigate = 1"),
        ("proxy/a.py", "mechanism = 'PLAIN'"),
        ("proxy/a.py", "from itertools import chain\nchain(1)"),
        ("proxy/a.py", "import ssl\nssl.wrap(1, server_side=True, c=ssl.place)"),
        ("proxy/a.py", "class A:\n    __slots__ = ()"),
        ("docs/a.md", "Operators who run ZooKeeper"),
        ("docs/a.md", "The leader waits for its followers. Turn it off."),
        ("docs/a.md", "The prior partition, in-doubt appends, [the page](other.md)"),
        ("docs/a.md", "A chunk of text"),
        ("native/a.rs", "fn read() { let b = 'x'; } // reads"),
    ],
)
def test_allowed_use_is_not_found(file: str, text: str) -> None:
    assert plain_language.findings_in(text, file) == []


def test_every_retired_phrase_can_be_found() -> None:
    for phrase in (each for phrases in plain_language.PHRASES.values() for each in phrases):
        file = "client/fencepost/spark/a.py" if phrase.row.files == "spark" else "proxy/a.py"
        source = f"# {' '.join(phrase.words)}" if phrase.row.only != "names" else f"{'_'.join(phrase.words)} = 1"
        assert " ".join(phrase.words) in [each.phrase for each in plain_language.findings_in(source, file)]
