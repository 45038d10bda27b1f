"""`make docs` builds the site without errors, and its pages load nothing from a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docs import ROOT

CONFIG = ROOT / "zensical.toml"
#: What a browser would fetch to show a page, as against a link that its reader may follow.
FETCHED = re.compile(
    r"""<(?:script|img|iframe)[^>]* src=["']?(https?:)?//|<link[^>]* href=["']?(https?:)?//|@import|url\(["']?https?:"""
)


def build(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    shutil.copy(CONFIG, directory)
    shutil.copytree(ROOT / "docs", directory / "docs")
    return directory


@pytest.fixture(scope="module")
def site(copy: Path) -> Path:
    built = build(copy)
    assert built.returncode == 0, built.stdout + built.stderr
    return copy / "build" / "site"


def pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(each)


def test_every_page_is_somewhere_in_the_navigation() -> None:
    named = list(pages(tomllib.loads(CONFIG.read_text("utf-8"))["project"]["nav"]))
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(there), "put it into nav of zensical.toml, where its reader looks for it"


def test_a_page_is_shown_without_a_network(site: Path) -> None:
    shown = list(site.rglob("*.html"))
    assert len(shown) > 20
    for file in (*shown, *site.rglob("*.css")):
        assert not FETCHED.search(file.read_text("utf-8")), file.relative_to(site)
    assert (site / "search.json").stat().st_size > 10_000


def test_broken_link_is_an_error(copy: Path, site: Path) -> None:
    page = copy / "docs" / "index.md"
    whole = page.read_text("utf-8")
    for proxied in ("no-such-page.md", "contract.md#no-such-heading"):
        page.write_text(f"{whole}\n[nowhere]({proxied})\n", "utf-8")
        assert build(copy).returncode != 0, proxied
