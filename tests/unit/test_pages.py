"""Pages that are made from the sources are the ones that would be written now."""

from __future__ import annotations

import re

import pytest

from tests.pages import PAGES, logs, messages
from tests.support.docs import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text("utf-8") == PAGES[name](), "run: python -m tests.pages"


def test_event_texts_hold_no_values_of_peers() -> None:
    """Values are in fields: there they are quoted, and cannot pass for another event."""
    rows = re.findall(r"^\| [\w ,]+ \| `[\w.]+` \| (.*) \| (?:`|–)", logs.page(), re.MULTILINE)

    assert len(rows) > 80
    assert [row for row in rows if "…" in row] == [
        # Which side, and how: two words each.
        "TLS is enabled on one side only: traffic, including SASL passwords, is plaintext …",
        "certificate …",
    ]


def test_texts_of_every_kind_are_found() -> None:
    assert {text.kind for text in messages.texts()} == set(messages.KINDS)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise X('boom')", ("exceptions", "boom")),
        ("def f(): return Refusal(44, 'name', f'NO {a}: ' 'b' + c)", ("refusals", "NO …: b…")),
        ("parser.add_argument('-x', help='Go')", ("command line", "Go")),
        ("_log.info('began', why='so it is')", ("log events", "began")),
        ("print(f'a: {\"one two\" if b else c}')", ("other", "one two")),
        ("print('a b' + f(c, 'd e'))", ("other", "d e")),
        ("TABLE = {'key': 'some more words'}", ("other", "some more words")),
    ],
)
def test_text_is_found(source: str, found: tuple[str, str]) -> None:
    assert found in [(each.kind, each.text) for each in messages.texts_in(source, "proxy/fencepost_proxy/a.py", {"X"})]


@pytest.mark.parametrize("source", ["'''Only a docstring.'''", "re.compile('one two')", "a['key']", "b = 'word'"])
def test_what_is_not_shown_is_left_out(source: str) -> None:
    assert list(messages.texts_in(source, "proxy/fencepost_proxy/a.py", set())) == []
