"""The status page as a browser shows it: its script, run by Node.js on a small document (`page.mjs`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fencepost_proxy.observability import status_server

FILES = Path(status_server.__file__).parent
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


@dataclass(frozen=True, slots=True)
class Case:
    """`answer`: the JSON response, an error text, or None for no response. `path`: of the page, with its query."""

    path: str
    answer: object
    date: str = "Fri, 15 Jan 2027 08:00:00 GMT"


@dataclass(frozen=True, slots=True)
class Rendered:
    """`asked`: what the page requested."""

    title: str
    html: str
    asked: list[str]

    @property
    def read(self) -> Reader:
        return Reader(self.html)


class Reader(HTMLParser):
    """Elements with their attributes, and the text: of the whole document, and by `id` of the innermost section."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.title = ""
        self.sections: dict[str, str] = {}
        self._section = ""
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"] or ""

    def handle_endtag(self, tag: str) -> None:
        self._section = "" if tag == "section" else self._section

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "title" and not self.title:
            self.title = data
        self.text += data
        self.sections[self._section] = self.sections.get(self._section, "") + data


def rendered(cases: Iterable[Case]) -> list[Rendered]:
    assert NODE is not None
    given = json.dumps([_as_json(each) for each in cases])
    script = Path(__file__).with_suffix(".mjs")
    done = subprocess.run([NODE, script, FILES], input=given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return [Rendered(**each) for each in json.loads(done.stdout)]


def _as_json(case: Case) -> Mapping[str, object]:
    return {"path": case.path, "answer": case.answer, "date": case.date}
