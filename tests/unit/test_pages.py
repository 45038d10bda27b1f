"""Pages that are made from the sources are the ones that would be written now."""

from __future__ import annotations

import re

import pytest

from tests.pages import PAGES, glossary, logs, messages
from tests.support.docs import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text("utf-8") == PAGES[name](), "run: python -m tests.pages"


def test_glossary_is_short_sorted_and_owned_by_docstrings() -> None:
    assert list(glossary.TERMS) == sorted(glossary.TERMS)
    assert len(glossary.TERMS) <= 40
    for term, source in glossary.TERMS.items():
        docstring = glossary.docstring_of(source)
        first = re.split(r":| \(", docstring)[0].lower()
        # The docstrings of these two have other titles.
        assert first.endswith((term, f"{term}s")) or term in ("append", "conditional append")
        assert re.fullmatch(r"[A-Z][^|]{15,118}\.", glossary.definition_in(docstring, term)), term


@pytest.mark.parametrize(
    ("docstring", "definition"),
    [
        ("Fence: a producer id. `x`: more.", "A producer id."),
        ("The fences (KIP-98): read\n    twice.", "Read twice."),
        ("Fence of a partition: its log end.", "Fence of a partition: its log end."),
        ("What `fence.py` does.\n\nMore.", "What `fence.py` does."),
    ],
)
def test_definition_is_the_first_sentence(docstring: str, definition: str) -> None:
    assert glossary.definition_in(docstring, "fence") == definition


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
